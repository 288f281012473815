"""Compact layers: a stretch of about two windows behaves as all positions do, as far as positions
are kept.

Random operations are in test_state_machine.py, the modes of `generate` in test_generate.py, the
decoder in tests/decoding/test_decoder.py. Here toys have 20 slots for a window of 8.
"""

import copy

import pytest
import torch

from hf_static_kv import (
    CacheFile,
    GraphDecoder,
    StaticContiguousCache,
    cache_bytes,
    exact,
    trace_attention,
)
from hf_static_kv.attaching import attached
from hf_static_kv.cache import storage
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.prefixes import PrefixStore
from hf_static_kv.testing import dev_config
from tests.cache.conftest import OutOfMemory, fail_once
from tests.conftest import COMMON, PROMPT, WINDOW, shared_toy_model, toy_model

MIB = 1 << 20
SLOTS = 20
LONG = torch.arange(3, 48)[None]  # 45 tokens, more than the slots


@pytest.fixture(autouse=True)
def _small_spare(small_spare):
    pass


def compact(model, max_cache_len=128, batch_size=1):
    return StaticContiguousCache.from_model(model, max_cache_len, batch_size, sliding="compact")


def generate(model, ids, cache=None, **how):
    how |= {"use_cache": False} if cache is None else {"past_key_values": cache}
    return model.generate(ids, **{**COMMON, "attention_mask": torch.ones_like(ids), **how})


def sliding_layers(cache):
    return [layer for layer in cache.layers if layer.is_sliding]


# --- memory


def test_the_memory_of_gemma(monkeypatch):
    """4 full layers at 32 MiB, 22 compact ones with 1,152 positions of 1 KiB each."""
    monkeypatch.setattr(storage, "SLACK", 64)
    sizes = {"max_cache_len": 32_768, "dtype": torch.bfloat16}
    assert cache_bytes(dev_config("gemma-3-1b"), **sizes) == 832 * MIB
    compact_bytes = cache_bytes(dev_config("gemma-3-1b"), **sizes, sliding="compact")
    assert compact_bytes == 4 * 32 * MIB + 22 * 2 * (512 + 64) * 1024 <= 170 * MIB


def allocated(model):
    plans = StaticContiguousCache(model.config, 64)._plans
    windows = [plan.sliding_window for plan in plans]
    shape = plans[0].shape
    return StaticContiguousCache.allocate(
        len(plans), shape.num_kv_heads, shape.key_head_dim, 64, dtype=torch.float32, sliding_windows=windows,
        sliding="compact",
    )  # fmt: skip


def lazy(model):
    return StaticContiguousCache(model.config, 64, sliding="compact")


def initialized(model):
    cache, config = lazy(model), model.config
    cache.early_initialization(
        1, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cpu")
    )
    return cache


def from_model(model):
    return compact(model, 64)


@pytest.mark.parametrize("name", ["gemma3", "mistral", "llama4"])
@pytest.mark.parametrize("build", [lazy, from_model, initialized, allocated])
def test_all_ways_of_building(name, build):
    model = shared_toy_model(name)
    cache = build(model)
    assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))
    assert [layer.num_slots for layer in cache.layers] == [
        SLOTS if layer.is_sliding else 64 for layer in cache.layers
    ]
    assert cache.memory_bytes == cache_bytes(
        model.config, 64, dtype=torch.float32, sliding="compact"
    )
    assert len(cache.storage_groups) == len({layer.is_sliding for layer in cache.layers})


def test_a_capacity_below_the_slots_takes_no_more():
    model = shared_toy_model("mistral")
    assert (
        compact(model, 10).memory_bytes == StaticContiguousCache.from_model(model, 10).memory_bytes
    )


@pytest.mark.parametrize("sliding", ["ring", None, True])
def test_another_word_is_refused(sliding):
    config = shared_toy_model("llama").config
    for build in (StaticContiguousCache, cache_bytes):
        with pytest.raises(ValueError, match=r'choose "full" .* or "compact"'):
            build(config, 64, sliding=sliding)


