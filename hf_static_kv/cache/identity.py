"""Who a model is in this process: everything that a pass reads beside its inputs, by value.

    pass_state(model)      for captured passes: Python state by value, tensors by address
    content_state(model)   for prefix reuse: the same, and what tensors hold (write count, sample)

`values.py` reads Python state: attributes of the modules, configs, classes, the
attention function behind its name. `fileidentity.py` has the identity in files.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_, itemgetter
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

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
from hf_static_kv.cache.samples import Samples
from hf_static_kv.cache.values import Known, Values

OF_TORCH = frozenset(vars(Module())) - {"training"}
_MAX_KNOWN = 8  # sets of classes whose values are kept
# Attributes of a model that no pass reads: of calls, and of its loading.
_OF_A_CALL = {
    "generation_config", "warnings_issued", "all_tied_weights_keys",
    "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_no_split_modules",
    "_skip_keys_device_placement", "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save",
}  # fmt: skip
_SKIPPED = OF_TORCH | _OF_A_CALL
_FIXED = frozenset({NoneType, bool, int, float, str, torch.dtype, torch.device})
_OWN_MEMORY = frozenset({Tensor, Parameter, NoneType})  # no wrappers
_shape_and_type = attrgetter("shape", "dtype")  # an address tells the device
_Attribute = tuple[type, str, Any]  # class of the owner, name, value

_ATTRIBUTES: "WeakKeyDictionary[PreTrainedModel, _Attributes]" = WeakKeyDictionary()
_PARTS: WeakKeyDictionary[PreTrainedModel, tuple[Any, ...]] = WeakKeyDictionary()
_SAMPLES: WeakKeyDictionary[PreTrainedModel, Samples] = WeakKeyDictionary()
# Values of classes that were read before, by these classes; the newest last.
_CLASSES: OrderedDict[tuple[type, ...], Known] = OrderedDict()


class State:
    """Equal if nothing that was read of a model has changed. Keeps no model alive."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, State) and self.parts == other.parts)

    def __hash__(self) -> int:
        # Few states are kept, and a hash takes longer than a comparison.
        return len(self.parts[1])

    @property
    def of_pass(self) -> "State":
        """The `pass_state` in a `content_state`."""
        return State(*self.parts[:-1])


def pass_state(model: PreTrainedModel, modules: list[Module] | None = None) -> State:
    """Differs if a recorded pass may differ. It reads tensors by address.

    `modules` are all of the model, if they are there already.
    """
    values = Values(modules or compat.all_modules(model))
    return State(*_of_model(values, model))


def content_state(model: PreTrainedModel, modules: list[Module] | None = None) -> State:
    """Differs if a pass over the same tokens may give other keys and values.

    A write through `.data` beside the sample is not seen. Arguments as of `pass_state`.
    """
    values = Values(modules or compat.all_modules(model))
    parts = _of_model(values, model)
    of_calls = [values.of_tensor(tensor) for _, tensor in _of_calls(values.modules)]
    writes = list(map(compat.write_count, values.tensors))
    samples = _SAMPLES.setdefault(model, Samples())
    places = parts, of_calls  # all tensors are told there
    return State(*parts, (of_calls, writes, samples.read(values.tensors, places)))


def first_difference(before: State, after: State) -> str:
    for one, other in zip(before.parts[1], after.parts[1], strict=False):
        if one != other:
            return f"{one[1]} of {one[0].__name__}"
    return "a function, a class or a tensor"


def _of_model(values: Values, model: PreTrainedModel) -> tuple[Any, ...]:
    attributes = _attributes(values, model)
    tensors = _weights(values)
    classes = _classes(values)
    # Settings of the process or thread that change results.
    autocast = map(torch.get_autocast_dtype, filter(torch.is_autocast_enabled, ("cpu", "cuda")))
    settings = torch.get_float32_matmul_precision(), torch.get_default_dtype(), *autocast
    parts = attributes, tensors, classes, settings, _rotary(values.modules)
    # The same objects as long as they are equal: states are compared several times in a call.
    known = _PARTS.get(model, parts)
    _PARTS[model] = parts = tuple(a if a == b else b for a, b in zip(known, parts, strict=True))
    return weakref.ref(model), *parts


