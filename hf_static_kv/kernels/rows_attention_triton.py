"""Attention of a few queries of each of many batch rows in Triton. Formula in decode_attention.py.

There are so many batch rows and KV heads that they fill a GPU: an instance has all of one, and
nothing is combined afterwards. Each of its warps has 16 positions of a tile, and sums of its own;
they are added at the end. Scores are positions times queries: a tensor core takes 8 queries that
way, and 16 the other way round.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.decode_attention_triton import LOG2_E, factors, readable
from hf_static_kv.kernels.launch_triton import launch, pdl_sync

MAX_QUERIES = 16  # of a batch row and a KV head: tokens times query heads
POSITIONS_OF_WARP = 16  # of a warp
# Loads in flight; warps of few and of many instances. On an H200, of 640 positions (2026-11-18): 64
# rows of 8 heads of 64 dims 23 us (25 in the tiles of prompts, 49 in splits), 8 rows 8 us (10, 11);
# of 128 dims 43 (46, 65) and 11 (17, 13).
_STAGES = 4
_WARPS_OF_FEW = 4
_WARPS_OF_MANY = 2
_FEW_PER_PROCESSOR = 1.5
_SHARED_BYTES_LEFT = 3072  # for all but keys and values


@triton.jit
def rows_attention(
    query, keys, values, spans, sinks, output, scale, softcap,
    query_b, query_h, query_t, keys_b, keys_h, keys_s, values_b, values_h, values_s,
    spans_b, spans_t,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, TILE_M: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr, WARPS: tl.constexpr,
    POSITIONS: tl.constexpr, STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    m = tl.arange(0, TILE_M)  # token m // G, query head m % G of the KV head
    t = m // G
    g = h * G + m % G
    is_query = m < G * Q
    pdl_sync(PDL)
    span = spans + b * spans_b + t * spans_t
    first = tl.load(span + 1, mask=is_query, other=0)
    end = tl.load(span + 2, mask=is_query, other=0)
    d = tl.arange(0, TILE_D)
    q_at = query + b * query_b + g[None, :] * query_h + t[None, :] * query_t + d[:, None]
    q = tl.load(q_at, mask=is_query[None, :] & (d[:, None] < D), other=0.0)  # [D, M]
    keys += b * keys_b + h * keys_h
    values += b * values_b + h * values_h
    maximum, total, merged = attend_span(
        q, keys, values, keys_s, values_s, first, end, scale, softcap, Q, TILE_M, D, TILE_D,
        DV, TILE_DV, WARPS, POSITIONS, STAGES, HAS_SOFTCAP,
    )  # fmt: skip
    sink = tl.load(sinks + g, mask=is_query, other=0.0).to(tl.float32) if HAS_SINKS else 0.0
    result = sum_of_warps(maximum, total, merged, sink * LOG2_E, end > first, HAS_SINKS)
    dv = tl.arange(0, TILE_DV)
    out = output + ((b * Q + t) * H * G + g)[None, :] * DV + dv[:, None]
    tl.store(out, result.to(output.dtype.element_ty), mask=is_query[None, :] & (dv[:, None] < DV))


@triton.jit
def attend_span(
    q, keys, values, keys_s, values_s, first, end, scale, softcap,
    Q: tl.constexpr, TILE_M: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
    DV: tl.constexpr, TILE_DV: tl.constexpr, WARPS: tl.constexpr, POSITIONS: tl.constexpr,
    STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Maxima, sums of weights and outputs of each warp, over the spans of queries [D, M]."""
    lowest, highest = bounds_of(first, end)
    d = tl.arange(0, TILE_D)
    dv = tl.arange(0, TILE_DV)
    q = tl.broadcast_to(q[None], (WARPS, TILE_D, TILE_M))
    place = tl.arange(0, WARPS)[:, None] * POSITIONS + tl.arange(0, POSITIONS)[None, :]
    k_at = keys + d[None, None, :]
    v_at = values + dv[None, :, None]
    maximum = tl.full((WARPS, TILE_M), -float("inf"), tl.float32)
    total = tl.zeros((WARPS, TILE_M), tl.float32)
    merged = tl.zeros((WARPS, TILE_DV, TILE_M), tl.float32)
    for start in tl.range(lowest, highest, WARPS * POSITIONS, num_stages=STAGES):
        position = (start + place).to(tl.int64)  # [W, N]
        is_seen = (position < highest)[:, :, None]
        k_mask, v_mask = is_seen, (position < highest)[:, None, :]
        if D < TILE_D:
            k_mask = k_mask & (d[None, None, :] < D)
        if DV < TILE_DV:
            v_mask = v_mask & (dv[None, :, None] < DV)
        k = tl.load(k_at + position[:, :, None] * keys_s, mask=k_mask, other=0.0)
        v = tl.load(v_at + position[:, None, :] * values_s, mask=v_mask, other=0.0)
        if Q > 1:
            place_of = position[:, :, None]
            is_seen = (place_of >= first[None, None, :]) & (place_of < end[None, None, :])
        maximum, total, merged = _add_tile(
            q, k, v, is_seen, maximum, total, merged, scale, softcap, HAS_SOFTCAP
        )  # fmt: skip
    return maximum, total, merged