# --- one layer, drawn


def numbered(start, count):
    return torch.arange(start, start + count).float().view(1, 1, count, 1)


def slots_of(layer):
    return layer.storage[0][0, 0, :, 0].tolist()


def test_the_newest_positions_move_to_the_first_slot():
    """
    slot      0   1   2   3   4   5   6   7      window 2, 2 to spare
             [0] [1] [2] [3] [4] [5] [6] [7]     full
             [5] [6] [7] [8] [ ] [ ] [ ] [ ]     8 is appended
    """
    layer = StaticContiguousLayer(100, 2, is_compact=True)
    for position in range(10):
        layer.update(numbered(position, 1), numbered(position, 1))
    assert (layer.offset, slots_of(layer)) == (5, [5, 6, 7, 8, 9, 5, 6, 7])
    layer.update(numbered(10, 3), numbered(10, 3))
    assert (layer.offset, slots_of(layer)) == (5, [5, 6, 7, 8, 9, 10, 11, 12])
    keys, _ = layer.update(numbered(13, 1), numbered(13, 1))
    assert (layer.offset, slots_of(layer)) == (10, [10, 11, 12, 13, 9, 10, 11, 12])
    assert keys.flatten().tolist() == [12, 13]
    assert keys.data_ptr() == layer.storage[0][0, 0, 2].data_ptr()


@pytest.mark.parametrize("past", [0, 1, 5, 8])
def test_a_step_that_is_longer_than_the_slots(past):
    """Its queries see all of it and what the first of them may see before; the last positions are
    kept.
    """
    layer = StaticContiguousLayer(100, 4, is_compact=True)
    if past:
        layer.update(numbered(0, past), numbered(0, past))
    assert layer.get_mask_sizes(30) == (30 + min(past, 3), max(0, past - 3))
    keys, values = layer.update(numbered(past, 30), -numbered(past, 30))
    assert keys.flatten().tolist() == list(range(max(0, past - 3), past + 30))
    assert torch.equal(values.flatten()[-30:], -keys.flatten()[-30:])
    assert layer.keys.flatten().tolist() == list(range(past + 30 - layer.num_slots, past + 30))
    assert layer.get_seq_length() == past + 30


# --- crop


def test_crop_goes_back_as_far_as_positions_are_kept():
    model = shared_toy_model("gemma3")
    cache = compact(model)
    tokens = generate(model, PROMPT, cache, max_new_tokens=30)
    possible = min(layer.num_croppable for layer in cache.layers)
    assert 2 <= possible < cache.seq_len
    before = [(layer.length, layer.oldest) for layer in cache.layers]
    oldest = sliding_layers(cache)[0].oldest
    with pytest.raises(
        ValueError, match=f"window of 8 keeps the positions from {oldest} on.*at most {possible}"
    ):
        cache.crop(-possible - 1)
    assert [(layer.length, layer.oldest) for layer in cache.layers] == before
    cache.crop(-possible)
    other = torch.cat([tokens[:, : cache.seq_len], torch.tensor([[99, 98]])], dim=1)
    assert torch.equal(generate(model, other, cache), generate(model, other))


def test_all_tokens_can_be_removed():
    model = shared_toy_model("gemma3")
    cache = compact(model)
    generate(model, LONG, cache)
    cache.crop(-cache.seq_len)
    assert [(layer.offset, layer.oldest, layer.length) for layer in cache.layers] == [(0, 0, 0)] * 3
    assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))


# --- failures


