"""One thread at a time uses a cache: a second one is refused, and the first goes on."""

import copy
import threading
import time

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache
from tests.cache.conftest import PROMPT, OutOfMemory, fail_once, generate, update
from tests.conftest import toy_model


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


@pytest.mark.parametrize(
    "loop", [{}, {"custom_generate": GraphDecoder()}], ids=["plain", "decoder"]
)
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

    first = threading.Thread(
        target=lambda: generate(model, PROMPT, cache, streamer=Stream(), **loop)
    )
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
    cache = StaticContiguousCache.allocate(
        3, 2, 4, 8, batch_size=2, dtype=torch.float32, device="cpu"
    )
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
