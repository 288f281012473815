"""Nothing is lost: a forward pass that fails anywhere can be retried, and bad input is refused before it is written."""

import copy
import pickle
import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    BartConfig,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MllamaConfig,
    Qwen3NextConfig,
)

from hf_static_kv import GraphDecoder, StaticContiguousCache, StaticContiguousLayer, cache_bytes
from tests.conftest import toy_config, toy_model

PROMPT = torch.tensor([[17, 93, 5, 64, 5, 88, 121, 40, 17, 93, 5]])
NEW_TOKENS = 8


class OutOfMemory(Exception):
    pass


def fail_once(model, layer_idx, at_call, before_write=False):
    """The layer raises in its `at_call`-th call, just before or just after it has written its keys and values."""
    layer = model.model.layers[layer_idx]
    calls = [0]

    def hook(module, args, kwargs):
        calls[0] += 1
        if calls[0] == at_call:
            raise OutOfMemory

    return (layer.self_attn if before_write else layer.mlp).register_forward_pre_hook(hook, with_kwargs=True)


def generate(model, ids, cache, **kwargs):
    how = {"use_cache": False} if cache is None else {"past_key_values": cache}
    new_tokens = max(3, PROMPT.shape[1] + NEW_TOKENS - ids.shape[1])
    mask = torch.ones_like(ids)
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, **how, **kwargs
    )


def snapshot(cache):
    """Everything that a reader can see."""
    visible = [(layer.keys, layer.values) for layer in cache.layers]
    return cache.seq_len, cache.batch_size, [None if k is None else (k.clone(), v.clone()) for k, v in visible]


def assert_same(before, after):
    assert before[:2] == after[:2]
    for one, other in zip(before[2], after[2], strict=True):
        assert one is None or all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


EVERY_PLACE = [(layer_idx, True) for layer_idx in range(3)] + [(layer_idx, False) for layer_idx in range(2)]


@pytest.mark.parametrize("whole_steps", [0, 3], ids=["prefill", "decode"])
@pytest.mark.parametrize(("layer_idx", "before_write"), EVERY_PLACE)
def test_a_generation_that_failed_in_any_layer_goes_on(layer_idx, before_write, whole_steps):
    """The cache holds the whole steps and no more, and `generate` on it gives the tokens that it would have given."""
    model = toy_model("gemma3")
    expected = generate(model, PROMPT, None)
    cache = StaticContiguousCache.from_model(model, 40)
    hook = fail_once(model, layer_idx, at_call=whole_steps + 1, before_write=before_write)
    with pytest.raises(OutOfMemory):
        generate(model, PROMPT, cache)
    hook.remove()
    tokens = PROMPT.shape[1] + whole_steps - 1 if whole_steps else 0
    assert [layer.get_seq_length() for layer in cache.layers] == [tokens] * 3
    known = expected[:, : max(PROMPT.shape[1], tokens + 1)]
    assert generate(model, known, cache).tolist() == expected.tolist()


