"""Greedy selection in Triton. Formulas and shapes are in select_greedy.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# The vocabulary is cut into chunks, about one for each of the 132 multiprocessors of an H200.
_NUM_CHUNKS = 128


@triton.jit
def argmax_chunks(
    logits, maxima, tokens, logits_b, V, CHUNK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    v = tl.arange(0, TILE)
    pdl_sync(PDL)
    token = chunk * CHUNK + v
    logit = tl.load(
        logits + b * logits_b + token, mask=(v < CHUNK) & (token < V), other=-float("inf")
    )
    maximum, index = tl.max(logit.to(tl.float32), 0, return_indices=True)
    tl.store(maxima + b * tl.num_programs(1) + chunk, maximum)
    tl.store(tokens + b * tl.num_programs(1) + chunk, chunk * CHUNK + index)


@triton.jit
def select_token(
    maxima, tokens, positions, sequences, token, unfinished, eos, pad, is_over, last, counts, report,
    positions_b, sequences_b, B, S, V,
    TILE_B: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_EOS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, TILE_B)
    chunk = tl.arange(0, NUM_CHUNKS)
    e = tl.arange(0, NUM_EOS)
    pdl_sync(PDL)
    mask = b < B
    offset = b[:, None] * NUM_CHUNKS + chunk[None, :]
    chunk_maximum = tl.load(maxima + offset, mask=mask[:, None], other=0.0)
    chunk_token = tl.load(tokens + offset, mask=mask[:, None], other=0)
    maximum = tl.max(chunk_maximum, 1)
    # Equal logits: the lowest token. NaN equals nothing: then it is V - 1, which is a valid token.
    argmax = tl.min(tl.where(chunk_maximum == maximum[:, None], chunk_token, V - 1), 1).to(tl.int64)
    running = tl.load(unfinished + b, mask=mask, other=0) != 0
    selected = tl.where(running, argmax, tl.load(pad + b, mask=mask, other=0))
    end = tl.load(eos + b[:, None] * NUM_EOS + e[None, :], mask=mask[:, None], other=-1)
    is_eos = tl.max((selected[:, None] == end).to(tl.int32), 1) != 0
    position = tl.load(positions + b * positions_b, mask=mask, other=0) + 1
    is_last = is_eos | (position >= tl.load(last + b, mask=mask, other=0))
    running = running & (is_last == 0) & mask
    at = b.to(tl.int64) * sequences_b + position
    tl.store(sequences + at, selected, mask=mask & (position < S))
    tl.store(token + b, selected, mask=mask)
    tl.store(unfinished + b, running, mask=mask)
    tl.store(counts + b, running.to(tl.int64), mask=mask)
    tl.store(report + b, tl.where(running, selected, -1 - selected), mask=mask)
    tl.store(is_over, tl.max(running.to(tl.int32), 0) == 0)


def select_greedy_triton(
    logits: Tensor,
    positions: Tensor,
    *state: Tensor,
    chunks: tuple[Tensor, Tensor] | None = None,
) -> None:
    """`state`: the fields of `GreedyState`, in their order."""
    maxima, tokens = chunks or _argmax_chunks(logits)
    select_triton(maxima, tokens, logits.shape[1], positions, *state)


def _argmax_chunks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each chunk, [n, chunks] in float32, and its token, in int32."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocabulary = logits.shape
    maxima = logits.new_empty(rows, _NUM_CHUNKS, dtype=torch.float32)
    tokens = logits.new_empty(rows, _NUM_CHUNKS, dtype=torch.int32)
    # So that a thread loads 16 bytes of bfloat16 at once.
    chunk = 8 * triton.cdiv(vocabulary, 8 * _NUM_CHUNKS)
    launch(
        argmax_chunks, (rows, _NUM_CHUNKS), logits, maxima, tokens, logits.stride(0), vocabulary,
        CHUNK=chunk, TILE=triton.next_power_of_2(chunk), num_warps=4,
    )  # fmt: skip
    return maxima, tokens


def select_triton(
    maxima: Tensor, tokens: Tensor, vocabulary: int, positions: Tensor, *state: Tensor
) -> None:
    """Select the token of the largest maximum of each row.

    maxima: [B, chunks], float32   tokens: [B, chunks], int32
    """
    sequences, _, _, eos, *_ = state
    batch, num_chunks = maxima.shape
    launch(
        select_token, (1,), maxima, tokens, positions, *state,
        positions.stride(0), sequences.stride(0), batch, sequences.shape[1], vocabulary,
        TILE_B=triton.next_power_of_2(batch), NUM_CHUNKS=num_chunks, NUM_EOS=eos.shape[1], num_warps=4,
    )  # fmt: skip


@triton.jit
def argmax_of_chunks(maxima, tokens, token, V, NUM_CHUNKS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offset = row * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)
    pdl_sync(PDL)
    maximum = tl.load(maxima + offset)
    largest = tl.max(maximum, 0)
    # As in `select_token`.
    argmax = tl.min(tl.where(maximum == largest, tl.load(tokens + offset), V - 1), 0)
    tl.store(token + row, argmax.to(tl.int64))


def most_likely_triton(logits: Tensor) -> Tensor:
    maxima, tokens = _argmax_chunks(logits)
    token = logits.new_empty(len(logits), dtype=torch.int64)
    launch(
        argmax_of_chunks, (len(logits),), maxima, tokens, token, logits.shape[1],
        NUM_CHUNKS=_NUM_CHUNKS, num_warps=1,
    )  # fmt: skip
    return token
