"""Linear layers for one row in Triton. What they compute is in linear.py, more rows are in row_linear_triton.py.

Products in float32 on plain arithmetic units; one program for a few rows of the weight, which reads its first tile
before it waits for the kernel that makes x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch


@triton.jit
def _weights_tile(w, n, k, N, K, EVEN: tl.constexpr):
    """Rows n and columns k of a weight [N, K]; zero outside."""
    here = n[:, None] < N
    if not EVEN:
        here &= k[None, :] < K
    return tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], mask=here, other=0.0)


@triton.jit
def which(block, w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N: tl.constexpr):
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
    w, b, rows, begin, at = which(tl.program_id(0), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
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
    a = activated(tl.sum(g, 1).to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    tl.store(y + n, (a * tl.sum(u, 1).to(dtype).to(tl.float32)).to(dtype), mask=n < N)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # 1 + tanh, halved, without an overflow


def linears_triton(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    x = x.contiguous()
    dim, sizes = x.shape[-1], [weight.shape[0] for weight in weights]
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
    y = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    tile_n, tile_k, warps = (1, 1024, 2) if dim >= 2048 else (4, 128, 2)
    launch(
        _gated_row, (triton.cdiv(size, tile_n),), x, x, y, gate, up, size, dim,
        ACTIVATION=activation, TILE_N=tile_n, TILE_K=tile_k, EVEN=dim % tile_k == 0, num_warps=warps,
    )  # fmt: skip
    return y


def _tiles_of_one_row(size: int, dim: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and warps: of a dozen on an H200, among the fastest for each shape of the dev models.

    Many small programs read a large weight; few rows keep the memory busy only with much of each on its way at once.
    """
    if size >= 8192:
        return 8, 128, 2
    return (2, 2048, 8) if size < 2048 and dim >= 4096 else (4, 1024, 4)
