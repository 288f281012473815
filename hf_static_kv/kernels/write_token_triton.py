"""Write one token's keys and values into the storage in Triton. Shapes are in storage_ops.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch


@triton.jit
def _write(
    keys, values, key_states, value_states, slot, layer,
    keys_l, keys_b, keys_h, keys_s, values_l, values_b, values_h, values_s, key_b, key_h, value_b, value_h,
    S, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    # In a step the slot is written at its beginning, long before.
    number, position, d = tl.load(layer).to(tl.int64), tl.load(slot).to(tl.int64), tl.arange(0, TILE)
    after_previous(EARLY)
    if position >= S:  # a full cache: the host has refused it, and no neighbour pays if it has not
        return
    key = tl.load(key_states + b * key_b + h * key_h + d, mask=d < D)
    tl.store(keys + number * keys_l + b * keys_b + h * keys_h + position * keys_s + d, key, mask=d < D)
    value = tl.load(value_states + b * value_b + h * value_h + d, mask=d < DV)
    tl.store(values + number * values_l + b * values_b + h * values_h + position * values_s + d, value, mask=d < DV)


def write_token_triton(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    slot: torch.Tensor,
    layer: torch.Tensor,
) -> None:
    batch, heads, _, dim = key_states.shape
    value_dim = value_states.shape[-1]
    if key_states.stride(-1) != 1 or value_states.stride(-1) != 1:
        key_states, value_states = key_states.contiguous(), value_states.contiguous()
    launch(
        _write, (batch * heads,), keys,
        keys, values, key_states, value_states, slot, layer,
        *keys.stride()[:4], *values.stride()[:4], *key_states.stride()[:2], *value_states.stride()[:2],
        keys.shape[3], H=heads, D=dim, DV=value_dim, TILE=triton.next_power_of_2(max(dim, value_dim)), num_warps=1,
    )  # fmt: skip
