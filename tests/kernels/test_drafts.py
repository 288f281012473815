"""Drafts against a naive reading of the text, one row and one token at a time."""

import random

import pytest
import torch

from hf_static_kv.kernels.drafts import (
    MILLION,
    DraftState,
    accept_drafts,
    append_draft,
    find_drafts,
    note_token,
    pass_draft,
    pass_newest,
    place_drafts,
    report,
)
from hf_static_kv.kernels.select_greedy import GreedyState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEVER = 1 << 40


def new_state(rows, capacity, num_drafts, ends=()):
    def zeros(*shape):
        return torch.zeros(*shape, dtype=torch.int64, device=DEVICE)

    selection = GreedyState(
        sequences=zeros(rows, capacity + 1 + num_drafts),
        token=zeros(rows, 1),
        unfinished=torch.ones(rows, 1, dtype=torch.bool, device=DEVICE),
        eos=torch.tensor([[*ends, -1]] * rows, device=DEVICE),
        pad=zeros(rows),
        is_over=torch.zeros((), dtype=torch.bool, device=DEVICE),
        last=zeros(rows) + capacity,
        counts=zeros(rows) + 1,
        report=zeros(rows),
    )
    return DraftState(
        capacity,
        selection,
        lengths=zeros(rows),
        ends=zeros(rows),
        first=zeros(rows),
        drafts=zeros(rows, num_drafts),
        found=zeros(rows),
        rate=torch.zeros(rows, device=DEVICE),
        report=zeros(3, rows),
    )


def put(state, row, tokens, first=0):
    """The row holds these tokens, from position `first` on."""
    tokens = torch.tensor(tokens, device=DEVICE)
    state.selection.sequences[row] = 7  # what is not known must not be looked up
    state.selection.sequences[row, first : first + len(tokens)] = tokens
    state.selection.token[row] = tokens[-1]
    state.lengths[row] = first + len(tokens) - 1
    state.first[row] = first


def naive_drafts(tokens, size, number):
    """The draft after `tokens`, a list; none if no token came before."""
    best = None
    for j in range(len(tokens) - 1):
        match = 0
        while match < min(size, j + 1) and tokens[j - match] == tokens[-1 - match]:
            match += 1
        if match and (best is None or match >= best[0]):
            best = match, j
    if best is None:
        return []
    text = list(tokens)
    for i in range(number):
        text.append(text[best[1] + 1 + i])
    return text[len(tokens) :]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(20))
def test_the_longest_and_newest_match(size, seed):
    rng = random.Random(seed)
    rows = rng.randrange(1, 5)
    number = rng.randrange(1, 6)
    state = new_state(rows, capacity=40, num_drafts=number)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(1, 30))] for _ in range(rows)]
    for row, text in enumerate(texts):
        put(state, row, text, first=rng.randrange(0, 9))
    find_drafts(state, size)
    for row, text in enumerate(texts):
        expected = naive_drafts(text, size, number)
        assert state.found[row] == len(expected)
        if expected:
            assert state.drafts[row].tolist() == expected


def test_text_before_a_row_begins_is_not_looked_up():
    """
    row 0    7 7 7 | 1 2 7        the 7s before it are padding
    """
    state = new_state(1, capacity=10, num_drafts=2)
    put(state, 0, [1, 2, 7], first=3)
    find_drafts(state, 2)
    assert state.found.tolist() == [0]