@pytest.mark.parametrize("tokens", [11, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize(("layer_idx", "before_write"), EVERY_PLACE)
def test_a_failed_forward_reads_as_before_and_can_be_retried(layer_idx, before_write, tokens, caplog):
    model = toy_model("gemma3")
    cache = StaticContiguousCache.from_model(model, 40)
    start = PROMPT.shape[1] - tokens
    with torch.no_grad():
        if start:
            model(PROMPT[:, :start], past_key_values=cache)
        expected = model(PROMPT).logits[:, -1].argmax()
        before = snapshot(cache)
        hook = fail_once(model, layer_idx, 1, before_write)
        with pytest.raises(OutOfMemory):
            model(PROMPT[:, start:], past_key_values=cache)
        hook.remove()
        assert_same(before, snapshot(cache))
        assert model(PROMPT[:, start:], past_key_values=cache).logits[:, -1].argmax() == expected
    assert cache.seq_len == PROMPT.shape[1]
    something_was_written = not (layer_idx == 0 and before_write)
    assert (f"did not finish: it is discarded, and writing starts again at position {start}" in caplog.text) == (
        something_was_written
    )


def test_a_failure_behind_the_last_layer_is_undone_with_crop():
    """In the head all layers have written, and the cache cannot know that the pass did not end well."""
    model = toy_model("llama")
    cache = StaticContiguousCache.from_model(model, 40)
    hook = fail_once(model, layer_idx=1, at_call=1)
    with torch.no_grad():
        with pytest.raises(OutOfMemory):
            model(PROMPT, past_key_values=cache)
        hook.remove()
        cache.crop(-PROMPT.shape[1])
        assert model(PROMPT, past_key_values=cache).logits[:, -1].argmax() == model(PROMPT).logits[:, -1].argmax()
    assert cache.seq_len == PROMPT.shape[1]


def test_a_smaller_retry_and_other_tokens_are_fine_too():
    model = toy_model("llama")
    cache = StaticContiguousCache(model.config, 40)
    hook = fail_once(model, 0, 1)
    with torch.no_grad():
        with pytest.raises(OutOfMemory):
            model(PROMPT, past_key_values=cache)
        hook.remove()
        for chunk in PROMPT.split(4, dim=1):
            logits = model(chunk, past_key_values=cache).logits
        assert logits[:, -1].argmax() == model(PROMPT).logits[:, -1].argmax()


# --- bad input: (what is done to a cache of 2 layers, 2 rows, 2 heads of dim 4 and 8 positions that holds 5 tokens,
#                 what the message must say)


def states(batch=2, heads=2, tokens=1, dim=4, **kwargs):
    return torch.ones(batch, heads, tokens, dim, **kwargs)


def update(layer_idx=0, values=None, **kwargs):
    def act(cache):
        keys = states(**kwargs)
        cache.update(keys, keys if values is None else values, layer_idx)

    return act


def update_twice(first, second):
    def act(cache):
        update(layer_idx=0, **first)(cache)
        update(layer_idx=1, **second)(cache)

    return act


def assign(name, value):
    return lambda cache: setattr(cache.layers[0], name, value)


BAD_INPUT = {
    "too long by one": (
        update(tokens=4),
        r"holds 5 of at most 8.*cannot take 4.*max_cache_len >= 9.*prompt \+ max_new_tokens - 1 positions"
        r".*prompt_lookup_num_tokens - 2.*still holds its 5 tokens",
    ),
    "far too long": (update(tokens=100), r"cannot take 100 more.*max_cache_len >= 105"),
    "another batch than the text": (update(batch=1), r"batch 1.*cached sequences have batch 2.*reset"),
    "heads": (update(heads=3), r"3 KV heads of dim 4.*allocated for 2 KV heads of dim 4"),
    "head_dim": (update(dim=5), r"2 KV heads of dim 5.*allocated for 2 KV heads of dim 4"),
    "value head_dim": (update(values=states(dim=6)), r"4 \(keys\) and 6 \(values\).*model\.config"),
    "dtype": (update(dtype=torch.float16), r"float16.*storage is.*float32.*nothing is cast"),
    "device": (update(device="meta"), r"meta.*storage is.*cpu"),
    "values of another dtype": (update(values=states(dtype=torch.float64)), r"float64.*storage is.*nothing is cast"),
    "keys and values on unlike devices": (update(values=states(device="meta")), r"cpu.*meta.*move one"),
    "keys and values of unlike length": (update(values=states(tokens=2)), r"\[2, 2, 1, 4\].*\[2, 2, 2, 4\].*agree"),
    "three dims": (lambda cache: cache.update(torch.ones(2, 1, 4), torch.ones(2, 1, 4), 0), r"must both be \[batch"),
    "no tokens": (update(tokens=0), r"no new tokens"),
    "layer index too large": (update(layer_idx=2), r"layer_idx=2.*layers 0 to 1"),
    "layer index negative": (update(layer_idx=-1), r"layer_idx=-1.*layers 0 to 1"),
    "unlike tokens in one step": (update_twice({"tokens": 2}, {"tokens": 1}), r"\(2, 1\) into a step.*\(2, 2\)"),
    "crop beyond the start": (lambda cache: cache.crop(-6), r"crop\(-6\).*there are 5 tokens"),
    "crop to more than there is": (lambda cache: cache.crop(40), r"got 40.*only 5 tokens: nothing to remove"),
    "positive crop": (lambda cache: cache.crop(3), r"got 3.*keep 3 of 5 tokens, call crop\(-2\)"),
    "advance without a step": (lambda cache: cache.advance(1), r"no step is in progress.*seq_len. is 5"),
    "reorder: too few": (lambda cache: cache.reorder_cache(torch.tensor([0])), r"1 indices for a batch of 2"),
    "reorder: out of range": (lambda cache: cache.reorder_cache(torch.tensor([0, 2])), r"Row 2.*rows 0 to 1"),
    "select: negative": (lambda cache: cache.batch_select_indices(torch.tensor([-1])), r"Row -1.*rows 0 to 1"),
    "select: a short mask": (lambda cache: cache.batch_select_indices(torch.tensor([True])), r"1 entries.*batch of 2"),
    "select: none": (lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)), r"at least one row"),
    "repeat: too many rows": (lambda cache: cache.batch_repeat_interleave(2), r"4 rows.*has 2.*batch_size >= 4"),
    "repeat: zero": (lambda cache: cache.batch_repeat_interleave(0), r"repeats must be a positive int, got 0"),
    "assign: too long": (assign("keys", states(tokens=9)), r"keys are \[2, 2, 9, 4\].*holds up to \[2, 2, 8, 4\]"),
    "assign: too many rows": (assign("values", states(batch=3)), r"values are \[3, 2, 1, 4\]"),
    "assign: heads": (assign("keys", states(heads=1)), r"keys are \[2, 1, 1, 4\]"),
    "assign: dtype": (assign("values", states(dtype=torch.float16)), r"float16"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_and_changes_nothing(name):
    act, message = BAD_INPUT[name]
    cache = StaticContiguousCache.allocate(2, 2, 4, 8, batch_size=2, dtype=torch.float32, device="cpu")
    for layer_idx in (0, 1):
        numbers = torch.rand(2, 2, 5, 4)
        cache.update(numbers, -numbers, layer_idx)
    before, storage = snapshot(cache), (cache.key_storage.clone(), cache.value_storage.clone())
    with pytest.raises(ValueError, match=f"(?s){message}"):
        act(cache)
    assert_same(before, snapshot(cache))
    if name != "unlike tokens in one step":  # there layer 0 has rightly written into the room behind the text
        assert torch.equal(cache.key_storage, storage[0])
        assert torch.equal(cache.value_storage, storage[1])
    cache.reset()
    for layer_idx in (0, 1):
        cache.update(states(tokens=8), states(tokens=8), layer_idx)
    assert cache.seq_len == 8


def llama_cache(**kwargs):
    return StaticContiguousCache(LlamaConfig(num_hidden_layers=2, **kwargs), 8)


BAD_CONSTRUCTION = {
    "no room": (lambda: StaticContiguousCache(LlamaConfig(), 0), r"max_cache_len must be a positive int, got 0"),
    "a float": (lambda: StaticContiguousCache(LlamaConfig(), 10.5), r"max_cache_len must be a positive int, got 10.5"),
    "no layers": (lambda: StaticContiguousCache.allocate(0, 1, 1, 8, device="cpu"), r"num_layers.*got 0"),
    "no heads": (lambda: StaticContiguousCache.allocate(2, 0, 1, 8, device="cpu"), r"num_kv_heads.*got 0"),
    "one head count too few": (lambda: StaticContiguousCache.allocate(2, [1], 1, 8, device="cpu"), r"1 entries for 2"),
    "no dim in one layer": (lambda: StaticContiguousCache.allocate(2, 1, [4, 0], 8, device="cpu"), r"head_dim\[1\]"),
    "no rows": (lambda: StaticContiguousCache.allocate(2, 1, 1, 8, batch_size=0, device="cpu"), r"batch_size.*got 0"),
    "windows": (
        lambda: StaticContiguousCache.allocate(2, 1, 1, 8, sliding_windows=[4], device="cpu"),
        r"sliding_windows has 1 entries for 2",
    ),
    "a window of none": (
        lambda: StaticContiguousCache.allocate(1, 1, 1, 8, sliding_windows=[0], device="cpu"),
        r"sliding_windows\[0\] must be a positive int",
    ),
    "from_model without rows": (
        lambda: StaticContiguousCache.from_model(toy_model("llama"), 8, batch_size=-1),
        r"batch_size.*got -1",
    ),
    "bytes of no room": (lambda: cache_bytes(LlamaConfig(), -5), r"max_cache_len.*got -5"),
    "an encoder-decoder": (lambda: StaticContiguousCache(BartConfig(), 8), r"'bart' is an encoder-decoder"),
    "a recurrent model": (lambda: StaticContiguousCache(Mamba2Config(), 8), r"'mamba2'.*linear_attention"),
    "a hybrid model": (lambda: StaticContiguousCache(Qwen3NextConfig(), 8), r"'qwen3_next'.*linear_attention"),
    "RWKV": (lambda: StaticContiguousCache(AutoConfig.for_model("rwkv"), 8), r"'rwkv' keeps a recurrent"),
    "cross-attention": (lambda: StaticContiguousCache(MllamaConfig(), 8), r"cross-attention"),
    "learned positions": (lambda: StaticContiguousCache(GPT2Config(), 1025), r"positions 0 to 1023.*<= 1024"),
    "assigned before allocation": (lambda: assign("keys", states())(llama_cache()), r"no storage yet"),
    "too long before allocation": (lambda: update(tokens=9)(llama_cache()), r"holds 0 of at most 8"),
    "more rows than allocated": (
        lambda: update(batch=3, heads=1, dim=1)(
            StaticContiguousCache.allocate(2, 1, 1, 8, batch_size=2, dtype=torch.float32, device="cpu")
        ),
        r"batch 3, the storage has 2 batch rows.*batch_size=3",
    ),
    "a layer alone, too long": (
        lambda: StaticContiguousLayer(max_cache_len=2).update(states(tokens=3), states(tokens=3)),
        r"at most 2",
    ),
}


@pytest.mark.parametrize("name", BAD_CONSTRUCTION)
def test_bad_construction_is_refused_by_name(name):
    act, message = BAD_CONSTRUCTION[name]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        act()


def test_too_long_a_prompt_allocates_nothing():
    cache = llama_cache()
    with pytest.raises(ValueError, match="cache is full"):
        update(tokens=9)(cache)
    assert cache.memory_bytes == 0


def test_one_dtype_for_all_layers():
    cache = llama_cache()
    update(layer_idx=0)(cache)
    with pytest.raises(ValueError, match=r"float16.*storage is.*float32"):
        update(layer_idx=1, dtype=torch.float16)(cache)


def test_advance_by_another_count_than_the_step_is_refused():
    cache = llama_cache()
    update(tokens=3)(cache)
    with pytest.raises(ValueError, match=r"advance\(2\): the step in progress has 3 tokens"):
        cache.advance(2)
    cache.advance(3)
    assert cache.seq_len == 3


def test_gpt2_up_to_its_last_position_and_no_further():
    """A table of 20 learned positions: the 20th token is as without a cache, the 21st fails and costs nothing."""
    model = toy_model("gpt2", max_position_embeddings=20)
    ids = torch.randint(3, 128, (1, 20))
    cache = StaticContiguousCache(model.config, 20)
    with torch.no_grad():
        reference = model(ids).logits
        for position in range(20):
            logits = model(ids[:, position : position + 1], past_key_values=cache).logits
            assert logits[0, -1].argmax() == reference[0, position].argmax()
        before = snapshot(cache)
        with pytest.raises(IndexError):  # GPT-2's own position table, before the cache is asked
            model(ids[:, :1], past_key_values=cache)
    assert_same(before, snapshot(cache))
    with pytest.raises(ValueError, match=r"positions 0 to 19.*max_cache_len=21.*<= 20"):
        StaticContiguousCache(toy_config("gpt2", max_position_embeddings=20), 21)


# A fit, and one thing at a time that is not: (dims of keys and values, dtypes, tokens there)
FIT = {
    "keys": (2, 2, 1, 2),
    "values": (2, 2, 1, 2),
    "dtypes": (torch.float32, torch.float32),
    "length": 1,
}
UNFIT = [
    {},
    {"keys": (2, 2, 2, 2), "values": (2, 2, 2, 2)},
    {"keys": (2, 2, 3, 2), "values": (2, 2, 3, 2)},
    {"keys": (2, 2, 3, 2), "values": (2, 2, 3, 2), "length": 0},
    {"keys": (1, 2, 1, 2), "values": (1, 2, 1, 2)},
    {"keys": (1, 2, 1, 2), "values": (1, 2, 1, 2), "length": 0},
    {"keys": (3, 2, 1, 2), "values": (3, 2, 1, 2), "length": 0},
    {"keys": (2, 1, 1, 2), "values": (2, 1, 1, 2)},
    {"keys": (2, 2, 1, 3)},
    {"values": (2, 2, 1, 3)},
    {"values": (2, 2, 2, 2)},
    {"keys": (2, 2, 0, 2), "values": (2, 2, 0, 2)},
    {"dtypes": (torch.float16, torch.float32)},
    {"dtypes": (torch.float32, torch.float16)},
]


@pytest.mark.parametrize("change", UNFIT, ids=str)
def test_a_layer_refuses_states_that_do_not_fit(change):
    case = {**FIT, **change}
    layer = StaticContiguousLayer(max_cache_len=3)
    layer.lazy_initialization(torch.ones(2, 2, 0, 2), torch.ones(2, 2, 0, 2))
    if case["length"]:
        layer.update(torch.ones(2, 2, case["length"], 2), torch.ones(2, 2, case["length"], 2))
    keys = torch.ones(case["keys"], dtype=case["dtypes"][0])
    values = torch.ones(case["values"], dtype=case["dtypes"][1])
    try:
        layer.check(keys, values)
        refused = False
    except ValueError:
        refused = True
    fits = [{}, {"keys": (2, 2, 2, 2), "values": (2, 2, 2, 2)}, UNFIT[3], UNFIT[5]]
    assert refused is (change not in fits)


def test_a_model_cut_shorter_than_its_config_is_refused():
    """Its last layer would never write, so no step would ever be complete."""
    model = toy_model("llama", num_hidden_layers=4)
    model.model.layers = model.model.layers[:2]
    with pytest.raises(ValueError, match=r"has 2 layers and its config says 4.*num_hidden_layers = 2"):
        StaticContiguousCache.from_model(model, 8)


def cut(model):
    model.model.layers = model.model.layers[:2]


def cut_in_the_middle(model):
    del model.model.layers[1]


def say_fewer(model):
    model.config.num_hidden_layers = 2


@pytest.mark.parametrize(("shorten", "missing"), [(cut, "2, 3"), (cut_in_the_middle, "1"), (say_fewer, "2, 3")])
def test_a_model_with_fewer_layers_than_the_cache_is_refused_at_its_second_pass(shorten, missing):
    model = toy_model("llama", num_hidden_layers=4)
    cache = StaticContiguousCache(model.config, 40)
    shorten(model)
    with pytest.raises(ValueError, match=f"no step would be complete without layer {missing}\\. "):
        generate(model, PROMPT, cache)
    with pytest.raises(ValueError, match="no step would be complete without layer"), torch.no_grad():
        model(PROMPT[:, :3], past_key_values=cache)


def test_a_pass_that_fails_again_and_again_can_still_be_retried():
    model = toy_model("llama", num_hidden_layers=4)
    cache = StaticContiguousCache(model.config, 40)
    with torch.no_grad():
        for tokens in (11, 11, 4, 1, 7):
            hook = fail_once(model, 2, 1)
            with pytest.raises(OutOfMemory):
                model(PROMPT[:, :tokens], past_key_values=cache)
            hook.remove()
        assert model(PROMPT, past_key_values=cache).logits[:, -1].argmax() == model(PROMPT).logits[:, -1].argmax()


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 1, 0], [3, 0, 1, 2]], ids=str)
def test_layers_that_run_in_another_order_than_their_numbers(order):
    model = toy_model("llama", num_hidden_layers=4)
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in order])
    expected = generate(model, PROMPT, None).tolist()
    assert generate(model, PROMPT, StaticContiguousCache(model.config, 40)).tolist() == expected
    assert generate(model, PROMPT, StaticContiguousCache.from_model(model, 40)).tolist() == expected


