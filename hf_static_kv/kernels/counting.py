"""What a captured step does around the model: count its positions on, and choose the next token.

    slot: [1], the last position that was written      origin: [B, 1], where the text of a row begins
    windows: [L], how far each layer sees              spans: [B, L, 3], what it reads: origin, first, end

All of it is small and happens at every step, so on a GPU it is one kernel before the model and two after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_MAX_ROWS_IN_KERNEL = 64


def count_on(
    slot: torch.Tensor, origin: torch.Tensor, windows: torch.Tensor, spans: torch.Tensor, positions: torch.Tensor
) -> None:
    """One position further: `slot`, `spans` and `positions` [B, 1] are written in place."""
    if slot.is_cuda and len(origin) <= _MAX_ROWS_IN_KERNEL:
        from hf_static_kv.kernels.counting_triton import count_on_triton

        return count_on_triton(slot, origin, windows, spans, positions)
    return count_on_plain(slot, origin, windows, spans, positions)


def count_on_plain(
    slot: torch.Tensor, origin: torch.Tensor, windows: torch.Tensor, spans: torch.Tensor, positions: torch.Tensor
) -> None:
    slot += 1
    end = slot + 1
    spans[:, :, 0].copy_(origin.expand(spans.shape[:2]))
    torch.maximum(origin, end - windows, out=spans[:, :, 1])
    spans[:, :, 2].copy_(end.expand(spans.shape[:2]))
    positions.copy_(slot - origin)


class Greedy(NamedTuple):
    """The state of rows that choose their likeliest token until an end token comes, all written in place."""

    text: torch.Tensor  # [B, room + 1], by position
    token: torch.Tensor  # [B, 1], the one chosen last
    unfinished: torch.Tensor  # [B, 1], bool
    eos: torch.Tensor  # [1, n], -1 where there is none
    pad: torch.Tensor  # [1], what follows an end token
    is_over: torch.Tensor  # [], bool: no row is unfinished


def choose(logits: torch.Tensor, slot: torch.Tensor, state: Greedy) -> None:
    """The likeliest token of each row of `logits` [B, V], or padding in a row that has ended, for position slot + 1."""
    if logits.is_cuda and len(logits) <= _MAX_ROWS_IN_KERNEL:
        from hf_static_kv.kernels.counting_triton import choose_triton

        return choose_triton(logits, slot, state)
    return choose_plain(logits, slot, state)


def choose_plain(logits: torch.Tensor, slot: torch.Tensor, state: Greedy) -> None:
    tokens = torch.where(state.unfinished, logits.argmax(dim=-1, keepdim=True), state.pad)
    state.text.index_copy_(1, slot + 1, tokens)
    state.unfinished.logical_and_((tokens != state.eos).all(dim=1, keepdim=True))
    state.is_over.copy_(~state.unfinished.any())
    state.token.copy_(tokens)
