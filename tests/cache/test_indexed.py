"""Sparse attention: index keys beside keys and values, in layers of one head without values."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv import GraphDecoder, StaticContiguousCache, cache_bytes, compat, exact
from hf_static_kv.cache.layout import plan_layers
from tests.cache.conftest import check_attached, seeded_tokens
from tests.conftest import BATCH, PROMPT, tiny_model

PROMPT, BATCH = PROMPT.remainder(90), BATCH.remainder(90)
PADDED = torch.ones_like(BATCH)
PADDED[1, :3] = 0
CAPACITY, INDEX_DIM = 48, 16
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
# Many heads: with few of them all scores of a token may be zero, and equal scores have no order.
_LATENT = {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "index_topk": 4, "index_n_heads": 8, "index_head_dim": INDEX_DIM, **_EXPERTS,
}  # fmt: skip
FAMILIES = {
    "deepseek_v32": _LATENT,
    "axk2": _LATENT,
    "glm_moe_dsa": {**_LATENT, "indexer_types": ["full", "shared", "full", "shared"]},
    "hy_v4": {**_LATENT, "indexer_types": ["full", "shared", "full", "full"]},
    "qwen4_exp_text": {
        "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1, "indexer_head_dim": INDEX_DIM, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        **_EXPERTS,
    },
}  # fmt: skip
MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "padded": {"inputs": BATCH, "attention_mask": PADDED},
    "beams": {"num_beams": 3},
}
if not compat.index_keeps_positions():
    del FAMILIES["qwen4_exp_text"]
served = pytest.mark.parametrize("family", [name for name in FAMILIES if name in CONFIG_MAPPING])


@pytest.fixture(scope="module")
def models():
    made = {}

    def model_of(family):
        if family not in made:
            made[family] = tiny_model(family, **FAMILIES[family])
            made[family].generation_config.update(eos_token_id=None, pad_token_id=0)
        return made[family]

    return model_of


@pytest.fixture
def model(models):
    return models("deepseek_v32")


def run(model, inputs=PROMPT, **how):
    return seeded_tokens(model, inputs, **how)


@served
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_no_cache(family, mode, models):
    model, how = models(family), MODES[mode]
    expected = run(model, use_cache=False, **how)
    growing = StaticContiguousCache(model.config, 16)
    growing.grows = True
    for cache in (StaticContiguousCache.from_model(model, CAPACITY, batch_size=3), growing):
        assert torch.equal(run(model, past_key_values=cache, **how), expected)
        cache.reset()
    assert torch.equal(run(model, past_key_values=growing, **how), expected)


@served
def test_an_index_matters(family, models):
    """Tokens that are not selected would change the logits."""
    model, field = (
        copy.deepcopy(models(family)),
        "indexer_budget" if "qwen" in family else "index_topk",
    )
    wide = tiny_model(family, **{**FAMILIES[family], field: 64})
    wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (model(PROMPT).logits - wide(PROMPT).logits).abs().max() > 0.01


@served
def test_continuing_is_one_sequence(family, models):
    model, cache = models(family), StaticContiguousCache(models(family).config, CAPACITY)
    first = run(model, past_key_values=cache, new=4)
    ids = torch.cat([first, PROMPT[:, :3]], dim=1)
    kept = DynamicCache(config=model.config)
    run(model, past_key_values=kept, new=4)
    assert torch.equal(
        run(model, inputs=ids, past_key_values=cache), run(model, inputs=ids, past_key_values=kept)
    )


@served
def test_the_decoder_falls_back_and_says_why(family, models):
    model, decoder = models(family), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)
    assert torch.equal(
        run(model, past_key_values=cache, custom_generate=decoder), run(model, use_cache=False)
    )
    assert decoder.fallback_reason == "layers attend to the tokens that an index selects"


@served
def test_an_attached_model_keeps_its_tokens(family, models):
    model = copy.deepcopy(models(family))
    calls = [{}, {"inputs": PROMPT[:, :5]}, MODES["padded"], MODES["beams"], MODES["sampled"]]
    check_attached(model, calls, run)


# --- the contracts of a cache


@served
def test_bytes(family, models):
    model = models(family)
    plans, cache = (
        plan_layers(model.config),
        StaticContiguousCache.from_model(model, CAPACITY, batch_size=2),
    )
    number = sum(plan.index_shape is not None for plan in plans)
    assert (
        number
        == len(cache.index_layers)
        == {"glm_moe_dsa": 2, "hy_v4": 3, "qwen4_exp_text": 2}.get(family, 4)
    )
    assert cache.memory_bytes == cache_bytes(model.config, CAPACITY, 2, torch.float32)
    index = cache.storage_groups[-1]
    assert index.keys.shape == (number, 2, 1, CAPACITY, INDEX_DIM)
    assert index.num_bytes == number * 2 * CAPACITY * INDEX_DIM * 4


@pytest.mark.parametrize("act", ["crop", "select", "repeat", "grow", "pickle", "copy", "restore"])
def test_the_sequence_goes_on_after(model, act):
    """The logits of the next token are those of a whole pass, whatever became of the cache before."""
    cache = StaticContiguousCache.from_model(model, CAPACITY, batch_size=4)
    ids, address = BATCH, cache.storage_groups[-1].keys.data_ptr()
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        snapshot = cache.snapshot()
        if act in ("crop", "restore"):
            model(ids[:, -4:-1], past_key_values=cache)
            cache.crop(-3) if act == "crop" else cache.restore(snapshot)
        elif act == "select":
            cache.batch_select_indices(torch.tensor([1, 1, 0]))
            ids = ids[[1, 1, 0]]
        elif act == "repeat":
            cache.batch_repeat_interleave(2)
            ids = ids.repeat_interleave(2, dim=0)
        elif act == "grow":
            cache.grow(2 * CAPACITY)
        elif act in ("pickle", "copy"):
            cache = pickle.loads(pickle.dumps(cache)) if act == "pickle" else copy.deepcopy(cache)
        got = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(got, model(ids).logits[:, -1])
    assert cache.seq_len == ids.shape[1]
    assert cache.layers[0].indexer_keys.shape == (len(ids), ids.shape[1], INDEX_DIM)
    assert (cache.storage_groups[-1].keys.data_ptr() == address) == (
        act not in ("grow", "pickle", "copy")
    )


@served
@pytest.mark.parametrize("part", ["update", "update_indexer"])
@pytest.mark.parametrize("layer_idx", [0, -1], ids=["first", "last"])
def test_a_failed_pass_leaves_the_cache_as_before(family, part, layer_idx, models, monkeypatch):
    model = models(family)
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    if cache.stateful_layers:
        pytest.skip("states cannot go back")
    own, failing = getattr(cache, part), list(cache.index_layers)[layer_idx]

    def fail(*args):
        if args[-1] == failing:
            raise RuntimeError("this passes")
        return own(*args)

    with torch.no_grad():
        model(PROMPT[:, :4], past_key_values=cache)
        keys = cache.layers[failing].indexer_keys.clone()
        with monkeypatch.context() as patches:
            patches.setattr(cache, part, fail)
            with pytest.raises(RuntimeError, match="this passes"):
                model(PROMPT[:, 4:7], past_key_values=cache)
        assert cache.seq_len == 4
        assert torch.equal(cache.layers[failing].indexer_keys, keys)
        got = model(PROMPT[:, 4:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(got, model(PROMPT).logits[:, -1])
    assert {layer.length for layer in cache.kv_layers} == {PROMPT.shape[1]}


def test_positions_that_a_model_keeps_follow_the_sequence(models):
    if "qwen4_exp_text" not in FAMILIES:
        pytest.skip("this version of transformers keeps them elsewhere")
    model = models("qwen4_exp_text")
    cache = StaticContiguousCache.from_model(model, CAPACITY, batch_size=2)
    layer = cache.layers[next(iter(cache.index_layers))]
    with torch.no_grad():
        model(BATCH, past_key_values=cache)
    assert layer.indexer_position_ids.shape == (3, 2, BATCH.shape[1])
    layer.indexer_position_ids = torch.cat(
        [layer.indexer_position_ids, torch.zeros(3, 2, 5)], dim=-1
    )
    assert layer.indexer_position_ids.shape == (3, 2, BATCH.shape[1])  # as after a pass that failed
    cache.batch_select_indices(torch.tensor([1]))
    assert layer.indexer_position_ids.shape == (3, 1, BATCH.shape[1])
    cache.reset()
    assert layer.indexer_position_ids is None


@served
def test_a_pass_outside_no_grad(family, models):
    model, cache = models(family), StaticContiguousCache(models(family).config, CAPACITY)
    for ids in (PROMPT[:, :-1], PROMPT[:, -1:]):
        logits = model(ids, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, model(PROMPT).logits[:, -1])
    assert cache.seq_len == PROMPT.shape[1]


def test_index_keys_are_on_the_device_of_their_keys(model):
    """A cache that is built from a config learns the devices from the first pass, layer by layer."""
    cache, plans = StaticContiguousCache(model.config, 8), plan_layers(model.config)
    for layer_idx, device in enumerate(["cpu", "cpu", "meta", "meta"]):
        shape = plans[layer_idx].shape
        sizes = [
            (2, shape.num_kv_heads, 3, dim) for dim in (shape.key_head_dim, shape.value_head_dim)
        ]
        cache.update(*(torch.zeros(size, device=device) for size in sizes), layer_idx)
        assert (
            cache.update_indexer(torch.zeros(2, 3, INDEX_DIM, device=device), layer_idx).device.type
            == device
        )
    assert cache.seq_len == 3
    assert [layer.device.type for layer in cache.index_layers.values()] == [
        "cpu",
        "cpu",
        "meta",
        "meta",
    ]


# --- what is refused


def test_index_keys_that_do_not_fit(model, models):
    cache = StaticContiguousCache.from_model(model, 8)
    with pytest.raises(
        ValueError, match=f"1 KV heads of dim 3 .*allocated for 1 KV heads of dim {INDEX_DIM}"
    ):
        cache.update_indexer(torch.zeros(1, 2, 3), 0)
    with pytest.raises(
        ValueError, match="The cache is full: it holds 0 of at most 8 tokens and cannot take 9"
    ):
        cache.update_indexer(torch.zeros(1, 9, INDEX_DIM), 0)
    with torch.no_grad():
        model(PROMPT[:, :3], past_key_values=cache)
    cache = StaticContiguousCache.from_model(models("glm_moe_dsa"), 8)
    for layer_idx in (1, 4, -1):
        with pytest.raises(
            ValueError,
            match=f"Layer {layer_idx} brings index keys, and by the config .* it has none",
        ):
            cache.update_indexer(torch.zeros(1, 2, INDEX_DIM), layer_idx)


def test_attention_that_would_ignore_the_index(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation("static_contiguous")
    with pytest.raises(ValueError, match=r"by `indices`.*set_attn_implementation\('sdpa'\)"):
        model(PROMPT)
    with exact(model), pytest.raises((RuntimeError, ValueError)):
        model(PROMPT)
