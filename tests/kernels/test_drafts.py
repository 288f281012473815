"""Drafts, plainly and by kernels, against a naive reading of the text, one row and one token at a time."""

import random
from types import SimpleNamespace

import pytest
import torch

from hf_static_kv.kernels import drafts
from hf_static_kv.kernels.drafts import MILLION, DraftedPass, DraftState
from hf_static_kv.kernels.select_greedy import GreedyState
from tests.conftest import triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 6  # columns before and after `sequences`, which nobody may write
PLAIN = SimpleNamespace(
    place_drafts=drafts.place_drafts_plain,
    end_pass=drafts.end_pass_plain,
    place_for_assistant=drafts.place_for_assistant_plain,
    append_draft=drafts.append_draft_plain,
)


def kernels(monkeypatch):
    """Which compare few positions at once, so that a text has several tiles."""
    module = triton_module("hf_static_kv.kernels.drafts_triton")
    monkeypatch.setattr(module, "_TILE", 16)

    def end_pass(state, size, drafted=None):
        module.end_pass_triton(state, size, drafted, drafts._NEWEST, MILLION)

    return SimpleNamespace(
        place_drafts=module.place_drafts_triton,
        end_pass=end_pass,
        place_for_assistant=module.place_for_assistant_triton,
        append_draft=module.append_draft_triton,
    )


@pytest.fixture(params=["plain", "triton"])
def ops(request, monkeypatch):
    return PLAIN if request.param == "plain" else kernels(monkeypatch)


def new_state(rows, capacity, num_drafts, ends=()):
    def zeros(*shape):
        return torch.zeros(*shape, dtype=torch.int64, device=DEVICE)

    around = zeros(rows, capacity + 1 + num_drafts + 2 * GUARD) - 1
    around[:, GUARD:-GUARD] = 0
    selection = GreedyState(
        sequences=around[:, GUARD:-GUARD],
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


def new_pass(rows, num_tokens, more=0):
    """Tokens [B, q] and counts [B]."""
    tokens = torch.zeros(rows, num_tokens + more, dtype=torch.int64, device=DEVICE)
    return tokens, tokens[:, 0].clone()


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
def test_the_longest_and_newest_match(ops, size, seed):
    rng = random.Random(seed)
    rows = rng.randrange(1, 5)
    number = rng.randrange(1, 6)
    state = new_state(rows, capacity=40, num_drafts=number)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(1, 30))] for _ in range(rows)]
    for row, text in enumerate(texts):
        put(state, row, text, first=rng.randrange(0, 9))
    ops.end_pass(state, size)
    for row, text in enumerate(texts):
        expected = naive_drafts(text, size, number)
        assert state.found[row] == len(expected)
        if expected:
            assert state.drafts[row].tolist() == expected


def test_text_before_a_row_begins_is_not_looked_up(ops):
    """
    row 0    7 7 7 | 1 2 7        the 7s before it are padding
    """
    state = new_state(1, capacity=10, num_drafts=2)
    put(state, 0, [1, 2, 7], first=3)
    ops.end_pass(state, 2)
    assert state.found.tolist() == [0]


def test_tokens_stand_at_the_end_of_a_pass(ops):
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
    state.found.copy_(torch.tensor([3, 9, 3, 0]))  # more than there are: after trials alone
    state.selection.last[1] = 2 + 2
    state.selection.unfinished[2] = False
    tokens, counts = new_pass(4, 4)
    ops.place_drafts(state, tokens, counts)
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
def test_drafts_count_up_to_the_first_wrong_one(ops, seed):
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
    tokens, counts = new_pass(rows, number + 1)
    ops.place_drafts(state, tokens, counts)
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
    ops.end_pass(state, 2, DraftedPass(selected, tokens, counts))
    for row, (text, new) in enumerate(zip(texts, expected, strict=True)):
        is_over = has_ended[row] or new[-1] in ends or len(new) == rooms[row]
        length = len(text) - 1 + len(new)
        assert state.lengths[row] == length
        assert state.selection.sequences[row, : length + 1].tolist() == [*text, *new]
        assert state.selection.token[row] == (new or text)[-1]
        assert bool(state.selection.unfinished[row]) is not is_over
        assert state.selection.counts[row] == (not is_over)
        assert state.report[:2, row].tolist() == [length, not is_over]
        following = naive_drafts([*text, *new], 2, number)
        assert state.found[row] == len(following)
        if following:
            assert state.drafts[row].tolist() == following


