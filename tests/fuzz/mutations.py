"""Mutations: Python state of a model that changes between two calls, where a captured step cannot
see it change.

Most kinds patch the `forward` of one module, which mixes its output by a number that it reads
somewhere: in a list, a closure, an attribute of its class. The others change what a model has:
weights, a window, its attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# From and to. Python's hash of -1 is that of -2.
NUMBERS = ((1.0, 2.0), (-1.0, -2.0), (-1, -2), (0.5, 1.5))
ATTENTION = "fuzzed_attention"
_OWN_NUMBERS = ("scaling", "variance_epsilon", "eps")
_ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")

Setter = Callable[[float], None]


@dataclass
class Place:
    """A module of a layer that returns one tensor, and the layer with the type of what that
    returns.
    """

    module: Module
    layer: Module
    layer_output: Any
    model: PreTrainedModel


@dataclass
class Holder:
    """A dataclass on a module."""

    factor: float


def mixed(states: Tensor, number: Any) -> Tensor:
    """Another direction for another number: a norm behind it would undo another scale."""
    return states + number * states.roll(1, dims=-1)


class MixedActivation:
    """A callable with a number, no module."""

    def __init__(self, own: Callable[[Tensor], Tensor]) -> None:
        self.own, self.factor = own, 1.0

    def __call__(self, states: Tensor) -> Tensor:
        return mixed(self.own(states), self.factor)


@contextmanager
def mutable(model: PreTrainedModel, kind: str, place: int) -> Iterator[Setter]:
    """A function that gives the mutation another number. All is as before on leaving.

    It does nothing if this model has no place for the kind: a window, an activation.
    """
    with ExitStack() as undo:
        yield KINDS[kind](find_place(model, place), undo) or (lambda number: None)


def find_place(model: PreTrainedModel, number: int) -> Place:
    """One of the modules right below the layers, by its number."""
    found: list[Place] = []
    layers = decoder_layers(model)
    outputs: dict[Module, Any] = {}

    def note(module: Module, args: Any, output: Any) -> None:
        outputs[module] = output

    children = [(layer, child) for layer in layers for child in layer.children()]
    hooks = [
        module.register_forward_hook(note)
        for module in (*layers, *(child for _, child in children))
    ]
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([[5, 6]], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, child in children:
        if isinstance(outputs.get(child), Tensor):
            found.append(Place(child, layer, outputs[layer], model))
    return found[number % len(found)]


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    return next(
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count
    )


# --- a patched forward that reads a number


def _read_by_forward(
    store: Callable[[Any, float], None], read: Callable[[Any], Any]
) -> Callable[..., Setter]:
    """A kind whose number is stored on the module as `fuzzed`."""

    def install(at: Place, undo: ExitStack) -> Setter:
        module = at.module
        own = module.forward
        undo.callback(module.__dict__.pop, "fuzzed", None)
        _replace_forward(
            module, lambda *args, **kwargs: mixed(own(*args, **kwargs), read(module)), undo
        )
        return lambda number: store(module, number)

    return install


def _replace_forward(module: Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    undo.callback(_set_or_delete, module, "forward", module.__dict__.get("forward"))
    module.forward = forward


def _set_or_delete(owner: Any, name: str, value: Any) -> None:
    if value is None:
        owner.__dict__.pop(name, None)
    else:
        setattr(owner, name, value)


def _in_place(
    make: Callable[[float], Any], change: Callable[[Any, float], None]
) -> Callable[[Any, float], None]:
    """The same object on the module, with another number in it."""

    def store(module: Any, number: float) -> None:
        if "fuzzed" in module.__dict__:
            change(module.fuzzed, number)
        else:
            module.fuzzed = make(number)

    return store


def _store(make: Callable[[float], Any]) -> Callable[[Any, float], None]:
    return lambda module, number: setattr(module, "fuzzed", make(number))


def _set_item(key: Any) -> Callable[[Any, float], None]:
    return lambda container, number: container.__setitem__(key, number)


def _set_factor(holder: Any, number: float) -> None:
    holder.factor = number


def _set_inside(container: Any, number: float) -> None:
    container[0]["a"].factor = number


def _store_tensor(module: Any, number: float) -> None:
    """None, and then a tensor."""
    is_first = "fuzzed" not in module.__dict__ or module.fuzzed is not None
    device = next(module.parameters(), torch.empty(0)).device
    module.fuzzed = None if is_first else torch.tensor(float(number), device=device)


# --- numbers in classes and functions


def _on_class(make: Callable[[float], Any], read: Callable[[Any], Any]) -> Callable[..., Setter]:
    def install(at: Place, undo: ExitStack) -> Setter:
        module, kind = at.module, type(at.module)
        own = module.forward
        undo.callback(lambda: delattr(kind, "fuzzed") if "fuzzed" in vars(kind) else None)
        _replace_forward(
            module, lambda *args, **kwargs: mixed(own(*args, **kwargs), read(module)), undo
        )
        return lambda number: setattr(kind, "fuzzed", make(number))

    return install


def _cell(at: Place, undo: ExitStack) -> Setter:
    own, factor = at.module.forward, 1.0

    def change(number: float) -> None:
        nonlocal factor
        factor = number

    _replace_forward(at.module, lambda *args, **kwargs: mixed(own(*args, **kwargs), factor), undo)
    return change


def _default(at: Place, undo: ExitStack) -> Setter:
    own = at.module.forward

    def forward(*args: Any, factor: float = 1.0, **kwargs: Any) -> Any:
        return mixed(own(*args, **kwargs), factor)

    _replace_forward(at.module, forward, undo)
    return lambda number: forward.__kwdefaults__.update(factor=number)


def _activation(at: Place, undo: ExitStack) -> Setter | None:
    """A callable in the place of the activation."""
    name = next(
        (name for name in _ACTIVATIONS if isinstance(getattr(at.module, name, None), Module)), None
    )
    if name is None:
        return None
    module, own = at.module, at.module._modules[name]
    other = MixedActivation(own)
    del module._modules[name]
    module.__dict__[name] = other

    def restore() -> None:
        del module.__dict__[name]
        setattr(module, name, own)

    undo.callback(restore)
    return lambda number: setattr(other, "factor", number)


# --- what a model has


def _own_number(at: Place, undo: ExitStack) -> Setter | None:
    """The scaling of attention, or the epsilon of a norm."""
    for module in at.layer.modules():
        for name in _OWN_NUMBERS:
            before = module.__dict__.get(name)
            if isinstance(before, float):
                undo.callback(setattr, module, name, before)
                scale = before if name == "scaling" else 0.1
                return lambda number, module=module, name=name: setattr(
                    module, name, scale * abs(number)
                )
    return None


def _weights(past_autograd: bool) -> Callable[..., Setter | None]:
    def install(at: Place, undo: ExitStack) -> Setter | None:
        parameter = next(at.module.parameters(), None)
        if parameter is None:
            return None
        before = parameter.detach().clone()

        def change(number: float) -> None:
            with torch.no_grad():
                (parameter.data if past_autograd else parameter).copy_(mixed(before, number))

        undo.callback(change, 0.0)
        return change

    return install


def _window(at: Place, undo: ExitStack) -> Setter | None:
    """Another `sliding_window`, in the config and on modules that have read it."""
    config = at.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    is_used = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if not window or not is_used or not getattr(config, "use_sliding_window", True):
        return None
    owners = [m for m in at.model.modules() if m.__dict__.get("sliding_window") == window]
    numbers: dict[float, int] = {}

    def change(number: float) -> None:
        size = numbers.setdefault(number, window + 2 * len(numbers))
        for owner in (config, *owners):
            owner.sliding_window = size

    undo.callback(lambda: [setattr(owner, "sliding_window", window) for owner in (config, *owners)])
    return change


def _attention(at: Place, undo: ExitStack) -> Setter | None:
    """The attention function of a user, registered again under its name with another scale."""
    before = at.model.config._attn_implementation
    if before != "sdpa":
        return None

    def change(number: float) -> None:
        def attend(
            module: Any, query: Tensor, *args: Any, scaling: float | None = None, **kwargs: Any
        ) -> Any:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            return sdpa_attention_forward(
                module, query, *args, scaling=scaling * abs(number), **kwargs
            )

        AttentionInterface.register(ATTENTION, attend)

    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    change(1.0)
    at.model.set_attn_implementation(ATTENTION)
    undo.callback(AttentionMaskInterface._global_mapping.pop, ATTENTION)
    undo.callback(AttentionInterface._global_mapping.pop, ATTENTION)
    undo.callback(at.model.set_attn_implementation, before)
    return change


def _skip(at: Place, undo: ExitStack) -> Setter | None:
    """A layer that returns what it is given, and then itself again.

    Not the first one, nor the first of its type: transformers asks these for the length of a
    `DynamicCache`.
    """
    output, layer = at.layer_output, at.layer
    numbers = [
        module.layer_idx
        for module in layer.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    types = getattr(at.model.config.get_text_config(), "layer_types", None)
    if not numbers or numbers[0] == 0 or (types and numbers[0] == types.index(types[numbers[0]])):
        return None
    if not isinstance(output, Tensor) and any(part is not None for part in output[1:]):
        return None
    is_skipped = True
    undo.callback(layer.__dict__.pop, "forward", None)

    def skip(*args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return states if isinstance(output, Tensor) else (states, *output[1:])

    def change(number: float) -> None:
        nonlocal is_skipped
        is_skipped = not is_skipped
        if is_skipped:
            layer.forward = skip
        else:
            layer.__dict__.pop("forward", None)

    return change


KINDS: dict[str, Callable[[Place, ExitStack], Setter | None]] = {
    "number": _read_by_forward(_store(lambda n: n), lambda m: m.fuzzed),
    "numpy": _read_by_forward(_store(np.float32), lambda m: float(m.fuzzed)),
    "tuple": _read_by_forward(_store(lambda n: (n,)), lambda m: m.fuzzed[0]),
    "list": _read_by_forward(_in_place(lambda n: [n], _set_item(0)), lambda m: m.fuzzed[0]),
    "dict": _read_by_forward(
        _in_place(lambda n: {"a": n}, _set_item("a")), lambda m: m.fuzzed["a"]
    ),
    "dataclass": _read_by_forward(_in_place(Holder, _set_factor), lambda m: m.fuzzed.factor),
    "namespace": _read_by_forward(
        _in_place(lambda n: SimpleNamespace(factor=n), _set_factor), lambda m: m.fuzzed.factor
    ),
    "nested": _read_by_forward(
        _in_place(lambda n: [{"a": Holder(n)}], _set_inside), lambda m: m.fuzzed[0]["a"].factor
    ),
    "tensor": _read_by_forward(_store_tensor, lambda m: 1.0 if m.fuzzed is None else m.fuzzed),
    "class attribute": _on_class(lambda n: n, lambda m: m.fuzzed),
    "class method": _on_class(lambda n: lambda self: n, lambda m: m.fuzzed()),
    "cell": _cell,
    "default": _default,
    "activation": _activation,
    "own number": _own_number,
    "weights": _weights(past_autograd=False),
    "weights past autograd": _weights(past_autograd=True),
    "window": _window,
    "attention": _attention,
    "skip": _skip,
}
