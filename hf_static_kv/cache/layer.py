"""One layer of the cache: writes new states behind the text, hands out views, knows its own length and window."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_static_kv.cache.storage import LayerShape, StorageGroup, allocate_groups


class StaticContiguousLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values of one layer, in the first `length` of `max_cache_len` positions of its storage.

    A `StaticContiguousCache` gives each layer a row of its shared storage and moves all lengths together when a step
    is complete: `write` leaves the new tokens `pending`, `commit` makes them part of the text, `discard` forgets them.
    Used alone, `update` does all of it at once.

    ```
    position      0   1   2   3   4   5   6   7        length = 4, pending = 2, sliding_window = 3
    storage      [k] [k] [k] [k] [p] [p] [ ] [ ]
    keys         <------------->                       what the text holds
    view                 <------------->               what `write` returned for queries 4 and 5: 4 may see 2, 3 and 4
    ```
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, max_cache_len: int, sliding_window: int | None = None) -> None:
        self.max_cache_len = max_cache_len
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.length = 0
        self.pending = 0
        self.batch_size = -1  # rows in use; transformers' word for 'none yet' is -1
        self.group: StorageGroup | None = None
        self._row = 0
        self._had_grad = False  # whether states that require grad were written since the last reset
        # While only one of keys and values has been assigned, the (batch, length) that the other still has.
        self._not_yet_assigned: dict[str, tuple[int, int]] = {}
        self.was_assigned = False  # since the last reset
        super().__init__()  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        window = f", sliding_window={self.sliding_window}" if self.is_sliding else ""
        return f"{type(self).__name__}({self.length}/{self.max_cache_len}{window})"

    # --- storage

    def attach(self, group: StorageGroup, row: int) -> None:
        """Take layer number `row` of the group as this layer's storage."""
        self.group, self._row = group, row
        self.shape = group.shape
        self.dtype, self.value_dtype = group.keys.dtype, group.values.dtype
        self.device = group.keys.device
        self.batch_size = self.max_batch_size = group.keys.shape[1]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate storage for this layer alone; a cache attaches its layers to shared storage instead."""
        members = (LayerShape.of(key_states, value_states), key_states.device, [0])
        dtypes = key_states.dtype, value_states.dtype
        (group,) = allocate_groups([members], self.max_cache_len, key_states.shape[0], dtypes)
        self.attach(group, row=0)

    def used(self) -> tuple[int, int]:
        """(rows, positions) of the storage that hold something: the text, a step in progress, a text half replaced."""
        in_use = [(self.batch_size, self.length + self.pending), *self._not_yet_assigned.values()]
        return max(rows for rows, _ in in_use), max(length for _, length in in_use)

    def _views(self, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, length, D] at positions [first, first + length) of the rows in use."""
        assert self.group is not None, "attach storage first"
        return self.group.views(self._row, self.batch_size, first, length)

    # --- the text: read, write, commit

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states and return the views that attention reads, for a layer that is used alone."""
        if not self.accepts(key_states, value_states):
            self.check_states(key_states, value_states)
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            self.check_fit(key_states, value_states)
        views = self.write(key_states, value_states)
        self.commit()
        return views

    def write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy checked states [B, H, n, D] behind the text and return the views that their queries may see."""
        if torch.is_grad_enabled() and (self._had_grad or key_states.requires_grad or value_states.requires_grad):
            return self._write_without_graph(key_states, value_states)
        self.batch_size, _, tokens, _ = key_states.shape
        keys, values = self._views(self.length, tokens)
        keys.copy_(key_states)
        values.copy_(value_states)
        self.pending = tokens
        first = self._first_visible()
        return self._views(first, self.length + tokens - first)

    def _write_without_graph(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`write` where autograd records: the storage stays out of its graph, and the views refuse a backward pass."""
        with torch.no_grad():
            views = self.write(key_states, value_states)
        self._had_grad = True
        anchor = torch.empty(0, requires_grad=True)
        keys, values = _ForwardOnly.apply(anchor, key_states, value_states, *views)  # type: ignore[no-untyped-call]
        return keys, values

    def commit(self) -> None:
        """The pending tokens become part of the text."""
        if self.pending:
            self.length += self.pending
            self.discard()

    def discard(self) -> None:
        """The pending tokens are forgotten; their slots are room again."""
        self.pending = 0
        self._not_yet_assigned.clear()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kv_length, kv_offset): the number of keys in the view of the next `query_length` tokens, and the first."""
        self._refuse_nothing_new(query_length)  # a model asks for these first
        first = self._first_visible()
        return self.length + query_length - first, first

    def _first_visible(self) -> int:
        """The oldest position that the next token may see."""
        return 0 if self.sliding_window is None else max(0, self.length - self.sliding_window + 1)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.max_cache_len

    # --- the text: shorten, rearrange, replace

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. Nothing is moved: older positions are all still there."""
        tokens_to_remove = int(tokens_to_remove)  # some versions of generate pass a tensor
        if tokens_to_remove > 0:
            keep = f"To keep {tokens_to_remove} of {self.length} tokens, call crop({tokens_to_remove - self.length})."
            remedy = (
                keep if tokens_to_remove < self.length else f"There are only {self.length} tokens: nothing to remove."
            )
            raise ValueError(f"crop takes a negative count of tokens to remove, got {tokens_to_remove}. {remedy}")
        if -tokens_to_remove > self.length:
            raise ValueError(
                f"crop({tokens_to_remove}) reaches beyond the start: there are {self.length} tokens. "
                f"Remove at most {self.length}, or call reset()."
            )
        self.discard()
        self.length += tokens_to_remove

    def reset(self) -> None:
        """Forget the text, keep the storage. No tensor is touched."""
        self.discard()
        self.length, self.was_assigned = 0, False
        self._had_grad = False
        if self.is_initialized:
            self.batch_size = self.max_batch_size

    def take_rows(self, indices: torch.Tensor, scratch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Row i of the batch becomes what row `indices[i]` is now, in place; the batch is then len(indices) rows.

        Allocates nothing: the rows go through `scratch`, from `StorageGroup.scratch`. `indices` are on this device.
        """
        self.discard()
        before = self._views(0, self.length)
        self.batch_size = len(indices)
        for states, target, room in zip(before, self._views(0, self.length), scratch, strict=True):
            target.copy_(torch.index_select(states, 0, indices, out=room[:, :, : self.length]))

    @property
    def keys(self) -> torch.Tensor | None:
        """The text's keys [B, H, length, D], a view; None before allocation. A step in progress is not part of it.

        Assigning replaces the text: a prefix of this very view only sets the length (and batch), anything else is
        copied into the storage; None empties the layer. Assign `values` of the same length as well.
        """
        return self._text("keys")

    @keys.setter
    def keys(self, states: torch.Tensor | None) -> None:
        self._replace_text("keys", states)

    @property
    def values(self) -> torch.Tensor | None:
        """The text's values [B, H, length, D]; as `keys`."""
        return self._text("values")

    @values.setter
    def values(self, states: torch.Tensor | None) -> None:
        self._replace_text("values", states)

    def _text(self, name: str) -> torch.Tensor | None:
        if self.group is None:
            return None
        batch_size, length = self._not_yet_assigned.get(name, (self.batch_size, self.length))
        return self.group.views(self._row, batch_size, 0, length)[0 if name == "keys" else 1]

    def _replace_text(self, name: str, states: torch.Tensor | None) -> None:
        if states is None:
            self.discard()
            self.length = 0
            return
        self.was_assigned = True
        other = "values" if name == "keys" else "keys"
        if self.group is None:
            raise ValueError(
                f"This layer has no storage yet to hold the assigned {name} {list(states.shape)}. Write them with "
                "`cache.update(keys, values, layer_idx)`, or build the cache with `from_model`."
            )
        slab: torch.Tensor = getattr(self.group, name)[self._row]  # [B, H, S, D]
        rows, heads, room, head_dim = slab.shape
        fits = states.ndim == 4 and states.shape[1::2] == (heads, head_dim)
        if not fits or states.shape[0] > rows or states.shape[2] > room or _kind(states) != _kind(slab):
            raise ValueError(
                f"The assigned {name} are {list(states.shape)} {_kind(states)}; this layer holds {list(slab.shape)} "
                f"{_kind(slab)}, and fewer rows or positions. Convert them, or build a larger cache."
            )
        batch_size, length = states.shape[0], states.shape[2]
        is_prefix = states.data_ptr() == slab.data_ptr() and states.stride() == slab.stride()
        if length and not is_prefix:
            shares_memory = states.untyped_storage().data_ptr() == slab.untyped_storage().data_ptr()
            with torch.no_grad():  # the storage stays out of autograd's graph
                slab[:batch_size, :, :length].copy_(states.clone() if shares_memory else states)
        self._had_grad |= states.requires_grad
        unassigned = {} if name in self._not_yet_assigned else {other: (self.batch_size, self.length)}
        self.discard()
        self._not_yet_assigned = unassigned
        self.batch_size, self.length = batch_size, length

    # --- checks: before this pass writes into the layer, with the numbers and the remedy

    def accepts(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Whether `check_states` and `check_fit` would both pass: one quick look, on the way of every token."""
        size = key_states.shape
        if not self.is_initialized or len(size) != 4:
            return False
        batch_size, heads, tokens, head_dim = size
        shape = self.shape
        return (
            heads == shape.num_kv_heads
            and head_dim == shape.key_head_dim
            and value_states.shape == (batch_size, heads, tokens, shape.value_head_dim)
            and (batch_size == self.batch_size if self.length else batch_size <= self.max_batch_size)
            and 0 < tokens <= self.max_cache_len - self.length
            and key_states.dtype == self.dtype
            and value_states.dtype == self.value_dtype
            and key_states.device == value_states.device == self.device
        )

    def check_states(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse states that no cache of this capacity could take."""
        if key_states.ndim != 4 or value_states.ndim != 4 or key_states.shape[:3] != value_states.shape[:3]:
            raise ValueError(
                f"key_states {list(key_states.shape)} and value_states {list(value_states.shape)} must both be "
                "[batch, kv_heads, tokens, head_dim] and agree in the first three."
            )
        if key_states.device != value_states.device:
            raise ValueError(
                f"key_states are on {key_states.device} and value_states on {value_states.device}: move one of them."
            )
        tokens = key_states.shape[2]
        self._refuse_nothing_new(tokens)
        if self.length + tokens > self.max_cache_len:
            raise ValueError(
                f"The cache is full: it holds {self.length} of at most {self.max_cache_len} tokens and cannot take "
                f"{tokens} more. This pass needs max_cache_len >= {self.length + tokens}. A generation needs prompt + "
                "max_new_tokens - 1 positions, with prompt lookup prompt + max_new_tokens + prompt_lookup_num_tokens "
                f"- 2. `generate` that stops here returns nothing; the cache still holds its {self.length} tokens. "
                "Build a larger one, or make room: crop, reset."
            )

    def _refuse_nothing_new(self, tokens: int) -> None:
        if tokens == 0:
            raise ValueError(
                f"There are no new tokens: the cache holds {self.length} already. Call reset() before another text; to "
                "continue this one pass all of it, old and new."
            )

    def check_fit(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse states that this layer's storage, or the text in it, does not match."""
        shape = LayerShape.of(key_states, value_states)
        if shape != self.shape:
            raise ValueError(
                f"The states have {shape}, this layer was allocated for {self.shape}. Build the cache with the config "
                "of the model that runs: `StaticContiguousCache(model.config, max_cache_len)` learns the shape itself."
            )
        kinds = (key_states.dtype, value_states.dtype, key_states.device)
        if kinds != (self.dtype, self.value_dtype, self.device):
            raise ValueError(
                f"The states (keys, values) are {kinds}, the storage is {(self.dtype, self.value_dtype, self.device)}: "
                "nothing is cast silently. `StaticContiguousCache(model.config, max_cache_len)` takes what comes, "
                "under autocast too; `from_model` takes the model's own dtype and devices."
            )
        batch_size = key_states.shape[0]
        if self.length and batch_size != self.batch_size:
            raise ValueError(
                f"The states have batch {batch_size}, the text in the cache has batch {self.batch_size}. Call reset() "
                "to start a new text, or batch_select_indices / batch_repeat_interleave to change its rows."
            )
        if batch_size > self.max_batch_size:
            raise ValueError(
                f"The states have batch {batch_size}, the storage has {self.max_batch_size} rows. Build the cache with "
                f"`from_model(model, {self.max_cache_len}, batch_size={batch_size})` (beams count as rows)."
            )


class _ForwardOnly(torch.autograd.Function):
    """Views of the storage as a result of the states: a backward pass that reaches them raises.

    The storage is written in place, so it cannot keep the graph of older tokens; without this, their gradients would
    silently be missing. `anchor` requires grad for states that do not, behind older ones that did.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *states_and_views: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, _, keys, values = states_and_views
        return keys.detach(), values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            "Gradients cannot flow through a StaticContiguousCache: it is written in place. For training use "
            "`DynamicCache` or no cache; where no gradients are wanted, wrap the call in `torch.no_grad()`."
        )


def _kind(states: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return states.dtype, states.device
