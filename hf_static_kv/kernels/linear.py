"""Linear layers of a decode step.

    linears(x, [q, k, v], biases)           x q^T, x k^T, x v^T side by side in one output
    gated_linear(x, gate, up, activation)   activation(x gate^T) * (x up^T)
    fused_linears(x, layer)                 residual + activation(norm(x) w^T + b), side by side
        gated                               residual + activation(norm(x) gate^T + b_gate)
                                                       * (norm(x) up^T + b_up)
    linear_add_norm(x, w, other, norm)      s = other + x w^T, and the norm of s

    x: [..., K]   weights: [N_i, K]   biases: [N_i]   output, residual: [..., sum of N_i]; gated: [..., N]

With few tokens a linear layer is limited by the reading of its weights. Libraries tuned for many
tokens read a small weight at a third of the memory bandwidth (H200, 2026-11-15), so up to
MAX_TOKENS run in our kernels. The first two are registered with torch: `exact` replaces them by
their batch-invariant forms.

`fused_linears` is one launch for up to MAX_TOKENS_FUSED tokens. It rounds where the operations of a
model round, except around the norm: the sums are scaled by 1 / sqrt(mean(x^2) + eps) at their end, in
float32. For one token nothing is rounded before; for more the product of x and the norm's weight is.
With transposed weights (GPT-2) the norm is a kernel of its own, a gated layer is computed plainly,
and so are several tokens.
It takes packed weights (packed.py) too, which have four or eight bits: of up to 16 tokens.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_static_kv.kernels import norm as norms
from hf_static_kv.kernels.norm import STYLES, Norm, check_norm, norm_plain
from hf_static_kv.kernels.packed import Packed, layout_of, unpacked

MAX_TOKENS = 64
MAX_TOKENS_OF_ONE = 16  # weight: of more tokens a library computes it as fast
MAX_TOKENS_FUSED = 8  # of 16, with their norm inside, a step was 14 % slower (H200, 2026-11-19)
MAX_WEIGHTS = 3
# By name: torch's function with its keywords. The formulas of the kernels are in linear_triton.py.
ACTIVATIONS: dict[str, partial[Tensor]] = {
    "silu": partial(F.silu),
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": partial(F.gelu),
    "relu": partial(F.relu),
}


class Linear(NamedTuple):
    """Linear layers with one input, and what `fused_linears` computes with them."""

    weights: list[Any]  # [N_i, K]: tensors, or `Packed` ones of one kind
    biases: list[Tensor]  # as many, or none
    norm: Norm | None = None  # an RMS norm of the input
    activation: str = ""  # one of `ACTIVATIONS`, or none
    is_gated: bool = False  # the weights are gate and up
    residual: Any = None  # a tensor that is added; in a recorded pass the value that stands for it


def is_supported(x: Tensor, weights: Sequence[Tensor], is_gated: bool = False) -> bool:
    """Whether the kernels take these: few tokens on a GPU, one dtype, contiguous weights.

    Transposed weights only for one token and without a gate.
    """
    tokens = x.numel() // x.shape[-1]
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    most = MAX_TOKENS if len(weights) > 1 else MAX_TOKENS_OF_ONE
    has_few_tokens = tokens <= most if is_half else (tokens == 1 and x.dtype == torch.float32)
    if not x.is_cuda or not has_few_tokens or any(weight.dtype != x.dtype for weight in weights):
        return False
    may_transpose = tokens == 1 and not is_gated
    return _are_contiguous(weights) or (
        may_transpose and _are_contiguous([weight.t() for weight in weights])
    )


def _are_contiguous(weights: Sequence[Tensor]) -> bool:
    return all(weight.is_contiguous() for weight in weights)


def fuses(x: Tensor, layer: Linear) -> bool:
    """Whether `fused_linears` runs in a kernel: for few tokens that are supported."""
    has_few_tokens = x.numel() <= MAX_TOKENS_FUSED * x.shape[-1]
    return has_few_tokens and is_supported(x, layer.weights, layer.is_gated)


@torch.library.custom_op("hf_static_kv::linears", mutates_args=())
def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """x w^T + b of 1 to MAX_WEIGHTS weights, side by side; one bias for each weight, or none."""
    check_linears(x, weights, biases)
    run = linears_kernel if is_supported(x, weights) else linears_plain
    return run(x, weights, biases)


@linears.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def check_linears(x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor]) -> None:
    """Raise ValueError if shapes or dtypes do not fit."""
    if not 1 <= len(weights) <= MAX_WEIGHTS or len(biases) not in (0, len(weights)):
        takes = f"1 to {MAX_WEIGHTS} weights and as many biases or none"
        raise ValueError(f"linears takes {takes}, got {len(weights)}.")
    if any(weight.shape[1] != x.shape[-1] for weight in weights):
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"x {tuple(x.shape)} and weights {shapes} do not fit: [..., K], [N, K].")
    if len(dtypes := sorted({str(tensor.dtype) for tensor in (x, *weights, *biases)})) > 1:
        raise ValueError(f"x, weights and biases must have one dtype, got {' and '.join(dtypes)}.")


def linears_kernel(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = ""
) -> Tensor:
    """The kernel for one token; for some the tensor-core kernel, which is also batch-invariant; for
    more that of several weights.
    """
    from hf_static_kv.kernels.invariant_linear_triton import invariant_linears_triton
    from hf_static_kv.kernels.joint_linear_triton import joint_linears_triton
    from hf_static_kv.kernels.linear_triton import linears_triton

    tokens = x.numel() // x.shape[-1]
    few = linears_triton if tokens == 1 else invariant_linears_triton
    run = few if tokens <= MAX_TOKENS_OF_ONE else joint_linears_triton
    return run(x, weights, biases, activation)


def linears_plain(x: Tensor, weights: Sequence[Any], biases: Sequence[Tensor]) -> Tensor:
    plain = [unpacked(weight) if isinstance(weight, Packed) else weight for weight in weights]
    parts = [F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(plain)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)  # of one part it is a copy


@torch.library.custom_op("hf_static_kv::gated_linear", mutates_args=())
def gated_linear(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(x gate^T) * (x up^T); both products and the activation are rounded."""
    check_gated(x, gate, up, activation)
    if is_supported(x, [gate, up], is_gated=True):
        return linears_kernel(x, [gate, up], [], activation)
    return gated_linear_plain(x, gate, up, activation)


