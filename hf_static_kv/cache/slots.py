"""The positions that one layer keeps, and the slots of the storage that hold them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_static_kv.cache.codes import decoded, encoded
from hf_static_kv.cache.storage import StorageGroup


class LayerSlots:
    """Keeps the positions from `oldest` to `length` - 1, with position p in slot p - `offset`.

    A full layer has a slot for every position: `oldest` and `offset` are 0. A
    compact layer has 2 * (window + SLACK) at most. If they are full, the newest
    positions move to slot 0. It keeps what the next token may see, and at least
    SLACK positions before that:

    ```
    slot          0   1   2   3   4   5   6   7        length = 10, sliding_window = 2, SLACK = 2
    before       [2] [3] [4] [5] [6] [7] [8] [9]       offset = oldest = 2
    after        [7] [8] [9] [ ] [ ] [ ] [ ] [ ]       offset = oldest = 7
    ```
    """

    def __init__(self, max_cache_len: int, sliding_window: int | None, is_compact: bool) -> None:
        self.max_cache_len = max_cache_len
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.is_compact = is_compact and self.is_sliding
        self.kv_dtype: str | None = None  # that its storage will have
        self.num_slots = max_cache_len
        self.length = self.offset = self.oldest = 0
        # Batch rows in use; -1 before allocation, as in transformers.
        self.batch_size = -1
        self.group: StorageGroup | None = None

    def use_storage(self, group: StorageGroup, index: int) -> None:
        self.group = group
        self.index = index
        self.shape = group.shape
        self.num_slots = group.keys.shape[3]
        self.dtype, self.value_dtype = group.dtypes
        self.device = group.keys.device
        self.batch_size = self.max_batch_size = group.keys.shape[1]
        self.is_initialized = True

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """All slots: keys and values [B, H, S, D], or their codes."""
        assert self.group is not None
        return self.group.keys[self.index], self.group.values[self.index]

    def _views(self, first: int, end: int, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, n, D] at the positions [first, end), or their codes."""
        assert self.group is not None
        rows = self.batch_size if batch_size is None else batch_size
        return self.group.views(self.index, rows, first - self.offset, end - first)

    def stored(self) -> tuple[Tensor, Tensor]:
        """What the storage has of the sequence: keys and values [B, H, n, D], or their codes."""
        return self._views(self.oldest, self.length)

    def as_stored(self, states: Tensor) -> Tensor:
        """States as the storage has them."""
        return states if self.shape.kv_dtype is None else encoded(states)

    def as_read(self, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of what the storage has."""
        keys, values = views
        if self.shape.kv_dtype is None:
            return keys, values
        return decoded(keys, self.dtype), decoded(values, self.value_dtype)

    def _first_visible(self) -> int:
        """The oldest position that the next token may see."""
        window = self.sliding_window
        return 0 if window is None else max(0, self.length - window + 1)

    def _first_to_keep(self) -> int:
        """The oldest position that stays when half of the slots, if possible, are freed."""
        kept = max(self.num_slots // 2 - 1, self.sliding_window or 0)
        return max(self.oldest, self.length - kept)

    @property
    def num_croppable(self) -> int:
        """The most tokens that `crop` can remove, beside all of them."""
        return self._first_visible() - self.oldest if self.oldest else self.length

    def reserve(self, tokens: int) -> bool:
        """Whether the storage can take so many tokens, if need be after compacting."""
        if self.length - self.offset + tokens > self.num_slots:
            first = self._first_to_keep()
            if self.length - first + tokens > self.num_slots:
                return False
            self.compact(first)
        return True

    def compact(self, first: int) -> None:
        """Move the positions from `first` on to slot 0, and drop those before."""
        newest = self._views(first, self.length)
        if first - self.offset < self.length - first:  # from and to overlap
            newest = newest[0].clone(), newest[1].clone()
        self._replace(newest)

    def _replace(self, newest: Sequence[Tensor]) -> None:
        """Keep only these keys and values [B, H, n, D] of the newest positions, from slot 0 on."""
        kept = newest[0].shape[2]
        # First: what is overwritten no longer counts.
        self.oldest = self.length - kept
        targets = self._views(self.offset, self.offset + kept)
        for target, states in zip(targets, newest, strict=True):
            target.copy_(states)
        self.offset = self.oldest

    def first_loaded(self, first: int, length: int) -> int:
        """The oldest position that an empty layer takes from a file of [first, length)."""
        return max(first, length - self.num_slots)

    def free_views(self, batch_size: int, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, n, D] of an empty layer, to write before `fill`."""
        slot = 0 if self.is_compact else first
        return self._views(slot, slot + length - first, batch_size)

    def fill(self, batch_size: int, first: int, length: int) -> None:
        """Count the positions [first, length) that were written to `free_views`."""
        self.batch_size = batch_size
        self.length = length
        self.oldest = first
        self.offset = first if self.is_compact else 0

    def select_rows(self, indices: Tensor, scratch: Sequence[Tensor]) -> None:
        before = self.stored()
        self.batch_size = len(indices)
        after = self.stored()
        for states, target, buffer in zip(before, after, scratch, strict=True):
            rows = buffer[:, :, : self.length - self.oldest]
            target.copy_(torch.index_select(states, 0, indices, out=rows))
