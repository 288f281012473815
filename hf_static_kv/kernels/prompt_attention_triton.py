"""Attention of a prompt in Triton, with the bits of decode steps. Formula in decode_attention.py.

An instance has some queries of one KV head, as many as fit into its tile. It goes through the
splits of their spans from left to right and merges each as decode_attention_triton.py does in
order; a split that a query does not see changes nothing of it. Tensor cores give the same bits in
tiles of 16 and more queries: measured, and tested on the GPU at hand.
"""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.decode_attention_triton import LOG2_E, factors, sum_in_order, tiles, weigh
from hf_static_kv.kernels.launch_triton import launch, pdl_sync


@triton.jit
def prompt_attention(
    query, keys, values, spans, sinks, output, scale, softcap, T,
    query_b, query_h, query_t, keys_b, keys_h, keys_s, values_b, values_h, values_s,
    H: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, TILE_M: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(T, QUERIES)
    b = (tl.program_id(1) // H).to(tl.int64)
    h = (tl.program_id(1) % H).to(tl.int64)
    m = tl.arange(0, TILE_M)  # query heads of this KV head, of one query after the other
    block = num_blocks - 1 - tl.program_id(0)  # late queries, whose spans are long, first
    t = (block * QUERIES + m // G).to(tl.int64)
    g = h * G + m % G
    is_query = (m < QUERIES * G) & (t < T)
    pdl_sync(PDL)
    span = spans + (b * T + t) * 3
    first = tl.load(span + 1, mask=is_query, other=0)
    end = tl.load(span + 2, mask=is_query, other=0)
    seq_start = tl.load(spans + b * T * 3)
    sees = end > first
    lowest = tl.min(tl.where(sees, first, 1 << 40), 0)
    highest = tl.max(tl.where(sees, end, seq_start), 0)
    lowest = tl.minimum(lowest, highest)
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
    for start in tl.range(begin, highest, SPLIT_SIZE, num_stages=STAGES):
        position = (start + n).to(tl.int64)
        mask = (position >= lowest) & (position < highest)
        k_at = keys + b * keys_b + h * keys_h + position[None, :] * keys_s + d[:, None]
        k = tl.load(k_at, mask=mask[None, :] & (d[:, None] < D), other=0.0)  # [D, N]
        v_at = values + b * values_b + h * values_h + position[:, None] * values_s + dv[None, :]
        v = tl.load(v_at, mask=mask[:, None] & (dv[None, :] < DV), other=0.0)  # [N, DV]
        is_seen = (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
        _, split_maximum, p = weigh(q, k, is_seen, scale, softcap, HAS_SOFTCAP)
        split_output = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        maximum, rescale, factor = factors(maximum, split_maximum)
        total = tl.fma(total, rescale, sum_in_order(p, v, SPLIT_SIZE) * factor)
        merged = tl.fma(merged, rescale[:, None], split_output * factor[:, None])
    result = tl.where(total[:, None] > 0, merged / total[:, None], 0.0)  # an empty span gives zeros
    at = output + ((b * T + t) * H * G + g)[:, None] * DV + dv[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=is_query[:, None] & (dv[None, :] < DV))


def prompt_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """`invariant_attention`: query [B, Hq, q, D], spans [B, q, 3], output [B, q, Hq, Dv]."""
    query, keys, values = (
        states if states.stride(-1) == 1 else states.contiguous()
        for states in (query, keys, values)
    )
    batch, query_heads, length, dim = query.shape
    _, heads, _, value_dim = values.shape
    groups = query_heads // heads
    tile_d, tile_dv, split_size = tiles(dim, value_dim)
    half = 64, 4 if tile_d <= 128 else 8, 2
    rows, num_warps, stages = half if query.element_size() == 2 else (16, 4, 1)
    tile_m = max(rows, triton.next_power_of_2(groups))
    queries = min(length, tile_m // groups)
    output = query.new_empty(batch, length, query_heads, value_dim)
    launch(
        prompt_attention, (triton.cdiv(length, queries), batch * heads), query, keys, values,
        spans.contiguous(),
        query if sinks is None else sinks, output, scale, softcap or 0.0, length,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], H=heads, G=groups, QUERIES=queries,
        TILE_M=tile_m, D=dim, TILE_D=tile_d, DV=value_dim, TILE_DV=tile_dv, SPLIT_SIZE=split_size,
        STAGES=stages,
        HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None, num_warps=num_warps,
    )  # fmt: skip
    return output
