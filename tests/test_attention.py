"""The attention name by itself, in plain `generate`."""

import torch
from transformers import AttentionInterface, DynamicCache

from hf_static_kv import StaticContiguousCache
from hf_static_kv.attention import ATTENTION_NAME
from tests.conftest import ARCHITECTURES, COMMON
from tests.decoding.conftest import CAPACITY, OWN_ATTENTION, PROMPT, padded, run, toy_model


def test_the_attention_name_serves_generate_by_itself():
    """With our cache and with others, padded or not, on every architecture."""
    assert ATTENTION_NAME in AttentionInterface().valid_keys()
    few = {"max_new_tokens": 6}
    for name in ARCHITECTURES:
        model = toy_model(name, OWN_ATTENTION[name])
        expected = [run(model, **few), run(model, **padded(), **few)]
        model.set_attn_implementation(ATTENTION_NAME)
        for make in (lambda m: StaticContiguousCache(m.config, CAPACITY), lambda m: DynamicCache(config=m.config)):
            plain = model.generate(PROMPT, past_key_values=make(model), **COMMON | few)
            ids, mask = padded().values()
            batch = model.generate(ids, attention_mask=mask, past_key_values=make(model), **COMMON | few)
            assert torch.equal(plain, expected[0]), name
            assert torch.equal(batch, expected[1]), name
