"""Batch-invariant linear layers of any number of tokens, and sums, in Triton. Formulas are in
linear.py.

The sum over K has one order. Blocks of BLOCK_K go to SPLIT_K partial sums in turn. Tensor cores add
the blocks of a partial sum from left to right, and then the partial sums are added in their order:

    K = | sum 0 | sum 1 | sum 2 | sum 3 | sum 0 | sum 1 | ...

    few tokens    an instance computes 16 output features of 8 or 16 tokens; each of its four warps
                  has one partial sum, so that enough loads are in flight
    many tokens   an instance computes 64 or more output features of 64 or more tokens, one partial
                  sum after the other

Experts: the tokens of a tile have one expert. Few tokens have a tile each; many are sorted by their
expert first.

Both kernels give the same bits, though they use other tensor core instructions. No specification
says so: it was measured (H200, bfloat16 and float16, 2026-11-15), and a test checks it on the GPU
at hand.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import (
    launch,
    pdl_launch_next,
    pdl_sync,
    pdl_wait,
    prefetch_lines,
)
from hf_static_kv.kernels.linear_triton import activate, output_sizes, padded, pick_weight

BLOCK_K = tl.constexpr(64)
SPLIT_K = tl.constexpr(4)
# Tiles of tokens that run next to each other and share weights in the L2 cache.
GROUP_M = tl.constexpr(8)
_MAX_FEW_TOKENS = 64
_TILE_OF_FEW = 16


@triton.jit
def invariant_linear_few_tokens(
    x, y, w0, w1, w2, b0, b1, b2, groups, n0, n1, n2, M, K, w_e, w_n, w_k,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GROUPS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    w, b, N, n_start, y_start = pick_weight(
        tl.program_id(1), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N
    )
    m_start = tl.program_id(0).to(tl.int64) * TILE_M
    if HAS_GROUPS:
        if PDL:
            pdl_wait()
        m_start, M, expert = _group(groups, tl.program_id(0))
        w = w + expert * w_e
        b = b + expert * n0
    n = n_start + tl.arange(0, TILE_N)[None, :, None]
    m = m_start + tl.arange(0, TILE_M)[None, None, :]
    split = tl.arange(0, SPLIT_K)[:, None, None] * BLOCK_K
    k_w = split + tl.arange(0, BLOCK_K)[None, None, :]
    k_x = split + tl.arange(0, BLOCK_K)[None, :, None]
    w_at = n.to(tl.int64) * w_n + k_w.to(tl.int64) * w_k
    x_at = x + m * K + k_x
    total = tl.zeros((SPLIT_K, TILE_N, TILE_M), tl.float32)
    up = tl.zeros((SPLIT_K, TILE_N, TILE_M), tl.float32)
    if PDL and ACTIVATION == "" and not HAS_GROUPS:
        prefetch_weight(w, n_start, N, K, w_n, w_k, TILE_N, 8)
    if PDL:
        if not HAS_GROUPS:
            pdl_wait()
        if ACTIVATION == "":
            pdl_launch_next()
    for k in tl.range(0, K, BLOCK_K * SPLIT_K, num_stages=STAGES):
        x_mask = m < M
        w_mask = n < N
        if not EVEN:
            x_mask = x_mask & (k + k_x < K)
            w_mask = w_mask & (k + k_w < K)
        x_tile = tl.load(x_at + k, mask=x_mask, other=0.0)
        at_k = w_at + tl.cast(k, tl.int64) * w_k
        total = tl.dot(
            tl.load(w + at_k, mask=w_mask, other=0.0), x_tile, total, input_precision="ieee"
        )
        if ACTIVATION != "":
            up = tl.dot(
                tl.load(w1 + at_k, mask=w_mask, other=0.0), x_tile, up, input_precision="ieee"
            )
    # Before the loop a whole decode step was 3 % slower (H200, 2026-11-15).
    if PDL and ACTIVATION != "":
        pdl_launch_next()
    n = n_start + tl.arange(0, TILE_N)[:, None]
    m = m_start + tl.arange(0, TILE_M)[None, :]
    total = add_splits(total, TILE_N, TILE_M)
    up = add_splits(up, TILE_N, TILE_M) if ACTIVATION != "" else total
    result = _epilogue(total, up, b, n, N, y, HAS_BIAS, ACTIVATION)
    width = n0 if ACTIVATION != "" else n0 + n1 + n2
    tl.store(y + m * width + y_start + n, result, mask=(m < M) & (n < N))


@triton.jit
def invariant_linear_many_tokens(
    x, y, w, w1, b, groups, N, M, K, w_e, w_n, w_k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_GROUPS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    first = tl.program_id(0) // (GROUP_M * tiles_n) * GROUP_M
    in_group = tl.program_id(0) % (GROUP_M * tiles_n)
    group_m = tl.minimum(tiles_m - first, GROUP_M)
    tile = first + in_group % group_m
    m_start = tile.to(tl.int64) * TILE_M
    pdl_sync(PDL)
    if HAS_GROUPS:
        m_start, M, expert = _group(groups, tile)
        w = w + expert * w_e
        b = b + expert * N
    m = m_start + tl.arange(0, TILE_M)[:, None]
    n = in_group // group_m * TILE_N + tl.arange(0, TILE_N)[None, :]
    w_at_n = n.to(tl.int64) * w_n
    x_at_m = m.to(tl.int64) * K
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    up = tl.zeros((TILE_M, TILE_N), tl.float32)
    for split in range(SPLIT_K):
        split_total = tl.zeros((TILE_M, TILE_N), tl.float32)
        split_up = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k_start in tl.range(split * BLOCK_K, K, BLOCK_K * SPLIT_K, num_stages=STAGES):
            k = k_start + tl.arange(0, BLOCK_K)
            x_tile = tl.load(x + x_at_m + k[None, :], mask=(m < M) & (k[None, :] < K), other=0.0)
            w_at = w_at_n + k[:, None].to(tl.int64) * w_k
            w_mask = (n < N) & (k[:, None] < K)
            w_tile = tl.load(w + w_at, mask=w_mask, other=0.0)
            split_total = tl.dot(x_tile, w_tile, split_total, input_precision="ieee")
            if ACTIVATION != "":
                up_tile = tl.load(w1 + w_at, mask=w_mask, other=0.0)
                split_up = tl.dot(x_tile, up_tile, split_up, input_precision="ieee")
        total = total + split_total
        up = up + split_up
    result = _epilogue(total, up, b, n, N, y, HAS_BIAS, ACTIVATION)
    tl.store(y + m.to(tl.int64) * N + n, result, mask=(m < M) & (n < N))


@triton.jit
def _group(groups, tile):
    """The tokens of a tile, begin and end, and the expert whose weight multiplies them."""
    at = groups + tile * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def prefetch_weight(w, n_start, N, K, w_n, w_k, TILE_N: tl.constexpr, LINES: tl.constexpr):
    """Prefetch the first lines of each feature, of 128 bytes, into the L2 cache."""
    n = tl.minimum(n_start + tl.arange(0, TILE_N)[:, None], N - 1).to(tl.int64)
    k = tl.minimum(
        tl.arange(0, LINES)[None, :] * (1024 // w.dtype.element_ty.primitive_bitwidth), K - 1
    )
    prefetch_lines(w + n * w_n + k * w_k)


@triton.jit
def add_splits(splits, TILE_N: tl.constexpr, TILE_M: tl.constexpr):
    """The sum over the first dim of [SPLIT_K, TILE_N, TILE_M], from left to right."""
    even, odd = tl.split(tl.reshape(tl.permute(splits, (1, 2, 0)), (TILE_N, TILE_M, 2, 2)))
    split0, split2 = tl.split(even)
    split1, split3 = tl.split(odd)
    return split0 + split1 + split2 + split3


@triton.jit
def _epilogue(total, up, b, n, N, y, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """Bias or activation, in the dtype of y."""
    dtype = y.dtype.element_ty
    # Rounded before too: torch adds the bias in a kernel of its own where x is not contiguous.
    if HAS_BIAS:
        total = total.to(dtype).to(tl.float32) + tl.load(b + n, mask=n < N, other=0.0).to(
            tl.float32
        )
    if ACTIVATION != "":
        total = activate(total.to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
        total *= up.to(dtype).to(tl.float32)
    return total.to(dtype)


def invariant_linears_triton(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = ""
) -> Tensor:
    """`linears` of any strides; with an activation `gated_linear` of gate and up of equal ones."""
    # Large tiles are for tensor cores, which float32 does not use.
    has_many_tokens = x.numel() > _MAX_FEW_TOKENS * x.shape[-1] and x.element_size() == 2
    sizes = output_sizes(weights, bool(activation))
    stride = weights[0].stride()
    if len(sizes) > 1 and (has_many_tokens or any(weight.stride() != stride for weight in weights)):
        parts = [invariant_linears_triton(x, [w], biases[i : i + 1]) for i, w in enumerate(weights)]
        return torch.cat(parts, dim=-1)
    x = x.contiguous()
    tokens = x.numel() // x.shape[-1]
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    tensors = x, y, weights, biases, None
    if has_many_tokens:
        how = _tiles_of_many(tokens, bool(activation))
        _launch_many(*tensors, triton.cdiv(tokens, how[0]), (0, *stride), activation, how)
    else:
        tile_m = 8 if tokens <= 8 else 16
        _launch_few(*tensors, triton.cdiv(tokens, tile_m), (0, *stride), activation, tile_m)
    return y


def expert_linear_triton(x: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None) -> Tensor:
    """`expert_linear`: x [M, K], weight [E, N, K] of any strides, experts [M], bias [E, N]."""
    x = x.contiguous()
    y = x.new_empty(len(x), weight.shape[1])
    biases = [] if bias is None else [bias.contiguous()]
    if len(x) <= _MAX_FEW_TOKENS or x.element_size() == 4:
        token = torch.arange(len(x), device=x.device)
        groups = torch.stack([token, token + 1, experts], dim=-1)  # each token alone
        _launch_few(x, y, [weight], biases, groups, len(x), weight.stride(), "", 8)
        return y
    how = _tiles_of_many(len(x) // len(weight), False)
    experts, order = torch.sort(experts, stable=True)
    groups = tiles_of_groups(experts, len(weight), how[0])
    _launch_many(x[order], y, [weight], biases, groups, len(groups), weight.stride(), "", how)
    return torch.empty_like(y).index_copy_(0, order, y)


def tiles_of_groups(experts: Tensor, num_experts: int, tile_m: int) -> Tensor:
    """Begin, end and expert of each tile [n, 3] of tokens sorted by `experts`; the last are empty.

    The number of tiles depends on the shapes alone, so the host does not wait for the device.
    """
    every = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(experts, every, right=True)
    begins = torch.searchsorted(experts, every)
    tiles_before = ((ends - begins + tile_m - 1) // tile_m).cumsum(0)
    tile = torch.arange(triton.cdiv(len(experts), tile_m) + num_experts, device=experts.device)
    expert = torch.searchsorted(tiles_before, tile, right=True).clamp(max=num_experts - 1)
    first_tile = torch.where(expert > 0, tiles_before[expert - 1], 0)
    begin = torch.minimum(begins[expert] + (tile - first_tile) * tile_m, ends[expert])
    return torch.stack([begin, torch.minimum(begin + tile_m, ends[expert]), expert], dim=-1)


def _launch_many(
    x: Tensor, y: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor],
    groups: Tensor | None, tiles: int,
    stride: tuple[int, ...], activation: str, how: tuple[int, int, int, int],
) -> None:  # fmt: skip
    tile_m, tile_n, stages, num_warps = how
    size = y.shape[-1]
    tokens = tiles * tile_m if groups is not None else x.numel() // x.shape[-1]
    launch(
        invariant_linear_many_tokens, (tiles * triton.cdiv(size, tile_n),), x, y, weights[0], weights[-1],
        biases[0] if biases else x, x if groups is None else groups, size, tokens, x.shape[-1], *stride,
        TILE_M=tile_m, TILE_N=tile_n, STAGES=stages, HAS_BIAS=bool(biases), HAS_GROUPS=groups is not None,
        ACTIVATION=activation, num_warps=num_warps,
    )  # fmt: skip


def _launch_few(
    x: Tensor, y: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor],
    groups: Tensor | None, tiles: int,
    stride: tuple[int, ...], activation: str, tile_m: int,
) -> None:  # fmt: skip
    sizes = [y.shape[-1]] if groups is not None else output_sizes(weights, bool(activation))
    dim = x.shape[-1]
    # Programs next to each other read the same output features.
    launch(
        invariant_linear_few_tokens, (tiles, sum(triton.cdiv(size, _TILE_OF_FEW) for size in sizes)), x, y,
        *padded(x, weights),
        *padded(x, biases), x if groups is None else groups, *padded(0, sizes), x.numel() // dim,
        dim, *stride,
        TILE_N=_TILE_OF_FEW, TILE_M=tile_m, STAGES=_stages(sum(sizes), dim, tile_m,
        x.element_size(), activation),
        EVEN=dim % (BLOCK_K.value * SPLIT_K.value) == 0, HAS_BIAS=bool(biases), HAS_GROUPS=groups is not None,
        ACTIVATION=activation, num_warps=4,
    )  # fmt: skip


def _tiles_of_many(tokens: int, is_gated: bool) -> tuple[int, int, int, int]:
    """Tokens and output features of a program, tiles in flight, and warps."""
    if tokens <= 256:
        return 64, 64, 3, 4
    return (128, 64, 3, 8) if is_gated else (128, 128, 3, 8)


def _stages(size: int, dim: int, tile_m: int, element_size: int, activation: str) -> int:
    """Tiles of the weight in flight: the fewer instances, the more; never more than K has.

    Smaller GPUs have 99 KiB of shared memory, which is enough. Chosen on an H200 for the dev models
    (2026-11-15): 2 to 12 for each linear layer alone, then eight combinations by whole decode steps
    of one token and of eight. The 2 of short gated layers: by steps of one token of gemma-3-1b in
    float16 (2026-11-17), 1 % faster than 3.
    """
    if element_size == 4:
        return 2  # what fits
    if activation:
        return 2 if dim < 2048 else 3
    tiles: int = triton.cdiv(dim, BLOCK_K.value * SPLIT_K.value)
    return min(tiles, 4 if size > 4096 else 8 if tile_m == 8 else 6)


@triton.jit
def invariant_sum(x, output, D, TILE: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, TILE)
    pdl_sync(PDL)
    total = tl.zeros((TILE,), tl.float32)
    for begin in range(0, D, TILE):
        total += tl.load(x + i * D + begin + d, mask=begin + d < D, other=0.0).to(tl.float32)
    tl.store(output + i, tl.sum(total, 0))


def invariant_sum_triton(vectors: Tensor) -> Tensor:
    vectors = vectors.contiguous()
    count, dim = vectors.shape
    tile = min(4096, triton.next_power_of_2(dim))
    output = vectors.new_empty(count, dtype=torch.float32)
    launch(invariant_sum, (count,), vectors, output, dim, TILE=tile, num_warps=4)
    return output
