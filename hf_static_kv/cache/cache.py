"""`StaticContiguousCache`: the drop-in for `generate`. Builds the layers, shares the storage, keeps steps atomic."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock, get_ident
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_static_kv.cache import debug
from hf_static_kv.cache.allocation import AllocatedCache, for_each_layer
from hf_static_kv.cache.callers import is_in_use, running_model, wait_until_left
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.layout import (
    LayerPlan,
    check_positive,
    known_shapes,
    layer_devices,
    local_shapes,
    plan_layers,
    refuse_missing_layers,
)
from hf_static_kv.cache.request import Request, check_request, is_generating, running_request
from hf_static_kv.cache.storage import LayerShape
from hf_static_kv.cache.support import check_positions, warn_use_cache_off

logger = logging.getLogger(__name__)
_TAKING_OVER = Lock()  # one for all caches: a cache with a lock of its own could not be copied


class StaticContiguousCache(AllocatedCache):
    """A KV cache in one contiguous, preallocated pair of tensors: `key_storage` and `value_storage` [L, B, H, S, D].

    Storage is allocated at the first forward pass, from the states themselves; `from_model` allocates at once.
    Keys and values are stored as attention uses them, after QK-norm and RoPE. See `StorageGroup` for the drawing.

    ```python
    cache = StaticContiguousCache(model.config, max_cache_len=4096)
    tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
    cache.reset()  # before the next text
    ```

    A step (one forward pass) is atomic: every layer writes behind the text, and `seq_len` moves once, when all layers
    have written, in whatever order. If the pass fails before that, the cache reads as before it and the same call can
    be retried. A pass that fails later (in the last layer's MLP, in layers that share earlier keys, in the head) has
    written all of its tokens: `crop(-n)` takes them back.

    One cache holds one text at a time. Threads may use it one after the other; a second thread that writes while the
    first is inside `generate` or a forward pass gets a `RuntimeError` (compiled models are not checked). Within one
    thread nothing can be noticed: two loops that take turns on one cache mix their texts.

    A forward pass outside `torch.no_grad()` works, a backward pass through the cache raises. Under `torch.compile` use
    `torch.no_grad()`.
    """

    def __init__(self, config: PreTrainedConfig, max_cache_len: int) -> None:
        plans = plan_layers(config)
        check_positive(max_cache_len=max_cache_len)
        check_positions(config, max_cache_len)
        warn_use_cache_off(config)
        self._build(plans, max_cache_len)

    @classmethod
    def from_model(cls, model: PreTrainedModel, max_cache_len: int, batch_size: int = 1) -> StaticContiguousCache:
        """A cache for this model, allocated now: in its dtype, each layer on the device that computes it.

        `batch_size` counts beams and return sequences. A smaller batch uses the first rows.
        """
        cache = cls(model.config, max_cache_len)
        check_positive(batch_size=batch_size)
        shapes = local_shapes(model, known_shapes(cache._plans, model.config))
        devices = layer_devices(model, len(cache))
        if shapes is not None:
            cache._allocate(range(len(cache)), shapes, batch_size, (model.dtype, model.dtype), devices)
        if (generation_config := getattr(model, "generation_config", None)) is not None:
            warn_use_cache_off(model.config, generation_config)
        return cache

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        max_cache_len: int,
        *,
        value_head_dim: int | Sequence[int] | None = None,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        sliding_windows: Sequence[int | None] | None = None,
    ) -> StaticContiguousCache:
        """A cache from plain numbers, with no config; a sequence gives one number for each layer.

        `dtype` and `device` default to torch's own defaults.

        >>> cache = StaticContiguousCache.allocate(2, 4, 8, max_cache_len=16, dtype=torch.bfloat16)
        >>> list(cache.key_storage.shape), cache.memory_bytes
        ([2, 1, 4, 16, 8], 4096)
        """
        check_positive(num_layers=num_layers, max_cache_len=max_cache_len, batch_size=batch_size)
        heads = for_each_layer("num_kv_heads", num_kv_heads, num_layers)
        key_dims = for_each_layer("head_dim", head_dim, num_layers)
        value_dims = (
            key_dims if value_head_dim is None else for_each_layer("value_head_dim", value_head_dim, num_layers)
        )
        windows = list(sliding_windows) if sliding_windows is not None else [None] * num_layers
        if len(windows) != num_layers:
            raise ValueError(f"sliding_windows has {len(windows)} entries for {num_layers} layers: give one for each.")
        check_positive(**{f"sliding_windows[{i}]": w for i, w in enumerate(windows) if w is not None})
        shapes = [LayerShape(*numbers) for numbers in zip(heads, key_dims, value_dims, strict=True)]
        cache = cls.__new__(cls)
        cache._build([LayerPlan(*pair) for pair in zip(shapes, windows, strict=True)], max_cache_len)
        dtype = dtype or torch.get_default_dtype()
        place = torch.get_default_device() if device is None else torch.device(device)
        cache._allocate(range(num_layers), shapes, batch_size, (dtype, dtype), [place] * num_layers)
        return cache

    def _build(self, plans: list[LayerPlan], max_cache_len: int) -> None:
        self._step_kind: tuple[int, int] | None = None  # (batch, tokens) of the step in progress
        self._written: set[int] = set()  # the layers that have written in it
        self._thread = 0  # the thread that used it last
        self._known_ids: torch.Tensor | None = None  # [B, k], the first tokens of the text as far as they are known
        super()._build(plans, max_cache_len)

    # --- the call

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` marks a user's cache here, before its first pass: the moment to look at what it was asked for.
        request = running_request()
        if request is None:
            return
        if isinstance(request.custom_generate, type):
            name = request.custom_generate.__name__
            raise TypeError(f"custom_generate takes an object and not a class: pass {name}().")
        if request.custom_generate is None:  # a loop of one's own may read a prompt in another way
            self.begin_call(request)

    def begin_call(self, request: Request) -> None:
        """Refuse what this cache cannot serve with a `ValueError`; else remember the tokens of the prompt.

        `generate` has this called before its first pass, and a custom loop may call it.
        """
        if self._thread != get_ident():
            self._take_over("begins a call")
        known_ids = None if any(layer.was_assigned for layer in self.layers) else self._known_ids
        check_request(request, self.seq_len, self.max_cache_len, known_ids)
        if request.tokens is not None:
            self.remember(request.tokens, request.past)

    def remember(self, input_ids: torch.Tensor, start: int = 0) -> None:
        """The text has these tokens [B, n] from position `start` on; a later prompt that has others is refused."""
        known = self._known_ids
        if start == 0:
            self._known_ids = input_ids.clone()
        elif known is not None and known.shape[1] >= start and len(known) == len(input_ids):
            self._known_ids = torch.cat([known[:, :start], input_ids], dim=1)

    # --- the step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states [B, H, n, D] behind the text and return views of all that their queries may see.

        The views are slices of the storage: [B, H, seq_len + n, D], or for a sliding layer from the oldest position
        that a query may see. `seq_len` moves when all layers have written. States that do not fit are refused before
        this layer writes anything; what earlier passes wrote stays.
        """
        layer = self._layer(layer_idx)
        if not torch.compiler.is_compiling() and self._thread != get_ident():
            # First of all: two threads must not both allocate.
            self._take_over(f"writes layer {layer_idx}", self._step_kind is not None and not layer.pending)
        if not layer.accepts(key_states, value_states):
            self._allocate_or_refuse(layer_idx, key_states, value_states)
        batch_size, _, tokens, _ = key_states.shape
        self._join_step(layer_idx, (batch_size, tokens))
        views = layer.write(key_states, value_states)
        if layer_idx == debug.traced_layer:
            debug.log_layer(layer_idx, layer.length, tokens, views[0].shape[2])
        self._written.add(layer_idx)
        if len(self._written) == len(self.layers):
            self._complete_step()
        return views

    def _layer(self, layer_idx: int) -> StaticContiguousLayer:
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx} is out of range: this cache has layers 0 to {len(self.layers) - 1}. "
                "Build it with the config of the model that runs."
            )
        return self.layers[layer_idx]

    def _allocate_or_refuse(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        layer = self.layers[layer_idx]
        layer.check_states(key_states, value_states)
        place = (LayerShape.of(key_states, value_states), key_states.device)
        if not layer.is_initialized or (layer_idx in self._guessed and place != (layer.shape, layer.device)):
            self._allocate_from_states(layer_idx, key_states, value_states)
        layer.check_fit(key_states, value_states)

    def _join_step(self, layer_idx: int, kind: tuple[int, int]) -> None:
        if self.layers[layer_idx].pending:
            self._discard_unfinished(layer_idx)
        if self._step_kind is not None and self._step_kind != kind:
            raise ValueError(
                f"Layer {layer_idx} brings (batch, tokens) = {kind} into a step where earlier layers brought "
                f"{self._step_kind}. Give every layer the same tokens, or call advance({self._step_kind[1]}) first."
            )
        if self._step_kind is None and not torch.compiler.is_compiling():
            self._forget_what_was_not_written(self.layers[layer_idx].length)
        self._step_kind = kind

    def _forget_what_was_not_written(self, length: int) -> None:
        """Tokens that a call of `generate` has announced belong to its own passes, not to those of anyone else."""
        known = self._known_ids
        if known is not None and known.shape[1] > length and not is_generating():
            self._known_ids = known[:, :length]

    def _take_over(self, doing: str, amid_a_step: bool = False) -> None:
        """Another thread used the cache last: let this one use it if that one is through with it."""
        if not amid_a_step:
            wait_until_left(self, self._thread)
        with _TAKING_OVER:
            if self._thread and (amid_a_step or is_in_use(self, self._thread)):
                raise RuntimeError(
                    f"Thread {get_ident()} {doing} while thread {self._thread} uses this cache at "
                    f"seq_len={self.seq_len}. A cache holds one text at a time: build one for each thread, or let "
                    "one call end before the next begins."
                )
            self._thread = get_ident()

    def _discard_unfinished(self, layer_idx: int) -> None:
        """A layer writes again before its last pass was complete: the pass failed, or the model lacks layers."""
        if (model := running_model()) is not None:
            refuse_missing_layers(model, len(self.layers))
        logger.warning(
            "The last forward pass wrote layers %s of %d and did not finish: it is discarded, and writing starts "
            "again at position %d.",
            sorted(self._written),
            len(self.layers),
            self.layers[layer_idx].length,
        )
        self._discard_step()
        self._known_ids = None

    def _complete_step(self) -> None:
        if self._step_kind is not None and not torch.compiler.is_compiling():
            debug.log_step(self.layers[0].length, self._step_kind[1], self._step_kind[0], self.max_cache_len)
        for layer in self.layers:
            layer.commit()
        self._end_step()
        self._guessed.clear()

    def _discard_step(self) -> None:
        for layer in self.layers:
            layer.discard()
        self._end_step()

    def _end_step(self) -> None:
        self._step_kind = None
        self._written.clear()

    def advance(self, n: int) -> None:
        """Complete a step of `n` tokens by hand, when not all layers are written.

        Not needed after all layers have written: the step is complete then.
        """
        if self._step_kind is None:
            raise ValueError(
                f"advance({n}): no step is in progress. `seq_len` is {self.seq_len} and moves by itself when all "
                f"{len(self.layers)} layers have written; call `update` first."
            )
        if n != self._step_kind[1]:
            raise ValueError(f"advance({n}): the step in progress has {self._step_kind[1]} tokens. Advance by that.")
        self._complete_step()

    def mark_written(self, n: int) -> None:
        """Count `n` tokens that something else has written behind the text: a kernel or a captured graph.

        `update` counts for itself. Every layer's storage must hold them at positions [seq_len, seq_len + n).
        """
        room = min(layer.max_cache_len - layer.length for layer in self.layers)
        if not 0 <= n <= room or self._step_kind is not None:
            raise ValueError(
                f"mark_written({n}): there is room for {room} tokens behind the {self.seq_len} of the text"
                + (", and a step is in progress." if self._step_kind else ".")
            )
        for layer in self.layers:
            layer.length += n

    # --- the text

    @property
    def seq_len(self) -> int:
        """Number of tokens in the cache; the next token has this position."""
        return int(self.get_seq_length())

    @property
    def max_cache_len(self) -> int:
        """Number of tokens that fit."""
        return self._max_cache_len

    @property
    def is_initialized(self) -> bool:
        # Model code reads this as 'the prompt has been seen' (prefix-LM masks); storage alone must not say so.
        return self.seq_len > 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: `crop(-n)` removes n, exactly, in sliding layers too. No tensor is touched."""
        filled = [layer for layer in self.layers if layer.length] or self.layers[:1]
        shortest = min(filled, key=lambda layer: layer.length)
        shortest.crop(tokens_to_remove)  # checks, and refuses before any other layer is changed
        for layer in filled:
            if layer is not shortest:
                layer.crop(tokens_to_remove)
        self._discard_step()
        if self._known_ids is not None:
            self._known_ids = self._known_ids[:, : self.seq_len]

    def reset(self) -> None:
        """Forget the text, keep the storage and its address. No tensor is touched."""
        for layer in self.layers:
            layer.reset()
        self._end_step()
        self._known_ids = None

    # --- the batch

    @property
    def batch_size(self) -> int:
        """Rows of the text; of the storage while there is no text; -1 before allocation."""
        filled = [layer.batch_size for layer in self.layers if layer.length]
        allocated = [layer.max_batch_size for layer in self.layers if layer.is_initialized]
        return (filled or allocated or [-1])[0]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` is now (beam search), in place; as `batch_select_indices`."""
        if self.seq_len and len(beam_idx) != self.batch_size:
            raise ValueError(
                f"reorder_cache got {len(beam_idx)} indices for a batch of {self.batch_size}. Give one for each row, "
                "or use batch_select_indices to change the number of rows."
            )
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch (indices or a boolean mask), in this order, in place.

        Takes memory for the text of one layer, and nothing is changed if there is none. An interrupt or a device error
        while rows are copied empties the cache.
        """
        filled = [layer for layer in self.layers if layer.length]
        if not filled:
            return
        if indices.dtype == torch.bool:
            if len(indices) != self.batch_size:
                raise ValueError(
                    f"The mask has {len(indices)} entries for a batch of {self.batch_size}: give one a row."
                )
            indices = indices.nonzero().squeeze(1)
        batch_size, max_batch_size = self.batch_size, min(layer.max_batch_size for layer in filled)
        # Read on the host on purpose: an index out of range must not become a device-side assert.
        bad = [i for i in indices.tolist() if not 0 <= i < batch_size]
        if bad:
            raise ValueError(f"Row {bad[0]} is out of range: the text has rows 0 to {batch_size - 1}.")
        if not 1 <= len(indices) <= max_batch_size:
            raise ValueError(
                f"{len(indices)} rows do not fit: the storage has {max_batch_size}. "
                f"Build the cache with batch_size >= {max(1, len(indices))} and select at least one row."
            )
        self._discard_step()
        self._known_ids = None
        self._take_rows(filled, indices)

    def _take_rows(self, layers: list[StaticContiguousLayer], indices: torch.Tensor) -> None:
        # All memory is taken first, so that running out of it leaves every layer as it was.
        length = max(layer.length for layer in layers)
        groups = {id(layer.group): layer.group for layer in layers if layer.group is not None}
        indices_on = {group.keys.device: indices.to(group.keys.device) for group in groups.values()}
        scratch = {key: group.scratch(len(indices), length) for key, group in groups.items()}
        try:
            for layer in layers:
                layer.take_rows(indices_on[layer.device], scratch[id(layer.group)])
        except BaseException:
            self.reset()  # some layers have the new rows and some the old ones: no text is better than that
            raise

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows in succession, in place; the storage must have the rows."""
        check_positive(repeats=repeats)
        if self.seq_len:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))
