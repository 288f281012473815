"""Rotary position embedding of queries and keys.

y = x * cos + rotate_half(x) * sin      rotate_half([a, b]) = [-b, a], for the halves a and b of the head dim

query: [B, Hq, q, D]   key: [B, H, q, D]   cos, sin: [B, q, D], or [1, q, D] for all batch rows
"""

import torch
from torch import Tensor


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated query and key; both products and their sum are rounded to the dtype of x."""
    if is_supported(query, key, cos, sin):
        from hf_static_kv.kernels.rotary_triton import rotary_triton

        return rotary_triton(query, key, cos, sin)
    return rotary_plain(query, key, cos, sin)


def is_supported(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes these: on a GPU, one dtype, all dims of a head rotated."""
    if not query.is_cuda or query.ndim != 4:
        return False
    batch, _, length, dim = query.shape
    has_angles = cos.shape == sin.shape and cos.shape in ((batch, length, dim), (1, length, dim))
    is_alike = all(x.dtype == query.dtype and x.stride(-1) == 1 for x in (query, key, cos, sin))
    return has_angles and is_alike and key.shape[2:] == (length, dim) and dim % 2 == 0


def rotary_plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