@pytest.mark.parametrize(
    "tokens", [1, 4, 30], ids=["moves", "moves over itself", "longer than the slots"]
)
@pytest.mark.parametrize(
    ("layer_idx", "before_write", "then"),
    [
        (0, True, "forward"),
        (0, False, "forward"),
        (1, True, "forward"),
        (1, False, "forward"),
        (0, False, "decoder"),
    ],
)
def test_a_pass_that_failed_while_positions_moved(layer_idx, before_write, tokens, then):
    """All that the next token may see is still there.

    The decoder needs one offset for all layers.
    """
    model = toy_model("gemma3", seed=3)
    cache, ids = compact(model), torch.cat([LONG, LONG.flip(1)], dim=1)
    with torch.no_grad():
        for token in ids[:, :SLOTS].split(1, dim=1):
            model(token, past_key_values=cache)
        seen = [layer.keys[:, :, 1 - WINDOW :].clone() for layer in cache.layers]
        hook = fail_once(model, layer_idx, 1, before_write)
        with pytest.raises(OutOfMemory):
            model(ids[:, SLOTS : SLOTS + tokens], past_key_values=cache)
        hook.remove()
        cache.crop(0)
        assert cache.seq_len == SLOTS
        assert all(
            torch.equal(layer.keys[:, :, 1 - WINDOW :], own)
            for layer, own in zip(cache.layers, seen, strict=True)
        )
        ids = ids[:, : SLOTS + tokens]
        if then == "forward":
            logits = model(ids[:, SLOTS:], past_key_values=cache).logits[:, -1]
            torch.testing.assert_close(logits, model(ids).logits[:, -1], rtol=0, atol=1e-4)
            return
    decoder = GraphDecoder()
    assert torch.equal(generate(model, ids, cache, custom_generate=decoder), generate(model, ids))
    assert decoder.fallback_reason is None
    assert len({layer.offset for layer in sliding_layers(cache)}) == 1


def test_the_decoder_after_a_pass_that_failed_when_one_layer_had_moved():
    """A step has one offset for all layers of a window."""
    model, decoder = toy_model("gemma3"), GraphDecoder()
    cache = compact(model)
    with torch.no_grad():
        model(LONG[:, :SLOTS], past_key_values=cache)
        hook = fail_once(model, 1, 1, before_write=True)
        with pytest.raises(OutOfMemory):
            model(LONG[:, SLOTS : SLOTS + 1], past_key_values=cache)
        hook.remove()
    cache.crop(-2)
    assert [layer.offset for layer in cache.layers] == [11, 0, 0]
    ids = LONG[:, : SLOTS - 1]
    assert torch.equal(generate(model, ids, cache, custom_generate=decoder), generate(model, ids))
    assert decoder.fallback_reason is None


def test_a_call_that_falls_back_after_a_long_prompt_begins_where_it_was(monkeypatch):
    """The prompt has dropped positions that the cache held before: they are put back."""
    model, decoder = toy_model("gemma3"), GraphDecoder()
    cache = compact(model)
    tokens = generate(model, PROMPT, cache)
    longer = torch.cat([tokens, LONG], dim=1)
    monkeypatch.setattr("hf_static_kv.decoding.steps.verify", lambda *_: 1 / 0)
    got = generate(model, longer, cache, custom_generate=decoder)
    assert "ZeroDivisionError" in decoder.fallback_reason
    assert torch.equal(got, generate(model, longer))


# --- growing, copies, assignment


def test_growing_keeps_the_slots():
    model = shared_toy_model("gemma3")
    cache = compact(model, 32)
    cache.grows = True
    group = sliding_layers(cache)[0].group
    assert torch.equal(
        generate(model, PROMPT, cache, max_new_tokens=40),
        generate(model, PROMPT, max_new_tokens=40),
    )
    assert cache.max_cache_len == 64
    assert sliding_layers(cache)[0].group is group


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_the_decoder_on_a_cache_that_grows(name):
    """Mistral has no full layer:

    its storage stays, and a step for the longer capacity is a new one.
    """
    model, decoder = shared_toy_model(name), GraphDecoder()
    cache = compact(model, 24)
    cache.grows = True
    got = generate(model, PROMPT, cache, max_new_tokens=40, custom_generate=decoder)
    assert torch.equal(got, generate(model, PROMPT, max_new_tokens=40))
    assert decoder.fallback_reason is None


