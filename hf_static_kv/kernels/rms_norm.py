"""RMS norm over the last dim, of a sum too.

    rms_norm(x, weight, eps, style)               x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm(x, other, weight, eps, style)    s = x + other, and the norm of s
    add_rms_norm(..., pre_norm)                   s = x + pre_norm(other), and the norm of s

    x, other: [..., D]   weight: [D]   computed in float32

Models differ in how they multiply by the weight, which `NormStyle` says. Llama rounds to the dtype of x before it
multiplies: NormStyle(0, True). Gemma multiplies by 1 + weight before it rounds: NormStyle(1, False).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class NormStyle(NamedTuple):
    """How a norm multiplies by its weight."""

    offset: float  # added to the weight
    cast_first: bool  # round to the dtype of x before the product


STYLES = (NormStyle(0.0, True), NormStyle(0.0, False), NormStyle(1.0, False))


class Norm(NamedTuple):
    """The parameters of one norm."""

    weight: Tensor
    eps: float
    style: NormStyle


def rms_norm(x: Tensor, weight: Tensor, eps: float, style: NormStyle) -> Tensor:
    """The norm of x, in its dtype."""
    _check(x, weight)
    if not x.is_cuda:
        return rms_norm_plain(x, weight, eps, style)
    from hf_static_kv.kernels.rms_norm_triton import rms_norm_triton

    return rms_norm_triton(x, None, Norm(weight, eps, style), None)[1]


def add_rms_norm(
    x: Tensor, other: Tensor, weight: Tensor, eps: float, style: NormStyle, pre_norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """The sum and its norm; the sum and the output of `pre_norm` are rounded to the dtype of x."""
    _check(x, weight)
    if pre_norm is not None:
        _check(x, pre_norm.weight)
    if other.shape != x.shape or other.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and other {tuple(other.shape)} {other.dtype} must be alike.")
    if not x.is_cuda:
        total = x + (other if pre_norm is None else rms_norm_plain(other, *pre_norm))
        return total, rms_norm_plain(total, weight, eps, style)
    from hf_static_kv.kernels.rms_norm_triton import rms_norm_triton

    return rms_norm_triton(x, other, Norm(weight, eps, style), pre_norm)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.shape[-1] != weight.shape[0] or weight.ndim != 1:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: [..., D] and [D].")


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float, style: NormStyle) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype) if style.cast_first else (y * (style.offset + weight.float())).to(x.dtype)
