"""Decode attention in Triton: a split kernel and a combine kernel.

Formula and shapes are in decode_attention.py.

    split     Instance (batch row and KV head, i) computes an equal share of the splits of a span.
              It reads a split once for all queries of the KV head, merges its splits, and writes
              the maximum m of their scores, the sum of exp(score - m) and the sum of
              exp(score - m) * value: its part.
    combine   Instance (batch row and KV head, query, output dims) merges the parts of a span.

Splits are counted from seq_start and their size depends on the head dims alone, not on the number
of instances. In order (inside `exact`) tensor cores add the weights of a split, each split is a
part, and they are merged from left to right: so does prompt_attention_triton.py, which therefore
gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.cache.codes import holds_codes, states_dim
from hf_static_kv.kernels.codes_triton import load_coded_split
from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# Set on an H200 for the dev models (2026-11-15); other values are not on record.
_STAGES = 3  # split: loads in flight, in half precision
_PROGRAMS_PER_PROCESSOR = 2  # split: kernel instances per multiprocessor
_COMBINE_TILE = 256  # combine: splits per iteration
_COMBINE_DIMS = 16  # combine: output dims of a kernel instance
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def decode_attention_split(
    query, keys, values, spans, seen, outputs, maxima, sums, weights, num_splits, parts, most_parts,
    scale, softcap, query_b, query_h, query_t, keys_b, keys_h, keys_s, values_b, values_h, values_s,
    spans_b, spans_t, seen_b, weights_h,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, TILE_M: tl.constexpr,
    D: tl.constexpr, TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, STAGES: tl.constexpr, HAS_SEEN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SPANS_READY: tl.constexpr,
    IN_ORDER: tl.constexpr, IS_CODED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    m = tl.arange(0, TILE_M)  # queries of this KV head: token m // G, query head m % G of the group
    if not SPANS_READY:
        pdl_sync(PDL)
    span = spans + b * spans_b
    seq_start = tl.load(span)
    first = tl.load(span + 1)  # of the first token: no later one attends to an older position
    end = tl.load(span + (Q - 1) * spans_t + 2)  # of the last token
    count = _count_splits(seq_start, first, end, num_splits, SPLIT_SIZE)
    first_split = (first - seq_start) // SPLIT_SIZE
    if Q > 1:
        own_span = span + m // G * spans_t
        own_first = tl.load(own_span + 1, mask=m < G * Q, other=0)[:, None]
        own_end = tl.load(own_span + 2, mask=m < G * Q, other=0)[:, None]
    if SPANS_READY:
        pdl_sync(PDL)
    per_program = tl.cdiv(count, most_parts)
    d = tl.arange(0, TILE_D)
    dv = tl.arange(0, TILE_DV)
    n = tl.arange(0, SPLIT_SIZE)
    q = _load_queries(query + b * query_b, h, m, d, query_h, query_t, G, Q, D)
    begin = tl.program_id(1) * per_program
    to = outputs, maxima, sums, parts
    merged = _nothing(TILE_M, TILE_DV)
    for split in tl.range(begin, tl.minimum(begin + per_program, count), num_stages=STAGES):
        position = (seq_start + (first_split + split) * SPLIT_SIZE + n).to(tl.int64)
        mask = (position >= first) & (position < end)
        if HAS_SEEN:
            mask &= tl.load(seen + b * seen_b + position, mask=mask, other=0) != 0
        k, v, by, v_scale = _load_split(
            keys, values, b, h, position, mask, d, dv, keys_b, keys_h, keys_s,
            values_b, values_h, values_s, scale, D, DV, IS_CODED, q.dtype,
        )  # fmt: skip
        sees = mask[None, :]
        if Q > 1:
            sees &= (position[None, :] >= own_first) & (position[None, :] < own_end)
        score, maximum, p = weigh(q, k, sees, by, softcap, HAS_SOFTCAP)
        if HAS_WEIGHTS:  # scores of one token: the combine kernel normalizes them
            in_span = (m < G)[:, None] & ((position >= first) & (position < end))[None, :]
            at = (b * H * G + h * G + m)[:, None] * weights_h + position[None, :]
            tl.store(weights + at, score, mask=in_span)
        total = sum_in_order(p, v, SPLIT_SIZE) if IN_ORDER else tl.sum(p, 1)
        output = tl.dot((p * v_scale).to(v.dtype), v, input_precision="ieee")
        if IN_ORDER:
            _store_part(to, split, output, maximum, total, m, dv, G * Q, TILE_DV)
        else:
            merged = _merged(merged, output, maximum, total)
    if not IN_ORDER:
        _store_part(to, tl.program_id(1), merged[0], merged[1], merged[2], m, dv, G * Q, TILE_DV)


@triton.jit
def _load_queries(
    query, h, m, d, query_h, query_t, G: tl.constexpr, Q: tl.constexpr, D: tl.constexpr
):
    """The queries [M, D] of a KV head: of row m those of token m // G and head m % G of its group."""
    row = query + (h * G + m % G) * query_h + m // G * query_t
    return tl.load(
        row[:, None] + d[None, :], mask=(m < G * Q)[:, None] & (d[None, :] < D), other=0.0
    )