# --- threads


def in_thread(act):
    """Run `act` in another thread and return what it returned or raised."""
    results = []

    def run():
        try:
            results.append(act())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    return results[0]


@pytest.mark.parametrize("at_call", [1, 3], ids=["amid the prefill", "amid a decode step"])
@pytest.mark.parametrize("module", ["model.layers.0.mlp", "model.layers.1.mlp", "lm_head"])
def test_a_second_thread_is_refused_and_the_first_goes_on(module, at_call):
    """In `lm_head` no step is open: the first thread is between two steps of its `generate`."""
    model, other = toy_model("llama"), toy_model("llama")
    expected = generate(model, PROMPT, None).tolist()
    cache = StaticContiguousCache(model.config, 40)
    refused, calls = [], [0]

    def hook(*_):
        calls[0] += 1
        if calls[0] == at_call:
            refused.append(in_thread(lambda: generate(other, PROMPT.flip(1), cache)))

    model.get_submodule(module).register_forward_pre_hook(hook)
    assert generate(model, PROMPT, cache).tolist() == expected
    (error,) = refused
    assert isinstance(error, RuntimeError)
    assert "one for each thread" in str(error)


@pytest.mark.parametrize("loop", [{}, {"custom_generate": GraphDecoder()}], ids=["plain", "decoder"])
def test_a_turn_may_begin_as_soon_as_the_stream_of_the_last_one_has_ended(loop):
    """The thread of a streamed call is still inside of `generate` for a moment."""
    model, ended = toy_model("llama"), threading.Event()
    cache = StaticContiguousCache(model.config, 64)

    class Stream:
        def put(self, value):
            pass

        def end(self):
            ended.set()
            time.sleep(0.1)

    first = threading.Thread(target=lambda: generate(model, PROMPT, cache, streamer=Stream(), **loop))
    first.start()
    assert ended.wait(60)
    cache.reset()
    assert generate(model, PROMPT, cache, **loop).tolist() == generate(model, PROMPT, None).tolist()
    first.join()


