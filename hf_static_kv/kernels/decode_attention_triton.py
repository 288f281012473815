"""Decode attention in Triton: split over the text, then combined. Formula and shapes are in decode_attention.py.

    split     program (row and KV head, share) goes through its share of the pieces. It reads each piece of a KV head
              once for all query heads of it: the maximum m of the scores, the sum of exp(score - m), and the sum of
              exp(score - m) * value. While it computes one, the next is on its way. In a prompt a program has several
              queries, as many as fit into its tile of rows, which has 16 for the tensor cores' sake.
    combine   program (row, query head, columns) folds the pieces that exist, FOLD at a time in their order

Pieces are counted from the row's origin, and their length depends on the size of a head alone. So the bits of a row
depend on its own text: not on the room, on its neighbours, or on how many programs there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch

FOLD, COLUMNS = 256, 16
_STAGES, _PROGRAMS_PER_PROCESSOR = 3, 2
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp2(x * 2 * LOG2_E) + 1)


@triton.jit
def _split(
    query, keys, values, spans, seen, layer, sums, maxima, totals, weights, num_pieces,
    scale, softcap, keys_l, values_l, spans_l,
    T, query_b, query_h, query_t, keys_b, keys_h, keys_s, values_b, values_h, values_s, spans_b, seen_b, weights_h,
    H: tl.constexpr, G: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr,
    D_TILE: tl.constexpr, DV: tl.constexpr, DV_TILE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    HAS_LAYER: tl.constexpr, HAS_SEEN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, KEEPS_WEIGHTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    block, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    blocks = tl.cdiv(T, QUERIES)
    b = block // blocks
    r = tl.arange(0, TILE)  # query heads of a KV head, of one query after the other
    t, g = block % blocks * QUERIES + r // G, h * G + r % G
    row, is_row = b * T + t, (r < QUERIES * G) & (t < T)
    if not HAS_LAYER:
        after_previous(EARLY)
    else:
        number = tl.load(layer).to(tl.int64)
        keys, values, spans = keys + number * keys_l, values + number * values_l, spans + number * spans_l
    span = spans + (block if QUERIES == 1 else row) * spans_b  # with one query to a program its block is its row
    origin = tl.load(spans + b * T * spans_b)
    first, end, filled, before, begin, pieces, lowest, highest = _reach(
        span, is_row, origin, num_pieces, QUERIES, SPLIT
    )
    if HAS_LAYER:  # in a step the spans of all layers are written at its beginning, long before
        after_previous(EARLY)
    share = tl.cdiv(pieces, tl.num_programs(1))
    d, dv, n = tl.arange(0, D_TILE), tl.arange(0, DV_TILE), tl.arange(0, SPLIT)
    q_at = query + b * query_b + t[:, None] * query_t + g[:, None] * query_h + d[None, :]
    q = tl.load(q_at, mask=is_row[:, None] & (d[None, :] < D), other=0.0)  # [rows, D]
    mine = tl.program_id(1) * share
    for piece in tl.range(mine, tl.minimum(mine + share, pieces), num_stages=STAGES):
        position = (origin + (begin + piece) * SPLIT + n).to(tl.int64)
        inside = (position[None, :] >= first) & (position[None, :] < end)  # of each row, or of the one
        here = (position >= lowest) & (position < highest)
        if HAS_SEEN:
            here &= tl.load(seen + b * seen_b + position, mask=here, other=0) != 0
        k_at = keys + b * keys_b + h * keys_h + position[None, :] * keys_s + d[:, None]
        k = tl.load(k_at, mask=here[None, :] & (d[:, None] < D), other=0.0)  # [D, N]
        v_at = values + b * values_b + h * values_h + position[:, None] * values_s + dv[None, :]
        v = tl.load(v_at, mask=here[:, None] & (dv[None, :] < DV), other=0.0)  # [N, DV]
        score = tl.dot(q, k, input_precision="ieee") * scale
        if HAS_SOFTCAP:
            score = softcap * _tanh(score / softcap)
        score = tl.where(inside & here[None, :], score * LOG2_E, -float("inf"))
        if KEEPS_WEIGHTS:  # scores, until the second kernel knows what they are divided by
            at = (row * H * G + g)[:, None] * weights_h + position[None, :]
            tl.store(weights + at, score, mask=is_row[:, None] & inside)
        maximum = tl.max(score, 1)
        # A piece may have nothing to see: 0 in the place of -inf keeps the differences from being nan.
        p = tl.exp2(score - tl.where(maximum == -float("inf"), 0.0, maximum)[:, None])
        own = piece - before + tl.zeros((TILE,), tl.int64)  # a row may begin with a later piece than the program does
        out, is_own = ((row * H + h) * num_pieces + own) * G + r % G, is_row & (own >= 0) & (own < filled)
        tl.store(maxima + out, maximum, mask=is_own)
        tl.store(totals + out, tl.sum(p, 1), mask=is_own)
        summed = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        tl.store(sums + out[:, None] * DV_TILE + dv[None, :], summed, mask=is_own[:, None])


@triton.jit
def _reach(span, is_row, origin, num_pieces, QUERIES: tl.constexpr, SPLIT: tl.constexpr):
    """Of each row: first, end, how many pieces these touch, and how many pieces of the program come before.

    Of the program, which goes through the spans of all its rows: its first piece, how many, the lowest first, the
    highest end. With one query the rows' are the program's.
    """
    if QUERIES == 1:
        first, end = tl.load(span + 1), tl.load(span + 2)
        filled = _touched(origin, first, end, num_pieces, SPLIT)
        return first, end, filled, 0, (first - origin) // SPLIT, filled, first, end
    else:
        first, end = tl.load(span + 1, mask=is_row, other=0), tl.load(span + 2, mask=is_row, other=0)
        filled, begin = _touched(origin, first, end, num_pieces, SPLIT), (first - origin) // SPLIT
        lowest = tl.min(tl.where(filled > 0, first, 1 << 40), 0)
        begin_of_all = tl.min(tl.where(filled > 0, begin, 1 << 40), 0)
        pieces = tl.maximum(tl.max(tl.where(filled > 0, begin + filled, 0), 0) - begin_of_all, 0)
        before = begin - begin_of_all
        return first[:, None], end[:, None], filled, before, begin_of_all, pieces, lowest, tl.max(end, 0)


@triton.jit
def _touched(origin, first, end, num_pieces, SPLIT: tl.constexpr):
    """How many pieces a span touches."""
    filled = tl.where(end > first, (end - origin + SPLIT - 1) // SPLIT - (first - origin) // SPLIT, 0)
    return tl.minimum(filled, num_pieces)  # a span longer than `max_span` must not read beyond


@triton.jit
def _combine(
    sums, maxima, totals, spans, layer, sinks, output, weights, spans_l, spans_b, weights_h, num_pieces,
    H: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DV_TILE: tl.constexpr,
    SPLIT: tl.constexpr, FOLD: tl.constexpr, COLUMNS: tl.constexpr, HAS_LAYER: tl.constexpr, HAS_SINKS: tl.constexpr,
    KEEPS_WEIGHTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row_head, g = tl.program_id(0), tl.program_id(1)
    row, h = (row_head // H).to(tl.int64), row_head % H
    if not HAS_LAYER:
        after_previous(EARLY)
    else:
        spans += tl.load(layer).to(tl.int64) * spans_l
    span = spans + row * spans_b
    first, end = tl.load(span + 1), tl.load(span + 2)
    filled = _touched(tl.load(span), first, end, num_pieces, SPLIT)
    if HAS_LAYER:
        after_previous(EARLY)
    fold, dv = tl.arange(0, FOLD), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    maximum = -float("inf")
    total = 0.0
    if HAS_SINKS:
        maximum = tl.load(sinks + h * G + g).to(tl.float32) * LOG2_E
        total = 1.0
    summed = tl.zeros((COLUMNS,), tl.float32)
    for at in range(0, filled, FOLD):
        piece = at + fold
        here = (row_head.to(tl.int64) * num_pieces + piece) * G + g
        m = tl.load(maxima + here, mask=piece < filled, other=-float("inf"))
        t = tl.load(totals + here, mask=piece < filled, other=0.0)
        s = tl.load(sums + here[:, None] * DV_TILE + dv[None, :], mask=piece[:, None] < filled, other=0.0)
        larger = tl.maximum(maximum, tl.max(m, 0))
        reference = tl.where(larger == -float("inf"), 0.0, larger)
        weight = tl.exp2(m - reference)
        shrink = tl.exp2(maximum - reference)
        total = total * shrink + tl.sum(weight * t, 0)
        summed = summed * shrink + tl.sum(s * weight[:, None], 0)
        maximum = larger
    if KEEPS_WEIGHTS:  # noqa: SIM102  # a constant by itself, or the branch is compiled either way
        if tl.program_id(2) == 0:
            scores = weights + (row * H * G + h * G + g) * weights_h
            for at in range(first, end, FOLD):
                position = at + fold
                score = tl.load(scores + position, mask=position < end, other=-float("inf"))
                tl.store(scores + position, tl.exp2(score - maximum) / total, mask=position < end)
    result = tl.where(total > 0, summed / total, 0.0)  # a row of padding sees nothing
    at = (row * H * G + h * G + g) * DV + dv
    tl.store(output + at, result.to(output.dtype.element_ty), mask=dv < DV)


def decode_attention_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    seen: torch.Tensor | None,
    layer: torch.Tensor | None,
    scale: float,
    max_span: int,
    softcap: float | None,
    sinks: torch.Tensor | None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    batch, query_heads, length, dim = query.shape
    heads, value_dim = keys.shape[-3], values.shape[-1]
    if query.stride(-1) != 1 or keys.stride(-1) != 1 or values.stride(-1) != 1 or spans.stride(-1) != 1:
        raise ValueError("decode_attention needs the last dim of query, keys, values and spans side by side in memory.")
    groups = query_heads // heads
    tile, (dim_tile, value_tile, split) = max(16, triton.next_power_of_2(groups)), _tiles(dim, value_dim)
    num_pieces = _most_pieces(max_span, split)
    rows, queries = batch * length, min(length, tile // groups)  # those that a program has room for
    programs = batch * triton.cdiv(length, queries) * heads
    sums = torch.empty(rows * heads, num_pieces, groups, value_tile, dtype=torch.float32, device=query.device)
    maxima = torch.empty(rows * heads, num_pieces, groups, dtype=torch.float32, device=query.device)
    totals = torch.empty_like(maxima)
    output = torch.empty(batch, length, query_heads, value_dim, dtype=query.dtype, device=query.device)
    unused = query  # a pointer has to be passed for what is absent
    keys_l, values_l, spans_l = (
        t.stride(0) if layer is not None else 0 for t in (keys, values, spans.transpose(0, -2))
    )
    sizes = {"H": heads, "G": groups, "DV": value_dim, "DV_TILE": value_tile, "SPLIT": split}
    sizes |= {"HAS_LAYER": layer is not None, "KEEPS_WEIGHTS": weights is not None}
    kept, weights_h = (unused, 0) if weights is None else (weights, weights.stride(1))
    launch(
        _split, (programs, min(num_pieces, _shares(programs, query.device))), query,
        query, keys, values, spans, unused if seen is None else seen, unused if layer is None else layer,
        sums, maxima, totals, kept, num_pieces, scale, softcap or 0.0, keys_l, values_l, spans_l,
        length, query.stride(0), query.stride(1), query.stride(2), keys.stride(-4), keys.stride(-3), keys.stride(-2),
        values.stride(-4), values.stride(-3), values.stride(-2), spans.stride(0),
        0 if seen is None else seen.stride(0), weights_h,
        QUERIES=queries, TILE=tile, D=dim, D_TILE=dim_tile, STAGES=_STAGES if query.element_size() == 2 else 1,
        HAS_SEEN=seen is not None, HAS_SOFTCAP=softcap is not None, **sizes, num_warps=4,
    )  # fmt: skip
    launch(
        _combine, (rows * heads, groups, value_tile // COLUMNS), query,
        sums, maxima, totals, spans, unused if layer is None else layer, unused if sinks is None else sinks, output,
        kept, spans_l, spans.stride(0), weights_h, num_pieces, FOLD=FOLD, COLUMNS=COLUMNS, HAS_SINKS=sinks is not None,
        **sizes, num_warps=4,
    )  # fmt: skip
    return output


def partial_bytes(query: torch.Tensor, values: torch.Tensor) -> int:
    """What one query of each row needs for the sums of its pieces."""
    _, value_tile, split = _tiles(query.shape[-1], values.shape[-1])
    return query.shape[0] * query.shape[1] * _most_pieces(values.shape[2], split) * value_tile * 4


def _tiles(dim: int, value_dim: int) -> tuple[int, int, int]:
    """The size of a head and of its values, each as a power of two; and how many positions are a piece."""
    dim_tile, value_tile = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    return dim_tile, value_tile, max(32, min(128, 8192 // max(dim_tile, value_tile)))


def _most_pieces(span: int, split: int) -> int:
    """A span that does not begin at a piece's border touches one piece more than its length needs."""
    return (span + split - 1) // split + 1


def _shares(programs: int, device: torch.device) -> int:
    """How many programs go through a text at most: enough for every multiprocessor to have a few."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, _PROGRAMS_PER_PROCESSOR * processors // programs)