@triton.jit
def _nothing(TILE_M: tl.constexpr, TILE_DV: tl.constexpr):
    """Output, maximum and sum of weights of no split."""
    maximum = tl.full((TILE_M,), -float("inf"), tl.float32)
    return tl.zeros((TILE_M, TILE_DV), tl.float32), maximum, tl.zeros((TILE_M,), tl.float32)


@triton.jit
def _merged(before, output, maximum, total):
    """Output, maximum and sum of weights with those of one more split."""
    merged, highest, so_far = before
    highest, rescale, factor = factors(highest, maximum)
    merged = merged * rescale[:, None] + output * factor[:, None]
    return merged, highest, so_far * rescale + total * factor


@triton.jit
def _store_part(to, part, output, maximum, total, m, dv, rows: tl.constexpr, TILE_DV: tl.constexpr):
    """One of the parts of a batch row and KV head: `to` has the tensors and how many parts they have."""
    outputs, maxima, sums, parts = to
    at = (tl.program_id(0).to(tl.int64) * parts + part) * rows + m
    tl.store(maxima + at, maximum, mask=m < rows)
    tl.store(sums + at, total, mask=m < rows)
    tl.store(outputs + at[:, None] * TILE_DV + dv[None, :], output, mask=(m < rows)[:, None])