def test_a_method_that_waits_for_the_thread_of_a_call_is_no_second_user():
    model = toy_model("llama")
    cache = StaticContiguousCache(model.config, 64)
    longer = torch.cat([generate(model, PROMPT, cache), PROMPT], dim=1)
    expected = generate(model, longer, None).tolist()

    class Chat(torch.nn.Module):
        def stream(self, ids, past_key_values):
            return in_thread(lambda: generate(model, ids, past_key_values))

    assert Chat().stream(longer, past_key_values=cache).tolist() == expected


def test_threads_without_a_model_do_not_share_a_step():
    cache = StaticContiguousCache.allocate(3, 2, 4, 8, batch_size=2, dtype=torch.float32, device="cpu")
    update(layer_idx=0)(cache)
    error = in_thread(lambda: update(layer_idx=1)(cache))
    assert isinstance(error, RuntimeError)
    assert "one for each thread" in str(error)


def test_threads_may_use_a_cache_one_after_the_other():
    model = toy_model("llama")
    expected = generate(model, PROMPT, None)
    cache = StaticContiguousCache(model.config, 40)
    assert in_thread(lambda: generate(model, expected[:, :13], cache)).tolist() == expected.tolist()
    cache.reset()
    hook = fail_once(model, 0, at_call=3)  # in the third step; the retry is made by another thread
    assert isinstance(in_thread(lambda: generate(model, PROMPT, cache)), OutOfMemory)
    hook.remove()
    known = expected[:, : cache.seq_len + 1]
    assert in_thread(lambda: generate(model, known, cache)).tolist() == expected.tolist()