class _Attributes:
    """The attributes that a pass reads, with the values of those that cannot change in place."""

    def __init__(self, modules: list[Module]) -> None:
        own = [module.__dict__ for module in modules]
        read = [[name for name in part if name not in _SKIPPED] for part in own]
        self._kinds = list(map(type, modules))
        self._all_names = list(chain.from_iterable(own))
        self._getters = list(map(_getter, read))
        owners = chain.from_iterable(map(repeat, self._kinds, map(len, read)))
        self.names = list(zip(owners, chain.from_iterable(read), strict=True))
        values = self._values_in(own)
        self._is_fixed = [type(value) in _FIXED for value in values]
        # Held: no other object gets the id of one that changes between two calls.
        self._held = list(compress(values, self._is_fixed))
        self.changing = [place for place, is_fixed in enumerate(self._is_fixed) if not is_fixed]
        reader = Values([])
        named = zip(self.names, values, self._is_fixed, strict=True)
        self.attributes = [
            (owner, name, reader.of_attribute(value) if is_fixed else None)
            for (owner, name), value, is_fixed in named
        ]
        for kind in dict.fromkeys(self._kinds):
            reader.add_class(kind)
        self.classes = reader.classes
        self._configs: dict[int, _Config] = {}

    def values(self, modules: list[Module]) -> list[Any] | None:
        """The values as they are; None if modules have other attributes, or one has changed."""
        own = [module.__dict__ for module in modules]
        if self._kinds != list(map(type, modules)):
            return None
        if self._all_names != list(chain.from_iterable(own)):
            return None
        values = self._values_in(own)
        is_same = all(map(is_, compress(values, self._is_fixed), self._held))
        return values if is_same else None

    def of_config(self, values: Values, config: Any) -> Any:
        """The value of a config; None if this is none, or one that must be read in every call."""
        if not issubclass(type(config), PreTrainedConfig):
            return None
        known = self._configs.get(id(config))
        if known is None or not known.is_of(config):
            known = self._configs[id(config)] = _Config(config)
        for kind in known.classes:
            values.add_class(kind)
        return known.value

    def _values_in(self, own: list[dict[str, Any]]) -> list[Any]:
        pairs = zip(self._getters, own, strict=True)
        return list(chain.from_iterable([get(part) for get, part in pairs]))


class _Config:
    """A config as it was read, which is recognised by its parts and not held: it may get a model."""

    def __init__(self, config: PreTrainedConfig) -> None:
        reader = Values([])
        value = reader.of_attribute(config)
        own = vars(config)
        is_kept = not reader.num_not_held
        self.value = value if is_kept else None
        self.classes = reader.classes if is_kept else []
        self._config = weakref.ref(config)
        self._names = list(own)
        self._held = list(own.values()) if is_kept else []
        self._inside = Known(None, [part for part in reader.seen if part is not config and is_kept])

    def is_of(self, config: PreTrainedConfig) -> bool:
        own = vars(config)
        return (
            self.value is not None
            and self._config() is config
            and self._names == list(own)
            and all(map(is_, own.values(), self._held))
            and self._inside.is_unchanged()
        )


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda own: tuple(own[name] for name in names)