@triton.jit
def bounds_of(first, end):
    """The first position that any query sees, and the one behind the last."""
    sees = end > first
    highest = tl.max(tl.where(sees, end, 0), 0)
    return tl.minimum(tl.min(tl.where(sees, first, 1 << 40), 0), highest), highest


@triton.jit
def _add_tile(q, k, v, is_seen, maximum, total, merged, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Maxima and sums of weights [W, M], and outputs [W, DV, M], of each warp with one more tile."""
    score = tl.dot(k, q, input_precision="ieee") * scale  # [W, N, M]
    if HAS_SOFTCAP:  # softcap * tanh(score / softcap)
        score = softcap * (1 - 2 / (tl.exp2(score / softcap * 2 * LOG2_E) + 1))
    score = tl.where(is_seen, score * LOG2_E, -float("inf"))
    maximum, rescale, _ = factors(maximum, tl.max(score, 1))
    p = tl.exp2(score - or_zero(maximum)[:, None, :])
    total = total * rescale + tl.sum(p, 1)
    merged = tl.dot(v, p.to(v.dtype), merged * rescale[:, None, :], input_precision="ieee")
    return maximum, total, merged


@triton.jit
def sum_of_warps(maximum, total, merged, sink, sees, HAS_SINKS: tl.constexpr):
    """The output [DV, M]; zeros for an empty span."""
    highest = tl.max(maximum, 0)
    if HAS_SINKS:
        highest = tl.maximum(highest, sink)
    factor = tl.exp2(maximum - or_zero(highest)[None, :])
    weight = tl.sum(total * factor, 0)
    if HAS_SINKS:
        weight = tl.where(sees, weight + tl.exp2(sink - highest), 0.0)
    result = tl.sum(merged * factor[:, None, :], 0)
    return tl.where(weight[None, :] > 0, result / weight[None, :], 0.0)


@triton.jit
def or_zero(maximum):
    """Without this a sum of nothing would be of -inf - -inf = nan."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


def rows_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of queries [B, Hq, q, D] with spans [B, q, 3]; output [B, q, Hq, Dv]."""
    query, keys, values = readable(query, keys, values)
    batch, query_heads, length, dim = query.shape
    heads, value_dim = values.shape[1], values.shape[3]
    groups = query_heads // heads
    tile_d, tile_dv = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    warps, stages = tile_of(query, batch * heads, tile_d + tile_dv)
    output = query.new_empty(batch, length, query_heads, value_dim)
    launch(
        rows_attention, (batch * heads,), query, keys, values, spans,
        query if sinks is None else sinks, output, scale, softcap or 0.0,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *spans.stride()[:2],
        H=heads, G=groups, Q=length, TILE_M=8 if groups * length <= 8 else MAX_QUERIES, D=dim,
        TILE_D=tile_d, DV=value_dim, TILE_DV=tile_dv, WARPS=warps, POSITIONS=POSITIONS_OF_WARP,
        STAGES=stages, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        num_warps=warps,
    )  # fmt: skip
    return output


def tile_of(query: Tensor, instances: int, dims: int) -> tuple[int, int]:
    """Warps of an instance, and tiles in flight: those that fit into the shared memory."""
    properties = torch.cuda.get_device_properties(query.device) if query.is_cuda else None
    shared = getattr(properties, "shared_memory_per_block_optin", 100_000) - _SHARED_BYTES_LEFT
    processors = getattr(properties, "multi_processor_count", 1)
    is_few = instances <= _FEW_PER_PROCESSOR * processors
    of_warp = POSITIONS_OF_WARP * dims * query.element_size()
    warps = _WARPS_OF_FEW if is_few and shared >= 2 * _WARPS_OF_FEW * of_warp else _WARPS_OF_MANY
    return warps, max(1, min(_STAGES, shared // (warps * of_warp)))
