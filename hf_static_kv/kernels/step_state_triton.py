"""The state of a captured step in Triton. Formulas and shapes are in step_state.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync

# of the vocabulary, one program each: about one per multiprocessor of an H200, which has 132
_NUM_CHUNKS = 128


@triton.jit
def _advance(
    cache_position, seq_start, windows, spans, position_ids, spans_b, spans_l, B, L, N,
    TILE_B: tl.constexpr, TILE_L: tl.constexpr, TILE_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_sync(PDL)
    position, n = tl.load(cache_position) + 1, tl.arange(0, TILE_N)
    ids = tl.load(position_ids + n, mask=n < N, other=0) + 1
    tl.debug_barrier()  # all threads have read them before one writes them
    tl.store(cache_position, position)
    tl.store(position_ids + n, ids, mask=n < N)
    b, layer = tl.arange(0, TILE_B), tl.arange(0, TILE_L)
    start = tl.load(seq_start + b, mask=b < B, other=0)
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
        _advance, (1,), cache_position, seq_start, windows, spans, position_ids,
        *spans.stride()[:2], batch, layers,
        position_ids.numel(), TILE_B=triton.next_power_of_2(batch), TILE_L=triton.next_power_of_2(layers),
        TILE_N=triton.next_power_of_2(position_ids.numel()), num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_token(
    keys, values, key_states, value_states, cache_position,
    keys_b, keys_h, keys_s, values_b, values_h, values_s, key_b, key_h, value_b, value_h,
    S, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), (tl.program_id(0) % H).to(tl.int64)
    # Before the wait: `advance` writes it at the beginning of a step, at least two kernels ago.
    position, d = tl.load(cache_position).to(tl.int64), tl.arange(0, TILE)
    pdl_sync(PDL)
    if position >= S:  # a full cache, which the host refuses: never write into another head
        return
    key = tl.load(key_states + b * key_b + h * key_h + d, mask=d < D)
    tl.store(keys + b * keys_b + h * keys_h + position * keys_s + d, key, mask=d < D)
    value = tl.load(value_states + b * value_b + h * value_h + d, mask=d < DV)
    tl.store(values + b * values_b + h * values_h + position * values_s + d, value, mask=d < DV)


def write_token_triton(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, cache_position: Tensor
) -> None:
    (batch, heads, _, dim), value_dim = key_states.shape, value_states.shape[-1]
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("write_token needs keys and values whose last dim has stride 1.")
    if key_states.stride(-1) != 1 or value_states.stride(-1) != 1:
        key_states, value_states = key_states.contiguous(), value_states.contiguous()
    launch(
        _write_token, (batch * heads,), keys, values, key_states, value_states, cache_position,
        *keys.stride()[:3], *values.stride()[:3], *key_states.stride()[:2], *value_states.stride()[:2],
        keys.shape[2], H=heads, D=dim, DV=value_dim, TILE=triton.next_power_of_2(max(dim,
        value_dim)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _argmax_chunks(
    logits, maxima, tokens, logits_b, V, CHUNK: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):
    b, chunk, v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, TILE)
    pdl_sync(PDL)
    token = chunk * CHUNK + v
    logit = tl.load(
        logits + b * logits_b + token, mask=(v < CHUNK) & (token < V), other=-float("inf")
    )
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
    tl.store(
        sequences + b.to(tl.int64) * sequences_b + tl.load(cache_position) + 1, selected, mask=mask
    )
    tl.store(token + b, selected, mask=mask)
    tl.store(unfinished + b, running, mask=mask)
    tl.store(is_over, tl.max(running.to(tl.int32), 0) == 0)


def select_greedy_triton(logits: Tensor, cache_position: Tensor, *state: Tensor) -> None:
    """`state`: the fields of `GreedyState`, in their order."""
    batch, vocabulary = logits.shape
    maxima, tokens = (
        logits.new_empty(batch, _NUM_CHUNKS, dtype=dtype) for dtype in (torch.float32, torch.int32)
    )
    chunk = triton.cdiv(vocabulary, _NUM_CHUNKS)
    launch(
        _argmax_chunks, (batch, _NUM_CHUNKS), logits, maxima, tokens, logits.stride(0), vocabulary,
        CHUNK=chunk, TILE=triton.next_power_of_2(chunk), num_warps=4,
    )  # fmt: skip
    select_triton(maxima, tokens, vocabulary, cache_position, *state)


def select_triton(
    maxima: Tensor, tokens: Tensor, vocabulary: int, cache_position: Tensor, *state: Tensor
) -> None:
    """Select the token of the largest maximum of each row; maxima, tokens:

    [B, chunks], float32 and int32.
    """
    sequences, _, _, eos, _, _ = state
    batch, num_chunks = maxima.shape
    launch(
        _select, (1,), maxima, tokens, cache_position, *state, sequences.stride(0), batch, vocabulary,
        TILE_B=triton.next_power_of_2(batch), NUM_CHUNKS=num_chunks, NUM_EOS=eos.shape[1], num_warps=4,
    )  # fmt: skip
