"""The codes of packed weights in Triton: loads, and sums of products. See packed.py for the layouts.

Codes are read as int32 words: of eight codes with four bits, or of four with eight.

    word      |  7  6  5  4  3  2  1  0  |      value(word, i) * x[k(word, i)], i = 0 .. 7

On NVIDIA's GPUs the kernel for one token loads words, scales and inputs in PTX, in the thread that uses
them. For `tl.load` Triton would choose other threads and pass the values through shared memory. The
value of a code with a table is read from the lane of a warp that holds it: lane i has that of code
i % 16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.packed import NESTED_GROUP

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


def runs_ptx(x: Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None


# --- a weight: words, bias, N, scales, zeros, table of scales, absmax, offset, strides of scales


@triton.jit
def pick_packed(first, second, third, TILE_N: tl.constexpr, IS_GATED: tl.constexpr):
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
def load_tile(weight, row, run, N, K, FORMAT: tl.constexpr):
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
        words = load_four(at, _LOAD_WORDS)
    elif FORMAT.in_ptx:
        words = (load_word(at, _LOAD_32),)
    elif FORMAT.run == 1:  # lanes along a row; of unknown alignment, so one word at a time
        words = (tl.load(tl.max_contiguous(tl.multiple_of(at, [1, 1]), [1, 2])),)
    else:
        words = (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))
    if FORMAT.layout == "halves":  # the upper half of each byte has the first rows
        shift = tl.where(row < N // 2, 4, 0)
        # A name of its own: Triton's comprehensions have no scope.
        words = [(codes >> shift) & 0x0F0F0F0F for codes in words]
    scale, zero = _load_scale(weight, row, columns_of(word, 0, FORMAT), FORMAT)
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
def load_word(at, ptx: tl.constexpr):
    return tl.inline_asm_elementwise(ptx, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_four(at, ptx: tl.constexpr):
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
        return load_word(at, _LOAD_32).to(tl.float32, bitcast=True)
    elif dtype == tl.uint8:
        return load_word(at, _LOAD_8).to(tl.float32)
    else:
        return pair_of(load_word(at, _LOAD_16), dtype)[0]


@triton.jit
def pair_of(bits, dtype: tl.constexpr):
    """The two numbers of 16 bits in each int32, in float32."""
    if dtype == tl.bfloat16:  # the upper half of a float32
        first = (bits << 16).to(tl.float32, bitcast=True)
        second = (bits & -65536).to(tl.float32, bitcast=True)
    else:
        first = bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (bits >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def load_x(x, norm_weight, offset, run, HAS_NORM: tl.constexpr, FORMAT: tl.constexpr):
    """The inputs of each word of a run, [1, runs] by position; their sum; the sum of x^2."""
    IN_WORD: tl.constexpr = FORMAT.in_word
    RUN: tl.constexpr = FORMAT.run
    inputs = ()
    x_sum = tl.zeros(run.shape, tl.float32)
    squares = tl.zeros(run.shape, tl.float32)
    for j in tl.static_range(RUN):
        xs = load_inputs(x, run * RUN + j, FORMAT)
        if HAS_NORM:
            weights = load_inputs(norm_weight, run * RUN + j, FORMAT)
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
def load_inputs(x, word, FORMAT: tl.constexpr):
    """The inputs of a word by position, in float32."""
    IN_WORD: tl.constexpr = FORMAT.in_word
    dtype: tl.constexpr = x.dtype.element_ty
    at = x + columns_of(word, 0, FORMAT)
    if not FORMAT.has_pairs or dtype.primitive_bitwidth != 16:
        xs = ()
        for i in tl.static_range(IN_WORD):
            xs += (_load_number(x + columns_of(word, i, FORMAT), FORMAT),)  # type: ignore[assignment]
        return xs
    elif IN_WORD == 4:
        a, b = tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
        return pair_of(a, dtype) + pair_of(b, dtype)
    elif FORMAT.layout == "tiles":
        a, b, c, d = load_four(at, _LOAD_PAIRS_OF_TILES)
        a, b, c, d = pair_of(a, dtype), pair_of(b, dtype), pair_of(c, dtype), pair_of(d, dtype)
        return a[0], b[0], c[0], d[0], a[1], b[1], c[1], d[1]
    else:
        a, b, c, d = load_four(at, _LOAD_PAIRS)
        return pair_of(a, dtype) + pair_of(b, dtype) + pair_of(c, dtype) + pair_of(d, dtype)


@triton.jit
def columns_of(word, i, FORMAT: tl.constexpr):
    """The column k of the code at position i of a word of a row."""
    if FORMAT.layout == "tiles":  # word 4 q + j of a tile: 32 j + 2 q + TILE_STEPS[i] of packed.py
        first = (word >> 4) * 128 + (word & 3) * 32 + (word >> 2 & 3) * 2
        return first + i % 4 * 8 + i // 4
    else:
        return word * FORMAT.in_word + i


@triton.jit
def products(tile, xs, x_sum, table, lanes, midpoint, factor, FORMAT: tl.constexpr):
    """The sum of the products of each run."""
    RUN: tl.constexpr = FORMAT.run
    words, scale, zero = tile
    sums = _sum_of_products(words[0], xs[0], table, lanes, midpoint, FORMAT)
    for i in tl.static_range(1, RUN):
        sums += _sum_of_products(words[i], xs[i], table, lanes, midpoint, FORMAT)
    return scaled(sums, x_sum, scale, zero, factor, FORMAT)


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
            sums += value_of(word, i, table, lanes, midpoint, FORMAT) * xs[i]
        return sums


@triton.jit
def value_of(tile, i: tl.constexpr, table, lanes, midpoint, FORMAT: tl.constexpr):
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
def load_lanes(table, FORMAT: tl.constexpr):
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
def row_scale(weight, n, N, factor, FORMAT: tl.constexpr):
    """What multiplies the sum of a row at its end."""
    if FORMAT.group == 0:
        at = n.to(tl.int64) * weight[8]
        return tl.load(weight[3] + at, mask=n < N, other=0.0).to(tl.float32) * factor
    else:
        return tl.full(n.shape, 1.0, tl.float32)


@triton.jit
def scaled(sums, x_sum, scale, zero, factor, FORMAT: tl.constexpr):
    """A sum of products of one group, and the sum of its inputs, with scale and zero."""
    if FORMAT.group == 0:
        return sums
    elif FORMAT.zeros == "added":
        return sums * (scale * factor) + zero * x_sum
    elif FORMAT.zeros == "subtracted":
        return (sums - zero * x_sum) * (scale * factor)
    else:
        return sums * (scale * factor)
