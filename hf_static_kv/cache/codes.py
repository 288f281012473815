"""States in 8 bits: codes, and a scale for each token and head.

    scale = max |x| / 127         x: [..., D], in float32
    codes = round(x / scale)
    x     = codes * scale         rounded to the dtype of the states

    [ D codes, int8 | scale, float32 ]      [..., D + 4], one tensor in int8

The scale lies behind the codes. So a token of one head is one row of bytes, which can be moved,
saved and copied as any other.
"""

import torch
from torch import Tensor

CODED = ("int8",)  # what `kv_dtype` may be, beside None
_SCALE_BYTES = 4
_LARGEST = 127
STEP = 1 / _LARGEST  # from one code to the next, of the largest number of a head


def check_kv_dtype(kv_dtype: str | None) -> None:
    """Raise ValueError for a name that is not served."""
    if kv_dtype not in (None, *CODED):
        raise ValueError(
            f'kv_dtype={kv_dtype!r}: choose "int8", or None for the dtype of the states.'
        )


def check_dims(*dims: int) -> None:
    """Raise ValueError if a scale would not lie at a multiple of its size."""
    if odd := [dim for dim in dims if dim % _SCALE_BYTES]:
        raise ValueError(
            f'kv_dtype="int8" takes heads whose dim is a multiple of 4, got {odd[0]}: leave it out.'
        )


def coded_dim(dim: int) -> int:
    """The bytes of a head of `dim` numbers."""
    check_dims(dim)
    return dim + _SCALE_BYTES


def holds_codes(storage: Tensor, states: Tensor) -> bool:
    """Whether storage for these states has codes: no model computes in int8."""
    return storage.dtype == torch.int8 != states.dtype


def states_dim(storage: Tensor, is_coded: bool) -> int:
    """The numbers of a head in storage."""
    return storage.shape[-1] - is_coded * _SCALE_BYTES


def encoded(states: Tensor) -> Tensor:
    """States [..., D] as codes and scales [..., D + 4]."""
    x = states.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / _LARGEST
    # The scale is 0 of zeros alone, and not finite where a number is not: then all decode as NaN.
    codes = (x / scale).nan_to_num(0.0, 0.0, 0.0).round().to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def decoded(coded: Tensor, dtype: torch.dtype) -> Tensor:
    """The states [..., D] of codes and scales [..., D + 4]."""
    codes = coded[..., :-_SCALE_BYTES]
    scale = coded[..., -_SCALE_BYTES:].view(torch.float32)
    return torch.mul(codes, scale).to(dtype)


def states_of(storage: Tensor, like: Tensor) -> Tensor:
    """Storage as states, which are decoded to the dtype of `like` if it holds codes."""
    return decoded(storage, like.dtype) if holds_codes(storage, like) else storage
