"""Tokens drafted from the text itself (`prompt_lookup_num_tokens`): those of plain decoding.

Toy models repeat themselves, so that drafts are right now and then. `always` passes drafts in every
pass; without it as they pay.
"""

import copy
import time
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

from hf_static_kv import (
    GraphDecoder,
    StaticContiguousCache,
    attach,
    attached,
    attachment,
    detach,
    exact,
    served,
)
from hf_static_kv.decoding import prompts, speculation
from hf_static_kv.decoding.assistant import Assistant
from hf_static_kv.decoding.turns import Turns
from hf_static_kv.program import step as step_module
from hf_static_kv.program.drafting import AssistantStep, DraftedStep, LookupStep
from tests.conftest import ARCHITECTURES, COMMON, Collect, shared_toy_model
from tests.decoding.conftest import DEVICE, OWN_ATTENTION, padded, toy_model
from tests.hybrids import hybrid_model

REPOSITORY = Path(__file__).parents[2]
MINIATURE = REPOSITORY / "examples/models/llama"
IDLE = speculation._BEHIND  # passes that are launched after the end, and add nothing
LOOKUP = {"prompt_lookup_num_tokens": 5}
CAPACITY = 96
TEXT = torch.tensor([[17, 93, 5, 64, 40, 88, 17, 93, 5, 64, 40, 88, 17, 93, 5]], device=DEVICE)
ROWS = torch.tensor([[9, 8, 31, 9, 8, 31, 9, 8], [5, 5, 5, 5, 5, 5, 5, 5]], device=DEVICE)


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(speculation, "_PAYS", 0.0)


def call(model, ids=TEXT, decoder=None, cache=None, seed=None, **how):
    """One call: plainly and without a cache, or with drafts and ours."""
    if seed is not None:
        torch.manual_seed(seed)
    how = {**COMMON, "max_new_tokens": 40, "attention_mask": torch.ones_like(ids), **how}
    if decoder is None:
        return model.generate(ids, use_cache=False, **how)
    if cache is None:
        cache = StaticContiguousCache.from_model(model, CAPACITY, batch_size=len(ids))
    return model.generate(ids, past_key_values=cache, custom_generate=decoder, **LOOKUP, **how)


MODES = {
    "one row": {},
    "rows": {"ids": ROWS},
    "padded": padded(),
    "ends": {"eos_token_id": list(range(60, 76)), "pad_token_id": 3},
    "rows that end": {"ids": ROWS, "eos_token_id": list(range(60, 76)), "pad_token_id": 3},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "longer texts": {"max_matching_ngram_size": 4},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 3, "seed": 7},
    "sampled to an end": {
        "do_sample": True,
        "top_p": 0.8,
        "seed": 8,
        "eos_token_id": list(range(60, 70)),
        "pad_token_id": 3,
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_tokens_are_those_of_plain_decoding(name, mode, always):
    model = shared_toy_model(name, OWN_ATTENTION[name], DEVICE)
    how = MODES[mode]
    decoder = GraphDecoder()
    expected = call(model, **{k: v for k, v in how.items() if k != "max_matching_ngram_size"})
    assert torch.equal(call(model, decoder=decoder, **how), expected)
    assert decoder.fallback_reason is None
    if name == "llama4" and len(how.get("ids", TEXT)) > 1:
        assert "a layer asks for the length" in decoder.draft_reason
        return
    assert decoder.draft_reason is None
    if mode in ("one row", "rows", "padded", "longer texts", "sampled"):
        assert decoder.accepted.passes > 5


def test_right_drafts_save_passes(monkeypatch):
    """The trained miniature repeats itself where it decodes greedily: two thirds of the passes."""
    model = AutoModelForCausalLM.from_pretrained(MINIATURE).to(DEVICE)
    tokenizer = AutoTokenizer.from_pretrained(MINIATURE)
    text = (REPOSITORY / "examples/data/tinyshakespeare.txt").read_text()[:2000]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :200].to(DEVICE)
    cache = StaticContiguousCache.from_model(model, 400)
    passes = count_passes(monkeypatch)
    decoder = GraphDecoder()
    tokens = call(model, ids, decoder, cache, max_new_tokens=200)
    assert torch.equal(tokens, call(model, ids, max_new_tokens=200))
    assert passes.total() < 150
    assert passes.total() + decoder.accepted.tokens in range(199, 200 + IDLE)


