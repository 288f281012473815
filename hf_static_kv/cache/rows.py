"""Sequences that are copied between caches, a batch row at a time."""

from typing import Any

from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.layer import StaticContiguousLayer


def copy_row(
    source: StaticContiguousCache, row: int, length: int, target: StaticContiguousCache
) -> None:
    """The one sequence of `target` becomes the first `length` tokens of a row of `source`."""
    target.reset()
    firsts = [
        own.first_loaded(theirs.oldest, length)
        for theirs, own in zip(source.kv_layers, target.kv_layers, strict=True)
    ]
    for own, first in zip(target.kv_layers, firsts, strict=True):
        own.fill(1, first, length)  # now a position has a slot
    _copy(source, row, target, 0, firsts, length)


def put_row(source: StaticContiguousCache, target: StaticContiguousCache, row: int) -> None:
    """Copy the one sequence of `source` to a row of `target`, whose layers keep all positions."""
    _copy(source, 0, target, row, [layer.oldest for layer in source.kv_layers], source.seq_len)


def _copy(
    source: StaticContiguousCache, row: int,
    target: StaticContiguousCache, to_row: int, firsts: list[int], length: int,
) -> None:  # fmt: skip
    alike: dict[Any, list[Any]] = {}  # layers that are copied together
    for theirs, own, first in zip(source.kv_layers, target.kv_layers, firsts, strict=True):
        place = _place(theirs, first, length), _place(own, first, length)
        alike.setdefault(place, []).append((theirs.index, own.index))
    for ((group, *of_slots), (into, *to_slots)), indices in alike.items():
        of, to = map(_run, zip(*indices, strict=True))
        into.keys[to, to_row, :, slice(*to_slots)] = group.keys[of, row, :, slice(*of_slots)]
        into.values[to, to_row, :, slice(*to_slots)] = group.values[of, row, :, slice(*of_slots)]


def _place(layer: StaticContiguousLayer, first: int, length: int) -> tuple[Any, int, int]:
    """Where a layer has the positions [first, length): the group, and the slots."""
    return layer.group, first - layer.offset, length - layer.offset


def _run(numbers: tuple[int, ...]) -> Any:
    """An index that is no copy where the numbers follow one another."""
    run = range(numbers[0], numbers[0] + len(numbers))
    return slice(run.start, run.stop) if numbers == tuple(run) else list(numbers)
