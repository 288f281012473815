"""Linear layers of packed weights in Triton. See packed.py for the formula and the layouts.

Codes are read as int32 words: of eight codes with four bits, or of four with eight.

    word      |  7  6  5  4  3  2  1  0  |      value(word, i) * x[k(word, i)], i = 0 .. 7

`packed_linear_one_token`: a thread reads runs of four words with one scale, or of one word if the
format does not allow that. It sums the products of a run in float32, multiplies by the scale, and
adds. Tiles are loaded before the wait for x, and each further one before the one at hand is used.
What is before and after the sum is that of `linear_few_tokens` in linear_triton.py.

`packed_linear_few_tokens`, for up to 16 tokens: tensor cores multiply the codes at one position of
all words, [TILE_N, WORDS], by the inputs of that position, [WORDS, TILE_M]. A weight with groups is
rounded to the dtype of x first, as packages do that unpack it.

On NVIDIA's GPUs the kernel for one token loads words, scales and inputs in PTX, in the thread that uses
them. For `tl.load` Triton would choose other threads and pass the values through shared memory. The
value of a code with a table is read from the lane of a warp that holds it: lane i has that of code
i % 16.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.linear_triton import epilogue, finish_sum, output_sizes, padded
from hf_static_kv.kernels.norm_triton import TritonNorm, norm_arguments
from hf_static_kv.kernels.packed import LAYOUTS, NESTED_GROUP, Packed

# 2 ** 23: the float32 with these bits has an integer in its lowest bits. A conversion would run at
# a quarter of the rate.
_INTEGER_BITS = tl.constexpr(0x4B000000)
_INTEGER = tl.constexpr(8388608.0)
_NESTED_GROUP = tl.constexpr(NESTED_GROUP)

# The interpreter does not run PTX. tests/kernels/test_packed.py computes the sums of words by hand.
_LOAD_8 = tl.constexpr("ld.global.u8 $0, [$1];")
_LOAD_16 = tl.constexpr("ld.global.u16 $0, [$1];")
_LOAD_32 = tl.constexpr("ld.global.b32 $0, [$1];")
_LOAD_WORDS = tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_PAIRS = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_PAIRS_OF_TILES = tl.constexpr(  # a step of eight columns is 16 bytes
    "".join(f"ld.global.b32 ${i}, [$4 + {16 * i}]; " for i in range(4))
)


def _sum_of_word(start: str, values: Sequence[str], first_input: int) -> Any:
    """PTX that sums the products of a word. Each of `values` computes `value`.

    With Triton's operations all lookups of a tile came first, which took all 255 registers.
    """
    text = "{ .reg .b32 code, upper; .reg .f32 value; mov.f32 $0, 0.0; " + start
    for i, value in enumerate(values):
        text += f"{value} fma.rn.f32 $0, value, ${first_input + i}, $0; "
    return tl.constexpr(text + "}")


def _lookups(shifts: Sequence[int]) -> Any:
    """Operands: lanes, word, inputs. Each code chooses the lane that has its value."""
    value = "shr.u32 code, $2, {}; shfl.sync.idx.b32 value, $1, code, 31, 0xffffffff;"
    return _sum_of_word("", [value.format(shift) for shift in shifts], 3)


def _integers() -> Any:
    """Operands: word, minus the zeros of positions i % 4, inputs divided by 16 ** (i % 4).

    Codes stay at their place in a half of the word, and so count 16 ** (i % 4) times.
    """
    value = "lop3.b32 code, {}, {}, 0x4B000000, 0xEA; add.rn.f32 value, code, ${};"  # a & b | c
    places = [(("$1", "upper")[i // 4], 15 << 4 * (i % 4), 2 + i % 4) for i in range(8)]
    return _sum_of_word("shr.u32 upper, $1, 16; ", [value.format(*at) for at in places], 6)


def _bytes() -> Any:
    """Operands: word, minus the zero, inputs. A byte as unsigned, 128 more, ends the bits of 2 ** 23."""
    value = "prmt.b32 code, upper, 0x4B000000, {}; add.rn.f32 value, code, $2;"
    values = [value.format(0x7540 + i) for i in range(4)]
    return _sum_of_word("xor.b32 upper, $1, 0x80808080; ", values, 3)


_SUM_OF_HIGH_FIRST = _lookups((4, 0, 12, 8, 20, 16, 28, 24))
_SUM_OF_LOW_FIRST = _lookups((0, 4, 8, 12, 16, 20, 24, 28))
_SUM_OF_INTEGERS = _integers()
_SUM_OF_BYTES = _bytes()


class Format(NamedTuple):
    """What the kernels are compiled for."""

    layout: str
    in_word: int  # codes in an int32
    run: int  # words that a thread reads in a row
    group: int  # columns that share a scale; 0: a row has one, which multiplies its sum
    has_table: bool
    is_shuffled: bool  # values of a table come from the lanes of a warp
    is_nested: bool
    zeros: str  # "", "subtracted" or "added"
    is_even: bool  # rows end with a tile
    in_ptx: bool  # loads and sums
    has_pairs: bool  # inputs of 16 bits may be loaded as pairs, 16 bytes at once


@triton.jit
def packed_linear_one_token(
    x, y, norm_weight, residual, table, w0, w1, w2, s0, s1, s2, z0, z1, z2, t0, t1, t2, a0, a1, a2,
    o0, o1, o2, b0, b1, b2, n0, n1, n2, r0, r1, r2, g0, g1, g2, K, factor, midpoint, eps, offset,
    TILE_N: tl.constexpr, WORDS: tl.constexpr, FORMAT: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    second = (w1, b1, n1, s1, z1, t1, a1, o1, r1, g1)
    own, n_start, y_start = _pick(
        (w0, b0, n0, s0, z0, t0, a0, o0, r0, g0), second, (w2, b2, n2, s2, z2, t2, a2, o2, r2, g2),
        TILE_N, IS_GATED,
    )  # fmt: skip
    RUNS: tl.constexpr = WORDS // FORMAT.run
    N = own[2]
    n = n_start + tl.arange(0, TILE_N)
    row = tl.minimum(n, N - 1)[:, None].to(tl.int64)
    runs = K // (FORMAT.in_word * FORMAT.run)
    run = tl.arange(0, RUNS)[None, :]
    dtype = y.dtype.element_ty
    tile = _load_tile(own, row, tl.minimum(run, runs - 1), N, K, FORMAT)
    if IS_GATED:  # the first weight is the gate and the second is up
        up_tile = _load_tile(second, row, tl.minimum(run, runs - 1), N, K, FORMAT)
    lanes = _lanes(table, FORMAT)
    bias = tl.load(own[1] + n, mask=n < N, other=0.0) if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0) if HAS_BIAS and IS_GATED else 0.0
    pdl_sync(PDL)
    residual_tile = tl.load(residual + y_start + n, mask=n < N, other=0.0) if HAS_RESIDUAL else 0.0
    total = tl.zeros((TILE_N, RUNS), tl.float32)
    up = tl.zeros((TILE_N, RUNS), tl.float32)
    squares = tl.zeros((1, RUNS), tl.float32)
    for start in tl.range(0, runs, RUNS):
        at = start + run
        if not IS_WHOLE:  # behind the end the last run again, which is not added
            following = tl.minimum(at + RUNS, runs - 1)
            next_tile = _load_tile(own, row, following, N, K, FORMAT)
            if IS_GATED:
                next_up_tile = _load_tile(second, row, following, N, K, FORMAT)
        is_inside = FORMAT.is_even | (at < runs)
        inside = at if FORMAT.is_even else tl.minimum(at, runs - 1)
        xs, x_sum, new = _load_x(x, norm_weight, offset, inside, HAS_NORM, FORMAT)
        squares += tl.where(is_inside, new, 0.0)
        sums = _products(tile, xs, x_sum, table, lanes, midpoint, factor, FORMAT)
        total += tl.where(is_inside, sums, 0.0)
        if IS_GATED:
            sums = _products(up_tile, xs, x_sum, table, lanes, midpoint, factor, FORMAT)
            up += tl.where(is_inside, sums, 0.0)
        if not IS_WHOLE:
            tile = next_tile
            if IS_GATED:
                up_tile = next_up_tile
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps) if HAS_NORM else 1.0
    result = tl.sum(total, 1) * _row_scale(own, n, N, factor, FORMAT)
    result = finish_sum(result, scale, bias, HAS_NORM, HAS_BIAS)
    by = 1.0
    if IS_GATED:
        by = tl.sum(up, 1) * _row_scale(second, n, N, factor, FORMAT)
        by = finish_sum(by, scale, up_bias, HAS_NORM, HAS_BIAS)
    result = epilogue(result, by, residual_tile, dtype, ACTIVATION, IS_GATED, HAS_RESIDUAL)
    tl.store(y + y_start + n, result.to(dtype), mask=n < N)


@triton.jit
def packed_linear_few_tokens(
    x, y, table, w0, w1, w2, s0, s1, s2, z0, z1, z2, t0, t1, t2, a0, a1, a2, o0, o1, o2, b0, b1, b2,
    n0, n1, n2, r0, r1, r2, g0, g1, g2, M, K, factor, midpoint,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, WORDS: tl.constexpr, FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    second = (w1, b1, n1, s1, z1, t1, a1, o1, r1, g1)
    own, n_start, y_start = _pick(
        (w0, b0, n0, s0, z0, t0, a0, o0, r0, g0), second, (w2, b2, n2, s2, z2, t2, a2, o2, r2, g2),
        TILE_N, IS_GATED,
    )  # fmt: skip
    IN_WORD: tl.constexpr = FORMAT.in_word
    N = own[2]
    n = n_start + tl.arange(0, TILE_N)
    row = tl.minimum(n, N - 1)[:, None].to(tl.int64)
    m = tl.arange(0, TILE_M)[None, :]
    dtype = y.dtype.element_ty
    bias = tl.load(own[1] + n, mask=n < N, other=0.0)[:, None] if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0)[:, None] if HAS_BIAS and IS_GATED else 0.0
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    up = tl.zeros((TILE_N, TILE_M), tl.float32)
    lanes = _lanes(table, FORMAT)
    pdl_sync(PDL)
    for start in tl.range(0, K // IN_WORD, WORDS):
        word = (start + tl.arange(0, WORDS))[:, None]
        inside = tl.minimum(start + tl.arange(0, WORDS)[None, :], K // IN_WORD - 1)
        words, scale, zero = _load_tile(own, row, inside, N, K, FORMAT)
        if IS_GATED:
            up_words, up_scale, up_zero = _load_tile(second, row, inside, N, K, FORMAT)
        for i in tl.static_range(IN_WORD):
            at = x + m.to(tl.int64) * K + _columns(word, i, FORMAT)
            x_tile = tl.load(at, mask=(m < M) & (word < K // IN_WORD), other=0.0)
            value = _value(words[0], i, table, lanes, midpoint, FORMAT)
            weight = _scaled(value, 1.0, scale, zero, factor, FORMAT).to(dtype)
            total = tl.dot(weight, x_tile, total, input_precision="ieee")
            if IS_GATED:
                value = _value(up_words[0], i, table, lanes, midpoint, FORMAT)
                weight = _scaled(value, 1.0, up_scale, up_zero, factor, FORMAT).to(dtype)
                up = tl.dot(weight, x_tile, up, input_precision="ieee")
    total *= _row_scale(own, n, N, factor, FORMAT)[:, None]
    result = finish_sum(total, 1.0, bias, False, HAS_BIAS)
    by = 1.0
    if IS_GATED:
        up *= _row_scale(second, n, N, factor, FORMAT)[:, None]
        by = finish_sum(up, 1.0, up_bias, False, HAS_BIAS)
    result = epilogue(result, by, 0.0, dtype, ACTIVATION, IS_GATED, False)
    width = n0 if IS_GATED else n0 + n1 + n2
    at = y + m.to(tl.int64) * width + y_start + n[:, None]
    tl.store(at, result.to(dtype), mask=(m < M) & (n[:, None] < N))


# --- a weight: words, bias, N, scales, zeros, table of scales, absmax, offset, strides of scales


@triton.jit
def _pick(first, second, third, TILE_N: tl.constexpr, IS_GATED: tl.constexpr):
    """The weight of this instance, its first row here, and where its output begins."""
    block = tl.program_id(0)
    own = first
    begin = 0
    y_start = 0
    if not IS_GATED:
        end = tl.cdiv(first[2], TILE_N)
        if block >= end:
            own = second
            begin = end
            y_start = first[2]
        end += tl.cdiv(second[2], TILE_N)
        if block >= end:
            own = third
            begin = end
            y_start = first[2] + second[2]
    return own, (block - begin) * TILE_N, y_start


@triton.jit
def _load_tile(weight, row, run, N, K, FORMAT: tl.constexpr):
    """The words of each row and run, a tensor for each word of a run; its scale, and its zero."""
    words_of_row = K // FORMAT.in_word
    word = run * FORMAT.run
    if FORMAT.layout == "tiles":  # [N / 8, K / 128, 8, 16] words
        at = ((row >> 3) * (words_of_row >> 4) + (word >> 4)) * 128 + (row & 7) * 16 + (word & 15)
    elif FORMAT.layout == "halves":
        at = row % (N // 2) * words_of_row + word
    else:
        at = row * words_of_row + word
    at += weight[0]
    if FORMAT.in_ptx and FORMAT.run == 4:
        words = _load_four(at, _LOAD_WORDS)
    elif FORMAT.in_ptx:
        words = (_load_bits(at, _LOAD_32),)
    elif FORMAT.run == 1:  # lanes along a row; of unknown alignment, so one word at a time
        words = (tl.load(tl.max_contiguous(tl.multiple_of(at, [1, 1]), [1, 2])),)
    else:
        words = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    if FORMAT.layout == "halves":  # the upper half of each byte has the first rows
        shift = tl.where(row < N // 2, 4, 0)
        # A name of its own: Triton's comprehensions have no scope.
        words = [(codes >> shift) & 0x0F0F0F0F for codes in words]
    scale, zero = _load_scale(weight, row, _columns(word, 0, FORMAT), FORMAT)
    return words, scale, zero


@triton.jit
def _load_scale(weight, row, k, FORMAT: tl.constexpr):
    """Scale and zero of column k, without `factor`; of no use if rows have one scale."""
    scale = tl.zeros((1, 1), tl.float32)
    zero = tl.zeros((1, 1), tl.float32)
    if FORMAT.group != 0:
        at = row * weight[8] + k // FORMAT.group * weight[9]
        scale = _load_number(weight[3] + at, FORMAT)
        if FORMAT.is_nested:
            absmax = _load_number(weight[6] + at // _NESTED_GROUP, FORMAT)
            scale = _load_number(weight[5] + scale.to(tl.int32), FORMAT) * absmax
            scale += tl.load(weight[7])
        if FORMAT.zeros != "":
            zero = _load_number(weight[4] + at, FORMAT)
    return scale, zero


@triton.jit
def _load_bits(at, ptx: tl.constexpr):
    return tl.inline_asm_elementwise(ptx, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _load_four(at, ptx: tl.constexpr):
    return tl.inline_asm_elementwise(
        ptx, "=&r,=&r,=&r,=&r,l", [at], dtype=(tl.int32,) * 4, is_pure=False, pack=1
    )


@triton.jit
def _load_number(at, FORMAT: tl.constexpr):
    """In float32."""
    dtype: tl.constexpr = at.dtype.element_ty
    if not FORMAT.in_ptx:
        return tl.load(at).to(tl.float32)
    elif dtype == tl.float32:
        return _load_bits(at, _LOAD_32).to(tl.float32, bitcast=True)
    elif dtype == tl.uint8:
        return _load_bits(at, _LOAD_8).to(tl.float32)
    else:
        return _pair(_load_bits(at, _LOAD_16), dtype)[0]


@triton.jit
def _pair(bits, dtype: tl.constexpr):
    """The two numbers of 16 bits in each int32, in float32."""
    if dtype == tl.bfloat16:  # the upper half of a float32
        first = (bits << 16).to(tl.float32, bitcast=True)
        second = (bits & -65536).to(tl.float32, bitcast=True)
    else:
        first = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (bits >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _load_x(x, norm_weight, offset, run, HAS_NORM: tl.constexpr, FORMAT: tl.constexpr):
    """The inputs of each word of a run, [1, runs] by position; their sum; the sum of x^2."""
    IN_WORD: tl.constexpr = FORMAT.in_word
    RUN: tl.constexpr = FORMAT.run
    inputs = ()
    x_sum = tl.zeros(run.shape, tl.float32)
    squares = tl.zeros(run.shape, tl.float32)
    for j in tl.static_range(RUN):
        xs = _load_inputs(x, run * RUN + j, FORMAT)
        if HAS_NORM:
            weights = _load_inputs(norm_weight, run * RUN + j, FORMAT)
        finished = ()
        for i in tl.static_range(IN_WORD):
            value = xs[i]
            if HAS_NORM:
                squares += value * value
                value *= offset + weights[i]
            if FORMAT.zeros != "":
                x_sum += value
            if FORMAT.in_ptx and IN_WORD == 8 and not FORMAT.has_table:  # as _integers
                value *= 0.0625 ** (i % 4)
            finished += (value,)  # type: ignore[assignment]
        inputs += (finished,)  # type: ignore[assignment]
    return inputs, x_sum, squares


@triton.jit
def _load_inputs(x, word, FORMAT: tl.constexpr):
    """The inputs of a word by position, in float32."""
    IN_WORD: tl.constexpr = FORMAT.in_word
    dtype: tl.constexpr = x.dtype.element_ty
    at = x + _columns(word, 0, FORMAT)
    if not FORMAT.has_pairs or dtype.primitive_bitwidth != 16:
        xs = ()
        for i in tl.static_range(IN_WORD):
            xs += (_load_number(x + _columns(word, i, FORMAT), FORMAT),)  # type: ignore[assignment]
        return xs
    elif IN_WORD == 4:
        a, b = tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
        return _pair(a, dtype) + _pair(b, dtype)
    elif FORMAT.layout == "tiles":
        a, b, c, d = _load_four(at, _LOAD_PAIRS_OF_TILES)
        a, b, c, d = _pair(a, dtype), _pair(b, dtype), _pair(c, dtype), _pair(d, dtype)
        return a[0], b[0], c[0], d[0], a[1], b[1], c[1], d[1]
    else:
        a, b, c, d = _load_four(at, _LOAD_PAIRS)
        return _pair(a, dtype) + _pair(b, dtype) + _pair(c, dtype) + _pair(d, dtype)


@triton.jit
def _columns(word, i, FORMAT: tl.constexpr):
    """The column k of the code at position i of a word of a row."""
    if FORMAT.layout == "tiles":  # word 4 q + j of a tile: 32 j + 2 q + TILE_STEPS[i] of packed.py
        first = (word >> 4) * 128 + (word & 3) * 32 + (word >> 2 & 3) * 2
        return first + i % 4 * 8 + i // 4
    else:
        return word * FORMAT.in_word + i


@triton.jit
def _products(tile, xs, x_sum, table, lanes, midpoint, factor, FORMAT: tl.constexpr):
    """The sum of the products of each run."""
    RUN: tl.constexpr = FORMAT.run
    words, scale, zero = tile
    sums = _sum_of_products(words[0], xs[0], table, lanes, midpoint, FORMAT)
    for i in tl.static_range(1, RUN):
        sums += _sum_of_products(words[i], xs[i], table, lanes, midpoint, FORMAT)
    return _scaled(sums, x_sum, scale, zero, factor, FORMAT)


@triton.jit
def _sum_of_products(word, xs, table, lanes, midpoint, FORMAT: tl.constexpr):
    """The sum of the products of each word."""
    IN_WORD: tl.constexpr = FORMAT.in_word
    if FORMAT.in_ptx and IN_WORD == 8 and FORMAT.has_table:
        return tl.inline_asm_elementwise(
            _SUM_OF_HIGH_FIRST if FORMAT.layout == "high_first" else _SUM_OF_LOW_FIRST,
            "=&f,f,r,f,f,f,f,f,f,f,f",
            [lanes, word, xs[0], xs[1], xs[2], xs[3], xs[4], xs[5], xs[6], xs[7]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.in_ptx and IN_WORD == 8:
        zero = -_INTEGER - midpoint
        zero_16 = -_INTEGER - midpoint * 16.0
        zero_256 = -_INTEGER - midpoint * 256.0
        zero_4096 = -_INTEGER - midpoint * 4096.0
        return tl.inline_asm_elementwise(
            _SUM_OF_INTEGERS, "=&f,r,f,f,f,f,f,f,f,f,f,f,f,f",
            [word, zero, zero_16, zero_256, zero_4096, xs[0], xs[1], xs[2], xs[3], xs[4], xs[5],
             xs[6], xs[7]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.in_ptx and not FORMAT.has_table:
        return tl.inline_asm_elementwise(
            _SUM_OF_BYTES, "=&f,r,f,f,f,f,f",
            [word, -_INTEGER - 128.0 - midpoint, xs[0], xs[1], xs[2], xs[3]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = tl.zeros(word.shape, tl.float32)
        for i in tl.static_range(IN_WORD):
            sums += _value(word, i, table, lanes, midpoint, FORMAT) * xs[i]
        return sums


@triton.jit
def _value(tile, i: tl.constexpr, table, lanes, midpoint, FORMAT: tl.constexpr):
    """The values of the codes at one position of the words, in float32."""
    if FORMAT.layout == "high_first":
        codes = tile >> (8 * (i // 2) + 4 * (1 - i % 2))
    elif FORMAT.in_word == 4:
        codes = tile >> 8 * i
    else:
        codes = tile >> 4 * i
    if FORMAT.is_shuffled:  # the lowest five bits are a lane; each value is in two of them
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r", [lanes, codes],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.has_table:
        value = tl.load(table + (codes & 15))
    elif FORMAT.layout == "bytes":  # int8: as unsigned, 128 more
        number = ((codes & 255) ^ 128) | _INTEGER_BITS
        value = number.to(tl.float32, bitcast=True) - (_INTEGER + 128.0 + midpoint)
    else:
        number = (codes & 15) | _INTEGER_BITS
        value = number.to(tl.float32, bitcast=True) - (_INTEGER + midpoint)
    return value


@triton.jit
def _lanes(table, FORMAT: tl.constexpr):
    """In each lane of a warp the value of a code: a scalar, so that it fits any layout of a tile."""
    if FORMAT.is_shuffled:
        return tl.inline_asm_elementwise(
            "{ .reg .u32 lane; .reg .u64 at; mov.u32 lane, %laneid; and.b32 lane, lane, 15; "
            "mad.wide.u32 at, lane, 4, $1; ld.global.nc.f32 $0, [at]; }",
            "=f,l", [table], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 0.0


@triton.jit
def _row_scale(weight, n, N, factor, FORMAT: tl.constexpr):
    """What multiplies the sum of a row at its end."""
    if FORMAT.group == 0:
        at = n.to(tl.int64) * weight[8]
        return tl.load(weight[3] + at, mask=n < N, other=0.0).to(tl.float32) * factor
    else:
        return tl.full(n.shape, 1.0, tl.float32)


@triton.jit
def _scaled(sums, x_sum, scale, zero, factor, FORMAT: tl.constexpr):
    """A sum of products of one group, and the sum of its inputs, with scale and zero."""
    if FORMAT.group == 0:
        return sums
    elif FORMAT.zeros == "added":
        return sums * (scale * factor) + zero * x_sum
    elif FORMAT.zeros == "subtracted":
        return (sums - zero * x_sum) * (scale * factor)
    else:
        return sums * (scale * factor)


# --- launchers


def packed_linears_triton(
    x: Tensor,
    weights: Sequence[Packed],
    biases: Sequence[Tensor],
    norm: TritonNorm | None = None,
    activation: str = "",
    is_gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_linears` of packed weights of one kind. The arguments after x are the fields of `Linear`.

    Several tokens have no norm, no residual, and an activation only with a gate.
    """
    x = x.contiguous()
    sizes = output_sizes(weights, is_gated)
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    dim = x.shape[-1]
    if x.numel() > dim:
        if norm is not None or residual is not None or (activation and not is_gated):
            raise ValueError(
                "Several tokens have no norm, residual or activation: run these apart."
            )
        _launch_few(x, y, weights, biases, activation, is_gated)
        return y
    (norm_weight, _), numbers, _ = norm_arguments(norm, x)
    norm_weight = norm_weight.contiguous()
    tile_n, words, warps = _tiles(weights[0], is_gated)
    launch(
        packed_linear_one_token, (sum(triton.cdiv(size, tile_n) for size in sizes),), x, y,
        norm_weight, x if residual is None else residual.contiguous(),
        *_arguments(x, weights, biases, sizes), dim, *_numbers(weights[0]), *numbers,
        TILE_N=tile_n, WORDS=words,
        FORMAT=_format(
            x, weights[0], words, _run(weights), _runs_ptx(x), _is_aligned(x, norm_weight)
        ),
        IS_WHOLE=_words_of_row(weights[0]) <= words, HAS_NORM=norm is not None, HAS_BIAS=bool(biases),
        ACTIVATION=activation, IS_GATED=is_gated, HAS_RESIDUAL=residual is not None, num_warps=warps,
    )  # fmt: skip
    return y


