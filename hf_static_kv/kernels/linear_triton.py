"""Linear layers of one token in Triton: a GEMV, and what is before and after it. See linear.py.

All sums are float32 FMAs, without tensor cores. More tokens are in invariant_linear_triton.py.

`linear_few_tokens`, weights [N, K]: an instance computes TILE_N output features. It loads its first
tile [TILE_N, TILE_K] before it waits for the kernel that writes x, and each further tile before it
uses the one at hand; if K fits into a tile (IS_WHOLE) it loads all at once. The factor 1 /
sqrt(mean(x^2) + eps) of a norm is one number: the loop sums x^2 beside the products with x times
the norm's weight, and the sums are scaled at the end. So nothing waits for the mean, and nothing is
rounded before the end.

`linear_transposed`, weights [K, N] in memory: an instance loads one tile [TILE_K, TILE_N] before it
waits for x, and so computes a part of the sums of TILE_N output features. The instance that comes
last for these features adds the parts.

Two 16-bit numbers are loaded as one int32 (IS_PAIRED). Else ptxas unpacks a tile as soon as it is
loaded, so the instance would wait for it before it lets the next kernel start. Not in the loop of
`linear_few_tokens`: there ptxas would load the next tile only after the products of the one at hand.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.norm_triton import TritonNorm, norm_arguments

WEIGHT_ARGUMENTS = 3  # w0, w1, w2 of a kernel; as many as linear.MAX_WEIGHTS
_PRODUCT_TILE = 2048  # elements of an instance of `activated_product`
_COUNTERS = 1 << 20  # of the captured launches of one device; a step of GPT-2 XL takes 11 thousand


@triton.jit
def linear_few_tokens(
    x, y, norm_weight, residual, w0, w1, w2, b0, b1, b2, n0, n1, n2, K, eps, offset,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, EVEN: tl.constexpr, IS_WHOLE: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if IS_GATED:  # w0 is the gate and w1 is up
        w, b, N, n_start, y_start = w0, b0, n0, block * TILE_N, 0
    else:
        w, b, N, n_start, y_start = pick_weight(block, w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
    n = n_start + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    dtype = y.dtype.element_ty
    if IS_PAIRED:
        w = w.to(tl.pointer_type(tl.int32))
        w1 = w1.to(tl.pointer_type(tl.int32))
    tile = _load_weight(w, n, 0, N, K, TILE_K, EVEN, IS_PAIRED)
    if IS_GATED:
        up_tile = _load_weight(w1, n, 0, N, K, TILE_K, EVEN, IS_PAIRED)
    if HAS_NORM:
        norm_tile = tl.load(norm_weight + k, mask=k < K, other=0.0)
    bias = tl.load(b + n, mask=n < N, other=0.0) if HAS_BIAS else 0.0
    up_bias = tl.load(b1 + n, mask=n < N, other=0.0) if HAS_BIAS and IS_GATED else 0.0
    pdl_sync(PDL)
    residual_tile = tl.load(residual + y_start + n, mask=n < N, other=0.0) if HAS_RESIDUAL else 0.0
    total = tl.zeros((TILE_N, TILE_K), tl.float32)
    up = tl.zeros((TILE_N, TILE_K), tl.float32)
    squares = tl.zeros((TILE_K,), tl.float32)
    for k_start in tl.range(0, 0 if IS_WHOLE else K - TILE_K, TILE_K):
        next_tile = _load_weight(w, n, k_start + TILE_K, N, K, TILE_K, EVEN, IS_PAIRED)
        if IS_GATED:
            next_up_tile = _load_weight(w1, n, k_start + TILE_K, N, K, TILE_K, EVEN, IS_PAIRED)
        x_tile = tl.load(x + k_start + k).to(tl.float32)
        if HAS_NORM:
            squares += x_tile * x_tile
            x_tile *= offset + norm_tile.to(tl.float32)
            next_k = k_start + TILE_K + k
            # Loaded here it takes fewer registers.
            norm_tile = tl.load(norm_weight + next_k, mask=next_k < K, other=0.0)
        total = total + _unpack(tile, dtype, IS_PAIRED) * x_tile[None, :]
        tile = next_tile
        if IS_GATED:
            up = up + _unpack(up_tile, dtype, IS_PAIRED) * x_tile[None, :]
            up_tile = next_up_tile
    k += 0 if IS_WHOLE else (K - 1) // TILE_K * TILE_K
    x_tile = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    scale = 1.0
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares + x_tile * x_tile) / K + eps)
        x_tile *= offset + norm_tile.to(tl.float32)
    total += _unpack(tile, dtype, IS_PAIRED) * x_tile[None, :]
    if IS_GATED:
        up += _unpack(up_tile, dtype, IS_PAIRED) * x_tile[None, :]
    result = finish_sum(tl.sum(total, 1), scale, bias, HAS_NORM, HAS_BIAS)
    factor = finish_sum(tl.sum(up, 1), scale, up_bias, HAS_NORM, HAS_BIAS) if IS_GATED else 1.0
    result = epilogue(result, factor, residual_tile, dtype, ACTIVATION, IS_GATED, HAS_RESIDUAL)
    tl.store(y + y_start + n, result.to(dtype), mask=n < N)


@triton.jit
def epilogue(
    result, factor, residual, dtype: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """residual + activation(result) * factor, rounded to `dtype` after each of them."""
    if ACTIVATION != "":
        result = activate(_rounded(result, dtype), ACTIVATION)
    if IS_GATED:
        result = _rounded(result, dtype) * _rounded(factor, dtype)
    if HAS_RESIDUAL:
        result = residual.to(tl.float32) + _rounded(result, dtype)
    return result


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """A float32 number after it was stored in `dtype`."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def linear_transposed(
    x, y, residual, w0, w1, w2, b0, b1, b2, n0, n1, n2, K, sums, counters, parts,
    TILE_N: tl.constexpr, TILE_K: tl.constexpr, TILE_PARTS: tl.constexpr, EVEN: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    part = tl.program_id(1)
    w, b, N, n_start, y_start = pick_weight(block, w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N)
    n = n_start + tl.arange(0, TILE_N)
    k = part * TILE_K + tl.arange(0, TILE_K)
    dtype = y.dtype.element_ty
    if IS_PAIRED:
        pairs = n_start // 2 + tl.arange(0, TILE_N // 2)
        tile = _load_transposed(w.to(tl.pointer_type(tl.int32)), pairs, k, N // 2, K, EVEN)
    else:
        tile = _load_transposed(w, n, k, N, K, EVEN)
    bias = tl.load(b + n, mask=n < N, other=0.0) if HAS_BIAS else 0.0
    pdl_sync(PDL)
    residual_tile = tl.load(residual + y_start + n, mask=n < N, other=0.0) if HAS_RESIDUAL else 0.0
    x_tile = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    result = tl.sum(_unpack(tile, dtype, IS_PAIRED) * x_tile[:, None], 0)
    is_last = True
    if IS_SPLIT:
        size = n0 + n1 + n2
        tl.store(sums + part * size + y_start + n, result, mask=n < N)
        # The sums of all threads are stored before one thread counts the instance.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + block, 1, sem="acq_rel", scope="gpu") == parts - 1
    if is_last:
        if IS_SPLIT:
            tl.store(counters + block, 0)  # for the next launch
            result = add_parts(sums + y_start, n, N, size, parts, TILE_N, TILE_PARTS)
        result = finish_sum(result, 1.0, bias, False, HAS_BIAS)
        result = epilogue(result, 1.0, residual_tile, dtype, ACTIVATION, False, HAS_RESIDUAL)
        tl.store(y + y_start + n, result.to(dtype), mask=n < N)


@triton.jit
def pick_weight(block, w0, w1, w2, b0, b1, b2, n0, n1, n2, TILE_N: tl.constexpr):
    """The weight of a block of features: pointer, bias, N, the block's start in it and in y."""
    first = tl.cdiv(n0, TILE_N)
    second = first + tl.cdiv(n1, TILE_N)
    w = w0
    b = b0
    N = n0
    begin = 0
    y_start = 0
    if block >= first:
        w = w1
        b = b1
        N = n1
        begin = first
        y_start = n0
    if block >= second:
        w = w2
        b = b2
        N = n2
        begin = second
        y_start = n0 + n1
    return w, b, N, (block - begin) * TILE_N, y_start


@triton.jit
def _load_weight(
    w, n, k_start, N, K, TILE_K: tl.constexpr, EVEN: tl.constexpr, IS_PAIRED: tl.constexpr
):
    """The tile [n, TILE_K] of a weight [N, K] from `k_start` on, with zeros outside of it."""
    width: tl.constexpr = 2 if IS_PAIRED else 1
    k = k_start // width + tl.arange(0, TILE_K // width)
    K = K // width
    mask = n[:, None] < N
    if not EVEN:
        mask &= k[None, :] < K
    return tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], mask=mask, other=0)


