"""Sequences of earlier calls, kept as copies while their caches serve other calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_static_kv.cache.blocks import BLOCK, BlockIndex
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.rows import Row, fill
from hf_static_kv.cache.storage import is_out_of_memory


@dataclass(eq=False)
class History:
    cache: StaticContiguousCache  # of one row, as long as its tokens
    origin: Any  # equal for two calls that may use each other's states


class Histories:
    """Copies, least recently used first."""

    def __init__(self) -> None:
        self._index: BlockIndex[History] = BlockIndex()

    def __iter__(self) -> Iterator[History]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return sum(history.cache.memory_bytes for history in self._index)

    def add(self, row: Row, ids: list[int], origin: Any, max_bytes: int) -> History | None:
        """Copy the first tokens of a row, which are `ids`; None: they are few, known, or do not fit.

        What begins like them and is shorter has no more use, if the copy can be cropped to it.
        """
        if len(ids) < BLOCK or self.longest(ids, origin)[1] == len(ids):
            return None
        needed = row.cache.bytes_of_rows(len(ids), 1, is_compact=True)
        if needed > max_bytes:  # before others are removed in its favour
            return None
        for shorter in self._index.beginnings(ids):
            if shorter.origin == origin and row.can_crop_to(shorter.cache.seq_len):
                self._index.remove(shorter)
        self.evict(max_bytes - needed)
        try:
            cache = row.cache.for_rows(len(ids), 1, is_compact=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return None
            raise
        fill(cache, [row], [0], len(ids))
        cache.remember(torch.tensor([ids]))
        self._index.add(history := History(cache, origin), ids)
        return history

    def longest(self, ids: Sequence[int], origin: Any) -> tuple[History | None, int]:
        """The copy with the longest beginning of `ids`, a block at least, and its length."""

        def fits(history: History, length: int) -> bool:
            return history.origin == origin and history.cache.can_crop_to(length)

        history, length = self._index.longest(ids, fits)
        if history is not None:
            self._index.touch(history)
        return history, length

    def evict(self, max_bytes: int) -> None:
        for history in self._index:
            if self.num_bytes <= max_bytes:
                break
            self._index.remove(history)

    def clear(self) -> None:
        self._index.clear()
