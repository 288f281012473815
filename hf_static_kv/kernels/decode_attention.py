"""Attention of one new token over the cached text: the plain PyTorch twin, and the choice between it and the kernel.

A row attends to the positions [first, end) of the storage. `spans` holds, for each row, three numbers in the device's
memory, so that one captured graph serves every length:

    origin   where the row's text begins: the padding to its left is before it
    first    the oldest position that may be seen: the origin, or later under a sliding window
    end      one past the newest position, the new token's own

    [ padding | text that the window has left | what is attended to | room ]
              origin                          first                 end    S

The kernel cuts [origin, end) into pieces of one fixed size. So a row's bits depend neither on its neighbours, nor on
the padding, nor on the room.
"""

from __future__ import annotations

import torch

SPAN = ("origin", "first", "end")


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    seen: torch.Tensor | None = None,
    layer: torch.Tensor | None = None,
    *,
    scale: float,
    max_span: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * query . keys) . values over each row's span; [B, 1, Hq, Dv].

    query: [B, Hq, 1, D]   keys: [B, H, S, D]   values: [B, H, S, Dv]   spans: [B, 3]   seen: [B, S]   sinks: [Hq]

    Hq is a multiple of H: query heads that stand side by side share a KV head. `max_span` is the most positions that
    any span can hold (a window); the kernel starts no more work than that needs. Positions of the span where `seen` is
    false are left out. `softcap` bounds the scores by c * tanh(score / c). `sinks` are scores of one more key for each
    query head, whose value is nothing. `weights`, float32 of [B, Hq, S], is filled with the softmax over each span.

    With `layer`, a number in the device's memory, keys and values are the storage of all layers, [L, B, H, S, D] (B or
    more rows), and spans are [B, L, 3].
    """
    _check(query, keys, values, spans, layer)
    max_span = min(max_span or keys.shape[-2], keys.shape[-2])
    if query.is_cuda:
        from hf_static_kv.kernels.decode_attention_triton import decode_attention_triton

        return decode_attention_triton(
            query, keys, values, spans, seen, layer, scale, max_span, softcap, sinks, weights
        )
    if layer is not None:
        number, rows = int(layer), query.shape[0]
        keys, values, spans = keys[number, :rows], values[number, :rows], spans[:, number]
    return decode_attention_plain(query, keys, values, spans, seen, scale, softcap, sinks, weights)


def decode_attention_plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spans: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same row by row, in plain PyTorch; reads the spans on the host."""
    rows = []
    for b, (_, first, end) in enumerate(spans.tolist()):
        mask = None if seen is None else seen[b, first:end]
        kept = None if weights is None else weights[b, :, first:end]
        arguments = (query[b], keys[b, :, first:end], values[b, :, first:end], mask, scale, softcap, sinks, kept)
        rows.append(_one_row(*arguments))
    return torch.stack(rows)[:, None]


def _one_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    # query: [Hq, 1, D], keys: [H, n, D], values: [H, n, Dv], seen: [n]; scores and softmax in float32 at least.
    groups, dtype = query.shape[0] // keys.shape[0], torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(keys.shape[0], groups, -1)  # [H, G, D]
    scores = (grouped.to(dtype) @ keys.to(dtype).transpose(1, 2)) * scale  # [H, G, n]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).reshape(-1, groups, 1)], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : keys.shape[1]]
    if weights is not None:
        weights.copy_(probabilities.reshape(weights.shape))
    probabilities = probabilities.to(values.dtype)
    return (probabilities @ values).reshape(query.shape[0], -1)  # [Hq, Dv]


def _check(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: torch.Tensor, layer: torch.Tensor | None
) -> None:
    batch, heads, length, dim = query.shape
    dims = 4 if layer is None else 5
    if length != 1:
        raise ValueError(f"decode_attention takes one new token in each row, got {length}: use SDPA for a prompt.")
    if (
        keys.ndim != dims
        or (keys.shape[0] != batch if layer is None else keys.shape[1] < batch)
        or keys.shape[-1] != dim
        or keys.shape[:-1] != values.shape[:-1]
        or heads % keys.shape[-3]
    ):
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit: they "
            "must be [B, Hq, 1, D], [B, H, S, D] and [B, H, S, Dv] with Hq a multiple of H (and L in front of keys and "
            "values with a layer)."
        )
    expected = (batch, len(SPAN)) if layer is None else (batch, keys.shape[0], len(SPAN))
    if spans.shape != expected:
        raise ValueError(f"spans must be {list(expected)}, {' '.join(SPAN)} of each row, got {list(spans.shape)}.")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"query, keys and values must have one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}."
        )
