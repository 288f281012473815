"""Rotary position embedding in Triton, one program per token and head. Formula and shapes are in rotary.py."""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync


@triton.jit
def _rotary(
    query, key, cos, sin, query_out, key_out, T,
    query_b, query_h, query_t, key_b, key_h, key_t, cos_b, cos_t, sin_b, sin_t,
    HQ: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    h, token = (tl.program_id(0) % (HQ + H)).to(tl.int64), (tl.program_id(0) // (HQ + H)).to(tl.int64)
    b, t, d = token // T, token % T, tl.arange(0, TILE)
    mask = d < HALF
    x, y = query + b * query_b + h * query_h + t * query_t, query_out + ((b * HQ + h) * T + t) * 2 * HALF
    if h >= HQ:
        h -= HQ
        x, y = key + b * key_b + h * key_h + t * key_t, key_out + ((b * H + h) * T + t) * 2 * HALF
    pdl_sync(PDL)
    first, second = tl.load(x + d, mask=mask), tl.load(x + HALF + d, mask=mask)
    cos_at, sin_at = cos + b * cos_b + t * cos_t + d, sin + b * sin_b + t * sin_t + d
    tl.store(y + d, _rotate(first, -second, tl.load(cos_at, mask=mask), tl.load(sin_at, mask=mask)), mask=mask)
    cos_2, sin_2 = tl.load(cos_at + HALF, mask=mask), tl.load(sin_at + HALF, mask=mask)
    tl.store(y + HALF + d, _rotate(second, first, cos_2, sin_2), mask=mask)


@triton.jit
def _rotate(x, other, cos, sin):
    """x * cos + other * sin, rounded after every operation."""
    x_cos = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
    other_sin = (other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return (x_cos.to(tl.float32) + other_sin.to(tl.float32)).to(x.dtype)


def rotary_triton(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    (batch, query_heads, length, dim), heads = query.shape, key.shape[1]
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    cos_b, sin_b = (0 if angles.shape[0] < batch else angles.stride(0) for angles in (cos, sin))
    launch(
        _rotary, (batch * length * (query_heads + heads),), query, key, cos, sin, query_out, key_out, length,
        *query.stride()[:3], *key.stride()[:3], cos_b, cos.stride(1), sin_b, sin.stride(1),
        HQ=query_heads, H=heads, HALF=dim // 2, TILE=triton.next_power_of_2(dim // 2), num_warps=1,
        enable_fp_fusion=False,  # an FMA would not round the product, as PyTorch does
    )  # fmt: skip
    return query_out, key_out
