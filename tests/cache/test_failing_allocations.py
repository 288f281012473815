"""The n-th allocation of the package fails, for every n: the call is right or raises, and the next
one is right.

Lines that allocate are counted: a line that allocates again and again fails at its first time.
"""

import functools
import sys
from contextlib import contextmanager

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, attach, attaching, attachment, served
from tests.cache.conftest import PROMPT, generate
from tests.conftest import toy_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = PROMPT.to(DEVICE)
# What allocates memory: functions of torch, and methods of a tensor.
FUNCTIONS = (
    "arange",
    "cat",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "ones",
    "ones_like",
    "tensor",
    "zeros",
)
METHODS = ("clone", "index_select", "new_empty", "new_full", "new_zeros")
MOST = 100  # lines that allocate in one call


@contextmanager
def failing_at(number):
    """The line of this number raises when it allocates; yields the lines so far, in the order of
    their first time.
    """
    places = {}

    def counted(function):
        @functools.wraps(function)
        def allocate(*args, **kwargs):
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__", "").startswith("hf_static_kv."):
                place = caller.f_globals["__name__"], caller.f_lineno
                is_new = place not in places
                places[place] = None
                if is_new and len(places) == number:
                    raise torch.OutOfMemoryError(f"CUDA out of memory in {place}")
            return function(*args, **kwargs)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            patch.setattr(torch, name, counted(getattr(torch, name)))
        for name in METHODS:
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
        yield places


def outcome(act, number):
    """The tokens, or None for a call that was out of memory; and how many lines have allocated."""
    with failing_at(number) as places:
        try:
            return act(), len(places)
        except torch.OutOfMemoryError:
            return None, len(places)


def numbers(act):
    """Run `act(n)` for n = 1, 2, ..., until it says that fewer than n lines have allocated."""
    for number in range(1, MOST):
        if act(number) < number:
            return number - 1
    raise AssertionError(f"more than {MOST} lines allocate in one call")


def held(cache, length):
    """All that a reader sees of the first tokens."""
    return [
        (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone())
        for layer in cache.layers
    ]


@pytest.mark.parametrize(
    ("storage", "loop"), [("allocated", "plain"), ("grows", "plain"), ("grows", "decoder")]
)
def test_a_second_turn_on_a_cache_of_ones_own(storage, loop):
    """Tokens that the cache held read as before, and the turn can be taken again."""
    model = toy_model("llama").to(DEVICE)
    start = PROMPT[:, :5]
    expected = generate(model, PROMPT, None)

    def turn(number):
        cache = StaticContiguousCache.from_model(model, 8 if storage == "grows" else 40)
        cache.grows = storage == "grows"
        with torch.no_grad():
            model(start, past_key_values=cache)
        before = held(cache, 5)
        how = {"custom_generate": GraphDecoder()} if loop == "decoder" else {}
        tokens, count = outcome(lambda: generate(model, PROMPT, cache, **how), number)
        assert tokens is None or torch.equal(tokens, expected)
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        assert cache.seq_len >= 5
        for one, other in zip(before, held(cache, 5), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        cache.crop(5 - cache.seq_len)
        assert torch.equal(generate(model, PROMPT, cache, **how), expected)
        return count

    assert numbers(turn) >= {"plain": 0, "decoder": 10}[loop]


@pytest.mark.parametrize("sliding", ["full", "compact"])
def test_the_first_pass_of_a_lazy_cache(sliding):
    model = toy_model("gemma3").to(DEVICE)
    expected = generate(model, PROMPT, None)

    def first(number):
        cache = StaticContiguousCache(model.config, 40, sliding=sliding)
        tokens, count = outcome(lambda: generate(model, PROMPT, cache), number)
        assert tokens is None or torch.equal(tokens, expected)
        if tokens is None:
            assert cache.seq_len in (0, PROMPT.shape[1])
            cache.reset()
            assert torch.equal(generate(model, PROMPT, cache), expected)
        return count

    assert numbers(first) >= 1


@pytest.mark.parametrize(
    ("name", "reuse_prefix", "loop"),
    [("llama", False, "plain"), ("gemma3", True, "plain"), ("llama", True, "decoder")],
)
def test_a_call_of_an_attached_model(name, reuse_prefix, loop, monkeypatch):
    """It runs with transformers' own cache, or raises; no cache of the pool stays in use."""
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
    monkeypatch.setattr(served, "_DECODER_DEVICES", (DEVICE,) if loop == "decoder" else ())
    model = toy_model(name).to(DEVICE)
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(PROMPT)

    def call(**other):
        return model.generate(PROMPT, attention_mask=mask, **how, **other)

    expected = call(use_cache=False)

    def first(number):
        attach(model, reuse_prefix=reuse_prefix)
        tokens, count = outcome(call, number)
        assert tokens is None or torch.equal(tokens, expected)
        pool = attachment(model).pool
        assert pool.in_use == []
        assert torch.equal(call(), expected)
        attaching.detach(model)
        return count

    assert numbers(first) >= {"plain": 1, "decoder": 10}[loop]
