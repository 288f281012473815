"""Finds sequences of tokens by how they begin, in blocks of hashed ids."""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
BLOCK = 16  # fewer tokens are computed as fast as they are copied


class BlockIndex(Generic[T]):
    """Things by the ids that they begin with, least recently used first.

    A hash stands for a block and all blocks before it: the longest known beginning of a prompt is
    found by one look at each of its blocks, however many sequences there are.

    >>> index = BlockIndex()
    >>> index.add("a", range(100)), index.add("b", [*range(50), 7])
    (None, None)
    >>> index.longest([*range(60), 7], lambda thing, length: True)
    ('a', 60)
    """

    def __init__(self) -> None:
        self._ids: dict[T, list[int]] = {}
        self._by_hash: dict[int, dict[T, None]] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._ids))

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, thing: T, ids: Sequence[int]) -> None:
        self._ids[thing] = list(ids)
        for key in _hashes(ids):
            self._by_hash.setdefault(key, {})[thing] = None

    def remove(self, thing: T) -> None:
        for key in _hashes(self._ids.pop(thing)):
            del self._by_hash[key][thing]
            if not self._by_hash[key]:
                del self._by_hash[key]

    def touch(self, thing: T) -> None:
        """It is the most recently used one."""
        self._ids[thing] = self._ids.pop(thing)

    def longest(self, ids: Sequence[int], fits: Callable[[T, int], bool]) -> tuple[T | None, int]:
        """The thing with the longest beginning of `ids`, a block at least, and its length.

        `fits(thing, length)` tells whether that thing will do.
        """
        hashes = list(_hashes(ids))
        refused: set[T] = set()  # fewer blocks are of the same length
        for number in range(len(hashes), 0, -1):
            lengths = {
                # 0: two hashes are equal by chance.
                thing: common_length(self._ids[thing], ids, number * BLOCK)
                for thing in self._by_hash.get(hashes[number - 1], {})
                if thing not in refused
            }
            for thing in sorted(filter(lengths.get, lengths), key=lambda thing: -lengths[thing]):
                if fits(thing, lengths[thing]):
                    return thing, lengths[thing]
                refused.add(thing)
        return None, 0

    def beginnings(self, ids: Sequence[int]) -> list[T]:
        """Things whose ids are a beginning of these, or all of them."""
        first = next(_hashes(ids), None)
        near = [] if first is None else list(self._by_hash.get(first, {}))
        return [thing for thing in near if self._ids[thing] == list(ids[: len(self._ids[thing])])]

    def clear(self) -> None:
        self._ids.clear()
        self._by_hash.clear()


def _hashes(ids: Sequence[int]) -> Iterator[int]:
    key = 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, *ids[end - BLOCK : end]))
        yield key


def common_length(known: Sequence[int], ids: Sequence[int], length: int = 0) -> int:
    """How many ids are equal, if the first `length` are; else 0."""
    if list(known[:length]) != list(ids[:length]):
        return 0
    while length < min(len(known), len(ids)) and known[length] == ids[length]:
        length += 1
    return length