def test_wrong_drafts_are_given_up(monkeypatch):
    """No text comes again, so that passes have one token but for a few."""
    model = shared_toy_model("llama", device=DEVICE)
    passes = count_passes(monkeypatch)
    ids = torch.arange(3, 60, device=DEVICE)[None]
    how = {"do_sample": True, "temperature": 50.0, "top_k": 0, "max_new_tokens": 38, "seed": 0}
    assert torch.equal(call(model, ids, GraphDecoder(), **how), call(model, ids, **how))
    assert passes["DraftedStep"] <= 4 < 30 < passes["LookupStep"]


def count_passes(monkeypatch):
    passes = Counter()
    for kind in (LookupStep, DraftedStep):

        def advance(step, original=kind.advance):
            passes[type(step).__name__] += 1
            original(step)

        monkeypatch.setattr(kind, "advance", advance)
    return passes


class TestTheCache:
    def test_it_holds_what_plain_decoding_leaves(self, always):
        model = shared_toy_model("llama", device=DEVICE)
        caches = [StaticContiguousCache.from_model(model, CAPACITY) for _ in range(2)]
        tokens = call(model, decoder=GraphDecoder(), cache=caches[0])
        model.generate(
            TEXT, past_key_values=caches[1], custom_generate=GraphDecoder(), max_new_tokens=40,
            **{k: v for k, v in COMMON.items() if k != "max_new_tokens"},
        )  # fmt: skip
        length = tokens.shape[1] - 1
        assert [cache.seq_len for cache in caches] == [length, length]
        assert torch.equal(caches[0].known_ids[:, :length], tokens[:, :length])
        for one, other in zip(*(cache.kv_layers for cache in caches), strict=True):
            torch.testing.assert_close(one.keys, other.keys, rtol=1e-4, atol=1e-4)

    def test_a_turn_goes_on_after_it(self, always):
        model = shared_toy_model("gemma3", device=DEVICE)
        cache = StaticContiguousCache.from_model(model, CAPACITY)
        decoder = GraphDecoder()
        tokens = call(model, decoder=decoder, cache=cache, max_new_tokens=20)
        whole = torch.cat([tokens, TEXT[:, :5]], dim=1)
        again = call(model, whole, decoder, cache, max_new_tokens=20)
        assert torch.equal(again, call(model, whole, max_new_tokens=20))

    def test_rows_of_unlike_lengths_leave_what_all_have(self, always):
        model = shared_toy_model("llama", device=DEVICE)
        ends = {"eos_token_id": list(range(60, 76)), "pad_token_id": 3}
        cache = StaticContiguousCache.from_model(model, CAPACITY, batch_size=2)
        decoder = GraphDecoder()
        tokens = call(model, ROWS, decoder, cache, **ends)
        whole = torch.cat([tokens, ROWS[:, :3]], dim=1)
        again = call(model, whole, decoder, cache, max_new_tokens=10)
        assert torch.equal(again, call(model, whole, max_new_tokens=10))

    @pytest.mark.parametrize("new", [1, 2, 3, 7, 20])
    def test_it_needs_no_room_for_drafts(self, always, new):
        model = shared_toy_model("llama", device=DEVICE)
        cache = StaticContiguousCache.from_model(model, TEXT.shape[1] + new - 1)
        got = call(model, decoder=GraphDecoder(), cache=cache, max_new_tokens=new)
        assert torch.equal(got, call(model, max_new_tokens=new))

    @pytest.mark.parametrize("name", ["llama", "gpt2"])
    def test_rows_that_end_at_the_capacity_wait_for_the_others(self, always, name):
        """Positions of a row that has ended are those of its table, which has no more."""
        model = shared_toy_model(name, device=DEVICE)
        ids = torch.cat([ROWS, ROWS.flip(1)[:1]])
        cache = StaticContiguousCache.from_model(model, ids.shape[1] + 39, batch_size=3)
        decoder = GraphDecoder()
        assert torch.equal(call(model, ids, decoder, cache), call(model, ids))
        assert decoder.draft_reason is None

    def test_a_batch_that_may_outgrow_it_has_no_drafts(self, always):
        model = toy_model("gemma3")
        model.generation_config.max_length = 60
        cache = StaticContiguousCache.from_model(model, 24, batch_size=2)
        cache.grows = True
        decoder = GraphDecoder()
        how = {"eos_token_id": list(range(60, 70)), "pad_token_id": 3, "do_sample": False}
        got = model.generate(ROWS, past_key_values=cache, custom_generate=decoder, **LOOKUP, **how)
        assert torch.equal(got, model.generate(ROWS, use_cache=False, **how))
        assert decoder.draft_reason == "a batch may outgrow the cache"

    def test_a_first_call_without_room_for_a_trial_has_no_drafts(self, always):
        """A later one with room has, and its pass is tried with all tokens."""
        model = shared_toy_model("llama", device=DEVICE)
        cache = StaticContiguousCache.from_model(model, TEXT.shape[1] + 3)
        decoder = GraphDecoder()
        got = call(model, decoder=decoder, cache=cache, max_new_tokens=4)
        assert torch.equal(got, call(model, max_new_tokens=4))
        assert decoder.draft_reason == "a pass with drafts is tried with 6 tokens, and 3 fit"
        cache.reset()
        ids = TEXT[:, :5]
        got = call(model, ids, decoder, cache, max_new_tokens=13)
        assert torch.equal(got, call(model, ids, max_new_tokens=13))
        assert decoder.draft_reason is None

    @pytest.mark.usefixtures("small_spare", "always")
    def test_compact_layers_move(self):
        model = shared_toy_model("gemma3", device=DEVICE)
        cache = StaticContiguousCache(model.config, CAPACITY, sliding="compact")
        decoder = GraphDecoder()
        for _ in range(2):
            cache.reset()
            got = call(model, decoder=decoder, cache=cache, max_new_tokens=60)
            assert torch.equal(got, call(model, max_new_tokens=60))
        assert decoder.draft_reason is None
        assert max(layer.offset for layer in cache.kv_layers) > 20

    def test_it_grows(self, always):
        """Nothing but the default limits the call, which goes on over the first capacity."""
        model = toy_model("gemma3")
        model.generation_config.max_length = 80
        cache = StaticContiguousCache.from_model(model, 24)
        cache.grows = True
        decoder = GraphDecoder()
        how = {"eos_token_id": None, "do_sample": False}
        got = model.generate(TEXT, past_key_values=cache, custom_generate=decoder, **LOOKUP, **how)
        assert torch.equal(got, model.generate(TEXT, use_cache=False, **how))
        assert got.shape[1] == 80
        assert cache.max_cache_len >= 79


