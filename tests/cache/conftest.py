"""What the tests of the cache share: calls that fail, what a cache holds, states by hand."""

import torch

from hf_static_kv import attach, attachment

PROMPT = torch.tensor([[17, 93, 5, 64, 5, 88, 121, 40, 17, 93, 5]])
NEW_TOKENS = 8


class OutOfMemory(Exception):
    pass


def fail_once(model, layer_idx, at_call, before_write=False):
    """The layer raises in its `at_call`-th call, just before or just after it has written its keys
    and values.
    """
    layer = model.model.layers[layer_idx]
    calls = [0]

    def hook(module, args, kwargs):
        calls[0] += 1
        if calls[0] == at_call:
            raise OutOfMemory

    return (layer.self_attn if before_write else layer.mlp).register_forward_pre_hook(
        hook, with_kwargs=True
    )


def generate(model, ids, cache, **kwargs):
    how = {"use_cache": False} if cache is None else {"past_key_values": cache}
    new_tokens = max(3, PROMPT.shape[1] + NEW_TOKENS - ids.shape[1])
    mask = torch.ones_like(ids)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        **how,
        **kwargs,
    )


def snapshot(cache):
    """Everything that a reader can see."""
    visible = [(layer.keys, layer.values) for layer in cache.layers]
    return (
        cache.seq_len,
        cache.batch_size,
        [None if k is None else (k.clone(), v.clone()) for k, v in visible],
    )


def assert_same(before, after):
    assert before[:2] == after[:2]
    for one, other in zip(before[2], after[2], strict=True):
        assert (one is None) == (other is None)
        assert one is None or all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def states(batch=2, heads=2, tokens=1, dim=4, **kwargs):
    return torch.ones(batch, heads, tokens, dim, **kwargs)


def update(layer_idx=0, values=None, **kwargs):
    def act(cache):
        keys = states(**kwargs)
        cache.update(keys, keys if values is None else values, layer_idx)

    return act


def seeded_tokens(model, ids, seed=3, new=8, **how):
    torch.manual_seed(seed)
    how.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, max_new_tokens=new, **{"do_sample": False, **how})


def check_attached(model, calls, run):
    """`run(model, **call)` gives the same tokens after `attach`, from caches that are kept."""
    expected = [run(model, **how) for how in calls]
    attach(model, reuse_prefix=True)
    for how, tokens in zip(calls, expected, strict=True):
        assert torch.equal(run(model, **how), tokens)
    assert len(attachment(model).caches) > 0
