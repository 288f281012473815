"""Layers with a recurrent state (Mamba, convolutions, linear attention): transformers' own layer objects.

A state is what the layer keeps of all tokens so far. It has one size, and it cannot go back to an earlier token.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from hf_static_kv.cache.layer import StaticContiguousLayer

States = list[tuple[Any, dict[str, dict[int, Any]]]]  # layers, and what each had
_TENSORS = ("conv_states", "recurrent_states")
_FIELDS = (*_TENSORS, "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


class StatefulLayer(LinearAttentionLayer, StaticContiguousLayer):  # type: ignore[misc,override]  # as transformers' own
    """Keys and values, and beside them the recurrent state of the same layer (Falcon-H1, Zamba)."""

    is_compileable = False  # as keys and values are: else `generate` compiles the model, and prepares masks itself

    def __init__(
        self, max_cache_len: int, sliding_window: int | None = None, is_compact: bool = False, number_of_states: int = 1
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)  # type: ignore[no-untyped-call]
        StaticContiguousLayer.__init__(self, max_cache_len, sliding_window, is_compact)

    __repr__ = StaticContiguousLayer.__repr__
    get_max_length = StaticContiguousLayer.get_max_length

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values, which come by position, or of a state, which comes by name."""
        (StaticContiguousLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Of keys and values alone: `StaticContiguousCache.crop` sees to the states."""
        StaticContiguousLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        StaticContiguousLayer.reset(self)


def state_tensors(layer: Any) -> list[Tensor]:
    """The tensors of a layer's states; none before its first pass, or where it has no state."""
    states = (tensor for name in _TENSORS for tensor in getattr(layer, name, {}).values())
    return [tensor for tensor in states if tensor is not None]


def forget_other_shapes(layer: Any, state_idx: int, conv_states: Tensor) -> None:
    """An empty layer takes any batch size and dtype: give up the tensors of others. A convolution is updated first."""
    own = layer.conv_states[state_idx]
    if own is None or layer.has_previous_state[state_idx]:
        return
    kinds = [(tensor.shape[:-1], tensor.dtype, tensor.device) for tensor in (own, conv_states)]
    if kinds[0] != kinds[1]:
        for name in _TENSORS:
            getattr(layer, name)[state_idx] = None
            getattr(layer, f"is_{name}_initialized")[state_idx] = False


def select_states(layer: Any, indices: Tensor) -> None:
    """Batch row i of the states becomes what row `indices[i]` is now."""
    with torch.inference_mode(False):
        LinearAttentionLayer.reorder_cache(layer, indices)  # type: ignore[arg-type]  # a LongTensor, which none is


def copies_of(layers: list[Any]) -> States:
    """Copies of all states."""
    return [(layer, {name: _copies(getattr(layer, name)) for name in _FIELDS}) for layer in layers]


def put_back(states: States) -> None:
    """The states as they were. A tensor that still exists keeps its address: a captured step writes there."""
    for layer, fields in states:
        for name, before in fields.items():
            now = getattr(layer, name)
            for i, value in before.items():
                if isinstance(value, Tensor) and now[i] is not None and now[i].shape == value.shape:
                    now[i].copy_(value)
                else:
                    now[i] = value


def _copies(values: dict[int, Any]) -> dict[int, Any]:
    return {i: value.clone() if isinstance(value, Tensor) else value for i, value in values.items()}
