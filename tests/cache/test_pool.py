"""The pool: which cache a call is given, what is kept, and the bound."""

import pytest
import torch
from transformers import GenerationConfig

from hf_static_kv import StaticContiguousCache, attach, cache_bytes, served
from hf_static_kv.cache import pool as pool_module
from hf_static_kv.cache.pool import CachePool
from hf_static_kv.cache.request import Fallback, Request
from tests.conftest import PROMPT, toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model("llama")


def request(model, length=10, rows=1, new_tokens=20, ids=None, **config):
    ids = torch.full((rows, length), 7) if ids is None else ids
    settings = GenerationConfig(max_length=ids.shape[1] + new_tokens, **config)
    return Request(model, ids, settings, {"attention_mask": torch.ones_like(ids)})


def use(pool, asked, identity=None, error=None):
    """One call that reads its prompt; the cache it was given, and how many tokens that held."""
    with pool.cache_for(asked, identity) as cache:
        before = cache.seq_len
        with torch.no_grad():
            asked.model(asked.input_ids[:, before:], past_key_values=cache)
        cache.remember(asked.input_ids)
        if error is not None:
            raise error
    return cache, before


@pytest.mark.parametrize(
    ("length", "new", "capacity"), [(10, 20, 256), (200, 57, 256), (200, 58, 512), (600, 1, 1024)]
)
def test_a_capacity_is_a_power_of_two(model, length, new, capacity):
    with CachePool().cache_for(request(model, length, new_tokens=new)) as cache:
        assert cache.max_cache_len == capacity
        assert cache.grows


def test_calls_of_like_size_are_given_the_same_cache(model):
    pool = CachePool()
    first, _ = use(pool, request(model))
    again, _ = use(pool, request(model, length=100))
    assert again is first
    assert pool.hits == 1
    assert use(pool, request(model, rows=2))[0] is not first
    assert use(pool, request(model, length=300))[0] is not first
    assert use(pool, request(model))[0] is first  # the smallest that serves
    assert all(entry.cache.seq_len == 0 for entry in pool.free)


def test_a_lent_cache_is_given_to_nobody_else(model):
    pool = CachePool()
    use(pool, request(model))
    with pool.cache_for(request(model)) as one, pool.cache_for(request(model)) as other:
        assert one is not other
        assert len(pool.in_use) == 2
    assert len(pool.in_use) == 0


def test_a_cache_that_the_call_returns_leaves_the_pool(model):
    pool = CachePool()
    cache, _ = use(pool, request(model, return_dict_in_generate=True))
    assert (pool.free, pool.in_use, cache.seq_len) == ([], [], 10)


def test_after_an_error_the_cache_is_clean(model):
    pool = CachePool()
    with pytest.raises(KeyboardInterrupt):
        use(pool, request(model), identity="a", error=KeyboardInterrupt())
    assert [entry.cache.seq_len for entry in pool.free] == [0]
    assert use(pool, request(model, length=12), identity="a")[1] == 0


def test_the_least_recently_used_goes_first(model):
    pool = CachePool()
    caches = [use(pool, request(model, length=length))[0] for length in (100, 300, 600, 1100, 2200)]
    assert [entry.cache for entry in pool.free] == caches[1:]


def test_the_bound_holds_for_free_and_lent_caches(model):
    token = cache_bytes(model.config, 1)
    pool = CachePool(max_bytes=700 * token)
    use(pool, request(model))
    with pool.cache_for(request(model, rows=2)) as cache:  # 2 x 256, beside 256 that are free
        assert cache.max_cache_len == 256
        assert pool.num_bytes == 512 * token
        with pool.cache_for(request(model)) as small:  # 188 are left
            assert small.max_cache_len == 188
        with pytest.raises(
            Fallback, match=f"a prompt of 300 tokens in 1 rows takes {300 * token:,} bytes"
        ):
            pool.cache_for(request(model, length=300)).__enter__()
    use(pool, request(model))
    assert pool.num_bytes <= 700 * token


def test_a_cache_that_grew_beyond_the_bound_is_not_kept(model):
    pool = CachePool(max_bytes=300 * cache_bytes(model.config, 1))
    with pool.cache_for(request(model, new_tokens=1000)) as cache, torch.no_grad():
        assert cache.max_cache_len == 300
        model(torch.full((1, 400), 7), past_key_values=cache)
        assert cache.max_cache_len == 600
    assert pool.free == []


