"""Which of torch's operations keep a row's bits as they are, and the ones by rows in the place of those that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hf_static_kv.kernels.invariant_linear import invariant_linear
from hf_static_kv.kernels.invariant_sum import invariant_sum
from hf_static_kv.kernels.linear import activate, check_gated, check_linears

aten = torch.ops.aten
_BLOCK = 1 << 14  # below the size from which torch deals elements out to threads

# Nothing is computed, or something whose result does not depend on an order: a comparison.
_MOVES = {
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "amax", "amin", "any", "all", "argmax", "argmin", "cat", "clone",
    "constant_pad_nd", "contiguous", "copy", "copy_", "detach_", "embedding", "empty_like", "equal", "fill", "fill_",
    "flip", "full_like", "gather", "index", "index_copy", "index_copy_", "index_select", "lift_fresh", "masked_fill",
    "masked_fill_", "max", "min", "new_empty", "new_full", "new_ones", "new_zeros", "nonzero", "ones_like", "repeat",
    "roll", "scatter", "select_scatter", "slice_scatter", "sort", "stack", "topk", "tril", "triu", "where",
    "zeros_like", "zero_",
}  # fmt: skip
# Each result is the one number that is nearest to the true one: no two implementations can differ.
_ROUNDED_ONCE = {
    "abs", "add", "add_", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min", "div",
    "div_", "eq", "floor", "ge", "gt", "isinf", "isnan", "le", "logical_and", "logical_not", "logical_or", "lt",
    "maximum", "minimum", "mul", "mul_", "ne", "neg", "reciprocal", "relu", "round", "rsub", "sign", "sqrt", "sub",
    "sub_", "trunc",
}  # fmt: skip
_WRITES_BY_INDEX = {"index_put", "index_put_"}
_OURS = {"write_token", "attend", "invariant_attention"}

_NO_KERNEL = (
    "this could give a row other bits when other rows are computed with it, and exact has no kernel by rows for it. A "
    "model that needs it cannot be exact: leave the context to run it as it is."
)


def is_harmless(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation can be run as it is."""
    if _is_always_harmless(func):
        return True
    # `alpha` multiplies before the add: whether that product is rounded depends on the kernel.
    if _is_rounded_once(func) and _argument(func, args, kwargs, 2, "alpha", 1) == 1:
        return True
    # Summed into one place, values have no order.
    if func.overloadpacket.__name__ in _WRITES_BY_INDEX and not _argument(func, args, kwargs, 3, "accumulate", False):
        return True
    if func.namespace == "hf_static_kv":
        return False
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return True
    return torch.Tag.pointwise in func.tags and not any(tensor.device.type == "cpu" for tensor in tensors)


@cache  # these are asked a thousand times in a pass
def _is_always_harmless(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if func.namespace == "hf_static_kv":
        return name in _OURS
    return (name in _MOVES and "reduce" not in func._overloadname) or _is_view(func)


@cache
def _is_rounded_once(func: Any) -> bool:
    return torch.Tag.pointwise in func.tags and func.overloadpacket.__name__ in _ROUNDED_ONCE


def _argument(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    """An argument that is given by its name or by its place."""
    if len(args) > place and func._schema.arguments[place].name == name:
        return args[place]
    return kwargs.get(name, default)


def _is_view(func: Any) -> bool:
    """It returns memory of its argument and writes nothing."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def row_operation(func: Any) -> Callable[..., Any] | None:
    """What runs in the place of an operation, or None."""
    if func in _BY_ROWS:
        return _BY_ROWS[func]
    if func.namespace == "aten" and torch.Tag.pointwise in func.tags and _is_function(func):
        return lambda x, *args, **kwargs: _in_blocks(func, x, *args, **kwargs)
    return None


def _is_function(func: Any) -> bool:
    """An operation on one tensor that is computed by some approximation; on a CPU not by one alone."""
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    tensors = [argument for argument in arguments if "Tensor" in str(argument.type)]
    writes = any(argument.alias_info is not None for argument in arguments)
    is_first = "Tensor" in str(arguments[0].type)
    return len(tensors) == 1 and is_first and not writes and name not in _ROUNDED_ONCE and name not in _MOVES


def _in_blocks(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """On a CPU other code may compute the last elements of a tensor, or of a thread's share. A block has none."""
    if x.device.type != "cpu" or not x.is_floating_point():
        result: torch.Tensor = func(x, *args, **kwargs)
        return result
    flat = x.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 64))  # 64: of any vector's length a multiple
    blocks = [func(block.clone(), *args, **kwargs) for block in torch.split(padded, _BLOCK)]
    return torch.cat(blocks)[: len(flat)].view(x.shape)


