"""Who a model is: everything that a pass reads beside its inputs, by value.

    pass_state(model)         captured passes: Python state by value, tensors by address
    content_state(model)      prefix reuse: the same, and what tensors hold: their number of writes and a sample
    ModelIdentity.of(model)   files: config, settings of modules, samples of weights; the same in every process

Python state is what is reachable from the modules: attributes (numbers, strings, containers, numpy
arrays, objects), classes, functions with their defaults, closures and the globals that they name,
the attention function behind its name. What is too large or has no Python state (a tokenizer, a
lock) counts as the object that it is.
"""

import json
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, partial
from hashlib import blake2b
from io import BytesIO
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
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_static_kv import compat

_SAMPLED = 16  # elements of each weight
# containers and objects in one attribute: what has more is compared as the object that it is
_MAX_NODES = 4_000
# Immutable, and compared by their value or as the object that they are.
_PLAIN = (
    int, bool, bytes, complex, range, slice, type(...), type(NotImplemented), Enum, type, CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype,
)  # fmt: skip
# Functions inside of something, and its parts.
_WRAPPERS = {
    MethodType: ("__func__", "__self__"), partial: ("func", "args", "keywords"), property: ("fget",),
    staticmethod: ("__func__",), classmethod: ("__func__",), cached_property: ("func",),
}  # fmt: skip
_OF_TORCH = frozenset(vars(Module())) - {
    "training"
}  # submodules, weights and hooks are looked at by their kind
_OF_A_LOADED_MODEL = {"generation_config", "hf_device_map", "name_or_path", "warnings_issued"}
_OF_A_CALL = frozenset(
    {"generation_config", "warnings_issued"}
)  # attributes of a model that no pass reads
# Objects that no pass computes with. By name: importing their modules takes time.
_OPAQUE = frozenset(
    {"Logger", "PreTrainedTokenizerBase", "ProcessorMixin", "GenerationConfig", "Generator"}
)
_BASES = (PreTrainedModel,)  # what it adds to a module prepares passes and does not compute
# Packages whose functions are known by their code: what these read is not followed.
# `transformers.models` is.
_NOT_FOLLOWED = {
    "torch",
    "transformers",
    "numpy",
    "accelerate",
    "hf_static_kv",
    *sys.stdlib_module_names,
}
# Fields of a config that change no key and no value.
_OTHER_FIELDS = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "transformers_version",
    "use_cache",
}  # fmt: skip


