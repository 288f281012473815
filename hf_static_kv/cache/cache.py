"""`StaticContiguousCache`, the drop-in for `generate`."""

import copy
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_static_kv import compat
from hf_static_kv.cache import debug, layout
from hf_static_kv.cache.allocation import AllocatedCache
from hf_static_kv.cache.fileidentity import ModelIdentity
from hf_static_kv.cache.files import CacheFile, header_of, save_cache, tokens_to_save
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import LayerPlan, PerLayer, check_positive
from hf_static_kv.cache.passes import INDEX, KEYS, OpenPass, UnfinishedPass
from hf_static_kv.cache.request import (
    PAIR_NEEDED,
    Request,
    check_request,
    is_in_use,
    running_model,
    running_request,
)
from hf_static_kv.cache.states import (
    States,
    copies_of,
    crop_states,
    forget_other_shapes,
    put_back,
    separate,
    warn_of_continuation,
)
from hf_static_kv.cache.storage import outside_inference_mode

logger = logging.getLogger(__name__)
_ROOM = 256  # positions after the tokens of a file, if no capacity is given
# A length, the recurrent states, and the newest keys and values of compact layers.
Snapshot = tuple[int, States, list[list[Tensor]]]


class StaticContiguousCache(AllocatedCache):
    """A KV cache in one contiguous, preallocated pair of tensors.

    `key_storage` and `value_storage` are [L, B, H, S, D]; `StorageGroup` has the
    drawing. Keys and values are stored after QK-norm and RoPE. The first forward
    pass allocates, from the states themselves; `from_model` allocates at once.

    ```python
    cache = StaticContiguousCache(model.config, max_cache_len=4096)
    tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
    cache.reset()  # before the next sequence
    ```

    A step (one forward pass) is atomic: `seq_len` moves once, when all layers
    have written, in any order. If the pass fails before that, the cache reads
    as before it and the same call can be retried. A pass that fails later (in
    the last layer's MLP, in the head) has written all of its tokens: remove
    them with `crop(-n)`.

    Hybrid models keep a recurrent state in some layers, in transformers' own layer
    objects. A state cannot go back: `crop` is refused, and after a pass that failed
    on the way the cache asks for `reset()`.

    A cache holds one sequence, or one batch, at a time. Threads may use it in turn:
    a second thread that writes while the first is inside `generate` or a forward
    pass gets a `RuntimeError` (compiled models are not checked). Two loops of one
    thread that take turns on one cache mix their sequences unnoticed.

    With `sliding="compact"` a layer with a sliding window (or the chunks of
    Llama 4) stores 2 * (window + 64) positions at most, and `crop` goes back by
    64 tokens at least. With `cache.grows = True` a full cache doubles its
    capacity, and takes more batch rows, instead of raising.

    A forward pass outside `torch.no_grad()` works, a backward pass through the
    cache raises. Under `torch.compile` use `torch.no_grad()`.
    """

    def __init__(
        self, config: PreTrainedConfig, max_cache_len: int, *, sliding: str = "full"
    ) -> None:
        plans = layout.plan_layers(config, sliding)
        check_positive(max_cache_len=max_cache_len)
        layout.check_positions(config, max_cache_len)
        layout.warn_use_cache_off(config)
        self._build(plans, max_cache_len)

    def _build(self, plans: list[LayerPlan], max_cache_len: int) -> None:
        self.grows = False
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
    ) -> "StaticContiguousCache":
        """A cache for this model, allocated now: in its dtype, each layer on its device.

        `batch_size` counts beams and return sequences. A smaller batch uses the
        first batch rows.
        """
        cache = cls(model.config, max_cache_len, sliding=sliding)
        check_positive(batch_size=batch_size)
        cache._place(model, layout.layer_devices(model, len(cache)), batch_size)
        if (generation_config := getattr(model, "generation_config", None)) is not None:
            layout.warn_use_cache_off(model.config, generation_config)
        return cache

    @classmethod
    def for_calls(
        cls, model: PreTrainedModel, max_cache_len: int, batch_size: int, sliding: str = "full"
    ) -> "StaticContiguousCache":
        """A cache that grows, for a pool. The first pass allocates, in the dtype of its states.

        A model on several devices is allocated at once: a pass tells the device
        of one layer at a time.
        """
        cache = cls.__new__(cls)
        cache._build(layout.plan_layers(model.config, sliding), max_cache_len)
        cache.grows = True
        devices = layout.layer_devices(model, len(cache))
        if len(set(devices)) > 1:
            cache._place(model, devices, batch_size)
        return cache

    def _place(self, model: PreTrainedModel, devices: list[torch.device], batch_size: int) -> None:
        shapes = layout.local_shapes(model, layout.known_shapes(self._plans, model.config))
        if shapes is None:
            return
        keyed = [i for i, plan in enumerate(self._plans) if plan.has_keys]
        places = {i: (shape, devices[i]) for i, shape in zip(keyed, shapes, strict=True)}
        dtypes = model.dtype, model.dtype
        self.allocate_places(places, batch_size, dtypes, model)
        indexes = self.index_layers
        places = {}
        for i in indexes:
            if (shape := self._plans[i].index_shape) is not None:
                places[i] = shape, devices[i]
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
    ) -> "StaticContiguousCache":
        """A cache from plain numbers; a sequence gives one for each layer.

        Dtype and device default to torch's own.

        >>> cache = StaticContiguousCache.allocate(2, 4, 8, max_cache_len=16, dtype=torch.bfloat16)
        >>> list(cache.key_storage.shape), cache.memory_bytes
        ([2, 1, 4, 16, 8], 4096)
        """
        check_positive(num_layers=num_layers, max_cache_len=max_cache_len, batch_size=batch_size)
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        plans = layout.plain_plans(
            num_layers, num_kv_heads, head_dim, value_head_dim, sliding_windows, sliding
        )
        cache = cls.__new__(cls)
        cache._build(plans, max_cache_len)
        place = torch.device(device or torch.get_default_device())
        dtype = dtype or torch.get_default_dtype()
        places = {i: (plan.shape, place) for i, plan in enumerate(plans) if plan.shape is not None}
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
        """Batch rows of the sequences, or of the storage if empty; -1 before allocation."""
        filled = [layer.batch_size for layer in self.kv_layers if layer.length]
        allocated = [layer.max_batch_size for layer in self.kv_layers if layer.is_initialized]
        return (filled or allocated or [-1])[0]

    @property
    def known_ids(self) -> Tensor | None:
        """The tokens [B, k] of the first positions, as far as they are known."""
        return self._known_ids

    def remember(self, input_ids: Tensor, start: int = 0) -> None:
        """Note the tokens [B, n] from position `start` on: a later prompt must have them."""
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
        if (request := running_request()) is None:
            return
        if isinstance(request.custom_generate, type):
            name = request.custom_generate.__name__
            raise TypeError(f"custom_generate takes an object and not a class: pass {name}().")
        # A custom loop may use the prompt in another way.
        if request.custom_generate is None:
            self.begin_call(request)

    def begin_call(self, request: Request) -> None:
        """Refuse a call that this cache cannot serve, or remember the tokens of its prompt."""
        self._claim_and_discard()
        was_assigned = any(layer.was_assigned for layer in self.kv_layers)
        known_ids = None if was_assigned else self._known_ids
        max_cache_len = None if self.grows else self.max_cache_len
        check_request(request, self.seq_len, max_cache_len, known_ids)
        num_new = request.prompt_length - self.seq_len
        if self.seq_len and self.stateful_layers and num_new > 1:
            warn_of_continuation(request.model, num_new)
        if request.tokens is not None:
            self.remember(request.tokens, request.past)

    def _claim_and_discard(self) -> None:
        self._pass.claim(self, "begins a call")
        if self.is_unfinished:
            self._discard_unfinished()

    # --- a pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states [B, H, n, D] after the cached tokens; return what their queries may see.

        The views are slices of the storage: [B, H, seq_len + n, D], or for a
        sliding layer from the oldest position that a query may see. States that
        do not fit are refused before this layer writes anything.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx} is out of range: this cache has layers 0 to "
                f"{len(self.layers) - 1}. Build it with the config of the model that runs."
            )
        if not self._plans[layer_idx].has_keys:
            raise ValueError(
                f"Layer {layer_idx} brings keys, and by the config of the cache it has none."
            )
        layer = self.layers[layer_idx]
        self._prepare(layer, layer_idx, key_states, value_states)
        if layer_idx in self._unfitted:
            layer.check(key_states, value_states, has_storage=False)
            self._fit_storage(layer_idx, key_states, value_states)
        views = self._append(layer, layer_idx, key_states, value_states)
        if layer_idx == debug.logged_layer:
            debug.log_layer(layer_idx, layer.length, layer.pending, views[0].shape[2])
        if self._pass.take(KEYS, layer_idx):
            self._commit()
        return views

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
        view, _ = self._append(index, layer_idx, keys, values)
        if self._pass.take(INDEX, layer_idx):
            self._commit()
        return view[:, 0]

    def _prepare(
        self, layer: StaticContiguousLayer, layer_idx: int, keys: Tensor, values: Tensor
    ) -> None:
        """Claim the cache for this thread, grow if full, drop storage if the dtype has changed."""
        is_open = self._pass.size is not None
        # First: only one thread may allocate.
        if not torch.compiler.is_compiling() and self._pass.thread != get_ident():
            self._pass.claim(self, f"writes layer {layer_idx}", is_open and not layer.pending)
        if not self.grows:
            return
        needed = layer.length + keys.shape[2]
        if needed > self._max_cache_len:
            self.grow(max(2 * self._max_cache_len, needed))
        is_empty = not is_open and layer.length == 0 and layer.is_initialized
        if is_empty and (keys.dtype, values.dtype) != (layer.dtype, layer.value_dtype):
            # Autocast inside a `forward` began or ended since the last call.
            self._release()

    def _append(
        self, layer: StaticContiguousLayer, layer_idx: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Check the states and write them, in the open pass or in a new one."""
        layer.check(keys, values)
        size = keys.shape[0], keys.shape[2]
        if layer.pending or size != self._pass.size:
            self._begin_pass(layer, layer_idx, size)
        return layer.write(keys, values)

    def _begin_pass(
        self, layer: StaticContiguousLayer, layer_idx: int, size: tuple[int, int]
    ) -> None:
        if layer.pending:  # the last pass failed, or the model lacks layers
            self._refuse_missing_layers()
            self._discard_unfinished()
            self._known_ids = None
        self._pass.check_size(layer_idx, size)
        known = self._known_ids
        if known is None or torch.compiler.is_compiling() or known.shape[1] <= layer.length:
            return
        # Tokens that `generate` has announced belong to its own passes alone.
        if compat.generate_locals() is None:
            self._known_ids = known[:, : layer.length]

    def _refuse_missing_layers(self) -> None:
        """Raise if the running model has not written all layers though nothing failed."""
        if (model := running_model()) is None:
            return
        is_pair = model.config.is_encoder_decoder
        if is_pair and is_in_use(self, get_ident()):
            raise ValueError(PAIR_NEEDED)
        layout.refuse_missing_layers(model, len(self.layers))
        # `begin_call` has not seen a pair, whose last call may have failed.
        if not is_pair:
            self._pass.refuse_unfinished(self.seq_len)

    def _discard_unfinished(self) -> None:
        self._pass.refuse_states()
        logger.warning(
            f"The last forward pass wrote {self._pass.describe()} and did not finish: it is "
            f"discarded, and writing starts again at position {self.seq_len}."
        )
        self._pass.discard(self.kv_layers)

    def _commit(self) -> None:
        if self._pass.size is not None and not torch.compiler.is_compiling():
            rows, tokens = self._pass.size
            debug.log_step(self.seq_len, tokens, rows, self.max_cache_len)
        self._pass.commit(self.kv_layers)

    @property
    def is_unfinished(self) -> bool:
        """Whether some layers have taken part in a pass, and others have not."""
        return self._pass.is_open

    def unfinished_pass(self) -> UnfinishedPass:
        """The error that names the layers which the last pass left out."""
        return self._pass.unfinished(self.seq_len)

    def advance(self, n: int) -> None:
        """Complete a step of `n` tokens by hand, when not all layers are written."""
        if self._pass.size is None:
            raise ValueError(
                f"advance({n}): no step is in progress. `seq_len` is {self.seq_len} and moves by "
                f"itself when all {self._pass.num_writers} layers have written; call `update` "
                "first."
            )
        tokens = self._pass.size[1]
        if n != tokens:
            raise ValueError(
                f"advance({n}): the step in progress has {tokens} tokens. Advance by that."
            )
        self._commit()

    def mark_written(self, n: int) -> None:
        """Append `n` tokens that a kernel has written to every layer, from `seq_len` on."""
        is_open = self._pass.size is not None
        free = min(layer.num_free for layer in self.kv_layers)
        if is_open or not 0 <= n <= free:
            raise ValueError(
                f"mark_written({n}): {free} positions are free after the {self.seq_len} cached "
                f"tokens{', and a step is in progress' * is_open}."
            )
        for layer in self.kv_layers:
            layer.length += n

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer keeps no keys. Masks are not made for such a layer."""
        return [not isinstance(layer, StaticContiguousLayer) for layer in self.layers]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(kv_length, kv_offset) of a layer. Masks are made when a pass begins."""
        may_have_failed = self._pass.has_states or self._pass.is_open
        if may_have_failed and compat.makes_masks(sys._getframe(1)):
            self._pass.begin(self.seq_len)
        return super().get_mask_sizes(query_length, layer_idx)

    # --- recurrent states

    def _use_state(self, layer_idx: int | None) -> None:
        if self._pass.use_state(layer_idx):
            self._commit()

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        self._use_state(layer_idx)
        return super().has_previous_state(layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._use_state(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._use_state(layer_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._use_state(layer_idx)
        forget_other_shapes(self.layers[layer_idx], state_idx, conv_states)
        with outside_inference_mode():
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._use_state(layer_idx)
        with outside_inference_mode():
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    # --- back

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last n tokens: `crop(-n)`. Exact in sliding layers too; no state is touched.

        A compact layer goes back by 64 tokens at least. A recurrent state
        cannot go back: refused, but for convolutions that were told to keep
        their past.
        """
        self._pass.refuse_unfinished(self.seq_len)
        filled = [layer for layer in self.kv_layers if layer.length] or self.kv_layers[:1]
        for layer in filled:
            layer.check_crop(int(tokens_to_remove))
        crop_states(self.stateful_layers, int(tokens_to_remove), len(self.layers))
        for layer in filled:
            layer.crop(tokens_to_remove)
        self._pass.discard(self.kv_layers)
        self._forget_removed_ids()

    def can_crop_to(self, length: int) -> bool:
        """Whether the sequence can be shortened to this length."""
        removed = self.seq_len - length
        if self.stateful_layers and removed:
            return False
        return length == 0 or all(removed <= layer.num_croppable for layer in self.kv_layers)

    def reset(self) -> None:
        """Remove all tokens. The storage stays as it is, recurrent states become zero."""
        for layer in self.kv_layers:
            StaticContiguousLayer.reset(layer)
        for layer in self.stateful_layers:
            LinearAttentionLayer.reset(layer)
        self._pass.forget()
        self._known_ids = None

    def snapshot(self) -> Snapshot:
        """The length, and copies of what longer sequences overwrite, for `restore`."""
        newest = [layer.newest() for layer in self.kv_layers]
        return self.seq_len, copies_of(self.stateful_layers), newest

    def restore(self, snapshot: Snapshot) -> None:
        """Remove the tokens that were appended since this snapshot."""
        length, states, newest = snapshot
        for layer, own in zip(self.kv_layers, newest, strict=True):
            layer.restore(length, own)
        put_back(states)
        self._pass.forget()
        self._forget_removed_ids()

    # --- batch rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch row i becomes what row `beam_idx[i]` is now (beam search), in place."""
        if self.seq_len and len(beam_idx) != self.batch_size:
            raise ValueError(
                f"reorder_cache got {len(beam_idx)} indices for a batch of {self.batch_size}. "
                "Give one for each row, or use batch_select_indices to change the number of rows."
            )
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch (indices or a boolean mask), in this order, in place.

        Needs memory for the tokens of one layer; without it nothing is changed.
        An interrupt or a device error while states are copied empties the
        cache.
        """
        self._pass.refuse_unfinished(self.seq_len)
        filled = [layer for layer in self.kv_layers if layer.length]
        if not filled:
            return
        batch_size = self.batch_size
        if indices.dtype == torch.bool:
            if len(indices) != batch_size:
                raise ValueError(
                    f"The mask has {len(indices)} entries for a batch of {batch_size}: give one a "
                    "row."
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
            keys = layer.keys
            values = layer.values
            window = layer.sliding_window
            if keys is None or window is None:
                yield keys, values, None if window is None else torch.tensor(window)
            else:
                newest = slice(1 - window, None)
                size = torch.tensor(window, device=keys.device)
                yield keys[:, :, newest], values[:, :, newest], size

    def shared(self) -> "StaticContiguousCache":
        """The same sequences in the same storage, with lengths and states of their own."""
        cache = type(self).__new__(type(self))
        groups = {id(group): group.shared() for group in self._groups}
        cache.__dict__.update(self._state_on(groups))
        cache._unfitted = set(self._unfitted)
        cache._pass = copy.deepcopy(self._pass)
        with outside_inference_mode():
            for layer in cache.stateful_layers:
                separate(layer)
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

        `max_cache_len=None` leaves room for 256 tokens more, and the cache
        grows. `tokens=n` loads the first n. Each batch row becomes `repeat`
        rows. A file of another model, dtype or layout, or that is damaged, is
        refused with a `ValueError` (docs/files.md).
        """
        with CacheFile(path) as file:
            file.check_model(ModelIdentity.of(model))
            length = file.check_length(tokens, max_cache_len)
            check_positive(repeat=repeat)
            if max_cache_len is None:
                cache = cls.for_calls(model, length + _ROOM, file.header.num_rows * repeat, sliding)
            else:
                cache = cls(model.config, max_cache_len, sliding=sliding)
            cache.fill(file, model, length, repeat)
        return cache

    def fill(self, file: CacheFile, model: PreTrainedModel, length: int, repeat: int = 1) -> None:
        """Replace the sequences by the first tokens of a file of this model.

        A cache that grows does so if it is too short. After an error the cache
        is empty.
        """
        self.reset()
        if self.grows and length > self.max_cache_len:
            self.grow(max(2 * self.max_cache_len, length + _ROOM))
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

        `tokens` [B, n] are the ids of the first positions, for instance what
        `generate` returned; with fewer than `seq_len` only their positions are
        saved. By default: those that are known, which are all after
        `GraphDecoder` and those of the prompt after plain `generate`.
        `attention_mask` [B, m] tells the left padding. The file is written
        beside `path` and renamed.
        """
        ids = tokens_to_save(self, self.known_ids, tokens)
        save_cache(self, path, header_of(self, model, ids, attention_mask))