def test_the_default_bound_is_a_share_of_the_memory(model, monkeypatch):
    monkeypatch.setattr(pool_module, "host_bytes", lambda: 4 * 100 * cache_bytes(model.config, 1))
    with CachePool().cache_for(request(model, new_tokens=1000)) as cache:
        assert cache.max_cache_len == 100


def test_another_dtype_or_autocast_needs_another_cache():
    model, pool = toy_model("llama"), CachePool()
    first, _ = use(pool, request(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed, _ = use(pool, request(model))
    assert mixed is not first
    assert mixed.layers[0].value_dtype == torch.bfloat16  # rotated keys are float32 again
    model.to(torch.float64)
    assert use(pool, request(model))[0].layers[0].dtype == torch.float64


def test_a_prefix_is_kept_for_the_same_content(model):
    pool, ids = CachePool(), torch.arange(1, 31)[None]
    use(pool, request(model, ids=ids), identity="a")
    longer = torch.cat([ids, ids], dim=1)
    assert use(pool, request(model, ids=longer), identity="b")[1] == 0
    assert use(pool, request(model, ids=longer), identity="a")[1] == 30
    # One token is left to compute.
    assert use(pool, request(model, ids=longer), identity="a")[1] == 59
    assert use(pool, request(model, ids=longer))[1] == 0
    other = longer.clone()
    other[0, 40] += 1
    assert use(pool, request(model, ids=other), identity="a")[1] == 40
    other[0, 5] += 1
    # Most of the tokens on both sides differ.
    assert use(pool, request(model, ids=other), identity="a")[1] == 0
    # Most of the prompt is there: in the free cache, and longer in a history.
    assert use(pool, request(model, ids=longer[:, :8]), identity="a")[1] == 5
    assert use(pool, request(model, ids=longer[:, :20]), identity="a")[1] == 19
    assert pool.reused_tokens == 30 + 59 + 40 + 5 + 19


def test_a_model_that_cannot_be_cached_is_refused_by_name(model):
    unserved = toy_model("llama")
    unserved.config.model_type = "xlstm"
    with pytest.raises(Fallback, match="'xlstm' keeps a recurrent state"):
        CachePool().cache_for(request(unserved)).__enter__()


class TestGrow:
    def test_the_tokens_move_to_longer_storage(self, model):
        cache = StaticContiguousCache.from_model(model, 16, batch_size=2)
        ids = torch.randint(1, 100, (2, 20))
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits[:, -4:]
            model(ids[:, :16], past_key_values=cache)
            before = cache.key_storage.clone()
            cache.grow(32)
            assert torch.equal(cache.key_storage[..., :16, :], before)
            assert (cache.max_cache_len, cache.seq_len, cache.key_storage.shape[3]) == (32, 16, 32)
            logits = model(ids[:, 16:], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected)

    def test_a_smaller_capacity_is_refused(self, model):
        cache = StaticContiguousCache(model.config, 16)
        with pytest.raises(ValueError, match=r"grow\(16\): the capacity is 16 already"):
            cache.grow(16)
        cache.grow(17)  # nothing is allocated yet
        assert (cache.max_cache_len, cache.layers[-1].max_cache_len) == (17, 17)

    def test_a_cache_that_grows_is_never_full(self, model):
        ids = torch.randint(1, 100, (1, 30))
        expected = model.generate(ids, max_new_tokens=50, do_sample=False, eos_token_id=None)
        cache = StaticContiguousCache(model.config, 8)
        cache.grows = True
        got = model.generate(
            ids, past_key_values=cache, max_new_tokens=50, do_sample=False, eos_token_id=None
        )
        assert torch.equal(got, expected)
        assert cache.max_cache_len == 120  # 8, 30 for the prompt, 60, 120


def test_a_window_that_was_changed_makes_another_cache(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
    model = toy_model("gemma3")
    attach(model)  # without prefixes any free cache of the same kind is taken
    how = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False}
    model.generate(PROMPT, **how)
    model.config.sliding_window = (
        20  # wider than before: a view of the old cache would be too short
    )
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window = 20
    expected = model.generate(PROMPT, use_cache=False, **how)
    assert torch.equal(model.generate(PROMPT, **how), expected)


def test_layers_that_were_removed_fall_back(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
    model = toy_model("llama")
    info = attach(model)
    how = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    model.generate(PROMPT, **how)
    model.model.layers = model.model.layers[:1]
    expected = model.generate(PROMPT, use_cache=False, **how)
    assert torch.equal(model.generate(PROMPT, **how), expected)
    assert "layer 1" in info.fallback_reason