def test_each_thread_may_have_a_copy():
    """The copy goes on in another thread while this one is inside a pass on the original."""
    model = toy_model("llama")
    expected = generate(model, PROMPT, None).tolist()
    cache = StaticContiguousCache.from_model(model, 40)
    with torch.no_grad():
        model(PROMPT[:, :4], past_key_values=cache)
    copied, results = copy.deepcopy(cache), []
    other = toy_model("llama")
    model.lm_head.register_forward_pre_hook(
        lambda *_: results.append(in_thread(lambda: generate(other, PROMPT, copied)))
    )
    with torch.no_grad():
        model(PROMPT[:, 4:], past_key_values=cache)
    assert [result.tolist() for result in results] == [expected]


def test_a_pickled_cache_goes_on_with_the_same_tokens():
    model = toy_model("gemma3")
    expected = generate(model, PROMPT, None)
    cache = StaticContiguousCache.from_model(model, 4096)
    with torch.no_grad():
        model(PROMPT[:, :9], past_key_values=cache)
    pickled = pickle.dumps(cache)
    assert len(pickled) < cache.memory_bytes / 50
    loaded = pickle.loads(pickled)
    assert loaded.memory_bytes == cache.memory_bytes
    assert generate(model, PROMPT, loaded).tolist() == expected.tolist()


