"""Who a model is in this process: everything that a pass reads beside its inputs, by value.

    pass_state(model)      for captured passes: Python state by value, tensors by address
    content_state(model)   for prefix reuse: the same, and what tensors hold (write count, sample)

Python state is what is reachable from the modules: attributes (numbers,
strings, containers, numpy arrays, objects), classes, functions with their
defaults, closures and the globals that they name, the attention function behind
its name. What is too large or has no Python state (a tokenizer, a lock) counts
as the object that it is. `fileidentity.py` has the identity in files.
"""

import gc
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import cache, cached_property, partial
from hashlib import blake2b
from itertools import chain, compress, islice
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    UnionType,
)
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hf_static_kv import compat

NUM_SAMPLED = 16  # elements of each weight
_MAX_NODES = 4_000  # parts of one attribute; with more it counts as the object that it is
_MAX_KNOWN = 8  # sets of classes whose values are kept
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
_FIXED = frozenset({NoneType, bool, int, float, str, torch.dtype, torch.device})
_CONTAINERS = (dict, list, tuple, set, frozenset)
# Types in C without a state that changes.
_UNCHANGING = (BuiltinFunctionType, ContextVar, GenericAlias, UnionType, re.Pattern)
OF_TORCH = frozenset(vars(Module())) - {"training"}
# Attributes of a model that no pass reads: of calls, and of its loading.
_OF_A_CALL = {
    "generation_config", "warnings_issued", "all_tied_weights_keys",
    "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules",
    "_skip_keys_device_placement", "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save",
}  # fmt: skip
# Classes that no pass computes with. By name: importing them takes time.
_OPAQUE = frozenset(
    {"Logger", "PreTrainedTokenizerBase", "ProcessorMixin", "GenerationConfig", "Generator"}
)
# Packages whose functions are known by their code alone.
_NOT_FOLLOWED = {
    "torch", "transformers", "numpy", "accelerate", "hf_static_kv", *sys.stdlib_module_names
}  # fmt: skip


_ATTRIBUTES: "WeakKeyDictionary[PreTrainedModel, _Attributes]" = WeakKeyDictionary()
# Values of classes that were read before, by these classes; the newest last.
_CLASSES: "OrderedDict[tuple[type, ...], _Known]" = OrderedDict()


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


class Sent:
    """A tensor on its way to the host. What the device is given later does not delay it."""

    def __init__(self, tensor: Tensor) -> None:
        self._on_host = tensor.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            # The tensor may not be on the current device.
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Any:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host.tolist()


def pass_state(
    model: PreTrainedModel, modules: list[Module] | None = None, rotary: Sent | None = None
) -> State:
    """Differs if a recorded pass may differ. It reads tensors by address.

    `modules` are all of the model, and `rotary` its `send_rotary`, if these are there already.
    """
    return State(*Values(modules or compat.all_modules(model)).of_model(model, rotary))


def content_state(
    model: PreTrainedModel, modules: list[Module] | None = None, rotary: Sent | None = None
) -> State:
    """Differs if a pass over the same tokens may give other keys and values.

    A write through `.data` beside the sample is not seen. Arguments as of `pass_state`.
    """
    values = Values(modules or compat.all_modules(model))
    seen = values.of_model(model, rotary)
    of_calls = tuple(map(values.of_tensor, values.of_calls))
    writes = tuple(map(compat.write_count, values.tensors))
    return State(*seen, (of_calls, writes, _samples(values.tensors)))