@triton.jit
def _load_transposed(w, n, k, N, K, EVEN: tl.constexpr):
    """The tile [k, n] of a weight that is [K, N] in memory, with zeros outside of it."""
    mask = n[None, :] < N
    if not EVEN:
        mask &= k[:, None] < K
    return tl.load(w + k[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0)


@triton.jit
def _unpack(tile, dtype: tl.constexpr, IS_PAIRED: tl.constexpr):
    """The tile in float32; of a pair the lower half is the first number."""
    if IS_PAIRED:
        if dtype == tl.bfloat16:  # the upper half of a float32
            both = tl.join(tile << 16, tile & -65536).to(tl.float32, bitcast=True)
        else:
            halves = tl.join(tile.to(tl.int16), (tile >> 16).to(tl.int16))
            both = halves.to(dtype, bitcast=True).to(tl.float32)
        tile = tl.reshape(both, (tile.shape[0], 2 * tile.shape[1]))
    return tile.to(tl.float32)


@triton.jit
def add_parts(sums, n, N, size, parts, TILE_N: tl.constexpr, TILE_PARTS: tl.constexpr):
    """The sum of [parts, n], in an order that does not depend on which part came when."""
    part = tl.arange(0, TILE_PARTS)
    total = _load_parts(sums, part, n, N, size, parts)
    for start in tl.range(TILE_PARTS, parts, TILE_PARTS):
        total += _load_parts(sums, start + part, n, N, size, parts)
    return tl.sum(total, 0)


@triton.jit
def _load_parts(sums, part, n, N, size, parts):
    mask = (part[:, None] < parts) & (n[None, :] < N)
    at = sums + part[:, None] * size + n[None, :]
    return tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")  # not from L1


@triton.jit
def finish_sum(total, scale, bias, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The sum over K, scaled and with the bias: [TILE_N] in float32."""
    if HAS_NORM:
        total *= scale
    if HAS_BIAS:
        total += bias.to(tl.float32)
    return total


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """One of `ACTIVATIONS` of linear.py."""
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)  # keeps a NaN
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 * x * (1 + tanh(inner)) without overflow
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    else:
        tl.static_assert(False, "unknown activation")


@triton.jit
def activated_product(
    gate, up, output, count, TILE: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    pdl_sync(PDL)
    x = tl.load(gate + at, mask=at < count)
    y = tl.load(up + at, mask=at < count)
    activated = activate(x.to(tl.float32), ACTIVATION).to(x.dtype).to(tl.float32)
    tl.store(output + at, (activated * y.to(tl.float32)).to(x.dtype), mask=at < count)


def activated_product_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of two tensors of one shape; the activation and the product round."""
    output = torch.empty_like(gate, memory_format=torch.contiguous_format)
    launch(
        activated_product, (triton.cdiv(gate.numel(), _PRODUCT_TILE),),
        gate.contiguous(), up.contiguous(), output, gate.numel(),
        TILE=_PRODUCT_TILE, ACTIVATION=activation, num_warps=4,
    )  # fmt: skip
    return output


def linears_triton(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = ""
) -> Tensor:
    """`linears`, or with an activation `gated_linear` of the weights gate and up."""
    return fused_linears_triton(x, weights, biases, None, activation, bool(activation))


def fused_linears_triton(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    norm: TritonNorm | None = None,
    activation: str = "",
    is_gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """`fused_linears` of one token. The arguments after x are the fields of `Linear`.

    Weights are all contiguous or all transposed.
    """
    if not all(weight.is_contiguous() for weight in weights):
        if norm is not None or is_gated:
            raise ValueError(
                "Transposed weights are multiplied without norm and without gate: run these apart."
            )
        return _transposed_linears(x, weights, biases, activation, residual)
    x = x.contiguous()
    dim = x.shape[-1]
    sizes = output_sizes(weights, is_gated)
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    (norm_weight, _), numbers, _ = norm_arguments(norm, x)
    tile_n, tile_k, warps = _tiles(sum(sizes), dim, is_gated)
    launch(
        linear_few_tokens, (sum(triton.cdiv(size, tile_n) for size in sizes),), x, y,
        norm_weight.contiguous(),
        x if residual is None else residual.contiguous(), *padded(x, weights), *padded(x, biases),
        *padded(0, sizes),
        dim, *numbers, TILE_N=tile_n, TILE_K=tile_k, EVEN=dim % tile_k == 0,
        IS_WHOLE=dim <= tile_k, IS_PAIRED=dim <= tile_k and _is_paired(weights, [dim]),
        HAS_NORM=norm is not None, HAS_BIAS=bool(biases), ACTIVATION=activation, IS_GATED=is_gated,
        HAS_RESIDUAL=residual is not None, num_warps=warps,
    )  # fmt: skip
    return y


def _transposed_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    residual: Tensor | None,
) -> Tensor:
    x = x.contiguous()
    dim = x.shape[-1]
    sizes = [weight.shape[0] for weight in weights]
    y = x.new_empty(*x.shape[:-1], sum(sizes))
    tile_n, tile_k, warps = _transposed_tiles(x.element_size())
    blocks = sum(triton.cdiv(size, tile_n) for size in sizes)
    parts = triton.cdiv(dim, tile_k)
    sums = x
    counters = x
    if parts > 1:
        sums = x.new_empty(parts, sum(sizes), dtype=torch.float32)
        counters = counters_of(x, blocks)
    launch(
        linear_transposed, (blocks, parts), x, y, x if residual is None else residual.contiguous(),
        *padded(x, weights), *padded(x, biases), *padded(0, sizes), dim, sums, counters, parts,
        TILE_N=tile_n, TILE_K=tile_k, TILE_PARTS=min(32, triton.next_power_of_2(parts)),
        EVEN=dim % tile_k == 0,
        IS_PAIRED=_is_paired(weights, sizes), IS_SPLIT=parts > 1, HAS_BIAS=bool(biases),
        ACTIVATION=activation,
        HAS_RESIDUAL=residual is not None, num_warps=warps,
    )  # fmt: skip
    return y


def _is_paired(weights: Sequence[Tensor], lengths: Sequence[int]) -> bool:
    """Whether two numbers of these weights make an int32, with rows of these lengths."""
    is_half = all(weight.element_size() == 2 and weight.data_ptr() % 4 == 0 for weight in weights)
    return is_half and all(length % 2 == 0 for length in lengths)


class _Pool:
    """Zeros of one device. Each captured launch gets its own; then they are used again.

    Launches that share counters must not run at the same time, so two graphs may run at once unless
    a million counters were captured between them.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.zeros = zeros
        self.used = 0

    def take(self, number: int) -> Tensor:
        start = self.used if self.used + number <= len(self.zeros) else 0
        # 16-byte aligned, so that Triton compiles one variant.
        self.used = start + triton.cdiv(number, 4) * 4
        return self.zeros[start : start + number]


_POOLS: dict[torch.device, _Pool] = {}


def counters_of(x: Tensor, number: int) -> Tensor:
    """Zeros on the device of x, which a launch leaves as zeros.

    Zeroing them in a graph would cost a launch at each replay. So a captured launch takes them from
    a pool that the first launch outside of a capture has zeroed.
    """
    is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    if is_captured and x.device in _POOLS:
        return _POOLS[x.device].take(number)
    if x.is_cuda and not is_captured and x.device not in _POOLS:
        # Kept: graphs point to it.
        _POOLS.setdefault(x.device, _Pool(x.new_zeros(_COUNTERS, dtype=torch.int32)))
        torch.cuda.current_stream(x.device).synchronize()  # captures run on other streams
    return x.new_zeros(number, dtype=torch.int32)


def output_sizes(weights: Sequence[Any], is_gated: bool) -> list[int]:
    """The output features of each weight; gate and up have one output together."""
    return [weight.shape[0] for weight in (weights[:1] if is_gated else weights)]


def padded(absent: Any, given: Sequence[Any]) -> list[Any]:
    """`given`, with `absent` for each weight that a kernel could take and does not get."""
    return [*given, *[absent] * (WEIGHT_ARGUMENTS - len(given))]


def _tiles(size: int, dim: int, is_gated: bool) -> tuple[int, int, int]:
    """TILE_N, TILE_K and warps: fastest, or nearly, by whole steps of 11 shapes from 1B to 14B
    (H200, 2026-11-17).

    Up to 4096 wide, an instance reads whole rows at once. Most wider ones are read in parts; so is
    a head of a large vocabulary, whose many instances keep enough loads in flight. An H200 runs
    4224 warps at once: if long rows are most of these, a warp for each is best, else larger
    instances.
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
    # Of 2560 rows: 3 % faster where 9728 wide, slower where 10240.
    least = 2048 if dim % 1024 else 2560
    return (1, 512, 1) if least < size <= 4224 else (4, 1024, 4)


def _transposed_tiles(element_size: int) -> tuple[int, int, int]:
    """TILE_N, TILE_K and warps: the fastest of nine by steps of GPT-2 XL (H200, 2026-11-17).

    A row of a tile is one cache line, 128 bytes. Tiles of 32 bytes and all of K need no sum across
    instances, but a step took 0.57 ms instead of 0.45 (12 layers).
    """
    return 128 // element_size, 128, 1 if element_size == 2 else 2
