"""Sequences that are copied between caches, a batch row at a time."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.layer import StaticContiguousLayer
from hf_static_kv.cache.request import Fallback
from hf_static_kv.cache.storage import is_out_of_memory


class Row(NamedTuple):
    """A batch row of a cache, whose sequence begins at a position: after its padding."""

    cache: StaticContiguousCache
    number: int = 0
    start: int = 0
    # The first position of the row in each layer that keeps keys; (): as its cache says.
    oldest: Sequence[int] = ()

    def can_crop_to(self, length: int) -> bool:
        """Whether a copy can be cropped to its first `length` tokens."""
        layers = zip(self.cache.kv_layers, self.oldest or oldest_of(self.cache), strict=True)
        return all(
            oldest <= self.start + max(0, length - (layer.sliding_window or length) + 1)
            for layer, oldest in layers
        )


def oldest_of(cache: StaticContiguousCache) -> list[int]:
    """The first position that each layer with keys has."""
    return [layer.oldest for layer in cache.kv_layers]


def put_row(source: StaticContiguousCache, target: StaticContiguousCache, row: int) -> None:
    """Copy the one row of `source` to a row of `target`, whose layers keep all positions."""
    _copy(Row(source), Row(target, row), oldest_of(source), source.seq_len)


def fill(
    target: StaticContiguousCache,
    sources: Sequence[Row | None],
    starts: Sequence[int],
    length: int,
) -> None:
    """The rows of `target` become the first tokens of `sources`, from `starts` to `length`.

    None: the row has padding only.
    """
    target.reset()
    firsts = []  # of each layer
    for i, layer in enumerate(target.kv_layers):
        gaps = [_gap(row, start, i) for row, start in zip(sources, starts, strict=True)]
        firsts.append(layer.first_loaded(max(gaps), length))
        layer.fill(len(sources), firsts[i], length)  # from now on a position has a slot
    for number, (source, start) in enumerate(zip(sources, starts, strict=True)):
        _clear(Row(target, number), firsts, min(start, length))
        if source is not None:
            oldest = [max(0, first - start) for first in firsts]
            _copy(source, Row(target, number, start), oldest, length - start)


def _gap(row: Row | None, start: int, layer: int) -> int:
    """Where the sequence begins to be known, at `start` in another cache; 0: everywhere."""
    missing = 0
    if row is not None:
        missing = (row.oldest or oldest_of(row.cache))[layer] - row.start
    return start + missing if missing > 0 else 0


def _clear(row: Row, firsts: Sequence[int], end: int) -> None:
    """Padding is attended to with weight 0, and must be finite."""
    for layer, first in zip(row.cache.kv_layers, firsts, strict=True):
        if first < end:
            for states in layer.storage:
                states[row.number, :, first - layer.offset : end - layer.offset] = 0


def _copy(source: Row, target: Row, oldest: Sequence[int], length: int) -> None:
    """The tokens from `oldest` of each layer to `length`."""
    alike: dict[Any, list[Any]] = {}  # layers that are copied together
    layers = zip(source.cache.kv_layers, target.cache.kv_layers, oldest, strict=True)
    for theirs, own, first in layers:
        place = _slots(theirs, source, first, length), _slots(own, target, first, length)
        alike.setdefault(place, []).append((theirs.index, own.index))
    for ((group, *of_slots), (into, *to_slots)), indices in alike.items():
        of, to = map(_run, zip(*indices, strict=True))
        of_tokens = (of, source.number, slice(None), slice(*of_slots))
        to_tokens = (to, target.number, slice(None), slice(*to_slots))
        into.keys[to_tokens] = group.keys[of_tokens]
        into.values[to_tokens] = group.values[of_tokens]


def _slots(layer: StaticContiguousLayer, row: Row, first: int, end: int) -> tuple[Any, int, int]:
    """Where a layer has the tokens [first, end) of a row: the group, and the slots."""
    start = row.start - layer.offset
    return layer.group, start + first, start + end


def _run(numbers: tuple[int, ...]) -> Any:
    """An index that is no copy where the numbers follow one another."""
    run = range(numbers[0], numbers[0] + len(numbers))
    return slice(run.start, run.stop) if numbers == tuple(run) else list(numbers)


# --- storage of rows


def power_of_two(number: int) -> int:
    """That is at least this number."""
    return 1 << (number - 1).bit_length()


def num_rows(cache: StaticContiguousCache) -> int:
    return int(cache.kv_layers[0].max_batch_size)


def allocated(
    like: StaticContiguousCache, sizes: Sequence[tuple[int, int]], bound: int
) -> StaticContiguousCache:
    """Storage of the first of these sizes (max_cache_len, rows) that fits."""
    for max_cache_len, rows in sizes:
        if like.bytes_of_rows(max_cache_len, rows) <= bound:
            try:
                return like.for_rows(max_cache_len, rows)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
    length, rows = sizes[-1]
    raise Fallback(
        f"{rows} rows of {length} tokens, for calls of several threads, do not fit into {bound:,} "
        "bytes"
    )


def copy_rows(source: StaticContiguousCache, target: StaticContiguousCache) -> None:
    """All rows, to storage with as many or more, as long or longer."""
    for theirs, own in zip(source.storage_groups, target.storage_groups, strict=True):
        _, rows, _, slots, _ = theirs.keys.shape
        own.keys[:, :rows, :, :slots] = theirs.keys
        own.values[:, :rows, :, :slots] = theirs.values
