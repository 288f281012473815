"""Sequences by their beginnings, against a comparison with all of them."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from hf_static_kv.cache.blocks import BLOCK, BlockIndex

# Few ids, many blocks: beginnings are often shared.
BLOCKS = st.lists(st.sampled_from([[1] * BLOCK, [2] * BLOCK]), max_size=4)
SEQUENCES = st.builds(lambda blocks, rest: [*chain(*blocks), *rest], BLOCKS, st.lists(st.just(3)))


def common(first, second):
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@given(st.lists(SEQUENCES, max_size=6), SEQUENCES, st.sets(st.integers(0, 5)))
def test_the_longest_is_found_and_what_is_removed_is_not(sequences, ids, removed):
    index = BlockIndex()
    for number, sequence in enumerate(sequences):
        index.add(number, sequence)
    for number in removed & set(range(len(sequences))):
        index.remove(number)
    left = {n: common(sequence, ids) for n, sequence in enumerate(sequences) if n not in removed}
    longest = max(left.values(), default=0)
    thing, length = index.longest(ids, lambda thing, length: True)
    assert length == (longest if longest >= BLOCK else 0)
    assert thing is None or left[thing] == length
    whole = [n for n in left if BLOCK <= len(sequences[n]) == left[n]]
    assert sorted(index.beginnings(ids)) == whole


def test_one_that_does_not_fit_leaves_the_next_longest():
    index = BlockIndex()
    index.add("long", range(100))
    index.add("short", range(40))
    assert index.longest(range(200), lambda thing, length: thing == "short") == ("short", 40)
    assert index.longest(range(200), lambda thing, length: length < 40) == (None, 0)


def test_one_that_does_not_fit_is_asked_once():
    """Histories of a model as it was before share all blocks of a long prompt."""
    index, asked = BlockIndex(), []
    for name in "ab":
        index.add(name, range(100))
    assert index.longest(range(100), lambda thing, length: asked.append(thing)) == (None, 0)
    assert asked == ["a", "b"]


def test_the_least_recently_used_comes_first():
    index = BlockIndex()
    for name in "abc":
        index.add(name, range(20))
    index.touch("a")
    assert list(index) == ["b", "c", "a"]
    index.clear()
    assert (len(index), index._by_hash) == (0, {})