def test_the_rate_of_right_drafts(ops):
    """It moves by an eighth towards the part of the drafts that is right."""
    state = new_state(1, capacity=20, num_drafts=4)

    def rate_after(is_right, found=4):
        state.drafts.fill_(5 if is_right else 6)
        state.found.fill_(found)
        put(state, 0, [5])
        ops.end_pass(state, 1)
        return state.report[2, 0].item() / MILLION

    assert [rate_after(True) for _ in range(2)] == pytest.approx([1 / 8, 15 / 64], abs=1e-6)
    assert rate_after(False) == pytest.approx(105 / 512, abs=1e-6)
    # Nothing matched: what `drafts` still holds is no draft.
    assert rate_after(True, found=0) == pytest.approx(735 / 4096, abs=1e-6)


def test_the_rate_after_a_pass_with_drafts(ops):
    """
    row 0    1 of 3 drafts is right: 1 of 2 that were looked at
    row 1    all are right
    row 2    had none
    """
    state = new_state(3, capacity=20, num_drafts=3)
    for row in range(3):
        put(state, row, [5])
    state.drafts.fill_(6)
    state.found.copy_(torch.tensor([3, 3, 0]))
    tokens, counts = new_pass(3, 4)
    ops.place_drafts(state, tokens, counts)
    state.lengths.add_(counts)
    selected = torch.full_like(tokens, 6)
    selected[0, 1] = 7
    ops.end_pass(state, 0, DraftedPass(selected, tokens, counts))
    assert (state.rate * 8).tolist() == pytest.approx([1 / 2, 1, 0])
    assert state.lengths.tolist() == [2, 4, 1]


def test_an_assistant_reads_the_newest_tokens_and_appends_drafts(ops):
    """
    row 0    1 2 3 4 5, of which it is given 3 4 5; its own cache goes on at position 2
    row 1    begins at position 17 of 20: [. . 8]
    row 2    has ended at the capacity
    """
    state = new_state(3, capacity=20, num_drafts=3)
    put(state, 0, [1, 2, 3, 4, 5])
    put(state, 1, [8], first=17)
    put(state, 2, [1, 2, 3, 4], first=16)
    state.selection.unfinished[2] = False
    tokens, counts = new_pass(3, 3)
    lengths = torch.zeros_like(counts)
    state.found.fill_(2)
    ops.place_for_assistant(state, tokens, counts, lengths, 20)
    assert counts.tolist() == [3, 1, 0]
    assert lengths.tolist() == [2, 17, 19]
    assert tokens[0].tolist() == [3, 4, 5]
    assert tokens[1, 2:].tolist() == [8]
    assert state.found.tolist() == [0, 0, 0]
    for number in (11, 12):
        ops.append_draft(state, torch.full_like(counts, number))
    assert state.drafts[:, :2].tolist() == [[11, 12]] * 3
    lengths.copy_(torch.tensor([5, 20, 20]))
    ops.place_for_assistant(state, tokens[:, :1], counts, lengths, 20)
    assert tokens[:, 0].tolist() == [12, 12, 12]
    assert counts.tolist() == [1, 1, 0]
    assert lengths.tolist() == [5, 19, 19]  # what would be beyond the end
    for number in (13, 14, 15):  # more than there is room for
        ops.append_draft(state, torch.full_like(counts, number))
    assert state.drafts.tolist() == [[11, 12, 15]] * 3
    assert state.found.tolist() == [3, 3, 3]


# --- kernel and plain twin