def test_a_copy_goes_on_alone():
    model = shared_toy_model("gemma3")
    cache = compact(model)
    with torch.no_grad():
        model(LONG, past_key_values=cache)
    for word in (7, 70):
        ids = torch.cat([LONG, torch.tensor([[word]])], dim=1)
        assert torch.equal(generate(model, ids, copy.deepcopy(cache)), generate(model, ids))


def test_assigned_states_replace_what_is_kept():
    model = shared_toy_model("gemma3")
    cache = compact(model)
    with torch.no_grad():
        model(LONG, past_key_values=cache)
    layer = sliding_layers(cache)[0]
    kept, offset = layer.keys.clone(), layer.offset
    with pytest.raises(
        ValueError,
        match=r"keeps the positions 25 to 44: the assigned keys have 3 and must have as many",
    ):
        layer.keys = kept[:, :, :3]
    layer.keys, layer.values = kept + 1, layer.values.clone()
    assert torch.equal(layer.keys, kept + 1)
    assert (layer.offset, layer.length) == (offset, 45)
    layer.keys = layer.values = None
    assert (layer.offset, layer.length) == (0, 0)


def test_a_full_cache_of_few_slots_keeps_what_the_next_token_sees():
    model, ids = shared_toy_model("gemma3"), LONG[:, : WINDOW + 4]
    cache = compact(model, max_cache_len=WINDOW + 4)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert cache.reserve() == 0
        cache.grow(40)
        logits = model(LONG[:, WINDOW + 4 : WINDOW + 5], past_key_values=cache).logits[:, -1]
        expected = model(LONG[:, : WINDOW + 5], use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_an_assignment_in_the_middle_of_a_long_step_ends_it():
    cache = compact(shared_toy_model("gemma3"))
    layer = sliding_layers(cache)[0]
    _, heads, slots, dim = layer.storage[0].shape
    keys = torch.randn(1, heads, slots + 5, dim)
    # Longer than the storage: the layer holds its newest positions until it is committed.
    layer.write(keys, keys)
    layer.keys, layer.values = keys[:, :, :2], keys[:, :, :2]
    layer.write(keys[:, :, 2:3], keys[:, :, 2:3])
    layer.commit()
    assert torch.equal(layer.keys, keys[:, :, :3])
    assert torch.equal(layer.values, keys[:, :, :3])


# --- exact, trace


@pytest.mark.parametrize("name", ["gemma3", "cohere2"])
def test_exact(name):
    """The bits of an uncached pass, for chunks of every kind, and in the decoder.

    Attention splits the sequence at position 64: it must be split there wherever slot 0 is.
    """
    model, ids = toy_model(name).to(torch.bfloat16), torch.cat([LONG, LONG[:, :15]], dim=1)
    cache, decoder = compact(model), GraphDecoder()
    how = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 12}
    with exact(model), torch.no_grad():
        chunks = ids.split([13, 1, 1, 25, 1, 19], dim=1)
        chunked = torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], dim=1)
        cache.reset()
        decoded = generate(model, ids, cache, custom_generate=decoder, **how)
        expected = model(decoded.sequences, use_cache=False).logits
    assert torch.equal(chunked, expected[:, :60])
    assert torch.equal(torch.stack(decoded.logits, dim=1), expected[:, 59:-1].float())
    assert decoder.fallback_reason is None
    assert sliding_layers(cache)[0].offset > 0


@pytest.mark.parametrize("with_decoder", [False, True])
def test_a_trace_has_the_positions_of_the_sequence(with_decoder):
    model, rows = toy_model("gemma3"), []
    for sliding in ("full", "compact"):
        how = {"custom_generate": GraphDecoder()} if with_decoder else {}
        cache = StaticContiguousCache(model.config, 128, sliding=sliding)
        with trace_attention(model) as trace:
            generate(model, PROMPT, cache, max_new_tokens=30, **how)
        rows.append(trace.rows)
    assert len(rows[0]) == len(rows[1]) == 90
    for full, ours in zip(*rows, strict=True):
        assert torch.equal(full.positions, ours.positions)
        torch.testing.assert_close(full.weights, ours.weights)


