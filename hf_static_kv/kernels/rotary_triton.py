"""Rotary position embedding in Triton, one kernel instance per token and head. Formulas and shapes
are in rotary.py.

In `rope_and_cache_write` the instance of a KV head writes key and value.
"""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.cache.codes import holds_codes
from hf_static_kv.kernels.codes_triton import store_codes
from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.norm_triton import (
    TritonNorm,
    as_blocks,
    norm_arguments,
    num_warps,
    rms_multiply,
    rms_scale,
)

_FEW_TOKENS = 16  # with more a kernel instance has several: 82,000 instances take 100 us (H200)
_TOKENS = 8


@triton.jit
def rope(
    query, key, cos, sin, query_out, key_out, T,
    query_b, query_h, query_t, key_b, key_h, key_t, cos_b, cos_t, sin_b, sin_t,
    HQ: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % (HQ + H)).to(tl.int64)
    token = (tl.program_id(0) // (HQ + H)).to(tl.int64)
    b = token // T
    t = token % T
    d = tl.arange(0, TILE)
    mask = d < HALF
    x = query + b * query_b + h * query_h + t * query_t
    y = query_out + ((b * HQ + h) * T + t) * 2 * HALF
    if h >= HQ:
        h -= HQ
        x = key + b * key_b + h * key_h + t * key_t
        y = key_out + ((b * H + h) * T + t) * 2 * HALF
    pdl_sync(PDL)
    first, second = tl.load(x + d, mask=mask), tl.load(x + HALF + d, mask=mask)
    cos_at = cos + b * cos_b + t * cos_t + d
    sin_at = sin + b * sin_b + t * sin_t + d
    tl.store(
        y + d,
        rotate(first, -second, tl.load(cos_at, mask=mask), tl.load(sin_at, mask=mask)),
        mask=mask,
    )
    cos_2 = tl.load(cos_at + HALF, mask=mask)
    sin_2 = tl.load(sin_at + HALF, mask=mask)
    tl.store(y + HALF + d, rotate(second, first, cos_2, sin_2), mask=mask)


@triton.jit
def rotate(x, other, cos, sin):
    """x * cos + other * sin, rounded after every operation."""
    x_cos = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
    other_sin = (other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return (x_cos.to(tl.float32) + other_sin.to(tl.float32)).to(x.dtype)


def rotary_triton(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    batch, query_heads, length, dim = query.shape
    heads = key.shape[1]
    query_out = query.new_empty(query.shape)
    key_out = key.new_empty(key.shape)
    cos_b, sin_b = (0 if angles.shape[0] < batch else angles.stride(0) for angles in (cos, sin))
    launch(
        rope, (batch * length * (query_heads + heads),), query, key, cos, sin, query_out, key_out, length,
        *query.stride()[:3], *key.stride()[:3], cos_b, cos.stride(1), sin_b, sin.stride(1),
        HQ=query_heads, H=heads, HALF=dim // 2, TILE=triton.next_power_of_2(dim // 2), num_warps=1,
        enable_fp_fusion=False,  # an FMA would not round the product, as PyTorch does
    )  # fmt: skip
    return query_out, key_out


@triton.jit
def rope_and_cache_write(
    query, key, value, query_weight, key_weight, cos, sin, output, keys, values, slots,
    query_eps, key_eps, norm_offset,
    query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    cos_b, cos_t, sin_b, sin_t, keys_b, keys_h, keys_s, values_b, values_h, values_s, S, Q,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr, TILE_V: tl.constexpr, HAS_NORM: tl.constexpr, CAST_FIRST: tl.constexpr,
    HAS_ANGLES: tl.constexpr, IS_CODED: tl.constexpr, ANGLES_READY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // (HQ + H)).to(tl.int64)
    h = (tl.program_id(0) % (HQ + H)).to(tl.int64)
    b = token // Q
    t = token % Q
    d = tl.arange(0, TILE)
    dv = tl.arange(0, TILE_V)
    # Read before the wait: `place_tokens` ran at least two kernels ago.
    slot = tl.load(slots + token).to(tl.int64)
    is_key = h >= HQ
    x = query + b * query_b + t * query_t + h * query_h
    y = output + ((b * HQ + h) * Q + t) * D
    weight = query_weight
    eps = query_eps
    if is_key:
        h -= HQ
        x = key + b * key_b + t * key_t + h * key_h
        weight = key_weight
        eps = key_eps
    cos_at = cos + b * cos_b + t * cos_t + d
    sin_at = sin + b * sin_b + t * sin_t + d
    # What is not used (no norm, no angles) the compiler drops.
    w, swapped_w = _load_and_swapped(weight, d, D)
    if ANGLES_READY:
        c = tl.load(cos_at, mask=d < D)
        s = tl.load(sin_at, mask=d < D)
    pdl_sync(PDL)
    head, swapped = _load_and_swapped(x, d, D)
    if not ANGLES_READY:
        c = tl.load(cos_at, mask=d < D)
        s = tl.load(sin_at, mask=d < D)
    has_room = slot < S  # else a full cache, which the host refuses: never write into another head
    if is_key:
        v = tl.load(value + b * value_b + t * value_t + h * value_h + dv, mask=dv < DV)
        if IS_CODED:
            value_at = values + b * values_b + h * values_h + slot * values_s
            store_codes(value_at, dv, v, has_room, DV)
        else:
            y = keys + b * keys_b + h * keys_h + slot * keys_s
            value_at = values + b * values_b + h * values_h + slot * values_s + dv
            tl.store(value_at, v, mask=(dv < DV) & has_room)
    if HAS_NORM:
        scale = rms_scale(head, eps, D)
        head = rms_multiply(head, scale, w, norm_offset, CAST_FIRST)
        swapped = rms_multiply(swapped, scale, swapped_w, norm_offset, CAST_FIRST)
    if HAS_ANGLES:
        head = rotate(head, tl.where(d < D // 2, -swapped, swapped), c, s)
    if IS_CODED:
        key_at = keys + b * keys_b + h * keys_h + slot * keys_s
        store_codes(key_at, d, head, has_room & is_key, D)
        has_room = is_key == 0
    tl.store(y + d, head, mask=(d < D) & (has_room | (is_key == 0)))


@triton.jit
def rope_and_cache_write_tiles(
    query, key, value, query_weight, key_weight, cos, sin, output, keys, values, slots,
    query_eps, key_eps, norm_offset,
    query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    cos_b, cos_t, sin_b, sin_t, keys_b, keys_h, keys_s, values_b, values_h, values_s, S, Q,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr, TILE_V: tl.constexpr, HAS_NORM: tl.constexpr, CAST_FIRST: tl.constexpr,
    HAS_ANGLES: tl.constexpr, IS_CODED: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `rope_and_cache_write`, for several tokens of a head. A warp has a token: its sums have
    the order, and the bits, of that kernel."""
    h = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    d = tl.arange(0, TILE)[None, :]
    dv = tl.arange(0, TILE_V)[None, :]
    pdl_sync(PDL)
    slot = tl.load(slots + b * Q + t, mask=t < Q, other=S).to(tl.int64)  # [T, 1]
    is_key = h >= HQ
    x = query + b * query_b + h * query_h + t * query_t
    y = output + ((b * HQ + h) * Q + t) * D
    weight = query_weight
    eps = query_eps
    if is_key:
        h -= HQ
        x = key + b * key_b + h * key_h + t * key_t
        if not IS_CODED:
            y = keys + b * keys_b + h * keys_h + slot * keys_s
        weight = key_weight
        eps = key_eps
        has_value = (t < Q) & (dv < DV)
        v = tl.load(value + b * value_b + h * value_h + t * value_t + dv, mask=has_value)
        if IS_CODED:
            value_at = values + b * values_b + h * values_h + slot * values_s
            store_codes(value_at, dv, v, (t < Q) & (slot < S), DV)
        else:
            value_at = values + b * values_b + h * values_h + slot * values_s + dv
            tl.store(value_at, v, mask=has_value & (slot < S))
    mask = (t < Q) & (d < D)
    swap = tl.where(d < D // 2, d + D // 2, d - D // 2)
    head = tl.load(x + d, mask=mask, other=0.0)
    swapped = tl.load(x + swap, mask=mask, other=0.0)
    if HAS_NORM:
        squares = head.to(tl.float32)
        scale = tl.rsqrt(tl.sum(squares * squares, 1) / D + eps)[:, None]
        w, swapped_w = _load_and_swapped(weight, d, D)
        head = rms_multiply(head, scale, w, norm_offset, CAST_FIRST)
        swapped = rms_multiply(swapped, scale, swapped_w, norm_offset, CAST_FIRST)
    if HAS_ANGLES:
        c = tl.load(cos + b * cos_b + t * cos_t + d, mask=mask)
        s = tl.load(sin + b * sin_b + t * sin_t + d, mask=mask)
        head = rotate(head, tl.where(d < D // 2, -swapped, swapped), c, s)
    if IS_CODED:
        key_at = keys + b * keys_b + h * keys_h + slot * keys_s
        store_codes(key_at, d, head, (t < Q) & (slot < S) & is_key, D)
        mask = mask & (is_key == 0)
    tl.store(y + d, head, mask=mask & ((slot < S) | (is_key == 0)))


@triton.jit
def _load_and_swapped(x, d, D: tl.constexpr):
    """A vector, and the same with its halves swapped: two loads, no exchange between threads."""
    swapped = tl.where(d < D // 2, d + D // 2, d - D // 2)
    return tl.load(x + d, mask=d < D, other=0.0), tl.load(x + swapped, mask=d < D, other=0.0)


def rotate_and_write_triton(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None,
    keys: Tensor, values: Tensor, slots: Tensor,
    query_norm: TritonNorm | None, key_norm: TritonNorm | None, angles_ready: bool = False,
) -> Tensor:  # fmt: skip
    """Both norms have one style, or both are None."""
    batch, query_heads, num_tokens, dim = query.shape
    heads = key.shape[1]
    value_dim = value.shape[-1]
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("rotate_and_write needs keys and values whose last dim has stride 1.")
    output = query.new_empty(query.shape)
    states = [_as_the_norm_reads(x) for x in (query, key, value)]  # [B, q, H, D]
    strides = [stride for x in states for stride in x.stride()[:3]]
    (query_weight, _), (query_eps, offset), of_norm = norm_arguments(query_norm, query)
    (key_weight, _), (key_eps, _), _ = norm_arguments(key_norm, query)
    angles = [query[:, 0] if x is None else x for x in (cos, sin)]
    angles = [x if x.stride(-1) == 1 else x.contiguous() for x in angles]
    for x in angles:
        strides += [0 if x.shape[0] < batch else x.stride(0), x.stride(1)]
    tile = triton.next_power_of_2(dim)
    arguments = (
        *states, query_weight, key_weight, *angles, output, keys, values, slots.contiguous(),
        query_eps, key_eps, offset, *strides,
        *keys.stride()[:3], *values.stride()[:3], keys.shape[2], num_tokens,
    )  # fmt: skip
    constants = {
        "HQ": query_heads, "H": heads, "D": dim, "DV": value_dim,
        "TILE": tile, "TILE_V": triton.next_power_of_2(value_dim),
        "HAS_NORM": query_norm is not None, "CAST_FIRST": of_norm["CAST_FIRST"],
        "HAS_ANGLES": cos is not None, "IS_CODED": holds_codes(keys, key),
        "enable_fp_fusion": False,  # as in the kernels of the parts
    }  # fmt: skip
    # A warp loads up to 512 bytes at once: of a longer head it would share the sum with others.
    if num_tokens > _FEW_TOKENS and tile * query.element_size() <= 512:
        grid = triton.cdiv(num_tokens, _TOKENS), query_heads + heads, batch
        how = {"TOKENS": _TOKENS, "num_warps": _TOKENS}
        launch(rope_and_cache_write_tiles, grid, *arguments, **constants, **how)
    else:
        how = {"ANGLES_READY": angles_ready, "num_warps": num_warps(tile)}
        instances = batch * num_tokens * (query_heads + heads)
        launch(rope_and_cache_write, (instances,), *arguments, **constants, **how)
    return output


def _as_the_norm_reads(x: Tensor) -> Tensor:
    """[B, H, q, D] as [B, q, H, D]; copied if `norm` would copy: its bits depend on alignment."""
    batch, heads, num_tokens, dim = x.shape
    # The heads of a joint projection can be viewed as blocks.
    return as_blocks(x.transpose(1, 2)).view(batch, num_tokens, heads, dim)