def _mm(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return invariant_linear(x, other.t())


def _addmm(bias: torch.Tensor, x: torch.Tensor, other: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if bias.ndim != 1 or beta != 1 or alpha != 1:
        raise RuntimeError(f"aten.addmm with a matrix, beta or alpha: {_NO_KERNEL}")
    return invariant_linear(x, other.t(), bias)


def _bmm(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    one_for_all = other.stride(0) == 0 or (len(other) == 1 and other.stride(1) == 1)
    if one_for_all:  # a transposed weight: a linear layer whose input is not contiguous
        return invariant_linear(x.reshape(-1, x.shape[2]), other[0].t()).view(*x.shape[:2], -1)
    if x.shape[2] != 1:
        words = "experts, or attention outside of transformers' interface"
        raise RuntimeError(f"aten.bmm over {x.shape[2]} ({words}): {_NO_KERNEL}")
    return x * other  # one product each


def _sum(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not x.is_floating_point():
        return x.sum(list(dim or ()), keepdim, dtype=dtype)
    if [d % x.ndim for d in dim or ()] != [x.ndim - 1]:
        raise RuntimeError(f"aten.sum over dim {dim} of {tuple(x.shape)}, not over the last one: {_NO_KERNEL}")
    total = invariant_sum(x).to(dtype or x.dtype)
    return total[..., None] if keepdim else total


def _mean(
    x: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    total = _sum(x, dim, keepdim, dtype=torch.float32)
    return (total / x.shape[-1]).to(dtype or x.dtype)


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Some models count positions in a mask of floats. Sums of whole numbers have one result in any order."""
    result = x.cumsum(dim, dtype=dtype)
    if not result.is_floating_point():
        return result
    largest = 2 / torch.finfo(result.dtype).eps  # up to it every whole number has its own bits
    if not bool((x == x.round()).all() and (x.double().abs().sum(dim) <= largest).all()):
        raise RuntimeError(f"aten.cumsum of numbers that are not whole, or too large: {_NO_KERNEL}")
    return result


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if dim % x.ndim != x.ndim - 1:
        raise RuntimeError(f"aten.softmax over dim {dim} of {tuple(x.shape)}, not over the last one: {_NO_KERNEL}")
    numbers = x.float()
    powers = _in_blocks(aten.exp.default, numbers - numbers.amax(dim=-1, keepdim=True))
    return (powers / invariant_sum(powers)[..., None]).to(torch.float32 if half_to_float else x.dtype)


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if len(shape) != 1:
        raise RuntimeError(f"aten.layer_norm over {list(shape)}, not over the last dim alone: {_NO_KERNEL}")
    numbers = x.float()
    mean = (invariant_sum(numbers) / shape[0])[..., None]
    centred = numbers - mean
    inverse = 1 / (invariant_sum(centred * centred)[..., None] / shape[0] + eps).sqrt()
    y = centred * inverse
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype), mean, inverse


def _linears(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    check_linears(x, weights, biases)
    if x.is_cuda:
        from hf_static_kv.kernels.invariant_linear_triton import invariant_linears_triton

        return invariant_linears_triton(x, weights, biases)
    rows = x.reshape(-1, x.shape[-1])
    parts = [invariant_linear(rows, weight, biases[i] if biases else None) for i, weight in enumerate(weights)]
    return torch.cat(parts, dim=-1).view(*x.shape[:-1], -1)


def _gated_linear(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    check_gated(x, gate, up, activation)
    if x.is_cuda:
        from hf_static_kv.kernels.invariant_linear_triton import invariant_gated_linear_triton

        return invariant_gated_linear_triton(x, gate, up, activation)
    of_gate, of_up = _linears(x, [gate, up], []).chunk(2, dim=-1)
    return _in_blocks(lambda block: activate(block, activation), of_gate) * of_up


_BY_ROWS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten.cumsum.default: _cumsum,
    aten._softmax.default: _softmax,
    aten.native_layer_norm.default: _layer_norm,
    torch.ops.hf_static_kv.linears.default: _linears,
    torch.ops.hf_static_kv.gated_linear.default: _gated_linear,
}
