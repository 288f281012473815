"""Who a model is in this process: everything that a pass reads beside its inputs, by value.

    pass_state(model)      for captured passes: Python state by value, tensors by address
    content_state(model)   for prefix reuse: the same, and what tensors hold (write count, sample)

Python state is what is reachable from the modules: attributes (numbers,
strings, containers, numpy arrays, objects), classes, functions with their
defaults, closures and the globals that they name, the attention function behind
its name. What is too large or has no Python state (a tokenizer, a lock) counts
as the object that it is. `fileidentity.py` has the identity in files.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import cache, cached_property, partial
from hashlib import blake2b
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hf_static_kv import compat

NUM_SAMPLED = 16  # elements of each weight
_MAX_NODES = 4_000  # parts of one attribute; with more it counts as the object that it is
# Immutable types.
_PLAIN = (
    int, bool, bytes, complex, range, slice, type(...), type(NotImplemented), Enum, type, CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype,
)  # fmt: skip
# What wraps a function, and its parts.
_WRAPPERS = {
    MethodType: ("__func__", "__self__"), partial: ("func", "args", "keywords"),
    property: ("fget",), staticmethod: ("__func__",), classmethod: ("__func__",),
    cached_property: ("func",),
}  # fmt: skip
OF_TORCH = frozenset(vars(Module())) - {"training"}
# Attributes of a model that no pass reads.
_OF_A_CALL = {"generation_config", "warnings_issued"}
# Classes that no pass computes with. By name: importing them takes time.
_OPAQUE = frozenset(
    {"Logger", "PreTrainedTokenizerBase", "ProcessorMixin", "GenerationConfig", "Generator"}
)
# Packages whose functions are known by their code alone.
_NOT_FOLLOWED = {
    "torch", "transformers", "numpy", "accelerate", "hf_static_kv", *sys.stdlib_module_names
}  # fmt: skip


class State:
    """Equal if nothing that was read of a model has changed. Keeps no model alive."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.parts == other.parts

    def __hash__(self) -> int:
        # Few states are kept, and a hash takes longer than a comparison.
        return len(self.parts[1])

    @property
    def of_pass(self) -> "State":
        """The `pass_state` in a `content_state`."""
        return State(*self.parts[:-1])


def pass_state(model: PreTrainedModel) -> State:
    """Differs if a recorded pass may differ. It reads tensors by address."""
    return State(*Values(compat.all_modules(model)).of_model(model))


def content_state(model: PreTrainedModel) -> State:
    """Differs if a pass over the same tokens may give other keys and values.

    A write through `.data` beside the sample is not seen.
    """
    values = Values(compat.all_modules(model))
    seen = values.of_model(model)
    of_calls = tuple(map(values.of_tensor, values.of_calls))
    writes = tuple(map(compat.write_count, values.tensors))
    return State(*seen, (of_calls, writes, _samples(values.tensors)))


def first_difference(before: State, after: State) -> str:
    for one, other in zip(before.parts[1], after.parts[1], strict=False):
        if one != other:
            names = (a[0] for a, b in zip(one[1], other[1], strict=False) if a != b)
            return f"{next(names, 'an attribute')} of {one[0].__name__}"
    return "a function, a class or a tensor"


