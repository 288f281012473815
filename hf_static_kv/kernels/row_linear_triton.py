"""Linear layers for any number of rows in Triton, each row with the bits that it would have alone.

The sum over K has one order, always. Stretches of 64 are dealt out to four parts; each part is summed by the tensor
cores from left to right, and then the parts are, one after the other:

    K = | part 0 | part 1 | part 2 | part 3 | part 0 | part 1 | ...

    few     a program has 16 rows of the weight and 8 or 16 of x, each of its four warps a part, so that there is
            enough on its way from the memory
    many    a program has 64 rows of the weight and 64 of x, and goes through one part after the other

Both give a sum the same bits, though tensor cores are told in different ways to compute it. That is measured (H200,
bfloat16 and float16) and no promise of the hardware: tests/test_row_kernels.py looks at it on the device that it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch, let_next_begin, wait_for_previous
from hf_static_kv.kernels.linear_triton import activated, which

STRETCH = tl.constexpr(64)
_FEW = 64  # up to so many rows of x are few
_TILE_OF_FEW, _TILE_OF_MANY = 16, 64
_SIDE_BY_SIDE = tl.constexpr(8)  # tiles of x that are computed next to each other, with the weights that they share


@triton.jit
def _few(
    x, y, w0, w1, w2, b0, b1, b2, n0, n1, n2, M, K, w_n, w_k,
    TILE: tl.constexpr, TILE_M: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    w, b, rows, begin, at = which(tl.program_id(1), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE)
    begin_m = tl.program_id(0).to(tl.int64) * TILE_M
    n, m = begin + tl.arange(0, TILE)[None, :, None], begin_m + tl.arange(0, TILE_M)[None, None, :]
    part = tl.arange(0, 4)[:, None, None] * STRETCH
    k_w, k_x = part + tl.arange(0, STRETCH)[None, None, :], part + tl.arange(0, STRETCH)[None, :, None]
    w_at, x_at = n.to(tl.int64) * w_n + k_w.to(tl.int64) * w_k, x + m * K + k_x
    total, up = tl.zeros((4, TILE, TILE_M), tl.float32), tl.zeros((4, TILE, TILE_M), tl.float32)
    if EARLY and ACTIVATION == "":
        _ask_for(w, begin, rows, K, w_n, w_k, TILE)
    wait_for_previous(EARLY)
    if ACTIVATION == "":
        let_next_begin(EARLY)
    for k in tl.range(0, K, STRETCH * 4, num_stages=STAGES):
        x_here, w_here = m < M, n < rows
        if not EVEN:
            x_here, w_here = x_here & (k + k_x < K), w_here & (k + k_w < K)
        x_tile, at_k = tl.load(x_at + k, mask=x_here, other=0.0), w_at + tl.cast(k, tl.int64) * w_k
        total = tl.dot(tl.load(w + at_k, mask=w_here, other=0.0), x_tile, total, input_precision="ieee")
        if ACTIVATION != "":
            up = tl.dot(tl.load(w1 + at_k, mask=w_here, other=0.0), x_tile, up, input_precision="ieee")
    if ACTIVATION != "":  # not before: in a whole step that was 3 % slower
        let_next_begin(EARLY)
    n, m = begin + tl.arange(0, TILE)[:, None], begin_m + tl.arange(0, TILE_M)[None, :]
    total = _sum_of_parts(total, TILE, TILE_M)
    up = _sum_of_parts(up, TILE, TILE_M) if ACTIVATION != "" else total
    result = _finished(total, up, b, n, rows, y, HAS_BIAS, ACTIVATION)
    width = n0 if ACTIVATION != "" else n0 + n1 + n2
    tl.store(y + m * width + at + n, result, mask=(m < M) & (n < rows))


@triton.jit
def _many(
    x, y, w, w1, b, N, M, K, w_n, w_k,
    TILE: tl.constexpr, STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, TILE), tl.cdiv(N, TILE)
    first = tl.program_id(0) // (_SIDE_BY_SIDE * tiles_n) * _SIDE_BY_SIDE
    inside, wide = tl.program_id(0) % (_SIDE_BY_SIDE * tiles_n), tl.minimum(tiles_m - first, _SIDE_BY_SIDE)
    m = (first + inside % wide) * TILE + tl.arange(0, TILE)[:, None]
    n = inside // wide * TILE + tl.arange(0, TILE)[None, :]
    w_row, x_row = n.to(tl.int64) * w_n, m.to(tl.int64) * K
    total, up = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
    after_previous(EARLY)
    for part in range(4):
        part_of_total, part_of_up = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
        for begin_k in tl.range(part * STRETCH, K, STRETCH * 4, num_stages=STAGES):
            k = begin_k + tl.arange(0, STRETCH)
            x_tile = tl.load(x + x_row + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
            w_at, w_here = w_row + k[:, None].to(tl.int64) * w_k, (n < N) & (k[:, None] < K)
            w_tile = tl.load(w + w_at, mask=w_here, other=0.0)
            part_of_total = tl.dot(x_tile, w_tile, part_of_total, input_precision="ieee")
            if ACTIVATION != "":
                up_tile = tl.load(w1 + w_at, mask=w_here, other=0.0)
                part_of_up = tl.dot(x_tile, up_tile, part_of_up, input_precision="ieee")
        total, up = total + part_of_total, up + part_of_up
    result = _finished(total, up, b, n, N, y, HAS_BIAS, ACTIVATION)
    tl.store(y + m.to(tl.int64) * N + n, result, mask=(m < M) & (n < N))


@triton.jit
def _ask_for(w, begin, rows, K, w_n, w_k, TILE: tl.constexpr):
    """Have the first kilobyte of each of these rows on its way to the chip, which reads 128 bytes at a time."""
    n = tl.minimum(begin + tl.arange(0, TILE)[:, None], rows - 1).to(tl.int64)
    k = tl.minimum(tl.arange(0, 8)[None, :] * (1024 // w.dtype.element_ty.primitive_bitwidth), K - 1)
    at = (w + n * w_n + k * w_k).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _sum_of_parts(parts, TILE: tl.constexpr, TILE_M: tl.constexpr):
    """The sum over the first of [4, TILE, TILE_M], in its order."""
    even, odd = tl.split(tl.reshape(tl.permute(parts, (1, 2, 0)), (TILE, TILE_M, 2, 2)))
    part0, part2 = tl.split(even)
    part1, part3 = tl.split(odd)
    return part0 + part1 + part2 + part3


@triton.jit
def _finished(total, up, b, n, rows, y, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """The sums with the bias or the activation, in the dtype of y."""
    dtype = y.dtype.element_ty
    if HAS_BIAS:  # rounded before as well: torch adds the bias by itself where the input is not contiguous
        total = total.to(dtype).to(tl.float32) + tl.load(b + n, mask=n < rows, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        total = activated(total.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        total *= up.to(dtype).to(tl.float32)
    return total.to(dtype)


def row_linears_triton(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`x` [..., K] times each of the weights, side by side; weights in one launch where these can be."""
    sizes = [weight.shape[0] for weight in weights]
    alike = len({weight.stride() for weight in weights}) == 1
    if len(weights) > 1 and (_are_many(x) or not alike):
        return torch.cat([row_linears_triton(x, [w], biases[i : i + 1]) for i, w in enumerate(weights)], dim=-1)
    y = torch.empty(*x.shape[:-1], sum(sizes), dtype=x.dtype, device=x.device)
    if _are_many(x):
        _launch_many(x.contiguous(), y, weights[0], weights[0], biases[0] if biases else None, "")
    else:
        _launch_few(x.contiguous(), y, weights, biases, sizes, "")
    return y


