"""Linear layers and gated MLPs as one operation each, for which `exact` has invariant ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from hf_static_kv.compat import copy_with_submodules
from hf_static_kv.kernels import linear
from hf_static_kv.kernels.gradients import differentiable
from hf_static_kv.patching import is_unmodified, replaced
from hf_static_kv.program.norms import PROBED_SCALES


@contextmanager
def single_linears(model: Module) -> Iterator[list[Linear]]:
    """The model with each linear layer as one operation, for any number of tokens; yields them."""
    modules = list(model.modules())
    owners = [getattr(module.__dict__.get("forward"), "__self__", None) for module in modules]
    mlps = [owner.module for owner in owners if isinstance(owner, _GatedMLP)]
    # Of an operation already.
    inside = {part for mlp in mlps for part in (mlp.gate_proj, mlp.up_proj)}
    # A layer that is shared with another model may be replaced already.
    layers = [one for one in modules if _has_weights_of_torch(one) and one not in inside]
    with replaced("forward", {module: _SingleLinear(module).forward for module in layers}):
        yield layers


@contextmanager
def gated_mlps(model: Module) -> Iterator[list[Module]]:
    """The model with gate, up, activation and product of its MLPs as one operation; yields them."""
    found = ((module, mlp_activation(module)) for module in model.modules())
    forwards: dict[Module, Any] = {
        module: _GatedMLP(module, name).forward for module, name in found if name is not None
    }
    with replaced("forward", forwards):
        yield list(forwards)


def mlp_activation(module: Module) -> str | None:
    """The activation of down(act(gate(x)) * up(x)), found on random weights; else None."""
    names = ("gate_proj", "up_proj", "down_proj")
    parts: list[Any] = [getattr(module, name, None) for name in names]
    if not all(_has_weights_of_torch(part) and part.bias is None for part in parts):
        return None
    has_one_stride = parts[0].weight.stride() == parts[1].weight.stride()
    if not has_one_stride or not all(map(is_unmodified, module.modules())):
        return None
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor(PROBED_SCALES)
        x = torch.randn(1, len(scales), 8, generator=generator) * scales[:, None]
        # On the CPU `Linear` would draw from torch's global generator.
        gate, up, down = (
            Linear(*sizes, bias=False, device="meta") for sizes in ((8, 12), (8, 12), (12, 8))
        )
        for layer in (gate, up, down):
            weight = torch.randn(layer.weight.shape, generator=generator)
            layer.weight = Parameter(weight, requires_grad=False)
        try:
            got = copy_with_submodules(module, gate_proj=gate, up_proj=up, down_proj=down)(x)
        except Exception:  # it takes other arguments, or needs its own size
            return None
        for name in linear.ACTIVATIONS:
            if torch.equal(got, down(linear.activate(gate(x), name) * up(x))):
                return name
    return None


def _has_weights_of_torch(module: object) -> TypeGuard[Linear]:
    """Whether it is torch's linear layer and nothing more: not an adapter, not quantised."""
    return type(module) is Linear and type(module.weight) is Parameter and is_unmodified(module)


class _SingleLinear:
    def __init__(self, module: Linear) -> None:
        self.module = module

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument is torch's
        module = self.module
        if torch.is_grad_enabled():
            return F.linear(input, module.weight, module.bias)
        return linear.linears(input, [module.weight], [] if module.bias is None else [module.bias])  # type: ignore[no-any-return]


class _GatedMLP:
    def __init__(self, module: Any, activation: str) -> None:
        self.module = module
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.module.gate_proj, self.module.up_proj
        # A hook or an adapter was added since.
        if not _has_weights_of_torch(gate) or not _has_weights_of_torch(up):
            return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]
        operation = partial(self._gated, linear.gated_linear)
        plain = partial(self._gated, linear.gated_linear_plain)
        return self.module.down_proj(differentiable(operation, plain, x, gate.weight, up.weight))  # type: ignore[no-any-return]

    def _gated(
        self, function: Callable[..., Tensor], x: Tensor, gate: Tensor, up: Tensor
    ) -> Tensor:
        return function(x, gate, up, self.activation)