def _attributes(values: Values, model: PreTrainedModel) -> list[_Attribute]:
    """Class, name and value of all that a pass reads of modules."""
    modules = values.modules.copy()
    known = _ATTRIBUTES.get(model)
    found = None if known is None else known.values(modules)
    if known is None or found is None:
        known = _ATTRIBUTES[model] = _Attributes(modules)
        found = known.values(modules) or []
    values.classes += known.classes
    attributes = known.attributes.copy()
    read: dict[int, Any] = {}  # by the id of a value: many modules have the config
    for place in known.changing:
        named = known.names[place]
        value = found[place]
        if isinstance(value, Tensor) or id(value) not in read:
            read[id(value)] = known.of_config(values, value) or _attribute(values, *named, value)[2]
        attributes[place] = *named, read[id(value)]
    # A pass reads these, and no module need have them.
    named = type(model), "config or attention"
    for other in (model.config, model.config.get_text_config(), *_attention_functions(model)):
        value = read.get(id(other)) or known.of_config(values, other)
        attributes.append((*named, value or _attribute(values, *named, other)[2]))
    # Grows meanwhile, by modules that attributes hold.
    for module in islice(values.modules, len(modules), None):
        values.add_class(type(module))
        own = [item for item in vars(module).items() if item[0] not in OF_TORCH]
        attributes += [_attribute(values, type(module), *item) for item in own]
    return attributes


def _attribute(values: Values, kind: type, name: str, value: Any) -> _Attribute:
    is_of_call = isinstance(value, Tensor) and issubclass(kind, PreTrainedModel)
    return kind, name, values.of_attribute("a tensor of a call" if is_of_call else value)


def _weights(values: Values) -> tuple[Any, ...]:
    """Names and places of all parameters and buffers, in columns: they are many."""
    names, tensors = compat.named_tensors(values.modules)
    kinds = list(map(type, tensors))
    plain: Any = [tensor for tensor in tensors if tensor is not None]
    wrapped: list[Tensor] = []
    if not _OWN_MEMORY.issuperset(kinds):
        wrapped = [tensor for tensor in plain if type(tensor) not in _OWN_MEMORY]
        plain = [tensor for tensor in plain if type(tensor) in _OWN_MEMORY]
    values.tensors += plain
    return (
        names,
        kinds,
        list(map(Tensor.data_ptr, plain)),
        list(map(_shape_and_type, plain)),
        list(map(Tensor.stride, plain)),
        list(map(values.of_tensor, wrapped)),
    )


def _classes(values: Values) -> Any:
    """The classes with their functions: thousands of parts, which seldom change."""
    key = tuple(values.classes)
    known = _CLASSES.pop(key, None)
    if known is None or not known.is_unchanged():
        reader = Values([])
        reader.classes = values.classes
        known = Known(tuple(map(reader.of_class, values.classes)), reader.seen)
        values.tensors += reader.tensors
        if reader.tensors or reader.modules:  # they may be a model's, and live no longer
            return known.value
        if len(_CLASSES) >= _MAX_KNOWN:
            _CLASSES.popitem(last=False)
    _CLASSES[key] = known
    return known.value


def _attention_functions(model: PreTrainedModel) -> list[Any]:
    config = model.config
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    names = [str(compat.attention_name(part)) for part in parts if part is not None]
    interfaces: list[Any] = [AttentionInterface(), AttentionMaskInterface()]  # type: ignore[no-untyped-call]
    return [interface.get(name) for name in names for interface in interfaces]


def _rotary(modules: Sequence[Module]) -> list[float]:
    """The rotary frequencies, of which a step has tables."""
    rotary = [module for module in modules if "RotaryEmbedding" in type(module).__name__]
    buffers = [buffer for module in rotary for buffer in compat.own_parts(module, "buffers")]
    values = [b.flatten() if b.numel() <= 4096 else b.double().sum()[None] for b in buffers]
    return torch.cat(values).tolist() if values else []


def states_of_a_call(modules: Sequence[Module]) -> dict[int, str]:
    """Tensors that calls leave on whole models (`rope_deltas`): names by `id`."""
    return {id(tensor): name for name, tensor in _of_calls(modules)}


def _of_calls(modules: Iterable[Module]) -> list[tuple[str, Tensor]]:
    models = [module for module in modules if isinstance(module, PreTrainedModel)]
    named = [item for model in models for item in vars(model).items()]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]


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
