"""Layers with a recurrent state (Mamba, convolutions, linear attention), in transformers' objects.

A state is what a layer keeps of all tokens so far. It cannot go back.
"""

import inspect
import logging
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_static_kv import compat
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import compute_device

logger = logging.getLogger(__name__)
States = list[tuple[Any, dict[str, dict[Any, Any]]]]  # layers, and what each had
_CONTINUATIONS: WeakKeyDictionary[PreTrainedModel, "Continuation | None"] = WeakKeyDictionary()
_WARNED: WeakSet[PreTrainedModel] = WeakSet()
_TENSORS = ("conv_states", "recurrent_states")


class StatefulLayer(LinearAttentionLayer, StaticContiguousLayer):  # type: ignore[misc,override]  # as transformers' own
    """Keys and values, and the recurrent state of the same layer (Falcon-H1, Zamba)."""

    # As in `StaticContiguousLayer`: else `generate` compiles the model and prepares masks itself.
    is_compileable = False

    def __init__(
        self,
        max_cache_len: int,
        sliding_window: int | None = None,
        is_compact: bool = False,
        number_of_states: int = 1,
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)  # type: ignore[no-untyped-call]
        StaticContiguousLayer.__init__(self, max_cache_len, sliding_window, is_compact)

    __repr__ = StaticContiguousLayer.__repr__
    get_max_length = StaticContiguousLayer.get_max_length

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come by position, a state comes by name."""
        kind = StaticContiguousLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    # Of keys and values alone: `crop_states` sees to the states.
    crop = StaticContiguousLayer.crop

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        StaticContiguousLayer.reset(self)


class Continuation(NamedTuple):
    """Whether tokens after a kept state are computed as in one pass over the whole sequence."""

    by_token: bool  # one token in a pass
    by_chunk: bool  # several; Jamba and Zamba read the state for one token only


def continuation_of(model: PreTrainedModel) -> Continuation | None:
    """What a trial on a few tokens tells, once for a model."""
    config = model.config.get_text_config(decoder=True)
    is_traced = str(compat.attention_name(config)).endswith("_traced")
    if model.training or is_traced or compat.has_hooks(compat.all_modules(model)):
        return None  # it draws random numbers, or someone watches its passes
    if model not in _CONTINUATIONS:
        _CONTINUATIONS[model] = None
        with suppress(Exception):  # such as of a model that needs more than ids
            _CONTINUATIONS[model] = _trial(model)
    return _CONTINUATIONS[model]


@torch.no_grad()
def _trial(model: PreTrainedModel) -> Continuation:
    """Two attempts: in a mixture of experts rounding alone may choose another expert."""
    device = compute_device(model)
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(14, device=device) * 5 + 3).remainder(size).view(2, 1, 7)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        first = _attempt(model, ids[0])
        second = first if all(first) else _attempt(model, ids[1])
    return Continuation(first.by_token or second.by_token, first.by_chunk or second.by_chunk)


def _attempt(model: PreTrainedModel, ids: Tensor) -> Continuation:
    """Compute seven tokens in one pass without a cache, and on a state by token and by chunk.

    Right by token: within half of the digits. Right by chunk: at most twice as
    far from the one pass as by token, and two units of rounding. 15 toy
    families are up to 1.5 times as far; Jamba and Zamba 4 to 200,000 times.
    """
    whole = _last_logits(model, ids, [7], None)
    seen = whole > -1e4  # a lower logit marks a token that is never selected
    size = whole[seen].norm()
    eps = torch.finfo(model.dtype).eps

    def distance(parts: list[int]) -> Any:
        logits = _last_logits(model, ids, parts, DynamicCache(config=model.config))
        return (logits - whole)[seen].norm()

    by_token = distance([3, 1, 1, 1, 1])
    by_chunk = distance([3, 1, 3])
    is_right = bool(by_token <= eps**0.5 * size)
    return Continuation(is_right, bool(by_chunk <= 2 * by_token + 2 * eps * size))


def _last_logits(model: Any, ids: Tensor, parts: list[int], cache: DynamicCache | None) -> Tensor:
    """The logits [V] after the last token, in passes of these sizes."""
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"past_key_values": cache, "use_cache": cache is not None}
    end = 0
    for size in parts:
        start = end
        end += size
        inputs["attention_mask"] = torch.ones_like(ids[:, :end])
        if takes_positions:
            inputs["position_ids"] = torch.arange(start, end, device=ids.device)[None]
        outputs = model(input_ids=ids[:, start:end], **inputs)
    return outputs.logits[0, -1].float()  # type: ignore[no-any-return]


def warn_of_continuation(model: PreTrainedModel, num_tokens: int) -> None:
    continuation = continuation_of(model)
    if continuation is None or continuation.by_chunk or model in _WARNED:
        return
    _WARNED.add(model)
    logger.warning(
        f"{type(model).__name__} computes {num_tokens} tokens after a kept recurrent state "
        "otherwise than in one pass, with any cache. Call reset() and pass the whole sequence, or "
        "feed the new tokens one by one."
    )


def state_tensors(layer: Any) -> list[Tensor]:
    own = vars(layer)
    stores = [own[name] for name in _TENSORS if name in own]
    return [tensor for store in stores for tensor in store.values() if tensor is not None]


def forget_other_shapes(layer: Any, state_idx: int, conv_states: Tensor) -> None:
    """Drop the tensors of an empty layer if the new states are of another kind."""
    own = layer.conv_states[state_idx]
    if own is None or layer.has_previous_state[state_idx]:
        return
    kinds = [(tensor.shape[:-1], tensor.dtype, tensor.device) for tensor in (own, conv_states)]
    if kinds[0] != kinds[1]:
        for name in _TENSORS:
            getattr(layer, name)[state_idx] = None
            getattr(layer, f"is_{name}_initialized")[state_idx] = False


def select_states(layer: Any, indices: Tensor) -> None:
    with torch.inference_mode(False):
        LinearAttentionLayer.reorder_cache(layer, indices)  # type: ignore[arg-type]  # a LongTensor, which none is


def crop_states(layers: list[Any], tokens_to_remove: int, num_layers: int) -> None:
    """Crop convolutions that keep their past (assisted decoding); refuse other states."""
    moved = [layer for layer in layers if any(layer.has_previous_state.values())]
    if tokens_to_remove < 0 and not all(own.record_past and own.is_croppable for own in moved):
        raise ValueError(
            f"crop({tokens_to_remove}): {len(moved)} of {num_layers} layers keep a recurrent "
            "state, which cannot go back. Call reset() and compute the shorter sequence."
        )
    for layer in moved:
        if layer.record_past:
            LinearAttentionLayer.crop(layer, tokens_to_remove)


def copies_of(layers: list[Any]) -> States:
    return [(layer, _copies(layer)) for layer in layers]


def separate(layer: Any) -> None:
    """Give a shallow copy of a layer states of its own."""
    vars(layer).update(_copies(layer))


def put_back(states: States) -> None:
    """Make the states what they were. A tensor keeps its address: a captured step writes there."""
    for layer, fields in states:
        for name, before in fields.items():
            now = getattr(layer, name)
            for i, value in before.items():
                if isinstance(value, Tensor) and now[i] is not None and now[i].shape == value.shape:
                    now[i].copy_(value)
                else:
                    now[i] = value


def _copies(layer: Any) -> dict[str, dict[Any, Any]]:
    """All that a layer keeps by the index of a state."""
    return {
        name: {i: own.clone() if isinstance(own, Tensor) else own for i, own in values.items()}
        for name, values in vars(layer).items()
        if isinstance(values, dict)
    }
