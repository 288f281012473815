"""Mixtures of experts: the experts of a layer as one operation, and its router's choice as another."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

from hf_static_kv.kernels.experts import (
    MAX_PAIRS,
    RouteStyle,
    experts,
    experts_plain,
    route,
    route_plain,
)
from hf_static_kv.kernels.linear import ACTIVATIONS
from hf_static_kv.patching import is_unmodified, replaced
from hf_static_kv.program.norms import PROBED_DTYPES

_Found = TypeVar("_Found")
_EXPERTS_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_FEW = 0.02  # of the outputs of a trial
# Of the trials; 16 numbers of any dtype are as aligned as `grouped_mm` of torch needs.
_TOKENS = 16
_SIZE = 16
_STYLES = [
    *(
        RouteStyle(True, normalize, keep_float32)
        for normalize, keep_float32 in product((True, False), repeat=2)
    ),
    *(RouteStyle(False, False, keep_float32) for keep_float32 in (True, False)),
]


def one_operation_experts(model: Module) -> AbstractContextManager[list[Module]]:
    """The model with the experts of each layer as one operation, for few tokens; yields these
    modules.
    """
    return _replaced(_Experts, _find(model, _expert_weights, experts_activation))


def one_operation_routers(model: Module) -> AbstractContextManager[list[Module]]:
    """The model with its routers as a linear layer and one operation; yields these routers."""
    return _replaced(_Router, _find(model, _router_weights, router_style))


@contextmanager
def _replaced(kind: Any, found: Mapping[Module, Any]) -> Iterator[list[Module]]:
    with replaced("forward", {module: kind(module, how).forward for module, how in found.items()}):
        yield list(found)


def _find(
    model: Module,
    weights_of: Callable[[Module], list[Any]],
    trial: Callable[[Module], _Found | None],
) -> dict[Module, _Found]:
    """What `trial` finds of each module that has weights, with one trial for all that differ in
    nothing else.
    """
    by_kind: dict[Any, _Found | None] = {}
    found: dict[Module, _Found] = {}
    for module in model.modules():
        if not (weights := weights_of(module)):
            continue
        kind = tuple(weight.shape for weight in weights), *map(_settings, module.modules())
        if kind not in by_kind:
            by_kind[kind] = trial(module)
        if (result := by_kind[kind]) is not None:
            found[module] = result
    return found


def _settings(module: Module) -> tuple[Any, ...]:
    """The type of a module and its own attributes: plain values, and other objects by identity."""
    plain = bool | int | float | str
    # Private objects are torch's dicts of parameters and hooks, which every module has its own of.
    own = ((k, v) for k, v in vars(module).items() if isinstance(v, plain) or not k.startswith("_"))
    return type(module), *((k, v if isinstance(v, plain) else id(v)) for k, v in own)


def experts_activation(module: Module) -> str | None:
    """The activation if this module computes `experts` of its stacked weights, found on random
    ones; or None.
    """
    if not (weights := _expert_weights(module)):
        return None
    names = set(ACTIVATIONS)
    # It takes other arguments, needs its own size, or does not run on a CPU.
    with (
        suppress(Exception),
        _on_cpu(),
    ):
        if list(inspect.signature(module.forward).parameters) != _EXPERTS_ARGUMENTS:
            return None
        *tensors, index = _exact_experts(len(weights[0]))
        for dtype in PROBED_DTYPES:
            x, gate_up, down, routing = (tensor.to(dtype) for tensor in tensors)
            got = _with_weights(module, weights, [gate_up, down])(x, index, routing)
            names = {
                name
                for name in names
                if _agree(got, experts_plain(x, index, routing, gate_up, down, name))
            }
        return next(iter(names), None)
    return None


def _expert_weights(module: Module) -> list[Any]:
    """Its stacked weights; empty if it cannot be one of ours."""
    weights: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    if _has_only(module, weights) and all(weight.ndim == 3 for weight in weights):
        return weights
    return []


def _exact_experts(num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs and weights of which no sum is rounded, so that all of transformers' implementations
    give the same bits.

    x and gate_up are small integers, each row of gate_up times a power of two: up to thousands,
    where a clamp shows. A row of down has one number that is not 0. Two experts of a token are
    added in either order.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (_TOKENS, _SIZE), generator=generator)
    gate_up = torch.randint(-4, 5, (num_experts, 2 * _SIZE, _SIZE), generator=generator)
    scales = 2.0 ** (torch.arange(2 * _SIZE) % _SIZE % 13 - 5)
    down = torch.eye(_SIZE).roll(1, 0) * torch.randint(
        1, 3, (num_experts, _SIZE, 1), generator=generator
    )
    index = torch.rand(_TOKENS, num_experts, generator=generator).topk(min(2, num_experts)).indices
    return x, gate_up * scales[:, None], down, torch.rand(index.shape, generator=generator), index


class RouterStyle(NamedTuple):
    """How a router chooses experts from the logits of its linear layer, and what it returns."""

    k: int
    style: RouteStyle
    float_logits: bool  # it returns them in float32


def router_style(module: Module) -> RouterStyle | None:
    """How this module chooses experts, found on random weights; None if that is not `route` of a
    linear layer.
    """
    if not (weights := _router_weights(module)):
        return None
    with suppress(Exception), _on_cpu():  # it takes other arguments, or does not run on a CPU
        generator = torch.Generator().manual_seed(0)
        dim = weights[0].shape[1]
        x = torch.randn(_TOKENS, dim, generator=generator)
        x[:4] *= torch.tensor([[20.0], [1e2], [1e3], [1e4]])  # large logits, where a clamp shows
        x[4:8] *= (
            0.01  # probabilities that are equal where they are rounded before the largest are taken
        )
        tensors = [
            torch.randn(weight.shape, generator=generator) * 2 / dim**0.5 for weight in weights
        ]
        cases = []
        for dtype in PROBED_DTYPES:
            parts = [tensor.to(dtype) for tensor in tensors]
            output = _with_weights(module, weights, parts)(hidden_states=x.to(dtype))
            cases.append((F.linear(x.to(dtype), *parts), output))
        k = cases[0][1][2].shape[-1]
        for style in (RouterStyle(k, *fields) for fields in product(_STYLES, (False, True))):
            if all(_returns(output, logits, style) for logits, output in cases):
                return style
    return None


def _router_weights(module: Module) -> list[Any]:
    """The weight of its linear layer, and the bias if there is one; empty if it cannot be one of
    ours.
    """
    weights: list[Any] = [
        w for name in ("weight", "bias") if (w := getattr(module, name, None)) is not None
    ]
    is_router = isinstance(getattr(module, "top_k", None), int)
    return (
        weights if is_router and _has_only(module, weights) and not list(module.children()) else []
    )


def _returns(output: Any, logits: Tensor, style: RouterStyle) -> bool:
    expected = (
        logits.float() if style.float_logits else logits,
        *route_plain(logits, style.k, style.style),
    )
    return type(output) is tuple and len(output) == 3 and all(map(_are_equal, output, expected))


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether they differ by the activation's last bits alone, in which torch's own implementations
    differ.

    Outputs of `_exact_experts` go up to millions, and those of two activations differ by 0.01 or
    more. Other last bits of the activation hardly ever round to another bfloat16; rounding at other
    places does so often.
    """
    is_close = a.dtype == b.dtype and torch.allclose(
        a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=1e-3
    )
    return is_close and (a.dtype != torch.bfloat16 or float((a != b).float().mean()) < _FEW)


