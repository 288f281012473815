"""Linear layers and gated MLPs as kernels."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from hf_static_kv.compat import copy_with_submodules
from hf_static_kv.kernels import linear
from hf_static_kv.patching import Replaceable, is_unmodified, replaced


@contextmanager
def fused_linears(model: Module, run: Callable[[], object]) -> Iterator[list[list[Linear]]]:
    """The model with its gated MLPs and linear layers as kernels for few tokens; yields the groups of linear layers.

    `run` is one pass of the model, in which consecutive linear layers with the same input are found.
    """
    with gated_mlps(model):
        owners = [getattr(module.forward, "__self__", None) for module in model.modules()]
        mlps = [owner.module for owner in owners if isinstance(owner, _GatedMLP)]  # also of a context around this one
        fused = {part for mlp in mlps for part in (mlp.gate_proj, mlp.up_proj)}
        groups = _groups_by_input([m for m in model.modules() if _is_plain(m) and m not in fused], run)
        shared = [_SharedInput(group) for group in groups]
        members: dict[Module, Any] = {layer: _GroupMember(s, i) for s in shared for i, layer in enumerate(s.group)}
        with replaced("forward", {layer: member.forward for layer, member in members.items()}):
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
    activations = {module: mlp_activation(module) for module in model.modules()}
    forwards: dict[Module, Any] = {m: _GatedMLP(m, name).forward for m, name in activations.items() if name is not None}
    with replaced("forward", forwards):
        yield list(forwards)


def mlp_activation(module: Module) -> str | None:
    """The activation if this module computes down(act(gate(x)) * up(x)), found on random weights; or None."""
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(_is_plain(part) and part.bias is None for part in parts):
        return None
    if parts[0].weight.stride() != parts[1].weight.stride() or not all(map(is_unmodified, module.modules())):
        return None
    with torch.device("cpu"):
        generator, x = torch.Generator().manual_seed(0), torch.linspace(-3, 3, 24).view(1, 3, 8)
        # On the CPU `Linear` would draw from torch's global generator.
        gate, up, down = (Linear(*sizes, bias=False, device="meta") for sizes in ((8, 12), (8, 12), (12, 8)))
        for layer in (gate, up, down):
            layer.weight = Parameter(torch.randn(layer.weight.shape, generator=generator), requires_grad=False)
        try:
            got = copy_with_submodules(module, gate_proj=gate, up_proj=up, down_proj=down)(x)
        except Exception:  # it takes other arguments, or needs its own size
            return None
        expected = ((name, down(linear.activate(gate(x), name) * up(x))) for name in linear.ACTIVATIONS)
        return next((name for name, output in expected if torch.equal(got, output)), None)


def _is_plain(module: object) -> TypeGuard[Linear]:
    """Whether it is torch's linear layer and nothing more: not an adapter, not quantised."""
    return type(module) is Linear and type(module.weight) is Parameter and is_unmodified(module)


# Methods, not partials: `torch.compile` takes a partial for a constant and compiles every layer anew.
class _SingleLinear(Replaceable):
    def __init__(self, module: Linear) -> None:
        self.module = module

    def forward(self, input: Tensor) -> Tensor:  # the name of the argument is torch's
        module = self.module
        return linear.linears(input, [module.weight], [] if module.bias is None else [module.bias])  # type: ignore[no-any-return]


class _GatedMLP:
    def __init__(self, module: Any, activation: str) -> None:
        self.module, self.activation = module, activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.module.gate_proj, self.module.up_proj
        if not _is_plain(gate) or not _is_plain(up):  # a hook or an adapter was added since
            return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]
        return self.module.down_proj(linear.gated_linear(x, gate.weight, up.weight, self.activation))  # type: ignore[no-any-return]


def _groups_by_input(layers: list[Linear], run: Callable[[], object]) -> list[list[Linear]]:
    """The layers that `run` calls once, in groups of consecutive calls with the same input tensor."""
    calls: list[tuple[Any, Tensor]] = []  # inputs are kept, so that each has its own identity
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args[0]))))
        run()
    counts, groups, size = Counter(layer for layer, _ in calls), [], linear.MAX_WEIGHTS

    def kind(call: tuple[Any, Tensor]) -> tuple[bool, int, bool, torch.dtype]:  # equal for layers that share a launch
        layer, x = call
        return counts[layer] == 1, id(x), layer.bias is None, layer.weight.dtype

    for (is_called_once, *_), same in groupby(calls, kind):
        group = [layer for layer, _ in same]
        if is_called_once:
            groups += [group[i : i + size] for i in range(0, len(group), size)]
    return groups


class _SharedInput:
    """A group of linear layers with the same input: the first one computes the outputs of all."""

    def __init__(self, group: list[Linear]) -> None:
        self.group = group
        self.x: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()


class _GroupMember:
    def __init__(self, shared: _SharedInput, i: int) -> None:
        self.shared, self.i = shared, i

    def forward(self, x: Tensor) -> Tensor:
        shared, group, module = self.shared, self.shared.group, self.shared.group[self.i]
        if self.i == 0 and x.numel() <= linear.MAX_TOKENS * x.shape[-1]:
            biases = [] if module.bias is None else [member.bias for member in group]
            outputs = linear.linears(x, [member.weight for member in group], biases)
            shared.x, shared.outputs = x, outputs.split([member.out_features for member in group], dim=-1)
        if shared.x is not x:  # too many tokens, or another input than in `run`
            return F.linear(x, module.weight, module.bias)
        output = shared.outputs[self.i]
        if self.i == len(group) - 1:
            shared.x, shared.outputs = None, ()
        return output
