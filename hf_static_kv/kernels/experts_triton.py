"""Mixtures of experts in Triton. Formulas and shapes are in experts.py.

    experts_route    one warp for each token: the largest logit, k times
    experts_gate_up    an instance for each pair of a token and an expert and for TILE_N rows of gate and up;
              neighbours have the same rows of all pairs, so that tokens with the same expert share
              them in the L2 cache
    experts_down     an instance for each token and output feature: a row of all its k experts at once,
              [TILE_E, TILE_I]

All are GEMVs with float32 FMAs. The tiles do not depend on the number of tokens, so neither do the
bits of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.linear_triton import activate


@triton.jit
def experts_route(
    logits, weights, index, logits_t, E,
    K: tl.constexpr, TILE_E: tl.constexpr, TILE_K: tl.constexpr,
    SOFTMAX_FIRST: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, TILE_E)
    slot = tl.arange(0, TILE_K)
    pdl_sync(PDL)
    logit = tl.load(logits + t * logits_t + e, mask=e < E, other=-float("inf")).to(tl.float32)
    maximum = tl.max(logit, 0)
    all_experts = tl.sum(tl.where(e < E, tl.exp(logit - maximum), 0.0), 0)
    # As integers of the same order: a warp finds the largest of 32 in one instruction.
    key = _ordered(logit.to(tl.int32, bitcast=True))
    chosen = tl.zeros((TILE_K,), tl.int32)
    chosen_key = tl.zeros((TILE_K,), tl.int32)
    for i in range(K):
        largest = tl.max(key, 0)
        # The first of equal ones; always an expert.
        expert = tl.min(tl.where(key == largest, e, E - 1), 0)
        chosen = tl.where(slot == i, expert, chosen)
        chosen_key = tl.where(slot == i, largest, chosen_key)
        key = tl.where(e == expert, -2147483648, key)
    value = _ordered(chosen_key).to(tl.float32, bitcast=True)
    p = tl.where(slot < K, tl.exp(value - maximum), 0.0)
    p = p / (all_experts if SOFTMAX_FIRST else tl.sum(p, 0))
    if NORMALIZE:
        p = p / tl.sum(p, 0)
    tl.store(weights + t * K + slot, p.to(weights.dtype.element_ty), mask=slot < K)
    tl.store(index + t * K + slot, chosen.to(tl.int64), mask=slot < K)


@triton.jit
def _ordered(bits):
    """The bits of a float as an integer of the same order, and back."""
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


def route_triton(logits: Tensor, k: int, style: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor]:
    """`style`: the fields of `RouteStyle`, in their order."""
    softmax_first, normalize, keep_float32 = style
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens, num_experts = logits.shape
    weights = logits.new_empty(tokens, k, dtype=torch.float32 if keep_float32 else logits.dtype)
    index = logits.new_empty(tokens, k, dtype=torch.int64)
    launch(
        experts_route, (tokens,), logits, weights, index, logits.stride(0), num_experts,
        K=k, TILE_E=triton.next_power_of_2(num_experts), TILE_K=triton.next_power_of_2(k),
        SOFTMAX_FIRST=softmax_first, NORMALIZE=normalize, num_warps=1,
    )  # fmt: skip
    return weights, index


@triton.jit
def experts_gate_up(
    x, y, index, gate_up, k, E, N, K,
    ACTIVATION: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    at_k = tl.arange(0, TILE_K)
    pdl_sync(PDL)  # the router may be the previous kernel: nothing can be loaded before
    # Never read outside of the weights.
    expert = tl.minimum(tl.load(index + pair), E - 1).to(tl.int64)
    gate = gate_up + expert * (2 * N * K)
    up = gate + N * K
    x = x + pair // k * K
    g_tile = _load_rows(gate, n, at_k, N, K, EVEN)
    u_tile = _load_rows(up, n, at_k, N, K, EVEN)
    g = tl.zeros((TILE_N, TILE_K), tl.float32)
    u = tl.zeros((TILE_N, TILE_K), tl.float32)
    for k_start in range(0, K - TILE_K, TILE_K):
        next_g_tile = _load_rows(gate, n, k_start + TILE_K + at_k, N, K, EVEN)
        next_u_tile = _load_rows(up, n, k_start + TILE_K + at_k, N, K, EVEN)
        x_tile = tl.load(x + k_start + at_k).to(tl.float32)[None, :]
        g = g + g_tile.to(tl.float32) * x_tile
        u = u + u_tile.to(tl.float32) * x_tile
        g_tile = next_g_tile
        u_tile = next_u_tile
    at_k += (K - 1) // TILE_K * TILE_K
    x_tile = tl.load(x + at_k, mask=at_k < K, other=0.0).to(tl.float32)[None, :]
    g = g + g_tile.to(tl.float32) * x_tile
    u = u + u_tile.to(tl.float32) * x_tile
    dtype = y.dtype.element_ty
    a = activate(tl.sum(g, 1).to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    tl.store(y + pair * N + n, (a * tl.sum(u, 1).to(dtype).to(tl.float32)).to(dtype), mask=n < N)


@triton.jit
def _load_rows(w, n, k, N, K, EVEN: tl.constexpr):
    """The tile [n, k] of one expert's weight [N, K] (under 2^31 elements), zeros outside of it."""
    mask = n[:, None] < N
    if not EVEN:
        mask &= k[None, :] < K
    return tl.load(w + n[:, None] * K + k[None, :], mask=mask, other=0.0)


