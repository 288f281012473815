"""Rotary position embedding, the write to the storage and attention in one launch, in Triton.
Formulas are in rope_attention.py.

As in rows_attention_triton.py an instance has all queries of a batch row and a KV head, so it also
has the only new keys and values that they see beside those in the storage. It stores these, waits
for its own stores, and reads them back among the others.

Keys and values are prefetched into the L2 cache before the wait for the projections. Lines that are
written meanwhile are those of new tokens, and their caches are coherent.
"""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.decode_attention_triton import LOG2_E, readable
from hf_static_kv.kernels.launch_triton import (
    launch,
    pdl_launch_next,
    pdl_wait,
    prefetch_lines,
)
from hf_static_kv.kernels.norm_triton import TritonNorm, norm_arguments, rms_multiply
from hf_static_kv.kernels.rotary_triton import rotate
from hf_static_kv.kernels.rows_attention_triton import (
    MAX_QUERIES,
    POSITIONS_OF_WARP,
    attend_span,
    bounds_of,
    sum_of_warps,
    tile_of,
)


@triton.jit
def rope_and_attention(
    query, key, value, query_weight, key_weight, cos, sin, keys, values, slots, spans, sinks, output,
    query_eps, key_eps, norm_offset, scale, softcap,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t,
    cos_b, cos_t, sin_b, sin_t, keys_b, keys_h, keys_s, values_b, values_h, values_s,
    spans_b, spans_t, S,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_M: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr, DV: tl.constexpr,
    TILE_DV: tl.constexpr, WARPS: tl.constexpr, POSITIONS: tl.constexpr, STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr, CAST_FIRST: tl.constexpr, HAS_ANGLES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    m = tl.arange(0, TILE_M)  # token m // G, query head m % G of the KV head
    t = m // G
    g = h * G + m % G
    is_query = m < G * Q
    new = tl.arange(0, TILE_Q)
    keys += b * keys_b + h * keys_h
    values += b * values_b + h * values_h
    # Read before the wait: `place_tokens` ran at least two kernels ago.
    span = spans + b * spans_b + t * spans_t
    first = tl.load(span + 1, mask=is_query, other=0)
    end = tl.load(span + 2, mask=is_query, other=0)
    slot = tl.load(slots + b * Q + new, mask=new < Q, other=S).to(tl.int64)
    if PDL:
        _prefetch_span(keys, values, keys_s, values_s, first, end, D, DV, 32 * WARPS)
        pdl_wait()
    d = tl.arange(0, TILE_D)
    dv = tl.arange(0, TILE_DV)
    head = query + b * query_b + g * query_h + t * query_t
    angles = cos, sin, b * cos_b + t * cos_t, b * sin_b + t * sin_t
    q = _rotated(
        head, angles, query_weight, query_eps, is_query, d, norm_offset,
        D, HAS_NORM, CAST_FIRST, HAS_ANGLES,
    )  # fmt: skip
    head = key + b * key_b + h * key_h + new * key_t
    angles = cos, sin, b * cos_b + new * cos_t, b * sin_b + new * sin_t
    k = _rotated(
        head, angles, key_weight, key_eps, new < Q, d, norm_offset,
        D, HAS_NORM, CAST_FIRST, HAS_ANGLES,
    )  # fmt: skip
    v_at = value + b * value_b + h * value_h + new[:, None] * value_t + dv[None, :]
    v = tl.load(v_at, mask=(new[:, None] < Q) & (dv[None, :] < DV))
    _store_rows(keys, slot, keys_s, k, d, S, D)
    _store_rows(values, slot, values_s, v, dv, S, DV)
    tl.debug_barrier()  # other threads read what this one has stored
    maximum, total, merged = attend_span(
        tl.trans(q), keys, values, keys_s, values_s, first, end, scale, softcap, Q, TILE_M, D,
        TILE_D, DV, TILE_DV, WARPS, POSITIONS, STAGES, HAS_SOFTCAP,
    )  # fmt: skip
    if PDL:
        # Not before the loop: what the next kernel prefetches would delay it.
        pdl_launch_next()
    sink = tl.load(sinks + g, mask=is_query).to(tl.float32) if HAS_SINKS else 0.0
    result = sum_of_warps(maximum, total, merged, sink * LOG2_E, end > first, HAS_SINKS)
    out = output + ((b * Q + t) * H * G + g)[None, :] * DV + dv[:, None]
    tl.store(out, result.to(output.dtype.element_ty), mask=is_query[None, :] & (dv[:, None] < DV))


@triton.jit
def _rotated(
    head, angles, weight, eps, exists, d, norm_offset,
    D: tl.constexpr, HAS_NORM: tl.constexpr, CAST_FIRST: tl.constexpr, HAS_ANGLES: tl.constexpr,
):  # fmt: skip
    """The vectors [M, D] that begin at `head` [M], after their norm and their rotation."""
    cos, sin, cos_at, sin_at = angles
    mask = exists[:, None] & (d[None, :] < D)
    swap = tl.where(d < D // 2, d + D // 2, d - D // 2)
    x = tl.load(head[:, None] + d[None, :], mask=mask, other=0.0)
    if HAS_ANGLES:
        swapped = tl.load(head[:, None] + swap[None, :], mask=mask, other=0.0)
        c = tl.load(cos + cos_at[:, None] + d[None, :], mask=mask, other=0.0)
        s = tl.load(sin + sin_at[:, None] + d[None, :], mask=mask, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        w = tl.load(weight + d, mask=d < D, other=0.0)[None, :]
        x = rms_multiply(x, scale, w, norm_offset, CAST_FIRST)
        if HAS_ANGLES:
            w = tl.load(weight + swap, mask=d < D, other=0.0)[None, :]
            swapped = rms_multiply(swapped, scale, w, norm_offset, CAST_FIRST)
    if HAS_ANGLES:
        x = rotate(x, tl.where(d[None, :] < D // 2, -swapped, swapped), c, s)
    return x


@triton.jit
def _store_rows(states, slot, stride, x, d, S, D: tl.constexpr):
    """Store x [Q, D] at its slots. One beyond S is of a full cache, which the host refuses: never
    write into another head."""
    mask = (slot[:, None] < S) & (d[None, :] < D)
    tl.store(states + slot[:, None] * stride + d[None, :], x, mask=mask)


@triton.jit
def _prefetch_span(
    keys, values, keys_s, values_s, first, end, D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    lowest, highest = bounds_of(first, end)
    _prefetch_rows(keys, lowest, highest, keys_s, D, ROWS)
    _prefetch_rows(values, lowest, highest, values_s, DV, ROWS)


@triton.jit
def _prefetch_rows(states, begin, end, stride, D: tl.constexpr, ROWS: tl.constexpr):
    """Prefetch rows [begin, end) of keys or values [S, D], by their lines of 128 bytes."""
    IN_LINE: tl.constexpr = 1024 // states.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, (D + IN_LINE - 1) // IN_LINE)[None, :] * IN_LINE
    for start in tl.range(begin, end, ROWS):
        row = tl.minimum(start + tl.arange(0, ROWS)[:, None], end - 1).to(tl.int64)
        prefetch_lines(states + row * stride + line)


def rope_attention_triton(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None,
    keys: Tensor, values: Tensor, slots: Tensor,
    query_norm: TritonNorm | None, key_norm: TritonNorm | None,
    spans: Tensor, scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Both norms have one style, or both are None. Output [B, q, Hq, Dv]."""
    query, key, value = readable(query, key, value)
    batch, query_heads, length, dim = query.shape
    heads, value_dim = value.shape[1], value.shape[3]
    groups = query_heads // heads
    tile_d, tile_dv = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    warps, stages = tile_of(query, batch * heads, tile_d + tile_dv)
    output = query.new_empty(batch, length, query_heads, value_dim)
    (query_weight, _), (query_eps, offset), of_norm = norm_arguments(query_norm, query)
    (key_weight, _), (key_eps, _), _ = norm_arguments(key_norm, query)
    angles = readable(*(query[:, 0] if x is None else x for x in (cos, sin)))
    strides = [(0 if x.shape[0] < batch else x.stride(0), x.stride(1)) for x in angles]
    launch(
        rope_and_attention, (batch * heads,), query, key, value, query_weight, key_weight, *angles,
        keys, values, slots.contiguous(), spans, query if sinks is None else sinks, output,
        query_eps, key_eps, offset, scale, softcap or 0.0,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides[0], *strides[1],
        *keys.stride()[:3], *values.stride()[:3], *spans.stride()[:2], keys.shape[2],
        H=heads, G=groups, Q=length, TILE_Q=triton.next_power_of_2(length),
        TILE_M=8 if groups * length <= 8 else MAX_QUERIES, D=dim, TILE_D=tile_d, DV=value_dim,
        TILE_DV=tile_dv, WARPS=warps, POSITIONS=POSITIONS_OF_WARP, STAGES=stages,
        HAS_NORM=query_norm is not None, CAST_FIRST=of_norm["CAST_FIRST"],
        HAS_ANGLES=cos is not None, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        num_warps=warps, enable_fp_fusion=False,  # an FMA would not round the products
    )  # fmt: skip
    return output