def random_state(rng, lengths):
    """Rows of these lengths, or of the positions around the capacity and around 0."""
    rows, number, capacity = rng.randrange(1, 4), rng.randrange(1, 6), rng.randrange(3, 50)
    state = new_state(rows, capacity, number, ends=(2, 3))
    state.selection.sequences.random_(0, 3)
    state.selection.token.random_(0, 3)
    state.selection.unfinished.copy_(torch.rand(rows, 1) < 0.8)
    state.selection.last.random_(0, capacity + 3)
    state.drafts.random_(0, 3)
    for row in range(rows):
        state.lengths[row] = rng.choice(lengths(capacity, number))
        state.first[row] = rng.randrange(-1, capacity + 2)
        state.found[row] = rng.randrange(-1, number + 3)
    state.ends.copy_(state.lengths - 1)
    state.rate.uniform_()
    return state


def in_range(capacity, number):
    return [0, 1, number, capacity // 2, capacity - 1, capacity]


def out_of_range(capacity, number):
    """As a pass without its kernels leaves them."""
    return [-number - 1, -1, 0, 1, capacity + number, capacity + number + 1, capacity + 9]


def ended_pass(ops, seed, lengths):
    """What a pass leaves, of one token or with drafts, by values that the seed draws."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    state = random_state(rng, lengths)
    tokens, counts = new_pass(*state.drafts.shape, more=1)
    ops.place_drafts(state, tokens, counts)
    if lengths is in_range:
        state.lengths.add_(counts)
    drafted = None
    if seed % 3:
        selected = tokens.roll(-1, 1)
        selected[:, rng.randrange(tokens.shape[1])] = seed % 4
        drafted = DraftedPass(selected, tokens, counts)
    ops.end_pass(state, rng.choice([0, 1, 2, 4]), drafted)
    around = state.selection.sequences._base
    assert (around[:, :GUARD] == -1).all()
    assert (around[:, -GUARD:] == -1).all()
    return [tokens, counts, *state.selection, *state[2:-1], state.report[:2]]


@pytest.mark.parametrize("lengths", [in_range, out_of_range])
@pytest.mark.parametrize("seed", range(25))
def test_kernels_do_what_the_plain_functions_do(monkeypatch, seed, lengths):
    """Also with values that only trials have. A CPU refuses an index that is out of bounds."""
    plain = ended_pass(PLAIN, seed, lengths)
    by_kernels = ended_pass(kernels(monkeypatch), seed, lengths)
    for one, other in zip(plain, by_kernels, strict=True):
        torch.testing.assert_close(other, one)  # of integers exactly


def test_nothing_is_written_while_kernels_are_only_compiled(ops):
    """The pass has not moved `lengths` on: its tokens would stand before the text."""
    state = new_state(1, capacity=30, num_drafts=10)
    put(state, 0, [1, 2, 1])
    state.drafts.fill_(0)
    state.found.fill_(10)
    tokens, counts = new_pass(1, 11)
    ops.place_drafts(state, tokens, counts)
    before = state.selection.sequences.clone()
    ops.end_pass(state, 2, DraftedPass(torch.full_like(tokens, 3), tokens, counts))
    assert torch.equal(state.selection.sequences, before)


def passed_to_assistant(ops, seed):
    """What an assistant is given, and what it leaves, by values that the seed draws."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    state = random_state(rng, rng.choice([in_range, out_of_range]))
    rows = len(state.drafts)
    tokens, counts = new_pass(rows, rng.choice([1, 2, 5]))
    own = torch.tensor([rng.randrange(-3, state.capacity + 3) for _ in range(rows)], device=DEVICE)
    ops.place_for_assistant(state, tokens, counts, own, state.capacity)
    assert (own >= 0).all()
    assert (own < state.capacity).all()
    ops.append_draft(state, tokens[:, 0].clone())
    return [tokens, counts, own, state.drafts, state.found]


@pytest.mark.parametrize("seed", range(15))
def test_kernels_give_an_assistant_what_the_plain_functions_give(monkeypatch, seed):
    plain = passed_to_assistant(PLAIN, seed)
    by_kernels = passed_to_assistant(kernels(monkeypatch), seed)
    for one, other in zip(plain, by_kernels, strict=True):
        assert torch.equal(one, other)