# --- files


@pytest.mark.parametrize("of_saved", ["full", "compact"])
@pytest.mark.parametrize("of_loaded", ["full", "compact"])
@pytest.mark.parametrize("rows", [1, 2])
def test_there_and_back(tmp_path, of_saved, of_loaded, rows):
    """A loaded cache goes on; layers keep what the file has, as far as they have slots for it."""
    model, ids = shared_toy_model("gemma3"), torch.cat([LONG, LONG.flip(1)])[:rows]
    cache = StaticContiguousCache.from_model(model, 128, rows, sliding=of_saved)
    tokens = generate(model, ids, cache)
    cache.save(tmp_path / "a.safetensors", model=model, tokens=tokens)
    loaded = StaticContiguousCache.load(tmp_path / "a.safetensors", model, 128, sliding=of_loaded)
    assert [layer.is_compact for layer in loaded.layers] == [of_loaded == "compact"] * 2 + [False]
    for before, after in zip(cache.layers, loaded.layers, strict=True):
        kept = min(before.keys.shape[2], after.num_slots)
        assert after.keys.shape[2] == kept
        assert torch.equal(after.keys, before.keys[:, :, -kept:])
        assert torch.equal(after.values, before.values[:, :, -kept:])
    longer = torch.cat([tokens, torch.tensor([[3, 44, 101]]).expand(rows, -1)], dim=1)
    assert torch.equal(generate(model, longer, loaded), generate(model, longer))


def test_a_file_of_a_compact_cache_is_short_and_says_what_it_has(tmp_path):
    model = shared_toy_model("gemma3")
    cache = compact(model)
    tokens = generate(model, LONG, cache)
    cache.save(tmp_path / "a.safetensors", model=model, tokens=tokens)
    first = sliding_layers(cache)[0].oldest
    with CacheFile(tmp_path / "a.safetensors") as file:
        assert [(group.layers, group.first) for group in file.header.groups] == [
            ([0, 1], first),
            ([2], 0),
        ]
        shapes = {tensor.name: tensor.shape for tensor in file.header.states()}
        assert shapes["keys.0"][3] == cache.seq_len - first
        fewest = file.header.min_tokens
    assert fewest == first + WINDOW - 1 <= cache.seq_len
    with pytest.raises(ValueError, match=f"Load at least {fewest} of its {cache.seq_len} tokens"):
        StaticContiguousCache.load(tmp_path / "a.safetensors", model, tokens=fewest - 1)
    for sliding in ("full", "compact"):
        loaded = StaticContiguousCache.load(
            tmp_path / "a.safetensors", model, tokens=fewest, sliding=sliding
        )
        assert torch.equal(generate(model, tokens, loaded), generate(model, tokens))
    with pytest.raises(
        ValueError, match=f"keeps the positions from {first} on.*Save at least {fewest}"
    ):
        cache.save(tmp_path / "b.safetensors", model=model, tokens=tokens[:, : fewest - 1])


def test_a_full_cache_from_a_compact_file_knows_what_it_lacks(tmp_path):
    """It can be saved again; `crop` is refused beyond what the file had."""
    model = shared_toy_model("gemma3")
    cache = compact(model)
    tokens = generate(model, LONG, cache)
    cache.save(tmp_path / "a.safetensors", model=model, tokens=tokens)
    loaded = StaticContiguousCache.load(tmp_path / "a.safetensors", model, 128)
    possible = sliding_layers(cache)[0].num_croppable
    with pytest.raises(ValueError, match=f"Remove at most {possible}"):
        loaded.crop(-possible - 1)
    loaded.save(tmp_path / "b.safetensors", model=model, tokens=tokens)
    again = StaticContiguousCache.load(tmp_path / "b.safetensors", model, 128, sliding="compact")
    assert [layer.oldest for layer in again.layers] == [layer.oldest for layer in cache.layers]
    decoder = GraphDecoder()
    longer = torch.cat([tokens, tokens[:, :3]], dim=1)
    assert torch.equal(
        generate(model, longer, loaded, custom_generate=decoder), generate(model, longer)
    )
    assert decoder.fallback_reason is None


