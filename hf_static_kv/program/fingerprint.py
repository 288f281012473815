"""What a captured step keeps: addresses, settings and functions. A model that differs in any of it needs a new step."""

import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.attention import EXACT_ATTENTION_NAME
from hf_static_kv.cache.identity import adapter_states, sample, unwrapped
from hf_static_kv.patching import attention_of, original_function

_SETTINGS = (bool, int, float, str)


def model_fingerprint(
    model: PreTrainedModel, modules: list[Module], keys: Sequence[Tensor], is_exact: bool
) -> tuple[Any, ...]:
    """Differs where something changed that a captured step is known to depend on. Keeps no model alive.

    `keys` are the tensors of the cache's groups.
    """
    states = states_of_a_call(modules)
    tensors = [tensor for tensor in _tensors(modules) if id(tensor) not in states]
    return _fingerprint(model, modules, [*keys, *tensors], is_exact)


def content_fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """Differs where a pass over the same tokens may compute other keys and values: settings, adapters, weights.

    Tensors are told apart by their number of writes and by a sample of their values. A write through `.data` that
    leaves all of the sample as it was is not seen.
    """
    modules, attention = compat.all_modules(model), attention_of(model)
    tensors = _tensors(modules)
    writes, samples = tuple(compat.write_count(tensor) for tensor in tensors), hash(_samples(tensors))
    is_exact = EXACT_ATTENTION_NAME in attention.values()
    return *_fingerprint(model, modules, tensors, is_exact), writes, samples, tuple(attention.items())


def _fingerprint(
    model: PreTrainedModel, modules: list[Module], tensors: list[Tensor], is_exact: bool
) -> tuple[Any, ...]:
    addresses, kinds = hash(tuple(tensor.data_ptr() for tensor in tensors)), [type(module) for module in modules]
    configs = {id(config): config for config in (model.config, model.config.get_text_config())}.values()
    settings = [v for owner in (*modules, *configs) for v in owner.__dict__.values() if type(v) in _SETTINGS]
    state, distinct_kinds = hash((*kinds, *settings, *adapter_states(modules))), tuple(dict.fromkeys(kinds))
    functions, patches = _functions(distinct_kinds), _patches(modules, is_exact)
    return weakref.ref(model), addresses, state, distinct_kinds, functions, patches, _rotary_values(modules)


def _tensors(modules: Sequence[Module]) -> list[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes; of a wrapper the tensors inside it."""
    tensors: list[Tensor] = []
    for module in modules:
        tensors += compat.own_parts(module, "parameters") + compat.own_parts(module, "buffers")
        tensors += [own for own in module.__dict__.values() if isinstance(own, Tensor)]
    return [part for tensor in tensors for part in unwrapped(tensor)]


def states_of_a_call(modules: Sequence[Module]) -> dict[int, str]:
    """Tensors that whole models keep as plain attributes, names by `id`: what a call leaves there (`rope_deltas`)."""
    models = [module.__dict__ for module in modules if isinstance(module, PreTrainedModel)]
    return {id(own): name for names in models for name, own in names.items() if isinstance(own, Tensor)}


@torch.no_grad()
def _samples(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Some elements of each tensor, read from the device at once."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        sampled = sample(tensor)
        samples.setdefault((sampled.device, sampled.dtype), []).append(sampled)
    return tuple(tuple(torch.cat(parts).tolist()) for key, parts in samples.items() if key[0].type != "meta")


def draws_random_numbers(modules: Iterable[Module]) -> bool:
    """Whether a pass draws: a module has `random_rates`."""
    return any(map(random_rates, modules))


def random_rates(module: Module) -> dict[str, float]:
    """The dropouts and jitters of this module that are not 0, by their names; none outside of train mode."""
    if not module.training:
        return {}
    is_dropout = isinstance(module, torch.nn.Dropout)
    rates = ((k, v) for k, v in vars(module).items() if "drop" in k or "jitter" in k or (is_dropout and k == "p"))
    return {name: rate for name, rate in rates if isinstance(rate, float) and rate > 0}


def type_without_address(tensors: Iterable[Tensor]) -> str | None:
    """The type of the first tensor that does not tell where its memory is; None if all do."""
    found = (t for t in tensors if compat.inner_tensors(t) is None and t.numel() and t.data_ptr() == 0)
    return next((type(tensor).__name__ for tensor in found), None)


def _functions(kinds: Sequence[type[Any]]) -> tuple[Any, ...]:
    """The `forward` of each class and the functions beside it: libraries patch either to speed a model up."""
    modules = dict.fromkeys(kind.__module__ for kind in kinds if kind.__module__ in sys.modules)
    functions = (
        original_function(module, name) if type(value) is partial else value  # as `fused_rotary` leaves it
        for module in modules
        for name, value in vars(sys.modules[module]).items()
        if type(value) in (FunctionType, partial)
    )
    return (*(kind.forward for kind in kinds), *functions)


def _patches(modules: Sequence[Module], is_exact: bool) -> tuple[Any, ...]:
    """Functions that modules hold: a patched `forward`, an activation."""
    return tuple(
        (number, name, _identity(value))
        for number, module in enumerate(modules)
        for name, value in module.__dict__.items()
        if callable(value) and not (is_exact and name == "forward")  # `exact` replaces it each time it is entered
    )


def _identity(function: Any) -> Any:
    """Equal for the same function only, also after it is deleted; holds no reference to what the function holds."""
    if isinstance(function, MethodType):
        return _identity(function.__func__), _identity(function.__self__)
    try:
        hash(reference := weakref.ref(function))
    except TypeError:  # a builtin, which is never deleted, or an object that cannot be hashed
        return id(function)
    return reference


def _rotary_values(modules: Sequence[Module]) -> int:
    """The rotary frequencies: a change in place keeps their address, and the step has tables made from them."""
    rotary = [module for module in modules if "RotaryEmbedding" in type(module).__name__]
    buffers = [buffer for module in rotary for buffer in compat.own_parts(module, "buffers")]
    values = [b.flatten() if b.numel() <= 4096 else b.double().sum()[None] for b in buffers]
    return hash(tuple(torch.cat(values).tolist())) if values else 0
