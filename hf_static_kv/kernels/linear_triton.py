"""Linear layers of one token in Triton: a GEMV. Formulas and shapes are in linear.py.

A program computes TILE_N output features with float32 FMAs, without tensor cores. It loads its first tile of the weight
before it waits for the kernel that writes x. More tokens are in invariant_linear_triton.py.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

WEIGHT_ARGUMENTS = 3  # w0, w1, w2 of a kernel; as many as linear.MAX_WEIGHTS


@triton.jit
def _load_weight(w, n, k, N, K, EVEN: tl.constexpr):
    """The tile [n, k] of a weight [N, K], with zeros outside of it."""
    mask = n[:, None] < N
    if not EVEN:
        mask &= k[None, :] < K
    return tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def pick_weight(block, w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N: tl.constexpr):
    """The weight of a block of output features: pointer, bias, N; then the block's start in it and its start in y."""
    first = tl.cdiv(n0, TILE_N)
    second = first + tl.cdiv(n1, TILE_N)
    w, b, N, begin, y_start = w0, b0, n0, 0, 0
    if block >= first:
        w, b, N, begin, y_start = w1, b1, n1, first, n0
    if block >= second:
        w, b, N, begin, y_start = w2, b2, n2, second, n0 + n1
    return w, b, N, (block - begin) * TILE_N, y_start


@triton.jit
def _linear(
    x, y, w0, w1, w2, b0, b1, b2, n0, n1, n2, K,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    w, b, N, n_start, y_start = pick_weight(tl.program_id(0), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
    n, k = n_start + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    tile = _load_weight(w, n, k, N, K, EVEN)
    pdl_sync(PDL)
    total = tl.zeros((TILE_N, TILE_K), tl.float32)
    for k_start in range(0, K - TILE_K, TILE_K):
        next_tile = _load_weight(w, n, k_start + TILE_K + k, N, K, EVEN)
        total += tile.to(tl.float32) * tl.load(x + k_start + k).to(tl.float32)[None, :]
        tile = next_tile
    k += (K - 1) // TILE_K * TILE_K
    total += tile.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(b + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + y_start + n, result.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _gated_linear(
    x, y, gate, up, N, K,
    ACTIVATION: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    g_tile, u_tile = _load_weight(gate, n, k, N, K, EVEN), _load_weight(up, n, k, N, K, EVEN)
    pdl_sync(PDL)
    g, u = tl.zeros((TILE_N, TILE_K), tl.float32), tl.zeros((TILE_N, TILE_K), tl.float32)
    for k_start in range(0, K - TILE_K, TILE_K):
        next_g_tile = _load_weight(gate, n, k_start + TILE_K + k, N, K, EVEN)
        next_u_tile = _load_weight(up, n, k_start + TILE_K + k, N, K, EVEN)
        x_tile = tl.load(x + k_start + k).to(tl.float32)[None, :]
        g, u = g + g_tile.to(tl.float32) * x_tile, u + u_tile.to(tl.float32) * x_tile
        g_tile, u_tile = next_g_tile, next_u_tile
    k += (K - 1) // TILE_K * TILE_K
    x_tile = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    g, u = g + g_tile.to(tl.float32) * x_tile, u + u_tile.to(tl.float32) * x_tile
    dtype = y.dtype.element_ty
    a = activate(tl.sum(g, 1).to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    tl.store(y + n, (a * tl.sum(u, 1).to(dtype).to(tl.float32)).to(dtype), mask=n < N)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # 0.5 * (1 + tanh(inner)) without overflow


def linears_triton(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = "") -> Tensor:
    """`linears`, or with an activation `gated_linear` of the weights gate and up."""
    x, dim, sizes = x.contiguous(), x.shape[-1], output_sizes(weights, activation)
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    tile_n, tile_k, warps = _tiles(sum(sizes), dim, activation)
    grid = (sum(triton.cdiv(size, tile_n) for size in sizes),)
    tiles = {"TILE_N": tile_n, "TILE_K": tile_k, "EVEN": dim % tile_k == 0, "num_warps": warps}
    if activation:
        launch(_gated_linear, grid, x, y, *weights, *sizes, dim, ACTIVATION=activation, **tiles)
    else:
        arguments = *padded(x, weights), *padded(x, biases), *padded(0, sizes)
        launch(_linear, grid, x, y, *arguments, dim, HAS_BIAS=bool(biases), **tiles)
    return y


def output_sizes(weights: Sequence[Tensor], activation: str) -> list[int]:
    """The output features of each weight; gate and up have one output together."""
    return [weight.shape[0] for weight in (weights[:1] if activation else weights)]


def padded(absent: Any, given: Sequence[Any]) -> list[Any]:
    """`given`, with `absent` for each weight that a kernel could take and does not get."""
    return [*given, *[absent] * (WEIGHT_ARGUMENTS - len(given))]


def _tiles(size: int, dim: int, activation: str) -> tuple[int, int, int]:
    """TILE_N, TILE_K and warps: among the fastest of a dozen for each shape of the dev models (H200, 2026-11-15).

    A large weight is read by many small programs. A small one has few programs, so each keeps more loads in flight.
    """
    if activation:
        return (1, 1024, 2) if dim >= 2048 else (4, 128, 2)
    if size >= 8192:
        return 8, 128, 2
    return (2, 2048, 8) if size < 2048 and dim >= 4096 else (4, 1024, 4)
