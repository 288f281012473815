"""Attention of a few new tokens, with all that their heads need before it, as one call.

    rotate_and_attend    query = rotate_and_write(query, key, value, ..., keys, values, slots)
                         attend(query, keys, values, spans, ...)

Formulas and shapes are in rotary.py and decode_attention.py. On a GPU it is one kernel where
`is_joined` says so.
"""

from typing import Any

import torch
from torch import Tensor

from hf_static_kv.kernels.decode_attention import attend, fills_device
from hf_static_kv.kernels.norm import Norm
from hf_static_kv.kernels.rotary import check_rotate_and_write, rotate_and_write_plain

# Keys and values of an instance, in numbers: where only few instances are at work, up to which one is
# faster than splits. Measured at this size alone: Llama-3.2-1B, capacity 768, steps of 2 and 4 rows.
_MAX_OF_FEW = 768 * 128


def is_joined(
    query: Any, keys: Tensor, max_span: int, query_norm: Norm | None, key_norm: Norm | None
) -> bool:
    """Whether the kernel takes these: some batch rows on a GPU, one style of both norms, no codes.

    The query may be a value of a recorded pass. A step of Llama-3.2-1B after 640 tokens took, with
    two launches and with one: 2 rows 858 and 844 us, 4 rows 860 and 852, 8 rows 914 and 867, 16 rows
    953 and 967 (H200, 2026-11-19). So it is for batch rows whose instances leave half of a GPU free.
    """
    styles = [None if one is None else one.style for one in (query_norm, key_norm)]
    is_served = query.dtype == keys.dtype and query.dtype.itemsize == 2 and styles[0] == styles[1]
    if query.device.type != "cuda" or not is_served or len(keys) == 1:
        return False
    batch, heads, capacity, dim = keys.shape
    processors = torch.cuda.get_device_properties(keys.device).multi_processor_count
    if 2 * batch * heads > processors or query.shape[2] * query.shape[1] > 16 * heads:
        return False
    is_short = min(max_span, capacity) * 2 * dim <= _MAX_OF_FEW
    return is_short or fills_device(query, keys, max_span)


def rotate_and_attend(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None,
    keys: Tensor, values: Tensor, slots: Tensor, query_norm: Norm | None, key_norm: Norm | None,
    spans: Tensor, scale: float, max_span: int, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """The output of attention [B, q, Hq, Dv]; the rotated key and the value are written in place."""
    new = query, key, value, cos, sin, keys, values, slots, query_norm, key_norm
    check_rotate_and_write(*new)
    if is_joined(query, keys, max_span, query_norm, key_norm):
        from hf_static_kv.kernels.rope_attention_triton import rope_attention_triton

        return rope_attention_triton(*new, spans, scale, softcap, sinks)
    query = rotate_and_write_plain(*new)
    return attend(query, keys, values, spans, scale, max_span, softcap, sinks)  # type: ignore[no-any-return]
