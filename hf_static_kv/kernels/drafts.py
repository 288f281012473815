"""Drafted tokens of each batch row: found in its own text, passed to the model, and accepted as far as
the model selects the same.

place_drafts     the tokens of the next pass

    [ padding | newest token, drafts ]   counts[b] = 1 + min(found, last - newest - 1), or 0 after an end

end_pass         the end of a pass: 1. the tokens that it selects, as far as drafts are right

    selected[b, t]   follows token t of the pass; it counts if drafts 1 ... t are right,
                     and if none before it is an end token or at the position `last`
    rate             moves towards the part of the drafts that is right

                 2. drafts for the next pass: what followed the same text before (prompt lookup)

    [ ... a b c d e f ... a b ]          a b is the newest text, so c d e f ... is the draft
          j             newest

    match(j)   = how many tokens up to j equal those up to the newest, at most `size`
    j          = the position of the longest match, and of equally long ones the newest
    drafts[i]  = sequences[j + 1 + i % (newest - j)]      beyond its end the text repeats itself
    found      = K, or 0 if nothing matches: then `drafts` stays

                 3. `report`, for the host

A row that has ended takes no part.

place_for_assistant, append_draft    an assistant, another model, drafts one token a pass

No index is out of bounds, whatever the tensors hold: passes run without some of their kernels while
these are compiled.

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

    selection: GreedyState  # but for `is_over` and `report`, which nobody reads here
    # [B], the position of the newest token, whose states are not written; of a row that has ended at the
    # capacity one less, as no position is there.
    lengths: Tensor
    ends: Tensor  # [B], the position of the newest token
    first: Tensor  # [B], the position of the first token that is known
    drafts: Tensor  # [B, K]
    found: Tensor  # [B], how many drafts there are
    rate: Tensor  # [B], float32
    report: Tensor  # [3, B]: `ends`, whether unfinished, millionths of `rate`


class DraftedPass(NamedTuple):
    """A pass that had drafts; `lengths` have been moved on by `counts`."""

    selected: Tensor  # [B, q]
    tokens: Tensor  # [B, q]
    counts: Tensor  # [B]


def place_drafts(state: DraftState, tokens: Tensor, counts: Tensor) -> None:
    """Write the `tokens` of the next pass, and how many each row has."""
    if tokens.is_cuda:
        from hf_static_kv.kernels.drafts_triton import place_drafts_triton

        return place_drafts_triton(state, tokens, counts)
    return place_drafts_plain(state, tokens, counts)


def place_drafts_plain(state: DraftState, tokens: Tensor, counts: Tensor) -> None:
    selection = state.selection
    last = selection.last.clamp(max=state.capacity)
    most = (last - state.lengths - 1).clamp(min=0)
    found = state.found.clamp(min=0, max=state.drafts.shape[1])
    counts.copy_((1 + torch.minimum(found, most)) * selection.unfinished[:, 0])
    both = torch.cat([selection.token, state.drafts], dim=1)  # [B, q]
    at = torch.arange(tokens.shape[1], device=tokens.device) - tokens.shape[1] + counts[:, None]
    tokens.copy_(both.gather(1, at.clamp(min=0)))


def end_pass(state: DraftState, size: int, drafted: DraftedPass | None = None) -> None:
    """End a pass of one token, which `state.selection` has, or one with drafts.

    Drafts for the next pass follow texts of at most `size` tokens; 0: an assistant drafts.
    """
    if state.drafts.is_cuda:
        from hf_static_kv.kernels.drafts_triton import end_pass_triton

        return end_pass_triton(state, size, drafted, _NEWEST, MILLION)
    return end_pass_plain(state, size, drafted)


def end_pass_plain(state: DraftState, size: int, drafted: DraftedPass | None = None) -> None:
    if drafted is not None:
        _accept(state, drafted)
    elif size:
        _note_token(state)
    if size:
        _find(state, size)
    _report(state)


def _accept(state: DraftState, drafted: DraftedPass) -> None:
    """Append the tokens that count."""
    selected, tokens, counts = drafted
    _, token, unfinished, eos, _, _, last, next_counts, _ = state.selection
    num_tokens = tokens.shape[1]
    t = torch.arange(num_tokens, device=tokens.device)
    at = t + num_tokens - counts[:, None]
    is_token = (at >= 0) & (at < num_tokens)
    chosen = selected.gather(1, at.clamp(min=0, max=num_tokens - 1))
    following = tokens.gather(1, (at + 1).clamp(min=0, max=num_tokens - 1))
    is_right = (chosen == following) & is_token & (at + 1 < num_tokens)
    num_right = is_right.long().cumprod(dim=1).sum(dim=1)
    start = state.lengths - counts
    position = start[:, None] + 1 + t
    is_end = (chosen[..., None] == eos[:, None]).any(dim=-1) | (position >= last[:, None])
    ends_before = is_end.long().cumsum(dim=1) - is_end.long()
    is_new = (t <= num_right[:, None]) & (ends_before == 0) & is_token & unfinished
    num_new = is_new.sum(dim=1)
    _append(state.selection.sequences, start + 1, chosen, num_new)
    newest = chosen.gather(1, (num_new - 1).clamp(min=0)[:, None])
    token.copy_(torch.where(num_new[:, None] > 0, newest, token))
    state.lengths.copy_(start + num_new)
    _note_hits(state, num_right, num_right < counts - 1)
    unfinished.logical_and_(~(is_new & is_end).any(dim=1, keepdim=True))
    next_counts.copy_(unfinished[:, 0])


def _append(sequences: Tensor, begin: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Write the first `counts` tokens [B, q] of each row, from the position `begin` on."""
    t = torch.arange(sequences.shape[1], device=sequences.device) - begin[:, None]  # [B, S]
    is_new = (t >= 0) & (t < counts[:, None])
    own = tokens.gather(1, t.clamp(min=0, max=tokens.shape[1] - 1))
    sequences.copy_(torch.where(is_new, own, sequences))


