"""Greedy token selection of a captured step.

token = argmax(logits), or pad in a batch row that has finished
sequences[:, cache_position + 1] = token
unfinished = unfinished and token not in eos
is_over    = no batch row is unfinished
"""

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_BATCH_SIZE = 64  # of the kernel: one program holds all batch rows


class GreedyState(NamedTuple):
    """The tensors of greedy decoding; all but `eos` and `pad` are written in place."""

    sequences: Tensor  # [B, S + 1], tokens by position
    token: Tensor  # [B, 1], selected last
    unfinished: Tensor  # [B, 1], bool
    eos: Tensor  # [1, n], filled up with -1
    pad: Tensor  # [1]
    is_over: Tensor  # [], bool


def select_greedy(logits: Tensor, cache_position: Tensor, state: GreedyState) -> None:
    """Select the token at `cache_position` [1] + 1 of each batch row from `logits` [B, V]."""
    if logits.is_cuda and len(logits) <= _MAX_BATCH_SIZE:
        from hf_static_kv.kernels.greedy_triton import select_greedy_triton

        return select_greedy_triton(logits, cache_position, *state)
    return select_greedy_plain(logits, cache_position, state)


def select_greedy_plain(logits: Tensor, cache_position: Tensor, state: GreedyState) -> None:
    tokens = torch.where(state.unfinished, logits.argmax(dim=-1, keepdim=True), state.pad)
    state.sequences.index_copy_(1, cache_position + 1, tokens)
    state.unfinished.logical_and_((tokens != state.eos).all(dim=1, keepdim=True))
    state.is_over.copy_(~state.unfinished.any())
    state.token.copy_(tokens)