class State:
    """What a model was:

    equal only if nothing that was looked at has changed. Keeps no model alive.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.parts == other.parts

    def __hash__(self) -> int:
        return len(
            self.parts[1]
        )  # few states are kept, and hashing all values takes longer than comparing them

    @property
    def of_pass(self) -> "State":
        """The `pass_state` in a `content_state`."""
        return State(*self.parts[:-1])


def pass_state(model: PreTrainedModel) -> State:
    """Differs if a recorded pass may differ:

    it reads tensors at their addresses, and no Python of the model.
    """
    return State(*_Values(compat.all_modules(model)).of_model(model))


def content_state(model: PreTrainedModel) -> State:
    """Differs if a pass over the same tokens may give other keys and values.

    A write through `.data` that leaves all of the sample as it was is not seen.
    """
    values = _Values(compat.all_modules(model))
    seen = values.of_model(model)
    of_calls = tuple(map(values._tensor, values.of_calls))
    writes = tuple(compat.write_count(tensor) for tensor in values.tensors)
    return State(*seen, (of_calls, writes, _samples(values.tensors)))


def first_difference(before: State, after: State) -> str:
    """The name of the first attribute that differs between two states of one model."""
    for one, other in zip(before.parts[1], after.parts[1], strict=False):
        names = (a[0] for a, b in zip(one[1], other[1], strict=False) if a != b)
        if one != other:
            return f"{next(names, 'an attribute')} of {one[0].__name__}"
    return "a function, a class or a tensor"


class _Values:
    """Python values as nested tuples that are equal only for equal values."""

    def __init__(self, modules: list[Module], is_portable: bool = False) -> None:
        self.modules = list(modules)  # grows by those that are found in attributes
        self.of_calls: list[Tensor] = []  # which calls leave on a model
        self.is_portable = is_portable  # names in the place of addresses, code and objects
        self.tensors: list[Tensor] = []
        self.classes: list[type] = []  # grows by those of the values that are found
        self.numbers = {id(module): i for i, module in enumerate(self.modules)}
        self.kept: list[Any] = []  # so that no id is used twice
        self.end = 0  # of `kept`, for the attribute that is read now
        # How values without parts are read. By type: configs are slow when `isinstance` asks them.
        self.shallow: dict[type, Callable[[Any], Any]] = {
            str: _itself,
            type(None): _itself,
            float: _float,
        }
        if is_portable:
            self.shallow |= dict.fromkeys((bool, int, float), _itself)  # which JSON tells apart

    def of_model(self, model: PreTrainedModel) -> tuple[Any, ...]:
        """The model, modules, configs, attention functions, classes, settings of torch, rotary
        frequencies.
        """
        modules = tuple(
            (
                type(module),
                self._attributes(module),
                tuple(map(self._tensor, compat.own_tensors(module))),
            )
            for module in self.modules
        )
        configs = self.of_attribute(model.config), self.of_attribute(model.config.get_text_config())
        functions = tuple(self.of_attribute(function) for function in _attention_functions(model))
        for kind in dict.fromkeys(type(module) for module in self.modules):
            self._add_class(kind)
        classes = [
            self._class(kind) for kind in self.classes
        ]  # grows: values of classes have classes
        rotary = _rotary_values(self.modules)
        return (
            weakref.ref(model),
            modules,
            configs,
            functions,
            tuple(classes),
            _settings_of_torch(),
            rotary,
        )

    def _attributes(self, module: Module) -> tuple[tuple[str, Any], ...]:
        is_model = isinstance(module, PreTrainedModel)
        found = []
        for name, value in module.__dict__.items():
            if name in _OF_TORCH or (is_model and name in _OF_A_CALL):
                continue
            if is_model and isinstance(value, Tensor):
                self.of_calls.append(value)
                value = "a tensor of a call"
            read = self.shallow.get(type(value))
            found.append((name, self.of_attribute(value) if read is None else read(value)))
        return tuple(found)

    def of_attribute(self, value: Any) -> Any:
        """A value that a module or a class holds; the object that it is if it is too large."""
        start, *found = len(self.kept), len(self.modules), len(self.classes)
        self.end = start + _MAX_NODES
        try:
            return self.of(value)
        except (_TooLarge, RecursionError):
            for met in self.kept[start:]:
                self.numbers.pop(id(met), None)
            del self.modules[found[0] :], self.classes[found[1] :]
            return self._as_object(value)

    def of(self, value: Any) -> Any:
        kind = type(value)
        if (read := self.shallow.get(kind)) is not None:
            return read(value)
        if issubclass(kind, _PLAIN):
            self.shallow[kind] = _with_type
        elif issubclass(kind, Tensor):
            self.shallow[kind] = self._tensor
        else:
            return self._function(value) if kind is FunctionType else self._deep(value)
        return self.shallow[kind](value)

    def _deep(self, value: Any) -> Any:
        """A value that has parts: each object is read once."""
        if (number := self.numbers.get(id(value))) is not None:
            return "met", number
        if len(self.kept) == self.end:
            raise _TooLarge
        self.numbers[id(value)] = len(self.numbers)
        self.kept.append(value)
        if isinstance(value, Module):
            self.modules.append(value)  # `of_model` is going through them
            return "module", type(value)
        return type(value), *self._parts(value)

    def _parts(self, value: Any) -> Iterable[Any]:
        """What a value consists of."""
        kind = type(value)
        if issubclass(kind, dict):
            return [(self.of(key), self.of(item)) for key, item in value.items()] + self._state(
                value
            )
        if issubclass(kind, (list, tuple)):
            return [self.of(item) for item in value] + self._state(value)
        if issubclass(kind, (set, frozenset)):
            return [frozenset(map(self.of, value))]
        if issubclass(kind, (np.ndarray, np.generic)):
            return [
                value.dtype.str,
                value.shape,
                blake2b(np.ascontiguousarray(value).tobytes()).digest(),
            ]
        if kind is FunctionType:
            return self._parts_of_function(value)
        if kind is CellType:
            return [self.of(value.cell_contents)] if _is_filled(value) else ["empty"]
        for wrapper, names in _WRAPPERS.items():
            if issubclass(kind, wrapper):
                return [self.of(getattr(value, name)) for name in names]
        return self._object(value)

    def _function(self, function: FunctionType) -> Any:
        """The code of a function, and whatever else it has that a call reads."""
        is_bare = not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)
        if is_bare and not function.__dict__ and not _is_followed(function.__module__):
            return function.__code__
        return self._deep(function)

    def _parts_of_function(self, function: FunctionType) -> list[Any]:
        named: list[Any] = []
        if _is_followed(function.__module__):
            given = function.__globals__
            known = ((name, given[name]) for name in _names(function.__code__) if name in given)
            named = [
                (name, self.of(v))
                for name, v in known
                if not issubclass(type(v), (ModuleType, type))
            ]
        own = [
            (name, self.of(v)) for name, v in function.__dict__.items() if "torchdynamo" not in name
        ]
        parts = function.__defaults__, function.__kwdefaults__, function.__closure__
        return [function.__code__, *map(self.of, parts), *own, *named]

    def _object(self, value: Any) -> Iterable[Any]:
        kind = type(value)
        if not _OPAQUE.isdisjoint(base.__name__ for base in kind.__mro__) or isinstance(
            value, ModuleType
        ):
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
        return [self.of(list(part) if isinstance(part, Iterator) else part) for part in made[1:]]

    def _state(self, value: Any) -> list[Any]:
        """The attributes of an object, in its dictionary or in slots."""
        own = getattr(value, "__dict__", {})
        found = [(name, self.of(item)) for name, item in own.items()]
        names = [name for name in _slots(type(value)) if hasattr(value, name)]
        return found + [(name, self.of(getattr(value, name))) for name in names]

    def _add_class(self, kind: type) -> None:
        """Read a class and its bases.

        Of torch's modules all counts: libraries patch them to speed a model up.
        """
        for base in kind.__mro__:
            is_read = _is_followed(base.__module__) or issubclass(base, Module)
            if is_read and base not in _BASES and base not in self.classes:
                self.classes.append(base)

    def _class(self, kind: type) -> tuple[Any, ...]:
        """Methods and attributes of a class."""
        own = [
            (name, self.of_attribute(value))
            for name, value in vars(kind).items()
            if _counts(name, value)
        ]
        return kind, kind.__bases__, tuple(own)

    def _tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        parts = unwrapped(tensor)
        self.tensors += parts
        if self.is_portable:
            return tuple((_name(part.dtype), part.shape) for part in parts)
        return tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in parts)

    def _as_object(self, value: Any) -> Any:
        """Equal for this very object only, also after it is gone. Does not keep it alive."""
        if self.is_portable:
            return type(value).__qualname__
        try:
            return id(value), weakref.ref(value)
        except TypeError:
            return id(value)


def _itself(value: Any) -> Any:
    return value


def _float(value: float) -> Any:
    return "float", value.hex()  # -0.0 is another number than 0.0, and nan is the same as nan


def _with_type(value: Any) -> Any:
    return type(value), value  # True is not 1


class _TooLarge(Exception):
    """An attribute has more parts than are looked at."""


@cache
def _is_followed(module: str | None) -> bool:
    """Whether the code of this Python module may be a user's, or is a model's."""
    name = module or ""
    return name.startswith("transformers.models.") or name.partition(".")[0] not in _NOT_FOLLOWED


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The globals that a function names, with those of the functions inside it."""
    inside = (
        name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)
    )
    return tuple(dict.fromkeys((*code.co_names, *inside)))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises while its variable has no value
    except ValueError:
        return False
    return True


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute of a class is a method or a value, not its description."""
    if name.startswith("__") or name == "_abc_impl":
        return isinstance(value, FunctionType)
    if name.endswith(
        "_cached_value"
    ):  # transformers keeps there what it has found out about a class
        return False
    return not isinstance(value, (GetSetDescriptorType, MemberDescriptorType))


def _attention_functions(model: PreTrainedModel) -> list[Any]:
    """What computes attention and its masks, for the whole model and its parts."""
    parts = [
        model.config,
        *(getattr(model.config, name, None) for name in model.config.sub_configs),
    ]
    names = [str(compat.attention_name(config)) for config in parts if config is not None]
    interfaces: list[Any] = [AttentionInterface(), AttentionMaskInterface()]  # type: ignore[no-untyped-call]
    return [interface.get(name) for name in names for interface in interfaces]


def _settings_of_torch() -> tuple[Any, ...]:
    """Settings of the process or thread that decide how an operation computes."""
    autocast = [
        torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)
    ]
    return torch.get_float32_matmul_precision(), torch.get_default_dtype(), *autocast


def _rotary_values(modules: Sequence[Module]) -> tuple[float, ...]:
    """The rotary frequencies:

    a change in place keeps their address, and a step has tables made from them.
    """
    rotary = [module for module in modules if "RotaryEmbedding" in type(module).__name__]
    buffers = [buffer for module in rotary for buffer in compat.own_parts(module, "buffers")]
    values = [b.flatten() if b.numel() <= 4096 else b.double().sum()[None] for b in buffers]
    return tuple(torch.cat(values).tolist()) if values else ()


@torch.no_grad()
def _samples(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Some elements of each tensor, read from each device at once."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        sampled = sample(tensor)
        samples.setdefault((sampled.device, sampled.dtype), []).append(sampled)
    return tuple(
        tuple(torch.cat(parts).tolist()) for key, parts in samples.items() if key[0].type != "meta"
    )


def states_of_a_call(modules: Sequence[Module]) -> dict[int, str]:
    """Tensors that whole models keep as plain attributes, names by `id`:

    what a call leaves there (`rope_deltas`).
    """
    models = [module.__dict__ for module in modules if isinstance(module, PreTrainedModel)]
    return {
        id(own): name for names in models for name, own in names.items() if isinstance(own, Tensor)
    }


def draws_random_numbers(modules: Iterable[Module]) -> bool:
    """Whether a pass draws: a module has `random_rates`."""
    return any(map(random_rates, modules))


def random_rates(module: Module) -> dict[str, float]:
    """The dropouts and jitters of this module that are not 0, by their names; none outside of train
    mode.
    """
    if not module.training:
        return {}
    is_dropout = isinstance(module, torch.nn.Dropout)
    rates = (
        (k, v)
        for k, v in vars(module).items()
        if "drop" in k or "jitter" in k or (is_dropout and k == "p")
    )
    return {name: rate for name, rate in rates if isinstance(rate, float) and rate > 0}


# --- files


@dataclass(frozen=True)
class ModelIdentity:
    """What a file says of the model that computed it."""

    dtype: str
    attention: str  # the name of the attention implementation
    config: str  # JSON of the fields of the text config
    weights: str  # digest of names, shapes and samples
    settings: str = "{}"  # JSON of the attributes of modules, by their names

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelIdentity":
        if (ranks := getattr(model, "tp_size", None) or 1) > 1:
            raise ValueError(
                f"The model is split over tp_size={ranks} ranks, whose caches go to no file yet."
            )
        config = model.config.get_text_config(decoder=True)
        fields = {
            name: value for name, value in config.to_dict().items() if name not in _OTHER_FIELDS
        }
        text = json.dumps(fields, sort_keys=True, default=str)
        attention = str(compat.attention_name(config))
        return cls(_name(model.dtype), attention, text, weights_digest(model), _settings(model))

    def difference(self, other: "ModelIdentity") -> str | None:
        """What keeps this model from using states of the other one; None if nothing does.

        Fields and attributes that only one of them has are those of another version of
        transformers.
        """
        own, others = json.loads(self.config), json.loads(other.config)
        for name in own:
            if name in others and own[name] != others[name]:
                return f"{name} of its config is {others[name]}, and this model has {own[name]}"
        if self.dtype != other.dtype:
            return f"it is in {other.dtype}, and this model is in {self.dtype}"
        if self.weights != other.weights:
            return "its weights are others"
        if self.settings == other.settings:
            return None
        own, others = json.loads(self.settings), json.loads(other.settings)
        for name in (*own, *others):
            mine, theirs = (
                found.get(name, found.get(_of_all_layers(name))) for found in (own, others)
            )
            if mine is not None and theirs is not None and mine != theirs:
                return f"{name} is {_brief(theirs)}, and in this model {_brief(mine)}"
        return None


def _settings(model: PreTrainedModel) -> str:
    """The attributes of the modules but weights and configs, by name:

    what `_Values` sees, as JSON.
    """
    values = _Values(compat.all_modules(model), is_portable=True)
    found = {
        f"{path}.{name}".lstrip("."): json.dumps(
            values.of_attribute(value), sort_keys=True, default=_json_of
        )
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if not (name in _OF_TORCH or _is_of_a_process(module, name, value))
    }
    texts: dict[str, set[str]] = {}
    for name, text in found.items():
        texts.setdefault(_of_all_layers(name), set()).add(text)
    alike = {
        name: json.loads(text)
        for name, text in found.items()
        if len(texts[_of_all_layers(name)]) > 1
    }
    alike |= {name: json.loads(*own) for name, own in texts.items() if len(own) == 1}
    return json.dumps(alike, sort_keys=True, separators=(",", ":"))


def _of_all_layers(name: str) -> str:
    """The name under which settings are kept that all layers have alike."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _is_of_a_process(module: Module, name: str, value: Any) -> bool:
    """Whether an attribute tells where or how a model runs, not what it computes."""
    if isinstance(module, PreTrainedModel) and (name.startswith("_") or name in _OF_A_LOADED_MODEL):
        return True
    is_hooked = "_hf_hook" in module.__dict__ and name in ("_hf_hook", "_old_forward", "forward")
    is_of_training = name in ("training", "padding_idx")  # the second one stops a gradient
    return (
        is_hooked or is_of_training or isinstance(value, (PreTrainedConfig, torch.device, Tensor))
    )


