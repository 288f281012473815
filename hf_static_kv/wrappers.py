"""The transformers model that a wrapper runs: what `exact` and `trace_attention` change is the model itself."""

from __future__ import annotations

import sys
from typing import Any

from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel


def unwrapped(model: Any, used_by: str) -> PreTrainedModel:
    """The model inside `torch.compile` or an adapter of PEFT; any other wrapper is refused by its type."""
    while (inner := _inside(model, used_by)) is not None:
        model = inner
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{used_by} takes a transformers model, got {type(model).__name__}: pass the model that it holds, and call "
            "that one."
        )
    return model


def _inside(wrapper: Any, used_by: str) -> Any:
    """What this wrapper runs; None where it is no wrapper that we know."""
    if isinstance(wrapper, OptimizedModule):
        return wrapper._orig_mod
    peft: Any = sys.modules.get("peft")  # where nobody has imported it, nothing is of its types
    if peft is None or not isinstance(wrapper, peft.PeftModel):
        return None
    config = wrapper.active_peft_config
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning or kind == "XLORA":
        raise ValueError(
            f"{used_by} sees the model alone, and PEFT's {kind} computes outside of the model that it wraps. Adapters "
            "inside the model, as LoRA has them, are served."
        )
    return wrapper.get_base_model()


def refuse_without_interface(model: PreTrainedModel, remedy: str) -> None:
    """Raise for a model that computes attention by itself, where no other attention can be given to it."""
    if not model._can_set_attn_implementation():
        raise ValueError(f"{type(model).__name__} does not use transformers' attention interface. {remedy}")
