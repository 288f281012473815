"""Hybrid models: keys and values in our layers, recurrent states in transformers' own."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv import GraphDecoder, StaticContiguousCache, attached, attachment, cache_bytes
from hf_static_kv.cache.passes import UnfinishedPass
from hf_static_kv.cache.states import Continuation, continuation_of, state_tensors
from hf_static_kv.program.step import DecodeStep
from tests.cache.conftest import check_attached, seeded_tokens
from tests.conftest import BATCH, PROMPT
from tests.hybrids import FAMILIES, hybrid_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, BATCH = (ids.remainder(90).to(DEVICE) for ids in (PROMPT, BATCH))
PADDED = torch.ones_like(BATCH).index_fill(1, torch.arange(3, device=DEVICE), 0)
PADDED[0] = 1
CAPACITY = 48
MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "padded": {"inputs": BATCH, "attention_mask": PADDED},
    "beams": {"num_beams": 3},
    "chunked prompt": {"prefill_chunk_size": 5},
}
served = pytest.mark.parametrize("family", [name for name in FAMILIES if name in CONFIG_MAPPING])
# These run in the loop of `generate`, and say why.
LOOPED = {
    "zamba": "layer 2 has no attention of its own",
    "zamba2": "layer 1 has no attention of its own",
    "inkling_text": "the scores have a position bias",
}


@pytest.fixture(scope="module")
def models():
    made = {}

    def model_of(family):
        if family not in made:
            made[family] = hybrid_model(family).to(DEVICE)
        return made[family]

    return model_of


def run(model, inputs=PROMPT, **how):
    return seeded_tokens(model, inputs, **how)


@served
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_no_cache(family, mode, models):
    model, how = models(family), MODES[mode]
    expected = run(model, **how)
    if mode in ("greedy", "sampled", "beams"):
        assert torch.equal(expected, run(model, use_cache=False, **how))
    cache = StaticContiguousCache.from_model(model, CAPACITY, batch_size=3)
    assert torch.equal(run(model, past_key_values=cache, **how), expected)
    cache.reset()
    assert torch.equal(run(model, past_key_values=cache, **how), expected)


@served
def test_generate_neither_compiles_nor_prepares_masks(family, models):
    assert not StaticContiguousCache(models(family).config, CAPACITY).is_compileable


@served
def test_a_captured_step_moves_the_states(family, models):
    model, decoder = models(family), GraphDecoder()
    cache = StaticContiguousCache.from_model(model, CAPACITY, batch_size=2)
    decoder.show_no_warnings()
    for how in (MODES["greedy"], MODES["sampled"], MODES["padded"], {"inputs": PROMPT + 1}):
        cache.reset()
        assert torch.equal(
            run(model, past_key_values=cache, custom_generate=decoder, **how), run(model, **how)
        )
        if family in LOOPED:
            assert LOOPED[family] in decoder.fallback_reason
        else:
            assert decoder.fallback_reason is None


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_verification_begins_with_the_states_of_the_prompt(family, models, monkeypatch):
    """On a GPU no kernel runs while a pass is recorded, so states come from memory that nobody has
    written.
    """
    own, decoder = DecodeStep.record, GraphDecoder()

    def record(step, *args, **kwargs):
        own(step, *args, **kwargs)
        for layer in step.cache.layers:
            for state in state_tensors(layer):
                state.fill_(float("nan"))

    monkeypatch.setattr(DecodeStep, "record", record)
    cache = StaticContiguousCache.from_model(models(family), CAPACITY)
    got = run(models(family), past_key_values=cache, custom_generate=decoder)
    assert decoder.fallback_reason is None
    assert torch.equal(got, run(models(family)))


@served
def test_continuing_is_one_sequence(family, models):
    model, cache = models(family), StaticContiguousCache(models(family).config, CAPACITY)
    for decoder in (None, GraphDecoder()):
        cache.reset()
        first = run(model, past_key_values=cache, new=4)
        ids = torch.cat([first, PROMPT[:, :3]], dim=1)
        got = run(model, inputs=ids, past_key_values=cache, custom_generate=decoder)
        kept = DynamicCache(config=model.config)
        run(model, past_key_values=kept, new=4)
        assert torch.equal(got, run(model, inputs=ids, past_key_values=kept))


@served
def test_an_attached_model_keeps_its_tokens(family, models):
    model = copy.deepcopy(models(family))
    calls = [{}, {"inputs": PROMPT[:, :5]}, MODES["padded"], MODES["beams"], MODES["sampled"]]
    check_attached(model, calls, run)
    if family not in LOOPED and DEVICE == "cuda":
        assert attachment(model).fallback_reason is None


def test_an_end_token_stops_the_states_with_the_tokens():
    model, decoder = hybrid_model("qwen3_5_text").to(DEVICE), GraphDecoder()
    plain = run(model, new=12)
    end = int(plain[0, PROMPT.shape[1] + 5])
    cache, kept = StaticContiguousCache(model.config, CAPACITY), DynamicCache(config=model.config)
    first = run(model, new=12, eos_token_id=end, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(first, run(model, new=12, eos_token_id=end, past_key_values=kept))
    more = torch.cat([first, PROMPT[:, :2]], dim=1)
    got = run(model, inputs=more, past_key_values=cache, custom_generate=decoder)
    assert torch.equal(got, run(model, inputs=more, past_key_values=kept))


# --- what a cache of two parts says


def test_bytes_of_both_parts():
    model = hybrid_model("qwen3_5_text").to(DEVICE)
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    keys = cache_bytes(model.config, CAPACITY, dtype=torch.float32)
    assert cache.memory_bytes == keys == cache.key_storage.nbytes + cache.value_storage.nbytes
    run(model, past_key_values=cache)
    states = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    parts = [part for layer in states for part in (layer.conv_states, layer.recurrent_states)]
    tensors = [tensor for part in parts for tensor in part.values()]
    assert len(states) == 2
    assert cache.memory_bytes == keys + sum(tensor.nbytes for tensor in tensors)


def test_a_state_cannot_go_back():
    model = hybrid_model("qwen3_5_text").to(DEVICE)
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    cache.crop(0)
    tokens = run(model, past_key_values=cache)
    cache.crop(0)
    with pytest.raises(
        ValueError, match=r"crop\(-2\): 2 of 4 layers keep a recurrent state.*reset\(\)"
    ):
        cache.crop(-2)
    assert cache.seq_len == tokens.shape[1] - 1
    assert not cache.is_croppable


def fail(*args):
    raise OSError("it failed")


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_pass_that_fails_on_the_way_is_never_continued(family, when, models):
    model = copy.deepcopy(models(family))
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    expected = run(model)
    layers = [
        module
        for name, module in model.named_modules()
        if name.split(".")[-1].isdigit() and ".layers." in name
    ]
    for failing in layers:
        cache.reset()
        if when == "later":
            run(model, past_key_values=cache, new=2)
        length = cache.seq_len
        handle = failing.register_forward_pre_hook(fail)
        with pytest.raises(OSError, match="it failed"):
            model(PROMPT, past_key_values=cache, use_cache=True)
        handle.remove()
        assert cache.seq_len == length
        if failing is layers[0]:  # nothing had moved
            model(PROMPT, past_key_values=cache, use_cache=True)
            assert cache.seq_len == length + PROMPT.shape[1]
            continue
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"recurrent state, which cannot go back.*Call reset\(\)"
            ):
                model(PROMPT, past_key_values=cache, use_cache=True)
        cache.reset()
        assert torch.equal(run(model, past_key_values=cache), expected)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_rows_are_selected_in_both_parts(family, models):
    model = models(family)
    cache, other = (
        StaticContiguousCache.from_model(model, CAPACITY, batch_size=4) for _ in range(2)
    )
    model(BATCH, past_key_values=cache, use_cache=True)
    cache.batch_select_indices(torch.tensor([1, 1, 0], device=DEVICE))
    rows = BATCH[[1, 1, 0]]
    model(rows, past_key_values=other, use_cache=True)
    token = rows[:, :1]
    got, expected = (
        model(token, past_key_values=each, use_cache=True).logits for each in (cache, other)
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_has_both_parts(copied, models):
    model = models("falcon_h1")
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    tokens = run(model, past_key_values=cache, new=4)
    other = copied(cache)
    ids = torch.cat([tokens, PROMPT[:, :2]], dim=1)
    assert torch.equal(
        run(model, inputs=ids, past_key_values=cache), run(model, inputs=ids, past_key_values=other)
    )


def test_states_made_in_inference_mode_serve_outside_of_it(models):
    model = models("qwen3_next")
    cache = StaticContiguousCache(model.config, CAPACITY)
    with torch.inference_mode():
        first = run(model, past_key_values=cache, new=4)
    with torch.no_grad():
        ids = torch.cat([first, PROMPT[:, :2]], dim=1)
        model(ids[:, cache.seq_len :], past_key_values=cache, use_cache=True)
    cache.reset()
    assert torch.equal(run(model, past_key_values=cache), run(model))


@pytest.mark.parametrize(
    ("family", "skipped"), [("qwen3_5_text", 0), ("qwen3_5_text", 1), ("lfm2", 1)]
)
def test_a_layer_of_either_kind_that_does_not_run_is_named(family, skipped, models):
    model = copy.deepcopy(models(family))
    layer = model.model.layers[skipped]
    layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    expected = run(model, use_cache=False)
    with pytest.raises(UnfinishedPass, match=rf"\[{skipped}\] of {len(model.model.layers)}"):
        run(model, past_key_values=StaticContiguousCache(model.config, CAPACITY))
    with attached(model, reuse_prefix=True):
        for _ in range(2):
            assert torch.equal(run(model), expected)


# --- several tokens after a kept state


def turns(model):
    """A chat whose prompt holds all turns again."""
    ids, answers = PROMPT, []
    for turn in range(3):
        answers.append(run(model, inputs=ids, new=6))
        ids = torch.cat([answers[-1], (PROMPT + turn).remainder(90)], dim=1)
    return answers


@served
@pytest.mark.parametrize("scale", [1, 4])
def test_a_chat_has_the_tokens_of_no_reuse(family, scale, models):
    """Where a model computes several tokens on a kept state otherwise than in one pass, it is not
    asked to.
    """
    model = copy.deepcopy(models(family))
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.ndim > 1 else 1)
    expected = turns(model)
    with attached(model, reuse_prefix=True) as info:
        assert all(map(torch.equal, turns(model), expected))
    if family in ("jamba", "zamba"):
        assert info.reused_tokens == 0
    elif scale == 1:
        assert info.reused_tokens > 0


@pytest.mark.parametrize(
    ("family", "is_right"), [("jamba", False), ("zamba", False), ("lfm2", True)]
)
def test_a_cache_that_is_continued_by_hand_warns_once(family, is_right, models, caplog):
    model = copy.deepcopy(models(family))
    for _ in range(2):
        cache = StaticContiguousCache(model.config, CAPACITY)
        first = run(model, past_key_values=cache, new=4)
        run(model, inputs=torch.cat([first, PROMPT[:, :3]], dim=1), past_key_values=cache, new=1)
    assert caplog.text.count("feed the new tokens one by one") == (not is_right)


def test_one_new_token_is_no_reason_to_warn(models, caplog):
    model = copy.deepcopy(models("jamba"))
    cache = StaticContiguousCache(model.config, CAPACITY)
    first = run(model, past_key_values=cache, new=4)
    run(model, inputs=first, past_key_values=cache, new=4)
    assert "one by one" not in caplog.text


def test_a_trial_leaves_everything_as_it_was(models):
    model = copy.deepcopy(models("jamba"))
    before = (
        torch.get_rng_state(),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    assert continuation_of(model) == Continuation(by_token=True, by_chunk=False)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in model.state_dict().items())
    with_hook = copy.deepcopy(model)
    with_hook.lm_head.register_forward_hook(fail)
    assert continuation_of(with_hook) is None  # not tried: a hook would see it
    training = copy.deepcopy(model).train()
    assert continuation_of(training) is None
