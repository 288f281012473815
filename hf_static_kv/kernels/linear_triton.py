"""Linear layers for few rows in Triton. What they compute is in linear.py.

One row: products in float32 on plain arithmetic units, one program for a few rows of the weight, which reads its first
tile before it waits for the kernel that makes x. More rows: tensor cores, sixteen rows to a program, with K dealt out
to the warps where there are too few programs to keep the memory busy. There a row's bits do not depend on the other
rows: tiles are chosen by the shape of the weight alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch, let_next_begin, wait_for_previous

_TILE_M = 16


@triton.jit
def _weights_tile(w, n, k, N, K, EVEN: tl.constexpr):
    """Rows n and columns k of a weight [N, K]; zero outside."""
    here = n[:, None] < N
    if not EVEN:
        here &= k[None, :] < K
    return tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], mask=here, other=0.0)


@triton.jit
def _which(block, w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N: tl.constexpr):
    """The weight that this block of rows belongs to: its pointer, bias, rows; the block in it; its place in y."""
    first = tl.cdiv(n0, TILE_N)
    second = first + tl.cdiv(n1, TILE_N)
    w, b, rows, begin, at = w0, b0, n0, 0, 0
    if block >= first:
        w, b, rows, begin, at = w1, b1, n1, first, n0
    if block >= second:
        w, b, rows, begin, at = w2, b2, n2, second, n0 + n1
    return w, b, rows, (block - begin) * TILE_N, at


@triton.jit
def _one_row(
    x, y, w0, w1, w2, b0, b1, b2, n0, n1, n2, K,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    w, b, rows, begin, at = _which(tl.program_id(0), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
    n, k = begin + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    tile = _weights_tile(w, n, k, rows, K, EVEN)
    after_previous(EARLY)
    total = tl.zeros((TILE_N, TILE_K), tl.float32)
    for begin_k in range(0, K - TILE_K, TILE_K):
        following = _weights_tile(w, n, begin_k + TILE_K + k, rows, K, EVEN)
        total += tile.to(tl.float32) * tl.load(x + begin_k + k).to(tl.float32)[None, :]
        tile = following
    k += (K - 1) // TILE_K * TILE_K
    total += tile.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(b + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(y + at + n, result.to(y.dtype.element_ty), mask=n < rows)


@triton.jit
def _gated_row(
    x, y, gate, up, N, K,
    ACTIVATION: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    g_tile, u_tile = _weights_tile(gate, n, k, N, K, EVEN), _weights_tile(up, n, k, N, K, EVEN)
    after_previous(EARLY)
    g, u = tl.zeros((TILE_N, TILE_K), tl.float32), tl.zeros((TILE_N, TILE_K), tl.float32)
    for begin_k in range(0, K - TILE_K, TILE_K):
        g_following = _weights_tile(gate, n, begin_k + TILE_K + k, N, K, EVEN)
        u_following = _weights_tile(up, n, begin_k + TILE_K + k, N, K, EVEN)
        part = tl.load(x + begin_k + k).to(tl.float32)[None, :]
        g += g_tile.to(tl.float32) * part
        u += u_tile.to(tl.float32) * part
        g_tile, u_tile = g_following, u_following
    k += (K - 1) // TILE_K * TILE_K
    part = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    g += g_tile.to(tl.float32) * part
    u += u_tile.to(tl.float32) * part
    dtype = y.dtype.element_ty
    a = _activate(tl.sum(g, 1).to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    tl.store(y + n, (a * tl.sum(u, 1).to(dtype).to(tl.float32)).to(dtype), mask=n < N)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # 1 + tanh, halved, without an overflow


@triton.jit
def _rows(
    x, y, w0, w1, w2, b0, b1, b2, n0, n1, n2, M, K, w_n, w_k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    w, b, rows, begin, at = _which(tl.program_id(1), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
    begin_m = tl.program_id(0).to(tl.int64) * TILE_M
    n, m = begin + tl.arange(0, TILE_N)[None, :, None], begin_m + tl.arange(0, TILE_M)[None, None, :]
    part = tl.arange(0, PARTS)[:, None, None] * TILE_K
    k_w, k_x = part + tl.arange(0, TILE_K)[None, None, :], part + tl.arange(0, TILE_K)[None, :, None]
    w_at, x_at = n.to(tl.int64) * w_n + k_w * w_k, x + m * K + k_x
    total, up = tl.zeros((PARTS, TILE_N, TILE_M), tl.float32), tl.zeros((PARTS, TILE_N, TILE_M), tl.float32)
    wait_for_previous(EARLY)
    for k in tl.range(0, K, TILE_K * PARTS, num_stages=STAGES):
        x_here, w_here = m < M, n < rows
        if not EVEN:
            x_here, w_here = x_here & (k + k_x < K), w_here & (k + k_w < K)
        x_tile = tl.load(x_at + k, mask=x_here, other=0.0)
        total = tl.dot(tl.load(w + w_at + k * w_k, mask=w_here, other=0.0), x_tile, total, input_precision="ieee")
        if ACTIVATION != "":
            up = tl.dot(tl.load(w1 + w_at + k * w_k, mask=w_here, other=0.0), x_tile, up, input_precision="ieee")
    # Only now: programs of the next kernel would take the place of this one's that have yet to begin.
    let_next_begin(EARLY)
    n, m = begin + tl.arange(0, TILE_N)[:, None], begin_m + tl.arange(0, TILE_M)[None, :]
    result = tl.sum(total, 0)
    if HAS_BIAS:  # rounded before as well: torch adds the bias by itself where the input is not contiguous
        result = result.to(y.dtype.element_ty).to(tl.float32)
        result += tl.load(b + n, mask=n < rows, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        dtype = y.dtype.element_ty
        a = _activate(result.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        result = a * tl.sum(up, 0).to(dtype).to(tl.float32)
    width = n0 if ACTIVATION != "" else n0 + n1 + n2
    tl.store(y + m * width + at + n, result.to(y.dtype.element_ty), mask=(m < M) & (n < rows))


def linears_triton(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    x = x.contiguous()
    dim, sizes = x.shape[-1], [weight.shape[0] for weight in weights]
    if x.numel() > dim:
        return row_linears_triton(x, weights, biases)
    absent = 3 - len(weights)
    y = torch.empty(*x.shape[:-1], sum(sizes), dtype=x.dtype, device=x.device)
    arguments = (x, y, *weights, *[x] * absent, *(biases or [x] * len(weights)), *[x] * absent, *sizes, *[0] * absent)
    tile_n, tile_k, warps = _tiles_of_one_row(sum(sizes), dim)
    launch(
        _one_row, (sum(triton.cdiv(size, tile_n) for size in sizes),), x, *arguments, dim,
        TILE_N=tile_n, TILE_K=tile_k, EVEN=dim % tile_k == 0, HAS_BIAS=bool(biases), num_warps=warps,
    )  # fmt: skip
    return y


def gated_linear_triton(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    x = x.contiguous()
    size, dim = gate.shape
    if x.numel() > dim:
        return row_gated_triton(x, gate, up, activation)
    y = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    tile_n, tile_k, warps = (1, 1024, 2) if dim >= 2048 else (4, 128, 2)
    launch(
        _gated_row, (triton.cdiv(size, tile_n),), x, x, y, gate, up, size, dim,
        ACTIVATION=activation, TILE_N=tile_n, TILE_K=tile_k, EVEN=dim % tile_k == 0, num_warps=warps,
    )  # fmt: skip
    return y


def row_linear_triton(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One weight of any strides; x [M, K]."""
    return row_linears_triton(x, [weight], [] if bias is None else [bias])


