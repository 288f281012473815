"""RMS norm and LayerNorm over the last dim, of a sum too.

    norm(x, norm)
        RMS norm                      x / sqrt(mean(x^2) + eps) * weight
        LayerNorm                     (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias
    add_norm(x, other, norm)          s = x + other, and the norm of s
    add_norm(..., pre_norm)           s = x + pre_norm(other), and the norm of s

    x, other: [..., D]   weight, bias: [D]   computed in float32

Llama's RMS norm rounds to the dtype of x before it multiplies by the weight: NormStyle(0, True).
Gemma's multiplies by 1 + weight before it rounds: NormStyle(1, False). LayerNorm rounds at the end.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import wrap_torch_function

from hf_static_kv.kernels.gradients import differentiable


class NormStyle(NamedTuple):
    """How a norm centres x and multiplies by its weight."""

    offset: float  # added to the weight
    cast_first: bool  # round to the dtype of x before the product
    is_centred: bool = False  # LayerNorm: the mean is subtracted first


# Of RMS norms: kernels that contain a norm compute these, and a model is searched for them.
STYLES = (NormStyle(0.0, True), NormStyle(0.0, False), NormStyle(1.0, False))
LAYER_NORM = NormStyle(0.0, False, True)
KNOWN_STYLES = (*STYLES, LAYER_NORM)


class Norm(NamedTuple):
    """The parameters of one norm."""

    weight: Tensor
    eps: float
    style: NormStyle
    bias: Tensor | None = None  # of a LayerNorm


@wrap_torch_function(lambda x, *args, **kwargs: (x,))  # one call for a TorchFunctionMode
def norm(x: Tensor, norm: Norm) -> Tensor:
    """The norm of x, in its dtype."""
    check_norm(x, norm)
    if not x.is_cuda:
        return norm_plain(x, norm)
    from hf_static_kv.kernels.norm_triton import norm_triton

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return norm_triton(x, None, norm._replace(weight=weight, bias=bias), None)[1]

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return norm_plain(x, norm._replace(weight=weight, bias=bias))

    return differentiable(kernel, plain, x, norm.weight, norm.bias)  # type: ignore[no-any-return]


@wrap_torch_function(lambda x, *args, **kwargs: (x,))
def add_norm(
    x: Tensor, other: Tensor, norm: Norm, pre_norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """The sum and its norm; the sum and the output of `pre_norm` are rounded to the dtype of x.

    `other` is as x, or float32 [parts, ...] whose sum is rounded to it.
    """
    check_norm(x, norm)
    if pre_norm is not None:
        check_norm(x, pre_norm)
    has_parts = other.ndim > x.ndim and other.dtype == torch.float32
    if other.shape[has_parts:] != x.shape or (other.dtype != x.dtype and not has_parts):
        both = f"x {tuple(x.shape)} {x.dtype} and other {tuple(other.shape)} {other.dtype}"
        raise ValueError(f"{both} must be alike.")
    if not x.is_cuda:
        other = other.sum(0).to(x.dtype) if has_parts else other
        total = x + (other if pre_norm is None else norm_plain(other, pre_norm))
        return total, norm_plain(total, norm)
    from hf_static_kv.kernels.norm_triton import norm_triton

    return norm_triton(x, other, norm, pre_norm)


def check_norm(x: Tensor, norm: Norm, weight_name: str = "weight") -> None:
    """Raise ValueError if the shapes or the style do not fit."""
    weight, _, style, bias = norm
    for name, tensor in ((weight_name, weight), ("bias", bias)):
        if tensor is not None and (tensor.ndim != 1 or tensor.shape != x.shape[-1:]):
            shapes = f"x {tuple(x.shape)} and {name} {tuple(tensor.shape)}"
            raise ValueError(f"{shapes} do not fit: [..., D] and [D].")
    if style not in KNOWN_STYLES:
        known = f"LAYER_NORM, {LAYER_NORM}, or one of STYLES, {STYLES}"
        raise ValueError(f"The style of a norm must be {known}, got {style}.")
    if bias is not None and not style.is_centred:
        raise ValueError(f"Only a LayerNorm has a bias: omit it with {style}.")


def norm_plain(x: Tensor, norm: Norm) -> Tensor:
    weight, eps, style, bias = norm
    if style.is_centred:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    if style.cast_first:
        return weight * y.to(x.dtype)
    return (y * (style.offset + weight.float())).to(x.dtype)
