"""Decode attention in Triton: a split kernel and a combine kernel. Formula and shapes are in decode_attention.py.

    split     program (batch row and KV head, i) computes an equal share of the splits of a span. It reads a split once
              for all query heads of the KV head, and writes the maximum m of the scores, the sum of exp(score - m) and
              the sum of exp(score - m) * value. In prefill a program has several queries, as many as fit into the
              tile of at least 16 that tensor cores need.
    combine   program (query and KV head, query head, output dims) merges the splits of a span in their order

Splits are counted from seq_start and their size depends on the head dims alone, not on the number of programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# Set on an H200 for the dev models (2026-11-15); other values are not on record.
_STAGES, _PROGRAMS_PER_PROCESSOR = 3, 2  # split: loads in flight (half precision), programs per multiprocessor
_COMBINE_TILE, _COMBINE_DIMS = 256, 16  # combine: splits per iteration, output dims per program
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _split(
    query, keys, values, spans, seen, outputs, maxima, sums, weights, num_splits, scale, softcap,
    T, query_b, query_h, query_t, keys_b, keys_h, keys_s, values_b, values_h, values_s, spans_b, seen_b, weights_h,
    H: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, TILE_M: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr, SPLIT_SIZE: tl.constexpr, STAGES: tl.constexpr,
    HAS_SEEN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SPANS_READY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    num_blocks = tl.cdiv(T, QUERIES)
    b = block // num_blocks
    m = tl.arange(0, TILE_M)  # query heads of this KV head, of one query after the other
    t, g = block % num_blocks * QUERIES + m // G, h * G + m % G
    q_index, is_query = b * T + t, (m < QUERIES * G) & (t < T)
    if not SPANS_READY:
        pdl_sync(PDL)
    span = spans + (block if QUERIES == 1 else q_index) * spans_b  # one query per program: block is q_index
    seq_start = tl.load(spans + b * T * spans_b)
    first, end, count, offset, first_split, total_count, lowest, highest = _split_range(
        span, is_query, seq_start, num_splits, QUERIES, SPLIT_SIZE
    )
    if SPANS_READY:
        pdl_sync(PDL)
    per_program = tl.cdiv(total_count, tl.num_programs(1))
    d, dv, n = tl.arange(0, TILE_D), tl.arange(0, TILE_DV), tl.arange(0, SPLIT_SIZE)
    q_at = query + b * query_b + t[:, None] * query_t + g[:, None] * query_h + d[None, :]
    q = tl.load(q_at, mask=is_query[:, None] & (d[None, :] < D), other=0.0)  # [M, D]
    begin = tl.program_id(1) * per_program
    for split in tl.range(begin, tl.minimum(begin + per_program, total_count), num_stages=STAGES):
        position = (seq_start + (first_split + split) * SPLIT_SIZE + n).to(tl.int64)
        in_span = (position[None, :] >= first) & (position[None, :] < end)  # [M, N], or [1, N] for one query
        mask = (position >= lowest) & (position < highest)
        if HAS_SEEN:
            mask &= tl.load(seen + b * seen_b + position, mask=mask, other=0) != 0
        k_at = keys + b * keys_b + h * keys_h + position[None, :] * keys_s + d[:, None]
        k = tl.load(k_at, mask=mask[None, :] & (d[:, None] < D), other=0.0)  # [D, N]
        v_at = values + b * values_b + h * values_h + position[:, None] * values_s + dv[None, :]
        v = tl.load(v_at, mask=mask[:, None] & (dv[None, :] < DV), other=0.0)  # [N, DV]
        score = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            score = softcap * (1 - 2 / (tl.exp2(score / softcap * 2 * LOG2_E) + 1))  # softcap * tanh(score / softcap)
        score = tl.where(in_span & mask[None, :], score * LOG2_E, -float("inf"))
        if HAS_WEIGHTS:  # scores: the combine kernel normalizes them
            at = (q_index * H * G + g)[:, None] * weights_h + position[None, :]
            tl.store(weights + at, score, mask=is_query[:, None] & in_span)
        maximum = tl.max(score, 1)
        # Where a split has nothing to attend to, 0 instead of -inf avoids -inf - -inf = nan.
        p = tl.exp2(score - tl.where(maximum == -float("inf"), 0.0, maximum)[:, None])
        own = split - offset + tl.zeros((TILE_M,), tl.int64)  # counted from each query's own first split
        at, is_own = ((q_index * H + h) * num_splits + own) * G + m % G, is_query & (own >= 0) & (own < count)
        tl.store(maxima + at, maximum, mask=is_own)
        tl.store(sums + at, tl.sum(p, 1), mask=is_own)
        output = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        tl.store(outputs + at[:, None] * TILE_DV + dv[None, :], output, mask=is_own[:, None])


@triton.jit
def _split_range(span, is_query, seq_start, num_splits, QUERIES: tl.constexpr, SPLIT_SIZE: tl.constexpr):
    """The splits of each query, and those of the program: all splits of its queries.

    Returns of each query: first, end, number of splits, and its first split counted from the program's. Then of the
    program: first split, number of splits, lowest first, highest end. With one query all are scalars.
    """
    if QUERIES == 1:
        first, end = tl.load(span + 1), tl.load(span + 2)
        count = _count_splits(seq_start, first, end, num_splits, SPLIT_SIZE)
        return first, end, count, 0, (first - seq_start) // SPLIT_SIZE, count, first, end
    else:
        first, end = tl.load(span + 1, mask=is_query, other=0), tl.load(span + 2, mask=is_query, other=0)
        count, split = _count_splits(seq_start, first, end, num_splits, SPLIT_SIZE), (first - seq_start) // SPLIT_SIZE
        lowest = tl.min(tl.where(count > 0, first, 1 << 40), 0)
        first_split = tl.min(tl.where(count > 0, split, 1 << 40), 0)
        total_count = tl.maximum(tl.max(tl.where(count > 0, split + count, 0), 0) - first_split, 0)
        offset = split - first_split
        return first[:, None], end[:, None], count, offset, first_split, total_count, lowest, tl.max(end, 0)


@triton.jit
def _count_splits(seq_start, first, end, num_splits, SPLIT_SIZE: tl.constexpr):
    """The number of splits that a span overlaps."""
    count = tl.where(end > first, tl.cdiv(end - seq_start, SPLIT_SIZE) - (first - seq_start) // SPLIT_SIZE, 0)
    return tl.minimum(count, num_splits)  # a span longer than `max_span` must stay inside the buffers


@triton.jit
def _combine(
    outputs, maxima, sums, spans, sinks, output, weights, spans_b, weights_h, num_splits,
    H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    TILE: tl.constexpr, DIMS: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    SPANS_READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, g = tl.program_id(0), tl.program_id(1)  # a query and KV head, and a query head of it
    q_index, h = (pair // H).to(tl.int64), pair % H
    if not SPANS_READY:
        pdl_sync(PDL)
    span = spans + q_index * spans_b
    first, end = tl.load(span + 1), tl.load(span + 2)
    count = _count_splits(tl.load(span), first, end, num_splits, SPLIT_SIZE)
    if SPANS_READY:
        pdl_sync(PDL)
    n, dv = tl.arange(0, TILE), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    maximum, total, merged = -float("inf"), 0.0, tl.zeros((DIMS,), tl.float32)
    if HAS_SINKS:
        maximum, total = tl.load(sinks + h * G + g).to(tl.float32) * LOG2_E, 1.0
    for begin in range(0, count, TILE):
        split = begin + n
        at = (pair.to(tl.int64) * num_splits + split) * G + g
        split_maximum = tl.load(maxima + at, mask=split < count, other=-float("inf"))
        split_sum = tl.load(sums + at, mask=split < count, other=0.0)
        split_output = tl.load(outputs + at[:, None] * TILE_DV + dv[None, :], mask=split[:, None] < count, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(split_maximum, 0))
        reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
        factor, rescale = tl.exp2(split_maximum - reference), tl.exp2(maximum - reference)
        total = total * rescale + tl.sum(factor * split_sum, 0)
        merged = merged * rescale + tl.sum(split_output * factor[:, None], 0)
        maximum = new_maximum
    if HAS_WEIGHTS:  # noqa: SIM102  # a constexpr `if` of its own: else the branch is compiled in any case
        if tl.program_id(2) == 0:
            scores = weights + (q_index * H * G + h * G + g) * weights_h
            for begin in range(first, end, TILE):
                position = begin + n
                score = tl.load(scores + position, mask=position < end, other=-float("inf"))
                tl.store(scores + position, tl.exp2(score - maximum) / total, mask=position < end)
    result = tl.where(total > 0, merged / total, 0.0)  # an empty span gives zeros
    at = (q_index * H * G + h * G + g) * DV + dv
    tl.store(output + at, result.to(output.dtype.element_ty), mask=dv < DV)


def decode_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, seen: Tensor | None, scale: float, max_span: int,
    softcap: float | None = None, sinks: Tensor | None = None, weights: Tensor | None = None, spans_ready: bool = False,
) -> Tensor:  # fmt: skip
    """`decode_attention` of T queries per batch row: query [B, Hq, T, D], spans [B * T, 3], output [B, T, Hq, Dv]."""
    (batch, query_heads, length, dim), (_, heads, _, value_dim) = query.shape, values.shape
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values, spans)):
        raise ValueError("decode_attention needs query, keys, values and spans whose last dim has stride 1.")
    groups, pairs = query_heads // heads, batch * length * heads  # pairs of a query and a KV head
    tile_d, tile_dv, split_size, num_splits = _tiles(dim, value_dim, max_span)
    tile_m = max(16, triton.next_power_of_2(groups))
    queries = min(length, tile_m // groups)
    programs = batch * triton.cdiv(length, queries) * heads
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
    per_span = min(num_splits, max(1, _PROGRAMS_PER_PROCESSOR * processors // programs))
    outputs = query.new_empty(pairs, num_splits, groups, tile_dv, dtype=torch.float32)
    maxima = query.new_empty(pairs, num_splits, groups, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    output = query.new_empty(batch, length, query_heads, value_dim)
    both = {"H": heads, "G": groups, "DV": value_dim, "TILE_DV": tile_dv, "SPLIT_SIZE": split_size, "num_warps": 4}
    both |= {"HAS_WEIGHTS": weights is not None, "SPANS_READY": spans_ready}
    # A kernel takes a pointer for an absent tensor too.
    scores, weights_h = (query, 0) if weights is None else (weights, weights.stride(1))
    mask, seen_b = (query, 0) if seen is None else (seen, seen.stride(0))
    launch(
        _split, (programs, per_span), query, keys, values, spans, mask, outputs, maxima, sums, scores, num_splits,
        scale, softcap or 0.0, length, *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], spans.stride(0),
        seen_b, weights_h, QUERIES=queries, TILE_M=tile_m, D=dim, TILE_D=tile_d, HAS_SEEN=seen is not None,
        HAS_SOFTCAP=softcap is not None, STAGES=_STAGES if query.element_size() == 2 else 1, **both,
    )  # fmt: skip
    launch(
        _combine, (pairs, groups, tile_dv // _COMBINE_DIMS), outputs, maxima, sums, spans,
        query if sinks is None else sinks, output, scores, spans.stride(0), weights_h, num_splits,
        TILE=_COMBINE_TILE, DIMS=_COMBINE_DIMS, HAS_SINKS=sinks is not None, **both,
    )  # fmt: skip
    return output


def partial_bytes(query: Tensor, values: Tensor) -> int:
    """Bytes of the partial outputs of one query per batch row."""
    _, tile_dv, _, num_splits = _tiles(query.shape[-1], values.shape[-1], values.shape[2])
    return query.shape[0] * query.shape[1] * num_splits * tile_dv * 4


def _tiles(dim: int, value_dim: int, max_span: int) -> tuple[int, int, int, int]:
    """The head dims of keys and values as powers of two; the split size; the most splits that a span overlaps."""
    tile_d, tile_dv = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    split_size = max(32, min(128, 8192 // max(tile_d, tile_dv)))  # a tile has at most 8192 elements
    return tile_d, tile_dv, split_size, triton.cdiv(max_span, split_size) + 1  # a span may begin inside a split
