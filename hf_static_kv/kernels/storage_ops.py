"""What a captured step does with the storage of all layers: write one token, attend over one layer.

    keys: [L, B, H, S, D]   values: [L, B, H, S, Dv]   slot: [1]   layer: a number   both in the device's memory

Registered with torch, so that `torch.compile` takes each for one operation and does not look inside. The layer is a
tensor like any other to it, so that one compiled layer serves all.
"""

from __future__ import annotations

from typing import Optional

import torch

from hf_static_kv.kernels.decode_attention import decode_attention


@torch.library.custom_op("hf_static_kv::write_token", mutates_args=("keys", "values"))
def write_token(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    slot: torch.Tensor,
    layer: torch.Tensor,
) -> None:
    """Put the states [B, H, 1, D] of one layer at the position that `slot` holds."""
    if key_states.dtype != keys.dtype or value_states.dtype != values.dtype:
        raise ValueError(f"The storage is {keys.dtype} and the states are {key_states.dtype}: they must be alike.")
    if keys.is_cuda:
        from hf_static_kv.kernels.write_token_triton import write_token_triton

        write_token_triton(keys, values, key_states, value_states, slot, layer)
    else:
        number, rows = int(layer), key_states.shape[0]
        keys[number, :rows].index_copy_(2, slot, key_states)
        values[number, :rows].index_copy_(2, slot, value_states)


@torch.library.custom_op("hf_static_kv::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    layer: torch.Tensor,
    scale: float,
    max_span: int,
    softcap: Optional[float],  # noqa: UP045  # torch reads the annotation
    sinks: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    """`decode_attention` over one layer of the storage; `spans` [B, L, 3] are those of all layers."""
    return decode_attention(
        query, keys, values, spans, None, layer, scale=scale, max_span=max_span, softcap=softcap, sinks=sinks
    )


@attend.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    layer: torch.Tensor,
    scale: float,
    max_span: int,
    softcap: Optional[float],  # noqa: UP045
    sinks: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], values.shape[-1])