def test_damage_to_skipped_positions_is_found(tmp_path):
    """A compact cache reads all of a file of full layers, since a checksum covers all layers of a
    position.
    """
    model, path = shared_toy_model("mistral"), tmp_path / "a.safetensors"
    cache = StaticContiguousCache.from_model(model, 128)
    tokens = generate(model, LONG, cache)
    cache.save(path, model=model, tokens=tokens)
    with CacheFile(tmp_path / "a.safetensors") as file:
        place = file._start + file.header.states()[0].offset
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"keys.0 does not have its checksum at position 0"):
        StaticContiguousCache.load(path, model, 128, sliding="compact")


def test_a_folder_of_prefixes(tmp_path):
    """A saved prefix serves a prompt that has all of it, or so much that compact layers keep what
    is needed.
    """
    model, store = shared_toy_model("gemma3"), PrefixStore(tmp_path)
    cache = compact(model)
    with torch.no_grad():
        model(LONG, past_key_values=cache)
    store.add(cache, model, LONG)
    fewest = sliding_layers(cache)[0].oldest + WINDOW - 1
    for length, found in ((45, 45), (fewest, fewest), (fewest - 1, 0)):
        prompt = torch.cat([LONG[:, :length], torch.tensor([[1, 2]])], dim=1)
        for sliding in ("full", "compact"):
            other = StaticContiguousCache.from_model(model, 128, sliding=sliding)
            store.fill(other, model, prompt, identity="same")
            assert other.seq_len == found
            assert torch.equal(generate(model, prompt, other), generate(model, prompt))


# --- attach


@pytest.mark.parametrize(("max_cache_len", "is_compact"), [(256, False), (257, True)])
def test_attach_uses_them_beyond_four_windows(max_cache_len, is_compact):
    model = toy_model("gemma3", sliding_window=64)
    with attached(model, reuse_prefix=True, max_cache_len=max_cache_len) as info:
        tokens = model.generate(PROMPT, **COMMON)
        (cache,) = info.caches
    assert sliding_layers(cache)[0].is_compact == is_compact
    assert torch.equal(tokens, generate(model, PROMPT))
    sliding = "compact" if is_compact else "full"
    assert info.memory_bytes == cache_bytes(
        model.config, cache.max_cache_len, dtype=torch.float32, sliding=sliding
    )


def test_prefix_reuse_crops_or_computes_anew():
    model, plain = toy_model("gemma3"), toy_model("gemma3")

    def call(ids):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **COMMON)

    with attached(model, reuse_prefix=True) as info:
        tokens = call(LONG)
        (cache,) = info.caches
        assert sliding_layers(cache)[0].oldest > 0
        near = torch.cat([tokens[:, : cache.seq_len - 1], torch.tensor([[9, 9]])], dim=1)
        assert torch.equal(call(near), generate(plain, near))
        assert info.reused_tokens == near.shape[1] - 2
        far = torch.cat([LONG[:, :30], torch.tensor([[9, 9]])], dim=1)
        assert torch.equal(call(far), generate(plain, far))
        assert info.reused_tokens == near.shape[1] - 2


def test_max_bytes_bounds_the_full_layers():
    """Compact layers take the same at every capacity:

    what is left decides how long the full ones are.
    """
    model = toy_model("gemma3")
    most = cache_bytes(model.config, 300, dtype=torch.float32, sliding="compact")
    with attached(model, reuse_prefix=True, max_cache_len=512, max_bytes=most + 5) as info:
        model.generate(PROMPT, **COMMON)
        (cache,) = info.caches
    assert (cache.max_cache_len, cache.memory_bytes) == (300, most)
