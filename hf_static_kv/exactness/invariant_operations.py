"""Which of torch's operations are batch-invariant, and what runs in place of those that are not."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from hf_static_kv import compat
from hf_static_kv.kernels.invariant_linear import invariant_linear, invariant_sum
from hf_static_kv.kernels.linear import activate, check_gated, check_linears

aten = torch.ops.aten
_BLOCK = 1 << 14  # elements: torch splits 32,768 and more among threads

# Copies, casts and comparisons: the order of evaluation does not change the result.
_COPIES_AND_COMPARISONS = {
    "_local_scalar_dense", "_to_copy", "_unsafe_view", "all", "amax", "amin", "any", "argmax",
    "argmin", "cat", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach_",
    "embedding", "empty_like", "equal", "fill", "fill_", "flip", "full_like", "gather", "index",
    "index_copy", "index_copy_", "index_select", "lift_fresh", "masked_fill", "masked_fill_",
    "max", "min", "new_empty", "new_full", "new_ones", "new_zeros", "nonzero", "ones_like",
    "repeat", "roll", "scatter", "scatter_", "select_scatter", "slice_scatter", "sort", "stack",
    "tril", "triu", "where", "zero_", "zeros_like",
}  # fmt: skip
# Correctly rounded: every implementation gives the same bits.
_CORRECTLY_ROUNDED = {
    "abs", "add", "add_", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp",
    "clamp_max", "clamp_min", "div", "div_", "eq", "floor", "ge", "gt", "isinf", "isnan", "le",
    "logical_and", "logical_not", "logical_or", "lt", "maximum", "minimum", "mul", "mul_", "ne",
    "neg", "reciprocal", "relu", "round", "rsub", "sign", "sqrt", "sub", "sub_", "trunc",
}  # fmt: skip


def no_kernel(what: str) -> RuntimeError:
    """The error for an operation that cannot run inside `exact`."""
    return RuntimeError(
        f"{what}: its result for a token may depend on what else is computed with it, and exact "
        "has no batch-invariant kernel for it. A model that needs it cannot be exact; a loss can "
        "be computed from the logits outside of exact."
    )


def is_batch_invariant(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether torch's own implementation of this call is batch-invariant."""
    if _is_always_invariant(func):
        return True
    name, is_pointwise = _name_and_tag(func)
    # `alpha` multiplies before the add: whether that product is rounded depends on the kernel.
    is_rounded = is_pointwise and name in _CORRECTLY_ROUNDED
    if is_rounded and _argument(func, args, kwargs, 2, "alpha", 1) == 1:
        return True
    # With `accumulate`, values at the same index are added in no fixed order.
    is_put = name in ("index_put", "index_put_")
    if is_put and not _argument(func, args, kwargs, 3, "accumulate", False):
        return True
    values = (*args, *kwargs.values())
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    tensors = [value for values in lists for value in values if isinstance(value, Tensor)]
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return True
    return is_pointwise and not any(tensor.device.type == "cpu" for tensor in tensors)


@cache  # called a thousand times in a pass
def _name_and_tag(func: Any) -> tuple[str, bool]:
    return func.overloadpacket.__name__, torch.Tag.pointwise in func.tags


@cache
def _is_always_invariant(func: Any) -> bool:
    name, _ = _name_and_tag(func)
    if func.namespace == "hf_static_kv":
        return name in ("write_tokens", "attend", "invariant_attention", "expert_linear")
    schema = compat.schema(func)
    # scatter.reduce sums.
    if name in _COPIES_AND_COMPARISONS and "reduce" not in schema.overload_name:
        return True
    aliases = [result.alias_info for result in schema.returns]
    # A view.
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _argument(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], index: int, name: str, default: Any
) -> Any:
    """An argument that is given by name or by position."""
    is_positional = len(args) > index and compat.schema(func).arguments[index].name == name
    return args[index] if is_positional else kwargs.get(name, default)


@cache
def invariant_operation(func: Any) -> Callable[..., Any] | None:
    """The batch-invariant operation that runs in place of this one, or None."""
    if func not in _INVARIANT and func.namespace == "aten" and _is_approximated(func):
        return partial(_in_blocks, func)
    return _INVARIANT.get(func)


def _is_approximated(func: Any) -> bool:
    """Whether it is an elementwise function of one tensor that is not correctly rounded (exp)."""
    name, is_pointwise = _name_and_tag(func)
    if not is_pointwise or name in _CORRECTLY_ROUNDED | _COPIES_AND_COMPARISONS:
        return False
    arguments = compat.schema(func).arguments
    # Also Tensor? and Tensor[].
    takes_tensor = ["Tensor" in str(argument.type) for argument in arguments]
    is_in_place = any(argument.alias_info is not None for argument in arguments)
    return takes_tensor[0] and sum(takes_tensor) == 1 and not is_in_place


def _in_blocks(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """func(x) in blocks of whole vectors.

    On a CPU scalar code may compute the last elements of a tensor or of a thread.
    """
    if x.device.type != "cpu" or not x.is_floating_point():
        return func(x, *args, **kwargs)  # type: ignore[no-any-return]
    flat = x.reshape(-1)
    # 64: a multiple of every vector length.
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % 64))
    blocks = [func(block.clone(), *args, **kwargs) for block in torch.split(padded, _BLOCK)]
    return torch.cat(blocks)[: len(flat)].view(x.shape)


