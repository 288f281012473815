"""Mixtures of experts in a decode step.

route(logits, k, style)                                   the k experts of each token, and their weights
    p = softmax(logits), its k largest                    if style.softmax_first
    p = softmax(the k largest logits)                     otherwise
    weights = p / sum(p) if style.normalize, else p       the largest first

    logits: [T, E]   weights: [T, k]   index: [T, k], int64   computed in float32

experts(x, index, weights, gate_up, down, activation)     the output of these experts
    h_j = activation(gate_j x) * (up_j x)                 of the j-th expert of a token
    y   = sum over j of weights_j * (down_j h_j)

    x, y: [T, H]   gate_up: [E, 2 I, H], gate above up   down: [E, H, I]

Only the chosen experts' weights are read. Values are rounded where transformers' `batched_mm`
rounds: both products of an expert, the activation, h, and what is multiplied by the expert's
weight. A TorchFunctionMode sees each operation as one call.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from hf_static_kv.kernels.linear import activate, check_activation

# of a token and an expert: each reads the expert's weights again, beyond that mostly in vain
MAX_PAIRS = 128
MAX_EXPERTS = 512  # of the kernel of `route`: one warp holds the logits of a token


class RouteStyle(NamedTuple):
    """How a router makes weights from its logits."""

    softmax_first: bool  # over all experts and then the k largest; else over the k largest
    normalize: bool  # to a sum of 1
    keep_float32: bool  # else the weights are rounded to the dtype of the logits


@wrap_torch_function(lambda logits, *args, **kwargs: (logits,))
def route(logits: Tensor, k: int, style: RouteStyle) -> tuple[Tensor, Tensor]:
    """The weights and the numbers of the k experts of each token."""
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(f"logits {tuple(logits.shape)} and k = {k} do not fit: [T, E] and 1 to E.")
    if logits.is_cuda and logits.shape[1] <= MAX_EXPERTS:
        from hf_static_kv.kernels.experts_triton import route_triton

        return route_triton(logits, k, style)
    return route_plain(logits, k, style)


def route_plain(logits: Tensor, k: int, style: RouteStyle) -> tuple[Tensor, Tensor]:
    if style.softmax_first:
        weights, index = logits.float().softmax(-1).topk(k, dim=-1)
    else:
        values, index = logits.topk(k, dim=-1)
        weights = values.float().softmax(-1)
    if style.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights if style.keep_float32 else weights.to(logits.dtype)), index


@wrap_torch_function(lambda x, *args, **kwargs: (x,))
def experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """The weighted sum of the chosen experts, in the dtype of x."""
    check_experts(x, index, weights, gate_up, down, activation)
    if is_supported(x, index, gate_up, down):
        from hf_static_kv.kernels.experts_triton import experts_triton

        return experts_triton(x, index, weights, gate_up, down, activation)
    return experts_plain(x, index, weights, gate_up, down, activation)


def is_supported(x: Tensor, index: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether the kernels take these: few pairs of a token and an expert, contiguous weights."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and 0 < index.numel() <= MAX_PAIRS
        and gate_up.is_contiguous()
        and down.is_contiguous()
    )


def check_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> None:
    """Raise ValueError if activation, shapes or dtypes do not fit."""
    check_activation(activation)
    if x.ndim != 2 or index.ndim != 2 or len(index) != len(x) or weights.shape != index.shape:
        chosen = f"index {tuple(index.shape)} and weights {tuple(weights.shape)}"
        raise ValueError(f"x {tuple(x.shape)}, {chosen} do not fit: [T, H], [T, k] and [T, k].")
    fits = down.ndim == 3 and gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])
    if not fits or down.shape[1] != x.shape[1]:
        shapes = f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)}"
        raise ValueError(f"{shapes} do not fit: [T, H], [E, 2 I, H] and [E, H, I].")
    if not x.dtype == gate_up.dtype == down.dtype or weights.dtype not in (x.dtype, torch.float32):
        rule = "x, gate_up and down must have one dtype, and weights that or float32"
        dtypes = f"{x.dtype}, {gate_up.dtype}, {down.dtype} and {weights.dtype}"
        raise ValueError(f"{rule}, got {dtypes}.")
    if index.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"index must be int64 or int32, got {index.dtype}.")


def experts_plain(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """As `batched_mm` of transformers: it copies the weights of each pair of token and expert."""
    tokens, k = index.shape
    chosen = index.flatten()
    pairs = x.repeat_interleave(k, dim=0)
    gate, up = torch.bmm(gate_up[chosen], pairs[:, :, None])[:, :, 0].chunk(2, dim=-1)
    hidden = activate(gate, activation) * up
    outputs = torch.bmm(down[chosen], hidden[:, :, None])[:, :, 0] * weights.reshape(-1, 1)
    return outputs.view(tokens, k, -1).sum(dim=1).to(x.dtype)