class TestWatchers:
    def test_a_streamer_is_given_every_token_once(self, always):
        model = shared_toy_model("gemma3", device=DEVICE)
        streamer = Collect()
        tokens = call(model, decoder=GraphDecoder(), streamer=streamer)
        assert streamer.tokens == tokens[0].tolist()
        assert streamer.ended

    def test_a_streamer_that_fails_leaves_the_tokens_it_was_given(self, always):
        class Fails(Collect):
            def put(self, value):
                super().put(value)
                if len(self.tokens) > TEXT.shape[1] + 9:
                    raise KeyError

        model = shared_toy_model("gemma3", device=DEVICE)
        cache = StaticContiguousCache.from_model(model, CAPACITY)
        decoder = GraphDecoder()
        streamer = Fails()
        with pytest.raises(KeyError):
            call(model, decoder=decoder, cache=cache, streamer=streamer)
        cache.crop(TEXT.shape[1] - 1 - cache.seq_len)
        assert torch.equal(call(model, decoder=decoder, cache=cache), call(model))

    def test_max_time(self, always, monkeypatch):
        model = shared_toy_model("gemma3", device=DEVICE)
        expected = call(model)
        begun = time.time()
        seconds = iter(range(1000))
        monkeypatch.setattr(speculation.time, "time", lambda: begun + next(seconds))
        got = call(model, decoder=GraphDecoder(), max_time=4.5)
        assert TEXT.shape[1] < got.shape[1] < expected.shape[1]
        assert torch.equal(got, expected[:, : got.shape[1]])


class TestSampling:
    HOW: ClassVar = {"do_sample": True, "temperature": 3.0, "top_k": 5}

    @pytest.mark.parametrize("seed", range(6))
    def test_right_drafts_change_no_token_of_a_seed(self, always, seed):
        """A vocabulary of 6: drafts are often right. What is drawn next is the same, too."""
        model = toy_model("llama", vocab_size=6)
        decoder = GraphDecoder()
        expected = call(model, TEXT % 6, seed=seed, **self.HOW)
        after = torch.rand(1, device=DEVICE)
        assert torch.equal(call(model, TEXT % 6, decoder, seed=seed, **self.HOW), expected)
        assert torch.equal(torch.rand(1, device=DEVICE), after)
        assert decoder.accepted.tokens > 4

    def test_rows_that_draw_together_have_no_drafts(self, always):
        model = shared_toy_model("llama", device=DEVICE)
        decoder = GraphDecoder()
        expected = call(model, ROWS, seed=3, **self.HOW)
        assert torch.equal(call(model, ROWS, decoder, seed=3, **self.HOW), expected)
        assert "draw their random numbers together" in decoder.draft_reason


class Stop(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 30, device=input_ids.device)