def test_tokens_stand_at_the_end_of_a_pass():
    """
    row 0    newest 5, drafts 1 2 3            [5 1 2 3]
    row 1    one more position                 [. . 5 1]   (the token at `last` is selected, not passed)
    row 2    has ended                         [. . . .]
    row 3    no drafts                         [. . . 5]
    """
    state = new_state(4, capacity=20, num_drafts=3)
    for row in range(4):
        put(state, row, [4, 4, 5])
    state.drafts.copy_(torch.tensor([1, 2, 3]))
    state.found.copy_(torch.tensor([3, 3, 3, 0]))
    state.selection.last[1] = 2 + 2
    state.selection.unfinished[2] = False
    tokens = torch.zeros(4, 4, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    place_drafts(state, tokens, counts)
    assert counts.tolist() == [4, 2, 0, 1]
    assert tokens[0].tolist() == [5, 1, 2, 3]
    assert tokens[1, 2:].tolist() == [5, 1]
    assert tokens[3, 3:].tolist() == [5]


def naive_accept(drafts, selected, ends, room):
    """The tokens that a row gets; `room` is how many positions are left up to `last`."""
    new = []
    for i, token in enumerate(selected):
        new.append(token)
        is_wrong = i == len(drafts) or drafts[i] != token
        if token in ends or len(new) == room or is_wrong:
            break
    return new


@pytest.mark.parametrize("seed", range(40))
def test_drafts_count_up_to_the_first_wrong_one(seed):
    rng = random.Random(seed)
    rows, number, capacity = rng.randrange(1, 5), rng.randrange(1, 6), 30
    ends = (8, 9)
    state = new_state(rows, capacity, number, ends)
    texts = [[rng.randrange(5) for _ in range(rng.randrange(1, 9))] for _ in range(rows)]
    rooms = [rng.choice([1, 2, 3, 20]) for _ in range(rows)]
    has_ended = [rng.random() < 0.2 for _ in range(rows)]
    drafts = [[rng.randrange(3, 10) for _ in range(number)] for _ in range(rows)]
    for row, text in enumerate(texts):
        put(state, row, text)
        state.drafts[row] = torch.tensor(drafts[row])
        state.found[row] = number
        state.selection.last[row] = len(text) - 1 + rooms[row]
        state.selection.unfinished[row] = not has_ended[row]
    tokens = torch.zeros(rows, number + 1, dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    place_drafts(state, tokens, counts)
    state.lengths.add_(counts)  # as the pass does
    selected = torch.full_like(tokens, 1)
    expected = []
    for row in range(rows):
        used = int(counts[row])
        own = drafts[row][: max(0, used - 1)]
        right = rng.randrange(len(own) + 1)
        chosen = [*own[:right], *(rng.randrange(3, 10) for _ in range(used - right))]
        if used:
            selected[row, -used:] = torch.tensor(chosen)
        expected.append([] if has_ended[row] else naive_accept(own, chosen, ends, rooms[row]))
    accept_drafts(selected, tokens, counts, state)
    report(state)
    for row, (text, new) in enumerate(zip(texts, expected, strict=True)):
        is_over = has_ended[row] or new[-1] in ends or len(new) == rooms[row]
        length = len(text) - 1 + len(new)
        assert state.lengths[row] == length
        assert state.selection.sequences[row, : length + 1].tolist() == [*text, *new]
        assert state.selection.token[row] == (new or text)[-1]
        assert bool(state.selection.unfinished[row]) is not is_over
        assert state.selection.counts[row] == (not is_over)
        assert state.report[:2, row].tolist() == [length, not is_over]
    assert bool(state.selection.is_over) is not bool(state.selection.unfinished.any())


def test_the_rate_of_right_drafts():
    """It moves by an eighth towards the part of the drafts that is right."""
    state = new_state(1, capacity=20, num_drafts=4)
    put(state, 0, [5])
    state.found.fill_(4)

    def rate_after(is_right):
        state.drafts.fill_(5 if is_right else 6)
        note_token(state)
        report(state)
        return state.report[2, 0] / MILLION

    assert [rate_after(True) for _ in range(2)] == pytest.approx([1 / 8, 15 / 64], abs=1e-6)
    assert rate_after(False) == pytest.approx(105 / 512, abs=1e-6)
    state.found.zero_()  # nothing matches: what `drafts` still holds is no draft
    assert rate_after(True) == pytest.approx(735 / 4096, abs=1e-6)


def test_an_assistant_reads_the_newest_tokens_and_appends_drafts():
    """
    row 0    1 2 3 4 5, of which it is given 3 4 5; its own cache goes on at position 2
    row 1    begins at position 4: [. . 8]
    row 2    has ended
    """
    state = new_state(3, capacity=20, num_drafts=3)
    put(state, 0, [1, 2, 3, 4, 5])
    put(state, 1, [8], first=4)
    put(state, 2, [1, 2, 3, 4])
    state.selection.unfinished[2] = False
    tokens, counts, lengths = torch.zeros(3, 3), torch.zeros(3), torch.zeros(3)
    tokens, counts, lengths = (own.long().to(DEVICE) for own in (tokens, counts, lengths))
    state.found.fill_(2)
    pass_newest(state, tokens, counts, lengths)
    assert counts.tolist() == [3, 1, 0]
    assert lengths[:2].tolist() == [2, 4]
    assert tokens[0].tolist() == [3, 4, 5]
    assert tokens[1, 2:].tolist() == [8]
    assert state.found.tolist() == [0, 0, 0]
    for number in (11, 12):
        append_draft(state, torch.full_like(state.selection.token, number))
    assert state.drafts[:, :2].tolist() == [[11, 12]] * 3
    pass_draft(state, tokens[:, :1], counts)
    assert tokens[:, 0].tolist() == [12, 12, 12]
    assert counts.tolist() == [1, 1, 0]
