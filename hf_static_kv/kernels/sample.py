"""Sampling of the next token in a captured step, as `generate` samples it. `Processors` says which
lines run.

    repetition    score = score * penalty where score < 0, else score / penalty      of tokens in the sequence
    min_length    score = -inf      of end tokens while the sequence is shorter than that
    temperature   score = score / temperature
    top_k         keep scores >= the k-th largest
    top_p         keep scores s with mass(scores after s) < p * mass(all)
                  mass: the sum of exp(score); after: in ascending order, of equal scores the higher
                  token last
    min_p         keep exp(score - max) >= min_p
    token = argmax(exp(score - max) / noise) of what is kept, then as `select_greedy`; noise is exponential

    logits: [B, V] of any float dtype, computed in float32   noise: [B, V] float32   positions: [1]

`torch.multinomial` draws one token by the same formula, so the tokens and the generator's state are
those of `generate` under the same seed. The kernels differ from it in three ways, and do not run
inside `exact`:

- Sums and exp are rounded differently: a token at the very edge of top_p or min_p may be kept or
  not, and of two quotients that agree in 6 digits the other one may be the larger.
- A temperature above 2^14 may make scores equal whose logits, of 16 bits, are not. Then top_p keeps
  the larger logit first.
- A row of NaN or of -inf alone gives some token of the vocabulary; `generate` raises an error.

The order of equal scores is that of `torch.sort`: a radix sort on a GPU, which keeps the order of
tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_static_kv.kernels.select_greedy import GreedyState, select_plain

_MAX_BATCH_SIZE = 64  # of the kernels: one instance holds all batch rows
_MAX_KERNEL_VOCABULARY = 2**19  # one instance holds a 128th of it in registers
_MAX_VOCABULARY = 2**24  # of torch.multinomial


class Processors(NamedTuple):
    """Which processors run. Fixed in a captured graph: one that is absent costs nothing."""

    repetition: bool = False
    min_length: bool = False
    temperature: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False


class SampleState(NamedTuple):
    """The tensors of sampling.

    The numbers of each batch row are float64, as Python's, so that 1 - top_p and 1 / temperature are too.
    """

    selection: GreedyState
    kinds: Processors
    temperature: Tensor  # [B]
    top_k: Tensor  # [B], int64; the vocabulary or more: off
    top_p: Tensor  # [B], 1: off
    min_p: Tensor  # [B], 0: off
    repetition_penalty: Tensor  # [B], 1: off
    min_length: Tensor  # [B], int64, in positions of `sequences`; 0: off


def select_sampled(
    logits: Tensor, positions: Tensor, state: SampleState, noise: Tensor | None = None
) -> None:
    """Sample the token after `positions` [B] in each batch row from `logits` [B, V].

    Without `noise` it is drawn here, from torch's generator.
    """
    _check(logits, state)
    if noise is None:
        # First, so that no kernel of torch, which has no PDL, stands between ours.
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(1)
    batch_size, vocabulary = logits.shape
    is_small = batch_size <= _MAX_BATCH_SIZE and vocabulary <= _MAX_KERNEL_VOCABULARY
    if logits.is_cuda and is_small:
        from hf_static_kv.kernels.sample_triton import select_sampled_triton

        return select_sampled_triton(logits, noise, positions, *state)
    return select_sampled_plain(logits, noise, positions, state)


def select_sampled_plain(
    logits: Tensor, noise: Tensor, positions: Tensor, state: SampleState
) -> None:
    probabilities = process_plain(logits, positions, state).softmax(dim=-1)
    select_plain((probabilities / noise).argmax(dim=-1, keepdim=True), positions, state.selection)


def process_plain(logits: Tensor, positions: Tensor, state: SampleState) -> Tensor:
    """The scores, -inf where a token is not kept, by the formulas of transformers' processors."""
    scores = logits.float()
    kinds = state.kinds
    if kinds.repetition:
        scores = _penalize(scores, positions, state.selection.sequences, state.repetition_penalty)
    if kinds.min_length:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        is_short = positions + 1 < state.min_length
        is_end = (tokens[None, None] == state.selection.eos[..., None]).any(dim=1)
        is_refused = is_end & is_short[:, None]
        scores = scores.masked_fill(is_refused, -torch.inf)
    if kinds.temperature:
        scores = _divide(scores, state.temperature)
    if kinds.top_k:
        last = state.top_k.clamp(max=scores.shape[-1]) - 1
        smallest = scores.sort(dim=-1, descending=True).values.gather(-1, last[:, None])
        scores = scores.masked_fill(scores < smallest, -torch.inf)
    if kinds.top_p:
        ascending, order = scores.sort(dim=-1)
        is_removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - state.top_p[:, None]).float()
        is_removed[:, -1] = False
        scores = scores.masked_fill(is_removed.scatter(1, order, is_removed), -torch.inf)
    if kinds.min_p:
        probabilities = scores.softmax(dim=-1)
        least = state.min_p[:, None].float() * probabilities.amax(dim=-1, keepdim=True)
        is_removed = probabilities < least
        scores = scores.masked_fill(is_removed, -torch.inf)
    return scores


def _penalize(scores: Tensor, positions: Tensor, sequences: Tensor, penalty: Tensor) -> Tensor:
    is_past = torch.arange(sequences.shape[1], device=sequences.device) <= positions[:, None]
    # The first token stands in for positions that have none yet. One column more takes tokens that
    # have no logit.
    tokens = torch.where(is_past, sequences, sequences[:, :1]).clamp(max=scores.shape[-1])
    padded = torch.nn.functional.pad(scores, (0, 1))
    seen = padded.gather(1, tokens)
    seen = torch.where(seen < 0, seen * penalty[:, None].float(), _divide(seen, penalty))
    return padded.scatter(1, tokens, seen)[:, :-1]


def _divide(x: Tensor, number: Tensor) -> Tensor:
    """As torch divides by a Python number: on a GPU by the reciprocal, rounded from float64."""
    number = number[:, None]
    return x * number.reciprocal().float() if x.is_cuda else x / number.float()


def _check(logits: Tensor, state: SampleState) -> None:
    sequences = state.selection.sequences
    if logits.ndim != 2 or len(logits) != len(sequences):
        shapes = f"logits {tuple(logits.shape)} and sequences {tuple(sequences.shape)}"
        raise ValueError(f"{shapes} do not fit: [B, V], [B, S].")
    if not 0 < logits.shape[1] <= _MAX_VOCABULARY:
        raise ValueError(
            f"Sampling takes 1 to {_MAX_VOCABULARY} tokens, got logits of {logits.shape[1]}."
        )
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_length"):
        number = getattr(state, name)
        dtype = torch.int64 if name in ("top_k", "min_length") else torch.float64
        if number.shape != (len(logits),) or number.dtype != dtype:
            given = f"{tuple(number.shape)} {number.dtype}"
            raise ValueError(f"{name} must be ({len(logits)},) {dtype}, got {given}.")