def row_linears_triton(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Any number of rows, each with the bits that it would have alone; weights of unlike tiles in a launch each."""
    tiles = [_tiles_of_rows(weight.shape[0]) for weight in weights]
    if len(set(tiles)) > 1 or len({weight.stride() for weight in weights}) > 1:
        each = [row_linears_triton(x, [w], biases[i : i + 1]) for i, w in enumerate(weights)]
        return torch.cat(each, dim=-1)
    x, sizes, absent = x.contiguous(), [weight.shape[0] for weight in weights], 3 - len(weights)
    y = torch.empty(*x.shape[:-1], sum(sizes), dtype=x.dtype, device=x.device)
    pointers = [*weights, *[x] * absent, *(biases or [x] * len(weights)), *[x] * absent]
    arguments = (x, y, *pointers, *sizes, *[0] * absent)
    _launch_rows(arguments, sizes, weights[0].stride(), tiles[0], HAS_BIAS=bool(biases), ACTIVATION="")
    return y


def row_gated_triton(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """The same for a gated MLP's first half."""
    x, size = x.contiguous(), gate.shape[0]
    y = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    arguments = (x, y, gate, up, *[x] * 4, size, 0, 0)
    _launch_rows(arguments, [size], gate.stride(), (64, 1, 128, 3), HAS_BIAS=False, ACTIVATION=activation)
    return y


def _launch_rows(
    arguments: tuple[Any, ...], sizes: list[int], strides: Sequence[int], tiles: tuple[int, ...], **options: Any
) -> None:
    x, (tile_n, parts, tile_k, stages) = arguments[0], tiles
    dim = x.shape[-1]
    rows = x.numel() // dim
    # Programs that read the same rows of the weight stand side by side.
    grid = (triton.cdiv(rows, _TILE_M), sum(triton.cdiv(size, tile_n) for size in sizes))
    launch(
        _rows, grid, x, *arguments, rows, dim, *strides,
        TILE_M=_TILE_M, TILE_N=tile_n, PARTS=parts, TILE_K=tile_k, STAGES=stages, EVEN=dim % (tile_k * parts) == 0,
        num_warps=4, **options,
    )  # fmt: skip


def _tiles_of_rows(size: int) -> tuple[int, int, int, int]:
    """Rows of the weight, parts of K, columns of a part, stages."""
    return (64, 1, 128, 4) if size >= 8192 else (16, 4, 128, 3)


def _tiles_of_one_row(size: int, dim: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: of a dozen on an H200, among the fastest for each shape of the dev models.

    Many small programs read a large weight; few rows keep the memory busy only with much of each on its way at once.
    """
    if size >= 8192:
        return 8, 128, 2
    return (2, 2048, 8) if size < 2048 and dim >= 4096 else (4, 1024, 4)
