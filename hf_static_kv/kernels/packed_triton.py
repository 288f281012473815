"""Linear layers of packed weights in Triton. See packed.py for the formula, and packed_codes_triton.py
for the sums of products.

`packed_linear_one_token`: a thread reads runs of four words with one scale, or of one word if the
format does not allow that. It sums the products of a run in float32, multiplies by the scale, and
adds. Tiles are loaded before the wait for x, and each further one before the one at hand is used.
What is before and after the sum is that of `linear_few_tokens` in linear_triton.py.

`packed_linear_few_tokens`, for up to 16 tokens: tensor cores multiply the codes at one position of
all words, [TILE_N, WORDS], by the inputs of that position, [WORDS, TILE_M]. A weight with groups is
rounded to the dtype of x first, as packages do that unpack it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.linear_triton import epilogue, finish_sum, output_sizes, padded
from hf_static_kv.kernels.norm_triton import TritonNorm, norm_arguments
from hf_static_kv.kernels.packed import LAYOUTS, TRANSPOSED, Packed
from hf_static_kv.kernels.packed_codes_triton import (
    Format,
    columns_of,
    load_lanes,
    load_tile,
    load_x,
    pick_packed,
    products,
    row_scale,
    runs_ptx,
    scaled,
    value_of,
)
from hf_static_kv.kernels.packed_transposed_triton import packed_transposed_triton


@triton.jit
def packed_linear_one_token(
    x, y, norm_weight, residual, table, w0, w1, w2, s0, s1, s2, z0, z1, z2, t0, t1, t2, a0, a1, a2,
    o0, o1, o2, b0, b1, b2, n0, n1, n2, r0, r1, r2, g0, g1, g2, K, factor, midpoint, eps, offset,
    TILE_N: tl.constexpr, WORDS: tl.constexpr, FORMAT: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    second = (w1, b1, n1, s1, z1, t1, a1, o1, r1, g1)
    own, n_start, y_start = pick_packed(
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
    tile = load_tile(own, row, tl.minimum(run, runs - 1), N, K, FORMAT)
    if IS_GATED:  # the first weight is the gate and the second is up
        up_tile = load_tile(second, row, tl.minimum(run, runs - 1), N, K, FORMAT)
    lanes = load_lanes(table, FORMAT)
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
            next_tile = load_tile(own, row, following, N, K, FORMAT)
            if IS_GATED:
                next_up_tile = load_tile(second, row, following, N, K, FORMAT)
        is_inside = FORMAT.is_even | (at < runs)
        inside = at if FORMAT.is_even else tl.minimum(at, runs - 1)
        xs, x_sum, new = load_x(x, norm_weight, offset, inside, HAS_NORM, FORMAT)
        squares += tl.where(is_inside, new, 0.0)
        sums = products(tile, xs, x_sum, table, lanes, midpoint, factor, FORMAT)
        total += tl.where(is_inside, sums, 0.0)
        if IS_GATED:
            sums = products(up_tile, xs, x_sum, table, lanes, midpoint, factor, FORMAT)
            up += tl.where(is_inside, sums, 0.0)
        if not IS_WHOLE:
            tile = next_tile
            if IS_GATED:
                up_tile = next_up_tile
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps) if HAS_NORM else 1.0
    result = tl.sum(total, 1) * row_scale(own, n, N, factor, FORMAT)
    result = finish_sum(result, scale, bias, HAS_NORM, HAS_BIAS)
    by = 1.0
    if IS_GATED:
        by = tl.sum(up, 1) * row_scale(second, n, N, factor, FORMAT)
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
    own, n_start, y_start = pick_packed(
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
    lanes = load_lanes(table, FORMAT)
    pdl_sync(PDL)
    for start in tl.range(0, K // IN_WORD, WORDS):
        word = (start + tl.arange(0, WORDS))[:, None]
        inside = tl.minimum(start + tl.arange(0, WORDS)[None, :], K // IN_WORD - 1)
        words, scale, zero = load_tile(own, row, inside, N, K, FORMAT)
        if IS_GATED:
            up_words, up_scale, up_zero = load_tile(second, row, inside, N, K, FORMAT)
        for i in tl.static_range(IN_WORD):
            at = x + m.to(tl.int64) * K + columns_of(word, i, FORMAT)
            x_tile = tl.load(at, mask=(m < M) & (word < K // IN_WORD), other=0.0)
            value = value_of(words[0], i, table, lanes, midpoint, FORMAT)
            weight = scaled(value, 1.0, scale, zero, factor, FORMAT).to(dtype)
            total = tl.dot(weight, x_tile, total, input_precision="ieee")
            if IS_GATED:
                value = value_of(up_words[0], i, table, lanes, midpoint, FORMAT)
                weight = scaled(value, 1.0, up_scale, up_zero, factor, FORMAT).to(dtype)
                up = tl.dot(weight, x_tile, up, input_precision="ieee")
    total *= row_scale(own, n, N, factor, FORMAT)[:, None]
    result = finish_sum(total, 1.0, bias, False, HAS_BIAS)
    by = 1.0
    if IS_GATED:
        up *= row_scale(second, n, N, factor, FORMAT)[:, None]
        by = finish_sum(up, 1.0, up_bias, False, HAS_BIAS)
    result = epilogue(result, by, 0.0, dtype, ACTIVATION, IS_GATED, False)
    width = n0 if IS_GATED else n0 + n1 + n2
    at = y + m.to(tl.int64) * width + y_start + n[:, None]
    tl.store(at, result.to(dtype), mask=(m < M) & (n[:, None] < N))


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
    dim = x.shape[-1]
    has_more = norm is not None or residual is not None or (activation and not is_gated)
    if x.numel() > dim and has_more:
        raise ValueError("Several tokens have no norm, residual or activation: run these apart.")
    if weights[0].layout in TRANSPOSED:
        layer = weights, biases, norm, activation, is_gated, residual
        return packed_transposed_triton(x, *layer)
    sizes = output_sizes(weights, is_gated)
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    if x.numel() > dim:
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
            x, weights[0], words, _run(weights), runs_ptx(x), _is_aligned(x, norm_weight)
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
        is_shuffled=packed.table is not None and runs_ptx(x),
        is_nested=packed.nested is not None,
        zeros="" if packed.zeros is None else "added" if packed.added else "subtracted",
        is_even=_words_of_row(packed) % words == 0,
        in_ptx=in_ptx,
        has_pairs=in_ptx and has_pairs,
    )


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
