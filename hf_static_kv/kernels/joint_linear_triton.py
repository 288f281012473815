"""Linear layers with one input, of 17 to 64 tokens, in Triton. Formulas are in linear.py.

An instance computes some output features of all tokens, so each weight is read once. Libraries do so
as fast for one large weight. But Q, K and V, or gate and up with their activation, are one launch
here: 8 us instead of 17, and 20 instead of 27 (Llama-3.2-1B, 64 tokens, H200, 2026-11-18).

A weight with few output features keeps too few instances busy. So some of them share its features,
each with a part of K, and the norm after it adds their sums: a library does so in a launch of its
own.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.linear_triton import activate, output_sizes, padded, pick_weight

# Output features, K, loads in flight: of nearly the best, those that fit into 99 KiB of shared memory.
_TILE = 32, 128, 4
_GATED_TILE = 32, 64, 6


@triton.jit
def joint_linears(
    x, y, w0, w1, w2, b0, b1, b2, n0, n1, n2, M, K, part_k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    w, b, N, n_start, y_start = pick_weight(
        tl.program_id(1), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N
    )
    m = tl.arange(0, TILE_M)[:, None]
    n = n_start + tl.arange(0, TILE_N)[None, :]
    k = tl.arange(0, TILE_K)
    x_at = x + m * K + k[None, :]
    w_at = n.to(tl.int64) * K + k[:, None]
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    up = tl.zeros((TILE_M, TILE_N), tl.float32)
    pdl_sync(PDL)
    begin = part * part_k
    for k_start in tl.range(begin, tl.minimum(begin + part_k, K), TILE_K, num_stages=STAGES):
        x_mask = m < M
        w_mask = n < N
        if not EVEN:
            x_mask = x_mask & (k_start + k[None, :] < K)
            w_mask = w_mask & (k_start + k[:, None] < K)
        x_tile = tl.load(x_at + k_start, mask=x_mask, other=0.0)
        w_tile = tl.load(w + w_at + k_start, mask=w_mask, other=0.0)
        total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
        if ACTIVATION != "":
            up_tile = tl.load(w1 + w_at + k_start, mask=w_mask, other=0.0)
            up = tl.dot(x_tile, up_tile, up, input_precision="ieee")
    dtype = y.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(b + n, mask=n < N, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        total = activate(total.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        total *= up.to(dtype).to(tl.float32)
    width = n0 if ACTIVATION != "" else n0 + n1 + n2
    tl.store(y + (part * M + m) * width + y_start + n, total.to(dtype), mask=(m < M) & (n < N))


def joint_linears_triton(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = ""
) -> Tensor:
    """`linears` of contiguous weights; with an activation `gated_linear` of gate and up."""
    y = x.new_empty(*x.shape[:-1], sum(output_sizes(weights, bool(activation))))
    _launch(x, y, weights, biases, activation, 1)
    return y


def linear_parts_triton(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Float32 [parts, ..., N] whose sum is x w^T."""
    y = x.new_empty(parts, *x.shape[:-1], len(weight), dtype=torch.float32)
    _launch(x, y, [weight], [], "", parts)
    return y


def num_parts(weight: Tensor) -> int:
    """Into how many parts of K the sums of a weight [N, K] are cut: two instances for each processor,
    and about 1024 or more of K for each instance. By 15 shapes from 135M to 14B, of 17, 32 and 64
    tokens, faster than a library by up to a third, and slower by 1.5 % at most (H200, 2026-11-18).
    """
    processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
    size, dim = weight.shape
    blocks = triton.cdiv(size, _TILE[0])
    return int(min(2 * processors // blocks, max(2, dim // 1024)))


def _launch(
    x: Tensor, y: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str,
    parts: int,
) -> None:  # fmt: skip
    x = x.contiguous()
    dim = x.shape[-1]
    tokens = x.numel() // dim
    sizes = output_sizes(weights, bool(activation))
    tile_n, tile_k, stages = _GATED_TILE if activation else _TILE
    blocks = sum(triton.cdiv(size, tile_n) for size in sizes)
    part_k = triton.cdiv(triton.cdiv(dim, tile_k), parts) * tile_k
    launch(
        joint_linears, (parts, blocks), x, y,
        *padded(x, weights), *padded(x, biases), *padded(0, sizes), tokens, dim, part_k,
        TILE_M=max(16, triton.next_power_of_2(tokens)), TILE_N=tile_n, TILE_K=tile_k, STAGES=stages,
        EVEN=dim % tile_k == 0, HAS_BIAS=bool(biases), ACTIVATION=activation, num_warps=4,
    )  # fmt: skip