def first_difference(before: State, after: State) -> str:
    for one, other in zip(chain(*before.parts[1]), chain(*after.parts[1]), strict=False):
        if one != other:
            return f"{one[1]} of {one[0].__name__}"
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
        self.seen: list[Any] = []  # all that was read and has parts
        # Readers of values without parts. By type: `isinstance` is slow for configs.
        self._shallow: dict[type, Callable[[Any], Any]] = {
            str: _itself,
            type(None): _itself,
            float: _float,
        }
        if is_portable:
            # JSON tells these apart.
            self._shallow |= dict.fromkeys((bool, int, float), _itself)

    def of_model(self, model: PreTrainedModel, sent: Sent | None = None) -> tuple[Any, ...]:
        attributes = self._attributes(model)
        tensors = self._weights()
        configs = self.of_attribute(model.config), self.of_attribute(model.config.get_text_config())
        functions = tuple(map(self.of_attribute, _attention_functions(model)))
        for kind in dict.fromkeys(map(type, self.modules)):
            self._add_class(kind)
        # Settings of the process or thread that change results.
        autocast = map(torch.get_autocast_dtype, filter(torch.is_autocast_enabled, ("cpu", "cuda")))
        settings = torch.get_float32_matmul_precision(), torch.get_default_dtype(), *autocast
        classes = self._classes()
        rotary = (sent or send_rotary(self.modules)).read()
        rest = tensors, configs, functions, classes, settings, rotary
        return weakref.ref(model), attributes, *rest

    def _attributes(self, model: PreTrainedModel) -> tuple[Any, ...]:
        """Class, name and value of each attribute of a module."""
        modules = self.modules.copy()
        known = _ATTRIBUTES.get(model)
        if known is None or not known.are_those_of(modules):
            known = _ATTRIBUTES[model] = _Attributes(modules)
        changing = [self._attribute(modules[i], name) for i, name in known.changing]
        others = [
            self._attribute(module, name)
            # Grows meanwhile, by modules that attributes hold.
            for module in islice(self.modules, len(modules), None)
            for name in module.__dict__
            if name not in OF_TORCH
        ]
        return known.fixed, changing, others

    def _attribute(self, module: Module, name: str) -> tuple[type, str, Any]:
        value = module.__dict__[name]
        if isinstance(value, Tensor) and isinstance(module, PreTrainedModel):
            self.of_calls.append(value)
            value = "a tensor of a call"
        return type(module), name, self.of_attribute(value)

    def _weights(self) -> tuple[Any, ...]:
        """Names and places of all parameters and buffers, in columns: they are many."""
        named = compat.named_tensors(self.modules)
        kinds = [type(tensor) for _, tensor in named]
        plain = [t for _, t in named if type(t) is Parameter or type(t) is Tensor]
        wrapped = [t for _, t in named if t is not None and type(t) not in (Parameter, Tensor)]
        self.tensors += plain
        return (
            [name for name, _ in named],
            kinds,
            list(map(Tensor.data_ptr, plain)),
            [(t.shape, t.dtype, t.device) for t in plain],
            list(map(Tensor.stride, plain)),
            list(map(self.of_tensor, wrapped)),
        )

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
        self.seen.append(value)
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
            self.seen.append(function)
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
        if _is_opaque(kind) or isinstance(value, ModuleType):
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

    def _classes(self) -> tuple[Any, ...]:
        """The classes with their functions: thousands of parts, which seldom change."""
        key = tuple(self.classes)
        known = _CLASSES.pop(key, None)
        if known is None or not known.is_unchanged():
            values = Values([])
            values.classes = self.classes
            known = _Known(tuple(map(values._class, self.classes)), values.seen)
            self.tensors += values.tensors
            if values.tensors or values.modules:  # they may be a model's, and live no longer
                return known.value
            if len(_CLASSES) >= _MAX_KNOWN:
                _CLASSES.popitem(last=False)
        _CLASSES[key] = known
        return known.value

    def _class(self, kind: type) -> tuple[Any, ...]:
        self.seen.append(kind)
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


class _Attributes:
    """The attributes of modules, as they were read. Holds what cannot change, and no module."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self._kinds = list(map(type, modules))
        self._names = _names_of(modules)
        values = list(_values_of(modules))
        skipped = OF_TORCH | _OF_A_CALL
        self._is_fixed = [
            name not in skipped and type(value) in _FIXED
            for name, value in zip(self._names, values, strict=True)
        ]
        # Held: no other object gets the id of one that changes between two calls.
        self._held = list(compress(values, self._is_fixed))
        owners = [i for i, module in enumerate(modules) for _ in module.__dict__]
        own = list(zip(owners, self._names, values, self._is_fixed, strict=True))
        read = Values([]).of_attribute
        self.fixed = [(self._kinds[i], name, read(v)) for i, name, v, fixed in own if fixed]
        self.changing = [
            (i, name) for i, name, _, fixed in own if not fixed and name not in skipped
        ]

    def are_those_of(self, modules: Sequence[Module]) -> bool:
        return (
            self._kinds == list(map(type, modules))
            and self._names == _names_of(modules)
            and all(map(is_, compress(_values_of(modules), self._is_fixed), self._held))
        )


def _values_of(modules: Sequence[Module]) -> Iterator[Any]:
    return chain.from_iterable(module.__dict__.values() for module in modules)


def _names_of(modules: Sequence[Module]) -> list[str]:
    """The names of all attributes, torch's own too, of one module after the other."""
    return list(chain.from_iterable(module.__dict__ for module in modules))


