"""`StaticContiguousCache`: the drop-in for `generate`. Builds the layers, shares the storage, keeps steps atomic."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from hf_static_kv import debug
from hf_static_kv.layer import StaticContiguousLayer
from hf_static_kv.layout import (
    LayerPlan,
    check_positive,
    known_shapes,
    layer_devices,
    local_shapes,
    plan_layers,
)
from hf_static_kv.request import Request, check_request, running_request
from hf_static_kv.storage import LayerShape, StorageGroup
from hf_static_kv.support import check_positions, warn_use_cache_off

logger = logging.getLogger(__name__)


class StaticContiguousCache(Cache):
    """A KV cache in one contiguous, preallocated pair of tensors: `key_storage` and `value_storage` [L, B, H, S, D].

    Storage is allocated at the first forward pass, from the states themselves; `from_model` allocates at once.
    Keys and values are stored as attention uses them, after QK-norm and RoPE. See `StorageGroup` for the drawing.

    ```python
    cache = StaticContiguousCache(model.config, max_cache_len=4096)
    tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)
    cache.reset()  # before the next text
    ```

    A step (one forward pass) is atomic: every layer writes behind the text, and `seq_len` moves once, when the last
    layer has written. If the pass fails before that, the cache reads as before it and the same call can be retried.
    A pass that fails later (in the last layer's MLP, in layers that share earlier keys, in the head) has written all
    of its tokens: `crop(-n)` takes them back.
    """

    layers: list[StaticContiguousLayer]  # type: ignore[assignment]  # no other kind is ever in it

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
        heads = _for_each_layer("num_kv_heads", num_kv_heads, num_layers)
        key_dims = _for_each_layer("head_dim", head_dim, num_layers)
        value_dims = (
            key_dims if value_head_dim is None else _for_each_layer("value_head_dim", value_head_dim, num_layers)
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
        self._plans = plans
        self._max_cache_len = max_cache_len
        self._groups: list[StorageGroup] = []
        # Layers whose storage was sized by another layer's states: a guess, until the first step is complete.
        self._guessed: set[int] = set()
        self._step_kind: tuple[int, int] | None = None  # (batch, tokens) of the step in progress
        self._known_ids: torch.Tensor | None = None  # [B, k], the first tokens of the text as far as they are known
        super().__init__(layers=[StaticContiguousLayer(max_cache_len, plan.sliding_window) for plan in plans])

    # --- storage

    def _allocate(
        self,
        layer_indices: Sequence[int],
        shapes: Sequence[LayerShape],
        batch_size: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        devices: Sequence[torch.device],
    ) -> None:
        """Give every layer storage; layers of one shape on one device share one pair of tensors."""
        members: dict[tuple[LayerShape, torch.device], list[int]] = {}
        for layer_idx, shape, device in zip(layer_indices, shapes, devices, strict=True):
            members.setdefault((shape, device), []).append(layer_idx)
        groups = [
            StorageGroup(
                len(rows),
                shape,
                self._max_cache_len,
                batch_size=batch_size,
                key_dtype=dtypes[0],
                value_dtype=dtypes[1],
                device=device,
            )
            for (shape, device), rows in members.items()
        ]
        for group, rows in zip(groups, members.values(), strict=True):
            for row, layer_idx in enumerate(rows):
                self.layers[layer_idx].attach(group, row)
        self._groups.extend(groups)

    def _allocate_from_states(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for this layer and for the others that the config describes alike, shaped as the states are."""
        plan = self._plans[layer_idx]
        shape, dtypes = LayerShape.of(key_states, value_states), (key_states.dtype, value_states.dtype)
        if layer_idx in self._guessed:
            logger.warning(
                "Layer %d has %s on %s, which neither the config nor the first layer told: it and its like get storage "
                "of their own, and what was set aside for them stays unused.%s",
                layer_idx,
                shape,
                key_states.device,
                " `from_model` places every layer at once." if shape == self.layers[layer_idx].shape else "",
            )
            alike = [i for i in sorted(self._guessed) if self._plans[i] == plan]
        else:
            new = (i for i, layer in enumerate(self.layers) if not layer.is_initialized)
            alike = [i for i in new if self._plans[i].shape == plan.shape]
        count = len(alike)
        self._allocate(alike, [shape] * count, key_states.shape[0], dtypes, [key_states.device] * count)
        self._guessed = (self._guessed | set(alike)) - {layer_idx}

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """transformers' way to allocate in advance; layers that have storage already keep it."""
        check_positive(batch_size=batch_size)
        heads = _for_each_layer("num_heads", num_heads, len(self))
        dims = _for_each_layer("head_dim", head_dim, len(self))
        new = [i for i, layer in enumerate(self.layers) if not layer.is_initialized]
        shapes = [LayerShape(heads[i], dims[i], dims[i]) for i in new]
        self._allocate(new, shapes, batch_size, (dtype, dtype), [torch.device(device)] * len(new))

    @property
    def storage_groups(self) -> tuple[StorageGroup, ...]:
        """The pairs of tensors: one pair for each shape and device, so one for most models; none before allocation."""
        return tuple(self._groups)

    @property
    def key_storage(self) -> torch.Tensor:
        """All keys, [L, B, H, S, D]; a `ValueError` where there is not exactly one group."""
        return self._only_group().keys

    @property
    def value_storage(self) -> torch.Tensor:
        """All values, [L, B, H, S, D]; as `key_storage`."""
        return self._only_group().values

    def _only_group(self) -> StorageGroup:
        if not self._groups:
            raise ValueError("Nothing is allocated before the first forward pass; `from_model` allocates at once.")
        if len(self._groups) > 1:
            shapes = "; ".join(f"{group.shape} on {group.keys.device}" for group in self._groups)
            raise ValueError(f"The layers form {len(self._groups)} groups ({shapes}): read `storage_groups`.")
        return self._groups[0]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the allocated storage; see `cache_bytes` for the figure before allocation."""
        return sum(group.num_bytes for group in self._groups)

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
        check_request(request, self.seq_len, self.max_cache_len, self._known_ids)
        if request.is_whole and request.embeds is None:
            self.remember(request.input_ids)

    def remember(self, input_ids: torch.Tensor) -> None:
        """The text begins with these tokens [B, n]; a later prompt that does not is refused."""
        self._known_ids = input_ids.clone()

    # --- the step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states [B, H, n, D] behind the text and return views of all that their queries may see.

        The views are slices of the storage: [B, H, seq_len + n, D], or for a sliding layer from the oldest position
        that a query may see. `seq_len` moves when the last layer has written.
        """
        layer = self._layer(layer_idx)
        if not layer.accepts(key_states, value_states):
            self._allocate_or_refuse(layer_idx, key_states, value_states)
        self._join_step(layer_idx, (key_states.shape[0], key_states.shape[2]))
        views = layer.write(key_states, value_states)
        if layer_idx == debug.traced_layer:
            debug.log_layer(layer_idx, layer.length, key_states.shape[2], views[0].shape[2])
        if layer_idx == len(self.layers) - 1:
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
            written = [i for i, layer in enumerate(self.layers) if layer.pending]
            logger.warning(
                "The last forward pass wrote layers %s of %d and did not finish: it is discarded, and writing starts "
                "again at position %d. If it did not raise, the model has fewer layers than its config says.",
                written,
                len(self.layers),
                self.layers[layer_idx].length,
            )
            self._discard_step()
            self._known_ids = None
        if self._step_kind is not None and self._step_kind != kind:
            raise ValueError(
                f"Layer {layer_idx} brings (batch, tokens) = {kind} into a step where earlier layers brought "
                f"{self._step_kind}. Give every layer the same tokens, or call advance({self._step_kind[1]}) first."
            )
        self._step_kind = kind

    def _complete_step(self) -> None:
        if self._step_kind is not None:
            debug.log_step(self.layers[0].length, self._step_kind[1], self._step_kind[0], self.max_cache_len)
        for layer in self.layers:
            layer.commit()
        self._step_kind = None
        self._guessed.clear()

    def _discard_step(self) -> None:
        for layer in self.layers:
            layer.discard()
        self._step_kind = None

    def advance(self, n: int) -> None:
        """Complete a step of `n` tokens by hand, when not all layers are written.

        Not needed after the last layer has written: the step is complete then.
        """
        if self._step_kind is None:
            raise ValueError(
                f"advance({n}): no step is in progress. `seq_len` is {self.seq_len} and moves by itself when layer "
                f"{len(self.layers) - 1} writes; call `update` first."
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
        self._step_kind = self._known_ids = None

    # --- the batch

    @property
    def batch_size(self) -> int:
        """Rows of the text; of the storage while there is no text; -1 before allocation."""
        filled = [layer.batch_size for layer in self.layers if layer.length]
        allocated = [layer.max_batch_size for layer in self.layers if layer.is_initialized]
        return (filled or allocated or [-1])[0]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` is now (beam search), in place."""
        if self.seq_len and len(beam_idx) != self.batch_size:
            raise ValueError(
                f"reorder_cache got {len(beam_idx)} indices for a batch of {self.batch_size}. Give one for each row, "
                "or use batch_select_indices to change the number of rows."
            )
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows of the batch (indices or a boolean mask), in this order, in place."""
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
        for layer in filled:
            layer.take_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows in succession, in place; the storage must have the rows."""
        check_positive(repeats=repeats)
        if self.seq_len:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))


def _for_each_layer(name: str, number: int | Sequence[int], num_layers: int) -> list[int]:
    numbers = [number] * num_layers if isinstance(number, int) else list(number)
    if len(numbers) != num_layers:
        raise ValueError(f"{name} has {len(numbers)} entries for {num_layers} layers: give one, or one for each.")
    check_positive(**{name if isinstance(number, int) else f"{name}[{i}]": n for i, n in enumerate(numbers)})
    return numbers
