"""Drafted tokens in Triton, an instance for each batch row. Formulas and shapes are in drafts.py."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# Positions that are compared at once. A search takes 2.5 us of a text of 768 tokens, 7.3 of 8k, 25 of
# 32k and 93 of 131k (H200, 2026-11-19).
_TILE = 2048


@triton.jit
def end_pass(
    sequences, token, unfinished, eos, last, next_counts, lengths, ends, first, drafts, found, rate, report,
    selected, tokens, counts,
    sequences_b, selected_b, tokens_b, S, K, Q, B, capacity, weight, million,
    SIZE: tl.constexpr, HAS_DRAFTS: tl.constexpr, NUM_EOS: tl.constexpr, TILE_EOS: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    pdl_sync(PDL)
    ids = sequences + b * sequences_b
    length = tl.load(lengths + b)
    end = tl.load(ends + b)
    running = tl.load(unfinished + b) != 0
    right = tl.load(rate + b)
    begin = tl.maximum(tl.load(first + b), 0)
    if HAS_DRAFTS:
        t = tl.arange(0, TILE_Q)
        count = tl.load(counts + b)
        row = selected + b * selected_b
        chosen, num_right = _right_drafts(row, tokens + b * tokens_b, count, t, Q)
        position = length - count + 1 + t
        e = tl.arange(0, TILE_EOS)
        eos_token = tl.load(eos + b * NUM_EOS + e, mask=e < NUM_EOS, other=-1)
        is_end = tl.max((chosen[:, None] == eos_token[None, :]).to(tl.int32), 1) != 0
        is_end = is_end | (position >= tl.load(last + b))
        first_end = tl.min(tl.where(is_end, t, TILE_Q), 0)
        at = t + Q - count
        is_new = (at >= 0) & (at < Q) & (t <= tl.minimum(num_right, first_end)) & running
        num_new = tl.sum(is_new.to(tl.int32), 0)
        new_token = tl.sum(tl.where(t == num_new - 1, chosen, 0), 0)
        running = running & (num_new <= first_end)
        right = _moved(right, num_right, num_right < count - 1, weight)
        length = length - count + num_new
        tl.debug_barrier()  # all threads have read what one of them writes now
        tl.store(ids + position, chosen, mask=is_new & (position >= 0) & (position < S))
        tl.store(token + b, new_token, mask=num_new > 0)
        tl.store(unfinished + b, running)
        tl.store(next_counts + b, running.to(tl.int64))
    elif SIZE > 0:
        is_right = (tl.load(drafts + b * K) == tl.load(token + b)) & (tl.load(found + b) > 0)
        right = _moved(right, is_right.to(tl.int32), is_right == 0, weight)
    tl.debug_barrier()
    end = tl.maximum(end, length)
    tl.store(rate + b, right)
    tl.store(ends + b, end)
    tl.store(lengths + b, tl.minimum(length, capacity - 1))
    tl.store(report + b, end)
    tl.store(report + B + b, running.to(tl.int64))
    tl.store(report + 2 * B + b, (right * million).to(tl.int64))
    if SIZE > 0:
        newest = tl.minimum(tl.maximum(length, 0), S - 1)
        longest, at = _longest_match(ids, begin, newest, SIZE, TILE)
        i = tl.arange(0, TILE_K)
        source = at + 1 + i % tl.maximum(newest - at, 1)
        mask = (i < K) & (longest > 0)
        tl.store(drafts + b * K + i, tl.load(ids + source, mask=mask, other=0), mask=mask)
        tl.store(found + b, tl.where(longest > 0, K, 0).to(tl.int64))


@triton.jit
def _right_drafts(selected, tokens, count, t, Q):
    """The tokens after each token of the pass, and how many drafts are right."""
    at = t + Q - count
    chosen = tl.load(selected + at, mask=(at >= 0) & (at < Q), other=-1)
    has_draft = (at >= 0) & (at + 1 < Q)
    drafted = tl.load(tokens + at + 1, mask=has_draft, other=-1)
    is_wrong = (chosen != drafted) | (has_draft == 0)
    return chosen, tl.min(tl.where(is_wrong, t, t.shape[0]), 0)


@triton.jit
def _moved(rate, hits, has_missed, weight):
    """The rate, moved towards the part of the drafts that was right."""
    number = tl.maximum(hits + has_missed.to(tl.int32), 1)
    part = hits.to(tl.float32) / number.to(tl.float32)
    return rate + (part - rate) * weight


@triton.jit
def _longest_match(ids, begin, newest, SIZE: tl.constexpr, TILE: tl.constexpr):
    """The length of the longest match before `newest`, and the newest position that has it."""
    lengths = tl.zeros([TILE], tl.int32)
    positions = tl.zeros([TILE], tl.int64)
    for start in range(begin, newest, TILE):
        position = start + tl.arange(0, TILE)
        is_equal = position < newest
        matches = tl.zeros([TILE], tl.int32)
        for back in tl.static_range(SIZE):
            token = tl.load(ids + tl.maximum(newest - back, 0))
            is_equal = is_equal & (position - back >= begin)
            is_equal &= tl.load(ids + position - back, mask=is_equal, other=-1) == token
            matches += is_equal.to(tl.int32)
        is_best = (matches > 0) & (matches >= lengths)
        lengths = tl.where(is_best, matches, lengths)
        positions = tl.where(is_best, position, positions)
    longest = tl.max(lengths, 0)
    return longest, tl.max(tl.where(lengths == longest, positions, 0), 0)


def end_pass_triton(state: Any, size: int, drafted: Any, weight: float, million: int) -> None:
    """`weight`: of the newest pass in the rate; `million`: of the rate in the report."""
    selection = state.selection
    batch, num_drafts = state.drafts.shape
    # A kernel takes a pointer for an absent tensor too.
    selected, tokens, counts = drafted or (state.drafts, state.drafts, state.found)
    num_tokens = tokens.shape[1]
    num_eos = selection.eos.shape[1]
    launch(
        end_pass, (batch,), selection.sequences, selection.token, selection.unfinished, selection.eos,
        selection.last, selection.counts,
        state.lengths, state.ends, state.first, state.drafts, state.found, state.rate, state.report,
        selected, tokens, counts,
        selection.sequences.stride(0), selected.stride(0), tokens.stride(0),
        selection.sequences.shape[1], num_drafts, num_tokens, batch, state.capacity, weight, million,
        SIZE=size, HAS_DRAFTS=drafted is not None,
        NUM_EOS=num_eos, TILE_EOS=triton.next_power_of_2(num_eos),
        TILE_Q=triton.next_power_of_2(num_tokens), TILE_K=triton.next_power_of_2(num_drafts),
        TILE=_TILE, num_warps=8,
    )  # fmt: skip


@triton.jit
def place_drafts(
    token, unfinished, last, lengths, drafts, found, tokens, counts, tokens_b, K, Q, capacity,
    TILE_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TILE_Q)
    pdl_sync(PDL)
    end = tl.minimum(tl.load(last + b), capacity)
    most = tl.maximum(end - tl.load(lengths + b) - 1, 0)
    most = tl.minimum(most, tl.minimum(tl.load(found + b), K))
    running = tl.load(unfinished + b) != 0
    count = tl.where(running, 1 + tl.maximum(most, 0), 0)
    i = t - Q + count  # 0: the newest token
    is_draft = (t < Q) & (i > 0) & (i <= K)
    draft = tl.load(drafts + b * K + i - 1, mask=is_draft, other=0)
    own = tl.where(is_draft, draft, tl.load(token + b))
    tl.store(tokens + b * tokens_b + t, own, mask=t < Q)
    tl.store(counts + b, count)


def place_drafts_triton(state: Any, tokens: Tensor, counts: Tensor) -> None:
    selection = state.selection
    batch, num_tokens = tokens.shape
    launch(
        place_drafts, (batch,), selection.token, selection.unfinished, selection.last,
        state.lengths, state.drafts, state.found, tokens, counts,
        tokens.stride(0), state.drafts.shape[1], num_tokens, state.capacity,
        TILE_Q=triton.next_power_of_2(num_tokens), num_warps=1,
    )  # fmt: skip


@triton.jit
def place_for_assistant(
    sequences, unfinished, lengths, first, drafts, found, tokens, counts, own_lengths,
    sequences_b, tokens_b, S, K, Q, capacity,
    HAS_NEWEST: tl.constexpr, TILE_Q: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, TILE_Q)
    pdl_sync(PDL)
    running = (tl.load(unfinished + b) != 0).to(tl.int64)
    if HAS_NEWEST:
        length = tl.load(lengths + b)
        known = length + 1 - tl.load(first + b)
        count = tl.minimum(tl.maximum(known, 0), Q) * running
        begin = length + 1 - count
        position = tl.minimum(tl.maximum(begin + count - Q + t, 0), S - 1)
        token = tl.load(sequences + b * sequences_b + position, mask=t < Q)
        tl.store(found + b, 0)
    else:
        count = running
        begin = tl.load(own_lengths + b)
        at = tl.maximum(tl.minimum(tl.load(found + b), K) - 1, 0)
        token = tl.load(drafts + b * K + at + tl.zeros_like(t))
    tl.debug_barrier()  # all threads have read the length before one writes it
    begin = tl.minimum(begin, capacity - tl.maximum(count, 1))
    tl.store(own_lengths + b, tl.maximum(begin, 0))
    tl.store(counts + b, count)
    tl.store(tokens + b * tokens_b + t, token, mask=t < Q)


def place_for_assistant_triton(
    state: Any, tokens: Tensor, counts: Tensor, lengths: Tensor, capacity: int
) -> None:
    sequences = state.selection.sequences
    batch, num_tokens = tokens.shape
    launch(
        place_for_assistant, (batch,), sequences, state.selection.unfinished, state.lengths,
        state.first, state.drafts, state.found, tokens, counts, lengths,
        sequences.stride(0), tokens.stride(0), sequences.shape[1], state.drafts.shape[1],
        num_tokens, capacity,
        HAS_NEWEST=num_tokens > 1, TILE_Q=triton.next_power_of_2(num_tokens), num_warps=1,
    )  # fmt: skip


@triton.jit
def append_draft(drafts, found, tokens, K, PDL: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    pdl_sync(PDL)
    at = tl.minimum(tl.maximum(tl.load(found + b), 0), K - 1)
    token = tl.load(tokens + b)
    tl.debug_barrier()
    tl.store(drafts + b * K + at, token)
    tl.store(found + b, at + 1)


def append_draft_triton(state: Any, tokens: Tensor) -> None:
    batch, num_drafts = state.drafts.shape
    launch(append_draft, (batch,), state.drafts, state.found, tokens, num_drafts, num_warps=1)
