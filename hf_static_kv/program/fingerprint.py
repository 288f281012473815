"""What a captured step holds for good. A model that differs in any of it needs another step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import Module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from hf_static_kv.program.rotary import replaced_function

_FEW = 4096  # numbers, which are read one by one
_SETTINGS = (bool, int, float, str)
# The states of an adapter. A replay does not see them: merging changes the weights where they are.
_ADAPTER_STATES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")


def all_modules(model: Module) -> list[Module]:
    """Those of `model.modules()`, in a third of its time: this runs before every prompt."""
    found: list[Module] = [model]
    for module in found:  # which grows meanwhile
        found += [part for part in module._modules.values() if part is not None]
    return found


def model_fingerprint(
    model: PreTrainedModel, modules: Sequence[Module], storage: torch.Tensor, is_exact: bool
) -> tuple[Any, ...]:
    """Equal for two calls just where a step that was captured in the first serves the second.

    It keeps neither the model nor a part of it alive.
    """
    kinds = [type(module) for module in modules]
    own_kinds = tuple(dict.fromkeys(kinds))
    settings = [v for module in modules for v in module.__dict__.values() if type(v) in _SETTINGS]
    configs = {id(c): c for c in (model.config, model.config.get_text_config())}.values()
    settings += [v for config in configs for v in config.__dict__.values() if type(v) in _SETTINGS]
    return (
        weakref.ref(model),
        hash(tuple(_addresses(modules, storage))),
        hash((*kinds, *settings, *_adapters(modules))),
        own_kinds,
        _functions(own_kinds),
        _patches(modules, is_exact),
        _rotary_values(modules),
    )


def without_address(tensors: Iterable[torch.Tensor]) -> str | None:
    """The type of the first tensor whose memory cannot be told apart from that of another; None where all can."""
    for tensor in tensors:
        if not is_traceable_wrapper_subclass(tensor) and tensor.numel() and tensor.data_ptr() == 0:
            return type(tensor).__name__
    return None


def _addresses(modules: Sequence[Module], storage: torch.Tensor) -> list[int]:
    tensors = [storage]
    for module in modules:
        tensors += [own for own in module._parameters.values() if own is not None]
        tensors += [own for own in module._buffers.values() if own is not None]
        tensors += [own for own in module.__dict__.values() if isinstance(own, torch.Tensor)]
    return [address for tensor in tensors for address in _addresses_of(tensor)]


def _addresses_of(tensor: torch.Tensor) -> list[int]:
    """One address, or those of the tensors that a wrapper (a quantised weight, say) consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor.data_ptr()]
    names, _ = tensor.__tensor_flatten__()
    return [address for name in names for address in _addresses_of(getattr(tensor, name))]


def _adapters(modules: Sequence[Module]) -> list[tuple[str, ...]]:
    return [
        tuple(str(getattr(module, name, None)) for name in _ADAPTER_STATES)
        for module in modules
        # Looked up past `Module.__getattr__`, which is slow.
        if hasattr(type(module), "active_adapters") or "active_adapters" in module.__dict__
        # A whole model has a method of this name, which says nothing and prints all of it.
        if not callable(module.active_adapters)
    ]


def _functions(kinds: Sequence[type[Any]]) -> tuple[Any, ...]:
    """The functions that make up a pass: each class's `forward`, and what stands beside the class in its file.

    Some libraries speed a model up by replacing either.
    """
    homes = [sys.modules.get(name) for name in dict.fromkeys(kind.__module__ for kind in kinds)]
    beside = [v for home in homes for v in vars(home or object).values() if type(v) in (FunctionType, partial)]
    return (*(kind.forward for kind in kinds), *(replaced_function(v) for v in beside))


def _patches(modules: Sequence[Module], is_exact: bool) -> tuple[Any, ...]:
    """Functions that modules hold: a `forward` of their own, an activation."""
    return tuple(
        (number, name, _identity(value))
        for number, module in enumerate(modules)
        for name, value in module.__dict__.items()
        # Inside `exact` each `forward` is ours, and new every time.
        if callable(value) and not (is_exact and name == "forward")
    )


def _identity(function: Any) -> Any:
    """Equal for the same function alone, also after it is gone; holds no reference to what the function holds."""
    if isinstance(function, MethodType):
        return _identity(function.__func__), _identity(function.__self__)
    try:
        reference = weakref.ref(function)
        hash(reference)
    except TypeError:  # a builtin, which stays, or an object that cannot be hashed
        return id(function)
    return reference


def _rotary_values(modules: Sequence[Module]) -> int:
    """The frequencies, from which a step has made tables: a change in place keeps their address."""
    rotary = [module for module in modules if "RotaryEmbedding" in type(module).__name__]
    buffers = [own for module in rotary for own in module._buffers.values() if own is not None]
    values = [b.flatten() if b.numel() <= _FEW else b.double().sum()[None] for b in buffers]
    return hash(tuple(torch.cat(values).tolist())) if values else 0
