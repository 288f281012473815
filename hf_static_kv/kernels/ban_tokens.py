"""Tokens that may not come next, as two of `generate`'s processors say: their logits become -inf.

min_length    end tokens, while the sequence is shorter than that
ngram         tokens that would complete n tokens which the sequence has already

logits: [B, V]   positions: [B], int64, of the newest token   min_length: [B], int64
"""

import torch
from torch import Tensor

from hf_static_kv.kernels.select_greedy import GreedyState

MAX_NGRAM = 16


def ban_tokens(
    logits: Tensor, positions: Tensor, state: GreedyState, min_length: Tensor, ngram: int = 0
) -> Tensor:
    """A copy of the logits without the tokens that may not come next; `ngram` 0: any may repeat."""
    if not 0 <= ngram <= MAX_NGRAM:
        raise ValueError(f"ngram must be 0 to {MAX_NGRAM}, got {ngram}.")
    logits = logits.clone()
    if logits.is_cuda:
        from hf_static_kv.kernels.ban_tokens_triton import ban_tokens_triton

        ban_tokens_triton(logits, positions, state.sequences, state.eos, min_length, ngram)
        return logits
    return ban_tokens_plain(logits, positions, state, min_length, ngram)


def ban_tokens_plain(
    logits: Tensor, positions: Tensor, state: GreedyState, min_length: Tensor, ngram: int
) -> Tensor:
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    positions = positions.clamp(max=state.sequences.shape[1] - 1)
    is_short = positions + 1 < min_length
    is_banned = (tokens[None, None] == state.eos[..., None]).any(dim=1) & is_short[:, None]
    if ngram:
        # [B, windows, n]: the last token of a window is banned if those before it come again.
        windows = state.sequences.unfold(1, ngram, 1)
        ends = torch.arange(windows.shape[1], device=logits.device) + ngram - 1
        newest = torch.arange(2 - ngram, 1, device=logits.device) + positions[:, None]
        newest = state.sequences.gather(1, newest.clamp(min=0))  # [B, n - 1]
        comes_again = (windows[..., :-1] == newest[:, None]).all(dim=-1)
        comes_again &= (ends <= positions[:, None]) & (positions[:, None] + 2 >= ngram)
        # One column more takes what is not banned, and tokens that have no logit.
        size = logits.shape[-1]
        last = torch.where(comes_again & (windows[..., -1] < size), windows[..., -1], size)
        is_banned = torch.cat([is_banned, is_banned[:, :1]], dim=1).scatter(1, last, True)[:, :-1]
    return logits.masked_fill(is_banned, -torch.inf)
