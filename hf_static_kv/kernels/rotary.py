"""Rotary positions: the plain PyTorch twin, and the choice between it and the kernel.

y = x * cos + rotate_half(x) * sin        rotate_half: the second half of a head's dims, negated, before the first

query: [B, Hq, q, D]   key: [B, H, q, D]   cos, sin: [B, q, D], or one for all rows
"""

from __future__ import annotations

import torch


def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key, turned to their positions; each product and the sum are rounded to the model's dtype."""
    if is_served(query, key, cos, sin):
        from hf_static_kv.kernels.rotary_triton import rotary_triton

        return rotary_triton(query, key, cos, sin)
    return rotary_plain(query, key, cos, sin)


def is_served(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether the kernel takes this: on a GPU, all of one dtype, every dim of a head turned."""
    if not query.is_cuda or query.ndim != 4:
        return False
    batch, _, length, dim = query.shape
    return (
        query.dtype == key.dtype == cos.dtype == sin.dtype
        and cos.shape == sin.shape
        and cos.shape in ((batch, length, dim), (1, length, dim))
        and key.shape[2:] == (length, dim)
        and dim % 2 == 0
        and query.stride(-1) == key.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    )


def rotary_plain(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in plain PyTorch."""
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