def _launch_few(
    x: Tensor, y: Tensor, weights: Sequence[Packed], biases: Sequence[Tensor], activation: str,
    is_gated: bool,
) -> None:  # fmt: skip
    dim = x.shape[-1]
    tokens = x.numel() // dim
    sizes = output_sizes(weights, is_gated)
    tile_n, words, warps = _TILE_OF_FEW
    launch(
        packed_linear_few_tokens, (sum(triton.cdiv(size, tile_n) for size in sizes),), x, y,
        *_arguments(x, weights, biases, sizes), tokens, dim, *_numbers(weights[0]),
        TILE_N=tile_n, TILE_M=8 if tokens <= 8 else 16, WORDS=words,
        FORMAT=_format(x, weights[0], words, 1, False, False), HAS_BIAS=bool(biases), ACTIVATION=activation,
        IS_GATED=is_gated, num_warps=warps,
    )  # fmt: skip


def _arguments(
    x: Tensor, weights: Sequence[Packed], biases: Sequence[Tensor], sizes: Sequence[int]
) -> list[Any]:
    """The table, and what the kernels take of each weight; x where a weight has no such tensor."""

    def of_each(part: Callable[[Packed], Any]) -> list[Any]:
        given = [part(weight) for weight in weights]
        return padded(given[0], given)  # of one type, so that a kernel may choose

    nested = [weight.nested for weight in weights]
    parts = [[x if one is None else one[i] for one in nested] for i in range(3)]
    return [
        x if weights[0].table is None else weights[0].table,
        *of_each(_words),
        *of_each(lambda weight: weight.scales),
        *of_each(lambda weight: x if weight.zeros is None else weight.zeros),
        *(tensor for given in parts for tensor in padded(given[0], given)),
        *padded(x, biases),
        *padded(0, sizes),
        *of_each(lambda weight: weight.scales.stride(0)),
        *of_each(lambda weight: weight.scales.stride(1)),
    ]


