"""One token's heads, as a projection leaves them, made ready for attention: the twin, and the choice of the kernel.

    query                  its norm where there is one, then turned to its position          -> given back
    key                    the same                                                         -> written into the storage
    value                  as it is                                                         -> written into the storage

query: [B, Hq, 1, D]   key: [B, H, 1, D]   value: [B, H, 1, Dv]   cos, sin: [B, 1, D], or one for all rows
keys, values, slot, layer: as in storage_ops.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_static_kv.kernels.rms_norm import Norm, rms_norm
from hf_static_kv.kernels.rotary import is_served, rotary
from hf_static_kv.kernels.storage_ops import write_token


class Heads(NamedTuple):
    """Queries and keys that are to be turned, and how: the norms before that, or None; cosines and sines."""

    query: torch.Tensor
    key: torch.Tensor
    norms: tuple[Norm, Norm] | None
    cos: torch.Tensor
    sin: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.cos, self.sin

    def turned(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, in kernels of their own."""
        query, key = self.query, self.key
        if self.norms is not None:
            query, key = rms_norm(query, *self.norms[0]), rms_norm(key, *self.norms[1])
        return rotary(query, key, self.cos, self.sin)


def is_one_kernel(heads: Heads) -> bool:
    """Whether one kernel takes them: one token, norms of one kind over rows that lie as if they were alone.

    The order of a sum depends on how a row is aligned, and so do its bits.
    """
    query, key, norms, cos, sin = heads
    if not is_served(query, key, cos, sin) or query.shape[2] != 1:
        return False
    if norms is None:
        return True
    numbers = [n for x in (query, key) for n in (x.data_ptr(), x.shape[-1], *x.stride()[:2])]
    return norms[0].style == norms[1].style and all(n % 16 == 0 for n in numbers)


def turn_and_write(
    heads: Heads, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot: torch.Tensor, layer: torch.Tensor
) -> torch.Tensor:
    """The turned query; the turned key and the value are in the storage of this layer, at the position of `slot`."""
    if heads.query.is_cuda and value.stride(-1) == 1:
        from hf_static_kv.kernels.turn_and_write_triton import turn_and_write_triton

        return turn_and_write_triton(heads, value, keys, values, slot, layer)
    return turn_and_write_plain(heads, value, keys, values, slot, layer)


def turn_and_write_plain(
    heads: Heads, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot: torch.Tensor, layer: torch.Tensor
) -> torch.Tensor:
    """The same, one after the other."""
    query, key = heads.turned()
    write_token(keys, values, key, value, slot, layer)
    return query
