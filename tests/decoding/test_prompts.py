"""Prompts by captured passes: the tokens of no cache, at every size and after every prefix."""

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.decoding import prompts
from tests.conftest import toy_model
from tests.hybrids import hybrid_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch):
    monkeypatch.setattr(prompts, "SIZES", (4, 8, 32))
    monkeypatch.setattr(prompts, "DEVICES", ("cpu", "cuda"))


def text(model, length, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, model.config.vocab_size, (rows, length), generator=generator)
    return ids.to(DEVICE)


class Calls:
    """Calls of one model with one decoder and one cache, each compared with no cache."""

    def __init__(self, model, **how):
        self.model = model
        self.decoder = GraphDecoder()
        self.cache = StaticContiguousCache.from_model(model, 96, **how)

    def __call__(self, ids, mask=None, **more):
        inputs = {"attention_mask": torch.ones_like(ids) if mask is None else mask}
        options = {**OPTIONS, **more}
        own = {"past_key_values": self.cache, "custom_generate": self.decoder}
        before = self.num_runs
        got = self.model.generate(ids, **inputs, **own, **options)
        assert self.decoder.fallback_reason is None
        expected = self.model.generate(ids, **inputs, use_cache=False, **options)
        assert torch.equal(got, expected)
        return self.num_runs - before, got

    num_runs = 0


@pytest.fixture
def count_runs(monkeypatch):
    """Counts prompts that captured passes have computed."""
    own = prompts.Prompts.run

    def run(self, call):
        logits = own(self, call)
        Calls.num_runs += logits is not None
        return logits

    monkeypatch.setattr(prompts.Prompts, "run", run)


