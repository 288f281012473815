"""Attention in which every query is a row of its own: its bits are those of a decode step at its position.

    query: [B, Hq, q, D]   keys: [B, H, n, D]   values: [B, H, n, Dv]   spans: [B, q, 3]   output: [B, q, Hq, Dv]

On a GPU it is the decode kernel, with as many queries to a program as its tile of rows has room for. On a CPU the
pieces of the text are padded to one shape, so that every query runs the same code.
"""

from __future__ import annotations

from typing import Optional

import torch

from hf_static_kv.kernels.decode_attention import SPAN

PIECE = 64
_MAX_PARTIAL_BYTES = 1 << 28  # of sums of pieces: so many queries are computed at once


@torch.library.custom_op("hf_static_kv::row_attention", mutates_args=())
def row_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    softcap: Optional[float],  # noqa: UP045  # torch reads the annotation
    sinks: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    """Attention over each query's span; a span that holds nothing gives zeros.

    `origin` is one for all queries of a row of the batch, and may lie before the keys. Values are finite: on a GPU an
    infinity in one that a query does not see reaches it where another of its tile does.
    """
    batch, _, length, _ = query.shape
    if spans.shape != (batch, length, len(SPAN)):
        raise ValueError(f"spans must be {[batch, length, len(SPAN)]}, {' '.join(SPAN)}, got {list(spans.shape)}.")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"query, keys and values must have one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}."
        )
    if not query.is_cuda:
        return row_attention_plain(query, keys, values, spans, scale, softcap, sinks)
    from hf_static_kv.kernels.decode_attention_triton import decode_attention_triton, partial_bytes

    at_once = max(1, _MAX_PARTIAL_BYTES // partial_bytes(query, values))
    parts = []
    for begin in range(0, length, at_once):
        q, s = query[:, :, begin : begin + at_once], spans[:, begin : begin + at_once].contiguous().view(-1, 3)
        q = q if q.stride(-1) == 1 else q.contiguous()
        part = decode_attention_triton(q, keys, values, s, None, None, scale, keys.shape[2], softcap, sinks)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@row_attention.register_fake
def _(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    softcap: Optional[float],  # noqa: UP045
    sinks: Optional[torch.Tensor],  # noqa: UP045
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])


def row_attention_plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain PyTorch, query by query and piece by piece; reads the spans on the host."""
    rows = [
        torch.stack([
            _one_query(query[b, :, t], keys[b], values[b], span, scale, softcap, sinks)
            for t, span in enumerate(spans[b].tolist())
        ])
        for b in range(query.shape[0])
    ]  # fmt: skip
    return torch.stack(rows)


def _one_query(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: list[int],
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    # query: [Hq, D], keys: [H, n, D], values: [H, n, Dv]; sums and softmax in float32 at least.
    origin, first, end = span
    heads, value_dim = keys.shape[0], values.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(heads, -1, query.shape[-1]).contiguous()  # [H, G, D]
    maximum = torch.full(grouped.shape[:2], -torch.inf, dtype=dtype, device=query.device)
    total = torch.zeros_like(maximum)
    if sinks is not None:
        maximum, total = sinks.to(dtype).reshape(maximum.shape).clone(), torch.ones_like(maximum)
    summed = torch.zeros(*maximum.shape, value_dim, dtype=dtype, device=query.device)
    for begin in range(origin + (first - origin) // PIECE * PIECE, end, PIECE):
        here = slice(max(begin, first), min(begin + PIECE, end))
        inside = slice(here.start - begin, here.stop - begin)
        scores = torch.full((*maximum.shape, PIECE), -torch.inf, dtype=dtype, device=query.device)
        k, v = keys.new_zeros(heads, PIECE, keys.shape[2]), values.new_zeros(heads, PIECE, value_dim)
        k[:, inside], v[:, inside] = keys[:, here], values[:, here]
        product = torch.bmm(grouped, k.transpose(1, 2)).to(dtype) * scale
        if softcap is not None:
            product = softcap * torch.tanh(product / softcap)
        scores[..., inside] = product[..., inside]
        larger = torch.maximum(maximum, scores.amax(dim=-1))
        weights, shrink = torch.exp(scores - larger[..., None]), torch.exp(maximum - larger)
        total = total * shrink + weights.sum(dim=-1)
        summed = summed * shrink[..., None] + torch.bmm(weights.to(v.dtype), v).to(dtype)
        maximum = larger
    result = torch.where(total[..., None] > 0, summed / total[..., None], 0.0)
    return result.reshape(-1, value_dim).to(query.dtype)
