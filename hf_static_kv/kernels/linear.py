"""Linear layers: the plain PyTorch twins, and the choice between them and the kernels.

    linears(x, [q, k, v])          x q^T, x k^T, x v^T side by side, in one launch over the weights where they are
    gated_linear(x, gate, up)      act(x gate^T) * (x up^T)

    x: [..., K]    weights: [N_i, K]    output: [..., sum of N_i]

For a few rows a linear layer is the reading of its weights, and libraries tuned for many rows read a small matrix at a
third of the memory's speed: up to MAX_ROWS run in our kernels. Registered with torch, so that `torch.compile` takes
each for one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

MAX_ROWS = 16
MAX_WEIGHTS = 3
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


def is_served(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take this: few rows on a GPU, and one dtype for all."""
    rows = x.numel() // x.shape[-1]
    return (
        x.is_cuda
        and all(weight.dtype == x.dtype and weight.is_contiguous() for weight in weights)
        and (rows == 1 or (rows <= MAX_ROWS and x.dtype in (torch.bfloat16, torch.float16)))
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


@torch.library.custom_op("hf_static_kv::linears", mutates_args=())
def linears(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """`x` times each of the weights, side by side; `biases` has one for each weight, or none at all."""
    check_linears(x, weights, biases)
    return linears_kernel(x, weights, biases) if is_served(x, weights) else linears_plain(x, weights, biases)


@linears.register_fake
def _(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def check_linears(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    """Raise where these do not fit."""
    if not 1 <= len(weights) <= MAX_WEIGHTS or len(biases) not in (0, len(weights)):
        raise ValueError(f"linears takes 1 to {MAX_WEIGHTS} weights and as many biases or none, got {len(weights)}.")
    if any(weight.shape[1] != x.shape[-1] for weight in weights):
        shapes = [tuple(weight.shape) for weight in weights]
        raise ValueError(f"x {tuple(x.shape)} and weights {shapes} do not fit: [..., K] and [N, K].")
    dtypes = sorted({str(tensor.dtype) for tensor in (x, *weights, *biases)})
    if len(dtypes) > 1:
        raise ValueError(f"x, weights and biases must have one dtype, got {' and '.join(dtypes)}.")


def linears_kernel(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same in the kernel for one row, or in that for more."""
    from hf_static_kv.kernels.linear_triton import linears_triton
    from hf_static_kv.kernels.row_linear_triton import row_linears_triton

    return (linears_triton if x.numel() == x.shape[-1] else row_linears_triton)(x, weights, biases)


def linears_plain(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same in plain PyTorch."""
    return torch.cat([F.linear(x, w, biases[i] if biases else None) for i, w in enumerate(weights)], dim=-1)


@torch.library.custom_op("hf_static_kv::gated_linear", mutates_args=())
def gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation` of `x` times `gate`, times `x` times `up`; each step is rounded as it would be by itself."""
    check_gated(x, gate, up, activation)
    if is_served(x, [gate, up]):
        return gated_kernel(x, gate, up, activation)
    return activate(F.linear(x, gate), activation) * F.linear(x, up)


@gated_linear.register_fake
def _(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def check_gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> None:
    """Raise where these do not fit."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}.")
    if gate.shape != up.shape or gate.shape[1] != x.shape[-1] or gate.stride() != up.stride():
        shapes = f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and up {tuple(up.shape)}"
        raise ValueError(f"{shapes} do not fit: [..., K], [N, K] and [N, K], both in the same order in memory.")
    check_linears(x, [gate, up], [])


def gated_kernel(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """The same in the kernel for one row, or in that for more."""
    from hf_static_kv.kernels.linear_triton import gated_linear_triton
    from hf_static_kv.kernels.row_linear_triton import row_gated_triton

    return (gated_linear_triton if x.numel() == x.shape[-1] else row_gated_triton)(x, gate, up, activation)


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """One of `ACTIVATIONS` in plain PyTorch."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if "tanh" in activation else "none")
