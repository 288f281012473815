"""Temporary changes of a model or around its passes, the names they go by, and unwrapping."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, reduce
from threading import Lock, RLock
from typing import Any

import torch
from torch.nn import Module
from transformers import PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.cache.request import EXACT_ATTENTION_NAME as EXACT_ATTENTION_NAME

ATTENTION_NAME = "static_contiguous"
TRACED_ATTENTION_NAME = "static_contiguous_traced"
OWN_NAMES = (ATTENTION_NAME, EXACT_ATTENTION_NAME, TRACED_ATTENTION_NAME)
_LOCK = Lock()  # of the two below
# Changes that are in effect, the oldest first, by the `id` of a module and the attribute.
_CHANGES: dict[tuple[int, str], list["_Change"]] = {}
# Of a Python module and a name: the function, and what replaces it.
_ORIGINALS: dict[tuple[str, str], tuple[Any, list[Any]]] = {}
_ABSENT = object()
_CUDNN_LOCK = Lock()
_cudnn_users = 0
_cudnn_before = True
# Whether passes of a model verify a captured step. They belong to no sequence: a trace does not
# record them.
IS_VERIFICATION: ContextVar[bool] = ContextVar("is_verification", default=False)


class _Change:
    """A value of an attribute, and the value that it has taken the place of."""

    def __init__(self, value: Any, before: Any) -> None:
        self.value = value
        self.before = before


@contextmanager
def replaced(attribute: str, values: Mapping[Module, Any]) -> Iterator[None]:
    """Modules with another value of an attribute. What someone else assigns meanwhile stays.

    Contexts may overlap, as in two threads, and end in any order.
    """
    made: dict[Module, _Change] = {}
    try:
        with _LOCK:
            for module, value in values.items():
                made[module] = _Change(value, module.__dict__.get(attribute, _ABSENT))
                _CHANGES.setdefault((id(module), attribute), []).append(made[module])
                setattr(module, attribute, value)
        yield
    finally:
        with _LOCK:
            for module, change in made.items():
                _undo(module, attribute, change)


def _undo(module: Module, attribute: str, change: _Change) -> None:
    changes = _CHANGES.get((id(module), attribute), [])
    if change not in changes:  # an interrupt came before it was made
        return
    place = changes.index(change)
    later = changes[place + 1 :]
    del changes[place]
    if not changes:
        del _CHANGES[id(module), attribute]
    if later and later[0].before is change.value:
        later[0].before = change.before
    elif later or module.__dict__.get(attribute, _ABSENT) is not change.value:
        return
    elif change.before is _ABSENT:
        delattr(module, attribute)
    else:
        setattr(module, attribute, change.before)


@contextmanager
def replaced_function(name: str, modules: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """The function `name` of these Python modules replaced by `modules[module](original, ...)`.

    If contexts overlap, the `original` of one is what the others make of the function.
    """
    _change_functions(name, modules, list.append)
    try:
        yield
    finally:
        _change_functions(name, modules, list.remove)


def _change_functions(
    name: str, modules: Mapping[str, Any], change: Callable[[list[Any], Any], None]
) -> None:
    with _LOCK:
        for module, function in modules.items():
            home = sys.modules[module]
            original, functions = _ORIGINALS.setdefault((module, name), (getattr(home, name), []))
            change(functions, function)
            setattr(
                home, name, reduce(lambda inner, outer: partial(outer, inner), functions, original)
            )
            if not functions:
                del _ORIGINALS[module, name]


def original_function(module: str, name: str) -> Any:
    """The function of a Python module, also while it is replaced."""
    with _LOCK:
        known = _ORIGINALS.get((module, name))
        return getattr(sys.modules[module], name, None) if known is None else known[0]


class SharedContext:
    """A context of a model that several threads may be in: the first enters, the last leaves."""

    def __init__(self, make: Callable[[Any], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = RLock()
        self._num_users = 0
        self._entered = ExitStack()

    @property
    def is_entered(self) -> bool:
        return self._num_users > 0

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        with self._lock:
            if self._num_users == 0:
                self._entered.enter_context(self._make(model))
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    self._entered.close()


def is_unmodified(module: Module) -> bool:
    """Whether a module computes what its class says: no hook, no own `forward` (accelerate)."""
    return "forward" not in module.__dict__ and not compat.forward_hooks(module)


def pass_context(model: Module) -> AbstractContextManager[object]:
    """What the operations of a pass run in: `exact` sets it on the `forward` that it replaces."""
    context: Any = getattr(model.__dict__.get("forward"), "pass_context", nullcontext)
    return context()  # type: ignore[no-any-return]


def attention_of(model: PreTrainedModel) -> dict[str, str | None]:
    """The attention implementation of the model ("") and of its parts by name; None if none."""
    config = model.config
    configs = {"": config, **{key: getattr(config, key) for key in config.sub_configs}}
    return {key: compat.attention_name(one) for key, one in configs.items() if one is not None}


@contextmanager
def attention_implementation(
    model: PreTrainedModel, names: str | Mapping[str, str | None]
) -> Iterator[None]:
    """The model with this attention implementation, or one for each part as in `attention_of`."""
    before = attention_of(model)
    try:
        _set_attention(model, names)
        yield
    finally:
        _set_attention(model, before)


def _set_attention(model: Any, names: str | Mapping[str, str | None]) -> None:
    if isinstance(names, str) or len(names) == 1:
        model.set_attn_implementation(names if isinstance(names, str) else names[""])
        return
    named = {part: name for part, name in names.items() if name is not None}
    model.set_attn_implementation(named)
    for part in names.keys() - named.keys():  # has no attention, and may have been given one
        compat.clear_attention_name(getattr(model.config, part))


@contextmanager
def experts_implementation(model: Any, name: str) -> Iterator[None]:
    """The model with this implementation of its experts, if it can be chosen."""
    before = model.get_experts_implementation()
    try:
        model.set_experts_implementation(name)
        yield
    finally:
        model.set_experts_implementation(before)


def require_attention_interface(model: PreTrainedModel, remedy: str) -> None:
    """Raise for a model that computes attention by itself."""
    if not compat.can_set_attention(model):
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface. {remedy}"
        )


def unwrapped(model: Any, used_by: str) -> PreTrainedModel:
    """The transformers model inside `torch.compile` or a PEFT adapter; refuses other wrappers."""
    if (inner := compat.inside_compiled(model)) is not None:
        return unwrapped(inner, used_by)
    if isinstance(model, PreTrainedModel):
        return model
    peft: Any = sys.modules.get("peft")  # not imported: the wrapper is not of its types
    if peft is None or not isinstance(model, peft.PeftModel):
        load = "load the model first, with AutoModelForCausalLM.from_pretrained(...)"
        remedy = load if isinstance(model, str) else "pass the model it wraps"
        raise TypeError(
            f"{used_by} takes a transformers model, got {type(model).__name__}: {remedy}."
        )
    config = model.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or kind == "XLORA":
        raise ValueError(
            f"{used_by} changes the model alone, and PEFT's {kind} computes outside of the model "
            "that it wraps. Adapters inside the model, such as LoRA, are served."
        )
    return unwrapped(model.get_base_model(), used_by)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """SDPA without cuDNN's implementation.

    The switch is process-wide: overlapping threads share one change of it.
    """
    global _cudnn_users, _cudnn_before
    cuda: Any = torch.backends.cuda
    if not (
        cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.math_sdp_enabled()
    ):
        yield  # the user allows cuDNN only
        return
    with _CUDNN_LOCK:
        if _cudnn_users == 0:
            _cudnn_before = cuda.cudnn_sdp_enabled()
            cuda.enable_cudnn_sdp(False)
        _cudnn_users += 1
    try:
        yield
    finally:
        with _CUDNN_LOCK:
            _cudnn_users -= 1
            if _cudnn_users == 0:
                cuda.enable_cudnn_sdp(_cudnn_before)
