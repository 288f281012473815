"""What is changed on a model inside a context and put back on exit; and the model inside a wrapper.

with replaced("forward", {module: forward}): ...                    an attribute of some modules
with replaced_function("apply_rotary_pos_emb", {file: own}): ...    a function of some Python files
with attention_implementation(model, "static_contiguous"): ...      the attention of a model
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from hf_static_kv import compat

_ABSENT = object()
_ORIGINALS: dict[tuple[str, str], tuple[Any, int]] = {}  # (file, name): the function, and how many contexts replace it


@contextmanager
def replaced(attribute: str, values: Mapping[Module, Any]) -> Iterator[None]:
    """Modules with another value of an attribute. A value that was assigned by someone else meanwhile stays."""
    before = {module: module.__dict__.get(attribute, _ABSENT) for module in values}
    try:
        for module, value in values.items():
            setattr(module, attribute, value)
        yield
    finally:
        for module, value in values.items():
            if module.__dict__.get(attribute) is not value:
                continue
            if before[module] is _ABSENT:
                delattr(module, attribute)
            else:
                setattr(module, attribute, before[module])


@contextmanager
def replaced_function(name: str, files: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """The function `name` of these Python files replaced by `files[file](original, ...)`.

    Contexts of several models of one file may overlap: the last one to leave restores the original.
    """
    for file, function in files.items():
        original, users = _ORIGINALS.get((file, name), (getattr(sys.modules[file], name), 0))
        _ORIGINALS[file, name] = original, users + 1
        setattr(sys.modules[file], name, partial(function, original))
    try:
        yield
    finally:
        for file in files:
            original, users = _ORIGINALS.pop((file, name))
            if users > 1:
                _ORIGINALS[file, name] = original, users - 1
            else:
                setattr(sys.modules[file], name, original)


def original_function(file: str, name: str) -> Any:
    """The function of a Python file, also while it is replaced."""
    return _ORIGINALS.get((file, name), (getattr(sys.modules[file], name, None), 0))[0]


class Computes:
    """Base of replacements whose `forward` computes what the class of its module says, and may be replaced again."""


def is_unmodified(module: Module) -> bool:
    """Whether a module computes what its class says: no hook, no `forward` of its own (accelerate puts one there)."""
    forward = module.__dict__.get("forward")
    is_own = forward is None or isinstance(getattr(forward, "__self__", None), Computes)
    return is_own and not compat.forward_hooks(module)


def attention_of(model: PreTrainedModel) -> dict[str, str | None]:
    """The attention implementation of the model ("") and of its parts by name; None for a part that has none."""
    config = model.config
    parts = {key: getattr(config, key) for key in config.sub_configs}
    names = {key: compat.attention_name(part) for key, part in parts.items() if part is not None}
    return {"": compat.attention_name(config), **names}


@contextmanager
def attention_implementation(model: PreTrainedModel, names: str | Mapping[str, str | None]) -> Iterator[None]:
    """The model with this attention implementation, or with one for each part as `attention_of` gives them."""
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


def require_attention_interface(model: PreTrainedModel, remedy: str) -> None:
    """Raise for a model that computes attention by itself."""
    if not compat.can_set_attention(model):
        raise ValueError(f"{type(model).__name__} does not use transformers' attention interface. {remedy}")


def unwrapped(model: Any, used_by: str) -> PreTrainedModel:
    """The transformers model inside `torch.compile` or a PEFT adapter; any other wrapper is refused by its type."""
    while (inner := _inside(model, used_by)) is not None:
        model = inner
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{used_by} takes a transformers model, got {type(model).__name__}: pass the model it wraps.")
    return model


def _inside(wrapper: Any, used_by: str) -> Any:
    if (inner := compat.inside_compiled(wrapper)) is not None:
        return inner
    peft: Any = sys.modules.get("peft")  # not imported: the wrapper is not of its types
    if peft is None or not isinstance(wrapper, peft.PeftModel):
        return None
    config = wrapper.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or kind == "XLORA":
        raise ValueError(
            f"{used_by} changes the model alone, and PEFT's {kind} computes outside of the model that it wraps. "
            "Adapters inside the model, such as LoRA, are served."
        )
    return wrapper.get_base_model()
