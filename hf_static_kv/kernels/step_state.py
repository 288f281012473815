"""The state of a captured step on the device, which the step itself writes.

advance          the inputs, by one position
    cache_position = cache_position + 1
    position_ids   = position_ids + 1
    spans          = seq_start, max(seq_start, end - window), end      where end = cache_position + 1

    cache_position: [1]   seq_start: [B, 1]   windows: [L]   spans: [B, L, 3]   position_ids: [..., B, 1]   all int64

write_token      the keys and values of one token, in the storage of a layer
    keys[:, :, cache_position] = key_states      values[:, :, cache_position] = value_states

    keys: [B, H, S, D]   values: [B, H, S, Dv]   key_states: [B, H, 1, D]   value_states: [B, H, 1, Dv]

select_greedy    the next token
    token = argmax(logits), or pad in a batch row that has finished
    sequences[:, cache_position + 1] = token
    unfinished = unfinished and token not in eos
    is_over    = no batch row is unfinished
"""

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_BATCH_SIZE = 64  # of the kernels: one program holds all batch rows


def advance(
    cache_position: Tensor, seq_start: Tensor, windows: Tensor, spans: Tensor, position_ids: Tensor
) -> None:
    """Write `cache_position`, `spans` and `position_ids` in place."""
    if cache_position.is_cuda and len(seq_start) <= _MAX_BATCH_SIZE:
        from hf_static_kv.kernels.step_state_triton import advance_triton

        return advance_triton(cache_position, seq_start, windows, spans, position_ids)
    return advance_plain(cache_position, seq_start, windows, spans, position_ids)


def advance_plain(
    cache_position: Tensor, seq_start: Tensor, windows: Tensor, spans: Tensor, position_ids: Tensor
) -> None:
    cache_position += 1
    end = cache_position + 1
    spans[..., 0] = seq_start
    spans[..., 1] = torch.maximum(seq_start, end - windows)
    spans[..., 2] = end
    position_ids += 1


@torch.library.custom_op("hf_static_kv::write_token", mutates_args=("keys", "values"))
def write_token(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, cache_position: Tensor
) -> None:
    """Write the states in place."""
    for storage, states in ((keys, key_states), (values, value_states)):
        expected = [*storage.shape[:2], 1, storage.shape[3]]
        if list(states.shape) != expected:
            raise ValueError(
                f"The states of one token must be {expected}, as the storage, got "
                f"{list(states.shape)}."
            )
        if states.dtype != storage.dtype:
            raise ValueError(
                f"The storage is {storage.dtype} and the states are {states.dtype}: they must be "
                "alike."
            )
    if keys.is_cuda:
        from hf_static_kv.kernels.step_state_triton import write_token_triton

        return write_token_triton(keys, values, key_states, value_states, cache_position)
    keys.index_copy_(2, cache_position, key_states)
    values.index_copy_(2, cache_position, value_states)


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
        from hf_static_kv.kernels.step_state_triton import select_greedy_triton

        return select_greedy_triton(logits, cache_position, *state)
    return select_greedy_plain(logits, cache_position, state)


def select_greedy_plain(logits: Tensor, cache_position: Tensor, state: GreedyState) -> None:
    select_plain(logits.argmax(dim=-1, keepdim=True), cache_position, state)


def select_plain(tokens: Tensor, cache_position: Tensor, state: GreedyState) -> None:
    """Select `tokens` [B, 1]."""
    tokens = torch.where(state.unfinished, tokens, state.pad)
    state.sequences.index_copy_(1, cache_position + 1, tokens)
    state.unfinished.logical_and_((tokens != state.eos).all(dim=1, keepdim=True))
    state.is_over.copy_(~state.unfinished.any())
    state.token.copy_(tokens)
