"""Attention of a prompt in Triton. Formula in decode_attention.py.

An instance has some queries of one KV head, as many as fit into its tile. It goes through the
splits of their spans from left to right.

In order (inside `exact`) it gives the bits of decode steps: it merges each split as
decode_attention_triton.py does in order, and a split that a query does not see changes nothing of
it. Tensor cores give the same bits in tiles of 16 and more queries: measured, and tested on the GPU
at hand. Otherwise it adds up as flash attention does, with larger tiles, and only the splits at the
edges of spans are masked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.cache.codes import holds_codes, states_dim
from hf_static_kv.kernels.codes_triton import head_of, load_coded_split
from hf_static_kv.kernels.decode_attention_triton import (
    LOG2_E,
    factors,
    readable,
    sum_in_order,
    tiles,
    weigh,
)
from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# Not in order, by head dim: queries and positions of a tile, warps, loads in flight.
# Measured on an H200 at 128 to 2048 queries: 72, 68 and 53 us of 2048 (SDPA 58, 53 and 51; in order
# 115, 102 and 129).
_FAST_TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 64, 4, 2)}
_SMALL_TILE = 64, 32, 4, 2  # of 256 dims, if a multiprocessor has no room for that


@triton.jit
def prompt_attention(
    query, keys, values, spans, sinks, output, scale, softcap, T,
    query_b, query_h, query_t, keys_b, keys_h, keys_s, values_b, values_h, values_s,
    spans_b, spans_t,
    H: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, TILE_M: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    STAGES: tl.constexpr, IN_ORDER: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_CODED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    m = tl.arange(0, TILE_M)  # query heads of this KV head, of one query after the other
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries, whose spans are long, first
    t = (block * QUERIES + m // G).to(tl.int64)
    g = h * G + m % G
    is_query = (m < QUERIES * G) & (t < T)
    pdl_sync(PDL)
    span = spans + b * spans_b + t * spans_t
    first = tl.load(span + 1, mask=is_query, other=0)
    end = tl.load(span + 2, mask=is_query, other=0)
    seq_start = tl.load(spans + b * spans_b)
    sees = end > first
    highest = tl.max(tl.where(sees, end, seq_start), 0)
    lowest = tl.minimum(tl.min(tl.where(sees, first, 1 << 40), 0), highest)
    d = tl.arange(0, TILE_D)
    dv = tl.arange(0, TILE_DV)
    n = tl.arange(0, SPLIT_SIZE)
    q_at = query + b * query_b + t[:, None] * query_t + g[:, None] * query_h + d[None, :]
    q = tl.load(q_at, mask=is_query[:, None] & (d[None, :] < D), other=0.0)  # [M, D]
    maximum = tl.full((TILE_M,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    merged = tl.zeros((TILE_M, TILE_DV), tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + g, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total = total + 1.0
    begin = seq_start + (lowest - seq_start) // SPLIT_SIZE * SPLIT_SIZE
    k_at = head_of(keys, b, h, keys_b, keys_h, IS_CODED)
    v_at = head_of(values, b, h, values_b, values_h, IS_CODED)
    if IN_ORDER:
        for start in tl.range(begin, highest, SPLIT_SIZE, num_stages=STAGES):
            position = (start + n).to(tl.int64)
            mask = (position >= lowest) & (position < highest)
            k, v = _load_split(
                k_at, v_at, position, mask, d, dv, keys_s, values_s, D, TILE_D, DV, TILE_DV, False
            )
            is_seen = (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
            _, split_maximum, p = weigh(q, k, is_seen, scale, softcap, HAS_SOFTCAP)
            maximum, rescale, factor = factors(maximum, split_maximum)
            total = tl.fma(total, rescale, sum_in_order(p, v, SPLIT_SIZE) * factor)
            split_output = tl.dot(p.to(v.dtype), v, input_precision="ieee")
            merged = tl.fma(merged, rescale[:, None], split_output * factor[:, None])
    else:
        total, merged = _add_splits(
            q, k_at, v_at, first, end, begin, lowest, highest, maximum, total, merged, keys_s,
            values_s, scale, softcap, D, TILE_D, DV, TILE_DV, SPLIT_SIZE, STAGES, HAS_SOFTCAP, IS_CODED,
        )  # fmt: skip
        total = tl.where(sees, total, 0.0)
    result = tl.where(total[:, None] > 0, merged / total[:, None], 0.0)  # an empty span gives zeros
    at = output + ((b * T + t) * H * G + g)[:, None] * DV + dv[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=is_query[:, None] & (dv[None, :] < DV))


@triton.jit
def _load_split(
    k_at, v_at, position, mask, d, dv, keys_s, values_s,
    D: tl.constexpr, TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys [D, N] and values [N, DV] of a split; all of them if it `IS_WHOLE`."""
    k_at += position[None, :] * keys_s + d[:, None]
    v_at += position[:, None] * values_s + dv[None, :]
    if IS_WHOLE and TILE_D == D:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=mask[None, :] & (d[:, None] < D), other=0.0)
    if IS_WHOLE and TILE_DV == DV:
        v = tl.load(v_at)
    else:
        v = tl.load(v_at, mask=mask[:, None] & (dv[None, :] < DV), other=0.0)
    return k, v