def _note_token(state: DraftState) -> None:
    """Note whether the first draft is the token that was selected."""
    is_right = (state.drafts[:, 0] == state.selection.token[:, 0]) & (state.found > 0)
    _note_hits(state, is_right.long(), ~is_right)


def _note_hits(state: DraftState, hits: Tensor, has_missed: Tensor) -> None:
    part = hits / (hits + has_missed.long()).clamp(min=1)
    state.rate.lerp_(part.float(), _NEWEST)


def _find(state: DraftState, size: int) -> None:
    """Look up `drafts` for the next pass."""
    sequences = state.selection.sequences
    position = torch.arange(sequences.shape[1], device=sequences.device)
    newest = state.lengths.clamp(min=0, max=len(position) - 1)[:, None]
    first = state.first.clamp(min=0)[:, None]
    matches = torch.zeros_like(sequences)
    is_equal = position < newest
    for back in range(size):
        token = sequences.gather(1, (newest - back).clamp(min=0))
        is_equal = is_equal & (sequences.roll(back, 1) == token) & (position - back >= first)
        matches += is_equal
    score = torch.where(matches > 0, matches * len(position) + position, -1)
    best = score.argmax(dim=1, keepdim=True)
    has_match = score.amax(dim=1, keepdim=True) >= 0
    distance = (newest - best).clamp(min=1)
    ahead = torch.arange(state.drafts.shape[1], device=sequences.device) % distance
    drafts = sequences.gather(1, (best + 1 + ahead).clamp(max=len(position) - 1))
    state.drafts.copy_(torch.where(has_match, drafts, state.drafts))
    state.found.copy_(has_match[:, 0] * state.drafts.shape[1])


def _report(state: DraftState) -> None:
    torch.maximum(state.ends, state.lengths, out=state.ends)
    state.lengths.clamp_(max=state.capacity - 1)
    ends, unfinished, rate = state.report
    ends.copy_(state.ends)
    unfinished.copy_(state.selection.unfinished[:, 0])
    rate.copy_(state.rate * MILLION)


def place_for_assistant(
    state: DraftState, tokens: Tensor, counts: Tensor, lengths: Tensor, capacity: int
) -> None:
    """Write the `tokens` [B, n] of the next pass of an assistant, with `lengths` of its own cache.

    Of one token it has the newest draft. Of more it has the newest tokens of each row, again or for the
    first time, and no draft is there yet.
    """
    if tokens.is_cuda:
        from hf_static_kv.kernels.drafts_triton import place_for_assistant_triton

        return place_for_assistant_triton(state, tokens, counts, lengths, capacity)
    return place_for_assistant_plain(state, tokens, counts, lengths, capacity)


def place_for_assistant_plain(
    state: DraftState, tokens: Tensor, counts: Tensor, lengths: Tensor, capacity: int
) -> None:
    unfinished = state.selection.unfinished[:, 0]
    if tokens.shape[1] > 1:
        _place_newest(state, tokens)
        known = (state.lengths + 1 - state.first).clamp(min=0, max=tokens.shape[1])
        counts.copy_(known * unfinished)
        lengths.copy_(state.lengths + 1 - counts)
    else:
        at = (state.found - 1).clamp(min=0, max=state.drafts.shape[1] - 1)
        tokens.copy_(state.drafts.gather(1, at[:, None]))
        counts.copy_(unfinished)
    # What would be beyond the end: drafts that nobody needs.
    lengths.copy_(torch.minimum(lengths, capacity - counts.clamp(min=1)).clamp(min=0))


def _place_newest(state: DraftState, tokens: Tensor) -> None:
    sequences = state.selection.sequences
    t = torch.arange(1 - tokens.shape[1], 1, device=tokens.device)
    at = (state.lengths[:, None] + t).clamp(min=0, max=sequences.shape[1] - 1)
    tokens.copy_(sequences.gather(1, at))
    state.found.zero_()


def append_draft(state: DraftState, tokens: Tensor) -> None:
    """An assistant has drafted one more token [B] of each row."""
    if tokens.is_cuda:
        from hf_static_kv.kernels.drafts_triton import append_draft_triton

        return append_draft_triton(state, tokens)
    return append_draft_plain(state, tokens)


def append_draft_plain(state: DraftState, tokens: Tensor) -> None:
    at = state.found.clamp(min=0, max=state.drafts.shape[1] - 1)
    state.drafts.scatter_(1, at[:, None], tokens[:, None])
    state.found.copy_(at + 1)
