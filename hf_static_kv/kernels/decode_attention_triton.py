"""Decode attention in Triton: a split kernel and a combine kernel. Formula and shapes are in
decode_attention.py.

    split     program (batch row and KV head, i) computes an equal share of the splits of a span. It reads a split once
              for all query heads of the KV head, and writes the maximum m of the scores, the sum of exp(score - m) and
              the sum of exp(score - m) * value.
    combine   program (batch row and KV head, query head, output dims) merges the splits of a span

Splits are counted from seq_start and their size depends on the head dims alone, not on the number
of programs. In order (inside `exact`) tensor cores add the weights of a split, and splits are
merged from left to right: so does prompt_attention_triton.py, which therefore gives the same bits.
Otherwise many splits are merged at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# Set on an H200 for the dev models (2026-11-15); other values are not on record.
_STAGES, _PROGRAMS_PER_PROCESSOR = (
    3,
    2,
)  # split: loads in flight (half precision), programs per multiprocessor
_COMBINE_TILE, _COMBINE_DIMS = 256, 16  # combine: splits per iteration, output dims per program
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _split(
    query, keys, values, spans, seen, outputs, maxima, sums, weights, num_splits, scale, softcap,
    query_b, query_h, keys_b, keys_h, keys_s, values_b, values_h, values_s, spans_b, seen_b, weights_h,
    H: tl.constexpr, G: tl.constexpr, TILE_M: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
    DV: tl.constexpr,
    TILE_DV: tl.constexpr, SPLIT_SIZE: tl.constexpr, STAGES: tl.constexpr, HAS_SEEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SPANS_READY: tl.constexpr, IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    m = tl.arange(0, TILE_M)  # query heads of this KV head
    if not SPANS_READY:
        pdl_sync(PDL)
    span = spans + b * spans_b
    seq_start, first, end = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    count, first_split = (
        _count_splits(seq_start, first, end, num_splits, SPLIT_SIZE),
        (first - seq_start) // SPLIT_SIZE,
    )
    if SPANS_READY:
        pdl_sync(PDL)
    per_program = tl.cdiv(count, tl.num_programs(1))
    d, dv, n = tl.arange(0, TILE_D), tl.arange(0, TILE_DV), tl.arange(0, SPLIT_SIZE)
    q_at = query + b * query_b + (h * G + m)[:, None] * query_h + d[None, :]
    q = tl.load(q_at, mask=(m < G)[:, None] & (d[None, :] < D), other=0.0)  # [M, D]
    begin = tl.program_id(1) * per_program
    for split in tl.range(begin, tl.minimum(begin + per_program, count), num_stages=STAGES):
        position = (seq_start + (first_split + split) * SPLIT_SIZE + n).to(tl.int64)
        mask = (position >= first) & (position < end)
        if HAS_SEEN:
            mask &= tl.load(seen + b * seen_b + position, mask=mask, other=0) != 0
        k_at = keys + b * keys_b + h * keys_h + position[None, :] * keys_s + d[:, None]
        k = tl.load(k_at, mask=mask[None, :] & (d[:, None] < D), other=0.0)  # [D, N]
        v_at = values + b * values_b + h * values_h + position[:, None] * values_s + dv[None, :]
        v = tl.load(v_at, mask=mask[:, None] & (dv[None, :] < DV), other=0.0)  # [N, DV]
        score, maximum, p = weigh(q, k, mask[None, :], scale, softcap, HAS_SOFTCAP)
        if HAS_WEIGHTS:  # scores: the combine kernel normalizes them
            in_span = (position[None, :] >= first) & (position[None, :] < end)
            at = (b * H * G + h * G + m)[:, None] * weights_h + position[None, :]
            tl.store(weights + at, score, mask=(m < G)[:, None] & in_span)
        at = (tl.program_id(0).to(tl.int64) * num_splits + split) * G + m
        tl.store(maxima + at, maximum, mask=m < G)
        tl.store(
            sums + at, sum_in_order(p, v, SPLIT_SIZE) if IN_ORDER else tl.sum(p, 1), mask=m < G
        )
        output = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        tl.store(outputs + at[:, None] * TILE_DV + dv[None, :], output, mask=(m < G)[:, None])


@triton.jit
def weigh(q, k, is_seen, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The scores [M, N] of a split in powers of two, their maxima [M], and the weights relative to
    these.
    """
    score = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        score = softcap * (
            1 - 2 / (tl.exp2(score / softcap * 2 * LOG2_E) + 1)
        )  # softcap * tanh(score / softcap)
    score = tl.where(is_seen, score * LOG2_E, -float("inf"))
    maximum = tl.max(score, 1)
    # Where a split has nothing to attend to, 0 instead of -inf avoids -inf - -inf = nan.
    return (
        score,
        maximum,
        tl.exp2(score - tl.where(maximum == -float("inf"), 0.0, maximum)[:, None]),
    )


