"""Norms in Triton, one kernel instance per vector [D]. Formulas and styles are in norm.py."""

from contextlib import suppress

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# Norm of norm.py: weight, eps, (offset, cast_first, is_centred), bias
TritonNorm = tuple[Tensor, float, tuple[float, bool, bool], Tensor | None]


@triton.jit
def fused_add_norm(
    x, other, weight, bias, pre_weight, pre_bias, total, output, eps, offset, pre_eps, pre_offset,
    vectors, x_block, x_vector, count, D: tl.constexpr, TILE: tl.constexpr,
    CAST_FIRST: tl.constexpr, IS_CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRE_CAST_FIRST: tl.constexpr, PRE_IS_CENTRED: tl.constexpr, PRE_HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr, HAS_PRE_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, TILE)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    b = tl.load(bias + d, mask=d < D, other=0.0) if HAS_BIAS else w
    pre_w = tl.load(pre_weight + d, mask=d < D, other=0.0) if HAS_PRE_NORM else w
    pre_b = tl.load(pre_bias + d, mask=d < D, other=0.0) if PRE_HAS_BIAS else w
    pdl_sync(PDL)
    at = i * D + d
    y = tl.load(x + i // vectors * x_block + i % vectors * x_vector + d, mask=d < D, other=0.0)
    if PARTS > 0:
        term = tl.load(other + at, mask=d < D, other=0.0)
        for part in tl.static_range(1, PARTS):
            term += tl.load(other + part * count + at, mask=d < D, other=0.0)
        term = term.to(y.dtype)
        if HAS_PRE_NORM:
            term = _normalize(
                term, pre_w, pre_b, pre_eps, pre_offset, D, TILE,
                PRE_CAST_FIRST, PRE_IS_CENTRED, PRE_HAS_BIAS,
            )  # fmt: skip
        y = (y.to(tl.float32) + term.to(tl.float32)).to(y.dtype)
        tl.store(total + at, y, mask=d < D)
    y = _normalize(y, w, b, eps, offset, D, TILE, CAST_FIRST, IS_CENTRED, HAS_BIAS)
    tl.store(output + at, y, mask=d < D)


@triton.jit
def _normalize(
    x, w, bias, eps, offset, D: tl.constexpr, TILE: tl.constexpr,
    CAST_FIRST: tl.constexpr, IS_CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    if IS_CENTRED:
        y = x.to(tl.float32)
        y = tl.where(tl.arange(0, TILE) < D, y - tl.sum(y, 0) / D, 0.0)
        y = y * rms_scale(y, eps, D) * w.to(tl.float32)
        if HAS_BIAS:
            y += bias.to(tl.float32)
        return y.to(x.dtype)
    else:
        return rms_multiply(x, rms_scale(x, eps, D), w, offset, CAST_FIRST)


@triton.jit
def rms_scale(x, eps, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps); x is 0 beyond D."""
    y = x.to(tl.float32)
    return tl.rsqrt(tl.sum(y * y, 0) / D + eps)


@triton.jit
def rms_multiply(x, scale, w, offset, CAST_FIRST: tl.constexpr):
    y = x.to(tl.float32) * scale
    w = w.to(tl.float32)
    y = y.to(x.dtype).to(tl.float32) * w if CAST_FIRST else y * (offset + w)
    return y.to(x.dtype)


def norm_triton(
    x: Tensor, other: Tensor | None, norm: TritonNorm, pre_norm: TritonNorm | None
) -> tuple[Tensor, Tensor]:
    """x, or its sum with `other` or with the `pre_norm` of `other`; and the norm of that.

    `other` may be float32 [parts, ...]: their sum.
    """
    blocks = as_blocks(x)
    dim = x.shape[-1]
    tile = triton.next_power_of_2(dim)
    output = x.new_empty(x.shape)
    total = x if other is None else x.new_empty(x.shape)
    parts = 0 if other is None else 1 if other.ndim == x.ndim else len(other)
    tensors, numbers, constants = norm_arguments(norm, x)
    pre_tensors, pre_numbers, pre_constants = norm_arguments(pre_norm, norm[0])
    launch(
        fused_add_norm, (x.numel() // dim,), blocks, blocks if other is None else other.contiguous(),
        *tensors, *pre_tensors, total, output, *numbers, *pre_numbers,
        blocks.shape[1], *blocks.stride()[:2], x.numel(), D=dim, TILE=tile, **constants,
        **{f"PRE_{name}": value for name, value in pre_constants.items()},
        PARTS=parts, HAS_PRE_NORM=pre_norm is not None, num_warps=num_warps(tile),
        # an FMA would give the norm of a sum other bits than the norm alone
        enable_fp_fusion=False,
    )  # fmt: skip
    return total, output


def norm_arguments(
    norm: TritonNorm | None, absent: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[float, float], dict[str, bool]]:
    """What a kernel takes of a norm: weight and bias, eps and offset, and its constants.

    `absent` stands in for a weight that is not there.
    """
    weight, eps, style, bias = norm or (absent, 0.0, (0.0, False, False), None)
    offset, cast_first, is_centred = style
    constants = {"CAST_FIRST": cast_first, "IS_CENTRED": is_centred, "HAS_BIAS": bias is not None}
    return (weight, weight if bias is None else bias), (float(eps), float(offset)), constants


def num_warps(tile: int) -> int:
    """The warps of an instance that sums `tile` elements: the order of the sum depends on it."""
    return min(16, max(1, tile // 256))


def as_blocks(x: Tensor) -> Tensor:
    """`x` as [blocks, vectors, D], without a copy for the heads of a query in a joint projection.

    Vectors must be aligned as in a contiguous tensor: the order of the sum depends on the alignment.
    """
    is_aligned = all(n % 16 == 0 for n in (x.data_ptr(), x.shape[-1], *x.stride()[:-1]))
    if not x.is_contiguous() and x.ndim > 2 and x.stride(-1) == 1 and is_aligned:
        with suppress(RuntimeError):  # no such view
            return x.view(-1, *x.shape[-2:])
    return x.contiguous().view(-1, 1, x.shape[-1])
