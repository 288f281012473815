"""Attention of each query over its span of the keys and values, as in flash-decoding.

    output = softmax(scale * query keys^T) values      over the positions [first, end) of the span

    query: [B, Hq, q, D]   keys: [B, H, S, D]   values: [B, H, S, Dv]   output: [B, q, Hq, Dv]
    spans: seq_start, first, end, in int64

    [ left padding | tokens before the window | tokens attended to | free positions ]
                   seq_start                  first                end              S

    spans: [B, q, 3], one for each query; those of a batch row have one seq_start

    decode_attention       up to 16 queries of a batch row, whose spans move forward
    invariant_attention    each query has the bits of a decode step at its position

Spans are read on the device, so one CUDA graph serves every length. Splits of [seq_start, end) have
a fixed size, so in order a row's bits depend neither on other rows, nor on left padding, nor on
capacity.
"""

from typing import Any

import torch
from torch import Tensor

from hf_static_kv.cache.codes import coded_dim, holds_codes, states_of

MAX_TOKENS = 16  # of a batch row, in `decode_attention`
_SPLIT_SIZE = 64  # of `invariant_attention_plain`
_SHORT_SPAN = 2048
_LARGEST_DIM = 256  # of the kernel for codes


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, seen: Tensor | None = None, *,
    scale: float, max_span: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    weights: Tensor | None = None, spans_ready: bool = False, in_order: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(scale * query keys^T) values over each span. Neighbouring query heads share KV.

    seen         [B, S], bool: positions of the span where it is false are left out
    max_span     the most positions that a span can hold (a sliding window): bounds the number of instances
    softcap      a score becomes softcap * tanh(score / softcap)
    sinks        [Hq]: the score of one more key of each query head, whose value is zero
    weights      [B, Hq, S], float32: filled with the softmax over each span; of one token
    spans_ready  the spans were written at least two kernels ago: read them before the wait of PDL
    in_order     the bits of `invariant_attention`
    """
    num_tokens = query.shape[2]
    most = MAX_TOKENS if weights is None else 1
    if not 1 <= num_tokens <= most:
        takes = f"1 to {most} tokens of a batch row"
        raise ValueError(f"decode_attention takes {takes}, got {num_tokens}: use SDPA for prefill.")
    _check(query, keys, values, spans)
    if not query.is_cuda:
        return decode_attention_plain(
            query, keys, values, spans, seen, scale, softcap, sinks, weights
        )
    span = min(max_span or keys.shape[2], keys.shape[2])
    is_plain = seen is None and weights is None and not in_order
    if is_plain and _reads_codes(query, keys, values):
        from hf_static_kv.kernels.coded_attention_triton import coded_attention_triton

        return coded_attention_triton(
            query, keys, values, spans, scale, span, softcap, sinks, spans_ready
        )
    from hf_static_kv.kernels.decode_attention_triton import decode_attention_triton

    how = seen, scale, span, softcap, sinks, weights, spans_ready, in_order
    return decode_attention_triton(query, keys, values, spans, *how)


@torch.library.custom_op("hf_static_kv::attend", mutates_args=())
def attend(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, scale: float, max_span: int,
    softcap: float | None, sinks: Tensor | None, in_order: bool = False,
) -> Tensor:  # fmt: skip
    """Attention in a captured pass of any number of tokens, as one operation for `torch.compile`.

    Keys and values may be codes (codes.py).
    """
    if not query.is_cuda:
        keys = states_of(keys, query)
        values = states_of(values, query)
    how = spans, scale, softcap, sinks
    is_long = query.shape[2] > MAX_TOKENS
    if is_long and query.is_cuda:
        _check(query, keys, values, spans)
        from hf_static_kv.kernels.prompt_attention_triton import prompt_attention_triton

        return prompt_attention_triton(query, keys, values, *how, in_order)
    if is_long:
        return invariant_attention_plain(query, keys, values, *how)
    if query.is_cuda and not in_order and fills_device(query, keys, max_span):
        _check(query, keys, values, spans)
        if not holds_codes(keys, query):
            from hf_static_kv.kernels.rows_attention_triton import rows_attention_triton

            return rows_attention_triton(query, keys, values, *how)
        if _reads_codes(query, keys, values):
            from hf_static_kv.kernels.coded_attention_triton import coded_attention_triton

            states = query, keys, values, spans
            return coded_attention_triton(
                *states, scale, max_span, softcap, sinks, spans_ready=True, is_split=False
            )
    return decode_attention(
        query, keys, values, spans, scale=scale, max_span=max_span, softcap=softcap, sinks=sinks,
        spans_ready=True,
        in_order=in_order,
    )  # fmt: skip


def _fits_a_tile(query: Any, keys: Tensor) -> bool:
    """Whether a warp can have all queries of a KV head, in half precision."""
    is_half: bool = query.dtype.itemsize == 2
    queries: int = query.shape[2] * query.shape[1]
    return is_half and queries <= 16 * keys.shape[1]


def _reads_codes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel for codes takes them."""
    largest = max(keys.shape[-1], values.shape[-1])
    return (
        holds_codes(keys, query)
        and _fits_a_tile(query, keys)
        and largest <= coded_dim(_LARGEST_DIM)
    )


