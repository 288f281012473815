"""Decode attention over codes in Triton. Formula in decode_attention.py, codes in cache/codes.py.

An instance has a share of the span of a batch row and KV head. Each of its warps has positions of
its own of a tile, and sums of its own. The instance merges them at the end, and the combine kernel
of decode_attention_triton.py merges the shares.

    memory     [ 0 1 2 3 ... D-1 | scale ]      a row of bytes: one position
    loaded     [ 01  23  ... ]                  as pairs of codes, 16 bits each
    operands   [ 0   2   ... ]  [ 1   3 ... ]   in half precision: even dims, odd dims

A pair has the size of a number in half precision. So tensor cores take pairs from shared memory as
they take numbers, and one instruction unpacks the codes of two pairs:

    score  = (even keys * even queries + odd keys * odd queries) * scale of the key
    output = even values * weights, odd values * weights       weights: with the scales of values
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.cache.codes import states_dim
from hf_static_kv.kernels.codes_triton import aligned
from hf_static_kv.kernels.decode_attention_triton import (
    LOG2_E,
    factors,
    launch_combine,
    processors,
)
from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.rows_attention_triton import or_zero, sum_of_warps

# Warps, positions of a warp, loads in flight, by head dim; of split spans also the kernel instances
# per multiprocessor. On an H200, of one row of 8 heads and its combine kernel, beside decode_attention_split
# with bfloat16 (2026-11-19): of 64 dims 5.8 us at 512 positions (4.8), 8.3 at 8k (9.5), 16 at 32k (21), 46 at
# 130k (65); of 128 dims 7.6 (4.9), 14 (13), 29 (37) and 82 (123). Of 256 dims none is measured.
_SPLIT = {64: (1, 64, 3, 8), 128: (2, 32, 3, 4), 256: (2, 16, 3, 4)}
# At 640 and 2048 positions: 64 rows of 8 heads of 64 dims 19 and 49 us (rows_attention with bfloat16 23 and
# 64), 12 rows 8 and 16 us (8 and 18); of 128 dims 31 and 80 (44 and 127), 11 and 24 (12 and 28).
_WHOLE_OF_MANY = {64: (2, 32, 3), 128: (2, 32, 3), 256: (2, 16, 3)}
_WHOLE_OF_FEW = {64: (4, 32, 3), 128: (4, 16, 4), 256: (4, 16, 2)}
_FEW_PER_PROCESSOR = 1.5

# A code c is unpacked as c / _UNIT. Its byte is c + 128 after a flip of the highest bit, and the
# bits of the number (c + 128) * 2^-133 (float16: 2^-24). A multiply-add makes c / _UNIT of it.
_UNITS = {torch.bfloat16: 64, torch.float16: 512, torch.float32: 1}


def _unpacking(multiply_add: str, factor: int, start: int) -> str:
    """PTX of two pairs $2: $0 has the codes of their low bytes, $1 those of their high bytes."""
    return f"""{{ .reg .b32 low, high, factor, start;
        mov.b32 factor, {factor:#x};
        mov.b32 start, {start:#x};
        shr.u32 high, $2, 8;
        lop3.b32 low, $2, 0x00ff00ff, 0x00800080, 0x6a;
        lop3.b32 high, high, 0x00ff00ff, 0x00800080, 0x6a;
        {multiply_add} $0, low, factor, start;
        {multiply_add} $1, high, factor, start; }}"""


# 2^127 and -128 / 64; 2^15 and -128 / 512.
_UNPACK_BFLOAT16 = tl.constexpr(_unpacking("fma.rn.bf16x2", 0x7F007F00, 0xC000C000))
_UNPACK_FLOAT16 = tl.constexpr(_unpacking("fma.rn.f16x2", 0x78007800, 0xB400B400))


@triton.jit
def coded_attention(
    query, keys, values, spans, sinks, output, outputs, maxima, sums, scale, softcap,
    most_parts, query_b, query_h, query_t, keys_b, keys_h, values_b, values_h,
    spans_b, spans_t,
    H: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, TILE_M: tl.constexpr, D: tl.constexpr,
    TILE_D: tl.constexpr, DV: tl.constexpr, TILE_DV: tl.constexpr, KEY_ROW: tl.constexpr,
    VALUE_ROW: tl.constexpr, UNIT: tl.constexpr, WARPS: tl.constexpr, POSITIONS: tl.constexpr,
    STAGES: tl.constexpr, HAS_PARTS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, SPANS_READY: tl.constexpr, IS_SHORT: tl.constexpr,
    IN_PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = WARPS * POSITIONS
    b = (tl.program_id(0) // H).to(tl.int64)
    h = (tl.program_id(0) % H).to(tl.int64)
    m = tl.arange(0, TILE_M)  # token m // G, query head m % G of the KV head
    g = h * G + m % G
    is_query = m < G * Q
    if not SPANS_READY:
        pdl_sync(PDL)
    span = spans + b * spans_b
    first = tl.load(span + 1)  # of the first token: no later one attends to an older position
    end = tl.load(span + (Q - 1) * spans_t + 2)  # of the last token
    own_first = tl.load(span + m // G * spans_t + 1, mask=is_query, other=0)
    own_end = tl.load(span + m // G * spans_t + 2, mask=is_query, other=0)
    if SPANS_READY:
        pdl_sync(PDL)
    q_at = query + b * query_b + g[None, :] * query_h + m[None, :] // G * query_t
    even, odd = _load_queries(q_at, is_query, D, TILE_D, TILE_M, WARPS)
    length = tl.maximum(end - first, 0).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, TILE), most_parts) * TILE
    begin = tl.program_id(1) * share
    stop = tl.minimum(begin + share, length)
    at = (
        keys + aligned(b * keys_b + h * keys_h),
        values + aligned(b * values_b + h * values_h),
    )
    seen = end, own_first, own_end
    state = _no_sums(WARPS, POSITIONS, TILE_M, TILE_DV)
    maximum, weights, even, odd = _add_tiles(
        state, even, odd, at, first + begin, first + stop, seen, scale, softcap, Q, D, DV,
        TILE_DV, KEY_ROW, VALUE_ROW, UNIT, POSITIONS, STAGES, HAS_SOFTCAP, IS_SHORT, IN_PTX,
    )  # fmt: skip
    total = tl.sum(weights, 1)
    dv = 2 * tl.arange(0, TILE_DV // 2)
    if HAS_PARTS:
        highest = tl.max(maximum, 0)
        factor = tl.exp2(maximum - or_zero(highest)[None, :])
        row = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (G * Q) + m
        tl.store(maxima + row, highest, mask=is_query)
        tl.store(sums + row, tl.sum(total * factor, 0), mask=is_query)
        even = UNIT * tl.sum(even * factor[:, None, :], 0)
        odd = UNIT * tl.sum(odd * factor[:, None, :], 0)
        _store_dims(outputs + row[None, :] * TILE_DV + dv[:, None], even, odd, is_query[None, :])
    else:
        sees = own_end > own_first
        sink = tl.load(sinks + g, mask=is_query, other=0.0).to(tl.float32) if HAS_SINKS else 0.0
        even = UNIT * sum_of_warps(maximum, total, even, sink * LOG2_E, sees, HAS_SINKS)
        odd = UNIT * sum_of_warps(maximum, total, odd, sink * LOG2_E, sees, HAS_SINKS)
        to = output + ((b * Q + m // G) * H * G + g)[None, :] * DV + dv[:, None]
        _store_dims(to, even, odd, is_query[None, :] & (dv[:, None] < DV))


@triton.jit
def _store_dims(to, even, odd, mask):
    tl.store(to, even.to(to.dtype.element_ty), mask=mask)
    tl.store(to + 1, odd.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _no_sums(
    WARPS: tl.constexpr, POSITIONS: tl.constexpr, TILE_M: tl.constexpr, TILE_DV: tl.constexpr
):
    """Maxima, sums of weights, and outputs of even and odd dims, of no tile."""
    return (
        tl.full((WARPS, TILE_M), -float("inf"), tl.float32),
        tl.zeros((WARPS, POSITIONS, TILE_M), tl.float32),
        tl.zeros((WARPS, TILE_DV // 2, TILE_M), tl.float32),
        tl.zeros((WARPS, TILE_DV // 2, TILE_M), tl.float32),
    )


@triton.jit
def _load_queries(
    at, is_query, D: tl.constexpr, TILE_D: tl.constexpr, TILE_M: tl.constexpr, WARPS: tl.constexpr
):
    """Even and odd dims of the queries, for each warp: [W, D / 2, M]."""
    d = 2 * tl.arange(0, TILE_D // 2)
    mask = is_query[None, :] & (d[:, None] < D)
    even = tl.load(at + d[:, None], mask=mask, other=0.0)
    odd = tl.load(at + d[:, None] + 1, mask=mask, other=0.0)
    shape: tl.constexpr = (WARPS, TILE_D // 2, TILE_M)
    return tl.broadcast_to(even[None], shape), tl.broadcast_to(odd[None], shape)


@triton.jit
def _add_tiles(
    state, even_q, odd_q, at, begin, stop, seen, scale, softcap, Q: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, TILE_DV: tl.constexpr, KEY_ROW: tl.constexpr, VALUE_ROW: tl.constexpr,
    UNIT: tl.constexpr, POSITIONS: tl.constexpr, STAGES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    IS_SHORT: tl.constexpr, IN_PTX: tl.constexpr,
):  # fmt: skip
    """Maxima [W, M], sums of weights [W, N, M] and outputs [W, DV / 2, M] with the tiles from `begin`
    to `stop`. Positions count from the first of the span.
    """
    maximum, total, even, odd = state
    WARPS: tl.constexpr = even_q.shape[0]
    TILE_D: tl.constexpr = 2 * even_q.shape[1]
    TILE: tl.constexpr = WARPS * POSITIONS
    place = tl.arange(0, WARPS)[:, None] * POSITIONS + tl.arange(0, POSITIONS)[None, :]  # [W, N]
    end, own_first, own_end = seen
    # Scores are in powers of two.
    factor = UNIT * scale if HAS_SOFTCAP else UNIT * LOG2_E * scale
    for start in tl.range(begin, stop, TILE, num_stages=STAGES):
        # The last tile ends with the span, and positions of the tile before it are left out: so no
        # load needs a mask, and the order of sums does not depend on the capacity.
        row = tl.maximum(tl.minimum(start, end - TILE), 0)
        is_inside = (place >= (start - row).to(tl.int32)) & (place < (end - row).to(tl.int32))
        k_row = at[0] + row * KEY_ROW
        v_row = at[1] + row * VALUE_ROW
        k = _load_pairs(k_row, place * KEY_ROW, is_inside, 2, D, TILE_D, IS_SHORT)
        k_scale = _load_scales(k_row + D, place * KEY_ROW, is_inside, IS_SHORT)
        v = _load_pairs(v_row, place * VALUE_ROW, is_inside, 1, DV, TILE_DV, IS_SHORT)
        v_scale = _load_scales(v_row + DV, place * VALUE_ROW, is_inside, IS_SHORT)
        even_k, odd_k = unpacked(k, even_q.dtype, UNIT, IN_PTX)
        score = tl.dot(even_k, even_q, input_precision="ieee")  # [W, N, M]
        score = tl.dot(odd_k, odd_q, score, input_precision="ieee")
        score = score * (k_scale * factor)[:, :, None]
        if HAS_SOFTCAP:  # softcap * tanh(score / softcap)
            score = softcap * LOG2_E * (1 - 2 / (tl.exp2(score / softcap * 2 * LOG2_E) + 1))
        is_seen = is_inside[:, :, None]
        if Q > 1:
            at_row = row + place[:, :, None]
            is_seen &= (at_row >= own_first[None, None, :]) & (at_row < own_end[None, None, :])
        score = tl.where(is_seen, score, -float("inf"))
        maximum, rescale, _ = factors(maximum, tl.max(score, 1))
        p = tl.exp2(score - or_zero(maximum)[:, None, :])
        # A sum for each position of a warp: an exchange between lanes costs more than an addition.
        total = total * rescale[:, None, :] + p
        # Beyond the span a scale may be anything.
        p = (p * tl.where(is_inside, v_scale, 0.0)[:, :, None]).to(even_q.dtype)
        even_v, odd_v = unpacked(v, even_q.dtype, UNIT, IN_PTX)
        rescale = rescale[:, None, :]
        even = tl.dot(even_v, p, even * rescale, input_precision="ieee")
        odd = tl.dot(odd_v, p, odd * rescale, input_precision="ieee")
    return maximum, total, even, odd


@triton.jit
def _load_pairs(
    start, row, mask, AXIS: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr,
    IS_SHORT: tl.constexpr,
):  # fmt: skip
    """Pairs of codes of the rows [W, N] behind `start`; the pairs of a row along AXIS."""
    pair = tl.arange(0, TILE_D // 2)
    pair = pair[None, None, :] if AXIS == 2 else pair[None, :, None]
    row = (row // 2)[:, :, None] if AXIS == 2 else (row // 2)[:, None, :]
    at = start.to(tl.pointer_type(tl.int16)) + (row + pair)
    mask = mask[:, :, None] if AXIS == 2 else mask[:, None, :]
    if D == TILE_D:
        return tl.load(at, mask=mask, other=0) if IS_SHORT else tl.load(at)
    elif IS_SHORT:
        return tl.load(at, mask=mask & (2 * pair < D), other=0)
    else:
        return tl.load(at, mask=2 * pair < D, other=0)


@triton.jit
def _load_scales(start, row, mask, IS_SHORT: tl.constexpr):
    """The scales [W, N] that lie at `row` behind `start`."""
    at = start.to(tl.pointer_type(tl.float32)) + row // 4
    return tl.load(at, mask=mask, other=0.0) if IS_SHORT else tl.load(at)


@triton.jit
def unpacked(pairs, dtype: tl.constexpr, UNIT: tl.constexpr, IN_PTX: tl.constexpr):
    """The first and the second code of each pair, divided by UNIT, in `dtype`."""
    if IN_PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _UNPACK_BFLOAT16, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif IN_PTX and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _UNPACK_FLOAT16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = ((pairs << 8) >> 8).to(tl.float32) / UNIT
        high = (pairs >> 8).to(tl.float32) / UNIT
        return low.to(dtype), high.to(dtype)


def coded_attention_triton(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float, max_span: int,
    softcap: float | None = None, sinks: Tensor | None = None, spans_ready: bool = False,
    is_split: bool = True,
) -> Tensor:  # fmt: skip
    """Attention of queries [B, Hq, q, D] with spans [B, q, 3] over codes; output [B, q, Hq, Dv].

    Without `is_split` an instance has a whole span.
    """
    batch, query_heads, num_tokens, dim = query.shape
    heads, value_dim = values.shape[1], states_dim(values, True)
    if any(tensor.stride(-1) != 1 for tensor in (query, keys, values, spans)):
        tensors = "query, keys, values and spans"
        raise ValueError(f"coded_attention needs {tensors} whose last dim has stride 1.")
    groups = query_heads // heads
    rows, pairs = groups * num_tokens, batch * heads
    tile_d, tile_dv = (max(32, triton.next_power_of_2(size)) for size in (dim, value_dim))
    warps, positions, stages, most_parts = _shape(max(tile_d, tile_dv), pairs, query, is_split)
    per_span = min(triton.cdiv(max_span + num_tokens - 1, warps * positions), most_parts)
    output = query.new_empty(batch, num_tokens, query_heads, value_dim)
    parts = (output, output, output)  # a kernel takes a pointer for an absent tensor too
    if is_split:
        shape = pairs, per_span, rows
        outputs = query.new_empty(*shape, tile_dv, dtype=torch.float32)
        maxima = query.new_empty(shape, dtype=torch.float32)
        parts = (outputs, maxima, torch.empty_like(maxima))
    both = {
        "H": heads, "G": groups, "Q": num_tokens, "DV": value_dim, "TILE_DV": tile_dv,
        "SPANS_READY": spans_ready,
    }  # fmt: skip
    launch(
        coded_attention, (pairs, per_span), query, keys, values, spans,
        query if sinks is None else sinks, output, *parts, scale, softcap or 0.0,
        most_parts, *query.stride()[:3], *keys.stride()[:2], *values.stride()[:2],
        *spans.stride()[:2],
        TILE_M=8 if rows <= 8 else triton.next_power_of_2(rows), D=dim, TILE_D=tile_d,
        KEY_ROW=keys.stride(2), VALUE_ROW=values.stride(2), UNIT=_UNITS[query.dtype], WARPS=warps,
        POSITIONS=positions, STAGES=stages, IS_SHORT=keys.shape[2] < warps * positions,
        HAS_PARTS=is_split, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        IN_PTX=_runs_ptx(query), num_warps=warps, **both,
    )  # fmt: skip
    if is_split:
        launch_combine(
            parts, spans, sinks, output, most_parts, query, 0, **both,
            SPLIT_SIZE=warps * positions, HAS_WEIGHTS=False, IN_ORDER=False,
        )  # fmt: skip
    return output


def _shape(dim: int, pairs: int, query: Tensor, is_split: bool) -> tuple[int, int, int, int]:
    """Warps, positions of a warp, loads in flight, and the most instances of a span."""
    size = min(max(64, dim), 256)
    if is_split:
        warps, positions, stages, instances = _SPLIT[size]
        # By batch and heads: the order of sums does not depend on the capacity.
        return warps, positions, stages, max(1, instances * processors(query) // pairs)
    is_few = pairs <= _FEW_PER_PROCESSOR * processors(query)
    warps, positions, stages = (_WHOLE_OF_FEW if is_few else _WHOLE_OF_MANY)[size]
    return warps, positions, stages, 1


def _runs_ptx(query: Tensor) -> bool:
    return query.is_cuda and torch.version.hip is None