class Values:
    """Python values as nested tuples that are equal only for equal values."""

    def __init__(self, modules: list[Module], is_portable: bool = False) -> None:
        # These grow by what is found in attributes.
        self.modules = list(modules)
        self.classes: list[type] = []
        self.tensors: list[Tensor] = []
        self.of_calls: list[Tensor] = []  # which calls leave on a model
        # For files: names in place of addresses, code and objects.
        self._is_portable = is_portable
        self._numbers = {id(module): i for i, module in enumerate(self.modules)}
        self._kept: list[Any] = []  # so that no id is used twice
        self._end = 0  # of `_kept`, for the attribute that is read now
        # Readers of values without parts. By type: `isinstance` is slow for configs.
        self._shallow: dict[type, Callable[[Any], Any]] = {
            str: _itself,
            type(None): _itself,
            float: _float,
        }
        if is_portable:
            # JSON tells these apart.
            self._shallow |= dict.fromkeys((bool, int, float), _itself)

    def of_model(self, model: PreTrainedModel) -> tuple[Any, ...]:
        modules = tuple(map(self._module, self.modules))
        configs = self.of_attribute(model.config), self.of_attribute(model.config.get_text_config())
        functions = tuple(map(self.of_attribute, _attention_functions(model)))
        for kind in dict.fromkeys(map(type, self.modules)):
            self._add_class(kind)
        classes = tuple(map(self._class, self.classes))
        # Settings of the process or thread that change results.
        autocast = map(torch.get_autocast_dtype, filter(torch.is_autocast_enabled, ("cpu", "cuda")))
        settings = torch.get_float32_matmul_precision(), torch.get_default_dtype(), *autocast
        rotary = _rotary_values(self.modules)
        return weakref.ref(model), modules, configs, functions, classes, settings, rotary

    def _module(self, module: Module) -> tuple[Any, ...]:
        is_model = isinstance(module, PreTrainedModel)
        found = []
        for name, value in module.__dict__.items():
            if name in OF_TORCH or (is_model and name in _OF_A_CALL):
                continue
            if is_model and isinstance(value, Tensor):
                self.of_calls.append(value)
                value = "a tensor of a call"
            read = self._shallow.get(type(value), self.of_attribute)
            found.append((name, read(value)))
        tensors = tuple(map(self.of_tensor, compat.own_tensors(module)))
        return type(module), tuple(found), tensors

    def of_attribute(self, value: Any) -> Any:
        start = len(self._kept)
        num_modules = len(self.modules)
        num_classes = len(self.classes)
        self._end = start + _MAX_NODES
        try:
            return self._of(value)
        except (_TooLarge, RecursionError):
            for met in self._kept[start:]:
                self._numbers.pop(id(met), None)
            del self.modules[num_modules:], self.classes[num_classes:]
            return self._as_object(value)

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if (read := self._shallow.get(kind)) is None:
            if kind is FunctionType:
                return self._function(value)
            if issubclass(kind, _PLAIN):
                read = _with_type
            elif issubclass(kind, Tensor):
                read = self.of_tensor
            else:
                return self._deep(value)
            self._shallow[kind] = read
        return read(value)

    def _deep(self, value: Any) -> Any:
        """A value with parts. Each object is read once."""
        if (number := self._numbers.get(id(value))) is not None:
            return "met", number
        if len(self._kept) == self._end:
            raise _TooLarge
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if isinstance(value, Module):
            self.modules.append(value)  # `of_model` is going through them
            return "module", type(value)
        return type(value), *self._parts(value)

    def _parts(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if issubclass(kind, dict):
            items = [(self._of(key), self._of(item)) for key, item in value.items()]
            return items + self._state(value)
        if issubclass(kind, (list, tuple)):
            return [*map(self._of, value), *self._state(value)]
        if issubclass(kind, (set, frozenset)):
            return [frozenset(map(self._of, value))]
        if issubclass(kind, (np.ndarray, np.generic)):
            digest = blake2b(np.ascontiguousarray(value).tobytes()).digest()
            return [value.dtype.str, value.shape, digest]
        if kind is FunctionType:
            return self._parts_of_function(value)
        if kind is CellType:
            is_empty = value == CellType()
            return ["empty"] if is_empty else [self._of(value.cell_contents)]
        for wrapper, names in _WRAPPERS.items():
            if issubclass(kind, wrapper):
                return [self._of(getattr(value, name)) for name in names]
        return self._object(value)

    def _function(self, function: FunctionType) -> Any:
        is_bare = not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)
        if is_bare and not function.__dict__ and not _is_followed(function.__module__):
            return function.__code__
        return self._deep(function)

    def _parts_of_function(self, function: FunctionType) -> list[Any]:
        named = []
        if _is_followed(function.__module__):
            given = function.__globals__
            for name in _names(function.__code__):
                if name in given and not issubclass(type(given[name]), (ModuleType, type)):
                    named.append((name, self._of(given[name])))
        items = function.__dict__.items()
        own = [(name, self._of(value)) for name, value in items if "torchdynamo" not in name]
        parts = function.__defaults__, function.__kwdefaults__, function.__closure__
        return [function.__code__, *map(self._of, parts), *own, *named]

    def _object(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        is_opaque = not _OPAQUE.isdisjoint(base.__name__ for base in kind.__mro__)
        if is_opaque or isinstance(value, ModuleType):
            return [self._as_object(value)]
        if kind.__dictoffset__ or any(True for _ in _slots(kind)):
            self._add_class(kind)
            return self._state(value)
        try:  # an object of C: what its pickle is made of
            made = value.__reduce_ex__(2)
        except Exception:
            return [self._as_object(value)]
        if isinstance(made, str):
            return [made]
        return [self._of(list(part) if isinstance(part, Iterator) else part) for part in made[1:]]

    def _state(self, value: Any) -> list[Any]:
        found = [(name, self._of(item)) for name, item in getattr(value, "__dict__", {}).items()]
        names = [name for name in _slots(type(value)) if hasattr(value, name)]
        return found + [(name, self._of(getattr(value, name))) for name in names]

    def _add_class(self, kind: type) -> None:
        """Read a class and its bases, torch's too: libraries patch modules."""
        for base in kind.__mro__:
            is_read = _is_followed(base.__module__) or issubclass(base, Module)
            # `PreTrainedModel` prepares passes and does not compute.
            if is_read and base is not PreTrainedModel and base not in self.classes:
                self.classes.append(base)

    def _class(self, kind: type) -> tuple[Any, ...]:
        own = [(name, value) for name, value in vars(kind).items() if _counts(name, value)]
        return kind, kind.__bases__, [(name, self.of_attribute(value)) for name, value in own]

    def of_tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        parts = unwrapped(tensor)
        self.tensors += parts
        if self._is_portable:
            return tuple((dtype_name(part.dtype), part.shape) for part in parts)
        return tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in parts)

    def _as_object(self, value: Any) -> Any:
        """Equal for this very object alone, without keeping it alive."""
        if self._is_portable:
            return type(value).__qualname__
        try:
            return id(value), weakref.ref(value)
        except TypeError:
            return id(value)


