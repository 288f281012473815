"""Python values as nested tuples, and values that were read before recognised by their parts.

Read is what is reachable from a value: attributes (numbers, strings, containers,
numpy arrays, objects), classes, functions with their defaults, closures and the
globals that they name. What is too large or has no Python state (a tokenizer, a
lock) counts as the object that it is.
"""

import gc
import re
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from enum import Enum
from functools import cache, cached_property, partial
from hashlib import blake2b
from itertools import chain
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
    UnionType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from hf_static_kv import compat

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
_CONTAINERS = (dict, list, tuple, set, frozenset)
# What objects of a subclass hold beside their attributes.
_WITH_CONTENT: dict[type, Callable[[Any], Any]] = {
    float: float.hex, str: str.__str__, bytearray: bytes, deque: list,
}  # fmt: skip
# Types in C without a state that changes.
_UNCHANGING = (BuiltinFunctionType, ContextVar, GenericAlias, UnionType, re.Pattern)
# Classes that no pass computes with. By name: importing them takes time.
_OPAQUE = frozenset(
    {"Logger", "PreTrainedTokenizerBase", "ProcessorMixin", "GenerationConfig", "Generator"}
)
# Packages whose functions are known by their code alone.
_NOT_FOLLOWED = {
    "torch", "transformers", "numpy", "accelerate", "hf_static_kv", *sys.stdlib_module_names
}  # fmt: skip


class Values:
    """Python values as nested tuples that are equal only for equal values."""

    def __init__(self, modules: list[Module], is_portable: bool = False) -> None:
        # These grow by what is found in attributes.
        self.modules = list(modules)
        self.classes: list[type] = []
        self.tensors: list[Tensor] = []
        # For files: names in place of addresses, code and objects.
        self._is_portable = is_portable
        self._numbers = {id(module): i for i, module in enumerate(self.modules)}
        self._kept: list[Any] = []  # so that no id is used twice
        self._end = 0  # of `_kept`, for the attribute that is read now
        self.seen: list[Any] = []  # all that was read and has parts
        self._num_objects = 0  # that count as the objects that they are
        # Readers of values without parts. By type: `isinstance` is slow for configs.
        self._shallow: dict[type, Callable[[Any], Any]] = {
            str: _itself,
            type(None): _itself,
            float: _float,
        }
        if is_portable:
            # JSON tells these apart.
            self._shallow |= dict.fromkeys((bool, int, float), _itself)

    @property
    def num_not_held(self) -> int:
        """How much was found that nobody else may keep alive: it may hold a model."""
        return len(self.modules) + len(self.tensors) + self._num_objects

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
                read = self._shallow[kind] = _with_type
            elif issubclass(kind, Tensor):
                return self.of_tensor(value)  # its method in `_shallow` would be a cycle
            else:
                return self._deep(value)
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
            self.add_class(kind)
            base = next((base for base in _WITH_CONTENT if issubclass(kind, base)), None)
            content = [] if base is None else [self._of(_WITH_CONTENT[base](value))]
            return content + self._state(value)
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

    def add_class(self, kind: type) -> None:
        """Read a class and its bases, torch's too: libraries patch modules."""
        for base in kind.__mro__:
            is_read = _is_followed(base.__module__) or issubclass(base, Module)
            # `PreTrainedModel` prepares passes and does not compute.
            if is_read and base is not PreTrainedModel and base not in self.classes:
                self.classes.append(base)

    def of_class(self, kind: type) -> tuple[Any, ...]:
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
        self._num_objects += 1
        if self._is_portable:
            return type(value).__qualname__
        try:
            return id(value), weakref.ref(value)
        except TypeError:
            return id(value)


class Known:
    """A value, and what it was read of: the parts of each thing, as they were."""

    def __init__(self, value: Any, seen: Iterable[Any]) -> None:
        self.value = value
        things = [thing for thing in seen if not _is_fixed(thing)]
        self._is_told = all(map(_is_told, things))
        # By type: a proxy may say that it is an instance of anything.
        self._classes = [thing for thing in things if issubclass(type(thing), type)]
        self._others = [thing for thing in things if not issubclass(type(thing), type)]
        # Of a class the one behind its proxy.
        self._dicts = [gc.get_referents(vars(kind))[0] for kind in self._classes]
        self._dicts += [thing for thing in self._others if issubclass(type(thing), dict)]
        self._with_dict = [thing for thing in self._others if hasattr(thing, "__dict__")]
        # By the id of the globals: those that functions name.
        named: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for function in self._others:
            if type(function) is FunctionType and _is_followed(function.__module__):
                given = function.__globals__
                named.setdefault(id(given), (given, set()))[1].update(_names(function.__code__))
        self._globals = [(given, sorted(names)) for given, names in named.values()]
        self._parts = self._direct_parts()

    def is_unchanged(self) -> bool:
        parts = self._direct_parts()
        is_same = len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        return is_same and self._is_told

    def _direct_parts(self) -> list[Any]:
        own = [*self._dicts, *map(vars, self._with_dict)]
        parts = list(chain.from_iterable(own))  # names
        # Contents, slots; code, defaults, closures. In C: there are thousands.
        parts += gc.get_referents(*own, *self._others)
        parts += [kind.__bases__ for kind in self._classes]
        for given, names in self._globals:
            parts += [given.get(name, Known) for name in names]
        return parts


def _is_told(thing: Any) -> bool:
    """Whether the parts that `Values` reads of a thing are objects that it holds."""
    kind = type(thing)
    if issubclass(kind, (np.ndarray, bytearray)):
        return False
    is_container = issubclass(kind, _CONTAINERS)
    # One with a method of its own may give other parts than it holds.
    others = [base for base in kind.__mro__ if base not in (*_CONTAINERS, OrderedDict, defaultdict)]
    if is_container and any(
        name in vars(base) for base in others for name in ("__iter__", "items")
    ):
        return False
    is_seen = bool(kind.__dictoffset__) or issubclass(kind, (type, CellType, *_WRAPPERS))
    return is_seen or is_container or _is_fixed(thing)


def _is_fixed(thing: Any) -> bool:
    """Whether a thing has the same parts always, or counts as the object that it is."""
    kind = type(thing)
    if issubclass(kind, (tuple, frozenset)) and not kind.__dictoffset__:
        return True
    return kind in _UNCHANGING or issubclass(kind, ModuleType) or _is_opaque(kind)


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


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """The tensor, or those inside a wrapper such as a quantised weight."""
    if type(tensor) in (Tensor, Parameter):
        return [tensor]
    if (inner := compat.inner_tensors(tensor)) is None:
        return [tensor]
    return [part for wrapped in inner for part in unwrapped(wrapped)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