def _words(packed: Packed) -> Tensor:
    """The codes as int32, four bytes each."""
    return packed.codes.detach().as_subclass(Tensor).reshape(-1).view(torch.int32)


def _numbers(packed: Packed) -> tuple[float, float]:
    return packed.factor, float(packed.midpoint)


def _words_of_row(packed: Packed) -> int:
    return packed.columns // LAYOUTS[packed.layout].in_word


def _format(
    x: Tensor, packed: Packed, words: int, run: int, in_ptx: bool, has_pairs: bool
) -> Format:
    has_row_scale = (
        packed.group == packed.columns and packed.nested is None and packed.zeros is None
    )
    return Format(
        layout=packed.layout,
        in_word=LAYOUTS[packed.layout].in_word,
        run=run,
        group=0 if has_row_scale else packed.group,
        has_table=packed.table is not None,
        is_shuffled=packed.table is not None and _runs_ptx(x),
        is_nested=packed.nested is not None,
        zeros="" if packed.zeros is None else "added" if packed.added else "subtracted",
        is_even=_words_of_row(packed) % words == 0,
        in_ptx=in_ptx,
        has_pairs=in_ptx and has_pairs,
    )


def _runs_ptx(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None


def _is_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _run(weights: Sequence[Packed]) -> int:
    """Words that a thread reads in a row: four if they have one scale and are aligned, or one."""
    one = weights[0]
    span = 128 if one.layout == "tiles" else 4 * LAYOUTS[one.layout].in_word
    is_one_group = one.columns % span == 0 and (one.group == one.columns or one.group % span == 0)
    return 4 if is_one_group and _is_aligned(*(weight.codes for weight in weights)) else 1


def _tiles(packed: Packed, is_gated: bool) -> tuple[int, int, int]:
    """TILE_N, WORDS and warps of a launch for one token.

    By single launches of the shapes of Llama 1B and 8B, H200, 2026-11-19. Where tiles of one or two
    warps were a little faster for long rows, as many as a multiprocessor holds at once would be far
    more than its share, and the first to be free would take them: tiles of four warps are chosen.
    """
    words = min(128 if is_gated else 512, max(32, triton.next_power_of_2(_words_of_row(packed))))
    is_short = not is_gated and _words_of_row(packed) <= words
    return 8 if is_short else LAYOUTS[packed.layout].in_word // 2, words, max(1, words // 128)


# TILE_N, WORDS and warps of a launch for several tokens. Not measured yet.
_TILE_OF_FEW = 16, 32, 4
