"""Heads made ready for attention in Triton, one program for each. What is done to them is in turn_and_write.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch
from hf_static_kv.kernels.rms_norm_triton import scale_of_row, scaled
from hf_static_kv.kernels.rotary_triton import turned
from hf_static_kv.kernels.turn_and_write import Heads


@triton.jit
def _turn_and_write(
    query, key, value, query_weight, key_weight, cos, sin, output, keys, values, slot, layer,
    query_b, query_h, key_b, key_h, value_b, value_h, cos_b, sin_b,
    keys_l, keys_b, keys_h, keys_s, values_l, values_b, values_h, values_s, query_eps, key_eps, offset, S,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    HAS_NORM: tl.constexpr, CAST_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // (HQ + 2 * H)).to(tl.int64), (tl.program_id(0) % (HQ + 2 * H)).to(tl.int64)
    # In a step the slot is written at its beginning, long before.
    number, position = tl.load(layer).to(tl.int64), tl.load(slot).to(tl.int64)
    has_room = position < S  # a full cache: the host has refused it, and no neighbour pays if it has not
    if h >= HQ + H:
        h -= HQ + H
        d = tl.arange(0, VALUE_TILE)
        after_previous(EARLY)
        v = tl.load(value + b * value_b + h * value_h + d, mask=d < DV)
        y = values + number * values_l + b * values_b + h * values_h + position * values_s
        tl.store(y + d, v, mask=(d < DV) & has_room)
    else:
        d = tl.arange(0, TILE)
        opposite = (d + D // 2) % D
        x, y, w, eps = query + b * query_b + h * query_h, output + (b * HQ + h) * D, query_weight, query_eps
        here = d < D
        if h >= HQ:
            h -= HQ
            x, w, eps = key + b * key_b + h * key_h, key_weight, key_eps
            y = keys + number * keys_l + b * keys_b + h * keys_h + position * keys_s
            here = here & has_room
        if HAS_NORM:
            weight, other_weight = tl.load(w + d, mask=d < D, other=0.0), tl.load(w + opposite, mask=d < D, other=0.0)
        after_previous(EARLY)
        head, other = tl.load(x + d, mask=d < D, other=0.0), tl.load(x + opposite, mask=d < D, other=0.0)
        if HAS_NORM:
            scale = scale_of_row(head, eps, D)
            head = scaled(head, scale, weight, offset, CAST_FIRST)
            other = scaled(other, scale, other_weight, offset, CAST_FIRST)
        c, s = tl.load(cos + b * cos_b + d, mask=d < D), tl.load(sin + b * sin_b + d, mask=d < D)
        tl.store(y + d, turned(head, tl.where(d < D // 2, -other, other), c, s), mask=here)


def turn_and_write_triton(
    heads: Heads, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot: torch.Tensor, layer: torch.Tensor
) -> torch.Tensor:
    query, key, norms, cos, sin = heads
    batch, query_heads, _, dim = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    of_query, of_key = norms or ((query, 0.0, (0.0, False)), (key, 0.0, (0.0, False)))
    offset, cast_first = of_query[2]
    of_rows = [0 if angles.shape[0] < batch else angles.stride(0) for angles in (cos, sin)]
    launch(
        _turn_and_write, (batch * (query_heads + 2 * key.shape[1]),), query,
        query, key, value, of_query[0], of_key[0], cos, sin, output, keys, values, slot, layer,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *of_rows,
        *keys.stride()[:4], *values.stride()[:4], of_query[1], of_key[1], offset, keys.shape[3],
        HQ=query_heads, H=key.shape[1], D=dim, DV=value.shape[-1], TILE=triton.next_power_of_2(dim),
        VALUE_TILE=triton.next_power_of_2(value.shape[-1]), HAS_NORM=norms is not None, CAST_FIRST=cast_first,
        num_warps=max(1, triton.next_power_of_2(dim) // 256),
        enable_fp_fusion=False,  # as in the kernels of these parts: each result is rounded by itself
    )  # fmt: skip
    return output
