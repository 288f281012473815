"""Sequences that move between caches, a batch row at a time."""

from typing import Any

from hf_static_kv.cache.cache import StaticContiguousCache


def put_row(source: StaticContiguousCache, target: StaticContiguousCache, row: int) -> None:
    """Copy the one sequence of `source` to a row of `target`, whose layers keep all positions."""
    alike: dict[Any, list[Any]] = {}  # layers that are copied together
    for theirs, own in zip(source.kv_layers, target.kv_layers, strict=True):
        place = theirs.group, own.group, theirs.oldest, theirs.offset, theirs.length
        alike.setdefault(place, []).append((theirs.index, own.index))
    for (group, into, oldest, offset, length), indices in alike.items():
        of, to = map(_run, zip(*indices, strict=True))
        kept, slots = slice(oldest, length), slice(oldest - offset, length - offset)
        into.keys[to, row, :, kept] = group.keys[of, 0, :, slots]
        into.values[to, row, :, kept] = group.values[of, 0, :, slots]


def _run(numbers: tuple[int, ...]) -> Any:
    """An index that is no copy where the numbers follow one another."""
    run = range(numbers[0], numbers[0] + len(numbers))
    return slice(run.start, run.stop) if numbers == tuple(run) else list(numbers)


def take_row(
    source: StaticContiguousCache, row: int, length: int, target: StaticContiguousCache
) -> None:
    """The reverse: the sequence of `target` becomes the first `length` tokens of a row."""
    target.reset()
    for theirs, own in zip(source.kv_layers, target.kv_layers, strict=True):
        first = own.first_loaded(0, length)
        views = own.free_views(1, first, length)
        for states, into in zip(theirs.storage, views, strict=True):
            into.copy_(states[row : row + 1, :, first:length])
        own.fill(1, first, length)
