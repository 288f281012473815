"""Calls of the decoder, on a GPU where there is one."""

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from hf_static_kv import StaticContiguousCache
from tests.conftest import ARCHITECTURES, BATCH, COMMON, PROMPT
from tests.conftest import toy_model as toy_on_cpu

CAPACITY = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, BATCH = PROMPT.to(DEVICE), BATCH.to(DEVICE)
OWN_ATTENTION = {
    name: "eager" if name in ("gemma2", "gpt_oss") else "sdpa" for name in ARCHITECTURES
}


def toy_model(*args, **kwargs):
    return toy_on_cpu(*args, **kwargs).to(DEVICE)


def toy_with_images():
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    sizes = {"image_size": 28, "patch_size": 14}
    text = toy_on_cpu("gemma3").config.to_dict()
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision | sizes, mm_tokens_per_image=1)
    )


def run(model, ids=PROMPT, decoder=None, cache=None, seed=None, **kwargs):
    """One call: without a cache, or with ours in the hands of the decoder."""
    if seed is not None:
        torch.manual_seed(seed)
    how = {"use_cache": False}
    if decoder is not None:
        cache = cache if cache is not None else StaticContiguousCache(model.config, CAPACITY)
        how = {"past_key_values": cache, "custom_generate": decoder}
    return model.generate(
        ids, **{**COMMON, "attention_mask": torch.ones_like(ids), **how, **kwargs}
    )


def padded():
    mask = torch.ones_like(BATCH)
    mask[1, :4] = 0
    return {"ids": BATCH * mask, "attention_mask": mask}


@pytest.fixture
def model():
    return toy_model("gemma3")
