"""While one thread records, verifies and runs a step, other threads find the model as it always is."""

import threading

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, attach, detach, exact
from hf_static_kv.kernels import rotary
from hf_static_kv.patching import IS_VERIFICATION
from hf_static_kv.program import step as step_module
from tests.cache.test_threads import in_thread
from tests.conftest import COMMON
from tests.decoding.conftest import CAPACITY, OWN_ATTENTION, PROMPT, run, toy_model

NAMES = ["llama", "gemma3", "gpt2", "qwen3_moe"]
CALLS = {
    "generate": lambda model: model.generate(PROMPT, **COMMON),
    "without a cache": lambda model: model.generate(PROMPT, **COMMON, use_cache=False),
    "beams": lambda model: model.generate(PROMPT, **COMMON, num_beams=3),
    "one pass": lambda model: torch.no_grad()(model)(PROMPT).logits,
}


def visible(model):
    """What a thread that runs the model reads of it."""
    modules = list(model.modules())
    return [
        [(module.__dict__.get("layer_idx"), module.__dict__.get("forward")) for module in modules],
        [list(module._forward_hooks.values()) for module in modules],
        [
            (type(module.config), module.config._attn_implementation)
            for module in modules
            if hasattr(module, "config")
        ],
    ]


def during_a_capture(monkeypatch, act):
    """Call `act` when a step writes its first keys, recorded or not, and in the first ordinary pass
    beside it.
    """
    thread = threading.current_thread()  # `act` may run the model in another one
    for owner, name, is_time in (
        (step_module, "write_tokens", lambda: True),
        (StaticContiguousCache, "update", IS_VERIFICATION.get),
    ):
        own, times = getattr(owner, name), []

        def spy(*args, own=own, is_time=is_time, times=times, **kwargs):
            if threading.current_thread() is thread and is_time() and not times:
                times.append(act())
            return own(*args, **kwargs)

        monkeypatch.setattr(owner, name, spy)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_during_a_capture(name, kind, monkeypatch):
    model, decoder, found = toy_model(name, OWN_ATTENTION[name]), GraphDecoder(), []
    expected, tokens, before = CALLS[kind](model), run(model), visible(model)
    during_a_capture(
        monkeypatch, lambda: found.append((visible(model), in_thread(lambda: CALLS[kind](model))))
    )
    assert torch.equal(run(model, decoder=decoder), tokens)
    assert decoder.fallback_reason is None
    assert len(found) == 2
    for state, result in found:
        assert state == before
        if result.is_cuda and result.is_floating_point():  # meanwhile attention runs without cuDNN
            torch.testing.assert_close(result, expected)
        else:
            assert torch.equal(result, expected)


def test_a_call_during_a_step_that_runs_the_model_itself():
    """A hook keeps a step from being recorded.

    It is called in steps and in the other thread's passes.
    """
    model, decoder, found = toy_model("llama"), GraphDecoder(), []
    cache, thread = StaticContiguousCache(model.config, CAPACITY), threading.current_thread()
    expected = run(model)

    def hook(*args):
        if threading.current_thread() is thread and cache.seq_len == PROMPT.shape[1] + 3:
            found.append((visible(model), in_thread(lambda: run(model))))

    model.model.layers[1].mlp.register_forward_hook(hook)
    before = visible(model)
    assert torch.equal(run(model, decoder=decoder, cache=cache), expected)
    assert found
    for state, tokens in found:
        assert state == before
        assert torch.equal(tokens, expected)


def test_the_rotation_of_other_threads_is_their_own(monkeypatch):
    """`apply_rotary_pos_emb` is a global function of a model's file: it cannot be replaced for one
    thread alone.
    """
    model, thread, threads = toy_model("llama"), threading.current_thread(), set()
    own = rotary.rotary

    def spy(*args):
        threads.add(threading.current_thread())
        return own(*args)

    monkeypatch.setattr(rotary, "rotary", spy)
    during_a_capture(monkeypatch, lambda: in_thread(lambda: run(model)))
    run(model, decoder=GraphDecoder())
    assert threads == {thread}


def test_inside_exact_a_capture_has_the_rotation_of_exact(monkeypatch):
    model, decoder, found = toy_model("llama", "eager"), GraphDecoder(), []
    with exact(model):
        expected = run(model)
        during_a_capture(monkeypatch, lambda: found.append(in_thread(lambda: run(model))))
        assert torch.equal(run(model, decoder=decoder), expected)
    assert decoder.fallback_reason is None
    assert len(found) == 2
    assert all(torch.equal(tokens, expected) for tokens in found)


@pytest.mark.parametrize("is_attached", [False, True], ids=["", "attached"])
def test_many_calls_at_once(is_attached):
    """Every decoder is new, so that captures never end."""
    model, errors, stop = toy_model("llama"), [], threading.Event()
    expected, tokens = {kind: call(model) for kind, call in CALLS.items()}, run(model)
    before = visible(model)

    def call_and_compare():
        while not stop.is_set():
            for kind, call in CALLS.items():
                try:
                    if not torch.equal(call(model), expected[kind]) or visible(model) != before:
                        errors.append(kind)
                except Exception as error:
                    errors.append((kind, error))

    if is_attached:
        attach(model, reuse_prefix=True)
    others = [threading.Thread(target=call_and_compare) for _ in range(2)]
    for thread in others:
        thread.start()
    for _ in range(12):
        decoder = GraphDecoder()
        if (
            not torch.equal(run(model, decoder=decoder), tokens)
            or decoder.fallback_reason is not None
        ):
            errors.append(decoder.fallback_reason)
    stop.set()
    for thread in others:
        thread.join()
    detach(model)
    assert errors == []
