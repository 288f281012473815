"""The next token of each batch row, selected on the device.

token                       = argmax(logits), or pad in a batch row that has finished
sequences[b, positions[b] + 1] = token         unless that is beyond the end
unfinished                  = unfinished and token not in eos and positions[b] + 1 < last[b]
is_over                     = no batch row is unfinished
counts                      = 1 if unfinished, else 0
report                      = token, or its bitwise complement if the row has finished

`most_likely` is the first line alone.

logits: [B, V]   positions: [B], int64, of the newest token of each row
"""

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_BATCH_SIZE = 64  # one instance of the kernel holds all batch rows


class GreedyState(NamedTuple):
    """The tensors of greedy decoding; all but `eos`, `pad` and `last` are written in place."""

    sequences: Tensor  # [B, S + 1], tokens by position
    token: Tensor  # [B, 1], selected last
    unfinished: Tensor  # [B, 1], bool
    eos: Tensor  # [B, n], filled up with -1
    pad: Tensor  # [B]
    is_over: Tensor  # [], bool
    last: Tensor  # [B], the position of a sequence's last token
    counts: Tensor  # [B]
    report: Tensor  # [B]


def select_greedy(
    logits: Tensor,
    positions: Tensor,
    state: GreedyState,
    chunks: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Select the token after `positions` in each batch row.

    chunks: the largest logit of each part of the vocabulary and its first token, if they are known:
    [B, a power of two] float32 and int32
    """
    if logits.is_cuda and len(logits) <= _MAX_BATCH_SIZE:
        from hf_static_kv.kernels.select_greedy_triton import select_greedy_triton

        return select_greedy_triton(logits, positions, *state, chunks=chunks)
    return select_greedy_plain(logits, positions, state)


def select_greedy_plain(logits: Tensor, positions: Tensor, state: GreedyState) -> None:
    select_plain(logits.argmax(dim=-1, keepdim=True), positions, state)


def select_plain(tokens: Tensor, positions: Tensor, state: GreedyState) -> None:
    """Select `tokens` [B, 1]."""
    tokens = torch.where(state.unfinished, tokens, state.pad[:, None])
    at = positions[:, None] + 1
    size = state.sequences.shape[1]
    kept = state.sequences[:, -1:].where(at >= size, tokens)
    state.sequences.scatter_(1, at.clamp(max=size - 1), kept)
    is_last = (tokens == state.eos).any(dim=1, keepdim=True) | (at >= state.last[:, None])
    state.unfinished.logical_and_(~is_last)
    state.is_over.copy_(~state.unfinished.any())
    state.token.copy_(tokens)
    state.counts.copy_(state.unfinished[:, 0])
    state.report.copy_(torch.where(state.unfinished, tokens, ~tokens)[:, 0])


def most_likely(logits: Tensor) -> Tensor:
    """The token [n] of the largest logit in each row of [n, V]."""
    if logits.is_cuda:
        from hf_static_kv.kernels.select_greedy_triton import most_likely_triton

        return most_likely_triton(logits)
    return most_likely_plain(logits)


def most_likely_plain(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)
