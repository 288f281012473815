"""Gradients of operations whose kernels have none.

    differentiable(operation, plain, *inputs)    operation(*inputs), with the gradients of plain(*inputs)

The backward pass computes `plain`, the same function in torch's own operations. Only the inputs are
kept for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def differentiable(
    operation: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor | None
) -> Any:
    """What `operation` returns, a tensor or a tuple; differentiable in each of the inputs."""
    if not torch.is_grad_enabled():
        return operation(*inputs)
    return _ByPlainTwin.apply(operation, plain, *inputs)  # type: ignore[no-untyped-call]


class _ByPlainTwin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, operation: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor | None
    ) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return operation(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        is_wanted = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, is_wanted, strict=True)
        inputs = [None if x is None else x.detach().requires_grad_(wanted) for x, wanted in pairs]
        with torch.enable_grad():
            outputs = ctx.plain(*inputs)
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, gradients))
        return None, None, *(next(found) if wanted else None for wanted in is_wanted)
