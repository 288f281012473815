"""RMS norm in Triton, one program a row. Formula and styles are in rms_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch
from hf_static_kv.kernels.rms_norm import Norm


@triton.jit
def _rms_norm(
    x, other, weight, first_weight, summed, output, eps, offset, first_eps, first_offset,
    D: tl.constexpr, TILE: tl.constexpr, CAST_FIRST: tl.constexpr, FIRST_CAST_FIRST: tl.constexpr,
    IS_SUM: tl.constexpr, HAS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    first_w = tl.load(first_weight + d, mask=d < D, other=0.0) if HAS_FIRST else w
    after_previous(EARLY)
    at = row * D + d
    y = tl.load(x + at, mask=d < D, other=0.0)
    if IS_SUM:
        term = tl.load(other + at, mask=d < D, other=0.0)
        if HAS_FIRST:
            term = _normed(term, first_w, first_eps, first_offset, D, FIRST_CAST_FIRST)
        y = (y.to(tl.float32) + term.to(tl.float32)).to(y.dtype)
        tl.store(summed + at, y, mask=d < D)
    tl.store(output + at, _normed(y, w, eps, offset, D, CAST_FIRST), mask=d < D)


@triton.jit
def _normed(x, w, eps, offset, D: tl.constexpr, CAST_FIRST: tl.constexpr):
    return scaled(x, scale_of_row(x, eps, D), w, offset, CAST_FIRST)


@triton.jit
def scale_of_row(x, eps, D: tl.constexpr):
    """What the numbers of a row are multiplied by."""
    y = x.to(tl.float32)
    return tl.rsqrt(tl.sum(y * y, 0) / D + eps)


@triton.jit
def scaled(x, scale, w, offset, CAST_FIRST: tl.constexpr):
    """They, times the weight."""
    y = x.to(tl.float32) * scale
    y = y.to(x.dtype).to(tl.float32) * w.to(tl.float32) if CAST_FIRST else y * (offset + w.to(tl.float32))
    return y.to(x.dtype)


def rms_norm_triton(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    cast_first: bool,
    first: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, or its sum with `other`, of which the `first` norm is taken where there is one; and the norm of that."""
    x = x.contiguous()
    output, dim = torch.empty_like(x), x.shape[-1]
    summed = x if other is None else torch.empty_like(x)
    tile = triton.next_power_of_2(dim)
    first_weight, first_eps, (first_offset, first_cast) = (
        (weight, eps, (offset, cast_first)) if first is None else first
    )
    launch(
        _rms_norm, (x.numel() // dim,), x,
        x, x if other is None else other.contiguous(), weight, first_weight, summed, output,
        eps, offset, first_eps, first_offset, D=dim, TILE=tile, CAST_FIRST=cast_first, FIRST_CAST_FIRST=first_cast,
        IS_SUM=other is not None, HAS_FIRST=first is not None, num_warps=min(16, max(1, tile // 256)),
        enable_fp_fusion=False,  # so that the norm of a sum has the bits of the norm alone
    )  # fmt: skip
    return summed, output
