"""Positions and the write of new tokens in Triton. Formulas and shapes are in positions.py."""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

_MAX_TILE = 32  # tokens, times all layers, whose spans one instance writes


@triton.jit
def place_tokens(
    lengths, seq_start, counts, offset, windows, chunks, slots, spans, shift, position_ids,
    spans_b, spans_l, spans_t, B, L, Q, P,
    TILE_L: tl.constexpr, TILE_Q: tl.constexpr, TILE_P: tl.constexpr,
    HAS_IDS: tl.constexpr, ADVANCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """An instance of the kernel for each batch row and some of its tokens."""
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * TILE_Q + tl.arange(0, TILE_Q)
    layer = tl.arange(0, TILE_L)
    pdl_sync(PDL)
    length = tl.load(lengths + b)
    start = tl.load(seq_start + b)
    count = tl.load(counts + b)
    slot_0 = tl.load(offset)
    is_padding = t < Q - count
    position = length + tl.maximum(t - (Q - count), 0)
    tl.store(slots + b * Q + t, tl.where(is_padding, 1 << 40, position - slot_0), mask=t < Q)
    if HAS_IDS:
        p = tl.arange(0, TILE_P)
        by = tl.load(shift + p * B + b, mask=p < P, other=0)
        at = (p[:, None] * B + b) * Q + t[None, :]
        ids = tl.maximum(position - start, 0)[None, :] + by[:, None]
        tl.store(position_ids + at, ids, mask=(p[:, None] < P) & (t[None, :] < Q))
    if ADVANCES:
        tl.debug_barrier()  # all threads have read the length before one writes it
        tl.store(lengths + b, length + count)
    window = tl.load(windows + layer, mask=layer < L, other=1)
    chunk = tl.load(chunks + layer, mask=layer < L, other=1)
    end = position[None, :] + 1
    chunk_start = position[None, :] - (position - start)[None, :] % chunk[:, None]
    first = tl.maximum(tl.maximum(end - window[:, None], chunk_start), start)
    mask = (layer[:, None] < L) & (t[None, :] < Q)
    span = spans + b * spans_b + layer[:, None] * spans_l + t[None, :] * spans_t
    tl.store(span, start - slot_0 + tl.zeros_like(first), mask=mask)
    tl.store(span + 1, first - slot_0, mask=mask)
    tl.store(span + 2, tl.where(is_padding[None, :], first, end) - slot_0, mask=mask)


def place_tokens_triton(
    lengths: Tensor, seq_start: Tensor, counts: Tensor, offset: Tensor, windows: Tensor,
    chunks: Tensor, slots: Tensor, spans: Tensor, shift: Tensor | None, position_ids: Tensor | None,
    advances: bool,
) -> None:  # fmt: skip
    batch, layers, num_tokens, _ = spans.shape
    if spans.stride(-1) != 1:
        raise ValueError("place_tokens needs spans whose last dim has stride 1.")
    parts = 1 if shift is None else shift.numel() // batch
    tile = min(_MAX_TILE, triton.next_power_of_2(num_tokens))
    num_tiles = triton.cdiv(num_tokens, tile)
    launch(
        place_tokens, (batch, num_tiles), lengths, seq_start, counts, offset, windows, chunks,
        slots, spans,
        # A kernel takes a pointer for an absent tensor too.
        slots if shift is None else shift, slots if position_ids is None else position_ids,
        *spans.stride()[:3], batch, layers, num_tokens, parts,
        TILE_L=triton.next_power_of_2(layers), TILE_Q=tile, TILE_P=triton.next_power_of_2(parts),
        HAS_IDS=shift is not None, ADVANCES=advances and num_tiles == 1, num_warps=4,
    )  # fmt: skip
    if advances and num_tiles > 1:
        lengths.add_(counts)  # after all instances have read them


@triton.jit
def write_kv_cache(
    keys, values, key_states, value_states, slots,
    keys_b, keys_h, keys_s, values_b, values_h, values_s,
    key_b, key_h, key_t, value_b, value_h, value_t, slots_b, S, Q,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    b = token // Q
    t = token % Q
    d = tl.arange(0, TILE)
    # Before the wait: `place_tokens` runs at the beginning of a pass, at least two kernels ago.
    slot = tl.load(slots + b * slots_b + t).to(tl.int64)
    pdl_sync(PDL)
    if slot >= S:  # a full cache, which the host refuses: never write into another head
        return
    key = tl.load(key_states + b * key_b + h * key_h + t * key_t + d, mask=d < D)
    tl.store(keys + b * keys_b + h * keys_h + slot * keys_s + d, key, mask=d < D)
    value = tl.load(value_states + b * value_b + h * value_h + t * value_t + d, mask=d < DV)
    tl.store(values + b * values_b + h * values_h + slot * values_s + d, value, mask=d < DV)


def write_tokens_triton(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, slots: Tensor
) -> None:
    batch, heads, num_tokens, dim = key_states.shape
    value_dim = value_states.shape[-1]
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("write_tokens needs keys and values whose last dim has stride 1.")
    if key_states.stride(-1) != 1 or value_states.stride(-1) != 1:
        key_states = key_states.contiguous()
        value_states = value_states.contiguous()
    launch(
        write_kv_cache, (batch * num_tokens * heads,), keys, values, key_states, value_states, slots,
        *keys.stride()[:3], *values.stride()[:3],
        *key_states.stride()[:3], *value_states.stride()[:3], slots.stride(0),
        keys.shape[2], num_tokens, H=heads, D=dim, DV=value_dim,
        TILE=triton.next_power_of_2(max(dim, value_dim)), num_warps=1,
    )  # fmt: skip
