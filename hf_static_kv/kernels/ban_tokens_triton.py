"""Tokens that may not come next, in Triton. Formulas and shapes are in ban_tokens.py.

An instance has some windows of a sequence; the first of a row also has the end tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

_TILE = 256


@triton.jit
def ban_tokens(
    logits, positions, sequences, eos, min_length, S, V, logits_b, positions_b, sequences_b,
    NGRAM: tl.constexpr, NUM_EOS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    pdl_sync(PDL)
    position = tl.minimum(tl.load(positions + b * positions_b), S - 1)
    row = logits + b * logits_b
    banned = -float("inf")
    if tl.program_id(1) == 0:
        end = tl.load(eos + b * NUM_EOS + tl.arange(0, NUM_EOS))
        is_short = position + 1 < tl.load(min_length + b)
        tl.store(row + end, banned, mask=(end >= 0) & (end < V) & is_short)
    if NGRAM > 0:
        ids = sequences + b * sequences_b
        begin = tl.program_id(1) * TILE + tl.arange(0, TILE).to(tl.int64)
        comes_again = begin + NGRAM - 1 <= position
        for j in tl.static_range(NGRAM - 1):
            newest = tl.load(ids + tl.maximum(position - (NGRAM - 2) + j, 0))
            comes_again &= tl.load(ids + begin + j, mask=comes_again, other=-1) == newest
        last = tl.load(ids + begin + NGRAM - 1, mask=comes_again, other=-1)
        tl.store(row + last, banned, mask=comes_again & (last >= 0) & (last < V))


def ban_tokens_triton(
    logits: Tensor,
    positions: Tensor,
    sequences: Tensor,
    eos: Tensor,
    min_length: Tensor,
    ngram: int,
) -> None:
    """Writes -inf into `logits`."""
    batch, vocabulary = logits.shape
    tiles = triton.cdiv(sequences.shape[1], _TILE) if ngram else 1
    launch(
        ban_tokens, (batch, tiles), logits, positions, sequences, eos, min_length,
        sequences.shape[1], vocabulary, logits.stride(0), positions.stride(0), sequences.stride(0),
        NGRAM=ngram, NUM_EOS=eos.shape[1], TILE=_TILE, num_warps=4,
    )  # fmt: skip
