"""Keys and values in 8 bits: what is stored and read, and the caches that hold it."""

import copy
import pickle

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, cache_bytes, exact
from hf_static_kv.cache.codes import decoded, encoded
from hf_static_kv.cache.files import CacheFile
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.decoding.steps import _sums
from hf_static_kv.inspection.attention_trace import trace_attention
from hf_static_kv.testing import random_model
from tests.conftest import BATCH, COMMON, PROMPT, tiny_model, toy_config, toy_model

CAPACITY = 32


def coded(model, **how):
    return StaticContiguousCache.from_model(model, CAPACITY, kv_dtype="int8", **how)


def generated(model, cache, ids=PROMPT, **how):
    mask = torch.ones_like(ids)
    how = {**COMMON, **how}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **how)


class TestCodes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_number_is_read_within_half_a_code(self, dtype):
        x = torch.randn(3, 2, 5, 64).to(dtype) * 10.0 ** torch.arange(-2, 1)[:, None, None, None]
        x = x.to(dtype)
        y = decoded(encoded(x), dtype)
        # A code is scale = max / 127 wide; then the result is rounded to the dtype.
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        bound = scale * (0.5 + 1e-4) + x.float().abs() * torch.finfo(dtype).eps
        assert y.dtype == dtype
        assert ((y.float() - x.float()).abs() <= bound).all()

    def test_the_largest_number_of_a_head_and_zero_are_kept(self):
        x = torch.tensor([[3.0, -127.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        assert torch.equal(decoded(encoded(x), x.dtype), x)

    def test_a_token_has_its_own_scale(self):
        x = torch.randn(6, 8)
        whole = encoded(x)
        assert whole.shape == (6, 12)
        assert torch.equal(whole[2:4], encoded(x[2:4]))

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_what_is_not_finite_shows(self, number):
        x = torch.ones(2, 4)
        x[0, 1] = number
        y = decoded(encoded(x), x.dtype)
        assert y[0].isnan().all()
        assert y[1].equal(x[1])

    def test_numbers_below_the_least_scale_become_zero(self):
        assert not decoded(encoded(torch.full((1, 4), 1e-45)), torch.float32).any()


class TestCache:
    @pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt2", "llama4"])
    def test_it_reads_what_the_codes_of_the_states_say(self, name):
        model = toy_model(name)
        cache = coded(model)
        usual = StaticContiguousCache.from_model(model, CAPACITY)
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
            model(PROMPT, past_key_values=usual)
        # The first layer has the same states in both.
        first, same = cache.layers[0], usual.layers[0]
        assert torch.equal(first.keys, decoded(encoded(same.keys), first.dtype))
        assert torch.equal(first.values, decoded(encoded(same.values), first.dtype))
        assert cache.key_storage.dtype == torch.int8
        assert cache.kv_dtype == "int8"

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi3", "llama4", "mixtral"])
    def test_steps_and_a_whole_pass_have_the_same_tokens(self, name):
        """A token sees the codes of its own pass, so how a text is cut matters by rounding alone."""
        model = toy_model(name)
        whole = generated(model, coded(model))
        cut = coded(model)
        with torch.no_grad():
            model(PROMPT[:, :5], past_key_values=cut)
        assert torch.equal(generated(model, cut), whole)

    @pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
    @pytest.mark.parametrize("ids", [PROMPT, BATCH], ids=["one", "batch"])
    def test_a_recorded_step_has_them_too(self, name, ids):
        model = toy_model(name)
        rows = len(ids)
        decoder = GraphDecoder()
        tokens = generated(model, coded(model, batch_size=rows), ids, custom_generate=decoder)
        assert decoder.fallback_reason is None
        assert torch.equal(tokens, generated(model, coded(model, batch_size=rows), ids))

    def test_drafts_are_verified_within_a_few_codes(self):
        """Some codes round the other way where there are many."""
        wide = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8}
        config = toy_config("llama", **wide, num_hidden_layers=8, initializer_range=0.08 * 0.5**0.5)
        model = random_model(config, seed=2)
        decoder = GraphDecoder()
        how = {"custom_generate": decoder, "prompt_lookup_num_tokens": 8}
        cache = StaticContiguousCache.from_model(model, 120, kv_dtype="int8")
        generated(model, cache, PROMPT.repeat(1, 5), **how)
        assert (decoder.fallback_reason, decoder.draft_reason) == (None, None)

    def test_latents_are_left_to_the_loop(self):
        latent = {"kv_lora_rank": 24, "q_lora_rank": 16, "v_head_dim": 12, "n_group": 1}
        latent |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "num_key_value_heads": 4}
        model = tiny_model("deepseek_v3", topk_group=1, first_k_dense_replace=1, **latent)
        decoder = GraphDecoder()
        tokens = generated(model, coded(model), custom_generate=decoder)
        assert "latents" in decoder.fallback_reason
        assert torch.equal(tokens, generated(model, coded(model)))

    def test_a_trace_reads_them(self):
        model = toy_model("llama")
        decoder = GraphDecoder()
        with trace_attention(model) as trace:
            tokens = generated(model, coded(model), custom_generate=decoder)
        assert decoder.fallback_reason is None
        assert len(trace.rows) == 2 * COMMON["max_new_tokens"]
        assert torch.equal(tokens, generated(model, coded(model)))

    def test_a_layer_alone_has_them(self):
        cache = StaticContiguousCache(toy_model("llama").config, CAPACITY, kv_dtype="int8")
        states = torch.randn(1, 2, 3, 16)
        cache.layers[0].update(states, states)
        assert cache.layers[0].group.keys.dtype == torch.int8

    def test_a_pickle_of_before_grows(self):
        cache = StaticContiguousCache.allocate(1, 2, 8, 6, dtype=torch.float32)
        group = cache.storage_groups[0]
        state = group.__getstate__()
        del state["dtypes"]
        group.__setstate__(state)
        assert group.copy_with_capacity(12, 1).keys.shape[3] == 12

    def test_it_learns_its_shape_from_the_first_pass(self):
        model = toy_model("llama")
        cache = StaticContiguousCache(model.config, CAPACITY, kv_dtype="int8")
        assert torch.equal(generated(model, cache), generated(model, coded(model)))
        assert cache.key_storage.dtype == torch.int8

    def test_it_grows(self):
        model = toy_model("llama")
        cache = StaticContiguousCache.from_model(model, 4, kv_dtype="int8")
        cache.grows = True
        assert torch.equal(generated(model, cache), generated(model, coded(model)))

    def test_a_compiled_model_writes_them(self):
        model = toy_model("llama")
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        caches = coded(model), coded(model)
        with torch.no_grad():
            logits = compiled(PROMPT, past_key_values=caches[0]).logits
            expected = model(PROMPT, past_key_values=caches[1]).logits
        assert torch.equal(logits, expected)
        assert torch.equal(caches[0].key_storage, caches[1].key_storage)
        assert caches[0].seq_len == PROMPT.shape[1]

    def test_beams_are_rows(self):
        """Rows are reordered as they are stored."""
        model = toy_model("llama")
        beams = {"num_beams": 3, "max_new_tokens": 8}
        tokens = generated(model, coded(model, batch_size=3), **beams)
        grown = StaticContiguousCache(model.config, 4, kv_dtype="int8")
        grown.grows = True
        assert torch.equal(generated(model, grown, **beams), tokens)

    def test_copies_and_pickles_go_on(self):
        model = toy_model("gemma3")
        cache = coded(model, sliding="compact")
        tokens = generated(model, cache)
        others = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        longer = torch.cat([tokens, PROMPT[:, :1]], dim=1)
        expected = generated(model, cache, longer, max_new_tokens=5)
        for other in others:
            assert torch.equal(generated(model, other, longer, max_new_tokens=5), expected)

    def test_states_can_be_assigned(self):
        cache = StaticContiguousCache.allocate(1, 2, 8, 6, dtype=torch.float32, kv_dtype="int8")
        keys, values = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
        cache.layers[0].keys, cache.layers[0].values = keys, values
        assert cache.seq_len == 3
        assert torch.equal(cache.layers[0].keys, decoded(encoded(keys), torch.float32))
        with pytest.raises(ValueError, match=r"holds up to \[1, 2, 6, 8\]"):
            cache.layers[0].keys = torch.randn(1, 2, 3, 12)

    def test_its_bytes_are_those_that_are_told(self):
        model = toy_model("llama")
        told = cache_bytes(model.config, CAPACITY, kv_dtype="int8")
        assert coded(model).memory_bytes == told
        # Of a head of 16 numbers: 16 codes and a scale of 4 bytes, in the place of 64 bytes.
        assert told * 64 == cache_bytes(model.config, CAPACITY, dtype=torch.float32) * 20


class TestFiles:
    def test_a_file_keeps_the_codes(self, tmp_path):
        model = toy_model("gemma3")
        cache = coded(model, sliding="compact")
        tokens = generated(model, cache)
        cache.save(tmp_path / "chat.safetensors", model=model, tokens=tokens)
        loaded = StaticContiguousCache.load(tmp_path / "chat.safetensors", model)
        assert loaded.kv_dtype == "int8"
        for own, other in zip(cache.layers, loaded.layers, strict=True):
            newest = min(own.keys.shape[2], other.keys.shape[2])
            assert torch.equal(own.keys[:, :, -newest:], other.keys[:, :, -newest:])
            assert torch.equal(own.values[:, :, -newest:], other.values[:, :, -newest:])

    def test_a_usual_cache_does_not_take_it(self, tmp_path):
        model = toy_model("llama")
        cache = coded(model)
        generated(model, cache)
        cache.save(tmp_path / "chat.safetensors", model=model)
        usual = StaticContiguousCache.from_model(model, CAPACITY)
        file = CacheFile(tmp_path / "chat.safetensors")
        with file, pytest.raises(ValueError, match="in int8"):
            usual.fill(file, model, 4)
        assert usual.seq_len == 0


class TestRefused:
    def test_another_name(self):
        with pytest.raises(ValueError, match="kv_dtype='fp4': choose \"int8\""):
            StaticContiguousCache(toy_model("llama").config, CAPACITY, kv_dtype="fp4")

    def test_a_head_of_14_dims_before_any_pass(self):
        with pytest.raises(ValueError, match="multiple of 4, got 14"):
            StaticContiguousCache(toy_config("llama", head_dim=14), CAPACITY, kv_dtype="int8")

    def test_a_head_whose_dim_is_no_multiple_of_4(self):
        with pytest.raises(ValueError, match="multiple of 4, got 6"):
            StaticContiguousCache.allocate(1, 1, 6, 8, kv_dtype="int8")

    @pytest.mark.parametrize(
        "how", [{}, {"custom_generate": GraphDecoder()}], ids=["loop", "graph"]
    )
    def test_inside_exact(self, how):
        model = toy_model("llama")
        cache = coded(model)
        with exact(model), pytest.raises(ValueError, match="this cache has a kv_dtype"):
            generated(model, cache, **how)
        assert cache.seq_len == 0
        generated(model, cache)

    def test_a_pass_inside_exact(self):
        model = toy_model("llama")
        cache = coded(model)
        with exact(model), pytest.raises(ValueError, match="this cache has a kv_dtype"):
            model(PROMPT, past_key_values=cache)
        assert cache.seq_len == 0


def test_a_trial_sums_codes_as_they_are_stored(monkeypatch):
    """Decoded, all layers at once would take several times the memory of the cache."""
    model = toy_model("llama")
    cache = coded(model)
    generated(model, cache)
    monkeypatch.setattr(StaticContiguousLayer, "as_read", None)
    before = _sums(cache)
    next(iter(cache.layers[1].stored()))[0, 0, 0, 0] += 1
    after = _sums(cache)
    assert [one != other for one, other in zip(before, after, strict=True)] == [0, 0, 1, 0]