REFUSED = {
    "criteria": ({"stopping_criteria": [Stop()]}, "the host selects the tokens"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "the host selects"),
    "penalty": (
        {"repetition_penalty": 1.2, "do_sample": True, "top_k": 1},
        "which tokens may come next depends on those before",
    ),
    "least length": (
        {"min_new_tokens": 12, "eos_token_id": list(range(60, 76)), "pad_token_id": 3},
        "which tokens may come next depends",
    ),
    "n-grams": ({"no_repeat_ngram_size": 3}, "which tokens may come next depends"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_drafts_runs_without(what):
    """One token a pass, in a captured step all the same."""
    how, reason = REFUSED[what]
    model = shared_toy_model("gemma3", device=DEVICE)
    decoder = GraphDecoder()
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    got = call(model, decoder=decoder, cache=cache, **how)
    expected = call(model, **how)
    if what == "scores":
        got, expected = got.sequences, expected.sequences
    assert torch.equal(got, expected)
    assert reason in decoder.draft_reason
    assert decoder.fallback_reason is None
    assert decoder.num_steps == 1
    assert not decoder.accepted.passes


def test_rows_of_compact_layers_have_no_drafts():
    model = shared_toy_model("gemma3", device=DEVICE)
    cache = StaticContiguousCache(model.config, CAPACITY, sliding="compact")
    decoder = GraphDecoder()
    assert torch.equal(call(model, ROWS, decoder, cache), call(model, ROWS))
    assert decoder.draft_reason == "rows of compact layers go on alike"


def test_recurrent_states_have_no_drafts():
    """transformers refuses such a model where drafts are asked for; `speculate` leaves it as it is."""
    model = hybrid_model("qwen3_5_text").to(DEVICE)
    decoder = GraphDecoder()
    decoder.drafts = served.Settings(speculate="prompt").drafts
    got = model.generate(TEXT, custom_generate=decoder, **COMMON)
    assert torch.equal(got, model.generate(TEXT, **COMMON))
    assert decoder.fallback_reason is None
    assert decoder.draft_reason == "a recurrent state cannot go back"


def test_a_failing_verification_leaves_the_plain_step(monkeypatch):
    """A pass of several tokens that gives other logits is not used."""
    from hf_static_kv.decoding import steps

    def fail(step, call):
        raise RuntimeError("planted")

    monkeypatch.setattr(steps, "verify_drafts", fail)
    model = shared_toy_model("llama", device=DEVICE)
    decoder = GraphDecoder()
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    for _ in range(4):  # a failure is remembered, and harms no call without drafts
        cache.reset()
        assert torch.equal(call(model, decoder=decoder, cache=cache), call(model))
        assert "planted" in decoder.draft_reason
        assert decoder.fallback_reason is None
    cache.reset()
    model.generate(TEXT, past_key_values=cache, custom_generate=decoder, **COMMON)
    assert decoder.fallback_reason is None


def test_verification_sees_a_wrong_pass(monkeypatch):
    """Every token of the longer pass is looked at: one that sees its own future is found."""
    original = step_module.DecodeStep._forward

    def wrong(step):
        logits = original(step)
        if isinstance(step, DraftedStep):
            logits = logits.clone()
            logits[:, -2] += 1
        return logits

    monkeypatch.setattr(step_module.DecodeStep, "_forward", wrong)
    model = shared_toy_model("llama", device=DEVICE)
    decoder = GraphDecoder()
    assert torch.equal(call(model, decoder=decoder), call(model))
    assert "its logits are" in decoder.draft_reason


DRAWN = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 3, "seed": 7},
    "of a part": {"do_sample": True, "temperature": 1.5, "top_p": 0.6, "seed": 8},
    "min_p": {"do_sample": True, "min_p": 0.3, "top_k": 0, "seed": 9},
}


