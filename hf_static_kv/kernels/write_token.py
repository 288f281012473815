"""Writes the keys and values of one token into the storage of a layer.

keys[:, :, cache_position] = key_states      values[:, :, cache_position] = value_states

keys: [B, H, S, D]   values: [B, H, S, Dv]   key_states: [B, H, 1, D]   value_states: [B, H, 1, Dv]
cache_position: [1], read on the device
"""

import torch
from torch import Tensor


@torch.library.custom_op("hf_static_kv::write_token", mutates_args=("keys", "values"))
def write_token(keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, cache_position: Tensor) -> None:
    """Write the states in place."""
    for storage, states in ((keys, key_states), (values, value_states)):
        expected = [*storage.shape[:2], 1, storage.shape[3]]
        if list(states.shape) != expected:
            raise ValueError(f"The states of one token must be {expected}, as the storage, got {list(states.shape)}.")
        if states.dtype != storage.dtype:
            raise ValueError(f"The storage is {storage.dtype} and the states are {states.dtype}: they must be alike.")
    if keys.is_cuda:
        from hf_static_kv.kernels.write_token_triton import write_token_triton

        return write_token_triton(keys, values, key_states, value_states, cache_position)
    keys.index_copy_(2, cache_position, key_states)
    values.index_copy_(2, cache_position, value_states)