def _json_of(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(json.dumps(item, sort_keys=True, default=_json_of) for item in value)
    if isinstance(value, CodeType):
        return value.co_name
    return value.hex() if isinstance(value, bytes) else getattr(value, "__qualname__", str(value))


def _brief(value: Any) -> str:
    """A value of `_Values` for an error."""
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@torch.no_grad()
def weights_digest(model: PreTrainedModel) -> str:
    """Of the names, shapes, dtypes and 16 elements of every weight and saved buffer."""
    named = [
        (name, part)
        for name, tensor in sorted(model.state_dict().items())
        for part in unwrapped(tensor)
    ]
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, tensor in named:
        if tensor.device.type != "meta":
            by_device.setdefault(tensor.device, []).append(
                sample(tensor).contiguous().view(torch.uint8)
            )
    # Read from each device at once.
    read = {
        device: BytesIO(torch.cat(parts).cpu().numpy().tobytes())
        for device, parts in by_device.items()
    }
    digest = blake2b(digest_size=16)
    for name, tensor in named:
        digest.update(f"{name} {_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        if tensor.device in read:
            digest.update(
                read[tensor.device].read(min(_SAMPLED, tensor.numel()) * tensor.dtype.itemsize)
            )
    digest.update(b"[]")  # which files of version 0.2 have for a model without adapters
    return digest.hexdigest()


def sample(tensor: Tensor) -> Tensor:
    """At most 16 elements of a tensor, evenly spread, without a copy of all of it."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)  # torch cannot list a float8
    size = min(_SAMPLED, tensor.numel())
    step = max(1, tensor.numel() // _SAMPLED)
    return (
        tensor.as_strided((size,), (step,))
        if tensor.is_contiguous()
        else tensor.flatten()[::step][:size]
    )


def unwrapped(tensor: Tensor) -> list[Tensor]:
    """The tensor, or those inside a wrapper such as a quantised weight."""
    if type(tensor) in (Tensor, Parameter):
        return [tensor]
    inner = compat.inner_tensors(tensor)
    return [tensor] if inner is None else [part for wrapped in inner for part in unwrapped(wrapped)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
