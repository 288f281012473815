"""Rotary position embedding, and all that a new token's heads need before attention.

rotary              of queries and keys
    y = x * cos + rotate_half(x) * sin
    rotate_half([a, b]) = [-b, a], for the halves a and b of the head dim

    query: [B, Hq, q, D]   key: [B, H, q, D]   cos, sin: [B, q, D], or [1, q, D] for all batch rows

rotate_and_write    with optional RMS norms over the head dim, and the write to the storage
    query, key = rotary(query_norm(query), key_norm(key), cos, sin)
    keys[b, :, slots[b, t]] = key[b, :, t]      values[b, :, slots[b, t]] = value[b, :, t]

    value: [B, H, q, Dv]   keys: [B, H, S, D]   values: [B, H, S, Dv]   slots: [B, q], int64
    keys and values may have codes (codes.py)
"""

import torch
from torch import Tensor
from torch.overrides import wrap_torch_function

from hf_static_kv.cache.codes import coded_dim, holds_codes
from hf_static_kv.kernels.gradients import differentiable
from hf_static_kv.kernels.norm import STYLES, Norm, check_norm, norm
from hf_static_kv.kernels.positions import write_tokens


@wrap_torch_function(lambda query, *args, **kwargs: (query,))  # one call for a TorchFunctionMode
def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated query and key; both products and their sum are rounded to the dtype of x."""
    if query.is_cuda and is_supported(query, key, cos, sin):
        from hf_static_kv.kernels.rotary_triton import rotary_triton

        return differentiable(rotary_triton, rotary_plain, query, key, cos, sin)  # type: ignore[no-any-return]
    return rotary_plain(query, key, cos, sin)


def is_supported(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes these: one dtype, all dims of a head rotated."""
    if query.ndim != 4:
        return False
    batch, _, length, dim = query.shape
    has_angles = cos.shape == sin.shape and cos.shape in ((batch, length, dim), (1, length, dim))
    is_alike = all(x.dtype == query.dtype and x.stride(-1) == 1 for x in (query, key, cos, sin))
    return has_angles and is_alike and key.shape[2:] == (length, dim) and dim % 2 == 0


def rotary_plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@wrap_torch_function(lambda query, *args, **kwargs: (query,))
def rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None,
    keys: Tensor, values: Tensor, slots: Tensor,
    query_norm: Norm | None = None, key_norm: Norm | None = None, *, angles_ready: bool = False,
) -> Tensor:  # fmt: skip
    """The rotated query, contiguous; the rotated key and the value are written in place.

    cos, sin      None: no rotary embedding
    angles_ready  they were written at least two kernels ago: read them before the wait of PDL

    On a GPU it is one kernel, with the bits of one kernel for each part: `norm`, `rotary` and
    `write_tokens`. These run if the norms have different styles, or only one of query and key has a
    norm. A slot beyond the capacity S is not written.
    """
    arguments = query, key, value, cos, sin, keys, values, slots, query_norm, key_norm
    check_rotate_and_write(*arguments)
    styles = [None if one is None else one.style for one in (query_norm, key_norm)]
    if query.is_cuda and styles[0] == styles[1]:
        from hf_static_kv.kernels.rotary_triton import rotate_and_write_triton

        return rotate_and_write_triton(*arguments, angles_ready)
    return rotate_and_write_plain(*arguments)


def rotate_and_write_plain(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None,
    keys: Tensor, values: Tensor, slots: Tensor,
    query_norm: Norm | None = None, key_norm: Norm | None = None,
) -> Tensor:  # fmt: skip
    """One part after the other."""
    if query_norm is not None:
        query = norm(query, query_norm)
    if key_norm is not None:
        key = norm(key, key_norm)
    if cos is not None and sin is not None:
        query, key = rotary(query, key, cos, sin)
    write_tokens(keys, values, key, value, slots)
    return query.contiguous()


def check_rotate_and_write(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None,
    keys: Tensor, values: Tensor, slots: Tensor, query_norm: Norm | None, key_norm: Norm | None,
) -> None:  # fmt: skip
    """Raise ValueError if shapes, dtypes or norms do not fit."""
    batch, query_heads, num_tokens, dim = query.shape
    heads = key.shape[1]
    value_dim = value.shape[-1]
    capacity = keys.shape[2]
    is_coded = holds_codes(keys, key)
    stored_dims = [coded_dim(dim), coded_dim(value_dim)] if is_coded else [dim, value_dim]
    shapes = [list(tensor.shape) for tensor in (query, key, value, keys, values, slots)]
    fitting = [
        [batch, query_heads, num_tokens, dim],
        [batch, heads, num_tokens, dim],
        [batch, heads, num_tokens, value_dim],
        [batch, heads, capacity, stored_dims[0]],
        [batch, heads, capacity, stored_dims[1]],
        [batch, num_tokens],
    ]
    if shapes != fitting:
        given = "query {}, key {}, value {}, keys {}, values {} and slots {}".format(*shapes)
        raise ValueError(
            f"{given} do not fit: they must be [B, Hq, q, D], [B, H, q, D], [B, H, q, Dv], "
            "[B, H, S, D], [B, H, S, Dv] and [B, q]."
        )
    angles = [tensor for tensor in (cos, sin) if tensor is not None]
    for_rows = ((batch, num_tokens, dim), (1, num_tokens, dim))
    if len(angles) == 1 or any(x.shape not in for_rows for x in angles):
        given = " and ".join("None" if x is None else str(list(x.shape)) for x in (cos, sin))
        expected = f"[{batch}, {num_tokens}, {dim}] or [1, {num_tokens}, {dim}], or both None"
        raise ValueError(f"cos and sin must be {expected}, got {given}.")
    if angles and dim % 2:
        raise ValueError(f"Rotary embedding needs an even head dim, got {dim}.")
    storage = () if is_coded else (keys, values)
    dtypes = [tensor.dtype for tensor in (query, key, value, *storage, *angles)]
    if len(set(dtypes)) > 1:
        raise ValueError(
            f"Heads, storage, cos and sin must have one dtype, got {', '.join(map(str, dtypes))}."
        )
    if slots.dtype != torch.int64:
        raise ValueError(f"slots must be torch.int64, got {slots.dtype}.")
    for x, its_norm in ((query, query_norm), (key, key_norm)):
        if its_norm is not None:
            check_norm(x, its_norm)
            if its_norm.style not in STYLES:
                raise ValueError(
                    "rotate_and_write takes RMS norms, got a LayerNorm: compute it before."
                )
