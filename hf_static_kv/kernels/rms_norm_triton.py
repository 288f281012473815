"""RMS norm in Triton, one program per vector [D]. Formulas and styles are in rms_norm.py."""

from contextlib import suppress

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

_Norm = tuple[Tensor, float, tuple[float, bool]]  # weight, eps, (offset, cast_first): Norm of rms_norm.py


@triton.jit
def _rms_norm(
    x, other, weight, pre_weight, total, output, eps, offset, pre_eps, pre_offset, vectors, x_block, x_vector,
    D: tl.constexpr, TILE: tl.constexpr, CAST_FIRST: tl.constexpr, PRE_CAST_FIRST: tl.constexpr,
    IS_SUM: tl.constexpr, HAS_PRE_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    i, d = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    w = tl.load(weight + d, mask=d < D, other=0.0)
    pre_w = tl.load(pre_weight + d, mask=d < D, other=0.0) if HAS_PRE_NORM else w
    pdl_sync(PDL)
    at = i * D + d
    y = tl.load(x + i // vectors * x_block + i % vectors * x_vector + d, mask=d < D, other=0.0)
    if IS_SUM:
        term = tl.load(other + at, mask=d < D, other=0.0)
        if HAS_PRE_NORM:
            term = _normalize(term, pre_w, pre_eps, pre_offset, D, PRE_CAST_FIRST)
        y = (y.to(tl.float32) + term.to(tl.float32)).to(y.dtype)
        tl.store(total + at, y, mask=d < D)
    tl.store(output + at, _normalize(y, w, eps, offset, D, CAST_FIRST), mask=d < D)


@triton.jit
def _normalize(x, w, eps, offset, D: tl.constexpr, CAST_FIRST: tl.constexpr):
    y = x.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + eps)
    y = y.to(x.dtype).to(tl.float32) * w.to(tl.float32) if CAST_FIRST else y * (offset + w.to(tl.float32))
    return y.to(x.dtype)


def rms_norm_triton(x: Tensor, other: Tensor | None, norm: _Norm, pre_norm: _Norm | None) -> tuple[Tensor, Tensor]:
    """x, or its sum with `other` or with the `pre_norm` of it; and the norm of that."""
    blocks, dim, tile = _as_blocks(x), x.shape[-1], triton.next_power_of_2(x.shape[-1])
    output = x.new_empty(x.shape)
    total = x if other is None else x.new_empty(x.shape)
    weight, eps, (offset, cast_first) = norm
    pre_weight, pre_eps, (pre_offset, pre_cast_first) = pre_norm or norm
    launch(
        _rms_norm, (x.numel() // dim,), blocks, blocks if other is None else other.contiguous(), weight, pre_weight,
        total, output, eps, offset, pre_eps, pre_offset, blocks.shape[1], *blocks.stride()[:2],
        D=dim, TILE=tile, CAST_FIRST=cast_first, PRE_CAST_FIRST=pre_cast_first,
        IS_SUM=other is not None, HAS_PRE_NORM=pre_norm is not None, num_warps=min(16, max(1, tile // 256)),
        enable_fp_fusion=False,  # an FMA would give the norm of a sum other bits than the norm alone
    )  # fmt: skip
    return total, output


def _as_blocks(x: Tensor) -> Tensor:
    """`x` as [blocks, vectors, D] without a copy where strides allow: the heads of a query in a joint projection.

    Only where the vectors are aligned as in a contiguous tensor: the order of the sum depends on the alignment.
    """
    is_aligned = all(n % 16 == 0 for n in (x.data_ptr(), x.shape[-1], *x.stride()[:-1]))
    if not x.is_contiguous() and x.ndim > 2 and x.stride(-1) == 1 and is_aligned:
        with suppress(RuntimeError):  # no such view
            return x.view(-1, *x.shape[-2:])
    return x.contiguous().view(-1, 1, x.shape[-1])