@triton.jit
def sum_in_order(p, v, SPLIT_SIZE: tl.constexpr):
    """The sums [M] of the weights p [M, N], rounded as they multiply values.

    `tl.sum` has an order for each layout.
    """
    is_first = (
        tl.arange(0, 16)[None, :] + tl.zeros((SPLIT_SIZE, 1), tl.int32) == 0
    )  # a column of ones among zeros
    return tl.sum(tl.dot(p.to(v.dtype), is_first.to(v.dtype), input_precision="ieee"), 1)


@triton.jit
def factors(maximum, split_maximum):
    """The maximum with one more split, and what multiplies the sums before it and those of the
    split.
    """
    new_maximum = tl.maximum(maximum, split_maximum)
    reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    return new_maximum, tl.exp2(maximum - reference), tl.exp2(split_maximum - reference)


@triton.jit
def _count_splits(seq_start, first, end, num_splits, SPLIT_SIZE: tl.constexpr):
    """The number of splits that a span overlaps."""
    count = tl.where(
        end > first, tl.cdiv(end - seq_start, SPLIT_SIZE) - (first - seq_start) // SPLIT_SIZE, 0
    )
    return tl.minimum(
        count, num_splits
    )  # a span longer than `max_span` must stay inside the buffers


@triton.jit
def _combine(
    outputs, maxima, sums, spans, sinks, output, weights, spans_b, weights_h, num_splits,
    H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    TILE: tl.constexpr, DIMS: tl.constexpr, UNROLL: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    SPANS_READY: tl.constexpr, IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair, g = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
    )  # a batch row and KV head, and a query head of it
    b, h = pair // H, pair % H
    if not SPANS_READY:
        pdl_sync(PDL)
    span = spans + b * spans_b
    first, end = tl.load(span + 1), tl.load(span + 2)
    count = _count_splits(tl.load(span), first, end, num_splits, SPLIT_SIZE)
    if SPANS_READY:
        pdl_sync(PDL)
    n, dv = tl.arange(0, TILE), tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    maximum, total, merged = -float("inf"), 0.0, tl.zeros((DIMS,), tl.float32)
    if HAS_SINKS:
        maximum, total = tl.load(sinks + h * G + g).to(tl.float32) * LOG2_E, 1.0
    if IN_ORDER:
        for split in tl.range(0, count, loop_unroll_factor=UNROLL):
            at = (pair * num_splits + split) * G + g
            maximum, rescale, factor = factors(maximum, tl.load(maxima + at))
            # `fma`, as a compiler would choose itself where it rounds.
            total = tl.fma(total, rescale, tl.load(sums + at) * factor)
            merged = tl.fma(merged, rescale, tl.load(outputs + at * TILE_DV + dv) * factor)
    else:
        for begin in range(0, count, TILE):
            split = begin + n
            at = (pair * num_splits + split) * G + g
            split_maximum = tl.load(maxima + at, mask=split < count, other=-float("inf"))
            split_sum = tl.load(sums + at, mask=split < count, other=0.0)
            split_output = tl.load(
                outputs + at[:, None] * TILE_DV + dv[None, :],
                mask=split[:, None] < count,
                other=0.0,
            )
            new_maximum = tl.maximum(maximum, tl.max(split_maximum, 0))
            reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            factor, rescale = tl.exp2(split_maximum - reference), tl.exp2(maximum - reference)
            total = total * rescale + tl.sum(factor * split_sum, 0)
            merged = merged * rescale + tl.sum(split_output * factor[:, None], 0)
            maximum = new_maximum
    if HAS_WEIGHTS:  # noqa: SIM102  # a constexpr `if` of its own: else the branch is compiled in any case
        if tl.program_id(2) == 0:
            scores = weights + (pair * G + g) * weights_h
            for begin in range(first, end, TILE):
                position = begin + n
                score = tl.load(scores + position, mask=position < end, other=-float("inf"))
                tl.store(scores + position, tl.exp2(score - maximum) / total, mask=position < end)
    result = tl.where(total > 0, merged / total, 0.0)  # an empty span gives zeros
    tl.store(output + (pair * G + g) * DV + dv, result.to(output.dtype.element_ty), mask=dv < DV)


