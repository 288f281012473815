"""Where the new tokens of each batch row go, computed on the device from the row's length.

place_tokens    slots, spans and position ids of a pass of q tokens a row

    [ padding | counts[b] tokens ]      row b of the pass: its tokens are the last ones

    position          = lengths[b] + t - (q - counts[b])       token t of batch row b
    slots[b, t]       = position - offset                      of padding: NOWHERE
    spans[b, l, t]    = (seq_start[b], first, position + 1) - offset     of padding: empty
    position_ids[b, t] = max(0, position - seq_start[b]) + shift[b]   of padding: of its first token
    lengths[b]        = lengths[b] + counts[b]                 if `advances`

    `first` is the oldest position that the token attends to in layer l: the latest of seq_start,
    position + 1 - windows[l], and the beginning of its chunk (of chunks[l] tokens).

    lengths, seq_start, counts: [B]   offset: [1]   windows, chunks: [L]   shift: [..., B]
    slots: [B, q]   spans: [B, L, q, 3]   position_ids: [..., B, q]   all int64

write_tokens    keys and values of the tokens, into the storage of a layer
    keys[b, :, slots[b, t]] = key_states[b, :, t]       values likewise; a slot >= S is not written

    keys: [B, H, S, D]   values: [B, H, S, Dv]   key_states: [B, H, q, D]
    into storage of codes (codes.py) they are encoded
"""

import torch
from torch import Tensor

from hf_static_kv.cache.codes import encoded, holds_codes

NOWHERE = 1 << 40  # a slot that no storage has


def place_tokens(
    lengths: Tensor, seq_start: Tensor, counts: Tensor, offset: Tensor, windows: Tensor,
    chunks: Tensor, slots: Tensor, spans: Tensor, shift: Tensor | None, position_ids: Tensor | None,
    *, advances: bool,
) -> None:  # fmt: skip
    """Write `slots`, `spans` and, unless they are None, `position_ids` in place."""
    inputs = lengths, seq_start, counts, offset, windows, chunks
    tensors = *inputs, slots, spans, shift, position_ids
    if lengths.is_cuda:
        from hf_static_kv.kernels.positions_triton import place_tokens_triton

        return place_tokens_triton(*tensors, advances)
    return place_tokens_plain(*tensors, advances=advances)


def place_tokens_plain(
    lengths: Tensor, seq_start: Tensor, counts: Tensor, offset: Tensor, windows: Tensor,
    chunks: Tensor, slots: Tensor, spans: Tensor, shift: Tensor | None, position_ids: Tensor | None,
    *, advances: bool,
) -> None:  # fmt: skip
    num_tokens = slots.shape[1]
    token = torch.arange(num_tokens, device=lengths.device) - (num_tokens - counts[:, None])
    positions = lengths[:, None] + token.clamp(min=0)  # [B, q]
    is_padding = token < 0
    slots.copy_(torch.where(is_padding, NOWHERE, positions - offset))
    start = seq_start[:, None, None]  # [B, L, q], as the following
    position = positions[:, None]
    in_window = position + 1 - windows[:, None]
    chunk_start = position - (position - start) % chunks[:, None]
    first = torch.maximum(torch.maximum(start, in_window), chunk_start)
    spans[..., 0] = start - offset
    spans[..., 1] = first - offset
    spans[..., 2] = torch.where(is_padding[:, None], first, position + 1) - offset
    if shift is not None and position_ids is not None:
        distance = (positions - seq_start[:, None]).clamp(min=0)
        position_ids.copy_(distance + shift[..., None])
    if advances:
        lengths += counts


@torch.library.custom_op("hf_static_kv::write_tokens", mutates_args=("keys", "values"))
def write_tokens(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, slots: Tensor
) -> None:
    """Write the states in place, but those whose slot is beyond the capacity S."""
    if holds_codes(keys, key_states):
        key_states = encoded(key_states)
        value_states = encoded(value_states)
    for storage, states in ((keys, key_states), (values, value_states)):
        expected = [*storage.shape[:2], slots.shape[1], storage.shape[3]]
        if list(states.shape) != expected:
            as_storage = f"{expected}, as storage and slots"
            raise ValueError(f"The states must be {as_storage}, got {list(states.shape)}.")
        if states.dtype != storage.dtype:
            both = f"The storage is {storage.dtype} and the states are {states.dtype}"
            raise ValueError(f"{both}: they must be alike.")
    if keys.is_cuda:
        from hf_static_kv.kernels.positions_triton import write_tokens_triton

        return write_tokens_triton(keys, values, key_states, value_states, slots)
    if int(slots.max()) < keys.shape[2]:
        keys.scatter_(2, slots[:, None, :, None].expand_as(key_states), key_states)
        values.scatter_(2, slots[:, None, :, None].expand_as(value_states), value_states)
        return
    for b, row in enumerate(slots):
        is_written = row < keys.shape[2]
        keys[b].index_copy_(1, row[is_written], key_states[b][:, is_written])
        values[b].index_copy_(1, row[is_written], value_states[b][:, is_written])
