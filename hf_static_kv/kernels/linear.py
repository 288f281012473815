"""Linear layers of a decode step.

    linears(x, [q, k, v], biases)           x q^T, x k^T, x v^T side by side in one output
    gated_linear(x, gate, up, activation)   activation(x gate^T) * (x up^T)

    x: [..., K]   weights: [N_i, K]   biases: [N_i]   output: [..., sum of N_i]

With few tokens a linear layer is limited by the reading of its weights. Libraries that are tuned for many tokens read a
small weight at a third of the memory bandwidth (H200, 2026-11-15), so up to MAX_TOKENS run in our kernels. Both are
registered with torch, so that `exact` can replace them by their batch-invariant forms.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_TOKENS, MAX_WEIGHTS = 16, 3
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def is_supported(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernels take these: few tokens on a GPU, contiguous weights, one dtype."""
    tokens, is_half = x.numel() // x.shape[-1], x.dtype in (torch.bfloat16, torch.float16)
    has_few_tokens = tokens <= MAX_TOKENS if is_half else (tokens == 1 and x.dtype == torch.float32)
    return x.is_cuda and has_few_tokens and all(w.dtype == x.dtype and w.is_contiguous() for w in weights)


@torch.library.custom_op("hf_static_kv::linears", mutates_args=())
def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """x w^T + b of 1 to MAX_WEIGHTS weights, side by side; one bias for each weight, or none."""
    check_linears(x, weights, biases)
    return linears_kernel(x, weights, biases) if is_supported(x, weights) else linears_plain(x, weights, biases)


@linears.register_fake
def _(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def check_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
    """Raise ValueError where shapes or dtypes do not fit."""
    if not 1 <= len(weights) <= MAX_WEIGHTS or len(biases) not in (0, len(weights)):
        raise ValueError(f"linears takes 1 to {MAX_WEIGHTS} weights and as many biases or none, got {len(weights)}.")
    if any(weight.shape[1] != x.shape[-1] for weight in weights):
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"x {tuple(x.shape)} and weights {shapes} do not fit: [..., K] and [N, K].")
    if len(dtypes := sorted({str(tensor.dtype) for tensor in (x, *weights, *biases)})) > 1:
        raise ValueError(f"x, weights and biases must have one dtype, got {' and '.join(dtypes)}.")


def linears_kernel(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = "") -> Tensor:
    """The kernel for one token, or for more the tensor-core kernel, which is also batch-invariant."""
    from hf_static_kv.kernels.invariant_linear_triton import invariant_linears_triton
    from hf_static_kv.kernels.linear_triton import linears_triton

    return (linears_triton if x.numel() == x.shape[-1] else invariant_linears_triton)(x, weights, biases, activation)


def linears_plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    return torch.cat([F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)], dim=-1)


@torch.library.custom_op("hf_static_kv::gated_linear", mutates_args=())
def gated_linear(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(x gate^T) * (x up^T), with one of `ACTIVATIONS`; both products and the activation are rounded."""
    check_gated(x, gate, up, activation)
    if is_supported(x, [gate, up]):
        return linears_kernel(x, [gate, up], [], activation)
    return activate(F.linear(x, gate), activation) * F.linear(x, up)


@gated_linear.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def check_gated(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    """Raise ValueError where activation, shapes, strides or dtypes do not fit."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if gate.shape != up.shape or gate.shape[1] != x.shape[-1] or gate.stride() != up.stride():
        shapes = f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and up {tuple(up.shape)}"
        raise ValueError(f"{shapes} do not fit: [..., K], [N, K] and [N, K], gate and up of the same strides.")
    check_linears(x, [gate, up], [])


def activate(x: Tensor, activation: str) -> Tensor:
    """One of `ACTIVATIONS` in plain PyTorch."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if "tanh" in activation else "none")