def fills_device(query: Any, keys: Tensor, max_span: int) -> bool:
    """Whether there are so many batch rows that spans need not be split to keep a GPU busy."""
    if not _fits_a_tile(query, keys):
        return False
    pairs = len(keys) * keys.shape[1]  # of a batch row and a KV head
    processors = torch.cuda.get_device_properties(keys.device).multi_processor_count
    span = min(max_span, keys.shape[2])
    return 2 * pairs > 3 * processors or (span <= _SHORT_SPAN and 3 * pairs >= processors)


@attend.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *args: object) -> Tensor:
    values = states_of(values, query)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])


def decode_attention_plain(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, seen: Tensor | None, scale: float,
    softcap: float | None = None, sinks: Tensor | None = None, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One query after the other; reads the spans on the host.

    Scores and softmax in float32 at least.
    """
    batch, query_heads, num_tokens, _ = query.shape
    heads = keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    output = values.new_empty(batch, num_tokens, query_heads, values.shape[-1])
    for b, row in enumerate(spans.tolist()):
        for t, (_, first, end) in enumerate(row):
            k = keys[b, :, first:end]  # [H, n, D]
            v = values[b, :, first:end]
            grouped = query[b, :, t].reshape(heads, query_heads // heads, -1)  # [H, G, D]
            scores = (grouped.to(dtype) @ k.to(dtype).transpose(1, 2)) * scale  # [H, G, n]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if seen is not None:
                scores = scores.masked_fill(~seen[b, first:end], -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(dtype).reshape(heads, -1, 1)], dim=-1)
            probabilities = scores.softmax(dim=-1)[..., : k.shape[1]]
            if weights is not None:
                weights[b, :, first:end] = probabilities.flatten(0, 1)
            output[b, t] = (probabilities.to(v.dtype) @ v).flatten(0, 1)
    return output


@torch.library.custom_op("hf_static_kv::invariant_attention", mutates_args=())
def invariant_attention(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor,
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention over each query's span; zeros for an empty span.

    All queries of a batch row have one seq_start, which may be negative: before the first key.
    Values must be finite: on a GPU an infinite value also reaches queries of the same tile whose
    span does not contain it.
    """
    _check(query, keys, values, spans)
    if not query.is_cuda:
        return invariant_attention_plain(query, keys, values, spans, scale, softcap, sinks)
    if query.shape[2] == 1:
        return decode_attention(
            query, keys, values, spans, scale=scale, softcap=softcap, sinks=sinks, in_order=True
        )
    from hf_static_kv.kernels.prompt_attention_triton import prompt_attention_triton

    return prompt_attention_triton(query, keys, values, spans, scale, softcap, sinks)


def invariant_attention_plain(
    query: Tensor, keys: Tensor, values: Tensor, spans: Tensor,
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One query after the other; splits are padded to one shape, so that all run the same code."""
    output = values.new_empty(query.shape[0], query.shape[2], query.shape[1], values.shape[-1])
    for b, batch_row in enumerate(spans.tolist()):
        for t, span in enumerate(batch_row):
            states = query[b, :, t], keys[b], values[b]
            output[b, t] = _one_query(*states, span, scale, softcap, sinks)
    return output


def _one_query(
    query: Tensor, keys: Tensor, values: Tensor, span: list[int],
    scale: float, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    # query: [Hq, D], keys: [H, n, D], values: [H, n, Dv]; sums and softmax in float32 at least.
    seq_start, first, end = span
    heads = keys.shape[0]
    value_dim = values.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.reshape(heads, -1, query.shape[-1]).contiguous()  # [H, G, D]
    maximum = torch.full(grouped.shape[:2], -torch.inf, dtype=dtype, device=query.device)
    total = torch.zeros_like(maximum)
    if sinks is not None:
        maximum = sinks.to(dtype).reshape(maximum.shape).clone()
        total = torch.ones_like(maximum)
    output = maximum.new_zeros(*maximum.shape, value_dim)
    first_split = seq_start + (first - seq_start) // _SPLIT_SIZE * _SPLIT_SIZE
    for begin in range(first_split, end, _SPLIT_SIZE):
        positions = slice(max(begin, first), min(begin + _SPLIT_SIZE, end))
        inside = slice(positions.start - begin, positions.stop - begin)
        scores = maximum.new_full((*maximum.shape, _SPLIT_SIZE), -torch.inf)
        k = keys.new_zeros(heads, _SPLIT_SIZE, keys.shape[2])
        v = values.new_zeros(heads, _SPLIT_SIZE, value_dim)
        k[:, inside], v[:, inside] = keys[:, positions], values[:, positions]
        product = torch.bmm(grouped, k.transpose(1, 2)).to(dtype) * scale
        if softcap is not None:
            product = softcap * torch.tanh(product / softcap)
        scores[..., inside] = product[..., inside]
        new_maximum = torch.maximum(maximum, scores.amax(dim=-1))
        weights = torch.exp(scores - new_maximum[..., None])
        rescale = torch.exp(maximum - new_maximum)
        total = total * rescale + weights.sum(dim=-1)
        output = output * rescale[..., None] + torch.bmm(weights.to(v.dtype), v).to(dtype)
        maximum = new_maximum
    result = torch.where(total[..., None] > 0, output / total[..., None], 0.0)
    return result.reshape(-1, value_dim).to(query.dtype)


def _check(query: Tensor, keys: Tensor, values: Tensor, spans: Tensor) -> None:
    batch, query_heads, num_tokens, dim = query.shape
    heads = keys.shape[1]
    is_coded = holds_codes(keys, query)
    shapes = [list(tensor.shape) for tensor in (keys, values)]
    dim = coded_dim(dim) if is_coded else dim
    fitting = [[batch, heads, keys.shape[2], dim], [*keys.shape[:3], values.shape[-1]]]
    if shapes != fitting or query_heads % heads:
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)} and values "
            f"{tuple(values.shape)} do not fit: they must be [B, Hq, q, D], [B, H, S, D] and "
            "[B, H, S, Dv] with Hq a multiple of H."
        )
    if spans.shape != (batch, num_tokens, 3):
        expected = f"{[batch, num_tokens, 3]} of seq_start, first, end"
        raise ValueError(f"spans must be {expected}, got {list(spans.shape)}.")
    if not (is_coded or query.dtype == keys.dtype) or keys.dtype != values.dtype:
        dtypes = f"{query.dtype}, {keys.dtype}, {values.dtype}"
        raise ValueError(f"query, keys and values must have one dtype, got {dtypes}.")
