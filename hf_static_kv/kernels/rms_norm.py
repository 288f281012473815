"""RMS norm of each row, of a sum too: the plain PyTorch twins, and the choice between them and the kernel.

    rms_norm(x, weight, eps, style)      y = x / sqrt(mean(x^2) + eps), in float32, times the weight
    sum_and_rms_norm(x, other, ...)      s = x + other, and the norm of s; with `first`, s = x + the first norm of other

Models differ in what follows. `NormStyle(offset, cast_first)`: Llama multiplies by the weight after y is back in the
model's dtype, (0, True); Gemma by 1 + weight before, (1, False).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class NormStyle(NamedTuple):
    """What is added to the weight, and whether y is rounded to the model's dtype before it is multiplied."""

    offset: float
    cast_first: bool


STYLES = (NormStyle(0.0, True), NormStyle(0.0, False), NormStyle(1.0, False))


class Norm(NamedTuple):
    """What a norm consists of."""

    weight: torch.Tensor
    eps: float
    style: NormStyle


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, style: NormStyle) -> torch.Tensor:
    """The norm of every row of `x` [..., D], times `weight` [D]; in x's dtype."""
    _check(x, weight)
    if x.is_cuda:
        from hf_static_kv.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, None, weight, eps, *style)[1]
    return rms_norm_plain(x, weight, eps, style)


def sum_and_rms_norm(
    x: torch.Tensor,
    other: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    style: NormStyle,
    first: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` + `other`, or + the `first` norm of it, each rounded as it would be by itself; and the norm of that."""
    _check(x, weight)
    if first is not None:
        _check(x, first.weight)
    if other.shape != x.shape or other.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and other {tuple(other.shape)} {other.dtype} must be alike.")
    if x.is_cuda:
        from hf_static_kv.kernels.rms_norm_triton import rms_norm_triton

        return rms_norm_triton(x, other, weight, eps, *style, first)
    total = x + (other if first is None else rms_norm_plain(other, *first))
    return total, rms_norm_plain(total, weight, eps, style)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.shape[-1] != weight.shape[0] or weight.ndim != 1:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: [..., D] and [D].")


def rms_norm_plain(x: torch.Tensor, weight: torch.Tensor, eps: float, style: NormStyle) -> torch.Tensor:
    """The norm in plain PyTorch."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if style.cast_first:
        return weight * y.to(x.dtype)
    return (y * (style.offset + weight.float())).to(x.dtype)