def row_gated_triton(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation` of `x` times `gate`, times `x` times `up`; both of the same strides."""
    y = torch.empty(*x.shape[:-1], gate.shape[0], dtype=x.dtype, device=x.device)
    if _are_many(x):
        _launch_many(x.contiguous(), y, gate, up, None, activation)
    else:
        _launch_few(x.contiguous(), y, [gate, up], [], [gate.shape[0]], activation)
    return y


def row_linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One weight, by any strides."""
    return row_linears_triton(x, [weight], [] if bias is None else [bias])


def _are_many(x: torch.Tensor) -> bool:
    """More than a few, and in half precision: large tiles are for the tensor cores, which float32 does without."""
    return x.numel() > _FEW * x.shape[-1] and x.element_size() == 2


def _launch_few(
    x: torch.Tensor,
    y: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    sizes: list[int],
    activation: str,
) -> None:
    dim, stride = x.shape[-1], weights[0].stride()
    rows = x.numel() // dim
    tile_m = 8 if rows <= 8 else 16
    pointers = [*weights, *[x] * (3 - len(weights)), *biases, *[x] * (3 - len(biases))]
    # Programs that read the same rows of the weight stand side by side.
    grid = (triton.cdiv(rows, tile_m), sum(triton.cdiv(size, _TILE_OF_FEW) for size in sizes))
    launch(
        _few, grid, x, x, y, *pointers, *sizes, *[0] * (3 - len(sizes)), rows, dim, *stride,
        TILE=_TILE_OF_FEW, TILE_M=tile_m, STAGES=_stages(sum(sizes), dim, tile_m, x.element_size(), activation),
        EVEN=dim % (4 * STRETCH.value) == 0, HAS_BIAS=bool(biases), ACTIVATION=activation, num_warps=4,
    )  # fmt: skip


def _stages(size: int, dim: int, tile_m: int, bytes_of_one: int, activation: str) -> int:
    """How many tiles of the weight are on their way at once: where programs are few, each has to read more.

    No more than a program has. All fit into the 99 KiB of shared memory that the smaller GPUs have.

    Chosen on an H200 for the dev models: of 2 to 12 by each linear layer alone, then of eight combinations by whole
    steps of the three, for one row and for eight.
    """
    if bytes_of_one == 4:
        return 2  # what fits
    if activation:
        return 3
    tiles: int = triton.cdiv(dim, 4 * STRETCH.value)
    return min(tiles, 4 if size > 4096 else 8 if tile_m == 8 else 6)


def _launch_many(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> None:
    size, dim = weight.shape
    rows, tile = x.numel() // dim, _TILE_OF_MANY
    launch(
        _many, (triton.cdiv(rows, tile) * triton.cdiv(size, tile),), x,
        x, y, weight, up, x if bias is None else bias, size, rows, dim, *weight.stride(),
        TILE=tile, STAGES=3, HAS_BIAS=bias is not None, ACTIVATION=activation, num_warps=4,
    )  # fmt: skip
