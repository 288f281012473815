"""Sampling in the step itself: tokens and random state are those of plain `generate` under the same
seed.
"""

import time
from contextlib import nullcontext

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.kernels.sample import Processors
from hf_static_kv.program.selecting import SelectingStep
from hf_static_kv.program.step import DecodeStep
from tests.conftest import Collect, shared_toy_model
from tests.decoding.conftest import BATCH, CAPACITY, DEVICE, PROMPT, padded, run, toy_model

SETTINGS = {
    "plain": {"top_k": 0},
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top-k": {"top_k": 5},
    "top-p": {"top_k": 0, "top_p": 0.6},
    "both": {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
    "min-p": {"top_k": 0, "min_p": 0.2},
    "repetition": {"repetition_penalty": 1.5, "temperature": 0.8, "top_p": 0.95},
    "least length": {"min_length": 20, "eos_token_id": list(range(3, 60)), "pad_token_id": 0},
    "least new tokens": {"min_new_tokens": 9, "eos_token_id": list(range(3, 19)), "pad_token_id": 0},
    "ends": {"eos_token_id": list(range(3, 15)), "pad_token_id": 0, "temperature": 2.0},
    "n-gram": {"no_repeat_ngram_size": 2, "temperature": 0.5},
    "single tokens": {"no_repeat_ngram_size": 1, "repetition_penalty": 1.2, "top_k": 9},
    "everything": {
        "repetition_penalty": 1.2, "min_new_tokens": 5, "eos_token_id": list(range(3, 15)), "pad_token_id": 0,
        "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.05,
    },
}  # fmt: skip


def random_state():
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


def kinds_of_step(decoder, cache):
    (step,) = decoder.steps.by_cache[cache].values()
    return step.sampling.kinds if isinstance(step, SelectingStep) else type(step)


@pytest.mark.parametrize(
    "prompt", [{"ids": PROMPT}, {"ids": BATCH}, padded()], ids=["one", "batch", "padded"]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_and_random_state(name, prompt):
    model, decoder = shared_toy_model("llama", device=DEVICE), GraphDecoder()
    cache, how = (
        StaticContiguousCache(model.config, CAPACITY),
        {"do_sample": True, **SETTINGS[name]},
    )
    for seed in range(4):  # the first call makes the step, the others use it
        expected = run(model, seed=seed, **prompt, **how)
        state = random_state()
        cache.reset()
        assert torch.equal(
            run(model, decoder=decoder, cache=cache, seed=seed, **prompt, **how), expected
        )
        assert torch.equal(random_state(), state)
    assert decoder.fallback_reason is None
    assert len(decoder.steps.by_cache[cache]) == 1


BANS = {
    "n-gram": {"no_repeat_ngram_size": 2},
    "three": {"no_repeat_ngram_size": 3},
    "single tokens": {"no_repeat_ngram_size": 1},
    "least length": {"min_length": 20, "eos_token_id": list(range(3, 19)), "pad_token_id": 0},
    "least new tokens": {"min_new_tokens": 9, "eos_token_id": list(range(3, 19)), "pad_token_id": 0},
    "both": {
        "min_new_tokens": 9, "no_repeat_ngram_size": 2, "eos_token_id": list(range(3, 19)),
        "pad_token_id": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("is_exact", [False, True], ids=["", "exact"])
@pytest.mark.parametrize(
    "prompt", [{"ids": PROMPT}, {"ids": BATCH}, padded()], ids=["one", "batch", "padded"]
)
@pytest.mark.parametrize("name", BANS)
def test_greedily_without_tokens_that_may_not_come_next(name, prompt, is_exact):
    model, decoder = toy_model("llama"), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)
    how = BANS[name]
    with exact(model) if is_exact else nullcontext():
        for _ in range(2):
            expected = run(model, **prompt, **how)
            cache.reset()
            got = run(model, decoder=decoder, cache=cache, **prompt, **how)
            assert torch.equal(got, expected)
    (step,) = decoder.steps.by_cache[cache].values()
    assert isinstance(step, SelectingStep)
    plain = {key: how[key] for key in how if key in ("eos_token_id", "pad_token_id")}
    if name not in ("n-gram", "three"):  # this model does not repeat these
        assert not torch.equal(expected, run(model, **prompt, **plain)), "nothing was banned"


def test_a_least_length_is_that_of_its_own_call():
    """The step of calls with an n-gram serves those with a least length, too."""
    model, decoder = toy_model("llama"), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)
    ends = {"eos_token_id": list(range(3, 40)), "pad_token_id": 0, "no_repeat_ngram_size": 2}
    for how in ({"min_new_tokens": 9}, {}, {"min_new_tokens": 4}):
        cache.reset()
        got = run(model, decoder=decoder, cache=cache, **ends, **how)
        assert torch.equal(got, run(model, **ends, **how))
    assert len(decoder.steps.by_cache[cache]) == 1


def test_a_call_ends_in_time(monkeypatch):
    """The step selects, and the host looks at the clock."""
    model, decoder = toy_model("llama"), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)
    whole = run(model, decoder=decoder, cache=cache, max_time=1000.0)
    assert torch.equal(whole, run(model))
    (step,) = decoder.steps.by_cache[cache].values()
    assert isinstance(step, SelectingStep)
    replays = 0
    clock = time.time

    def now():
        return clock() + (2000 if replays >= 3 else 0)

    def replay(self):
        nonlocal replays
        replays += 1
        return own(self)

    own = SelectingStep.replay
    monkeypatch.setattr(SelectingStep, "replay", replay)
    monkeypatch.setattr("hf_static_kv.decoding.tokens.time.time", now)
    cache.reset()
    cut = run(model, decoder=decoder, cache=cache, max_time=1000.0)
    assert cut.shape[1] == PROMPT.shape[1] + 1 + 3
    assert torch.equal(cut, whole[:, : cut.shape[1]])
    assert cache.seq_len == cut.shape[1] - 1


def test_other_numbers_use_the_same_step():
    model, decoder, cache = toy_model("llama"), GraphDecoder(), None
    for temperature, top_k in ((0.5, 3), (1.5, 50), (0.9, 1)):
        how = {"do_sample": True, "temperature": temperature, "top_k": top_k}
        cache = StaticContiguousCache(model.config, CAPACITY) if cache is None else cache
        cache.reset()
        assert torch.equal(
            run(model, decoder=decoder, cache=cache, seed=1, **how), run(model, seed=1, **how)
        )
    assert kinds_of_step(decoder, cache) == Processors(temperature=True, top_k=True)


@pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 9}, {}], ids=["sampled", "greedy"])
def test_a_streamer_gets_every_token_once(how):
    model, streamer = toy_model("llama"), Collect()
    expected = run(model, seed=3, **how)
    assert torch.equal(run(model, decoder=GraphDecoder(streamer=streamer), seed=3, **how), expected)
    assert streamer.tokens == expected[0].tolist()
    assert streamer.ended