@pytest.mark.parametrize("sliding", ["full", "compact"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
def test_every_edge_of_a_size(name, sliding, count_runs):
    model = toy_model(name).to(DEVICE)
    calls = Calls(model, sliding=sliding)
    # With windows, SDPA's memory-efficient kernel is wrong at 64 n + 1 (torch 2.11, H200).
    longest = 68 if DEVICE == "cuda" and name == "gemma3" else 65
    for length in (3, 4, 2, 7, 8, 5, 31, 32, 9, 40, 33, 36, 45, longest):
        ran, _ = calls(text(model, length, seed=length))
        calls.cache.reset()
        assert ran == (length not in (3, 7, 31))  # the first of their sizes
        assert calls.decoder.prompts.reason is None


def test_turns_of_a_chat(count_runs):
    model = toy_model("gemma3").to(DEVICE)
    calls = Calls(model, sliding="compact")
    ids = text(model, 6)
    ran = []
    for turn in range(8):
        one, answer = calls(ids)
        ran.append(one)
        ids = torch.cat([answer, text(model, 1 + turn % 3, seed=turn)], dim=1)
    assert sum(ran) >= 5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padded_rows(attention, count_runs):
    """What a model computes of padding, and in a row of padding alone, is not compared."""
    model = toy_model("qwen3").to(DEVICE)
    model.set_attn_implementation(attention)
    calls = Calls(model, batch_size=3)
    ids = text(model, 7, rows=3)
    for seed in range(4):
        ids = text(model, 7, rows=3, seed=seed)
        mask = torch.ones_like(ids)
        mask[1, : 6 - seed] = 0
        mask[2, :1] = 0
        ran, _ = calls(ids * mask, mask)
        calls.cache.reset()
    assert ran == 1


@pytest.mark.parametrize("change", ["weight", "forward"])
def test_a_changed_model(change, count_runs):
    model = toy_model("llama").to(DEVICE)
    calls = Calls(model)
    for seed in range(3):
        calls(text(model, 6, seed=seed))
        calls.cache.reset()
    assert Calls.num_runs
    mlp = model.model.layers[0].mlp
    if change == "weight":
        with torch.no_grad():
            mlp.up_proj.weight.mul_(-2)
    else:
        own = mlp.forward
        mlp.forward = lambda x: own(x) * 3
    for seed in range(4):
        calls(text(model, 6, seed=seed))
        calls.cache.reset()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_bits_inside_exact(name, count_runs):
    model = toy_model(name).to(DEVICE, torch.bfloat16)
    with exact(model):
        calls = Calls(model)
        for seed in range(4):
            ids = text(model, 6, seed=seed)
            ran, _ = calls(ids)
            scores = {"return_dict_in_generate": True, "output_logits": True}
            calls.cache.reset()
            own = {"past_key_values": calls.cache, "custom_generate": calls.decoder}
            got = model.generate(ids, **OPTIONS, **own, **scores).logits
            calls.cache.reset()
            expected = model.generate(ids, **OPTIONS, use_cache=False, **scores).logits
            assert all(map(torch.equal, got, expected))
    assert ran == 1


def test_a_pass_that_depends_on_the_number_of_tokens():
    model = toy_model("llama").to(DEVICE)
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * (1 + (x.shape[1] > 6))
    calls = Calls(model)
    for seed in range(3):
        ids = text(model, 7, seed=seed)
        ours = {"past_key_values": calls.cache, "custom_generate": calls.decoder}
        got = model.generate(ids, **ours, **OPTIONS)
        assert torch.equal(got, model.generate(ids, **OPTIONS))
        calls.cache.reset()
        is_tried = seed > 0
        reason = calls.decoder.prompts.reason
        assert ("from those of an ordinary pass" in reason) if is_tried else reason is None


def test_a_pass_that_failed_is_tried_again(count_runs, monkeypatch):
    """Once the model is another, or where memory was short."""
    model = toy_model("llama").to(DEVICE)
    mlp = model.model.layers[1].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * (1 + (x.shape[1] > 6))
    calls = Calls(model)
    options = {"past_key_values": calls.cache, "custom_generate": calls.decoder, **OPTIONS}
    for _ in range(3):
        model.generate(text(model, 7), **options)
        calls.cache.reset()
    assert "from those of an ordinary pass" in calls.decoder.prompts.reason
    del mlp.forward
    found = []
    for _ in range(3):
        found.append(calls(text(model, 7))[0])
        calls.cache.reset()
    assert found == [0, 1, 1]

    errors = [torch.OutOfMemoryError("CUDA out of memory")]
    verify = prompts.verify_prompt

    def failing(*args):
        if errors:
            raise errors.pop()
        verify(*args)

    monkeypatch.setattr(prompts, "verify_prompt", failing)
    found = []
    for _ in range(4):
        found.append(calls(text(model, 3))[0])
        calls.cache.reset()
    assert found == [0, 0, 1, 1]


def test_a_cache_whose_storage_is_made_by_its_first_pass(count_runs):
    model = toy_model("llama").to(DEVICE)
    calls = Calls(model)
    calls.cache = StaticContiguousCache(model.config, 96)
    assert not calls.cache.is_allocated
    for ran in (0, 1, 1):
        assert calls(text(model, 6))[0] == ran
        calls.cache.reset()
    assert calls.decoder.num_steps == 1


def test_prompts_that_the_model_must_compute():
    model = hybrid_model("falcon_h1").eval().to(DEVICE)
    calls = Calls(model)
    for _ in range(2):
        calls(text(model, 6))
        assert calls.decoder.prompts.reason == "padding would change a recurrent state"
        calls.cache.reset()
    other = Calls(toy_model("llama").to(DEVICE))
    own = {"past_key_values": other.cache, "custom_generate": other.decoder}
    other.model.generate(text(other.model, 6), prefill_chunk_size=4, **own, **OPTIONS)
    assert other.decoder.prompts.reason == "the prompt is read in chunks of the caller's size"
    other.cache.reset()
    other(text(other.model, 6))
    assert other.decoder.prompts.reason is None


def test_fewer_rows_than_the_cache_has(count_runs):
    """The rows of the prompt are those of the cache, also for what transformers' loop appends."""
    model = toy_model("llama").to(DEVICE)
    calls = Calls(model, batch_size=2)
    for length in (6, 7, 5):
        ran, _ = calls(text(model, length, seed=length))
        assert calls.cache.batch_size == 1
        assert calls.cache.layers[0].keys.shape[0] == 1
        calls.cache.reset()
    assert ran


def test_old_passes_are_dropped(count_runs, monkeypatch):
    monkeypatch.setattr(prompts, "_MAX_PASSES", 2)
    model = toy_model("llama").to(DEVICE)
    calls = Calls(model)
    ran = []
    for length in (3, 3, 7, 7, 3, 20, 20, 3, 7):
        ran.append(calls(text(model, length))[0])
        calls.cache.reset()
        assert len(calls.decoder.prompts.steps) <= 2
    # The third size drops the one of 7 tokens, which was needed before that of 3.
    assert ran == [0, 1, 0, 1, 1, 0, 1, 1, 0]