@triton.jit
def experts_down(
    h, y, index, weights, down, k, E, N, K,
    TILE_E: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    n = tl.program_id(1)
    j = tl.arange(0, TILE_E)
    at_k = tl.arange(0, TILE_K)[None, :]
    # Before the wait: experts_gate_up has waited for the kernels that wrote these.
    expert = tl.minimum(tl.load(index + t * k + j, mask=j < k, other=0), E - 1).to(tl.int64)
    weight = tl.load(weights + t * k + j, mask=j < k, other=0.0)
    row = down + expert[:, None] * (N * K) + n * K
    h_row = h + (t * k + j[:, None]) * K
    of_token = j[:, None] < k
    tile = tl.load(row + at_k, mask=of_token if EVEN else of_token & (at_k < K), other=0.0)
    pdl_sync(PDL)
    total = tl.zeros((TILE_E, TILE_K), tl.float32)
    for k_start in range(0, K - TILE_K, TILE_K):
        next_k = k_start + TILE_K + at_k
        next_tile = tl.load(
            row + next_k, mask=of_token if EVEN else of_token & (next_k < K), other=0.0
        )
        total += tile.to(tl.float32) * tl.load(h_row + k_start + at_k, mask=of_token, other=0.0).to(
            tl.float32
        )
        tile = next_tile
    at_k += (K - 1) // TILE_K * TILE_K
    total += tile.to(tl.float32) * tl.load(h_row + at_k, mask=of_token & (at_k < K), other=0.0).to(
        tl.float32
    )
    dtype = y.dtype.element_ty
    output = tl.sum(total, 1).to(dtype).to(tl.float32) * weight.to(tl.float32)
    if weight.dtype == dtype:  # otherwise torch multiplies in float32 and does not round
        output = output.to(dtype).to(tl.float32)
    tl.store(y + t * N + n, tl.sum(output, 0).to(dtype))


def experts_triton(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    x = x.contiguous()
    index = index.contiguous()
    weights = weights.contiguous()
    tokens, k = index.shape
    num_experts, hidden, inner = down.shape
    tile_n, tile_k, warps = _gated_tiles(hidden)
    h = x.new_empty(tokens * k, inner)
    y = torch.empty_like(x)
    launch(
        experts_gate_up, (tokens * k, triton.cdiv(inner, tile_n)), x, h, index, gate_up,
        k, num_experts, inner, hidden,
        ACTIVATION=activation, TILE_N=tile_n, TILE_K=tile_k, EVEN=hidden % tile_k == 0, num_warps=warps,
    )  # fmt: skip
    tile_e, tile_k, warps = _down_tiles(k, inner)
    launch(
        experts_down, (tokens, hidden), h, y, index, weights, down, k, num_experts, hidden, inner,
        TILE_E=tile_e, TILE_K=tile_k, EVEN=inner % tile_k == 0, num_warps=warps,
    )  # fmt: skip
    return y


def _gated_tiles(dim: int) -> tuple[int, int, int]:
    """TILE_N, TILE_K and warps: those of `gated_linear`, not yet measured for experts."""
    return (1, 1024, 2) if dim >= 2048 else (4, 128, 2)


def _down_tiles(k: int, dim: int) -> tuple[int, int, int]:
    """TILE_E, TILE_K and warps: tiles of 4 KiB, two in flight; not yet measured."""
    tile_e: int = triton.next_power_of_2(k)
    return tile_e, max(32, min(2048 // tile_e, triton.next_power_of_2(dim))), 2
