"""A cache of two parts: keys and values by position, and the recurrent states of hybrid models.

A step has ended when every layer has taken part. A state is changed in place and cannot go back, so
a pass that failed on the way leaves states of two moments: the cache then refuses everything but
`reset`.
"""

import copy
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from hf_static_kv import compat
from hf_static_kv.cache.allocation import AllocatedCache
from hf_static_kv.cache.indexed import stored_layers
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import LayerPlan, refuse_missing_layers
from hf_static_kv.cache.request import running_model
from hf_static_kv.cache.states import States, copies_of, forget_other_shapes, put_back, separate

# The length of a sequence, its recurrent states, and the newest keys and values of compact layers.
Moment = tuple[int, States, list[list[Tensor]]]


class UnfinishedPass(ValueError):
    """A pass of `generate` in which some layers took no part, though nothing failed:

    the model skips them.
    """


class HybridCache(AllocatedCache):
    """Knows which layers have taken part in a step, and what becomes of their states.

    See `StaticContiguousCache`.
    """

    def _build(self, plans: list[LayerPlan], max_cache_len: int) -> None:
        self._written: set[int] = set()  # the layers that have written keys in the step in progress
        self._indexed: set[int] = set()  # the layers that have written index keys in it
        self._moved: set[int] = set()  # the layers that have read or changed a state in it
        self._last_layer: int | None = None  # the layer that has completed a step, and may go on
        self._is_broken = False  # states are of a pass that failed
        self._num_writers = sum(plan.has_keys for plan in plans)
        self._num_movers = sum(plan.num_states > 0 for plan in plans)
        self._num_indexes = sum(plan.index_shape is not None for plan in plans)
        super()._build(plans, max_cache_len)

    def _complete_step(self) -> None:
        raise NotImplementedError

    def _complete_if_all_took_part(self, layer_idx: int) -> None:
        parts = (self._written, self._indexed, self._moved)
        is_complete = tuple(map(len, parts)) == (
            self._num_writers,
            self._num_indexes,
            self._num_movers,
        )
        self._last_layer = layer_idx if is_complete else None
        if is_complete:
            self._complete_step()

    def _take_part(self, layer_idx: int | None) -> None:
        """A layer reads or changes its state.

        What the last layer of a step does next belongs to the same step.
        """
        if (
            layer_idx is None
            or layer_idx == self._last_layer
            or not self._plans[layer_idx].num_states
        ):
            return
        self._refuse_broken()
        self._moved.add(layer_idx)
        self._complete_if_all_took_part(layer_idx)

    @property
    def is_unfinished(self) -> bool:
        """Whether some layers have taken part in a pass, and others have not yet, or never will."""
        return bool(self._written or self._indexed or self._moved)

    def unfinished_pass(self) -> UnfinishedPass:
        """The error that names the layers which the last pass left out."""
        missing = {i for i, plan in enumerate(self._plans) if plan.has_keys} - self._written
        missing |= {
            i for i, plan in enumerate(self._plans) if plan.index_shape is not None
        } - self._indexed
        missing |= {i for i, plan in enumerate(self._plans) if plan.num_states} - self._moved
        return UnfinishedPass(
            f"Layers {sorted(missing)} of {len(self.layers)} did not run in the last forward "
            f"pass, so its tokens are not in the cache, which holds {self.get_seq_length()}. A "
            "model that skips layers needs transformers' own cache: leave `past_key_values` out, "
            "or pass DynamicCache(config=model.config)."
        )

    def refuse_unfinished(self) -> None:
        """Raise if a pass of the running `generate` ended without some layers."""
        if self.is_unfinished and compat.generate_locals() is not None:
            if (model := running_model()) is not None:
                refuse_missing_layers(model, len(self.layers))
            raise self.unfinished_pass()

    def _refuse_moved_states(self) -> None:
        """A pass begins: a step that is still in progress has failed."""
        self._is_broken = self._is_broken or bool(self._moved)
        self._refuse_broken()

    def _refuse_broken(self) -> None:
        if self._is_broken:
            raise RuntimeError(
                "The last forward pass failed when some layers had changed their recurrent "
                "state, which cannot go back: the cache holds no sequence that could go on. Call "
                "reset() and compute the sequence again."
            )

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of a layer. Masks are made when a pass begins."""
        if (self._num_movers or self._written) and compat.makes_masks(sys._getframe(1)):
            self.refuse_unfinished()
            self._last_layer = None
            self._refuse_moved_states()
        return super().get_mask_sizes(query_length, layer_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        self._take_part(layer_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._take_part(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._take_part(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._take_part(layer_idx)
        forget_other_shapes(self.layers[layer_idx], state_idx, conv_states)
        with _as_storage():
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._take_part(layer_idx)
        with _as_storage():
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def shared(self) -> Any:
        """A cache of the same sequences in the same storage, with lengths and recurrent states of
        its own.
        """
        cache = type(self).__new__(type(self))
        groups = {id(group): group.shared() for group in self._groups}
        layers = [copy.copy(layer) for layer in self.layers]
        for layer in stored_layers(layers):
            layer.group = groups.get(id(layer.group))
        sets = {name: set(value) for name, value in self.__dict__.items() if isinstance(value, set)}
        cache.__dict__.update(self.__dict__, **sets, layers=layers, _groups=list(groups.values()))
        with _as_storage():
            for layer in cache.stateful_layers:
                separate(layer)
        return cache

    def moment(self) -> Moment:
        """What `return_to` needs to come back here:

        the length, and copies of what longer sequences overwrite.
        """
        newest = [layer.newest() for layer in self.kv_layers]
        return int(self.get_seq_length()), copies_of(self.stateful_layers), newest

    def return_to(self, moment: Moment) -> None:
        """Remove the tokens that were appended since this moment."""
        length, states, newest = moment
        self._end_step()
        for layer, own in zip(self.kv_layers, newest, strict=True):
            layer.return_to(length, own)
        put_back(states)
        self._is_broken = False

    def _end_step(self, end: Any = StaticContiguousLayer.discard) -> None:
        """Discard what the layers have written, or commit it, or reset them; no step is in progress
        then.
        """
        for layer in self.kv_layers:
            end(layer)
        for took_part in (self._written, self._indexed, self._moved):
            took_part.clear()

    def _crop_states(self, tokens_to_remove: int) -> None:
        moved = [layer for layer in self.stateful_layers if any(layer.has_previous_state.values())]
        recorded = [layer for layer in moved if layer.record_past]  # as assisted decoding asks for
        if tokens_to_remove < 0 and not all(
            layer.record_past and layer.is_croppable for layer in moved
        ):
            raise ValueError(
                f"crop({tokens_to_remove}): {len(moved)} of {len(self.layers)} layers keep a "
                "recurrent state, which cannot go back to an earlier token. Call reset() and "
                "compute the shorter sequence."
            )
        for layer in recorded:
            LinearAttentionLayer.crop(layer, tokens_to_remove)

    def _reset_states(self) -> None:
        for layer in self.stateful_layers:
            LinearAttentionLayer.reset(layer)
        self._is_broken, self._last_layer = False, None


def _as_storage() -> Any:
    """Tensors made in inference mode cannot be written outside of it, and a cache outlives such
    blocks.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
