"""Linear layers of packed weights with outputs side by side, in Triton. See packed.py for the layouts.

`packed_transposed_one_token`: a thread has a cell, some inputs of a group and 4 (gptq) or 8 (awq)
outputs. It loads the words of the cell along K, so that the threads beside it read the words beside
them. A code and its zero at one place of a word are subtracted where they are, exactly:

    word & 15 << 4 i | bits of 2 ** 23   =   2 ** 23 + code * 16 ** i          i = 0 .. 3

The sum of a cell is multiplied by its scale, and cells are added in float32. Loads of the first
cells begin before the wait for x. If few outputs side by side would leave multiprocessors without
work, several instances read a part of K each; the last of them adds the parts in their order.

`packed_transposed_few_tokens`, for up to 16 tokens: tensor cores, as `packed_linear_few_tokens`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.linear_triton import (
    add_parts,
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

_INTEGER_BITS = tl.constexpr(0x4B000000)  # of 2 ** 23, as in packed_codes_triton.py
_LOAD_WORDS = tl.constexpr("ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_FOUR = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_WORD = tl.constexpr("ld.global.L1::no_allocate.b32 $0, [$1];")
_LOAD_ZEROS = tl.constexpr("ld.global.b32 $0, [$1];")
_CHOOSE = tl.constexpr("lop3.b32 $0, $1, $2, 0x4B000000, 0xEA;")  # a & b | bits of 2 ** 23
_LOAD_TWO = tl.constexpr("ld.global.v2.b32 {$0, $1}, [$2];")


class Cells(NamedTuple):
    """What the kernels are compiled for."""

    layout: str
    run: int  # inputs of a cell, in eights
    outputs: int  # of a cell
    group: int
    midpoint: int
    is_even: bool  # parts of K end with a tile
    in_ptx: bool  # loads
    has_pairs: bool  # inputs of 16 bits may be loaded as pairs, 16 bytes at once
    in_word: int = 8


@triton.jit
def packed_transposed_one_token(
    x, y, norm_weight, residual, sums, counters, w0, w1, w2, s0, s1, s2, z0, z1, z2, b0, b1, b2,
    n0, n1, n2, K, runs_of_part, eps, offset,
    LANES: tl.constexpr, RUNS: tl.constexpr, CELLS: tl.constexpr, PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TILE_N: tl.constexpr = LANES * CELLS.outputs
    second = (w1, b1, n1, s1, z1)
    own, n_start, y_start = pick_packed(
        (w0, b0, n0, s0, z0), second, (w2, b2, n2, s2, z2), TILE_N, IS_GATED
    )
    N = own[2]
    part = tl.program_id(1)
    n = n_start + tl.arange(0, TILE_N)
    lane = n_start // CELLS.outputs + tl.arange(0, LANES)[None, :]
    lane = tl.minimum(lane, N // CELLS.outputs - 1)
    run = part * runs_of_part + tl.arange(0, RUNS)[:, None]
    end = tl.minimum((part + 1) * runs_of_part, K // (8 * CELLS.run))
    cell = _load_cell(own, lane, tl.minimum(run, end - 1), N, CELLS)
    up_cell = cell
    if IS_GATED:  # the first weight is the gate and the second is up
        up_cell = _load_cell(second, lane, tl.minimum(run, end - 1), N, CELLS)
    bias = tl.load(own[1] + n, mask=n < N, other=0.0) if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0) if HAS_BIAS and IS_GATED else 0.0
    pdl_sync(PDL)
    residual_tile = tl.load(residual + y_start + n, mask=n < N, other=0.0) if HAS_RESIDUAL else 0.0
    total, up, squares = _sums_of_runs(
        x, norm_weight, offset, own, second, cell, up_cell, lane, part * runs_of_part, end,
        RUNS, LANES, CELLS, HAS_NORM, IS_GATED,
    )  # fmt: skip
    result = tl.sum(_side_by_side(total, CELLS), 0)
    up_result = tl.sum(_side_by_side(up, CELLS), 0) if IS_GATED else result
    square = tl.sum(tl.sum(squares, 1), 0)
    is_last = True
    if PARTS > 1:
        block = tl.program_id(0)
        size = n0 + n1 + n2
        width = 2 * size if IS_GATED else size
        own_sums = sums + y_start + n
        tl.store(own_sums + part * width, result, mask=n < N)
        if IS_GATED:
            tl.store(own_sums + size + part * width, up_result, mask=n < N)
        squares_of_parts = sums + PARTS * width + block * PARTS + tl.arange(0, PARTS)
        if HAS_NORM:
            tl.store(sums + PARTS * width + block * PARTS + part, square)
        is_last = _is_last(counters + block, PARTS)
    if is_last:
        if PARTS > 1:
            result = add_parts(sums + y_start, n, N, width, PARTS, TILE_N, PARTS)
            if IS_GATED:
                up_result = add_parts(sums + size + y_start, n, N, width, PARTS, TILE_N, PARTS)
            if HAS_NORM:
                square = tl.sum(tl.load(squares_of_parts, cache_modifier=".cg"), 0)
        scale = tl.rsqrt(square / K + eps) if HAS_NORM else 1.0
        result = finish_sum(result, scale, bias, HAS_NORM, HAS_BIAS)
        by = finish_sum(up_result, scale, up_bias, HAS_NORM, HAS_BIAS) if IS_GATED else 1.0
        dtype: tl.constexpr = y.dtype.element_ty
        result = epilogue(result, by, residual_tile, dtype, ACTIVATION, IS_GATED, HAS_RESIDUAL)
        tl.store(y + y_start + n, result.to(dtype), mask=n < N)


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
def _sums_of_runs(
    x, norm_weight, offset, own, second, cell, up_cell, lane, begin, end,
    RUNS: tl.constexpr, LANES: tl.constexpr, CELLS: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
):  # fmt: skip
    """The sums of both weights over a part of K, before threads are added; and those of x^2."""
    SCALE: tl.constexpr = own[3].dtype.element_ty
    N = own[2]
    total = _no_sums(RUNS, LANES, CELLS.outputs)
    up = _no_sums(RUNS, LANES, CELLS.outputs)
    squares = tl.zeros((RUNS, 1), tl.float32)
    for start in tl.range(begin, end, RUNS):
        at = start + tl.arange(0, RUNS)[:, None]
        following = tl.minimum(
            at + RUNS, end - 1
        )  # behind the end the last again, which is not added
        next_cell = _load_cell(own, lane, following, N, CELLS)
        if IS_GATED:
            next_up_cell = _load_cell(second, lane, following, N, CELLS)
        is_inside = CELLS.is_even | (at < end)
        inside = at if CELLS.is_even else tl.minimum(at, end - 1)
        xs, new = _load_x(x, norm_weight, offset, inside, HAS_NORM, CELLS)
        squares += tl.where(is_inside, new, 0.0)
        total = _added(total, _products(cell, xs, SCALE, CELLS), is_inside, CELLS)
        cell = next_cell
        if IS_GATED:
            up = _added(up, _products(up_cell, xs, SCALE, CELLS), is_inside, CELLS)
            up_cell = next_up_cell
    return total, up, squares


@triton.jit
def _load_cell(weight, lane, run, N, CELLS: tl.constexpr):
    """Words of each cell, [runs, lanes]; the bits of its scales; the word with its zeros."""
    RUN: tl.constexpr = CELLS.run
    words = ()
    if CELLS.layout == "gptq":
        at = weight[0] + (run * RUN).to(tl.int64) * N + lane * 4
        for j in tl.static_range(RUN):
            words += _four_words(at + j * N, CELLS)
    else:
        at = weight[0] + (run * (RUN * 8)).to(tl.int64) * (N // 8) + lane
        for j in tl.static_range(RUN * 8):
            if CELLS.in_ptx:
                words += (load_word(at + j * (N // 8), _LOAD_WORD),)  # type: ignore[assignment]
            else:
                words += (tl.load(at + j * (N // 8)),)  # type: ignore[assignment]
    group = (run * (RUN * 8) // CELLS.group).to(tl.int64)
    scales = _load_scales(weight[3] + group * N + lane * CELLS.outputs, CELLS)
    at = weight[4] + group * (N // 8) + (lane >> 1 if CELLS.layout == "gptq" else lane)
    zeros = load_word(at, _LOAD_ZEROS) if CELLS.in_ptx else tl.load(at)
    if CELLS.layout == "gptq":
        zeros = zeros >> (lane & 1) * 16
    return words, scales, zeros


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
    elif CELLS.outputs == 8:
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


@triton.jit
def _load_x(x, norm_weight, offset, run, HAS_NORM: tl.constexpr, CELLS: tl.constexpr):
    """The inputs of each cell, [runs, 1], eight of each word together; the sum of their squares."""
    RUN: tl.constexpr = CELLS.run
    inputs = ()
    squares = tl.zeros(run.shape, tl.float32)
    for j in tl.static_range(RUN):
        xs = load_inputs(x, run * RUN + j, CELLS)
        if HAS_NORM:
            weights = load_inputs(norm_weight, run * RUN + j, CELLS)
        finished = ()
        for i in tl.static_range(8):
            value = xs[i]
            if HAS_NORM:
                squares += value * value
                value *= offset + weights[i]
            if CELLS.layout == "gptq":  # codes count 16 ** (i % 4) times
                value *= 0.0625 ** (i % 4)
            finished += (value,)  # type: ignore[assignment]
        inputs += (finished,)  # type: ignore[assignment]
    return inputs, squares


@triton.jit
def _products(cell, xs, SCALE: tl.constexpr, CELLS: tl.constexpr):
    """The sum of the products of each cell and output."""
    RUN: tl.constexpr = CELLS.run
    OUTPUTS: tl.constexpr = CELLS.outputs
    words, scales, zeros = cell
    sums = ()
    for c in tl.static_range(OUTPUTS):
        total = tl.zeros(zeros.shape, tl.float32)
        if CELLS.layout == "gptq":  # an output has a word, and its inputs eight places
            zero = (zeros >> 4 * c & 15) + CELLS.midpoint
            for j in tl.static_range(RUN):
                for i in tl.static_range(8):
                    value = _at_place(words[4 * j + c], i, CELLS) - _number(zero << 4 * (i % 4))
                    total += value * xs[j][i]
            sums += (total * _scale_of(scales, c, SCALE, CELLS),)  # type: ignore[assignment]
        else:  # each output has a place of all words
            zero = _at_place(zeros, c, CELLS) + CELLS.midpoint * 16.0 ** (c % 4)
            for k in tl.static_range(8 * RUN):
                total += (_at_place(words[k], c, CELLS) - zero) * xs[k // 8][k % 8]
            scale = _scale_of(scales, c % 4 * 2 + c // 4, SCALE, CELLS)  # AWQ_ROWS[c]
            sums += (total * (scale * 0.0625 ** (c % 4)),)  # type: ignore[assignment]
    return sums


@triton.jit
def _at_place(word, i: tl.constexpr, CELLS: tl.constexpr):
    """2 ** 23 and the code at place i of a word, 16 ** (i % 4) times."""
    half = word.to(tl.uint32, bitcast=True) >> 16 if i >= 4 else word.to(tl.uint32, bitcast=True)
    if CELLS.in_ptx:  # Triton would make two instructions of it
        return tl.inline_asm_elementwise(
            _CHOOSE, "=f,r,r", [half, 15 << 4 * (i % 4)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return _number(half & (15 << 4 * (i % 4)))


@triton.jit
def _number(integer):
    """2 ** 23 and an integer, exactly."""
    return (integer | _INTEGER_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _no_sums(RUNS: tl.constexpr, LANES: tl.constexpr, OUTPUTS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(OUTPUTS):
        sums += (tl.zeros((RUNS, LANES), tl.float32),)  # type: ignore[assignment]
    return sums


@triton.jit
def _added(sums, new, is_inside, CELLS: tl.constexpr):
    OUTPUTS: tl.constexpr = CELLS.outputs
    both = ()
    for i in tl.static_range(OUTPUTS):
        both += (sums[i] + tl.where(is_inside, new[i], 0.0),)  # type: ignore[assignment]
    return both


@triton.jit
def _side_by_side(sums, CELLS: tl.constexpr):
    """[runs, lanes] of each output of a cell as [runs, outputs]."""
    if CELLS.layout == "gptq":
        both = _four_side_by_side(sums[0], sums[1], sums[2], sums[3])
    else:  # rows 0, 2, 4, 6, and 1, 3, 5, 7
        both = tl.join(
            _four_side_by_side(sums[0], sums[1], sums[2], sums[3]),
            _four_side_by_side(sums[4], sums[5], sums[6], sums[7]),
        )
    return tl.reshape(both, (sums[0].shape[0], sums[0].shape[1] * CELLS.outputs))


@triton.jit
def _four_side_by_side(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def packed_transposed_few_tokens(
    x, y, w0, w1, w2, s0, s1, s2, z0, z1, z2, b0, b1, b2, n0, n1, n2, M, K,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr, CELLS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    second = (w1, b1, n1, s1, z1)
    own, n_start, y_start = pick_packed(
        (w0, b0, n0, s0, z0), second, (w2, b2, n2, s2, z2), TILE_N, IS_GATED
    )
    N = own[2]
    n = n_start + tl.arange(0, TILE_N)
    m = tl.arange(0, TILE_M)[:, None]
    dtype = y.dtype.element_ty
    bias = tl.load(own[1] + n, mask=n < N, other=0.0)[None, :] if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0)[None, :] if HAS_BIAS and IS_GATED else 0.0
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    up = tl.zeros((TILE_M, TILE_N), tl.float32)
    STEPS: tl.constexpr = 8 if CELLS.layout == "gptq" else 1  # products with inputs of one tile
    pdl_sync(PDL)
    for start in tl.range(0, K, STEPS * TILE_K):
        tile = _load_tile(own, n_start, start, N, K, TILE_N, TILE_K, CELLS)
        if IS_GATED:
            up_tile = _load_tile(second, n_start, start, N, K, TILE_N, TILE_K, CELLS)
        for i in tl.static_range(STEPS):
            k = start + i + tl.arange(0, TILE_K)[None, :] * STEPS
            x_tile = tl.load(x + m.to(tl.int64) * K + k, mask=(m < M) & (k < K), other=0.0)
            weight = _weights_of(tile, i, CELLS).to(dtype)
            total = tl.dot(x_tile, weight, total, input_precision="ieee")
            if IS_GATED:
                weight = _weights_of(up_tile, i, CELLS).to(dtype)
                up = tl.dot(x_tile, weight, up, input_precision="ieee")
    result = finish_sum(total, 1.0, bias, False, HAS_BIAS)
    by = finish_sum(up, 1.0, up_bias, False, HAS_BIAS) if IS_GATED else 1.0
    result = epilogue(result, by, 0.0, dtype, ACTIVATION, IS_GATED, False)
    width = n0 if IS_GATED else n0 + n1 + n2
    at = y + m.to(tl.int64) * width + y_start + n[None, :]
    tl.store(at, result.to(dtype), mask=(m < M) & (n[None, :] < N))


@triton.jit
def _load_tile(
    weight, n_start, k_start, N, K, TILE_N: tl.constexpr, TILE_K: tl.constexpr, CELLS: tl.constexpr
):
    """Words of outputs beside each other, their scales, and the words of their zeros.

    A row of a tile is a word (gptq) or an input (awq).
    """
    n = (n_start + tl.arange(0, TILE_N))[None, :]
    if CELLS.layout == "gptq":
        row = (k_start // 8 + tl.arange(0, TILE_K))[:, None]
        is_inside = (n < N) & (row < K // 8)
        words = tl.load(weight[0] + row.to(tl.int64) * N + n, mask=is_inside, other=0)
        group = row * 8 // CELLS.group * N
        scale = tl.load(weight[3] + group + n, mask=is_inside, other=0.0).to(tl.float32)
        zeros = tl.load(weight[4] + group // 8 + (n >> 3), mask=is_inside, other=0)
        zeros = (zeros >> (n & 7) * 4 & 15) + CELLS.midpoint
    else:  # a tile is of one group
        row = (k_start + tl.arange(0, TILE_K))[:, None]
        word = (n_start // 8 + tl.arange(0, TILE_N // 8))[None, :]
        at = weight[0] + row.to(tl.int64) * (N // 8) + word
        words = tl.load(at, mask=word < N // 8, other=0)
        group = k_start // CELLS.group * N
        scale = tl.load(weight[3] + group + n, mask=n < N, other=0.0).to(tl.float32)
        # Codes count 16 ** place times.
        scale *= tl.exp2(((n >> 1 & 3) * -4).to(tl.float32))
        zeros = tl.load(weight[4] + group // 8 + word, mask=word < N // 8, other=0)
    return words, scale, zeros


@triton.jit
def _weights_of(tile, i: tl.constexpr, CELLS: tl.constexpr):
    """The weights at place i of the words (gptq), or at all places (awq), in float32."""
    words, scale, zeros = tile
    if CELLS.layout == "gptq":
        codes = _at_place(words, i, CELLS) - _number(zeros << 4 * (i % 4))
        return codes * (scale * 0.0625 ** (i % 4))
    else:
        codes = tl.join(_four_places(words, zeros, 0, CELLS), _four_places(words, zeros, 4, CELLS))
        return tl.reshape(codes, (words.shape[0], words.shape[1] * 8)) * scale


@triton.jit
def _four_places(words, zeros, first: tl.constexpr, CELLS: tl.constexpr):
    return _four_side_by_side(
        _at_place(words, first, CELLS) - _at_place(zeros, first, CELLS),
        _at_place(words, first + 1, CELLS) - _at_place(zeros, first + 1, CELLS),
        _at_place(words, first + 2, CELLS) - _at_place(zeros, first + 2, CELLS),
        _at_place(words, first + 3, CELLS) - _at_place(zeros, first + 3, CELLS),
    )


# --- launchers


def packed_transposed_triton(
    x: Tensor,
    weights: Sequence[Packed],
    biases: Sequence[Tensor],
    norm: TritonNorm | None = None,
    activation: str = "",
    is_gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """As `packed_linears_triton`, which calls it for transposed layouts."""
    x = x.contiguous()
    sizes = output_sizes(weights, is_gated)
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    dim = x.shape[-1]
    if x.numel() > dim:
        _launch_few(x, y, weights, biases, activation, is_gated)
        return y
    (norm_weight, _), numbers, _ = norm_arguments(norm, x)
    norm_weight = norm_weight.contiguous()
    lanes, runs, run, parts, warps = _tiles(weights[0], is_gated)
    cells = _cells(x, weights[0], run, _is_aligned(x, norm_weight))
    blocks = sum(triton.cdiv(size, lanes * cells.outputs) for size in sizes)
    runs_of_row = dim // (8 * run)
    runs_of_part = triton.cdiv(runs_of_row, parts)
    cells = cells._replace(
        is_even=runs_of_row % runs_of_part == 0 and runs_of_part % runs == 0,
    )
    sums = counters = x
    if parts > 1:
        columns = sum(sizes) * (2 if is_gated else 1) + blocks
        sums = x.new_empty(parts * columns, dtype=torch.float32)
        counters = counters_of(x, blocks)
    launch(
        packed_transposed_one_token, (blocks, parts), x, y, norm_weight,
        x if residual is None else residual.contiguous(), sums, counters,
        *_arguments(x, weights, biases, sizes), dim, runs_of_part, *numbers,
        LANES=lanes, RUNS=runs, CELLS=cells, PARTS=parts, HAS_NORM=norm is not None,
        HAS_BIAS=bool(biases), ACTIVATION=activation, IS_GATED=is_gated,
        HAS_RESIDUAL=residual is not None, num_warps=warps,
    )  # fmt: skip
    return y


def _launch_few(
    x: Tensor, y: Tensor, weights: Sequence[Packed], biases: Sequence[Tensor], activation: str,
    is_gated: bool,
) -> None:  # fmt: skip
    dim = x.shape[-1]
    sizes = output_sizes(weights, is_gated)
    tile_n, tile_k, warps, stages = _tile_of_few(weights[0], is_gated)
    launch(
        packed_transposed_few_tokens, (sum(triton.cdiv(size, tile_n) for size in sizes),), x, y,
        *_arguments(x, weights, biases, sizes), x.numel() // dim, dim,
        TILE_N=tile_n, TILE_M=16, TILE_K=tile_k, CELLS=_cells(x, weights[0], 1, False),
        HAS_BIAS=bool(biases), ACTIVATION=activation, IS_GATED=is_gated, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip


def _arguments(
    x: Tensor, weights: Sequence[Packed], biases: Sequence[Tensor], sizes: Sequence[int]
) -> list[Any]:
    """What the kernels take of each weight."""
    return [
        *padded(weights[0].codes.detach(), [weight.codes.detach() for weight in weights]),
        *padded(weights[0].scales, [weight.scales for weight in weights]),
        *padded(weights[0].zeros, [weight.zeros for weight in weights]),
        *padded(x, biases),
        *padded(0, sizes),
    ]


def _cells(x: Tensor, packed: Packed, run: int, is_aligned: bool) -> Cells:
    in_ptx = runs_ptx(x)
    return Cells(
        layout=packed.layout,
        run=run,
        outputs=4 if packed.layout == "gptq" else 8,
        group=packed.group,
        midpoint=packed.midpoint,
        is_even=True,
        in_ptx=in_ptx,
        has_pairs=in_ptx and is_aligned,
    )


def _is_aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _tiles(packed: Packed, is_gated: bool) -> tuple[int, int, int, int, int]:
    """LANES, RUNS, eights of inputs in a cell, PARTS, and warps of a launch for one token.

    By single launches of the shapes of Llama-3.1-8B with groups of 128, H200, 2026-11-19: the fastest
    of eleven, or nearly. A layer takes 63 us (gptq) and 73 us (awq), in bfloat16 107 us.
    """
    if packed.layout == "gptq":
        return (4, 32, 4, 1, 4) if is_gated else (4, 64, 4, 1, 8)
    return (8, 32, 1, 1, 8) if is_gated else (8, 32, 1, 4, 8)


def _tile_of_few(packed: Packed, is_gated: bool) -> tuple[int, int, int, int]:
    """TILE_N, TILE_K, warps and stages of a launch for several tokens.

    As above, for eight tokens, of four. A layer takes 586 us (gptq) and 175 us (awq), in bfloat16 114 us.
    """
    if packed.layout == "gptq":
        return 32, 16, 4, 3
    if is_gated:
        return 64, 64 if packed.group % 64 == 0 else 32, 4, 3
    return 32, next(size for size in (128, 64, 32) if packed.group % size == 0), 4, 3