@pytest.mark.parametrize("mode", DRAWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_inside_exact_the_tokens_are_the_same(name, dtype, mode, always):
    """Those of plain decoding to the bit, and the random numbers after them."""
    model = toy_model(name, vocab_size=6).to(dtype)
    decoder = GraphDecoder()
    ids = TEXT % 6
    with exact(model):
        expected = call(model, ids, **DRAWN[mode])
        after = torch.rand(1, device=DEVICE)
        got = call(model, ids, decoder, **DRAWN[mode])
        if mode != "greedy":
            assert torch.equal(torch.rand(1, device=DEVICE), after)
    assert torch.equal(got, expected)
    assert decoder.draft_reason is decoder.fallback_reason is None
    assert decoder.accepted.tokens > 2


def test_inside_exact_another_temperature_is_another_step(always):
    """Processors are part of a captured step there."""
    model = toy_model("llama", vocab_size=24)
    decoder = GraphDecoder()
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    how = {"do_sample": True, "top_k": 0, "seed": 3}
    with exact(model):
        for temperature, steps in ((0.5, 1), (3.0, 2), (0.5, 2)):
            cache.reset()
            expected = call(model, TEXT % 24, temperature=temperature, **how)
            got = call(model, TEXT % 24, decoder, cache, temperature=temperature, **how)
            assert torch.equal(got, expected)
            assert decoder.num_steps == steps


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"ids": ROWS}, "the rows of a batch draw their random numbers together"),
        ({"repetition_penalty": 1.2}, "the host selects the tokens"),
    ],
)
def test_inside_exact_other_sampled_calls_have_no_drafts(how, reason, always):
    model = shared_toy_model("llama", device=DEVICE)
    decoder = GraphDecoder()
    how = {"do_sample": True, "seed": 3, **how}
    with exact(model):
        assert torch.equal(call(model, decoder=decoder, **how), call(model, **how))
    assert decoder.draft_reason == reason
    assert decoder.fallback_reason is None