@pytest.mark.parametrize("lookup", [1, 3, 6])
def test_the_room_that_prompt_lookup_needs(lookup):
    """prompt + max_new_tokens + prompt_lookup_num_tokens - 2, as the error says; every guess is right here."""
    model, ids = toy_model("llama"), torch.tensor([[5, 6, 7, 8] * 3])

    def always_repeat(input_ids, scores):
        return torch.full_like(scores, -1e9).index_fill(1, ids[0, input_ids.shape[1] % 4], 0.0)

    def run(max_cache_len):
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=StaticContiguousCache(model.config, max_cache_len),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            prompt_lookup_num_tokens=lookup,
            logits_processor=[always_repeat],
        )

    assert run(ids.shape[1] + 8 + lookup - 2).shape[1] == ids.shape[1] + 8
    with pytest.raises(ValueError, match=f"max_cache_len >= {ids.shape[1] + 8 + lookup - 2}, or"):
        run(ids.shape[1] + 8 + lookup - 3)


# --- rows of the batch


def rows_in_order(cache):
    return [layer.keys[:, 0, :, 0].tolist() for layer in cache.layers]


def three_rows():
    cache = StaticContiguousCache.allocate(4, [1, 1, 2, 2], 4, 8, batch_size=3, dtype=torch.float32, device="cpu")
    for layer_idx, heads in enumerate([1, 1, 2, 2]):
        numbers = torch.arange(6.0).view(3, 1, 2, 1).expand(3, heads, 2, 4) + 10 * layer_idx
        cache.update(numbers, -numbers, layer_idx)
    return cache


