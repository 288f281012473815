"""Batch-invariant attention: each query has the bits of a decode step at its position.

    output = softmax(scale * query keys^T) values      over the span of each query

    query: [B, Hq, q, D]   keys: [B, H, n, D]   values: [B, H, n, Dv]   spans: [B, q, 3]   output: [B, q, Hq, Dv]

On a GPU the decode kernel runs, with several queries per program. On a CPU the splits of a sequence are padded to one
shape, so that every query runs the same code.
"""

import torch
from torch import Tensor

from hf_static_kv.kernels.decode_attention import check_attention

_SPLIT_SIZE = 64  # of the plain twin
_MAX_PARTIAL_BYTES = 1 << 28  # of the kernel's partial outputs: bounds the queries of one launch


@torch.library.custom_op("hf_static_kv::invariant_attention", mutates_args=())
def invariant_attention(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor,
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention over each query's span; zeros for an empty span.

    All queries of a batch row have one seq_start, which may be negative: before the first key. Values must be finite:
    on a GPU an infinite value also reaches queries of the same tile whose span does not contain it.
    """
    length = query.shape[2]
    check_attention(query, keys, values, spans, (len(query), length, 3))
    if not query.is_cuda:
        return invariant_attention_plain(query, keys, values, spans, scale, softcap, sinks)
    from hf_static_kv.kernels.decode_attention_triton import decode_attention_triton, partial_bytes

    query = query if query.stride(-1) == 1 else query.contiguous()
    step, parts = max(1, _MAX_PARTIAL_BYTES // partial_bytes(query, values)), []
    for begin in range(0, length, step):
        q, span = query[:, :, begin : begin + step], spans[:, begin : begin + step].contiguous().view(-1, 3)
        parts.append(decode_attention_triton(q, keys, values, span, None, scale, keys.shape[2], softcap, sinks))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def invariant_attention_plain(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor,
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One query after the other, split by split; reads the spans on the host."""
    output = values.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])
    for b, batch_row in enumerate(spans.tolist()):
        for t, span in enumerate(batch_row):
            output[b, t] = _one_query(query[b, :, t], keys[b], values[b], span, scale, softcap, sinks)
    return output


def _one_query(
    query: Tensor, keys: Tensor, values: Tensor, span: list[int],
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    # query: [Hq, D], keys: [H, n, D], values: [H, n, Dv]; sums and softmax in float32 at least.
    seq_start, first, end = span
    heads, value_dim = keys.shape[0], values.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(heads, -1, query.shape[-1]).contiguous()  # [H, G, D]
    maximum = torch.full(grouped.shape[:2], -torch.inf, dtype=dtype, device=query.device)
    total = torch.zeros_like(maximum)
    if sinks is not None:
        maximum, total = sinks.to(dtype).reshape(maximum.shape).clone(), torch.ones_like(maximum)
    output = torch.zeros(*maximum.shape, value_dim, dtype=dtype, device=query.device)
    for begin in range(seq_start + (first - seq_start) // _SPLIT_SIZE * _SPLIT_SIZE, end, _SPLIT_SIZE):
        positions = slice(max(begin, first), min(begin + _SPLIT_SIZE, end))
        inside = slice(positions.start - begin, positions.stop - begin)
        scores = torch.full((*maximum.shape, _SPLIT_SIZE), -torch.inf, dtype=dtype, device=query.device)
        k, v = keys.new_zeros(heads, _SPLIT_SIZE, keys.shape[2]), values.new_zeros(heads, _SPLIT_SIZE, value_dim)
        k[:, inside], v[:, inside] = keys[:, positions], values[:, positions]
        product = torch.bmm(grouped, k.transpose(1, 2)).to(dtype) * scale
        if softcap is not None:
            product = softcap * torch.tanh(product / softcap)
        scores[..., inside] = product[..., inside]
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1))
        weights, rescale = torch.exp(scores - new_maximum[..., None]), torch.exp(maximum - new_maximum)
        total = total * rescale + weights.sum(dim=-1)
        output = output * rescale[..., None] + torch.bmm(weights.to(v.dtype), v).to(dtype)
        maximum = new_maximum
    result = torch.where(total[..., None] > 0, output / total[..., None], 0.0)
    return result.reshape(-1, value_dim).to(query.dtype)