@triton.jit
def _load_split(
    keys, values, b, h, position, mask, d, dv,
    keys_b, keys_h, keys_s, values_b, values_h, values_s, scale,
    D: tl.constexpr, DV: tl.constexpr, IS_CODED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys [D, N] and values [N, DV], or their codes, and the factors of scores and of weights."""
    if IS_CODED:
        k_row = b * keys_b + h * keys_h + position * keys_s
        v_row = b * values_b + h * values_h + position * values_s
        return load_coded_split(keys, values, k_row, v_row, d, dv, mask, scale, D, DV, dtype)
    else:
        k_at = keys + b * keys_b + h * keys_h + position[None, :] * keys_s + d[:, None]
        k = tl.load(k_at, mask=mask[None, :] & (d[:, None] < D), other=0.0)
        v_at = values + b * values_b + h * values_h + position[:, None] * values_s + dv[None, :]
        v = tl.load(v_at, mask=mask[:, None] & (dv[None, :] < DV), other=0.0)
        return k, v, scale, 1.0


def readable(*states: Tensor) -> list[Tensor]:
    """The same with a last dim of stride 1; a view where it has that."""
    return [own if own.stride(-1) == 1 else own.contiguous() for own in states]


@triton.jit
def weigh(q, k, is_seen, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The scores [M, N] of a split in powers of two, their maxima [M], and the weights [M, N]."""
    score = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:  # softcap * tanh(score / softcap)
        score = softcap * (1 - 2 / (tl.exp2(score / softcap * 2 * LOG2_E) + 1))
    score = tl.where(is_seen, score * LOG2_E, -float("inf"))
    maximum = tl.max(score, 1)
    # If a split has nothing to attend to, 0 instead of -inf avoids -inf - -inf = nan.
    reference = tl.where(maximum == -float("inf"), 0.0, maximum)
    return score, maximum, tl.exp2(score - reference[:, None])


@triton.jit
def sum_in_order(p, v, SPLIT_SIZE: tl.constexpr):
    """The sums of p [M, N], rounded as it multiplies values: `tl.sum` has an order per layout."""
    # A column of ones among zeros.
    is_first = tl.arange(0, 16)[None, :] + tl.zeros((SPLIT_SIZE, 1), tl.int32) == 0
    return tl.sum(tl.dot(p.to(v.dtype), is_first.to(v.dtype), input_precision="ieee"), 1)


@triton.jit
def factors(maximum, split_maximum):
    """The maximum with one more split, and the factors of the sums before it and of its own."""
    new_maximum = tl.maximum(maximum, split_maximum)
    reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
    return new_maximum, tl.exp2(maximum - reference), tl.exp2(split_maximum - reference)


@triton.jit
def _count_splits(seq_start, first, end, num_splits, SPLIT_SIZE: tl.constexpr):
    """The number of splits that a span overlaps."""
    count = tl.cdiv(end - seq_start, SPLIT_SIZE) - (first - seq_start) // SPLIT_SIZE
    # A span longer than `max_span` must stay inside the buffers.
    return tl.minimum(tl.where(end > first, count, 0), num_splits)


@triton.jit
def _normalize_scores(scores, first, end, maximum, total, TILE: tl.constexpr):
    """Turn the scores of one query into weights, in the first of its instances."""
    if tl.program_id(2) == 0:
        for begin in range(first, end, TILE):
            position = begin + tl.arange(0, TILE)
            score = tl.load(scores + position, mask=position < end, other=-float("inf"))
            tl.store(scores + position, tl.exp2(score - maximum) / total, mask=position < end)


@triton.jit
def decode_attention_combine(
    outputs, maxima, sums, spans, sinks, output, weights, spans_b, spans_t, weights_h, parts,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr,
    SPLIT_SIZE: tl.constexpr, TILE: tl.constexpr, DIMS: tl.constexpr, UNROLL: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SPANS_READY: tl.constexpr,
    IN_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)  # of a batch row and a KV head
    m = tl.program_id(1)  # its query, as in `decode_attention_split`
    b = pair // H
    h = pair % H
    if not SPANS_READY:
        pdl_sync(PDL)
    span = spans + b * spans_b
    first = tl.load(span + 1)
    end = tl.load(span + (Q - 1) * spans_t + 2)
    count = _count_splits(tl.load(span), first, end, parts, SPLIT_SIZE) if IN_ORDER else parts
    if SPANS_READY:
        pdl_sync(PDL)
    n = tl.arange(0, TILE)
    dv = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    maximum = -float("inf")
    total = 0.0
    merged = tl.zeros((DIMS,), tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks + h * G + m % G).to(tl.float32) * LOG2_E
        total = 1.0
    if IN_ORDER:
        for split in tl.range(0, count, loop_unroll_factor=UNROLL):
            at = (pair * parts + split) * (G * Q) + m
            maximum, rescale, factor = factors(maximum, tl.load(maxima + at))
            # `fma`, as a compiler would choose itself where it rounds.
            total = tl.fma(total, rescale, tl.load(sums + at) * factor)
            merged = tl.fma(merged, rescale, tl.load(outputs + at * TILE_DV + dv) * factor)
    else:
        for begin in range(0, count, TILE):
            split = begin + n
            at = (pair * parts + split) * (G * Q) + m
            split_maximum = tl.load(maxima + at, mask=split < count, other=-float("inf"))
            split_sum = tl.load(sums + at, mask=split < count, other=0.0)
            split_output = tl.load(
                outputs + at[:, None] * TILE_DV + dv[None, :],
                mask=split[:, None] < count,
                other=0.0,
            )
            new_maximum = tl.maximum(maximum, tl.max(split_maximum, 0))
            reference = tl.where(new_maximum == -float("inf"), 0.0, new_maximum)
            factor = tl.exp2(split_maximum - reference)
            rescale = tl.exp2(maximum - reference)
            total = total * rescale + tl.sum(factor * split_sum, 0)
            merged = merged * rescale + tl.sum(split_output * factor[:, None], 0)
            maximum = new_maximum
    if HAS_WEIGHTS:
        scores = weights + (pair * G + m) * weights_h
        _normalize_scores(scores, first, end, maximum, total, TILE)
    result = tl.where(total > 0, merged / total, 0.0)  # an empty span gives zeros
    row = (b * Q + m // G) * H * G + h * G + m % G
    tl.store(output + row * DV + dv, result.to(output.dtype.element_ty), mask=dv < DV)


def decode_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, seen: Tensor | None, scale: float,
    max_span: int, softcap: float | None = None, sinks: Tensor | None = None,
    weights: Tensor | None = None, spans_ready: bool = False, in_order: bool = False,
) -> Tensor:  # fmt: skip
    """`decode_attention`: query [B, Hq, q, D], spans [B, q, 3], output [B, q, Hq, Dv]."""
    batch, query_heads, num_tokens, dim = query.shape
    heads = values.shape[1]
    is_coded = holds_codes(keys, query)
    value_dim = states_dim(values, is_coded)
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values, spans)):
        tensors = "query, keys, values and spans"
        raise ValueError(f"decode_attention needs {tensors} whose last dim has stride 1.")
    groups = query_heads // heads
    rows = groups * num_tokens  # queries that share a KV head
    pairs = batch * heads  # of a batch row and a KV head
    tile_d, tile_dv, split_size = tiles(dim, value_dim)
    # The spans of a batch row cover `max_span` and one position more for each further token. They
    # may begin inside a split.
    num_splits = triton.cdiv(max_span + num_tokens - 1, split_size) + 1
    # By batch and heads: the share of an instance and the order of sums do not depend on the capacity.
    most_parts = max(1, _PROGRAMS_PER_PROCESSOR * processors(query) // pairs)
    per_span = min(num_splits, most_parts)
    parts = num_splits if in_order else per_span
    outputs = query.new_empty(pairs, parts, rows, tile_dv, dtype=torch.float32)
    maxima = query.new_empty(pairs, parts, rows, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    output = query.new_empty(batch, num_tokens, query_heads, value_dim)
    # A kernel takes a pointer for an absent tensor too.
    scores, weights_h = (query, 0) if weights is None else (weights, weights.stride(1))
    mask, seen_b = (query, 0) if seen is None else (seen, seen.stride(0))
    tile_m = max(16, triton.next_power_of_2(rows))
    both = {
        "H": heads, "G": groups, "Q": num_tokens, "DV": value_dim, "TILE_DV": tile_dv,
        "SPLIT_SIZE": split_size, "HAS_WEIGHTS": weights is not None,
        "SPANS_READY": spans_ready, "IN_ORDER": in_order,
    }  # fmt: skip
    launch(
        decode_attention_split, (pairs, per_span), query, keys, values, spans, mask,
        outputs, maxima, sums, scores, num_splits, parts, most_parts, scale, softcap or 0.0,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *spans.stride()[:2], seen_b, weights_h,
        TILE_M=tile_m, D=dim, TILE_D=tile_d, HAS_SEEN=seen is not None,
        HAS_SOFTCAP=softcap is not None, IS_CODED=is_coded,
        STAGES=_STAGES if query.element_size() == 2 else 1,
        num_warps=4 if tile_m <= 64 else 8, **both,
    )  # fmt: skip
    launch_combine(
        (outputs, maxima, sums), spans, sinks, output, most_parts, scores, weights_h, **both
    )
    return output


def launch_combine(
    parts: tuple[Tensor, Tensor, Tensor], spans: Tensor, sinks: Tensor | None, output: Tensor,
    most_parts: int, scores: Tensor, weights_h: int, **constants: int | bool,
) -> None:  # fmt: skip
    """Merge outputs [pairs, parts, rows, TILE_DV], maxima and sums into `output`."""
    pairs, count, rows, tile_dv = parts[0].shape
    launch(
        decode_attention_combine, (pairs, rows, tile_dv // _COMBINE_DIMS), *parts, spans,
        scores if sinks is None else sinks, output, scores, *spans.stride()[:2], weights_h,
        count, TILE=min(_COMBINE_TILE, triton.next_power_of_2(most_parts)), DIMS=_COMBINE_DIMS,
        HAS_SINKS=sinks is not None,
        # Small splits are many: 26 layers of 256 dims take 6 to 10 us less.
        UNROLL=8 if constants["SPLIT_SIZE"] == 32 else 4, num_warps=4, **constants,
    )  # fmt: skip


def processors(tensor: Tensor) -> int:
    """The multiprocessors of the GPU."""
    if not tensor.is_cuda:
        return 1
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def tiles(dim: int, value_dim: int) -> tuple[int, int, int]:
    """The head dims of keys and values as powers of two, and the split size."""
    tile_d = max(16, triton.next_power_of_2(dim))
    tile_dv = max(16, triton.next_power_of_2(value_dim))
    # A tile has at most 8192 elements.
    return tile_d, tile_dv, max(32, min(128, 8192 // max(tile_d, tile_dv)))
