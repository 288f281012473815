"""Sums of rows in Triton, one program a row. What they are for is in row_sum.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch


@triton.jit
def _row_sum(x, output, D, TILE: tl.constexpr, EARLY: tl.constexpr):
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    after_previous(EARLY)
    total = tl.zeros((TILE,), tl.float32)
    for begin in range(0, D, TILE):
        total += tl.load(x + row * D + begin + d, mask=begin + d < D, other=0.0).to(tl.float32)
    tl.store(output + row, tl.sum(total, 0))


def row_sum_triton(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    output = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
    tile = min(4096, triton.next_power_of_2(rows.shape[1]))
    launch(_row_sum, (len(rows),), rows, rows, output, rows.shape[1], TILE=tile, num_warps=4)
    return output
