"""RMS norm in Triton, one program a row. Formula and styles are in rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.early_launch_triton import after_previous, early_launch


@triton.jit
def _rms_norm(
    x, weight, output, eps, offset,
    D: tl.constexpr, TILE: tl.constexpr, CAST_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    after_previous(EARLY)
    loaded = tl.load(x + row * D + d, mask=d < D, other=0.0)
    y = loaded.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps)
    y = y.to(loaded.dtype).to(tl.float32) * w.to(tl.float32) if CAST_FIRST else y * (offset + w.to(tl.float32))
    tl.store(output + row * D + d, y.to(loaded.dtype), mask=d < D)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, cast_first: bool) -> torch.Tensor:
    x = x.contiguous()
    output, dim = torch.empty_like(x), x.shape[-1]
    tile = triton.next_power_of_2(dim)
    with torch.cuda.device_of(x):
        _rms_norm[(x.numel() // dim,)](
            x, weight, output, eps, offset, D=dim, TILE=tile, CAST_FIRST=cast_first,
            num_warps=min(16, max(1, tile // 256)), **early_launch(x),
        )  # fmt: skip
    return output
