"""Linear layers of one token in Triton: a GEMV, and what is before and after it. Formulas and shapes are in linear.py.

All sums are float32 FMAs, without tensor cores. More tokens are in invariant_linear_triton.py.

`_linears`, weights [N, K]: a program computes TILE_N output features. It loads its first tile [TILE_N, TILE_K] before
it waits for the kernel that writes x, and each further tile before it uses the one at hand; where K fits into a tile
(IS_WHOLE) it loads all at once. The factor 1 / sqrt(mean(x^2) + eps) of a norm is one number: the loop sums x^2 beside
the products with x times the norm's weight, and the sums are scaled at the end. So nothing waits for the mean, and
nothing is rounded before the end.

Transposed weights, [K, N] in memory, are loaded as they are: a tile [TILE_K, TILE_N]. TILE_N is small, so that there
are programs for all processors though none shares its sums with others.

Two 16-bit numbers are loaded as one int32 (IS_PAIRED). Else ptxas unpacks a tile as soon as it is loaded, so the
program would wait for it before it lets the next kernel start. Not in the loop of `_linears`: there ptxas would load
the next tile only after the products of the one at hand.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.norm_triton import TritonNorm, layer_norm, norm_triton

WEIGHT_ARGUMENTS = 3  # w0, w1, w2 of a kernel; as many as linear.MAX_WEIGHTS


@triton.jit
def _linears(
    x, y, norm_weight, norm_bias, residual, w0, w1, w2, b0, b1, b2, n0, n1, n2, K, eps, offset,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, IS_WHOLE: tl.constexpr, IS_PAIRED: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, HAS_NORM: tl.constexpr, IS_CENTRED: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if IS_GATED:  # w0 is the gate and w1 is up
        w, b, N, n_start, y_start = w0, b0, n0, tl.program_id(0) * TILE_N, 0
    else:
        w, b, N, n_start, y_start = pick_weight(tl.program_id(0), w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
    n, k = n_start + tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    dtype = y.dtype.element_ty
    if IS_PAIRED:
        w, w1 = w.to(tl.pointer_type(tl.int32)), w1.to(tl.pointer_type(tl.int32))
    tile = _load_weight(w, n_start, 0, N, K, TILE_N, TILE_K, EVEN, IS_PAIRED, IS_TRANSPOSED)
    if IS_GATED:
        up_tile = _load_weight(w1, n_start, 0, N, K, TILE_N, TILE_K, EVEN, IS_PAIRED, IS_TRANSPOSED)
    if HAS_NORM:
        norm_tile = tl.load(norm_weight + k, mask=k < K, other=0.0)
    norm_bias_tile = tl.load(norm_bias + k, mask=k < K, other=0.0) if HAS_NORM_BIAS else 0.0
    bias = tl.load(b + n, mask=n < N, other=0.0) if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0) if HAS_BIAS and IS_GATED else 0.0
    pdl_sync(PDL)
    residual_tile = tl.load(residual + y_start + n, mask=n < N, other=0.0) if HAS_RESIDUAL else 0.0
    total, up = tl.zeros((TILE_N, TILE_K), tl.float32), tl.zeros((TILE_N, TILE_K), tl.float32)
    squares = tl.zeros((TILE_K,), tl.float32)
    for k_start in tl.range(0, 0 if IS_WHOLE else K - TILE_K, TILE_K):
        next_k = k_start + TILE_K
        next_tile = _load_weight(w, n_start, next_k, N, K, TILE_N, TILE_K, EVEN, IS_PAIRED, IS_TRANSPOSED)
        if IS_GATED:
            next_up_tile = _load_weight(w1, n_start, next_k, N, K, TILE_N, TILE_K, EVEN, IS_PAIRED, IS_TRANSPOSED)
        x_tile = tl.load(x + k_start + k).to(tl.float32)
        if HAS_NORM:
            squares += x_tile * x_tile
            x_tile *= offset + norm_tile.to(tl.float32)
            next_mask = next_k + k < K
            norm_tile = tl.load(norm_weight + next_k + k, mask=next_mask, other=0.0)  # here it takes fewer registers
        total, tile = total + _unpack(tile, dtype, IS_PAIRED, IS_TRANSPOSED) * x_tile[None, :], next_tile
        if IS_GATED:
            up, up_tile = up + _unpack(up_tile, dtype, IS_PAIRED, IS_TRANSPOSED) * x_tile[None, :], next_up_tile
    k += 0 if IS_WHOLE else (K - 1) // TILE_K * TILE_K
    x_tile = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    scale = 1.0
    if IS_CENTRED:
        x_tile = layer_norm(x_tile, norm_tile, norm_bias_tile, eps, K, TILE_K)
    elif HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares + x_tile * x_tile) / K + eps)
        x_tile *= offset + norm_tile.to(tl.float32)
    total += _unpack(tile, dtype, IS_PAIRED, IS_TRANSPOSED) * x_tile[None, :]
    if IS_GATED:
        up += _unpack(up_tile, dtype, IS_PAIRED, IS_TRANSPOSED) * x_tile[None, :]
    result = _finish_sum(tl.sum(total, 1), scale, bias, HAS_NORM, HAS_BIAS)
    factor = _finish_sum(tl.sum(up, 1), scale, up_bias, HAS_NORM, HAS_BIAS) if IS_GATED else 1.0
    result = _epilogue(result, factor, residual_tile, dtype, ACTIVATION, IS_GATED, HAS_RESIDUAL)
    tl.store(y + y_start + n, result.to(dtype), mask=n < N)


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
def _load_weight(
    w, n_start, k_start, N, K, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr,
    IS_PAIRED: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A tile of a weight with zeros outside of it, as it is in memory: [TILE_N, TILE_K], or transposed."""
    width: tl.constexpr = 2 if IS_PAIRED else 1
    if IS_TRANSPOSED:
        n, k = n_start // width + tl.arange(0, TILE_N // width), k_start + tl.arange(0, TILE_K)
        mask, at = n[None, :] < N // width, k[:, None].to(tl.int64) * (N // width) + n[None, :]
        if not EVEN:
            mask &= k[:, None] < K
    else:
        n, k = n_start + tl.arange(0, TILE_N), k_start // width + tl.arange(0, TILE_K // width)
        mask, at = n[:, None] < N, n[:, None].to(tl.int64) * (K // width) + k[None, :]
        if not EVEN:
            mask &= k[None, :] < K // width
    return tl.load(w + at, mask=mask, other=0)


@triton.jit
def _unpack(tile, dtype: tl.constexpr, IS_PAIRED: tl.constexpr, IS_TRANSPOSED: tl.constexpr):
    """The tile [TILE_N, TILE_K] in float32; of a pair the lower half is the first number."""
    if IS_PAIRED:
        if dtype == tl.bfloat16:  # the upper half of a float32
            both = tl.join(tile << 16, tile & -65536).to(tl.float32, bitcast=True)
        else:
            both = tl.join(tile.to(tl.int16), (tile >> 16).to(tl.int16)).to(dtype, bitcast=True).to(tl.float32)
        tile = tl.reshape(both, (tile.shape[0], 2 * tile.shape[1]))
    if IS_TRANSPOSED:
        tile = tl.trans(tile)
    return tile.to(tl.float32)


@triton.jit
def _finish_sum(total, scale, bias, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The sum over K, scaled and with the bias: [TILE_N] in float32."""
    if HAS_NORM:
        total *= scale
    if HAS_BIAS:
        total += bias.to(tl.float32)
    return total


@triton.jit
def _epilogue(
    result, factor, residual, dtype: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """residual + activation(result) * factor, rounded where a model rounds."""
    if ACTIVATION != "":
        result = activate(result.to(dtype).to(tl.float32), ACTIVATION)
    if IS_GATED:
        result = result.to(dtype).to(tl.float32) * factor.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        result = residual.to(tl.float32) + result.to(dtype).to(tl.float32)
    return result


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)  # keeps a NaN
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))  # 0.5 * (1 + tanh(inner)) without overflow


def linears_triton(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = "") -> Tensor:
    """`linears`, or with an activation `gated_linear` of the weights gate and up."""
    return fused_linears_triton(x, weights, biases, activation=activation, is_gated=bool(activation))


def fused_linears_triton(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    norm: TritonNorm | None = None,
    activation: str = "",
    is_gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_linears` of one token. The arguments after x are the fields of `Linear`, in their order.

    Weights are all contiguous or all transposed, in memory [K, N].
    """
    is_transposed = not all(weight.is_contiguous() for weight in weights)
    x, dim = x.contiguous(), x.shape[-1]
    sizes = [weight.shape[0] for weight in (weights[:1] if is_gated else weights)]
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    norm_weight, eps, (offset, _, is_centred), norm_bias = norm or (x, 0.0, (0.0, False, False), None)
    how = _transposed_tiles(dim, x.element_size()) if is_transposed else _tiles(sum(sizes), dim, is_gated)
    tile_n, tile_k, warps = how
    if norm is not None and is_centred and dim > tile_k:  # a program needs the whole vector for its mean
        _, x = norm_triton(x, None, norm, None)
        return fused_linears_triton(x, weights, biases, None, activation, is_gated, residual)
    launch(
        _linears, (sum(triton.cdiv(size, tile_n) for size in sizes),), x, y, norm_weight.contiguous(),
        x if norm_bias is None else norm_bias.contiguous(), x if residual is None else residual.contiguous(),
        *padded(x, weights), *padded(x, biases), *padded(0, sizes), dim, float(eps), float(offset),
        TILE_N=tile_n, TILE_K=tile_k, EVEN=dim % tile_k == 0, IS_WHOLE=dim <= tile_k,
        IS_PAIRED=dim <= tile_k and _is_paired(weights, sizes if is_transposed else [dim]),
        IS_TRANSPOSED=is_transposed, HAS_NORM=norm is not None, IS_CENTRED=is_centred,
        HAS_NORM_BIAS=norm_bias is not None, HAS_BIAS=bool(biases), ACTIVATION=activation, IS_GATED=is_gated,
        HAS_RESIDUAL=residual is not None, num_warps=warps,
    )  # fmt: skip
    return y


def _is_paired(weights: Sequence[Tensor], lengths: Sequence[int]) -> bool:
    """Whether two numbers of these weights make an int32, with rows in memory of these lengths."""
    is_half = all(weight.element_size() == 2 and weight.data_ptr() % 4 == 0 for weight in weights)
    return is_half and all(length % 2 == 0 for length in lengths)


def output_sizes(weights: Sequence[Tensor], activation: str) -> list[int]:
    """The output features of each weight; gate and up have one output together."""
    return [weight.shape[0] for weight in (weights[:1] if activation else weights)]


def padded(absent: Any, given: Sequence[Any]) -> list[Any]:
    """`given`, with `absent` for each weight that a kernel could take and does not get."""
    return [*given, *[absent] * (WEIGHT_ARGUMENTS - len(given))]


def _tiles(size: int, dim: int, is_gated: bool) -> tuple[int, int, int]:
    """TILE_N, TILE_K and warps: fastest, or nearly, by whole steps of 11 shapes from 1B to 14B (H200, 2026-11-17).

    Up to 4096 wide, a program reads whole rows at once. Most wider ones are read in parts; so is a head of a large
    vocabulary, whose many programs keep enough loads in flight. An H200 runs 4224 warps at once: a warp for each long
    row is best where this nearly fills it, and larger programs elsewhere.
    """
    whole = max(128, triton.next_power_of_2(dim))
    warps_of_whole = 2 if dim <= 1024 else 4 if dim <= 3072 else 8
    if is_gated and dim <= 2048:
        return (2, whole, 2) if dim <= 1024 else (1, 2048, 2) if dim <= 1536 else (2, 2048, 4)
    if is_gated:
        return (1, 4096, warps_of_whole) if dim <= 4096 else (1, 1024, 2)
    if size >= 8192:
        return 8, 128, 2
    if dim <= 4096:
        return 2, whole, warps_of_whole
    if dim <= 8192 and dim % 1024:
        return 2, 8192, 8
    least = 2048 if dim % 1024 else 2560
    return (1, 512, 1) if least < size <= 4224 else (4, 1024, 4)


def _transposed_tiles(dim: int, element_size: int) -> tuple[int, int, int]:
    """TILE_N, TILE_K and warps of transposed weights. A row of a tile is 32 bytes, which the memory gives at once."""
    whole = max(128, triton.next_power_of_2(dim))
    return (32 // element_size, whole, max(1, whole // 128)) if dim <= 2048 else (32 // element_size, 1024, 8)
