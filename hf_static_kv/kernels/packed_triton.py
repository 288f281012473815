"""Linear layers of packed weights in Triton. See packed.py for the formula and the layouts.

Codes are read as int32 words: of eight codes with four bits, or of four with eight. The codes at
one position of all words of a tile [TILE_N, WORDS] are one tile of values, which is multiplied by
the inputs of that position. So no weight is moved after it was loaded:

    word      |  7  6  5  4  3  2  1  0  |      value(word, i) * x[k(word, i)], i = 0 .. 7

`packed_linear_one_token` sums the products of a word in float32, multiplies by the scale of its
group, and adds. Tiles are loaded before the wait for x, and each further one before the one at hand
is used. What is before and after the sum is that of `linear_few_tokens` in linear_triton.py.

`packed_linear_few_tokens`, for up to 16 tokens: tensor cores multiply the tile of a position by the
inputs of its position, [TILE_N, WORDS] x [WORDS, TILE_M]. A weight with groups is rounded to the
dtype of x first, as packages do that unpack it.

The value of a code with four bits is read from the lane of a warp that holds it: lane i has that of
code i % 16. In the interpreter it is loaded, or computed.
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


def _sum_of_word(shifts: Sequence[int]) -> Any:
    """The products of one word in PTX: each code chooses the lane that has its value.

    With Triton's operations all lookups of a tile came first, which took all 255 registers.
    """
    look_up = "shr.u32 code, $2, {}; shfl.sync.idx.b32 value, $1, code, 31, 0xffffffff; "
    products = (
        f"{look_up.format(shift)}fma.rn.f32 $0, value, ${3 + i}, $0; "
        for i, shift in enumerate(shifts)
    )
    start = "{ .reg .b32 code; .reg .f32 value; mov.f32 $0, 0.0; "
    return tl.constexpr(start + "".join(products) + "}")


_SUM_OF_HIGH_FIRST = _sum_of_word((4, 0, 12, 8, 20, 16, 28, 24))
_SUM_OF_LOW_FIRST = _sum_of_word((0, 4, 8, 12, 16, 20, 24, 28))
_SUM_OF_HALVES = _sum_of_word((0, 8, 16, 24))


class Format(NamedTuple):
    """What the kernels are compiled for."""

    layout: str
    in_word: int  # codes in an int32
    group: int  # columns that share a scale; 0: a row has one, which multiplies its sum
    has_table: bool
    is_shuffled: bool  # values of four bits come from the lanes of a warp
    is_nested: bool
    zeros: str  # "", "subtracted" or "added"
    is_even: bool  # rows end with a tile


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
    IN_WORD: tl.constexpr = FORMAT.in_word
    N = own[2]
    n = n_start + tl.arange(0, TILE_N)
    dtype = y.dtype.element_ty
    tile = _load_words(own[0], n, 0, N, K, WORDS, FORMAT)
    if IS_GATED:  # the first weight is the gate and the second is up
        up_tile = _load_words(w1, n, 0, N, K, WORDS, FORMAT)
    lanes = _lanes(table, tile, midpoint, FORMAT)
    bias = tl.load(own[1] + n, mask=n < N, other=0.0) if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0) if HAS_BIAS and IS_GATED else 0.0
    pdl_sync(PDL)
    residual_tile = tl.load(residual + y_start + n, mask=n < N, other=0.0) if HAS_RESIDUAL else 0.0
    total = tl.zeros((TILE_N, WORDS), tl.float32)
    up = tl.zeros((TILE_N, WORDS), tl.float32)
    squares = tl.zeros((WORDS, IN_WORD), tl.float32)
    for start in tl.range(0, K // IN_WORD, WORDS):
        if not IS_WHOLE:
            next_tile = _load_words(own[0], n, start + WORDS, N, K, WORDS, FORMAT)
            if IS_GATED:
                next_up_tile = _load_words(w1, n, start + WORDS, N, K, WORDS, FORMAT)
        x_tile = _load_x(x, start, K, WORDS, FORMAT)
        if HAS_NORM:
            squares += x_tile * x_tile
            x_tile *= offset + _load_x(norm_weight, start, K, WORDS, FORMAT)
        xs = _positions(x_tile, FORMAT)
        sums = _products(tile, xs, table, lanes, midpoint, FORMAT)
        total += _scaled(sums, xs, own, n, start, N, K, factor, WORDS, FORMAT)
        if IS_GATED:
            sums = _products(up_tile, xs, table, lanes, midpoint, FORMAT)
            up += _scaled(sums, xs, second, n, start, N, K, factor, WORDS, FORMAT)
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
    m = tl.arange(0, TILE_M)[None, :]
    dtype = y.dtype.element_ty
    bias = tl.load(own[1] + n, mask=n < N, other=0.0)[:, None] if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0)[:, None] if HAS_BIAS and IS_GATED else 0.0
    total = tl.zeros((TILE_N, TILE_M), tl.float32)
    up = tl.zeros((TILE_N, TILE_M), tl.float32)
    pdl_sync(PDL)
    for start in tl.range(0, K // IN_WORD, WORDS):
        word = (start + tl.arange(0, WORDS))[:, None]
        tile = _load_words(own[0], n, start, N, K, WORDS, FORMAT)
        scale, zero = _scale_and_zero(own, n, start, N, K, factor, WORDS, FORMAT)
        lanes = _lanes(table, tile, midpoint, FORMAT)
        if IS_GATED:
            up_tile = _load_words(w1, n, start, N, K, WORDS, FORMAT)
            up_scale, up_zero = _scale_and_zero(second, n, start, N, K, factor, WORDS, FORMAT)
        for i in tl.static_range(IN_WORD):
            at = x + m.to(tl.int64) * K + _columns(word, i, FORMAT)
            x_tile = tl.load(at, mask=(m < M) & (word < K // IN_WORD), other=0.0)
            value = _value(tile, i, table, lanes, midpoint, FORMAT)
            weight = _weight(value, scale, zero, FORMAT).to(dtype)
            total = tl.dot(weight, x_tile, total, input_precision="ieee")
            if IS_GATED:
                value = _value(up_tile, i, table, lanes, midpoint, FORMAT)
                weight = _weight(value, up_scale, up_zero, FORMAT).to(dtype)
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
def _load_words(w, n, start, N, K, WORDS: tl.constexpr, FORMAT: tl.constexpr):
    """The tile [n, WORDS] from word `start` of each row on, with zeros outside."""
    words_of_row = K // FORMAT.in_word
    word = (start + tl.arange(0, WORDS))[None, :]
    mask = (n[:, None] < N) & (word < words_of_row)
    row = n[:, None].to(tl.int64)
    if FORMAT.layout == "tiles":  # [N / 8, K / 128, 8, 16] words
        at = (row // 8 * (words_of_row // 16) + word // 16) * 128 + row % 8 * 16 + word % 16
    elif FORMAT.layout == "halves":
        at = row % (N // 2) * words_of_row + word
    else:
        at = row * words_of_row + word
    # One word of a thread at a time: so the inputs of a word, which are loaded by one thread, are
    # where they are needed. With several they would go through shared memory.
    words = tl.load(w + tl.max_contiguous(at, [1, 1]), mask=mask, other=0)
    if FORMAT.layout == "halves":  # the upper half of each byte has the first rows
        words = words >> tl.where(n < N // 2, 4, 0)[:, None]
    return words


@triton.jit
def _load_x(x, start, K, WORDS: tl.constexpr, FORMAT: tl.constexpr):
    """The inputs of a tile of words, [WORDS, in_word] in float32."""
    IN_WORD: tl.constexpr = FORMAT.in_word
    word = (start + tl.arange(0, WORDS))[:, None]
    k = _columns(word, tl.arange(0, IN_WORD)[None, :], FORMAT)
    if FORMAT.is_even:
        tile = tl.load(x + k)
    else:
        tile = tl.load(x + k, mask=word < K // IN_WORD, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _columns(word, i, FORMAT: tl.constexpr):
    """The column k of the code at position i of a word of a row."""
    if FORMAT.layout == "tiles":  # word 4 q + j of a tile: 32 j + 2 q + TILE_STEPS[i] of packed.py
        return word // 16 * 128 + word % 4 * 32 + word % 16 // 4 * 2 + i % 4 * 8 + i // 4
    else:
        return word * FORMAT.in_word + i


@triton.jit
def _positions(tile, FORMAT: tl.constexpr):
    """The columns of a tile [WORDS, in_word]."""
    WORDS: tl.constexpr = tile.shape[0]
    if FORMAT.in_word == 4:
        even, odd = tl.split(tl.reshape(tile, (WORDS, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        return x0, x1, x2, x3
    else:
        even, odd = tl.split(tl.reshape(tile, (WORDS, 2, 2, 2)))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x1, x5 = tl.split(x15)
        x2, x6 = tl.split(x26)
        x3, x7 = tl.split(x37)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _products(tile, xs, table, lanes, midpoint, FORMAT: tl.constexpr):
    """The sum of the products of each word."""
    IN_WORD: tl.constexpr = FORMAT.in_word
    if FORMAT.is_shuffled and IN_WORD == 8:
        x0, x1, x2, x3, x4, x5, x6, x7 = xs
        sums = tl.inline_asm_elementwise(
            _SUM_OF_HIGH_FIRST if FORMAT.layout == "high_first" else _SUM_OF_LOW_FIRST,
            "=&f,f,r,f,f,f,f,f,f,f,f",
            [lanes, tile, x0[None, :], x1[None, :], x2[None, :], x3[None, :], x4[None, :],
             x5[None, :], x6[None, :], x7[None, :]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    elif FORMAT.is_shuffled:
        x0, x1, x2, x3 = xs
        sums = tl.inline_asm_elementwise(
            _SUM_OF_HALVES, "=&f,f,r,f,f,f,f",
            [lanes, tile, x0[None, :], x1[None, :], x2[None, :], x3[None, :]],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = tl.zeros(tile.shape, tl.float32)
        for i in tl.static_range(IN_WORD):
            sums += _value(tile, i, table, lanes, midpoint, FORMAT) * xs[i][None, :]
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
def _lanes(table, tile, midpoint, FORMAT: tl.constexpr):
    """In each lane of a warp the value of a code, in the shape of a tile."""
    if FORMAT.is_shuffled:
        code = tl.inline_asm_elementwise(
            "{ .reg .u32 lane; mov.u32 lane, %laneid; and.b32 $0, lane, 15; }",
            "=r,r",
            [tl.zeros(tile.shape, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        if FORMAT.has_table:
            lanes = tl.load(table + code)
        else:
            lanes = code.to(tl.float32) - midpoint
        return lanes
    else:
        return 0.0


# --- scales and zeros


@triton.jit
def _row_scale(weight, n, N, factor, FORMAT: tl.constexpr):
    """What multiplies the sum of a row at its end."""
    if FORMAT.group == 0:
        at = n.to(tl.int64) * weight[8]
        return tl.load(weight[3] + at, mask=n < N, other=0.0).to(tl.float32) * factor
    else:
        return tl.full(n.shape, 1.0, tl.float32)


@triton.jit
def _scaled(
    sums, xs, weight, n, start, N, K, factor, WORDS: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """The sums of words with the scales and zeros of their groups."""
    if FORMAT.group != 0:
        scale, zero = _scale_and_zero(weight, n, start, N, K, factor, WORDS, FORMAT)
        if FORMAT.zeros != "":
            x_sum = xs[0]
            IN_WORD: tl.constexpr = FORMAT.in_word
            for i in tl.static_range(1, IN_WORD):
                x_sum += xs[i]
            if FORMAT.zeros == "added":
                sums = sums * scale + zero * x_sum[None, :]
            else:
                sums = (sums - zero * x_sum[None, :]) * scale
        else:
            sums *= scale
    return sums


@triton.jit
def _weight(value, scale, zero, FORMAT: tl.constexpr):
    if FORMAT.zeros == "added":
        return value * scale + zero
    else:
        return (value - zero) * scale


@triton.jit
def _scale_and_zero(weight, n, start, N, K, factor, WORDS: tl.constexpr, FORMAT: tl.constexpr):
    """Of each word [n, WORDS]; 1 and 0 if rows have one scale."""
    scale = 1.0
    zero = 0.0
    if FORMAT.group != 0:
        word = (start + tl.arange(0, WORDS))[None, :]
        mask = (n[:, None] < N) & (word < K // FORMAT.in_word)
        group = _columns(word, 0, FORMAT) // FORMAT.group  # a word is in one group
        at = n[:, None].to(tl.int64) * weight[8] + group * weight[9]
        scale = tl.load(weight[3] + at, mask=mask, other=0)
        if FORMAT.is_nested:
            absmax = tl.load(weight[6] + at // _NESTED_GROUP, mask=mask, other=0.0)
            scale = tl.load(weight[5] + scale.to(tl.int32)) * absmax + tl.load(weight[7])
        scale = scale.to(tl.float32) * factor
        if FORMAT.zeros != "":
            zero = tl.load(weight[4] + at, mask=mask, other=0).to(tl.float32)
    return scale, zero


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
    tile_n, words, warps = _tiles(weights[0], is_gated)
    launch(
        packed_linear_one_token, (sum(triton.cdiv(size, tile_n) for size in sizes),), x, y,
        norm_weight.contiguous(), x if residual is None else residual.contiguous(),
        *_arguments(x, weights, biases, sizes), dim, *_numbers(weights[0]), *numbers,
        TILE_N=tile_n, WORDS=words, FORMAT=_format(x, weights[0], words),
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
        FORMAT=_format(x, weights[0], words), HAS_BIAS=bool(biases), ACTIVATION=activation,
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


def _format(x: Tensor, packed: Packed, words: int) -> Format:
    has_row_scale = (
        packed.group == packed.columns and packed.nested is None and packed.zeros is None
    )
    return Format(
        layout=packed.layout,
        in_word=LAYOUTS[packed.layout].in_word,
        group=0 if has_row_scale else packed.group,
        has_table=packed.table is not None,
        is_shuffled=LAYOUTS[packed.layout].bits == 4 and _shuffles(x),
        is_nested=packed.nested is not None,
        zeros="" if packed.zeros is None else "added" if packed.added else "subtracted",
        is_even=_words_of_row(packed) % words == 0,
    )


def _shuffles(x: Tensor) -> bool:
    """Whether a warp has 32 lanes that can be asked for a value."""
    return x.is_cuda and torch.version.hip is None


def _tiles(packed: Packed, is_gated: bool) -> tuple[int, int, int]:
    """TILE_N, WORDS and warps of a launch for one token. Not measured yet."""
    words = min(512, max(32, triton.next_power_of_2(_words_of_row(packed))))
    return 4 if is_gated else 8, words, max(1, words // 64)


# TILE_N, WORDS and warps of a launch for several tokens. Not measured yet.
_TILE_OF_FEW = 16, 32, 4
