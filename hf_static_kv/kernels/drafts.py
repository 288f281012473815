"""Drafted tokens of each batch row: found in its own text, passed to the model, and accepted as far as
the model selects the same.

find_drafts      what followed the same text before (prompt lookup)

    [ ... a b c d e f ... a b ]          a b is the newest text, so c d e f ... is the draft
          j             newest

    match(j)   = how many tokens up to j equal those up to the newest, at most `size`
    j          = the position of the longest match, and of equally long ones the newest
    drafts[i]  = sequences[j + 1 + i % (newest - j)]      beyond its end the text repeats itself
    found      = K, or 0 if nothing matches

place_drafts     the tokens of the next pass

    [ padding | newest token, drafts ]   counts[b] = 1 + min(found, last - newest - 1), or 0 after an end

accept_drafts    the tokens that the pass selects, as far as the drafts before them are right

    selected[b, t]   follows token t of the pass; it counts if drafts 1 ... t are right,
                     and if none before it is an end token or at the position `last`

After each pass `rate` moves towards the part of the drafts that was right, and `report` is written for
the host. A row that has ended takes no part.

pass_newest, pass_draft, append_draft      an assistant, another model, drafts one token a pass

    selected, tokens: [B, q]   counts: [B]   q = K + 1
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_static_kv.kernels.select_greedy import GreedyState

_NEWEST = 0.125  # the weight of the newest pass in `rate`: see decoding/speculation.py
MILLION = 1_000_000


class DraftState(NamedTuple):
    """The tensors of decoding with drafts; all but `first` are written in place."""

    capacity: int  # S

    selection: GreedyState
    # [B], the position of the newest token, whose states are not written; of a row that has ended at the
    # capacity one less, as no position is there.
    lengths: Tensor
    ends: Tensor  # [B], the position of the newest token
    first: Tensor  # [B], the position of the first token that is known
    drafts: Tensor  # [B, K]
    found: Tensor  # [B], how many drafts there are
    rate: Tensor  # [B], float32
    report: Tensor  # [3, B]: `ends`, whether unfinished, millionths of `rate`


def find_drafts(state: DraftState, size: int) -> None:
    """Find `drafts` for the next pass, after texts of at most `size` tokens."""
    sequences = state.selection.sequences
    position = torch.arange(sequences.shape[1], device=sequences.device)
    newest = state.lengths.clamp(max=len(position) - 1)[:, None]
    first = state.first[:, None]
    matches = torch.zeros_like(sequences)
    is_equal = position < newest
    for back in range(size):
        token = sequences.gather(1, (newest - back).clamp(min=0))
        is_equal = is_equal & (sequences.roll(back, 1) == token) & (position - back >= first)
        matches += is_equal
    score = torch.where(matches > 0, matches * len(position) + position, -1)
    best = score.argmax(dim=1, keepdim=True)
    distance = (newest - best).clamp(min=1)
    ahead = torch.arange(state.drafts.shape[1], device=sequences.device) % distance
    state.drafts.copy_(sequences.gather(1, (best + 1 + ahead).clamp(max=len(position) - 1)))
    state.found.copy_((score.amax(dim=1) >= 0) * state.drafts.shape[1])


def pass_newest(state: DraftState, tokens: Tensor, counts: Tensor, lengths: Tensor) -> None:
    """The next pass of an assistant has the newest tokens of each row, again or for the first time; no
    draft is there yet. `lengths` are those of its own cache.
    """
    num_tokens = tokens.shape[1]
    known = (state.lengths + 1 - state.first).clamp(min=0, max=num_tokens)
    counts.copy_(known * state.selection.unfinished[:, 0])
    lengths.copy_(state.lengths + 1 - counts)
    at = state.lengths[:, None] + 1 - num_tokens
    at = at + torch.arange(num_tokens, device=tokens.device)
    tokens.copy_(state.selection.sequences.gather(1, at.clamp(min=0)))
    state.found.zero_()


def pass_draft(state: DraftState, tokens: Tensor, counts: Tensor) -> None:
    """The next pass of an assistant has the newest draft."""
    tokens.copy_(state.drafts.gather(1, (state.found - 1).clamp(min=0)[:, None]))
    counts.copy_(state.selection.unfinished[:, 0])


def append_draft(state: DraftState, token: Tensor) -> None:
    """An assistant has drafted one more `token` [B, 1]."""
    at = state.found.clamp(max=state.drafts.shape[1] - 1)[:, None]
    state.drafts.scatter_(1, at, token)
    state.found.add_(1)


def place_drafts(state: DraftState, tokens: Tensor, counts: Tensor) -> None:
    """Write the `tokens` of the next pass, and how many each row has."""
    selection = state.selection
    last = selection.last.clamp(max=state.capacity)
    most = (last - state.lengths - 1).clamp(min=0)
    counts.copy_((1 + torch.minimum(state.found, most)) * selection.unfinished[:, 0])
    both = torch.cat([selection.token, state.drafts], dim=1)  # [B, q]
    at = torch.arange(tokens.shape[1], device=tokens.device) - tokens.shape[1] + counts[:, None]
    tokens.copy_(both.gather(1, at.clamp(min=0)))


def accept_drafts(selected: Tensor, tokens: Tensor, counts: Tensor, state: DraftState) -> None:
    """Append the tokens of a pass that count; `lengths` has been moved on by `counts`."""
    _, token, unfinished, eos, _, is_over, last, next_counts, _ = state.selection
    sequences = state.selection.sequences
    num_tokens = tokens.shape[1]
    t = torch.arange(num_tokens, device=tokens.device)
    at = t + num_tokens - counts[:, None]
    chosen = selected.gather(1, at.clamp(max=num_tokens - 1))
    drafted = tokens.gather(1, (at + 1).clamp(max=num_tokens - 1))
    is_right = (chosen == drafted) & (t + 1 < counts[:, None])
    num_right = is_right.long().cumprod(dim=1).sum(dim=1)
    start = state.lengths - counts
    position = start[:, None] + 1 + t
    is_end = (chosen[..., None] == eos[:, None]).any(dim=-1) | (position >= last[:, None])
    ends_before = is_end.long().cumsum(dim=1) - is_end.long()
    is_new = (t <= num_right[:, None]) & (ends_before == 0) & unfinished
    count = is_new.sum(dim=1)
    # Beyond the end in trials alone.
    position = position.clamp(max=sequences.shape[1] - 1)
    sequences.scatter_(1, position, torch.where(is_new, chosen, sequences.gather(1, position)))
    newest = chosen.gather(1, (count - 1).clamp(min=0)[:, None])
    token.copy_(torch.where(unfinished, newest, token))
    state.lengths.copy_(start + count)
    _note_hits(state, num_right, num_right < counts - 1)
    unfinished.logical_and_(~(is_new & is_end).any(dim=1, keepdim=True))
    is_over.copy_(~unfinished.any())
    next_counts.copy_(unfinished[:, 0])


def note_token(state: DraftState) -> None:
    """A pass of one token has selected the next: whether the first draft is that one."""
    is_right = (state.drafts[:, 0] == state.selection.token[:, 0]) & (state.found > 0)
    _note_hits(state, is_right.long(), ~is_right)


def _note_hits(state: DraftState, hits: Tensor, has_missed: Tensor) -> None:
    part = hits / (hits + has_missed.long()).clamp(min=1)
    state.rate.lerp_(part.float(), _NEWEST)


def report(state: DraftState) -> None:
    """Write `report`."""
    torch.maximum(state.ends, state.lengths, out=state.ends)
    state.lengths.clamp_(max=state.capacity - 1)
    ends, unfinished, rate = state.report
    ends.copy_(state.ends)
    unfinished.copy_(state.selection.unfinished[:, 0])
    rate.copy_(state.rate * MILLION)