@gated_linear.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def gated_linear_plain(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return activate(F.linear(x, gate), activation) * F.linear(x, up)


def activated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up of two tensors of one shape, as one launch; both round."""
    if not gate.is_cuda:
        return activate(gate, activation) * up
    check_activation(activation)
    from hf_static_kv.kernels.linear_triton import activated_product_triton

    return activated_product_triton(gate, up, activation)


def check_gated(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """Raise ValueError if activation, shapes, strides or dtypes do not fit."""
    check_activation(activation)
    if gate.shape != up.shape or gate.shape[1] != x.shape[-1] or gate.stride() != up.stride():
        shapes = f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and up {tuple(up.shape)}"
        raise ValueError(
            f"{shapes} do not fit: [..., K], [N, K] and [N, K], gate and up of the same strides."
        )
    check_linears(x, [gate, up], [])


def activate(x: Tensor, activation: str) -> Tensor:
    """One of `ACTIVATIONS` in plain PyTorch."""
    check_activation(activation)
    return ACTIVATIONS[activation](x)


def check_activation(name: str, or_empty: bool = False) -> None:
    """Raise ValueError for a name that is not in `ACTIVATIONS`."""
    if name not in ACTIVATIONS and (name or not or_empty):
        known = f"{'empty or ' if or_empty else ''}one of {', '.join(ACTIVATIONS)}"
        raise ValueError(f"activation must be {known}, got {name!r}.")


def activation_name(function: Any, keywords: Mapping[str, Any]) -> str:
    """The name of `function(x, **keywords)` in `ACTIVATIONS`; "" if it is not there."""
    # What changes the result, and is not torch's default.
    given = {
        k: v for k, v in keywords.items() if (k, v) != ("approximate", "none") and k != "inplace"
    }
    known = ((name, one.func, one.keywords) for name, one in ACTIVATIONS.items())
    return next((name for name, *one in known if one == [function, given]), "")


def fused_linears(x: Tensor, layer: Linear) -> Tensor:
    """Linear layers with the RMS norm before them, and the activation and the sum after them."""
    check_fused(x, layer)
    if is_packed(layer):
        return _packed_linears(x, layer)
    if not fuses(x, layer):
        return fused_linears_plain(x, layer)
    if layer.norm is not None and not _are_contiguous(layer.weights):
        x = norms.norm(x, layer.norm)
        layer = layer._replace(norm=None)
    from hf_static_kv.kernels.fused_linear_triton import fused_linears_of_few_triton
    from hf_static_kv.kernels.linear_triton import fused_linears_triton

    is_one = x.numel() == x.shape[-1]
    run = fused_linears_triton if is_one else fused_linears_of_few_triton
    return run(x, *layer)


def is_packed(layer: Linear) -> bool:
    """Whether the weights have four or eight bits."""
    return isinstance(layer.weights[0], Packed)


def _packed_linears(x: Tensor, layer: Linear) -> Tensor:
    if len({layout_of(weight) for weight in layer.weights}) > 1:
        raise ValueError("Packed weights of one launch must be of one kind: run these apart.")
    if not x.is_cuda:
        return fused_linears_plain(x, layer)
    from hf_static_kv.kernels.packed_triton import packed_linears_triton

    return packed_linears_triton(x, *layer)


def check_fused(x: Tensor, layer: Linear) -> None:
    """Raise ValueError if activation, norm, shapes or dtypes do not fit."""
    weights, biases, norm, activation, is_gated, residual = layer
    check_activation(activation, or_empty=True)
    check_linears(x, weights, biases)
    sizes = [weight.shape[0] for weight in weights]
    if is_gated and (len(sizes) != 2 or sizes[0] != sizes[1]):
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"A gated layer takes two weights of one shape, got {shapes}.")
    shapes = [tuple(bias.shape) for bias in biases]
    if biases and shapes != [(size,) for size in sizes]:
        raise ValueError(f"biases {shapes} and weights of {sizes} rows do not fit.")
    if norm is not None:
        check_norm(x, norm, "norm")
        if norm.style not in STYLES:
            raise ValueError(
                "fused_linears takes an RMS norm without bias: run a LayerNorm before it."
            )
    shape = (*x.shape[:-1], sizes[0] if is_gated else sum(sizes))
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
        got = f"{tuple(residual.shape)} {residual.dtype}"
        raise ValueError(f"residual must be as the output, {tuple(shape)} {x.dtype}, got {got}.")


def fused_linears_plain(x: Tensor, layer: Linear) -> Tensor:
    weights, biases, norm, activation, is_gated, residual = layer
    if norm is not None:
        x = norm_plain(x, norm)
    y = linears_plain(x, weights, biases)
    y, up = y.chunk(2, dim=-1) if is_gated else (y, None)
    y = activate(y, activation) if activation else y
    y = y if up is None else y * up
    return y if residual is None else residual + y


def linear_add_norm(
    x: Tensor, weight: Tensor, other: Tensor, norm: Norm, pre_norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """`add_norm` of `other` and x w^T; for some tokens the kernel of the norm adds partial sums."""
    check_linears(x, [weight], [])
    tokens = x.numel() // x.shape[-1]
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    has_some_tokens = is_half and MAX_TOKENS_OF_ONE < tokens <= MAX_TOKENS
    if x.is_cuda and has_some_tokens and weight.is_contiguous():
        from hf_static_kv.kernels.joint_linear_triton import linear_parts_triton, num_parts

        if (parts := num_parts(weight)) > 1:
            sums = linear_parts_triton(x, weight, parts)
            return norms.add_norm(other, sums, norm, pre_norm)
    return norms.add_norm(other, linears(x, [weight], []), norm, pre_norm)
