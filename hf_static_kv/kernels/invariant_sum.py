"""A batch-invariant sum over the last dim: the bits of a sum do not depend on the number of sums.

x: [..., D]   output: [...], float32 at least
"""

import torch
from torch import Tensor

from hf_static_kv.kernels.invariant_linear import padded_tiles


def invariant_sum(x: Tensor) -> Tensor:
    vectors = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        from hf_static_kv.kernels.invariant_sum_triton import invariant_sum_triton

        return invariant_sum_triton(vectors).view(x.shape[:-1])
    return invariant_sum_plain(vectors).view(x.shape[:-1])


def invariant_sum_plain(vectors: Tensor) -> Tensor:
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    return torch.cat([tile.to(dtype).sum(dim=-1) for tile in padded_tiles(vectors)])[: len(vectors)]
