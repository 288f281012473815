"""Linear layers of packed weights with outputs side by side, by tensor cores. See packed.py for the
layouts. No GPU has run this kernel yet: `BY_TENSOR_CORES` in packed_triton.py chooses it.

`packed_mma_linear`, for 1 to 16 tokens: products of the tensor cores, mma.m16n8k16, in the
registers of the thread that loaded the words. Lane 4 g + t of a warp has a cell: some inputs t and
some outputs g, 4 (gptq) or 8 (awq). Row g of a product is an output of g, and column g a token:

    sums[g, column] += sum over t of (code - zero)[g, t] * x[column, t]

So a code is never moved. Two codes become two numbers at once: 128 + code is a bfloat16 with the code in
its lowest bits, and 128 + zero is subtracted exactly. The sum of a group is multiplied by its scale, and
groups are added in float32.

The columns of one token are bfloat16 parts of x, which add up to x in float32: of x times the weight of
the norm, too. If x is bfloat16 or float16 itself, it is not split.

Loads of the first words begin before the wait for x. If few outputs side by side would leave
multiprocessors without work, several instances read a part of K each; the last of them adds the parts
in their order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.linear_triton import (
    counters_of,
    epilogue,
    finish_sum,
    output_sizes,
    padded,
)
from hf_static_kv.kernels.norm_triton import TritonNorm, norm_arguments
from hf_static_kv.kernels.packed import Packed
from hf_static_kv.kernels.packed_codes_triton import (
    load_four,
    load_inputs,
    load_word,
    pair_of,
    pick_packed,
    runs_ptx,
)

_LOAD_WORDS = tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_FOUR = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_WORD = tl.constexpr("ld.global.L1::no_allocate.b32 $0, [$1];")
_LOAD_ZEROS = tl.constexpr("ld.global.b32 $0, [$1];")
_LOAD_TWO = tl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")
# Two codes of 16 bits each as two numbers, minus a pair of zeros. a & b | c, and a * 1 + z.
_CODES = {
    "bf16": tl.constexpr(
        "{ .reg .b32 one; lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA; "
        "mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $0, one, $2; }"
    ),
    "f16": tl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA; add.rn.f16x2 $0, $0, $2;"),
}
_CODES_BF16 = _CODES["bf16"]
_CODES_F16 = _CODES["f16"]
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_MMA_BF16 = tl.constexpr(_MMA.format("bf16"))
_MMA_F16 = tl.constexpr(_MMA.format("f16"))
_PRODUCTS = tl.constexpr(
    "{ .reg .b32 minus; mov.b32 minus, 0x80008000; fma.rn.bf16x2 $0, $2, $3, minus; "
    "xor.b32 minus, $0, minus; fma.rn.bf16x2 $1, $2, $3, minus; }"
)
# Minus 128 in bfloat16 and minus 1024 in float16, twice.
_ZEROS_BF16 = tl.constexpr(0xC300C300 - (1 << 32))
_ZEROS_F16 = tl.constexpr(0xE400E400 - (1 << 32))


class Cells(NamedTuple):
    """What the kernel is compiled for."""

    layout: str
    run: int  # inputs of a cell, in eights
    outputs: int  # of a cell
    group: int
    midpoint: int
    columns: int  # of a product, for one or two times eight tokens
    is_one: bool  # token
    is_raw: bool  # x is loaded as pairs and not split
    has_products: bool  # x and the weight of the norm are loaded as pairs, and their products split
    has_halves: bool  # products are of float16
    is_even: bool  # parts of K end with a tile
    in_ptx: bool
    has_pairs: bool  # inputs of 16 bits may be loaded as pairs, 16 bytes at once
    in_word: int = 8


@triton.jit
def packed_mma_linear(
    x, y, norm_weight, residual, sums, counters, w0, w1, w2, s0, s1, s2, z0, z1, z2, b0, b1, b2,
    n0, n1, n2, M, K, spans_of_part, eps, offset,
    SPANS: tl.constexpr, CELLS: tl.constexpr, PARTS: tl.constexpr, TILE_K: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    second = (w1, b1, n1, s1, z1)
    own, n_start, y_start = pick_packed(
        (w0, b0, n0, s0, z0), second, (w2, b2, n2, s2, z2), 8 * CELLS.outputs, IS_GATED
    )
    N = own[2]
    part = tl.program_id(1)
    begin = part * spans_of_part
    end = tl.minimum(begin + spans_of_part, K // (32 * CELLS.run))
    total, up = _sums_of_spans(
        x, norm_weight, offset, own, second, n_start, begin, end, M, K, SPANS, CELLS, HAS_NORM,
        IS_GATED, PDL,
    )  # fmt: skip
    result, m, n = _side_by_side(total, n_start, SPANS, CELLS)
    up_result = result
    if IS_GATED:
        up_result, _, _ = _side_by_side(up, n_start, SPANS, CELLS)
    scale = _scale_of_norm(x, K, eps, TILE_K) if HAS_NORM else 1.0
    size = n0 if IS_GATED else n0 + n1 + n2
    is_inside = (n < N) & (m < M)
    at = m.to(tl.int64) * size + y_start + n
    is_last = True
    up_sums = sums + PARTS * M * size
    if PARTS > 1:
        own_part = part * M * size + at
        tl.store(sums + own_part, result, mask=is_inside)
        if IS_GATED:
            tl.store(up_sums + own_part, up_result, mask=is_inside)
        is_last = _is_last(counters + tl.program_id(0), PARTS)
    if is_last:
        if PARTS > 1:
            result = _sum_of_parts(sums + at, M * size, is_inside, PARTS)
            if IS_GATED:
                up_result = _sum_of_parts(up_sums + at, M * size, is_inside, PARTS)
        _finish(
            result, up_result, scale, own[1] + n, b1 + n, residual + at, y + at, is_inside,
            HAS_NORM, HAS_BIAS, ACTIVATION, IS_GATED, HAS_RESIDUAL,
        )  # fmt: skip


@triton.jit
def _sums_of_spans(
    x, norm_weight, offset, own, second, n_start, begin, end, M, K,
    SPANS: tl.constexpr, CELLS: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The sums of both weights over a part of K, before lanes and warps are added. Waits for x."""
    SCALE: tl.constexpr = own[3].dtype.element_ty
    OUTPUTS: tl.constexpr = CELLS.outputs
    N = own[2]
    row = tl.arange(0, SPANS * 8)[:, None]  # of eight lanes for each span
    t = tl.arange(0, 4)[None, :]
    lane = tl.minimum(n_start // OUTPUTS + (row & 7), N // OUTPUTS - 1)
    first = tl.minimum(begin + (row >> 3), end - 1) * 4 + t
    cell = _load_cell(own, lane, first, N, CELLS)
    if IS_GATED:  # the first weight is the gate and the second is up
        up_cell = _load_cell(second, lane, first, N, CELLS)
    pdl_sync(PDL)
    total = _no_sums(SPANS, CELLS)
    up = _no_sums(SPANS, CELLS)
    for start in tl.range(begin, end, SPANS):
        span = start + (row >> 3)
        following = tl.minimum(span + SPANS, end - 1) * 4 + t  # behind the end the last again
        next_cell = _load_cell(own, lane, following, N, CELLS)
        if IS_GATED:
            next_up_cell = _load_cell(second, lane, following, N, CELLS)
        run = (span if CELLS.is_even else tl.minimum(span, end - 1)) * 4 + t
        xs = _load_x(x, norm_weight, offset, run, row & 7, M, K, HAS_NORM, CELLS)
        is_inside = CELLS.is_even | (span < end)
        total = _add_products(total, cell, xs, is_inside, SCALE, CELLS)
        cell = next_cell
        if IS_GATED:
            up = _add_products(up, up_cell, xs, is_inside, SCALE, CELLS)
            up_cell = next_up_cell
    return total, up


@triton.jit
def _finish(
    result, up_result, scale, bias, up_bias, residual, y, is_inside,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What follows the sums, and the output. The pointers are those of each sum."""
    added = tl.load(bias, mask=is_inside, other=0.0) if HAS_BIAS else 0.0
    result = finish_sum(result, scale, added, HAS_NORM, HAS_BIAS)
    by = 1.0
    if IS_GATED:
        added = tl.load(up_bias, mask=is_inside, other=0.0) if HAS_BIAS else 0.0
        by = finish_sum(up_result, scale, added, HAS_NORM, HAS_BIAS)
    added = tl.load(residual, mask=is_inside, other=0.0) if HAS_RESIDUAL else 0.0
    dtype: tl.constexpr = y.dtype.element_ty
    result = epilogue(result, by, added, dtype, ACTIVATION, IS_GATED, HAS_RESIDUAL)
    tl.store(y, result.to(dtype), mask=is_inside)


@triton.jit
def _scale_of_norm(x, K, eps, TILE_K: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps)."""
    squares = tl.zeros((TILE_K,), tl.float32)
    for start in tl.range(0, K, TILE_K):
        k = start + tl.arange(0, TILE_K)
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        squares += value * value
    return tl.rsqrt(tl.sum(squares) / K + eps)


@triton.jit
def _load_cell(weight, lane, run, N, CELLS: tl.constexpr):
    """Words of each cell; the bits of its scales; the word with its zeros."""
    RUN: tl.constexpr = CELLS.run
    words = ()
    if CELLS.layout == "gptq":
        at = weight[0] + (run * RUN).to(tl.int64) * N + lane * 4
        for j in tl.static_range(RUN):
            words += _four_words(at + j * N, CELLS)
    else:
        at = weight[0] + (run * (RUN * 8)).to(tl.int64) * (N // 8) + lane
        for j in tl.static_range(RUN * 8):
            words += (_one_word(at + j * (N // 8), _LOAD_WORD, CELLS),)  # type: ignore[assignment]
    group = (run * (RUN * 8) // CELLS.group).to(tl.int64)
    scales = _load_scales(weight[3] + group * N + lane * CELLS.outputs, CELLS)
    at = weight[4] + group * (N // 8) + (lane >> 1 if CELLS.layout == "gptq" else lane)
    zeros = _one_word(at, _LOAD_ZEROS, CELLS)
    if CELLS.layout == "gptq":
        zeros = zeros >> (lane & 1) * 16
    return words, scales, zeros


@triton.jit
def _one_word(at, ptx: tl.constexpr, CELLS: tl.constexpr):
    if CELLS.in_ptx:
        return load_word(at, ptx)
    else:
        return tl.load(at)


@triton.jit
def _four_words(at, CELLS: tl.constexpr):
    if CELLS.in_ptx:
        return load_four(at, _LOAD_WORDS)
    else:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _load_scales(at, CELLS: tl.constexpr):
    """Two scales in each int32. They become numbers where they are used: a thread waits there."""
    OUTPUTS: tl.constexpr = CELLS.outputs
    if not CELLS.in_ptx:
        scales = ()
        for i in tl.static_range(OUTPUTS):
            scales += (tl.load(at + i).to(tl.float32),)  # type: ignore[assignment]
        return scales
    elif OUTPUTS == 8:
        return load_four(at, _LOAD_FOUR)
    else:
        return tl.inline_asm_elementwise(
            _LOAD_TWO, "=&r,=&r,l", [at], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )


@triton.jit
def _scale_of(scales, i: tl.constexpr, SCALE: tl.constexpr, CELLS: tl.constexpr):
    """The scale of an output of a cell."""
    if CELLS.in_ptx:
        return pair_of(scales[i // 2], SCALE)[i % 2]
    else:
        return scales[i]


# --- inputs, as pairs of two numbers of 16 bits: in the interpreter as tuples of two numbers


@triton.jit
def _load_x(x, norm_weight, offset, run, g, M, K, HAS_NORM: tl.constexpr, CELLS: tl.constexpr):
    """Four pairs of each eight inputs, of each column of products."""
    RUN: tl.constexpr = CELLS.run
    COLUMNS: tl.constexpr = CELLS.columns
    pairs = ()
    for i in tl.static_range(COLUMNS // 8):
        # Of one token all columns are the same, or the parts of x.
        at = x if CELLS.is_one else x + tl.minimum(g + 8 * i, M - 1).to(tl.int64) * K
        for j in tl.static_range(RUN):
            if CELLS.is_raw:
                pairs += (_raw_pairs(at + (run * RUN + j) * 8, CELLS),)  # type: ignore[assignment]
            elif CELLS.has_products:
                word = (run * RUN + j) * 8
                pairs += (_products_of_pairs(at + word, norm_weight + word, g, CELLS),)  # type: ignore[assignment]
            elif CELLS.is_one:
                values = _values_of_x(at, norm_weight, offset, run * RUN + j, HAS_NORM, CELLS)
                pairs += (_pairs_of_part(values, g, CELLS),)  # type: ignore[assignment]
            else:
                values = _values_of_x(at, norm_weight, offset, run * RUN + j, False, CELLS)
                pairs += (  # type: ignore[assignment]
                    _pairs_of_part(values, 0, CELLS),
                    _pairs_of_part(values, 1, CELLS),
                    _pairs_of_part(values, 2, CELLS),
                )
    return pairs


@triton.jit
def _raw_pairs(at, CELLS: tl.constexpr):
    a, b, c, d = load_four(at, _LOAD_FOUR)
    if CELLS.layout == "gptq":  # of codes 0 and 4, 1 and 5, 2 and 6, 3 and 7
        return _lower(a, c), _upper(a, c), _lower(b, d), _upper(b, d)
    else:
        return a, b, c, d


@triton.jit
def _products_of_pairs(x, norm_weight, g, CELLS: tl.constexpr):
    """Products of bfloat16 as two parts: what is rounded, and the rest, which is exact."""
    xs = _raw_pairs(x, CELLS)
    weights = _raw_pairs(norm_weight, CELLS)
    pairs = ()
    for i in tl.static_range(4):
        first, rest = tl.inline_asm_elementwise(
            _PRODUCTS,
            "=&r,=r,r,r",
            [xs[i], weights[i]],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        pairs += (tl.where(g == 0, first, rest),)  # type: ignore[assignment]
    return pairs


@triton.jit
def _values_of_x(x, norm_weight, offset, word, HAS_NORM: tl.constexpr, CELLS: tl.constexpr):
    """Eight inputs in float32."""
    xs = load_inputs(x, word, CELLS)
    if HAS_NORM:
        weights = load_inputs(norm_weight, word, CELLS)
        values = ()
        for i in tl.static_range(8):
            values += (xs[i] * (offset + weights[i]),)  # type: ignore[assignment]
        return values
    else:
        return xs


@triton.jit
def _pairs_of_part(values, part, CELLS: tl.constexpr):
    """The bfloat16 part of eight numbers with this index, as four pairs.

    A part has the upper bits of what the parts before it leave: three have all 24.
    """
    masks = (tl.where(part > 0, -65536, 0), tl.where(part > 1, -65536, 0))
    parts = ()
    for i in tl.static_range(8):
        rest = values[i]
        for done in tl.static_range(2):
            bits = rest.to(tl.int32, bitcast=True) & masks[done]
            rest -= bits.to(tl.float32, bitcast=True)
        parts += (rest,)  # type: ignore[assignment]
    return _in_pairs(parts, CELLS)


@triton.jit
def _in_pairs(x, CELLS: tl.constexpr):
    """The pairs of inputs whose codes are numbers of one pair."""
    if CELLS.layout == "gptq":  # at one place of both halves of a word
        a, b = _pair(x[0], x[4], CELLS), _pair(x[1], x[5], CELLS)
        c, d = _pair(x[2], x[6], CELLS), _pair(x[3], x[7], CELLS)
    else:
        a, b = _pair(x[0], x[1], CELLS), _pair(x[2], x[3], CELLS)
        c, d = _pair(x[4], x[5], CELLS), _pair(x[6], x[7], CELLS)
    return a, b, c, d


@triton.jit
def _pair(first, second, CELLS: tl.constexpr):
    """The upper halves of two numbers, which are bfloat16."""
    a = first.to(tl.int32, bitcast=True)
    b = second.to(tl.int32, bitcast=True)
    if CELLS.in_ptx:
        return _upper(a, b)
    else:
        return (a & -65536).to(tl.float32, bitcast=True), (b & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _lower(a, b):
    """The lower halves of two words, as one."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _upper(a, b):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


# --- products


@triton.jit
def _add_products(total, cell, xs, is_inside, SCALE: tl.constexpr, CELLS: tl.constexpr):
    """The sums with the products of a cell: by output, and of each the even and odd columns."""
    OUTPUTS: tl.constexpr = CELLS.outputs
    words, scales, zeros = cell
    both = ()
    for block in tl.static_range(CELLS.columns // 8):
        sums = _sums_of_cell(words, zeros, xs, block, CELLS)
        for c in tl.static_range(OUTPUTS):
            scale = tl.where(is_inside, _scale_of(scales, c, SCALE, CELLS), 0.0)
            for half in tl.static_range(2):
                before = total[(block * OUTPUTS + c) * 2 + half]
                both += (before + sums[2 * c + half] * scale,)  # type: ignore[assignment]
    return both


@triton.jit
def _sums_of_cell(words, zeros, xs, block: tl.constexpr, CELLS: tl.constexpr):
    """Without scales."""
    RUN: tl.constexpr = CELLS.run
    PASSES: tl.constexpr = 1 if CELLS.is_raw or CELLS.is_one else 3
    sums = ()
    if CELLS.layout == "gptq":
        for c in tl.static_range(0, 4, 2):
            first = _zero_of(zeros, c, CELLS)
            second = _zero_of(zeros, c + 1, CELLS)
            acc = _nothing(zeros)
            for j in tl.static_range(RUN):
                a = words[4 * j + c]
                b = words[4 * j + c + 1]
                for p in tl.static_range(PASSES):
                    x = xs[(block * RUN + j) * PASSES + p]
                    acc = _product(acc, a, b, a >> 4, b >> 4, first, second, x[0], x[1], CELLS)
                    acc = _product(
                        acc, a >> 8, b >> 8, a >> 12, b >> 12, first, second, x[2], x[3], CELLS
                    )
            sums += acc
        return sums
    else:
        for c in tl.static_range(4):  # rows 2 c and 2 c + 1 of a word
            first = _zero_of(zeros, c, CELLS)
            second = _zero_of(zeros, c + 4, CELLS)
            acc = _nothing(zeros)
            for j in tl.static_range(RUN):
                for p in tl.static_range(PASSES):
                    x = xs[(block * RUN + j) * PASSES + p]
                    for i in tl.static_range(0, 8, 4):
                        a, b = _two_inputs(words[8 * j + i], words[8 * j + i + 1], CELLS)
                        d, e = _two_inputs(words[8 * j + i + 2], words[8 * j + i + 3], CELLS)
                        acc = _product(
                            acc, a >> 4 * c, b >> 4 * c, d >> 4 * c, e >> 4 * c, first, second,
                            x[i // 2], x[i // 2 + 1], CELLS,
                        )  # fmt: skip
            sums += acc
        return sums


@triton.jit
def _two_inputs(a, b, CELLS: tl.constexpr):
    """Of the words of two inputs: rows 0, 2, 4, 6 of both, and rows 1, 3, 5, 7."""
    if CELLS.in_ptx:
        return _lower(a, b), _upper(a, b)
    else:
        return (a & 0xFFFF) | b << 16, (a >> 16 & 0xFFFF) | (b & -65536)


@triton.jit
def _nothing(like):
    zero = tl.zeros(like.shape, tl.float32)
    return zero, zero, zero, zero


@triton.jit
def _zero_of(zeros, c: tl.constexpr, CELLS: tl.constexpr):
    """Minus the zero at place c of its word, as `_codes` adds it."""
    zero = (zeros >> 4 * c & 15) + CELLS.midpoint
    if not CELLS.in_ptx:
        return -zero.to(tl.float32)
    elif CELLS.has_halves:
        return zero * 0x10001 + _ZEROS_F16
    else:
        return zero * 0x10001 + _ZEROS_BF16


@triton.jit
def _product(acc, a, b, c, d, first, second, x, z, CELLS: tl.constexpr):
    """acc[g, column] + sum over t of codes[g, t] * x[column, t].

    acc: row g and even columns, row g and odd ones, row g + 8 twice. a, b: codes of row g and of
    row g + 8, for x; c, d: the same for z.
    """
    if CELLS.in_ptx:
        codes = [
            _codes(a, first, CELLS), _codes(b, second, CELLS), _codes(c, first, CELLS),
            _codes(d, second, CELLS),
        ]  # fmt: skip
        return tl.inline_asm_elementwise(
            _MMA_F16 if CELLS.has_halves else _MMA_BF16, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [codes[0], codes[1], codes[2], codes[3], x, z, acc[0], acc[1], acc[2], acc[3]],
            dtype=(tl.float32,) * 4, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        one, two = _sums_over_lanes(a, first, x)
        three, four = _sums_over_lanes(c, first, z)
        five, six = _sums_over_lanes(b, second, x)
        seven, eight = _sums_over_lanes(d, second, z)
        return (
            acc[0] + one + three, acc[1] + two + four, acc[2] + five + seven, acc[3] + six + eight
        )  # fmt: skip


@triton.jit
def _codes(word, zero, CELLS: tl.constexpr):
    """The codes at the lowest place of both halves of a word, minus their zero."""
    return tl.inline_asm_elementwise(
        _CODES_F16 if CELLS.has_halves else _CODES_BF16, "=r,r,r", [word, zero], dtype=tl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _sums_over_lanes(word, zero, x):
    """As the tensor cores, for the interpreter: even columns and odd columns, [8 spans, 4]."""
    SPANS: tl.constexpr = word.shape[0] // 8
    first = tl.reshape((word & 15).to(tl.float32) + zero, (SPANS, 8, 1, 4))
    second = tl.reshape((word >> 16 & 15).to(tl.float32) + zero, (SPANS, 8, 1, 4))
    products = first * tl.reshape(x[0], (SPANS, 1, 8, 4))
    products += second * tl.reshape(x[1], (SPANS, 1, 8, 4))
    return tl.split(tl.reshape(tl.sum(products, 3), (SPANS * 8, 4, 2)))


# --- sums


@triton.jit
def _no_sums(SPANS: tl.constexpr, CELLS: tl.constexpr):
    NUMBER: tl.constexpr = CELLS.outputs * CELLS.columns // 4
    sums = ()
    for _ in tl.static_range(NUMBER):
        sums += (tl.zeros((SPANS * 8, 4), tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def _side_by_side(sums, n_start, SPANS: tl.constexpr, CELLS: tl.constexpr):
    """The sums of the instance, their tokens and their outputs: three vectors."""
    OUTPUTS: tl.constexpr = CELLS.outputs
    if CELLS.is_one:  # its columns are added
        COLUMNS: tl.constexpr = 1 if CELLS.is_raw else 2 if CELLS.has_products else 3
        column = tl.arange(0, 4)[None, :] * 2
        added = ()
        for c in tl.static_range(OUTPUTS):
            both = tl.where(column < COLUMNS, sums[2 * c], 0.0)
            both += tl.where(column + 1 < COLUMNS, sums[2 * c + 1], 0.0)
            added += (both,)  # type: ignore[assignment]
        result = tl.reshape(_joined(added, 0, CELLS), (SPANS, 8, 4, OUTPUTS))
        result = tl.reshape(tl.sum(tl.sum(result, 2), 0), (8 * OUTPUTS,))
        at = tl.arange(0, 8 * OUTPUTS)
        return result, at * 0, n_start + at
    else:
        BLOCKS: tl.constexpr = CELLS.columns // 8
        even = ()
        odd = ()
        for i in tl.static_range(OUTPUTS * BLOCKS):
            even += (sums[2 * i],)  # type: ignore[assignment]
            odd += (sums[2 * i + 1],)  # type: ignore[assignment]
        both = tl.join(_joined(even, 0, CELLS), _joined(odd, 0, CELLS))  # [8 spans, 4, outputs, 2]
        if BLOCKS == 2:
            more = tl.join(_joined(even, OUTPUTS, CELLS), _joined(odd, OUTPUTS, CELLS))
            both = tl.join(both, more)
        result = tl.sum(tl.reshape(both, (SPANS, 64 * OUTPUTS * BLOCKS)), 0)
        at = tl.arange(0, 64 * OUTPUTS * BLOCKS)
        block = at % BLOCKS
        at = at // BLOCKS
        m = block * 8 + at // (2 * OUTPUTS) % 4 * 2 + at % 2
        return result, m, n_start + at // (8 * OUTPUTS) * OUTPUTS + at // 2 % OUTPUTS


@triton.jit
def _joined(sums, first: tl.constexpr, CELLS: tl.constexpr):
    """[8 spans, 4] of each output of a cell as [8 spans, 4, outputs]."""
    SHAPE: tl.constexpr = (sums[0].shape[0], 4, CELLS.outputs)
    if CELLS.outputs == 4:
        both = _join_four(sums[first], sums[first + 1], sums[first + 2], sums[first + 3])
    else:
        both = tl.join(
            _join_four(sums[first], sums[first + 2], sums[first + 4], sums[first + 6]),
            _join_four(sums[first + 1], sums[first + 3], sums[first + 5], sums[first + 7]),
        )
    return tl.reshape(both, SHAPE)


@triton.jit
def _join_four(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _is_last(counter, PARTS: tl.constexpr):
    """Whether the other parts of these sums are stored; the counter is 0 for the next launch then."""
    # The sums of all threads are stored before one thread counts the instance.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PARTS - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _sum_of_parts(sums, stride, is_inside, PARTS: tl.constexpr):
    """The parts, added in their order."""
    total = tl.load(sums, mask=is_inside, other=0.0, cache_modifier=".cg")  # not from L1
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * stride, mask=is_inside, other=0.0, cache_modifier=".cg")
    return total


# --- launcher


def packed_mma_triton(
    x: Tensor,
    weights: Sequence[Packed],
    biases: Sequence[Tensor],
    norm: TritonNorm | None = None,
    activation: str = "",
    is_gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """As `packed_linears_triton`, which may call it for transposed layouts."""
    x = x.contiguous()
    dim = x.shape[-1]
    tokens = x.numel() // dim
    sizes = output_sizes(weights, is_gated)
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    (norm_weight, _), numbers, _ = norm_arguments(norm, x)
    norm_weight = norm_weight.contiguous()
    spans, run, parts = _tiles(weights[0], sum(sizes), is_gated)
    outputs = 4 if weights[0].layout == "gptq" else 8
    spans_of_row = dim // (32 * run)
    spans_of_part = triton.cdiv(spans_of_row, parts)
    is_aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (x, norm_weight))
    in_ptx = runs_ptx(x)
    cells = Cells(
        layout=weights[0].layout,
        run=run,
        outputs=outputs,
        group=weights[0].group,
        midpoint=weights[0].midpoint,
        columns=8 if tokens <= 8 else 16,
        is_one=tokens == 1,
        is_raw=in_ptx and is_aligned and x.element_size() == 2 and norm is None,
        has_products=in_ptx
        and is_aligned
        and norm is not None
        and numbers[1] == 0.0
        and {x.dtype, norm_weight.dtype} == {torch.bfloat16},
        has_halves=in_ptx and is_aligned and x.dtype == torch.float16 and norm is None,
        is_even=spans_of_row % spans_of_part == 0 and spans_of_part % spans == 0,
        in_ptx=in_ptx,
        has_pairs=in_ptx and is_aligned,
    )
    blocks = sum(triton.cdiv(size, 8 * outputs) for size in sizes)
    sums = counters = x
    if parts > 1:
        sums = x.new_empty(parts * y.numel() * (2 if is_gated else 1), dtype=torch.float32)
        counters = counters_of(x, blocks)
    launch(
        packed_mma_linear, (blocks, parts), x, y, norm_weight,
        x if residual is None else residual.contiguous(), sums, counters,
        *_arguments(x, weights, biases, sizes), tokens, dim, spans_of_part, *numbers,
        SPANS=spans, CELLS=cells, PARTS=parts, TILE_K=256 * spans, HAS_NORM=norm is not None,
        HAS_BIAS=bool(biases), ACTIVATION=activation, IS_GATED=is_gated,
        HAS_RESIDUAL=residual is not None, num_warps=spans,
    )  # fmt: skip
    return y


def _arguments(
    x: Tensor, weights: Sequence[Packed], biases: Sequence[Tensor], sizes: Sequence[int]
) -> list[Any]:
    """What the kernel takes of each weight."""
    return [
        *padded(weights[0].codes.detach(), [weight.codes.detach() for weight in weights]),
        *padded(weights[0].scales, [weight.scales for weight in weights]),
        *padded(weights[0].zeros, [weight.zeros for weight in weights]),
        *padded(x, biases),
        *padded(0, sizes),
    ]


def _tiles(packed: Packed, size: int, is_gated: bool) -> tuple[int, int, int]:
    """SPANS, eights of inputs in a cell, and PARTS of a launch. Not measured yet."""
    most = packed.group // 32 if packed.group % 32 == 0 else 1
    if packed.layout == "gptq":
        run = next(n for n in (4, 2, 1) if most % n == 0 and (n < 4 or not is_gated))
        return 8, run, 1
    return 8, 1, 4
