"""What is changed on a model for a while, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


def attention_of(model: PreTrainedModel) -> str | dict[str, str | None]:
    """The attention implementation, or those of a model's parts by name, None for a part that has none."""
    config = model.config
    parts = {key: getattr(config, key) for key in config.sub_configs}
    own = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **own} if own else config._attn_implementation


@contextmanager
def attention_for_a_while(model: PreTrainedModel, name: str | dict[str, str | None]) -> Iterator[None]:
    """The model with this attention implementation, and afterwards with its own again."""
    before = attention_of(model)
    try:
        _set_attention(model, name)
        yield
    finally:
        _set_attention(model, before)


def _set_attention(model: PreTrainedModel, name: str | dict[str, str | None]) -> None:
    if isinstance(name, str):
        model.set_attn_implementation(name)
        return
    model.set_attn_implementation({part: own for part, own in name.items() if own is not None})
    for part in (part for part, own in name.items() if own is None):  # one that has no attention, and may not be set
        getattr(model.config, part)._attn_implementation = None
