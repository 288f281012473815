"""Bad input is refused before anything is written, with the numbers and the remedy."""

import pytest
import torch
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MllamaConfig,
    WhisperConfig,
)

from hf_static_kv import StaticContiguousCache, StaticContiguousLayer, cache_bytes
from tests.cache.conftest import PROMPT, assert_same, generate, snapshot, states, update
from tests.conftest import toy_config, toy_model


def update_twice(first, second):
    def act(cache):
        update(layer_idx=0, **first)(cache)
        update(layer_idx=1, **second)(cache)

    return act


def assign(name, value):
    return lambda cache: setattr(cache.layers[0], name, value)


# What is done to a cache of 2 layers, 2 batch rows, 2 heads of dim 4 and 8 positions that holds 5
# tokens, and what the message must say.
BAD_INPUT = {
    "too long by one": (
        update(tokens=4),
        r"holds 5 of at most 8.*cannot take 4.*max_cache_len >= 9.*prompt \+ max_new_tokens - 1 positions"
        r".*prompt_lookup_num_tokens - 2.*still holds its 5 tokens",
    ),
    "far too long": (update(tokens=100), r"cannot take 100 more.*max_cache_len >= 105"),
    "another batch than the text": (
        update(batch=1),
        r"batch 1.*cached sequences have batch 2.*reset",
    ),
    "heads": (update(heads=3), r"3 KV heads of dim 4.*allocated for 2 KV heads of dim 4"),
    "head_dim": (update(dim=5), r"2 KV heads of dim 5.*allocated for 2 KV heads of dim 4"),
    "value head_dim": (update(values=states(dim=6)), r"4 \(keys\) and 6 \(values\).*model\.config"),
    "dtype": (update(dtype=torch.float16), r"float16.*storage is.*float32.*nothing is cast"),
    "device": (update(device="meta"), r"meta.*storage is.*cpu"),
    "values of another dtype": (
        update(values=states(dtype=torch.float64)),
        r"float64.*storage is.*nothing is cast",
    ),
    "keys and values on unlike devices": (
        update(values=states(device="meta")),
        r"cpu.*meta.*move one",
    ),
    "keys and values of unlike length": (
        update(values=states(tokens=2)),
        r"\[2, 2, 1, 4\].*\[2, 2, 2, 4\].*agree",
    ),
    "three dims": (
        lambda cache: cache.update(torch.ones(2, 1, 4), torch.ones(2, 1, 4), 0),
        r"must both be \[batch",
    ),
    "no tokens": (update(tokens=0), r"no new tokens"),
    "layer index too large": (update(layer_idx=2), r"layer_idx=2.*layers 0 to 1"),
    "layer index negative": (update(layer_idx=-1), r"layer_idx=-1.*layers 0 to 1"),
    "unlike tokens in one step": (
        update_twice({"tokens": 2}, {"tokens": 1}),
        r"\(2, 1\) into a step.*\(2, 2\)",
    ),
    "crop beyond the start": (lambda cache: cache.crop(-6), r"crop\(-6\).*there are 5 tokens"),
    "crop to more than there is": (
        lambda cache: cache.crop(40),
        r"got 40.*only 5 tokens: nothing to remove",
    ),
    "positive crop": (lambda cache: cache.crop(3), r"got 3.*keep 3 of 5 tokens, call crop\(-2\)"),
    "advance without a step": (
        lambda cache: cache.advance(1),
        r"no step is in progress.*seq_len. is 5",
    ),
    "reorder: too few": (
        lambda cache: cache.reorder_cache(torch.tensor([0])),
        r"1 indices for a batch of 2",
    ),
    "reorder: out of range": (
        lambda cache: cache.reorder_cache(torch.tensor([0, 2])),
        r"Row 2.*rows 0 to 1",
    ),
    "select: negative": (
        lambda cache: cache.batch_select_indices(torch.tensor([-1])),
        r"Row -1.*rows 0 to 1",
    ),
    "select: a short mask": (
        lambda cache: cache.batch_select_indices(torch.tensor([True])),
        r"1 entries.*batch of 2",
    ),
    "select: none": (
        lambda cache: cache.batch_select_indices(torch.tensor([], dtype=torch.long)),
        r"at least one row",
    ),
    "repeat: too many rows": (
        lambda cache: cache.batch_repeat_interleave(2),
        r"4 rows.*has 2.*batch_size >= 4",
    ),
    "repeat: zero": (
        lambda cache: cache.batch_repeat_interleave(0),
        r"repeats must be a positive int, got 0",
    ),
    "assign: too long": (
        assign("keys", states(tokens=9)),
        r"keys are \[2, 2, 9, 4\].*holds up to \[2, 2, 8, 4\]",
    ),
    "assign: too many rows": (assign("values", states(batch=3)), r"values are \[3, 2, 1, 4\]"),
    "assign: heads": (assign("keys", states(heads=1)), r"keys are \[2, 1, 1, 4\]"),
    "assign: dtype": (assign("values", states(dtype=torch.float16)), r"float16"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_and_changes_nothing(name):
    act, message = BAD_INPUT[name]
    cache = StaticContiguousCache.allocate(
        2, 2, 4, 8, batch_size=2, dtype=torch.float32, device="cpu"
    )
    for layer_idx in (0, 1):
        numbers = torch.rand(2, 2, 5, 4)
        cache.update(numbers, -numbers, layer_idx)
    before, storage = snapshot(cache), (cache.key_storage.clone(), cache.value_storage.clone())
    with pytest.raises(ValueError, match=f"(?s){message}"):
        act(cache)
    assert_same(before, snapshot(cache))
    # There layer 0 has rightly written into the room behind the text.
    if name != "unlike tokens in one step":
        assert torch.equal(cache.key_storage, storage[0])
        assert torch.equal(cache.value_storage, storage[1])
    cache.reset()
    for layer_idx in (0, 1):
        cache.update(states(tokens=8), states(tokens=8), layer_idx)
    assert cache.seq_len == 8


def llama_cache(**kwargs):
    return StaticContiguousCache(LlamaConfig(num_hidden_layers=2, **kwargs), 8)


BAD_CONSTRUCTION = {
    "no room": (
        lambda: StaticContiguousCache(LlamaConfig(), 0),
        r"max_cache_len must be a positive int, got 0",
    ),
    "a float": (
        lambda: StaticContiguousCache(LlamaConfig(), 10.5),
        r"max_cache_len must be a positive int, got 10.5",
    ),
    "no layers": (
        lambda: StaticContiguousCache.allocate(0, 1, 1, 8, device="cpu"),
        r"num_layers.*got 0",
    ),
    "no heads": (
        lambda: StaticContiguousCache.allocate(2, 0, 1, 8, device="cpu"),
        r"num_kv_heads.*got 0",
    ),
    "one head count too few": (
        lambda: StaticContiguousCache.allocate(2, [1], 1, 8, device="cpu"),
        r"1 entries for 2",
    ),
    "no dim in one layer": (
        lambda: StaticContiguousCache.allocate(2, 1, [4, 0], 8, device="cpu"),
        r"head_dim\[1\]",
    ),
    "no rows": (
        lambda: StaticContiguousCache.allocate(2, 1, 1, 8, batch_size=0, device="cpu"),
        r"batch_size.*got 0",
    ),
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
    "positions of a decoder": (
        lambda: StaticContiguousCache(WhisperConfig(), 449),
        r"positions 0 to 447.*<= 448",
    ),
    "a recurrent model": (
        lambda: StaticContiguousCache(Mamba2Config(), 8),
        r"'mamba2'.*linear_attention",
    ),
    "RWKV": (
        lambda: StaticContiguousCache(AutoConfig.for_model("rwkv"), 8),
        r"'rwkv' keeps a recurrent",
    ),
    "cross-attention": (lambda: StaticContiguousCache(MllamaConfig(), 8), r"cross-attention"),
    "learned positions": (
        lambda: StaticContiguousCache(GPT2Config(), 1025),
        r"positions 0 to 1023.*<= 1024",
    ),
    "assigned before allocation": (
        lambda: assign("keys", states())(llama_cache()),
        r"no storage yet",
    ),
    "too long before allocation": (
        lambda: update(tokens=9)(llama_cache()),
        r"holds 0 of at most 8",
    ),
    "more rows than allocated": (
        lambda: update(batch=3, heads=1, dim=1)(
            StaticContiguousCache.allocate(
                2, 1, 1, 8, batch_size=2, dtype=torch.float32, device="cpu"
            )
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
    """A table of 20 learned positions:

    the 20th token is as without a cache, the 21st fails and costs nothing.
    """
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
    with pytest.raises(
        ValueError, match=r"has 2 layers and its config says 4.*num_hidden_layers = 2"
    ):
        StaticContiguousCache.from_model(model, 8)


def cut(model):
    model.model.layers = model.model.layers[:2]


def cut_in_the_middle(model):
    del model.model.layers[1]


def say_fewer(model):
    model.config.num_hidden_layers = 2


@pytest.mark.parametrize(
    ("shorten", "missing"), [(cut, "2, 3"), (cut_in_the_middle, "1"), (say_fewer, "2, 3")]
)
def test_a_model_with_fewer_layers_than_the_cache_is_refused_at_its_second_pass(shorten, missing):
    model = toy_model("llama", num_hidden_layers=4)
    cache = StaticContiguousCache(model.config, 40)
    shorten(model)
    with pytest.raises(ValueError, match=f"no step would be complete without layer {missing}\\. "):
        generate(model, PROMPT, cache)
    with (
        pytest.raises(ValueError, match="no step would be complete without layer"),
        torch.no_grad(),
    ):
        model(PROMPT[:, :3], past_key_values=cache)


@pytest.mark.parametrize("lookup", [1, 3, 6])
def test_the_room_that_prompt_lookup_needs(lookup):
    """prompt + max_new_tokens + prompt_lookup_num_tokens - 2, as the error says; every guess is
    right here.
    """
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


def test_use_cache_false_in_the_generation_config_is_said(caplog):
    model = toy_model("llama")
    model.generation_config.use_cache = False
    StaticContiguousCache.from_model(model, 8)
    assert "call generate with use_cache=True" in caplog.text
