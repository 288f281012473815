"""The batch-invariant sum in Triton, one program per vector [D]. Shapes are in invariant_sum.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync


@triton.jit
def _invariant_sum(x, output, D, TILE: tl.constexpr, PDL: tl.constexpr):
    i, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    pdl_sync(PDL)
    total = tl.zeros((TILE,), tl.float32)
    for begin in range(0, D, TILE):
        total += tl.load(x + i * D + begin + d, mask=begin + d < D, other=0.0).to(tl.float32)
    tl.store(output + i, tl.sum(total, 0))


def invariant_sum_triton(vectors: Tensor) -> Tensor:
    vectors = vectors.contiguous()
    (count, dim), tile = vectors.shape, min(4096, triton.next_power_of_2(vectors.shape[1]))
    output = torch.empty(count, dtype=torch.float32, device=vectors.device)
    launch(_invariant_sum, (count,), vectors, vectors, output, dim, TILE=tile, num_warps=4)
    return output