@triton.jit
def _add_splits(
    q, k_at, v_at, first, end, begin, lowest, highest, maximum, total, merged,
    keys_s, values_s, scale, softcap,
    D: tl.constexpr, TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_CODED: tl.constexpr,
):  # fmt: skip
    """Sum of weights and output of all splits. Those that all queries see need no mask."""
    d = tl.arange(0, TILE_D)
    dv = tl.arange(0, TILE_DV)
    sees = end > first
    seen = tl.max(tl.where(sees, first, 0), 0)
    unseen = tl.min(tl.where(sees, end, 1 << 40), 0)
    # From `seen` to `unseen` all queries see all of a split.
    seen = tl.minimum(begin + tl.cdiv(seen - begin, SPLIT_SIZE) * SPLIT_SIZE, highest)
    unseen = tl.maximum(begin + (unseen - begin) // SPLIT_SIZE * SPLIT_SIZE, seen)
    unseen = tl.minimum(unseen, highest)
    for part in tl.static_range(3):
        start = begin if part == 0 else (seen if part == 1 else unseen)
        stop = seen if part == 0 else (unseen if part == 1 else highest)
        for at in tl.range(start, stop, SPLIT_SIZE, num_stages=STAGES):
            position = (at + tl.arange(0, SPLIT_SIZE)).to(tl.int64)
            mask = (position >= lowest) & (position < highest)
            k_scale, v_scale = scale, 1.0
            if IS_CODED:
                states = k_at, v_at, position * keys_s, position * values_s, d, dv
                k, v, k_scale, v_scale = load_coded_split(*states, mask, scale, D, DV, q.dtype)
            else:
                k, v = _load_split(
                    k_at, v_at, position, mask, d, dv, keys_s, values_s,
                    D, TILE_D, DV, TILE_DV, part == 1,
                )  # fmt: skip
            maximum, total, merged = _add_split(
                q, k, v, position, first, end, maximum, total, merged, k_scale, v_scale, softcap,
                HAS_SOFTCAP, part == 1, IS_CODED,
            )  # fmt: skip
    return total, merged


@triton.jit
def _add_split(
    q, k, v, position, first, end, maximum, total, merged, scale, v_scale, softcap,
    HAS_SOFTCAP: tl.constexpr, IS_WHOLE: tl.constexpr, IS_CODED: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of weights and output with one more split, as in flash attention."""
    score = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        score = softcap * (1 - 2 / (tl.exp2(score / softcap * 2 * LOG2_E) + 1))
    score = score * LOG2_E
    if not IS_WHOLE:
        is_seen = (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
        score = tl.where(is_seen, score, -float("inf"))
    maximum, rescale, _ = factors(maximum, tl.max(score, 1))
    reference = tl.where(maximum == -float("inf"), 0.0, maximum)
    p = tl.exp2(score - reference[:, None])
    total = total * rescale + tl.sum(p, 1)
    if IS_CODED:
        p = p * v_scale
    merged = tl.dot(p.to(v.dtype), v, merged * rescale[:, None], input_precision="ieee")
    return maximum, total, merged


def _fast_tile(dim: int, query: Tensor) -> tuple[int, int, int, int]:
    if dim <= 128:
        return _FAST_TILES[max(64, dim)]
    properties = torch.cuda.get_device_properties(query.device) if query.is_cuda else None
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    return _FAST_TILES[256] if shared > 110_000 else _SMALL_TILE


def prompt_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float, softcap: float | None,
    sinks: Tensor | None, in_order: bool = True,
) -> Tensor:  # fmt: skip
    """Attention of queries [B, Hq, q, D] with spans [B, q, 3]; output [B, q, Hq, Dv]."""
    query, keys, values = readable(query, keys, values)
    batch, query_heads, length, dim = query.shape
    is_coded = holds_codes(keys, query)
    heads, value_dim = values.shape[1], states_dim(values, is_coded)
    groups = query_heads // heads
    tile_d, tile_dv, split_size = tiles(dim, value_dim)
    half = 64, 4 if tile_d <= 128 else 8, 2
    rows, num_warps, stages = half if query.element_size() == 2 else (16, 4, 1)
    if not in_order and query.element_size() == 2:
        rows, split_size, num_warps, stages = _fast_tile(max(tile_d, tile_dv), query)
    tile_m = max(rows, triton.next_power_of_2(groups))
    queries = min(length, tile_m // groups)
    output = query.new_empty(batch, length, query_heads, value_dim)
    launch(
        prompt_attention, (triton.cdiv(length, queries), batch * heads), query, keys, values,
        spans,
        query if sinks is None else sinks, output, scale, softcap or 0.0, length,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *spans.stride()[:2],
        H=heads, G=groups, QUERIES=queries,
        TILE_M=tile_m, D=dim, TILE_D=tile_d, DV=value_dim, TILE_DV=tile_dv, SPLIT_SIZE=split_size,
        STAGES=stages, IN_ORDER=in_order, IS_CODED=is_coded,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, num_warps=num_warps,
    )  # fmt: skip
    return output