@pytest.mark.parametrize("at_call", [1, 2, 3, 4])
def test_reordering_without_memory_changes_nothing(monkeypatch, at_call):
    cache = three_rows()
    before, calls, real = snapshot(cache), [0], torch.Tensor.new_empty

    def new_empty(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at_call:
            raise OutOfMemory
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        with pytest.raises(OutOfMemory):
            cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert_same(before, snapshot(cache))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert rows_in_order(cache)[3] == [[34, 35], [30, 31], [30, 31]]


def test_while_rows_are_copied_nothing_is_allocated():
    """With scratch taken, each layer costs two selections into it and two copies out of it."""

    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    cache = three_rows()
    with Operations() as operations:
        cache.reorder_cache(torch.tensor([1, 2, 0]))
    last_allocation = max(i for i, name in enumerate(operations.names) if "empty" in name)
    assert last_allocation < operations.names.index("index_select.out")
    assert "index_select.default" not in operations.names


def test_an_interrupt_while_rows_are_copied_empties_the_cache(monkeypatch):
    cache = three_rows()
    monkeypatch.setattr(cache.layers[2], "select_rows", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.seq_len == 0


# --- gradients


def test_a_forward_pass_outside_no_grad_gives_the_logits():
    model = toy_model("gemma3")
    ours, theirs = StaticContiguousCache(model.config, 40), DynamicCache(config=model.config)
    for ids in PROMPT.split([6, 4, 1], dim=1):
        logits = model(ids, past_key_values=ours).logits
        assert torch.equal(logits, model(ids, past_key_values=theirs).logits)
    assert not ours.key_storage.requires_grad
    assert ours.key_storage.grad_fn is None
    cache = StaticContiguousCache.from_model(model, 40)
    with torch.no_grad():
        assert torch.equal(model(PROMPT, past_key_values=cache).logits[:, -1:].argmax(), logits.argmax())


@pytest.mark.parametrize("passes", [[11], [6, 5], [10, 1]], ids=str)
@pytest.mark.parametrize("what", ["all", "embeddings"])
def test_a_backward_pass_through_the_cache_raises(passes, what):
    model = toy_model("llama")
    model.train()
    cache = StaticContiguousCache(model.config, 40)
    for ids in PROMPT.split(passes, dim=1):
        logits = model(ids, past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="Gradients cannot flow through a StaticContiguousCache"):
        logits.sum().backward() if what == "all" else torch.autograd.grad(logits.sum(), model.model.embed_tokens.weight)


def test_a_frozen_model_behind_a_prompt_with_gradients_raises_too():
    """Only the first pass's embeddings require grad: their gradient through the cache must not silently be missing."""
    model = toy_model("llama").requires_grad_(False)
    cache = StaticContiguousCache(model.config, 40)
    embeds = model.get_input_embeddings()(PROMPT[:, :6]).requires_grad_()
    model(inputs_embeds=embeds, past_key_values=cache)
    logits = model(PROMPT[:, 6:], past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="Gradients cannot flow"):
        (logits.sum() + embeds.sum()).backward()
    cache.reset()
    assert not model(PROMPT, past_key_values=cache).logits.requires_grad


def test_assigned_states_with_gradients_leave_the_storage_out_of_the_graph():
    cache = StaticContiguousCache.allocate(1, 2, 4, 8, batch_size=2, dtype=torch.float32, device="cpu")
    cache.layers[0].keys = states(requires_grad=True)
    assert not cache.key_storage.requires_grad


def test_a_failed_pass_leaves_the_batch_as_it_was():
    model = toy_model("llama")
    cache = StaticContiguousCache.from_model(model, 40, batch_size=4)
    hook = fail_once(model, 0, 1)
    with pytest.raises(OutOfMemory), torch.no_grad():
        model(PROMPT, past_key_values=cache)
    hook.remove()
    assert cache.batch_size == 4


def test_use_cache_false_in_the_generation_config_is_said(caplog):
    model = toy_model("llama")
    model.generation_config.use_cache = False
    StaticContiguousCache.from_model(model, 8)
    assert "call generate with use_cache=True" in caplog.text