class _Known:
    """A value, and what it was read of: the parts of each thing, as they were."""

    def __init__(self, value: Any, seen: Iterable[Any]) -> None:
        self.value: tuple[Any, ...] = value
        things = [thing for thing in seen if type(thing) is not tuple]  # its parts cannot change
        self._functions = [thing for thing in things if type(thing) is FunctionType]
        self._others = [thing for thing in things if type(thing) is not FunctionType]
        # By the id of the globals: a getter of those that functions name.
        named: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for function in self._functions:
            if _is_followed(function.__module__):
                names = _names(function.__code__)
                given = function.__globals__
                named.setdefault(id(given), (given, set()))[1].update(names)
        self._globals = [(given, sorted(names)) for given, names in named.values()]
        self._parts = list(self._direct_parts())

    def _direct_parts(self) -> Iterator[Any]:
        own = list(map(vars, self._functions))
        yield from chain(*own, chain.from_iterable(map(dict.values, own)))
        # Code, defaults, closure. Not by name: an audit hook would be called for each.
        yield from gc.get_referents(*self._functions)
        for given, names in self._globals:
            yield from map(given.get, names)
        for thing in self._others:
            yield from _direct_parts(thing)

    def is_unchanged(self) -> bool:
        parts = list(self._direct_parts())
        return len(parts) == len(self._parts) and all(map(is_, parts, self._parts))


def _direct_parts(thing: Any) -> list[Any]:
    """What `Values` reads of a thing, one level deep; a new object each time: cannot be told."""
    kind = type(thing)
    if issubclass(kind, type):
        return [thing.__bases__, *vars(thing), *vars(thing).values()]
    if kind is CellType:
        try:
            return [thing.cell_contents]
        except ValueError:  # empty
            return []
    if kind in _WRAPPERS:
        return [getattr(thing, name) for name in _WRAPPERS[kind]]
    if kind in _UNCHANGING or isinstance(thing, ModuleType) or _is_opaque(kind):
        return []
    is_told = kind.__dictoffset__ or kind in _CONTAINERS
    if not is_told or isinstance(thing, np.ndarray):
        return [object()]
    own = getattr(thing, "__dict__", {})
    parts = [*own, *own.values()]
    if issubclass(kind, _CONTAINERS):
        parts += thing
    if issubclass(kind, dict):
        parts += thing.values()
    return parts + [getattr(thing, name, None) for name in _slots(kind)]


def _itself(value: Any) -> Any:
    return value


def _float(value: float) -> Any:
    # -0.0 is another number than 0.0, and nan is the same as nan.
    return "float", value.hex()


def _with_type(value: Any) -> Any:
    return type(value), value  # True is not 1


class _TooLarge(Exception):
    """An attribute has more than `_MAX_NODES` parts."""


def _is_opaque(kind: type) -> bool:
    return not _OPAQUE.isdisjoint(base.__name__ for base in kind.__mro__)


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


def send_rotary(modules: Sequence[Module]) -> Sent:
    """The rotary frequencies, of which a step has tables."""
    rotary = [module for module in modules if "RotaryEmbedding" in type(module).__name__]
    buffers = [buffer for module in rotary for buffer in compat.own_parts(module, "buffers")]
    values = [b.flatten() if b.numel() <= 4096 else b.double().sum()[None] for b in buffers]
    return Sent(torch.cat(values) if values else torch.empty(0))


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
