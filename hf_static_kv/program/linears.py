"""Linear layers and gated MLPs as kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, Parameter

from hf_static_kv.compat import copy_with_submodules
from hf_static_kv.kernels import linear
from hf_static_kv.patching import Computes, is_unmodified, replaced


@contextmanager
def fused_linears(model: Module, run: Callable[[], object]) -> Iterator[list[list[Linear]]]:
    """The model with its gated MLPs and linear layers as kernels for few tokens; yields the groups of linear layers.

    `run` is one pass of the model, in which consecutive linear layers with the same input are found.
    """
    with gated_mlps(model):
        fused = _gate_and_up_layers(model)
        groups = _groups_by_input([m for m in model.modules() if _is_plain(m) and m not in fused], run)
        forwards: dict[Module, Callable[..., Any]] = {}
        for group in groups:
            shared = _SharedInput(group)
            forwards.update({module: _GroupMember(shared, i).forward for i, module in enumerate(group)})
        with replaced("forward", forwards):
            yield groups


@contextmanager
def single_linears(model: Module) -> Iterator[list[Linear]]:
    """The model with each linear layer as one operation, for any number of tokens; yields these layers."""
    # A layer that is shared with another model may be replaced already.
    layers = [module for module in model.modules() if _is_plain(module) and "forward" not in module.__dict__]
    with replaced("forward", {module: _SingleLinear(module).forward for module in layers}):
        yield layers


@contextmanager
def gated_mlps(model: Module) -> Iterator[list[Module]]:
    """The model with gate, up, activation and product of its MLPs as one operation; yields these MLPs."""
    mlps = {module: activation for module in model.modules() if (activation := mlp_activation(module)) is not None}
    with replaced("forward", {module: _GatedMLP(module, activation).forward for module, activation in mlps.items()}):
        yield list(mlps)


def mlp_activation(module: Module) -> str | None:
    """The activation if this module computes down(act(gate(x)) * up(x)), found on random weights; or None."""
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(_is_plain(part) and part.bias is None for part in parts):
        return None
    gate, up, _ = parts
    if gate.weight.stride() != up.weight.stride() or not all(is_unmodified(part) for part in module.modules()):
        return None
    with torch.device("cpu"):
        return _matching_activation(module)


def _matching_activation(module: Module) -> str | None:
    generator, x = torch.Generator().manual_seed(0), torch.linspace(-3, 3, 24).view(1, 3, 8)
    gate, up, down = (_random_linear(*sizes, generator) for sizes in ((8, 12), (8, 12), (12, 8)))
    try:
        got = copy_with_submodules(module, gate_proj=gate, up_proj=up, down_proj=down)(x)
    except Exception:  # it takes other arguments, or needs its own size
        return None
    for activation in linear.ACTIVATIONS:
        if torch.equal(got, down(linear.activate(gate(x), activation) * up(x))):
            return activation
    return None


def _random_linear(inputs: int, outputs: int, generator: torch.Generator) -> Linear:
    layer = Linear(inputs, outputs, bias=False, device="meta")  # on the CPU it would draw from torch's global generator
    layer.weight = Parameter(torch.randn(outputs, inputs, generator=generator), requires_grad=False)
    return layer


def _is_plain(module: object) -> TypeGuard[Linear]:
    """Whether it is torch's linear layer and nothing more: not an adapter, not quantised."""
    return type(module) is Linear and type(module.weight) is Parameter and is_unmodified(module)


# Methods, not partials: `torch.compile` takes a partial for a constant and compiles every layer anew.
class _SingleLinear(Computes):
    def __init__(self, module: Linear) -> None:
        self.module = module

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # the name of the argument is torch's
        module = self.module
        output: torch.Tensor = linear.linears(input, [module.weight], [] if module.bias is None else [module.bias])
        return output


class _GatedMLP:
    def __init__(self, module: Module, activation: str) -> None:
        self.module: Any = module
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.module.gate_proj, self.module.up_proj
        if not _is_plain(gate) or not _is_plain(up):  # a hook or an adapter was added since
            output: torch.Tensor = type(self.module).forward(self.module, x)
        else:
            output = self.module.down_proj(linear.gated_linear(x, gate.weight, up.weight, self.activation))
        return output


def _gate_and_up_layers(model: Module) -> set[Module]:
    """The layers inside `_GatedMLP`s, of this context or of one around it."""
    forwards = (getattr(module.forward, "__self__", None) for module in model.modules())
    mlps = [forward.module for forward in forwards if isinstance(forward, _GatedMLP)]
    return {part for mlp in mlps for part in (mlp.gate_proj, mlp.up_proj)}


def _groups_by_input(layers: list[Linear], run: Callable[[], object]) -> list[list[Linear]]:
    """The layers that `run` calls once, in groups of consecutive calls with the same input tensor."""
    calls: list[tuple[Any, torch.Tensor]] = []  # inputs are kept, so that each has its own identity

    def note(module: Module, args: tuple[Any, ...]) -> None:
        calls.append((module, args[0]))

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
        if modules.count(module) > 1:
            before = None
        elif x is before and len(groups[-1]) < linear.MAX_WEIGHTS and _can_share_launch(groups[-1][0], module):
            groups[-1].append(module)
        else:
            groups.append([module])
            before = x
    return groups


def _can_share_launch(a: Linear, b: Linear) -> bool:
    return (a.bias is None) == (b.bias is None) and a.weight.dtype == b.weight.dtype


class _SharedInput:
    """A group of linear layers with the same input: the first one computes the outputs of all."""

    def __init__(self, group: list[Linear]) -> None:
        self.group = group
        self.x: torch.Tensor | None = None
        self.outputs: tuple[torch.Tensor, ...] = ()

    def compute(self, x: torch.Tensor) -> None:
        biases = [] if self.group[0].bias is None else [module.bias for module in self.group]
        y = linear.linears(x, [module.weight for module in self.group], biases)
        self.x, self.outputs = x, y.split([module.out_features for module in self.group], dim=-1)


class _GroupMember:
    """One linear layer of a group that shares its input."""

    def __init__(self, shared: _SharedInput, i: int) -> None:
        self.shared, self.i = shared, i

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared, module = self.shared, self.shared.group[self.i]
        if self.i == 0 and x.numel() <= linear.MAX_TOKENS * x.shape[-1]:
            shared.compute(x)
        if shared.x is not x:  # too many tokens, or another input than in `run`
            return F.linear(x, module.weight, module.bias)
        output = shared.outputs[self.i]
        if self.i == len(shared.group) - 1:
            shared.x, shared.outputs = None, ()
        return output
