"""`write_token` in Triton, one program per batch row and head. Shapes are in write_token.py."""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync


@triton.jit
def _write_token(
    keys, values, key_states, value_states, cache_position,
    keys_b, keys_h, keys_s, values_b, values_h, values_s, key_b, key_h, value_b, value_h,
    S, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    # Before the wait: `advance` writes it at the beginning of a step, at least two kernels ago.
    position, d = tl.load(cache_position).to(tl.int64), tl.arange(0, TILE)
    pdl_sync(PDL)
    if position >= S:  # a full cache, which the host refuses: never write into another head
        return
    key = tl.load(key_states + b * key_b + h * key_h + d, mask=d < D)
    tl.store(keys + b * keys_b + h * keys_h + position * keys_s + d, key, mask=d < D)
    value = tl.load(value_states + b * value_b + h * value_h + d, mask=d < DV)
    tl.store(values + b * values_b + h * values_h + position * values_s + d, value, mask=d < DV)


def write_token_triton(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, cache_position: Tensor
) -> None:
    (batch, heads, _, dim), value_dim = key_states.shape, value_states.shape[-1]
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("write_token needs keys and values whose last dim has stride 1.")
    if key_states.stride(-1) != 1 or value_states.stride(-1) != 1:
        key_states, value_states = key_states.contiguous(), value_states.contiguous()
    launch(
        _write_token, (batch * heads,), keys, values, key_states, value_states, cache_position,
        *keys.stride()[:3], *values.stride()[:3], *key_states.stride()[:2], *value_states.stride()[:2],
        keys.shape[2], H=heads, D=dim, DV=value_dim, TILE=triton.next_power_of_2(max(dim, value_dim)), num_warps=1,
    )  # fmt: skip
