"""`StaticContiguousCache`, the drop-in for `generate`."""

import copy
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_static_kv import compat
from hf_static_kv.cache import debug, layout, states
from hf_static_kv.cache.allocation import AllocatedCache
from hf_static_kv.cache.fileidentity import ModelIdentity
from hf_static_kv.cache.files import CacheFile, header_of, save_cache, tokens_to_save
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import LayerPlan, PerLayer, check_positive, for_each_layer
from hf_static_kv.cache.passes import INDEX, KEYS, OpenPass, UnfinishedPass
from hf_static_kv.cache.request import (
    PAIR_NEEDED,
    Request,
    check_request,
    is_in_use,
    refuse_codes,
    running_model,
    running_request,
)
from hf_static_kv.cache.storage import LayerShape, outside_inference_mode
from hf_static_kv.cache.unserved import check_positions, positions_of_table, warn_use_cache_off

logger = logging.getLogger(__name__)
_ROOM = 256  # positions after the tokens of a file, if no capacity is given
# The length, the recurrent states, the newest states of compact layers.
Snapshot = tuple[int, states.States, list[list[Tensor]]]


class StaticContiguousCache(AllocatedCache):
    """A KV cache in one contiguous, preallocated pair of tensors.

    `key_storage` and `value_storage` are [L, B, H, S, D], drawn in
    `StorageGroup`. Keys and values are stored after QK-norm and RoPE. The first
    forward pass allocates them; `from_model` allocates at once.

    ```python
    cache = StaticContiguousCache(model.config, max_cache_len=4096)
    tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
    cache.reset()  # before the next sequence
    ```

    A step (one forward pass) is atomic: `seq_len` moves when all layers have
    written. If it fails before that, the cache reads as before and the call can
    be retried; a step that fails later is removed with `crop(-n)`. A recurrent
    state cannot go back: after such a failure the cache asks for `reset()`.

    Threads may use a cache in turn. One that writes while another is inside
    `generate` or a forward pass gets a `RuntimeError`; compiled models and two
    loops of one thread are not checked. A backward pass through the cache
    raises. Under `torch.compile` use `torch.no_grad()`.

    Args:
        config: Of the model.
        max_cache_len: The capacity in tokens. With `cache.grows = True` a full
            cache doubles it, and takes more batch rows, instead of raising.
        sliding: "full", or "compact": a layer with a window (or the chunks of
            Llama 4) stores 2 * (window + 64) positions at most, and `crop` goes
            back by 64 tokens at least.
        kv_dtype: "int8" stores keys and values in 8 bits, with a scale for each
            token and head: about half the memory, and other tokens. None stores
            them as they are.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        max_cache_len: int,
        *,
        sliding: str = "full",
        kv_dtype: str | None = None,
    ) -> None:
        plans = layout.plan_layers(config, sliding, kv_dtype)
        check_positive(max_cache_len=max_cache_len)
        check_positions(config, max_cache_len)
        warn_use_cache_off(config)
        self._build(plans, max_cache_len, positions_of_table(config))

    def _build(self, plans: list[LayerPlan], max_cache_len: int, table: int | None = None) -> None:
        self.grows = False
        self._table = table  # of positions: the cache does not grow beyond it
        self._pass = OpenPass(plans)
        # [B, k], the first tokens, as far as they are known
        self._known_ids: Tensor | None = None
        super()._build(plans, max_cache_len)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        max_cache_len: int,
        batch_size: int = 1,
        *,
        sliding: str = "full",
        kv_dtype: str | None = None,
    ) -> "StaticContiguousCache":
        """A cache for this model, allocated now: in its dtype, each layer on its device.

        Args:
            batch_size: Rows, beams and return sequences included. A smaller
                batch uses the first ones.
        """
        cache = cls(model.config, max_cache_len, sliding=sliding, kv_dtype=kv_dtype)
        check_positive(batch_size=batch_size)
        cache._place(model, layout.layer_devices(model, len(cache)), batch_size)
        if (generation_config := getattr(model, "generation_config", None)) is not None:
            warn_use_cache_off(model.config, generation_config)
        return cache

    @classmethod
    def for_calls(
        cls,
        model: PreTrainedModel,
        max_cache_len: int,
        batch_size: int,
        sliding: str,
        kv_dtype: str | None = None,
    ) -> "StaticContiguousCache":
        """A cache that grows, allocated by its first pass, in the dtype of its states."""
        cache = cls.__new__(cls)
        table = positions_of_table(model.config)
        capacity = max_cache_len if table is None else min(max_cache_len, table)
        cache._build(layout.plan_layers(model.config, sliding, kv_dtype), capacity, table)
        cache.grows = True
        devices = layout.layer_devices(model, len(cache))
        if len(set(devices)) > 1:  # a pass tells the device of one layer at a time
            cache._place(model, devices, batch_size)
        return cache

    def _place(self, model: PreTrainedModel, devices: list[torch.device], batch_size: int) -> None:
        shapes = layout.local_shapes(model, layout.known_shapes(self._plans, model.config))
        if shapes is None:
            return
        keyed = self._without_storage()
        places = {i: (shape, devices[i]) for i, shape in zip(keyed, shapes, strict=True)}
        dtypes = model.dtype, model.dtype
        self.allocate_places(places, batch_size, dtypes, model)
        indexes = self.index_layers
        index_shapes = ((i, self._plans[i].index_shape) for i in indexes)
        places = {i: (shape, devices[i]) for i, shape in index_shapes if shape}
        self.allocate_places(places, batch_size, dtypes, model, indexes)

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_kv_heads: PerLayer,
        head_dim: PerLayer,
        max_cache_len: int,
        *,
        value_head_dim: PerLayer | None = None,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        sliding_windows: Sequence[int | None] | None = None,
        sliding: str = "full",
        kv_dtype: str | None = None,
    ) -> "StaticContiguousCache":
        """A cache from plain numbers; a sequence gives one for each layer.

        >>> cache = StaticContiguousCache.allocate(2, 4, 8, max_cache_len=16, dtype=torch.bfloat16)
        >>> list(cache.key_storage.shape), cache.memory_bytes
        ([2, 1, 4, 16, 8], 4096)
        """
        check_positive(num_layers=num_layers, max_cache_len=max_cache_len, batch_size=batch_size)
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        heads = for_each_layer("num_kv_heads", num_kv_heads, num_layers)
        key_dims = for_each_layer("head_dim", head_dim, num_layers)
        value_dims = for_each_layer("value_head_dim", value_head_dim, num_layers)
        windows = [None] * num_layers if sliding_windows is None else list(sliding_windows)
        for_each_layer("sliding_windows", [1 if w is None else w for w in windows], num_layers)
        plans = list(map(LayerPlan, map(LayerShape, heads, key_dims, value_dims), windows))
        plans = layout.with_kv_dtype(layout.with_sliding(plans, sliding), kv_dtype)
        cache = cls.__new__(cls)
        cache._build(plans, max_cache_len)
        place = torch.device(device or torch.get_default_device())
        dtype = dtype or torch.get_default_dtype()
        places = {i: (plan.shape, place) for i, plan in enumerate(plans) if plan.shape}
        cache.allocate_places(places, batch_size, (dtype, dtype))
        return cache

    # --- lengths

    @property
    def seq_len(self) -> int:
        """Number of tokens in the cache."""
        return int(self.get_seq_length())

    @property
    def is_initialized(self) -> bool:
        # Model code reads this as 'the prompt has been computed' (prefix-LM masks).
        return self.seq_len > 0

    @property
    def batch_size(self) -> int:
        """Batch rows of the sequences, or of empty storage; -1 before allocation."""
        filled = [layer.batch_size for layer in self.kv_layers if layer.length]
        allocated = [layer.max_batch_size for layer in self.kv_layers if layer.is_initialized]
        return (filled or allocated or [-1])[0]

    @property
    def known_ids(self) -> Tensor | None:
        """The tokens [B, k] of the first positions, as far as they are known."""
        return self._known_ids

    def remember(self, input_ids: Tensor, start: int = 0) -> None:
        """Note the tokens [B, n] from position `start` on; a later prompt must have them."""
        known = self._known_ids
        if start == 0:
            self._known_ids = input_ids.clone()
        elif known is not None and known.shape[1] >= start and len(known) == len(input_ids):
            self._known_ids = torch.cat([known[:, :start], input_ids], dim=1)

    def _forget_removed_ids(self) -> None:
        if self._known_ids is not None:
            self._known_ids = self._known_ids[:, : self.seq_len]

    # --- a call of `generate`

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this on a user's cache before its first pass (transformers 5.17 to 5.22).
        if self.is_unfinished:  # an earlier call has failed
            self._claim_and_discard()
        request = running_request()
        loop = None if request is None else request.custom_generate
        if isinstance(loop, type):
            raise TypeError(
                f"custom_generate takes an object and not a class: pass {loop.__name__}()."
            )
        # A custom loop may use the prompt in another way.
        if request is not None and loop is None:
            self.begin_call(request)

    def begin_call(self, request: Request, is_prefix: bool = False) -> None:
        """Refuse a call that this cache cannot serve; remember the tokens of its prompt.

        `is_prefix`: it is known that the prompt begins with the cached tokens.
        """
        if self.kv_dtype is not None:
            refuse_codes(request.model)
        self._claim_and_discard()
        is_known = is_prefix or any(layer.was_assigned for layer in self.kv_layers)
        known_ids = None if is_known else self._known_ids
        capacity = None if self.grows else self.max_cache_len
        check_request(request, self.seq_len, capacity, known_ids)
        num_new = request.prompt_length - self.seq_len
        if self.seq_len and self.stateful_layers and num_new > 1:
            states.warn_of_continuation(request.model, num_new)
        if request.tokens is not None:
            self.remember(request.tokens, request.past)

    def _claim_and_discard(self) -> None:
        self._pass.claim(self, "begins a call")
        if self.is_unfinished:
            self._discard_unfinished()

    def disown(self) -> None:
        """No thread uses this cache now, though one may still have it."""
        self._pass.thread = 0

    # --- a pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states [B, H, n, D] after the cached tokens; return what their queries may see.

        The views are slices of the storage: [B, H, seq_len + n, D], or for a
        sliding layer from the oldest visible position on. States that do not
        fit are refused before this layer writes.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx}: this cache has layers 0 to {len(self.layers) - 1}. Build "
                "it with the config of the model that runs."
            )
        if not self._plans[layer_idx].has_keys:
            raise ValueError(f"Layer {layer_idx} brings keys, and by the config it has none.")
        layer = self.layers[layer_idx]
        self._prepare(layer, layer_idx, key_states, value_states)
        if layer_idx in self._unfitted:
            layer.check(key_states, value_states, has_storage=False)
            self._fit_storage(layer_idx, key_states, value_states)
        return self._write(KEYS, layer, layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Write the index keys [B, n, D] of a layer; return all, [B, seq_len + n, D]."""
        layer = self.layers[layer_idx] if 0 <= layer_idx < len(self.layers) else None
        if (index := getattr(layer, "index_layer", None)) is None:
            raise ValueError(
                f"Layer {layer_idx} brings index keys, and by the config of the cache it has none."
            )
        keys = indexer_key_states.unsqueeze(1)  # [B, 1, n, D]
        values = keys[..., :0]
        self._prepare(index, layer_idx, keys, values)
        if not index.is_initialized or index.device != keys.device:
            index.check(keys, values, has_storage=False)
            self._allocate_indexes(keys, values)
        return self._write(INDEX, index, layer_idx, keys, values)[0][:, 0]

    def _prepare(
        self, layer: StaticContiguousLayer, layer_idx: int, keys: Tensor, values: Tensor
    ) -> None:
        """Claim the cache for this thread, grow if full, drop storage of another dtype."""
        is_open = self._pass.size is not None
        # First: only one thread may allocate.
        if not torch.compiler.is_compiling() and self._pass.thread != get_ident():
            self._pass.claim(self, f"writes layer {layer_idx}", is_open and not layer.pending)
        if not self.grows:
            return
        needed = layer.length + keys.shape[2]
        if needed > self._max_cache_len:
            self.grow_for(needed)
        is_empty = not is_open and layer.length == 0 and layer.is_initialized
        if is_empty and (keys.dtype, values.dtype) != (layer.dtype, layer.value_dtype):
            # Autocast inside a `forward` began or ended since the last call.
            self._release()

    def _write(
        self, part: str, layer: StaticContiguousLayer, layer_idx: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        layer.check(keys, values)
        size = keys.shape[0], keys.shape[2]
        if layer.pending or size != self._pass.size:
            self._begin_pass(layer, layer_idx, size)
        views = layer.write(keys, values)
        if layer_idx == debug.logged_layer and part == KEYS:
            debug.log_layer(layer_idx, layer.length, layer.pending, views[0].shape[2])
        if self._pass.take(part, layer_idx):
            self._commit()
        return views

    def _begin_pass(
        self, layer: StaticContiguousLayer, layer_idx: int, size: tuple[int, int]
    ) -> None:
        if layer.pending:  # the last pass failed, or the model lacks layers
            self._refuse_missing_layers()
            self._discard_unfinished()
            self._known_ids = None
        if self._pass.size not in (None, size):
            raise ValueError(
                f"Layer {layer_idx} brings (batch, tokens) = {size} into a step of "
                f"{self._pass.size}. Give every layer the same tokens, or call advance first."
            )
        if self.kv_dtype is not None and not torch.compiler.is_compiling():
            refuse_codes(running_model())
        self._pass.size = size
        known = self._known_ids
        if known is None or torch.compiler.is_compiling() or known.shape[1] <= layer.length:
            return
        # Tokens that `generate` has announced belong to its own passes alone.
        if compat.generate_locals() is None:
            self._known_ids = known[:, : layer.length]

    def _refuse_missing_layers(self) -> None:
        """Raise if the running model left out layers though nothing failed."""
        if (model := running_model()) is None:
            return
        is_pair = model.config.is_encoder_decoder
        if is_pair and is_in_use(self, get_ident()):
            raise ValueError(PAIR_NEEDED)
        layout.refuse_missing_layers(model, len(self.layers))
        # `begin_call` does not see a pair, whose last call may have failed.
        if not is_pair:
            self._pass.refuse_unfinished()

    def _discard_unfinished(self) -> None:
        self._pass.refuse_states()
        logger.warning(
            f"The last forward pass wrote layers {self._pass.written()} of {len(self.layers)} and "
            f"did not finish: it is discarded, and writing starts again at position {self.seq_len}."
        )
        self._pass.discard(self.kv_layers)

    def _commit(self) -> None:
        if self._pass.size is not None and not torch.compiler.is_compiling():
            rows, tokens = self._pass.size
            debug.log_step(self.seq_len, tokens, rows, self.max_cache_len)
        self._pass.commit(self.kv_layers)

    @property
    def is_unfinished(self) -> bool:
        """Whether a pass has written some layers and not all."""
        return self._pass.is_open

    def unfinished_pass(self) -> UnfinishedPass:
        return self._pass.unfinished()

    def advance(self, n: int) -> None:
        """Complete a step of `n` tokens by hand, when not all layers are written."""
        step = f"no step is in progress, and `seq_len` is {self.seq_len}"
        if self._pass.size is not None:
            step = f"the step in progress has {self._pass.size[1]} tokens"
        if self._pass.size is None or n != self._pass.size[1]:
            raise ValueError(f"advance({n}): {step}.")
        self._commit()

    def mark_written(self, n: int, batch_size: int | None = None) -> None:
        """Append `n` tokens that a kernel has written to every layer, from `seq_len` on.

        In an empty cache they are those of `batch_size` rows; by default of all.
        """
        is_open = self._pass.size is not None
        ends = [layer.offset + layer.num_slots for layer in self.kv_layers]
        free = min([self._max_cache_len, *ends]) - self.seq_len
        if is_open or not 0 <= n <= free:
            raise ValueError(
                f"mark_written({n}): {free} positions are free after the {self.seq_len} cached "
                f"tokens{', and a step is in progress' * is_open}."
            )
        for layer in self.kv_layers:
            if not layer.length:
                layer.batch_size = batch_size or layer.max_batch_size
            layer.length += n

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer keeps no keys. Masks are not made for such a layer."""
        return [not isinstance(layer, StaticContiguousLayer) for layer in self.layers]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of a layer. Masks are made when a pass begins."""
        may_have_failed = self._pass.has_states or self._pass.is_open
        if may_have_failed and compat.makes_masks(sys._getframe(1)):
            self._pass.begin()
        return super().get_mask_sizes(query_length, layer_idx)

    # --- recurrent states

    def _use_state(self, layer_idx: int | None) -> None:
        if self._pass.use_state(layer_idx):
            self._commit()

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        self._use_state(layer_idx)
        return super().has_previous_state(layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._use_state(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def get_recurrent_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        self._use_state(layer_idx)
        return super().get_recurrent_state(layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._use_state(layer_idx)
        states.forget_other_shapes(self.layers[layer_idx], state_idx, conv_states)
        with outside_inference_mode():
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        self._use_state(layer_idx)
        with outside_inference_mode():
            return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    # --- back

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last n tokens: `crop(-n)`. Exact in sliding layers too; no state moves.

        A compact layer goes back by 64 tokens at least. Of recurrent states
        only convolutions that record their past go back; others are refused.
        """
        self._pass.refuse_unfinished()
        tokens_to_remove = int(tokens_to_remove)  # some versions of generate pass a tensor
        filled = [layer for layer in self.kv_layers if layer.length] or self.kv_layers[:1]
        for layer in filled:
            layer.check_crop(tokens_to_remove)
        states.crop_states(self.stateful_layers, tokens_to_remove, len(self.layers))
        for layer in filled:
            layer.crop(tokens_to_remove)
        self._pass.discard(self.kv_layers)
        self._forget_removed_ids()

    def can_crop_to(self, length: int) -> bool:
        removed = self.seq_len - length
        if self.stateful_layers and removed:
            return False
        return length == 0 or all(removed <= layer.num_croppable for layer in self.kv_layers)

    def reset(self) -> None:
        """Remove all tokens. The storage stays, recurrent states become zero."""
        for layer in self.kv_layers:
            StaticContiguousLayer.reset(layer)
        for layer in self.stateful_layers:
            LinearAttentionLayer.reset(layer)
        self._pass.forget()
        self._known_ids = None

    def snapshot(self) -> Snapshot:
        """The length, and copies of what longer sequences overwrite."""
        newest = [layer.newest() for layer in self.kv_layers]
        return self.seq_len, states.copies_of(self.stateful_layers), newest

    def restore(self, snapshot: Snapshot) -> None:
        """Remove the tokens that were appended since this snapshot."""
        length, before, newest = snapshot
        for layer, own in zip(self.kv_layers, newest, strict=True):
            layer.restore(length, own)
        states.put_back(before)
        self._pass.forget()
        self._forget_removed_ids()

    # --- batch rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch row i becomes what row `beam_idx[i]` is now (beam search), in place."""
        if self.seq_len and len(beam_idx) != self.batch_size:
            raise ValueError(
                f"reorder_cache got {len(beam_idx)} indices for a batch of {self.batch_size}. Give "
                "one for each row, or call batch_select_indices."
            )
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch (indices or a boolean mask), in this order, in place.

        Needs memory for the tokens of one layer; without it nothing changes. An
        error while states are copied empties the cache.
        """
        self._pass.refuse_unfinished()
        filled = [layer for layer in self.kv_layers if layer.length]
        if not filled:
            return
        batch_size = self.batch_size
        if indices.dtype == torch.bool:
            if len(indices) != batch_size:
                raise ValueError(
                    f"The mask has {len(indices)} entries for a batch of {batch_size}."
                )
            indices = indices.nonzero().squeeze(1)
        # Read on the host: an index out of range must not become a device-side assert.
        if bad := [i for i in indices.tolist() if not 0 <= i < batch_size]:
            raise ValueError(
                f"Row {bad[0]} is out of range: the batch has rows 0 to {batch_size - 1}."
            )
        max_batch_size = min(layer.max_batch_size for layer in filled)
        if self.grows and len(indices) > max_batch_size:
            self._move(self._max_cache_len, len(indices))
        elif not 1 <= len(indices) <= max_batch_size:
            raise ValueError(
                f"{len(indices)} rows do not fit: the storage has {max_batch_size}. Build the "
                f"cache with batch_size >= {max(1, len(indices))} and select at least one row."
            )
        self._pass.discard(self.kv_layers)
        self._known_ids = None
        self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each batch row becomes `repeats` rows in succession, in place."""
        check_positive(repeats=repeats)
        if self.seq_len:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """(keys, values, window) of each layer as `DynamicCache` gives them."""
        for layer in self.layers:
            window = layer.sliding_window
            if layer.keys is None or window is None:
                yield layer.keys, layer.values, None if window is None else torch.tensor(window)
            else:
                newest = slice(1 - window, None)
                size = torch.tensor(window, device=layer.device)
                yield layer.keys[:, :, newest], layer.values[:, :, newest], size

    def for_rows(
        self, max_cache_len: int, rows: int, is_compact: bool = False
    ) -> "StaticContiguousCache":
        """An empty cache for states like these, whose layers keep all positions; `is_compact`: as
        many as these do.
        """
        cache = type(self).__new__(type(self))
        plans = self._plans
        if not is_compact:
            plans = [replace(plan, compact_window=None) for plan in plans]
        cache._build(plans, max_cache_len)
        cache.allocate_like(self, rows)
        return cache

    def shared(self) -> "StaticContiguousCache":
        """The same sequences in the same storage, with its own lengths and states."""
        cache = type(self).__new__(type(self))
        cache.__dict__.update(self._state_on({group: group.shared() for group in self._groups}))
        cache._unfitted = set(self._unfitted)
        cache._pass = copy.deepcopy(self._pass)
        with outside_inference_mode():
            for layer in cache.stateful_layers:
                states.separate(layer)
        return cache

    # --- files

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel,
        max_cache_len: int | None = None,
        *,
        tokens: int | None = None,
        repeat: int = 1,
        sliding: str = "full",
    ) -> "StaticContiguousCache":
        """A cache with the sequences of a file of `save`; `known_ids` are their tokens.

        A file that is damaged, or of another model, dtype or layout, is refused
        with a `ValueError` (docs/files.md).

        Args:
            max_cache_len: None leaves room for 256 more tokens, and the cache grows.
            tokens: Load so many, the first ones.
            repeat: Each batch row becomes so many rows.
        """
        with CacheFile(path) as file:
            file.check_model(ModelIdentity.of(model))
            length = file.check_length(tokens, max_cache_len)
            check_positive(repeat=repeat)
            rows = file.header.num_rows * repeat
            kv_dtype = file.header.kv_dtype
            if max_cache_len is None:
                cache = cls.for_calls(model, length + _ROOM, rows, sliding, kv_dtype)
            else:
                cache = cls(model.config, max_cache_len, sliding=sliding, kv_dtype=kv_dtype)
            cache.fill(file, model, length, repeat)
        return cache

    def grow_for(self, needed: int, room: int = 0) -> None:
        """Grow to twice the capacity, or for what is needed and this room; with a table of positions
        not beyond that.
        """
        wanted = max(2 * self.max_cache_len, needed + room)
        if self._table is not None:
            wanted = min(wanted, self._table)
        self.grow(max(wanted, needed))

    def fill(self, file: CacheFile, model: PreTrainedModel, length: int, repeat: int = 1) -> None:
        """Replace the sequences by the first tokens of a file. After an error the cache is empty."""
        self.reset()
        if self.grows and length > self.max_cache_len:
            self.grow_for(length, _ROOM)
        file.check_length(length, self.max_cache_len)
        file.allocate(self, model, file.header.num_rows * repeat)
        file.read_into(self, length, repeat)
        self.remember(file.tokens[:, :length].repeat_interleave(repeat, dim=0).to(model.device))

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        model: PreTrainedModel,
        tokens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Write the sequences to a file that `load` reads: the tokens, not the capacity.

        The file is written beside `path` and renamed.

        Args:
            tokens: Ids [B, n] of the first positions, which are saved; for
                instance what `generate` returned. By default those that are
                known: all after `GraphDecoder`, the prompt after `generate`.
            attention_mask: [B, m], 0 under left padding.
        """
        ids = tokens_to_save(self, self.known_ids, tokens)
        save_cache(self, path, header_of(self, model, ids, attention_mask))
