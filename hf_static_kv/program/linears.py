"""Linear layers and gated MLPs as kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, Parameter

from hf_static_kv.kernels import linear
from hf_static_kv.patching import Computes, is_unmodified, replaced


@contextmanager
def fused_linears(model: Module, run: Callable[[], object]) -> Iterator[list[list[Linear]]]:
    """The model with its gated MLPs and linear layers as kernels for few rows; gives the groups of linear layers.

    `run` is one pass of the model. In it is seen which linear layers are given the same input, one after the other.
    """
    with gated_mlps(model):
        gates = _gates(model)
        others = [module for module in model.modules() if _is_plain(module) and module not in gates]
        groups = _groups_by_input(others, run)
        forwards: dict[Module, Callable[..., Any]] = {}
        for group in groups:
            shared = _SharedInput(group)
            forwards.update({module: _Part(shared, i).forward for i, module in enumerate(group)})
        with replaced("forward", forwards):
            yield groups


@contextmanager
def single_linears(model: Module) -> Iterator[list[Linear]]:
    """The model with each of its linear layers as one operation, for any number of rows; gives those layers."""
    # Not those that another model has replaced with which it shares them.
    layers = [module for module in model.modules() if _is_plain(module) and "forward" not in module.__dict__]
    with replaced("forward", {module: _Single(module).forward for module in layers}):
        yield layers


@contextmanager
def gated_mlps(model: Module) -> Iterator[list[Module]]:
    """The model with gate, up, activation and product of its MLPs in one operation; gives those MLPs."""
    mlps = {module: activation for module in model.modules() if (activation := mlp_activation(module)) is not None}
    with replaced("forward", {module: _GatedMLP(module, activation).forward for module, activation in mlps.items()}):
        yield list(mlps)


def mlp_activation(module: Module) -> str | None:
    """The activation of down(act(gate(x)) * up(x)), where trying shows that this module computes that; or None."""
    parts: dict[str, Any] = {name: getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")}
    if not all(_is_plain(part) and part.bias is None for part in parts.values()):
        return None
    if parts["gate_proj"].weight.stride() != parts["up_proj"].weight.stride():
        return None
    if not all(is_unmodified(part) for part in module.modules()):
        return None
    with torch.device("cpu"):
        return _tried_activation(module, parts)


def _tried_activation(module: Module, parts: dict[str, Any]) -> str | None:
    generator, x = torch.Generator().manual_seed(0), torch.linspace(-3, 3, 24).view(1, 3, 8)
    trial, tiny = copy.copy(module), {}
    trial._modules = dict(module._modules)
    for name, (inputs, outputs) in zip(parts, ((8, 12), (8, 12), (12, 8)), strict=True):
        tiny[name] = Linear(inputs, outputs, bias=False, device="meta")
        tiny[name].weight = Parameter(torch.randn(outputs, inputs, generator=generator), requires_grad=False)
    trial._modules.update(tiny)
    try:
        got = trial(x)
    except Exception:  # it takes other arguments, or needs its own size
        return None
    gate, up, down = tiny.values()
    for activation in linear.ACTIVATIONS:
        if torch.equal(got, down(linear.activate(gate(x), activation) * up(x))):
            return activation
    return None


def _is_plain(module: object) -> TypeGuard[Linear]:
    """A linear layer and nothing more: not an adapter, not a quantised one."""
    return type(module) is Linear and type(module.weight) is Parameter and is_unmodified(module)


class _Single(Computes):
    def __init__(self, module: Linear) -> None:
        self.module = module

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # named as in torch's own
        module = self.module
        output: torch.Tensor = linear.linears(input, [module.weight], [] if module.bias is None else [module.bias])
        return output


# Methods, not partials: to `torch.compile` a partial is a constant, and every layer with another is compiled again.
class _GatedMLP:
    def __init__(self, module: Module, activation: str) -> None:
        self.module: Any = module
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.module.gate_proj, self.module.up_proj
        if not _is_plain(gate) or not _is_plain(up):  # it has been given a hook or an adapter meanwhile
            output: torch.Tensor = type(self.module).forward(self.module, x)
            return output
        output = self.module.down_proj(linear.gated_linear(x, gate.weight, up.weight, self.activation))
        return output


def _gates(model: Module) -> set[Module]:
    """Gate and up of the MLPs that are one operation already, by this context or by one around it."""
    forwards = (getattr(module.forward, "__self__", None) for module in model.modules())
    mlps = [forward.module for forward in forwards if isinstance(forward, _GatedMLP)]
    return {part for mlp in mlps for part in (mlp.gate_proj, mlp.up_proj)}


def _groups_by_input(layers: list[Linear], run: Callable[[], object]) -> list[list[Linear]]:
    """Those of these layers that `run` calls, once each; those in a row with the same input tensor together."""
    calls: list[tuple[Any, torch.Tensor]] = []

    def note(module: Module, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))  # the tensor is kept, so that no other one can be taken for it

    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    modules = [module for module, _ in calls]
    groups: list[list[Linear]] = []
    before = None
    for module, x in calls:
        if modules.count(module) > 1:  # called twice in a pass: left alone
            before = None
        elif x is before and len(groups[-1]) < linear.MAX_WEIGHTS and _alike(module, groups[-1][0]):
            groups[-1].append(module)
        else:
            groups.append([module])
            before = x
    return groups


def _alike(a: Linear, b: Linear) -> bool:
    return (a.bias is None) == (b.bias is None) and a.weight.dtype == b.weight.dtype


class _SharedInput:
    """Linear layers that are given the same input, and what was computed for all of them when the first was called."""

    def __init__(self, group: list[Linear]) -> None:
        self.group = group
        self.x: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()

    def compute(self, x: torch.Tensor) -> None:
        biases = [] if self.group[0].bias is None else [module.bias for module in self.group]
        y = linear.linears(x, [module.weight for module in self.group], biases)
        self.x, self.outputs = x, y.split([module.out_features for module in self.group], dim=-1)

    def forget(self) -> None:
        self.x, self.outputs = None, ()


class _Part:
    """One of them."""

    def __init__(self, shared: _SharedInput, i: int) -> None:
        self.shared, self.i = shared, i

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared, module = self.shared, self.shared.group[self.i]
        if self.i == 0 and x.numel() <= linear.MAX_TOKENS * x.shape[-1]:
            shared.compute(x)
        if shared.x is not x:  # another input than in the pass that was watched, or too many rows
            return F.linear(x, module.weight, module.bias)
        output = shared.outputs[self.i]
        if self.i == len(shared.group) - 1:
            shared.forget()
        return output
