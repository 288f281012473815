"""The sum of each row in an order that does not depend on how many rows there are.

x: [..., D]   output: [...], in float32 at least
"""

from __future__ import annotations

import torch

from hf_static_kv.kernels.row_linear import padded_tiles


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """The sums over the last dim."""
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        from hf_static_kv.kernels.row_sum_triton import row_sum_triton

        return row_sum_triton(rows).view(x.shape[:-1])
    return row_sum_plain(rows).view(x.shape[:-1])


def row_sum_plain(rows: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch, for [M, D]."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return torch.cat([tile.to(dtype).sum(dim=-1) for tile in padded_tiles(rows)])[: len(rows)]
