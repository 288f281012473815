"""Counting on and choosing in Triton. What they compute is in counting.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_static_kv.kernels.counting import Greedy
from hf_static_kv.kernels.launch_triton import after_previous, launch

_PIECES = 128  # of a row of logits, one program each


@triton.jit
def _count_on(
    slot, origin, windows, spans, positions, B, L,
    B_TILE: tl.constexpr, L_TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    after_previous(EARLY)
    now = tl.load(slot) + 1
    tl.debug_barrier()  # every thread has read it before one writes it
    tl.store(slot, now)
    b, layer = tl.arange(0, B_TILE), tl.arange(0, L_TILE)
    begin = tl.load(origin + b, mask=b < B, other=0)
    tl.store(positions + b, now - begin, mask=b < B)
    window = tl.load(windows + layer, mask=layer < L, other=0)
    here = (b[:, None] < B) & (layer[None, :] < L)
    span = spans + (b[:, None] * L + layer[None, :]) * 3
    tl.store(span, begin[:, None], mask=here)
    tl.store(span + 1, tl.maximum(begin[:, None], now + 1 - window[None, :]), mask=here)
    tl.store(span + 2, now + 1, mask=here)


def count_on_triton(
    slot: torch.Tensor, origin: torch.Tensor, windows: torch.Tensor, spans: torch.Tensor, positions: torch.Tensor
) -> None:
    batch, layers, _ = spans.shape
    launch(
        _count_on, (1,), slot, slot, origin, windows, spans, positions, batch, layers,
        B_TILE=triton.next_power_of_2(batch), L_TILE=triton.next_power_of_2(layers), num_warps=4,
    )  # fmt: skip


@triton.jit
def _largest(logits, tops, places, logits_b, V, PIECE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    b, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.arange(0, TILE)
    after_previous(EARLY)
    at = piece * PIECE + v
    here = (v < PIECE) & (at < V)
    top, place = tl.max(
        tl.load(logits + b * logits_b + at, mask=here, other=-float("inf")).to(tl.float32), 0, return_indices=True
    )
    tl.store(tops + b * tl.num_programs(1) + piece, top)
    tl.store(places + b * tl.num_programs(1) + piece, piece * PIECE + place)


@triton.jit
def _choose(
    tops, places, slot, text, token, unfinished, eos, pad, is_over, text_b, B, V,
    B_TILE: tl.constexpr, PIECES: tl.constexpr, EOS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    b, piece, e = tl.arange(0, B_TILE), tl.arange(0, PIECES), tl.arange(0, EOS)
    after_previous(EARLY)
    here = b < B
    at = b[:, None] * PIECES + piece[None, :]
    top = tl.load(tops + at, mask=here[:, None], other=0.0)
    place = tl.load(places + at, mask=here[:, None], other=0)
    best = tl.max(top, 1)
    # The first of equals. Not a number is equal to nothing: then it is the last token, and no place outside the text.
    likeliest = tl.min(tl.where(top == best[:, None], place, V - 1), 1).to(tl.int64)
    goes_on = tl.load(unfinished + b, mask=here, other=0) != 0
    chosen = tl.where(goes_on, likeliest, tl.load(pad))
    ends = tl.max((chosen[:, None] == tl.load(eos + e)[None, :]).to(tl.int32), 1) != 0
    goes_on = goes_on & (ends == 0) & here
    tl.store(text + b.to(tl.int64) * text_b + tl.load(slot) + 1, chosen, mask=here)
    tl.store(token + b, chosen, mask=here)
    tl.store(unfinished + b, goes_on, mask=here)
    tl.store(is_over, tl.max(goes_on.to(tl.int32), 0) == 0)


def choose_triton(logits: torch.Tensor, slot: torch.Tensor, state: Greedy) -> None:
    batch, vocabulary = logits.shape
    tops = torch.empty(batch, _PIECES, dtype=torch.float32, device=logits.device)
    places = torch.empty(batch, _PIECES, dtype=torch.int32, device=logits.device)
    piece = triton.cdiv(vocabulary, _PIECES)
    launch(
        _largest, (batch, _PIECES), logits, logits, tops, places, logits.stride(0), vocabulary,
        PIECE=piece, TILE=triton.next_power_of_2(piece), num_warps=4,
    )  # fmt: skip
    launch(
        _choose, (1,), logits, tops, places, slot, state.text, state.token, state.unfinished, state.eos, state.pad,
        state.is_over, state.text.stride(0), batch, vocabulary,
        B_TILE=triton.next_power_of_2(batch), PIECES=_PIECES, EOS=state.eos.shape[1], num_warps=4,
    )  # fmt: skip
