"""Linear layers of a few tokens in Triton, with what is before and after them. See linear.py.

Sums are those of `invariant_linear_few_tokens`: an instance computes 16 output features, and each of
its four warps has a part of K. Inputs are multiplied by the norm's weight and rounded; the loop sums
their squares beside the products, and the sums are scaled at the end, as for one token.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.invariant_linear_triton import add_splits, prefetch_weight
from hf_static_kv.kernels.launch_triton import launch, pdl_launch_next, pdl_wait
from hf_static_kv.kernels.linear_triton import (
    epilogue,
    finish_sum,
    output_sizes,
    padded,
    pick_weight,
)
from hf_static_kv.kernels.norm_triton import TritonNorm, norm_arguments

SPLIT_K = tl.constexpr(4)
_TILE_N = 16
_TILE_M = 8


@triton.jit
def fused_linear_few_tokens(
    x, y, norm_weight, residual, w0, w1, w2, b0, b1, b2, n0, n1, n2, M, K, eps, offset,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, LINES: tl.constexpr, NEXT_AT: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if IS_GATED:  # w0 is the gate and w1 is up
        w, b, N, n_start, y_start = w0, b0, n0, block * TILE_N, 0
    else:
        w, b, N, n_start, y_start = pick_weight(block, w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
    n = n_start + tl.arange(0, TILE_N)[:, None]
    m = tl.arange(0, TILE_M)[None, :]
    split = tl.arange(0, SPLIT_K)[:, None, None] * BLOCK_K
    k_w = split + tl.arange(0, BLOCK_K)[None, None, :]
    k_x = split + tl.arange(0, BLOCK_K)[None, :, None]
    w_at = n.to(tl.int64)[None, :, :] * K + k_w
    total = tl.zeros((SPLIT_K, TILE_N, TILE_M), tl.float32)
    up = tl.zeros((SPLIT_K, TILE_N, TILE_M), tl.float32)
    squares = tl.zeros((SPLIT_K, BLOCK_K, TILE_M), tl.float32)
    if PDL:
        prefetch_weight(w, n_start, N, K, K, 1, TILE_N, LINES)
        if IS_GATED:
            prefetch_weight(w1, n_start, N, K, K, 1, TILE_N, LINES)
    bias = tl.load(b + n, mask=n < N, other=0.0) if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0) if HAS_BIAS and IS_GATED else 0.0
    if PDL:
        pdl_wait()
        if NEXT_AT < 0:
            pdl_launch_next()
    at = m * (n0 if IS_GATED else n0 + n1 + n2) + y_start + n
    mask = (m < M) & (n < N)
    added = tl.load(residual + at, mask=mask, other=0.0) if HAS_RESIDUAL else 0.0
    for k in tl.range(0, K, BLOCK_K * SPLIT_K, num_stages=STAGES):
        w_mask = (n < N)[None, :, :] & (EVEN | (k + k_w < K))
        x_mask = (m < M)[None, :, :] & (EVEN | (k + k_x < K))
        x_tile = tl.load(x + m[None, :, :] * K + k + k_x, mask=x_mask, other=0.0)
        if HAS_NORM:
            weight = tl.load(norm_weight + k + k_x, mask=EVEN | (k + k_x < K), other=0.0)
            wide = x_tile.to(tl.float32)
            squares += wide * wide
            x_tile = (wide * (offset + weight.to(tl.float32))).to(x_tile.dtype)
        w_tile = tl.load(w + w_at + k, mask=w_mask, other=0.0)
        total = tl.dot(w_tile, x_tile, total, input_precision="ieee")
        if IS_GATED:
            up_tile = tl.load(w1 + w_at + k, mask=w_mask, other=0.0)
            up = tl.dot(up_tile, x_tile, up, input_precision="ieee")
        if PDL:  # noqa: SIM102  # a kernel without PDL has no such function
            if k == NEXT_AT:
                pdl_launch_next()
    if PDL:
        pdl_launch_next()  # if it has not been
    scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)[None, :] if HAS_NORM else 1.0
    result = finish_sum(add_splits(total, TILE_N, TILE_M), scale, bias, HAS_NORM, HAS_BIAS)
    up = add_splits(up, TILE_N, TILE_M) if IS_GATED else total
    factor = finish_sum(up, scale, up_bias, HAS_NORM, HAS_BIAS) if IS_GATED else 1.0
    result = epilogue(result, factor, added, y.dtype.element_ty, ACTIVATION, IS_GATED, HAS_RESIDUAL)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)


def fused_linears_of_few_triton(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    norm: TritonNorm | None = None,
    activation: str = "",
    is_gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_linears` of up to 8 tokens and contiguous weights. The arguments after x are the fields
    of `Linear`.
    """
    x = x.contiguous()
    dim = x.shape[-1]
    sizes = output_sizes(weights, is_gated)
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    (norm_weight, _), numbers, _ = norm_arguments(norm, x)
    how = _how(dim, is_gated, norm is not None)
    launch(
        fused_linear_few_tokens, (sum(triton.cdiv(size, _TILE_N) for size in sizes),), x, y,
        norm_weight.contiguous(), x if residual is None else residual.contiguous(),
        *padded(x, weights), *padded(x, biases), *padded(0, sizes), x.numel() // dim, dim, *numbers,
        TILE_N=_TILE_N, TILE_M=_TILE_M, BLOCK_K=how.block_k, STAGES=how.stages,
        EVEN=dim % (how.block_k * SPLIT_K.value) == 0, LINES=how.lines, NEXT_AT=how.next_at,
        HAS_NORM=norm is not None, HAS_BIAS=bool(biases), ACTIVATION=activation,
        IS_GATED=is_gated, HAS_RESIDUAL=residual is not None, num_warps=4,
    )  # fmt: skip
    return y


class _How(NamedTuple):
    """How an instance goes through K."""

    block_k: int  # of a warp
    stages: int  # tiles in flight
    lines: int  # of 128 bytes of each feature, prefetched before the wait
    next_at: int  # K where the next kernel may start; -1: before the loop; K or more: after it


def _how(dim: int, is_gated: bool, has_norm: bool) -> _How:
    """Found by whole steps of Llama-3.2-1B with 8 rows, one number after the other, two rounds. With 2
    and 4 rows no other choice that was tried is more than 1 % faster (H200, 2026-11-19).
    """
    if is_gated:
        return _How(64, 2 if dim < 2048 else 3, 8, dim)  # next_at -1: a step takes 16 % longer
    if has_norm and dim % 512 == 0:
        return _How(128, min(4, dim // 512), 8, 0)
    tiles: int = triton.cdiv(dim, 256)
    if dim > 4096:
        return _How(64, 8, 8, tiles // 2 * 256)
    return _How(64, min(8, tiles), 16, -1)
