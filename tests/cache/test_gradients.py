"""A cache gives logits outside of `no_grad`; a backward pass through it raises."""

import pytest
import torch
from transformers import (
    DynamicCache,
)

from hf_static_kv import StaticContiguousCache
from tests.cache.conftest import PROMPT, states
from tests.conftest import toy_model


def test_a_forward_pass_outside_no_grad_gives_the_logits():
    model = toy_model("gemma3")
    ours, theirs = StaticContiguousCache(model.config, 40), DynamicCache(config=model.config)
    for ids in PROMPT.split([6, 4, 1], dim=1):
        logits = model(ids, past_key_values=ours).logits
        assert torch.equal(logits, model(ids, past_key_values=theirs).logits)
    assert not ours.key_storage.requires_grad
    assert ours.key_storage.grad_fn is None
    cache = StaticContiguousCache.from_model(model, 40)
    with torch.no_grad():
        assert torch.equal(
            model(PROMPT, past_key_values=cache).logits[:, -1:].argmax(), logits.argmax()
        )


@pytest.mark.parametrize("passes", [[11], [6, 5], [10, 1]], ids=str)
@pytest.mark.parametrize("what", ["all", "embeddings"])
def test_a_backward_pass_through_the_cache_raises(passes, what):
    model = toy_model("llama")
    model.train()
    cache = StaticContiguousCache(model.config, 40)
    for ids in PROMPT.split(passes, dim=1):
        logits = model(ids, past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="Gradients cannot flow through a StaticContiguousCache"):
        logits.sum().backward() if what == "all" else torch.autograd.grad(
            logits.sum(), model.model.embed_tokens.weight
        )


def test_a_frozen_model_behind_a_prompt_with_gradients_raises_too():
    """Only the first pass's embeddings require grad:

    their gradient through the cache must not silently be missing.
    """
    model = toy_model("llama").requires_grad_(False)
    cache = StaticContiguousCache(model.config, 40)
    embeds = model.get_input_embeddings()(PROMPT[:, :6]).requires_grad_()
    model(inputs_embeds=embeds, past_key_values=cache)
    logits = model(PROMPT[:, 6:], past_key_values=cache).logits
    with pytest.raises(RuntimeError, match="Gradients cannot flow"):
        (logits.sum() + embeds.sum()).backward()
    cache.reset()
    assert not model(PROMPT, past_key_values=cache).logits.requires_grad


def test_assigned_states_with_gradients_leave_the_storage_out_of_the_graph():
    cache = StaticContiguousCache.allocate(
        1, 2, 4, 8, batch_size=2, dtype=torch.float32, device="cpu"
    )
    cache.layers[0].keys = states(requires_grad=True)
    assert not cache.key_storage.requires_grad
