"""Rotary positions in Triton, one program for a head of a token. Formula and shapes are in rotary.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch


@triton.jit
def _rotary(
    query, key, cos, sin, query_out, key_out, T,
    query_b, query_h, query_t, key_b, key_h, key_t, cos_b, cos_t, sin_b, sin_t,
    HQ: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    h, row = (tl.program_id(0) % (HQ + H)).to(tl.int64), (tl.program_id(0) // (HQ + H)).to(tl.int64)
    b, t = row // T, row % T
    d = tl.arange(0, TILE)
    here = d < HALF
    x, y = query + b * query_b + h * query_h + t * query_t, query_out + ((b * HQ + h) * T + t) * 2 * HALF
    if h >= HQ:
        h -= HQ
        x, y = key + b * key_b + h * key_h + t * key_t, key_out + ((b * H + h) * T + t) * 2 * HALF
    after_previous(EARLY)
    first, second = tl.load(x + d, mask=here), tl.load(x + HALF + d, mask=here)
    cos_at, sin_at = cos + b * cos_b + t * cos_t + d, sin + b * sin_b + t * sin_t + d
    tl.store(y + d, _turned(first, -second, tl.load(cos_at, mask=here), tl.load(sin_at, mask=here)), mask=here)
    cos_2, sin_2 = tl.load(cos_at + HALF, mask=here), tl.load(sin_at + HALF, mask=here)
    tl.store(y + HALF + d, _turned(second, first, cos_2, sin_2), mask=here)


@triton.jit
def _turned(x, other, cos, sin):
    straight = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
    across = (other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return (straight.to(tl.float32) + across.to(tl.float32)).to(x.dtype)


def rotary_triton(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, query_heads, length, dim = query.shape
    heads = key.shape[1]
    query_out, key_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    of_rows = [0 if angles.shape[0] < batch else angles.stride(0) for angles in (cos, sin)]
    launch(
        _rotary, (batch * length * (query_heads + heads),), query,
        query, key, cos, sin, query_out, key_out, length, *query.stride()[:3], *key.stride()[:3],
        of_rows[0], cos.stride(1), of_rows[1], sin.stride(1),
        HQ=query_heads, H=heads, HALF=dim // 2, TILE=triton.next_power_of_2(dim // 2), num_warps=1,
        enable_fp_fusion=False,  # the product and the sum are rounded one by one, as PyTorch does
    )  # fmt: skip
    return query_out, key_out
