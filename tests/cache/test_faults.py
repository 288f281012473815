"""A forward pass that fails anywhere can be retried, and batch rows that cannot be copied are not
lost.
"""

import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_static_kv import StaticContiguousCache
from hf_static_kv.cache.passes import UnfinishedPass
from tests.cache.conftest import PROMPT, OutOfMemory, assert_same, fail_once, generate, snapshot
from tests.conftest import toy_model

EVERY_PLACE = [(layer_idx, True) for layer_idx in range(3)] + [
    (layer_idx, False) for layer_idx in range(2)
]


@pytest.mark.parametrize("whole_steps", [0, 3], ids=["prefill", "decode"])
@pytest.mark.parametrize(("layer_idx", "before_write"), EVERY_PLACE)
def test_a_generation_that_failed_in_any_layer_goes_on(layer_idx, before_write, whole_steps):
    """The cache holds the whole steps and no more, and `generate` on it gives the tokens that it
    would have given.
    """
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
def test_a_failed_forward_reads_as_before_and_can_be_retried(
    layer_idx, before_write, tokens, caplog
):
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
    assert (
        f"did not finish: it is discarded, and writing starts again at position {start}"
        in caplog.text
    ) == (something_was_written)


def test_a_failure_behind_the_last_layer_is_undone_with_crop():
    """In the head all layers have written, and the cache cannot know that the pass did not end
    well.
    """
    model = toy_model("llama")
    cache = StaticContiguousCache.from_model(model, 40)
    hook = fail_once(model, layer_idx=1, at_call=1)
    with torch.no_grad():
        with pytest.raises(OutOfMemory):
            model(PROMPT, past_key_values=cache)
        hook.remove()
        cache.crop(-PROMPT.shape[1])
        assert (
            model(PROMPT, past_key_values=cache).logits[:, -1].argmax()
            == model(PROMPT).logits[:, -1].argmax()
        )
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


def test_a_pass_that_fails_again_and_again_can_still_be_retried():
    model = toy_model("llama", num_hidden_layers=4)
    cache = StaticContiguousCache(model.config, 40)
    with torch.no_grad():
        for tokens in (11, 11, 4, 1, 7):
            hook = fail_once(model, 2, 1)
            with pytest.raises(OutOfMemory):
                model(PROMPT[:, :tokens], past_key_values=cache)
            hook.remove()
        assert (
            model(PROMPT, past_key_values=cache).logits[:, -1].argmax()
            == model(PROMPT).logits[:, -1].argmax()
        )


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 1, 0], [3, 0, 1, 2]], ids=str)
def test_layers_that_run_in_another_order_than_their_numbers(order):
    model = toy_model("llama", num_hidden_layers=4)
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in order])
    expected = generate(model, PROMPT, None).tolist()
    assert generate(model, PROMPT, StaticContiguousCache(model.config, 40)).tolist() == expected
    assert generate(model, PROMPT, StaticContiguousCache.from_model(model, 40)).tolist() == expected


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


# --- layers that exist and do not run


def skip(layer, when=lambda hidden_states: True):
    """The layer passes its input on, as in layer skipping and early exit; `when` the states make
    it.
    """
    own = layer.forward

    def forward(hidden_states, *args, **kwargs):
        return hidden_states if when(hidden_states) else own(hidden_states, *args, **kwargs)

    layer.forward = forward


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 2}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 3}]
)
@pytest.mark.parametrize("when", ["always", "decoding"])
def test_a_layer_that_does_not_run_is_named(how, when):
    model = toy_model("llama", num_hidden_layers=3)
    cache = StaticContiguousCache.from_model(model, 64, batch_size=2)
    skip(model.model.layers[1], lambda states: when == "always" or states.shape[1] < 4)
    with pytest.raises(
        UnfinishedPass, match=r"[Ll]ayers? \[1\] of 3 .*DynamicCache\(config=model.config\)"
    ):
        generate(model, PROMPT, cache, **how)
    del model.model.layers[1].forward
    cache.reset()
    assert generate(model, PROMPT, cache).tolist() == generate(model, PROMPT, None).tolist()


def test_layers_that_are_skipped_in_turn_are_not_mixed():
    """The second pass of decoding begins with the very layer that the first one has left out."""
    model, passes = toy_model("llama", num_hidden_layers=2), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    skip(model.model.layers[1], lambda states: len(passes) == 2)
    skip(model.model.layers[0], lambda states: len(passes) == 3)
    with pytest.raises(UnfinishedPass, match=r"\[1\] of 2"):
        generate(model, PROMPT, StaticContiguousCache.from_model(model, 64))


def test_what_a_failed_call_left_is_no_layer_that_does_not_run(caplog):
    """In a custom loop as well, which is not asked what its prompt is."""
    model = toy_model("llama")
    expected = generate(model, PROMPT, None).tolist()

    def loop(model, input_ids, **kwargs):
        return model._sample(input_ids, **kwargs)

    for own in (None, loop):
        cache = StaticContiguousCache.from_model(model, 40)
        hook = fail_once(model, 0, at_call=1)
        with pytest.raises(OutOfMemory):
            generate(model, PROMPT, cache)
        hook.remove()
        caplog.clear()
        assert generate(model, PROMPT, cache, custom_generate=own).tolist() == expected
        assert (
            "did not finish: it is discarded, and writing starts again at position 0" in caplog.text
        )


def rows_in_order(cache):
    return [layer.keys[:, 0, :, 0].tolist() for layer in cache.layers]


def three_rows():
    cache = StaticContiguousCache.allocate(
        4, [1, 1, 2, 2], 4, 8, batch_size=3, dtype=torch.float32, device="cpu"
    )
    for layer_idx, heads in enumerate([1, 1, 2, 2]):
        numbers = torch.arange(6.0).view(3, 1, 2, 1).expand(3, heads, 2, 4) + 10 * layer_idx
        cache.update(numbers, -numbers, layer_idx)
    return cache


@pytest.mark.parametrize("at_call", [1, 2, 3, 4])
def test_reordering_without_memory_changes_nothing(monkeypatch, at_call):
    cache = three_rows()
    before, calls, real = snapshot(cache), [0], torch.empty_like

    def empty_like(*args, **kwargs):
        calls[0] += 1
        if calls[0] == at_call:
            raise OutOfMemory
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", empty_like)
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
    monkeypatch.setattr(
        cache.layers[2], "select_rows", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert cache.seq_len == 0


def test_a_failed_pass_leaves_the_batch_as_it_was():
    model = toy_model("llama")
    cache = StaticContiguousCache.from_model(model, 40, batch_size=4)
    hook = fail_once(model, 0, 1)
    with pytest.raises(OutOfMemory), torch.no_grad():
        model(PROMPT, past_key_values=cache)
    hook.remove()
    assert cache.batch_size == 4