def _itself(value: Any) -> Any:
    return value


def _float(value: float) -> Any:
    # -0.0 is another number than 0.0, and nan is the same as nan.
    return "float", value.hex()


def _with_type(value: Any) -> Any:
    return type(value), value  # True is not 1


class _TooLarge(Exception):
    """An attribute has more than `_MAX_NODES` parts."""


@cache
def _is_followed(module: str | None) -> bool:
    """Whether a Python module is a model's, or may be a user's."""
    name = module or ""
    return name.startswith("transformers.models.") or name.partition(".")[0] not in _NOT_FOLLOWED


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    inside = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return tuple(dict.fromkeys(code.co_names + sum(inside, ())))


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute of a class is a method or a value."""
    if name.startswith("__") or name == "_abc_impl":
        return isinstance(value, FunctionType)
    # transformers keeps in "_cached_value" what it has found out about a class.
    is_description = isinstance(value, (GetSetDescriptorType, MemberDescriptorType))
    return not is_description and not name.endswith("_cached_value")


def _attention_functions(model: PreTrainedModel) -> list[Any]:
    config = model.config
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    names = [str(compat.attention_name(part)) for part in parts if part is not None]
    interfaces: list[Any] = [AttentionInterface(), AttentionMaskInterface()]  # type: ignore[no-untyped-call]
    return [interface.get(name) for name in names for interface in interfaces]


def _rotary_values(modules: Sequence[Module]) -> tuple[float, ...]:
    """The rotary frequencies, of which a step has tables."""
    rotary = [module for module in modules if "RotaryEmbedding" in type(module).__name__]
    buffers = [buffer for module in rotary for buffer in compat.own_parts(module, "buffers")]
    values = [b.flatten() if b.numel() <= 4096 else b.double().sum()[None] for b in buffers]
    return tuple(torch.cat(values).tolist()) if values else ()


@torch.no_grad()
def _samples(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            sampled = sample(tensor)
            samples.setdefault((sampled.device, sampled.dtype), []).append(sampled)
    return tuple([tuple(torch.cat(parts).tolist()) for parts in samples.values()])


def sample(tensor: Tensor) -> Tensor:
    """At most 16 elements, evenly spread, without a copy of the tensor."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot list a float8
    size = min(NUM_SAMPLED, tensor.numel())
    step = max(1, tensor.numel() // NUM_SAMPLED)
    if tensor.is_contiguous():
        return tensor.as_strided((size,), (step,))
    return tensor.flatten()[::step][:size]


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """The tensor, or those inside a wrapper such as a quantised weight."""
    if type(tensor) in (Tensor, Parameter):
        return [tensor]
    if (inner := compat.inner_tensors(tensor)) is None:
        return [tensor]
    return [part for wrapped in inner for part in unwrapped(wrapped)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def states_of_a_call(modules: Sequence[Module]) -> dict[int, str]:
    """Tensors that calls leave on whole models (`rope_deltas`): names by `id`."""
    models = [module for module in modules if isinstance(module, PreTrainedModel)]
    named = [item for model in models for item in vars(model).items()]
    return {id(value): name for name, value in named if isinstance(value, Tensor)}


def draws_random_numbers(modules: Iterable[Module]) -> bool:
    return any(map(random_rates, modules))


def random_rates(module: Module) -> dict[str, float]:
    """The dropouts and jitters of a module in train mode, by name."""
    if not module.training:
        return {}
    is_dropout = isinstance(module, torch.nn.Dropout)
    rates = {}
    for name, value in vars(module).items():
        is_rate = "drop" in name or "jitter" in name or (is_dropout and name == "p")
        if is_rate and isinstance(value, float) and value > 0:
            rates[name] = value
    return rates
