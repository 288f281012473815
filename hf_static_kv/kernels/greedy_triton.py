"""Greedy selection in Triton: an argmax of each chunk of the vocabulary, then of the chunks. See greedy.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

_NUM_CHUNKS = 128  # of the vocabulary, one program each: about one per multiprocessor of an H200, which has 132


@triton.jit
def _argmax_chunks(logits, maxima, tokens, logits_b, V, CHUNK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    b, chunk, v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, TILE)
    pdl_sync(PDL)
    token = chunk * CHUNK + v
    logit = tl.load(logits + b * logits_b + token, mask=(v < CHUNK) & (token < V), other=-float("inf"))
    maximum, index = tl.max(logit.to(tl.float32), 0, return_indices=True)
    tl.store(maxima + b * tl.num_programs(1) + chunk, maximum)
    tl.store(tokens + b * tl.num_programs(1) + chunk, chunk * CHUNK + index)


@triton.jit
def _select(
    maxima, tokens, cache_position, sequences, token, unfinished, eos, pad, is_over, sequences_b, B, V,
    TILE_B: tl.constexpr, NUM_CHUNKS: tl.constexpr, NUM_EOS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, chunk, e = tl.arange(0, TILE_B), tl.arange(0, NUM_CHUNKS), tl.arange(0, NUM_EOS)
    pdl_sync(PDL)
    mask = b < B
    offset = b[:, None] * NUM_CHUNKS + chunk[None, :]
    chunk_maximum = tl.load(maxima + offset, mask=mask[:, None], other=0.0)
    chunk_token = tl.load(tokens + offset, mask=mask[:, None], other=0)
    maximum = tl.max(chunk_maximum, 1)
    # Equal logits: the lowest token. NaN equals nothing: then it is V - 1, which is a valid token.
    argmax = tl.min(tl.where(chunk_maximum == maximum[:, None], chunk_token, V - 1), 1).to(tl.int64)
    running = tl.load(unfinished + b, mask=mask, other=0) != 0
    selected = tl.where(running, argmax, tl.load(pad))
    is_eos = tl.max((selected[:, None] == tl.load(eos + e)[None, :]).to(tl.int32), 1) != 0
    running = running & (is_eos == 0) & mask
    tl.store(sequences + b.to(tl.int64) * sequences_b + tl.load(cache_position) + 1, selected, mask=mask)
    tl.store(token + b, selected, mask=mask)
    tl.store(unfinished + b, running, mask=mask)
    tl.store(is_over, tl.max(running.to(tl.int32), 0) == 0)


def select_greedy_triton(logits: Tensor, cache_position: Tensor, *state: Tensor) -> None:
    """`state`: the fields of `GreedyState`, in their order."""
    sequences, _, _, eos, _, _ = state
    batch, vocabulary = logits.shape
    maxima, tokens = (logits.new_empty(batch, _NUM_CHUNKS, dtype=dtype) for dtype in (torch.float32, torch.int32))
    chunk = triton.cdiv(vocabulary, _NUM_CHUNKS)
    launch(
        _argmax_chunks, (batch, _NUM_CHUNKS), logits, maxima, tokens, logits.stride(0), vocabulary,
        CHUNK=chunk, TILE=triton.next_power_of_2(chunk), num_warps=4,
    )  # fmt: skip
    launch(
        _select, (1,), maxima, tokens, cache_position, *state, sequences.stride(0), batch, vocabulary,
        TILE_B=triton.next_power_of_2(batch), NUM_CHUNKS=_NUM_CHUNKS, NUM_EOS=eos.shape[1], num_warps=4,
    )  # fmt: skip