def _addmm(bias: Tensor, x: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.ndim != 1 or beta != 1 or alpha != 1:
        raise no_kernel("aten.addmm with a matrix, beta or alpha")
    return invariant_linear(x, other.t(), bias)


def _bmm(x: Tensor, other: Tensor) -> Tensor:
    # A linear layer, input not contiguous.
    if other.stride(0) == 0 or (len(other) == 1 and other.stride(1) == 1):
        return invariant_linear(x.reshape(-1, x.shape[2]), other[0].t()).view(*x.shape[:2], -1)
    if x.shape[2] != 1:
        raise no_kernel(
            f"aten.bmm over {x.shape[2]} (experts, or attention outside of transformers' interface)"
        )
    return x * other  # an outer product: nothing is summed


def _sum(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if not x.is_floating_point():
        return x.sum(list(dim or ()), keepdim, dtype=dtype)
    if [d % x.ndim for d in dim or ()] != [x.ndim - 1]:
        raise no_kernel(f"aten.sum over dim {dim} of {tuple(x.shape)}, not over the last one")
    total = invariant_sum(x).to(dtype or x.dtype)
    return total[..., None] if keepdim else total


def _mean(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return (_sum(x, dim, keepdim, dtype=torch.float32) / x.shape[-1]).to(dtype or x.dtype)


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Some models count positions in a float mask: a sum of integers is exact in any order."""
    result = x.cumsum(dim, dtype=dtype)
    if not result.is_floating_point():
        return result
    largest = 2 / torch.finfo(result.dtype).eps  # every integer up to it is representable
    if not bool((x == x.round()).all() and (x.double().abs().sum(dim) <= largest).all()):
        raise no_kernel("aten.cumsum of values that are not integers, or too large")
    return result


def _topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Among equal ones the first: which one torch takes depends on the shape."""
    values, index = x.sort(dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), index.narrow(dim, 0, k)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    _, powers, total = _powers("softmax", x, dim)
    return (powers / total).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    scores, _, total = _powers("log_softmax", x, dim)
    result = scores - _in_blocks(aten.log.default, total)
    return result.to(torch.float32 if half_to_float else x.dtype)


def _powers(name: str, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores less their maximum, exp of these, and its sum, in float32."""
    if dim % x.ndim != x.ndim - 1:
        raise no_kernel(f"aten.{name} over dim {dim} of {tuple(x.shape)}, not over the last one")
    scores = x.float()
    scores = scores - scores.amax(dim=-1, keepdim=True)
    powers = _in_blocks(aten.exp.default, scores)
    return scores, powers, invariant_sum(powers)[..., None]


def _no_random_numbers(*args: Any, **kwargs: Any) -> Tensor:
    raise ValueError(
        "exact draws no random numbers: set every dropout and jitter to 0, or call model.eval()."
    )


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if len(shape) != 1:
        raise no_kernel(f"aten.layer_norm over {list(shape)}, not over the last dim alone")
    states = x.float()
    mean = (invariant_sum(states) / shape[0])[..., None]
    centred = states - mean
    inverse = 1 / (invariant_sum(centred * centred)[..., None] / shape[0] + eps).sqrt()
    y = centred * inverse
    y = y if weight is None else y * weight.float()
    y = y if bias is None else y + bias.float()
    # In the dtypes that the backward pass of torch's own kernels expects.
    dtype = torch.float32 if x.is_cuda else (x if weight is None else weight).dtype
    return y.to(x.dtype), mean.to(dtype), inverse.to(dtype)


def _linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str = ""
) -> Tensor:
    check_linears(x, weights, biases)
    if x.is_cuda:
        from hf_static_kv.kernels.invariant_linear_triton import invariant_linears_triton

        return invariant_linears_triton(x, weights, biases, activation)
    flat = x.reshape(-1, x.shape[-1])
    pairs = zip_longest(weights, biases)
    y = torch.cat([invariant_linear(flat, *pair) for pair in pairs], dim=-1)
    return y.view(*x.shape[:-1], -1)


def _gated_linear(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    check_gated(x, gate, up, activation)
    if x.is_cuda:
        return _linears(x, [gate, up], [], activation)
    of_gate, of_up = _linears(x, [gate, up], []).chunk(2, dim=-1)
    return _in_blocks(lambda block: activate(block, activation), of_gate) * of_up


_INVARIANT: dict[Any, Callable[..., Any]] = {
    aten.mm.default: lambda x, other: invariant_linear(x, other.t()),
    aten.addmm.default: _addmm, aten.bmm.default: _bmm,
    aten.sum.dim_IntList: _sum, aten.mean.dim: _mean, aten.cumsum.default: _cumsum,
    aten.topk.default: _topk, aten._softmax.default: _softmax, aten._log_softmax.default: _log_softmax,
    # a mean over tokens is no token's own
    aten.nll_loss_forward.default: aten.nll_loss_forward.default,
    aten.native_layer_norm.default: _layer_norm,
    **dict.fromkeys((aten.native_dropout.default, aten.bernoulli_.float, aten.uniform_.default),
    _no_random_numbers),
    torch.ops.hf_static_kv.linears.default: _linears,
    torch.ops.hf_static_kv.gated_linear.default: _gated_linear,
}  # fmt: skip
