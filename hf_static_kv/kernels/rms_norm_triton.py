"""RMS norm in Triton, one program a row. Formula and styles are in rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch


@triton.jit
def _rms_norm(
    x, other, weight, summed, output, eps, offset,
    D: tl.constexpr, TILE: tl.constexpr, CAST_FIRST: tl.constexpr, IS_SUM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    after_previous(EARLY)
    at = row * D + d
    loaded = tl.load(x + at, mask=d < D, other=0.0)
    y = loaded.to(tl.float32)
    if IS_SUM:
        y = (y + tl.load(other + at, mask=d < D, other=0.0).to(tl.float32)).to(loaded.dtype)
        tl.store(summed + at, y, mask=d < D)
        y = y.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps)
    y = y.to(loaded.dtype).to(tl.float32) * w.to(tl.float32) if CAST_FIRST else y * (offset + w.to(tl.float32))
    tl.store(output + at, y.to(loaded.dtype), mask=d < D)


def rms_norm_triton(
    x: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float, cast_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, or its sum with `other`, and the norm of that."""
    x = x.contiguous()
    output, dim = torch.empty_like(x), x.shape[-1]
    summed = x if other is None else torch.empty_like(x)
    tile = triton.next_power_of_2(dim)
    launch(
        _rms_norm, (x.numel() // dim,), x,
        x, x if other is None else other.contiguous(), weight, summed, output, eps, offset,
        D=dim, TILE=tile, CAST_FIRST=cast_first, IS_SUM=other is not None, num_warps=min(16, max(1, tile // 256)),
        enable_fp_fusion=False,  # so that the norm of a sum has the bits of the norm alone
    )  # fmt: skip
    return summed, output
