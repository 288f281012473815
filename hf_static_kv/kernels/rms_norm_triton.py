"""RMS norm in Triton, one program a row. Formula and styles are in rms_norm.py."""

from __future__ import annotations

from contextlib import suppress

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.launch_triton import after_previous, launch
from hf_static_kv.kernels.rms_norm import Norm


@triton.jit
def _rms_norm(
    x, other, weight, first_weight, summed, output, eps, offset, first_eps, first_offset, rows, x_block, x_row,
    D: tl.constexpr, TILE: tl.constexpr, CAST_FIRST: tl.constexpr, FIRST_CAST_FIRST: tl.constexpr,
    IS_SUM: tl.constexpr, HAS_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    first_w = tl.load(first_weight + d, mask=d < D, other=0.0) if HAS_FIRST else w
    after_previous(EARLY)
    at = row * D + d
    y = tl.load(x + row // rows * x_block + row % rows * x_row + d, mask=d < D, other=0.0)
    if IS_SUM:
        term = tl.load(other + at, mask=d < D, other=0.0)
        if HAS_FIRST:
            term = _normed(term, first_w, first_eps, first_offset, D, FIRST_CAST_FIRST)
        y = (y.to(tl.float32) + term.to(tl.float32)).to(y.dtype)
        tl.store(summed + at, y, mask=d < D)
    tl.store(output + at, _normed(y, w, eps, offset, D, CAST_FIRST), mask=d < D)


@triton.jit
def _normed(x, w, eps, offset, D: tl.constexpr, CAST_FIRST: tl.constexpr):
    y = x.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps)
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
    blocks, dim = _blocks(x), x.shape[-1]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = x if other is None else torch.empty_like(output)
    tile = triton.next_power_of_2(dim)
    first_weight, first_eps, (first_offset, first_cast) = (
        (weight, eps, (offset, cast_first)) if first is None else first
    )
    launch(
        _rms_norm, (x.numel() // dim,), x,
        blocks, blocks if other is None else other.contiguous(), weight, first_weight, summed, output,
        eps, offset, first_eps, first_offset, blocks.shape[1], *blocks.stride()[:2],
        D=dim, TILE=tile, CAST_FIRST=cast_first, FIRST_CAST_FIRST=first_cast,
        IS_SUM=other is not None, HAS_FIRST=first is not None, num_warps=min(16, max(1, tile // 256)),
        enable_fp_fusion=False,  # so that the norm of a sum has the bits of the norm alone
    )  # fmt: skip
    return summed, output


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """`x` as blocks of rows [-1, rows, D] of even strides: the heads of a query that stands beside its key, uncopied.

    Only where these are aligned as rows of a contiguous tensor are: the order of a sum depends on it.
    """
    is_aligned = all(n % 16 == 0 for n in (x.data_ptr(), x.shape[-1], *x.stride()[:-1]))
    if not x.is_contiguous() and x.ndim > 2 and x.stride(-1) == 1 and is_aligned:
        with suppress(RuntimeError):  # no such view
            return x.view(-1, *x.shape[-2:])
    return x.contiguous().view(-1, 1, x.shape[-1])