def _has_only(module: Module, weights: list[Any]) -> bool:
    """Whether these are the module's only tensors, plain parameters, and it has no hook: no
    adapter, not quantised.
    """
    if not weights or not _are_plain(weights) or not all(map(is_unmodified, module.modules())):
        return False
    return {id(tensor) for tensor in (*module.parameters(), *module.buffers())} == {
        id(weight) for weight in weights
    }


def _are_plain(weights: list[Any]) -> bool:
    return all(type(weight) is Parameter for weight in weights)


def _with_weights(module: Module, weights: list[Any], others: list[Tensor]) -> Module:
    """A copy of the module with other weights; its own, which may be large, are not copied."""
    parameters = (Parameter(other, requires_grad=False) for other in others)
    replacements: dict[int, Any] = {
        id(old): new for old, new in zip(weights, parameters, strict=True)
    }
    return copy.deepcopy(module, replacements)


@contextmanager
def _on_cpu() -> Iterator[None]:
    """New tensors are on the CPU, and its random state stays as it is: a router may add noise."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        yield


# Methods, not partials: `torch.compile` takes a partial for a constant and compiles every layer
# anew.
class _Experts:
    def __init__(self, module: Any, activation: str) -> None:
        self.module = module
        self.activation = activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module = self.module
        arguments = (hidden_states, top_k_index, top_k_weights)
        weights = [module.gate_up_proj, module.down_proj]
        # A prompt; an adapter was added since.
        if top_k_index.numel() > MAX_PAIRS or not _are_plain(weights):
            return type(module).forward(module, *arguments)  # type: ignore[no-any-return]
        return experts(*arguments, *weights, self.activation)


class _Router:
    def __init__(self, module: Any, style: RouterStyle) -> None:
        self.module = module
        self.style = style

    def forward(self, hidden_states: Tensor) -> Any:
        module = self.module
        k, style, float_logits = self.style
        # Tokens by batch row; an adapter.
        if hidden_states.ndim != 2 or not _are_plain([module.weight]):
            return type(module).forward(module, hidden_states)
        logits = F.linear(hidden_states, module.weight, getattr(module, "bias", None))
        weights, index = route(logits, k, style)
        return logits.float() if float_logits else logits, weights, index