class TestAttached:
    @pytest.fixture(autouse=True)
    def _decodes(self, monkeypatch):
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
        monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)

    @pytest.fixture
    def model(self):
        own = copy.copy(shared_toy_model("gemma3", device=DEVICE))
        yield own
        detach(own)

    @pytest.mark.parametrize("reuse_prefix", [False, True])
    def test_a_call_that_asks(self, model, always, reuse_prefix):
        expected = call(model)
        info = attach(model, reuse_prefix=reuse_prefix)
        how = {**COMMON, "max_new_tokens": 40, **LOOKUP}
        tokens = model.generate(TEXT, **how)
        assert torch.equal(tokens, expected)
        assert info.fallback_reason is info.draft_reason is None
        assert info.drafted_passes > 5
        assert f"{info.accepted_drafts} drafts accepted in {info.drafted_passes} passes" in repr(
            info
        )
        whole = torch.cat([tokens, TEXT[:, :3]], dim=1)
        again = model.generate(whole, **how)
        assert (info.reused_tokens > 0) is reuse_prefix
        detach(model)
        assert torch.equal(again, call(model, whole))

    def test_all_calls(self, model, always):
        expected = call(model)
        with attached(model, speculate="prompt") as info:
            assert torch.equal(model.generate(TEXT, **COMMON | {"max_new_tokens": 40}), expected)
            assert info.drafted_passes
            beams = model.generate(TEXT, num_beams=2, **COMMON)
        assert torch.equal(beams, model.generate(TEXT, num_beams=2, **COMMON))

    def test_an_unknown_way(self, model):
        with pytest.raises(ValueError, match=r'speculate must be "prompt" .* got \'tree\''):
            attach(model, speculate="tree")

    def test_calls_of_other_threads(self, model, always):
        """They decode together, one token a pass."""
        asked = [TEXT, TEXT[:, 1:], TEXT[:, 3:], TEXT[:, 2:]]
        expected = [call(model, ids) for ids in asked]
        attach(model)
        got = {}

        def run(number):
            how = {**COMMON, "max_new_tokens": 40, **LOOKUP}
            got[number] = model.generate(asked[number], **how)

        threads = [Thread(target=run, args=(number,)) for number in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, tokens in enumerate(expected):
            assert torch.equal(got[number], tokens)

    def test_without_graphs_transformers_drafts(self, model, monkeypatch):
        monkeypatch.setattr(served, "_DECODER_DEVICES", ())
        expected = call(model)
        attach(model)
        got = model.generate(TEXT, **COMMON | {"max_new_tokens": 40}, **LOOKUP)
        assert torch.equal(got, expected)
        assert "there are no graphs" in attachment(model).fallback_reason

    def test_what_cannot_be_captured_runs_in_transformers_loop_for_drafts(self, model, monkeypatch):
        from hf_static_kv.decoding import call as call_module

        loops = []
        original = call_module.compat.assisted_loop
        monkeypatch.setattr(
            call_module.compat, "assisted_loop", lambda m: loops.append(m) or original(m)
        )
        expected = call(model)
        attach(model)
        how = {**COMMON, "max_new_tokens": 40, **LOOKUP, "return_dict_in_generate": True}
        got = model.generate(TEXT, output_hidden_states=True, **how)
        assert torch.equal(got.sequences, expected)
        assert loops == [model]
        assert "hidden states" in attachment(model).fallback_reason
        assert "hidden states" in attachment(model).draft_reason

    def test_sampled_calls_run_in_the_loop_without_drafts(self, model):
        """transformers' loop for drafts draws other numbers."""
        how = {"do_sample": True, "top_k": 4, "max_new_tokens": 40}
        expected = call(model, seed=3, **how)
        attach(model)
        torch.manual_seed(3)
        how = {**COMMON, **how, **LOOKUP, "return_dict_in_generate": True}
        got = model.generate(TEXT, output_hidden_states=True, **how)
        assert torch.equal(got.sequences, expected)


def test_more_drafts_than_tokens_in_the_vocabulary():
    model = toy_model("llama", vocab_size=8)
    decoder = GraphDecoder()
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    ids = TEXT % 8
    how = {"past_key_values": cache, "custom_generate": decoder, "prompt_lookup_num_tokens": 20}
    plain = {**COMMON, "attention_mask": torch.ones_like(ids)}
    got = model.generate(ids, **how, max_matching_ngram_size=5000, **plain)
    assert torch.equal(got, model.generate(ids, use_cache=False, **plain))
    assert decoder.draft_reason is None


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_text_that_is_shorter_than_a_pass(always, length):
    """In a pass whose kernels are only compiled its tokens would stand before the text."""
    model = toy_model("llama")
    decoder = GraphDecoder()
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    ids = TEXT[:, :length]
    how = {"past_key_values": cache, "custom_generate": decoder, "prompt_lookup_num_tokens": 10}
    plain = {**COMMON, "attention_mask": torch.ones_like(ids)}
    got = model.generate(ids, **how, **plain)
    assert torch.equal(got, model.generate(ids, use_cache=False, **plain))
    assert decoder.draft_reason is None


def test_a_number_that_is_not_positive():
    model = shared_toy_model("llama", device=DEVICE)
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    with pytest.raises(ValueError, match=r"prompt_lookup_num_tokens=0 .* must be positive"):
        model.generate(
            TEXT, past_key_values=cache, custom_generate=GraphDecoder(), prompt_lookup_num_tokens=0
        )


class TestAssistant:
    """`assistant_model=` of another model, which passes drafts while they pay."""

    @pytest.fixture(autouse=True)
    def _is_cheap(self, monkeypatch):
        """As if it were a small model: it drafts in every pass."""
        original = Assistant.__init__

        def init(assistant, *args):
            original(assistant, *args)
            assistant.cost = 0.01

        monkeypatch.setattr(Assistant, "__init__", init)
        monkeypatch.setattr(speculation, "_COST", 0.5)

    def call(self, model, assistant, ids=TEXT, decoder=None, seed=None, **how):
        if seed is not None:
            torch.manual_seed(seed)
        how = {**COMMON, "max_new_tokens": 40, "attention_mask": torch.ones_like(ids), **how}
        cache = StaticContiguousCache.from_model(model, CAPACITY, batch_size=len(ids))
        ours = {"past_key_values": cache, "custom_generate": decoder or GraphDecoder()}
        return model.generate(ids, assistant_model=assistant, **ours, **how)

    MODES: ClassVar = {name: MODES[name] for name in MODES if name != "longer texts"}

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
    def test_the_tokens_are_those_of_plain_decoding(self, name, mode):
        model = shared_toy_model(name, device=DEVICE)
        decoder = GraphDecoder()
        how = self.MODES[mode]
        expected = call(model, **how)
        assert torch.equal(self.call(model, nearly(name), decoder=decoder, **how), expected)
        assert decoder.fallback_reason is decoder.draft_reason is None
        if mode in ("one row", "rows", "padded", "sampled"):
            assert decoder.accepted.tokens > 4

    def test_the_model_itself_is_always_right(self):
        model = shared_toy_model("llama", device=DEVICE)
        decoder = GraphDecoder()
        assert torch.equal(self.call(model, model, decoder=decoder), call(model))
        assert decoder.accepted.tokens + decoder.accepted.passes == 39
        assert decoder.accepted.passes == 4

    @pytest.mark.parametrize("number", [1, 2])
    def test_few_drafts(self, number):
        """Fewer than the passes in which a capture tries the assistant."""
        model = shared_toy_model("llama", device=DEVICE)
        assistant = toy_model("llama")
        assistant.generation_config.num_assistant_tokens = number
        decoder = GraphDecoder()
        assert torch.equal(self.call(model, assistant, decoder=decoder), call(model))
        assert decoder.draft_reason is None
        assert set(decoder.accepted.counts) <= set(range(number + 1))

    def test_one_that_is_always_wrong_is_given_up(self, monkeypatch):
        monkeypatch.setattr(speculation, "_COST", 1.25)
        passes = count_passes(monkeypatch)
        model = shared_toy_model("llama", device=DEVICE)
        wrong = toy_model("llama", seed=5)
        how = {"max_new_tokens": 80}
        assert torch.equal(self.call(model, wrong, **how), call(model, **how))
        assert passes["DraftedStep"] < 20 < 50 < passes["LookupStep"]

    @pytest.mark.parametrize("p", [0.6, 0.7, 0.8])
    def test_its_rate_is_that_of_a_draft(self, p):
        """A pass ends at its first wrong draft, so the mean over passes would be less."""
        generator = torch.Generator().manual_seed(0)
        rate = speculation._Rate()
        values = []
        for _ in range(400):
            is_right = torch.rand(3, generator=generator) < p
            rate.note([int(is_right.long().cumprod(0).sum())], 3)
            values.append(rate.value)
        assert sum(values) / len(values) == pytest.approx(p, abs=0.03)

    def test_it_is_asked_again(self, monkeypatch):
        """It was too dear at first, and reads what it has missed."""
        monkeypatch.setattr(speculation, "_COST", 1.25)
        monkeypatch.setattr(speculation, "_EXPECTED", 0.0)
        model = shared_toy_model("llama", device=DEVICE)
        decoder = GraphDecoder()
        how = {"max_new_tokens": 80}
        assert torch.equal(self.call(model, model, decoder=decoder, **how), call(model, **how))
        assert decoder.accepted.tokens > 20

    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_inside_exact(self, name):
        model = toy_model(name).bfloat16()
        decoder = GraphDecoder()
        assistant = nearly(name).bfloat16()
        with exact(model):
            expected = call(model, max_new_tokens=16)
            got = self.call(model, assistant, decoder=decoder, max_new_tokens=16)
        assert torch.equal(got, expected)
        assert decoder.accepted.passes

    def test_a_second_call_uses_the_same_passes(self):
        model = shared_toy_model("llama", device=DEVICE)
        assistant = nearly("llama")
        decoder = GraphDecoder()
        cache = StaticContiguousCache.from_model(model, CAPACITY)
        how = {**COMMON, "past_key_values": cache, "custom_generate": decoder}
        for _ in range(2):
            cache.reset()
            model.generate(TEXT, assistant_model=assistant, **how)
            steps = decoder.steps.captured
            assert len(steps) == 4  # of the model, and of 2, 32 and 1 tokens of the assistant
        assert steps == decoder.steps.captured
        assert len(decoder.pool.free) == 1

    def test_one_with_other_tokens_is_refused(self):
        model = shared_toy_model("llama", device=DEVICE)
        other = toy_model("llama", vocab_size=64)
        with pytest.raises(ValueError, match="assisted_generation"):
            self.call(model, other, tokenizer=object(), assistant_tokenizer=object())
        with pytest.raises(ValueError, match="both need the same vocabulary"):
            attach(model, assistant=other)
        with pytest.raises(ValueError, match="omit one of both"):
            attach(model, assistant=toy_model("llama"), speculate="prompt")

    def test_one_with_a_recurrent_state_drafts_nothing(self):
        model = shared_toy_model("llama", device=DEVICE)
        decoder = GraphDecoder()
        assistant = hybrid_model("qwen3_5_text").to(DEVICE)
        assert assistant.config.vocab_size == model.config.vocab_size
        assert torch.equal(self.call(model, assistant, decoder=decoder), call(model))
        assert decoder.draft_reason == "a recurrent state of the assistant cannot go back"

    def test_attached(self, monkeypatch):
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
        monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
        model = copy.copy(shared_toy_model("gemma3", device=DEVICE))
        assistant = nearly("gemma3")
        how = {**COMMON, "max_new_tokens": 40}
        with attached(model) as info:
            got = model.generate(TEXT, assistant_model=assistant, **how)
            passes = info.drafted_passes
            assert passes
            assert info.fallback_reason is None
        with attached(model, assistant=assistant) as info:
            again = model.generate(TEXT, **how)
            assert info.drafted_passes == passes
        expected = call(model)
        assert torch.equal(got, expected)
        assert torch.equal(again, expected)


def nearly(name):
    """A copy whose weights are moved a little: right in most of its drafts."""
    assistant = toy_model(name)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.02 * noise.to(parameter)
    return assistant


@pytest.mark.usefixtures("always")
class TestTablesOfPositions:
    """GPT-2 looks positions up: one beyond the table is an error, on a GPU of the whole process."""

    IDS = torch.tensor([[17, 93, 5, 64, 40, 88] * 8], device=DEVICE)  # 48 of 64 positions

    @pytest.fixture(autouse=True)
    def _drafts_always(self, monkeypatch):
        monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
        init = Assistant.__init__

        def cheap(self, *args):
            init(self, *args)
            self.cost = 0.01

        monkeypatch.setattr(Assistant, "__init__", cheap)

    def model(self):
        return toy_model("gpt2", max_position_embeddings=64)

    def call(self, model, ids=IDS, new=17, **how):
        mask = torch.ones_like(ids)
        how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **how}
        return model.generate(ids, attention_mask=mask, max_new_tokens=new, **how)

    @pytest.mark.parametrize("new", [12, 14, 17])
    @pytest.mark.parametrize("rows", [1, 2])
    @pytest.mark.parametrize("kind", ["speculate", "assistant"])
    def test_a_call_up_to_the_last_position(self, kind, rows, new):
        model = self.model()
        ids = torch.cat([self.IDS, self.IDS.roll(1, dims=1)])[:rows]
        expected = self.call(self.model(), ids, new)
        given = "prompt" if kind == "speculate" else self.model()
        with attached(model, **{kind: given}) as info:
            for _ in range(2):
                assert torch.equal(self.call(model, ids, new), expected)
            assert info.fallback_reason is None
            assert info.drafted_passes, info.draft_reason

    def test_on_a_cache_of_the_caller(self):
        model = self.model()
        ids = self.IDS[:, :15]
        cache = StaticContiguousCache(model.config, 64)
        expected = self.call(self.model(), ids, 46)
        how = {"past_key_values": cache, "custom_generate": GraphDecoder()}
        got = self.call(model, ids, 46, assistant_model=self.model(), **how)
        assert torch.equal(got, expected)

    def test_a_prompt_as_long_as_the_table(self, monkeypatch):
        monkeypatch.setattr(prompts, "DEVICES", ("cpu", "cuda"))
        model = self.model()
        ids = self.IDS[:, :4].repeat(1, 16)
        expected = self.call(self.model(), ids, 1)
        with attached(model) as info:
            for _ in range(3):
                assert torch.equal(self.call(model, ids, 1), expected)
            assert info.captured_prompts == 1

    def test_a_cache_grows_no_further_than_the_table(self, tmp_path):
        model = self.model()
        ids = self.IDS[:, :15]
        with torch.no_grad():
            model(ids, past_key_values=(cache := StaticContiguousCache(model.config, 32)))
        cache.save(tmp_path / "cache", model=model, tokens=ids)
        cache = StaticContiguousCache.load(tmp_path / "cache", model)
        assert (cache.grows, cache.max_cache_len) == (True, 64)
        cache = StaticContiguousCache(model.config, 40)
        cache.grows = True
        with torch.no_grad():
            model(self.IDS, past_key_values=cache)
        assert cache.max_cache_len == 64

    def test_an_assistant_with_a_shorter_table(self):
        model = toy_model("llama")
        short = toy_model("gpt2", max_position_embeddings=32)
        expected = self.call(toy_model("llama"))
        with attached(model, assistant=short) as info:
            assert torch.equal(self.call(model), expected)
            assert info.draft_reason == "the assistant has 32 positions and the call 64"

    def test_calls_of_threads(self, monkeypatch):
        model = self.model()
        results = {}

        def run(row):
            results[row] = self.call(model, self.IDS.roll(row, dims=1))

        with attached(model):
            monkeypatch.setattr(Turns, "is_wanted", True)
            threads = [Thread(target=run, args=(row,)) for row in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert all(
            torch.equal(results[row], self.call(self.model(), self.IDS.roll(row, dims=1)))
            for row in range(4)
        )


class TestCachesOfAssistants:
    @pytest.mark.parametrize("is_returned", [False, True])
    def test_its_passes_are_made_once(self, is_returned, monkeypatch):
        monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
        monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
        made = []
        init = AssistantStep.__init__

        def counted(self, *args, **kwargs):
            made.append(self)
            init(self, *args, **kwargs)

        monkeypatch.setattr(AssistantStep, "__init__", counted)
        model = toy_model("llama")
        ids = torch.tensor([[17, 93, 5] * 4], device=DEVICE)
        how = {"max_new_tokens": 20, "return_dict_in_generate": is_returned}
        with attached(model, assistant=toy_model("llama")) as info:
            for _ in range(3):
                model.generate(ids, attention_mask=torch.ones_like(ids), **how)
            assert len(made) == 3
            assert (info.calls, info.hits) == (3, 2)

    def test_the_model_itself_is_refused(self):
        model = toy_model("llama")
        with pytest.raises(ValueError, match="the model itself"):
            attach(model, assistant=model)
