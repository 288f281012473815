"""The attention name by itself, in plain `generate`."""

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact, trace_attention
from hf_static_kv.attention import ATTENTION_NAME
from tests.conftest import ARCHITECTURES, COMMON, tiny_model
from tests.decoding.conftest import CAPACITY, OWN_ATTENTION, PROMPT, padded, run, toy_model


def test_the_attention_name_serves_generate_by_itself():
    """With our cache and with others, padded or not, on every architecture."""
    assert ATTENTION_NAME in AttentionInterface().valid_keys()
    few = {"max_new_tokens": 6}
    for name in ARCHITECTURES:
        model = toy_model(name, OWN_ATTENTION[name])
        expected = [run(model, **few), run(model, **padded(), **few)]
        model.set_attn_implementation(ATTENTION_NAME)
        for make in (
            lambda m: StaticContiguousCache(m.config, CAPACITY),
            lambda m: DynamicCache(config=m.config),
        ):
            plain = model.generate(PROMPT, past_key_values=make(model), **COMMON | few)
            ids, mask = padded().values()
            batch = model.generate(
                ids, attention_mask=mask, past_key_values=make(model), **COMMON | few
            )
            assert torch.equal(plain, expected[0]), name
            assert torch.equal(batch, expected[1]), name


class TestKeywordsOfTheModel:
    """A tensor that ours does not read may select keys: MiniMax M3 gives 'sdpa' a mask, and others
    `block_indices`.
    """

    MESSAGE = (
        r"by `block_indices`, a tensor that ours does not read.*set_attn_implementation\('sdpa'\)"
    )

    @pytest.fixture
    def sparse(self):
        types = ["full_attention", "minimax_m3_sparse"]
        sizes = {
            "index_block_size": 2,
            "index_topk_blocks": 2,
            "index_n_heads": 2,
            "index_head_dim": 16,
        }
        return tiny_model("minimax_m3_vl_text", num_hidden_layers=2, layer_types=types, **sizes)

    def test_our_name_refuses_it(self, sparse):
        sparse.set_attn_implementation(ATTENTION_NAME)
        with pytest.raises(ValueError, match=self.MESSAGE):
            sparse(PROMPT.cpu())

    def test_exact_refuses_it(self, sparse):
        with exact(sparse), pytest.raises(ValueError, match=self.MESSAGE):
            sparse(PROMPT.cpu(), use_cache=False)

    def test_a_trace_refuses_it(self, sparse):
        with trace_attention(sparse), pytest.raises(ValueError, match=self.MESSAGE):
            sparse(PROMPT.cpu())

    def test_a_captured_step_falls_back_and_names_it(self, monkeypatch):
        """A model whose attention passes one more tensor under any name but those of transformers."""
        model, decoder = toy_model("llama"), GraphDecoder()
        expected = run(model)
        for layer in model.model.layers:
            own = layer.self_attn.forward

            def forward(*args, own=own, **kwargs):
                usual = model.config._attn_implementation in ("sdpa", "eager")
                return own(*args, **kwargs, **({} if usual else {"block_indices": PROMPT}))

            monkeypatch.setattr(layer.self_attn, "forward", forward)
        assert torch.equal(run(model, decoder=decoder), expected)
        assert "block_indices" in decoder.fallback_reason

    def test_what_a_tokenizer_gives_along_is_no_reason(self):
        model = toy_model("llama", "sdpa")
        expected = model(PROMPT).logits
        model.set_attn_implementation(ATTENTION_NAME)
        assert torch.equal(model(PROMPT, token_type_ids=torch.zeros_like(PROMPT)).logits, expected)
