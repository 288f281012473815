"""`advance` in Triton, in one program. Formula and shapes are in advance.py."""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync


@triton.jit
def _advance(
    cache_position, seq_start, windows, spans, position_ids, spans_b, spans_l, B, L,
    TILE_B: tl.constexpr, TILE_L: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_sync(PDL)
    position = tl.load(cache_position) + 1
    tl.debug_barrier()  # all threads have read it before one writes it
    tl.store(cache_position, position)
    b, layer = tl.arange(0, TILE_B), tl.arange(0, TILE_L)
    start = tl.load(seq_start + b, mask=b < B, other=0)
    tl.store(position_ids + b, position - start, mask=b < B)
    window = tl.load(windows + layer, mask=layer < L, other=0)
    mask = (b[:, None] < B) & (layer[None, :] < L)
    span = spans + b[:, None] * spans_b + layer[None, :] * spans_l
    tl.store(span, start[:, None], mask=mask)
    tl.store(span + 1, tl.maximum(start[:, None], position + 1 - window[None, :]), mask=mask)
    tl.store(span + 2, position + 1, mask=mask)


def advance_triton(
    cache_position: Tensor, seq_start: Tensor, windows: Tensor, spans: Tensor, position_ids: Tensor
) -> None:
    batch, layers, _ = spans.shape
    if spans.stride(-1) != 1:
        raise ValueError("advance needs spans whose last dim has stride 1.")
    launch(
        _advance, (1,), cache_position, seq_start, windows, spans, position_ids, *spans.stride()[:2], batch, layers,
        TILE_B=triton.next_power_of_2(batch), TILE_L=triton.next_power_of_2(layers), num_warps=4,
    )  # fmt: skip
