"""Advances the device-side inputs of a captured step by one position.

cache_position = cache_position + 1
position_ids      = cache_position - seq_start
spans          = seq_start, max(seq_start, end - window), end      where end = cache_position + 1

cache_position: [1]   seq_start: [B, 1]   windows: [L]   spans: [B, L, 3]   position_ids: [B, 1]   all int64
"""

import torch
from torch import Tensor

_MAX_BATCH_SIZE = 64  # of the kernel: one program holds all batch rows


def advance(cache_position: Tensor, seq_start: Tensor, windows: Tensor, spans: Tensor, position_ids: Tensor) -> None:
    """Write `cache_position`, `spans` and `position_ids` in place."""
    if cache_position.is_cuda and len(seq_start) <= _MAX_BATCH_SIZE:
        from hf_static_kv.kernels.advance_triton import advance_triton

        return advance_triton(cache_position, seq_start, windows, spans, position_ids)
    return advance_plain(cache_position, seq_start, windows, spans, position_ids)


def advance_plain(
    cache_position: Tensor, seq_start: Tensor, windows: Tensor, spans: Tensor, position_ids: Tensor
) -> None:
    cache_position += 1
    end = cache_position + 1
    spans[..., 0] = seq_start
    spans[..., 1] = torch.maximum(seq_start, end - windows)
    spans[..., 2] = end
    position_ids.copy_(cache_position - seq_start)