OUTSIDE = {
    "bad words": {"bad_words_ids": [[7], [3, 4]]},
    "a long n-gram": {"no_repeat_ngram_size": 17},
    "a processor of one's own": {
        "logits_processor": LogitsProcessorList([lambda ids, scores: scores / 2])
    },
    "another order": {
        "temperature": 0.5,
        "logits_processor": LogitsProcessorList([lambda ids, scores: scores + 0]),
    },
    "typical p": {"typical_p": 0.9},
    "scores": {"return_dict_in_generate": True, "output_scores": True},
    "two temperatures": {
        "temperature": 0.5,
        "logits_processor": [processors.TemperatureLogitsWarper(2.0)],
    },
    "two top-k": {"top_k": 50, "logits_processor": [processors.TopKLogitsWarper(3)]},
    "two top-p": {"top_k": 0, "top_p": 0.9, "logits_processor": [processors.TopPLogitsWarper(0.3)]},
    "two min-p": {
        "top_k": 0,
        "min_p": 0.05,
        "logits_processor": [processors.MinPLogitsWarper(0.4)],
    },
    "two penalties": {
        "top_k": 0,
        "logits_processor": [
            processors.RepetitionPenaltyLogitsProcessor(penalty) for penalty in (1.1, 1.6)
        ],
    },
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_host_selects(name):
    model, decoder, how = toy_model("llama"), GraphDecoder(), {"do_sample": True, **OUTSIDE[name]}
    cache = StaticContiguousCache(model.config, CAPACITY)
    got, expected = (
        run(model, decoder=decoder, cache=cache, seed=2, **how),
        run(model, seed=2, **how),
    )
    got, expected = (x if isinstance(x, torch.Tensor) else x.sequences for x in (got, expected))
    assert torch.equal(got, expected)
    assert kinds_of_step(decoder, cache) is DecodeStep


def test_two_least_lengths_are_the_larger_one():
    model, decoder, how = toy_model("llama"), GraphDecoder(), {"do_sample": True, "pad_token_id": 0}
    how |= {"min_length": 17, "min_new_tokens": 9, "eos_token_id": list(range(3, 19))}
    cache = StaticContiguousCache(model.config, CAPACITY)
    assert torch.equal(
        run(model, decoder=decoder, cache=cache, seed=2, **how), run(model, seed=2, **how)
    )
    assert kinds_of_step(decoder, cache).min_length


@pytest.mark.parametrize("name", SETTINGS)
def test_inside_exact_the_host_samples(name):
    """The kernel's sums are rounded differently; the host runs the processors of `generate`
    themselves.
    """
    model, decoder, how = toy_model("llama"), GraphDecoder(), {"do_sample": True, **SETTINGS[name]}
    cache = StaticContiguousCache(model.config, CAPACITY)
    with exact(model):
        assert torch.equal(
            run(model, decoder=decoder, cache=cache, seed=2, **how), run(model, seed=2, **how)
        )
    assert kinds_of_step(decoder, cache) is DecodeStep


def test_inside_exact_the_step_selects_greedily():
    model, decoder = toy_model("llama"), GraphDecoder()
    cache = StaticContiguousCache(model.config, CAPACITY)
    with exact(model):
        run(model, decoder=decoder, cache=cache)
    (step,) = decoder.steps.by_cache[cache].values()
    assert isinstance(step, SelectingStep)


def test_the_repetition_penalty_of_embedded_prompts_is_left_to_the_host():
    """The tokens of such a prompt are not known, and their positions are."""
    model, decoder, how = (
        toy_model("llama"),
        GraphDecoder(),
        {"do_sample": True, "repetition_penalty": 1.4},
    )
    cache = StaticContiguousCache(model.config, CAPACITY)
    embeds = model.get_input_embeddings()(PROMPT).detach()
    torch.manual_seed(0)
    expected = model.generate(inputs_embeds=embeds, max_new_tokens=9, use_cache=False, **how)
    torch.manual_seed(0)
    got = model.generate(
        inputs_embeds=embeds,
        max_new_tokens=9,
        past_key_values=cache,
        custom_generate=decoder,
        **how,
    )
    assert torch.equal(got, expected)
    assert kinds_of_step(decoder, cache) is DecodeStep


def test_a_chat_goes_on_with_the_penalty():
    model, decoder, how = (
        toy_model("llama"),
        GraphDecoder(),
        {"do_sample": True, "repetition_penalty": 1.4},
    )
    cache = StaticContiguousCache(model.config, CAPACITY)
    first = run(model, decoder=decoder, cache=cache, seed=0, **how)
    assert torch.equal(first, run(model, seed=0, **how))
    longer = torch.cat([first, BATCH[:1, :3]], dim=1)
    assert torch.equal(
        run(model, longer, decoder, cache, seed=0, **how), run(model, longer, seed=0, **how)
    )


def test_a_cache_that_grows_in_the_middle():
    model, decoder, how = (
        toy_model("llama"),
        GraphDecoder(),
        {"do_sample": True, "repetition_penalty": 1.4},
    )
    cache = StaticContiguousCache.for_calls(model, PROMPT.shape[1] + 2, 1, "full")
    assert torch.equal(
        run(model, decoder=decoder, cache=cache, seed=5, **how), run(model, seed=5, **how)
    )


def test_making_a_step_draws_nothing():
    model, decoder, how = toy_model("llama"), GraphDecoder(), {"do_sample": True, "top_p": 0.9}
    first = run(model, decoder=decoder, seed=7, **how)
    assert torch.equal(run(model, decoder=GraphDecoder(), seed=7, **how), first)
