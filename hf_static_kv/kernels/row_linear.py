"""A linear layer whose result for a row does not depend on how many rows there are, nor on the row's place among them.

    x: [M, K]   weight: [N, K], by any strides   bias: [N]   output: [M, N]

On a GPU: one order of summing for all. On a CPU: tiles of rows padded to one shape, so that the library runs the same
code for all.
"""

from __future__ import annotations

from functools import lru_cache

import torch

TILE = 16


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` times `weight` transposed, and `bias` added."""
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: [M, K] and [N, K].")
    if x.is_cuda:
        from hf_static_kv.kernels.row_linear_triton import row_linear_triton

        return row_linear_triton(x, weight, bias)
    return row_linear_plain(x, weight, bias)


def row_linear_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same in plain PyTorch."""
    transposed = weight.t()
    tile = TILE if _places_are_alike(*weight.shape, weight.stride(), weight.dtype) else 1
    y = torch.cat([torch.mm(rows, transposed) for rows in padded_tiles(x, tile)])[: len(x)]
    return y if bias is None else y + bias


def padded_tiles(x: torch.Tensor, tile: int = TILE) -> list[torch.Tensor]:
    """The rows of `x` [M, K] in tiles of one shape [tile, K], each in memory of its own; zeros after the last row."""
    tiles = []
    for begin in range(0, len(x), tile):
        rows = x.new_zeros(tile, x.shape[1])
        rows[: len(x) - begin] = x[begin : begin + tile]
        tiles.append(rows)
    return tiles


@lru_cache(maxsize=1024)
def _places_are_alike(size: int, dim: int, stride: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the library computes every row of a tile in the same way: tried on sixteen rows that are one."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        elements = 1 + (size - 1) * stride[0] + (dim - 1) * stride[1]
        row, base = torch.randn(dim, generator=generator), torch.randn(elements, generator=generator)
        y = torch.mm(row.to(dtype).repeat(TILE, 1), base.to(dtype).as_strided((size, dim), stride).t())
    return bool((y == y[:1]).all())