def decode_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, seen: Tensor | None, scale: float,
    max_span: int,
    softcap: float | None = None, sinks: Tensor | None = None, weights: Tensor | None = None,
    spans_ready: bool = False,
    in_order: bool = False,
) -> Tensor:  # fmt: skip
    """`decode_attention`: query [B, Hq, 1, D], spans [B, 3], output [B, 1, Hq, Dv]."""
    (batch, query_heads, _, dim), (_, heads, _, value_dim) = query.shape, values.shape
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values, spans)):
        raise ValueError(
            "decode_attention needs query, keys, values and spans whose last dim has stride 1."
        )
    groups, pairs = query_heads // heads, batch * heads  # pairs of a batch row and a KV head
    tile_d, tile_dv, split_size = tiles(dim, value_dim)
    num_splits = triton.cdiv(max_span, split_size) + 1  # a span may begin inside a split
    processors = (
        torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
    )
    per_span = min(num_splits, max(1, _PROGRAMS_PER_PROCESSOR * processors // pairs))
    outputs = query.new_empty(pairs, num_splits, groups, tile_dv, dtype=torch.float32)
    maxima = query.new_empty(pairs, num_splits, groups, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    output = query.new_empty(batch, 1, query_heads, value_dim)
    both = {
        "H": heads,
        "G": groups,
        "DV": value_dim,
        "TILE_DV": tile_dv,
        "SPLIT_SIZE": split_size,
        "num_warps": 4,
    }
    both |= {"HAS_WEIGHTS": weights is not None, "SPANS_READY": spans_ready, "IN_ORDER": in_order}
    # A kernel takes a pointer for an absent tensor too.
    scores, weights_h = (query, 0) if weights is None else (weights, weights.stride(1))
    mask, seen_b = (query, 0) if seen is None else (seen, seen.stride(0))
    launch(
        _split, (pairs, per_span), query, keys, values, spans, mask, outputs, maxima, sums, scores,
        num_splits,
        scale, softcap or 0.0, *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], spans.stride(0),
        seen_b, weights_h, TILE_M=max(16, triton.next_power_of_2(groups)), D=dim, TILE_D=tile_d,
        HAS_SEEN=seen is not None, HAS_SOFTCAP=softcap is not None,
        STAGES=_STAGES if query.element_size() == 2 else 1,
        **both,
    )  # fmt: skip
    launch(
        _combine, (pairs, groups, tile_dv // _COMBINE_DIMS), outputs, maxima, sums, spans,
        query if sinks is None else sinks, output, scores, spans.stride(0), weights_h, num_splits,
        TILE=_COMBINE_TILE, DIMS=_COMBINE_DIMS, HAS_SINKS=sinks is not None,
        # small splits are many: 26 layers of 256 dims take 6 to 10 us less
        UNROLL=8 if split_size == 32 else 4,
        **both,
    )  # fmt: skip
    return output


def tiles(dim: int, value_dim: int) -> tuple[int, int, int]:
    """The head dims of keys and values as powers of two, and the split size."""
    tile_d, tile_dv = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    return (
        tile_d,
        tile_dv,
        max(32, min(128, 8192 // max(tile_d, tile_dv))),
    )  # a tile has at most 8192 elements
