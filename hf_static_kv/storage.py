"""The two tensors behind the cache: shapes, allocation, bytes. Knows no transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# One view for each layer of a group.
Slices = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token: `num_kv_heads` keys and values, whose head dims may differ."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int

    @classmethod
    def of(cls, key_states: torch.Tensor, value_states: torch.Tensor) -> LayerShape:
        """The shape that a layer's own states show. `key_states`, `value_states`: [B, H, n, D]."""
        return cls(key_states.shape[1], key_states.shape[3], value_states.shape[3])

    def num_bytes(self, max_cache_len: int, batch_size: int, dtype: torch.dtype) -> int:
        """Bytes of one layer's keys and values at full capacity."""
        elements_per_token = self.num_kv_heads * (self.key_head_dim + self.value_head_dim)
        return batch_size * max_cache_len * elements_per_token * dtype.itemsize

    def __str__(self) -> str:
        dims = f"{self.key_head_dim}"
        if self.value_head_dim != self.key_head_dim:
            dims += f" (keys) and {self.value_head_dim} (values)"
        return f"{self.num_kv_heads} KV heads of dim {dims}"


class StorageGroup:
    """One pair of contiguous tensors for all layers of one shape on one device.

    ```
    keys    [L, B, H, S, Dk]      L layers, B rows of the batch, H KV heads,
    values  [L, B, H, S, Dv]      S positions (max_cache_len), D head dim

             position  0   1   2   3   4   5  ...  S-1
    layer 0, row 0    [k] [k] [k] [ ] [ ] [ ] ...  [ ]     seq_len = 3: three written, the rest is room
    layer 1, row 0    [k] [k] [k] [ ] [ ] [ ] ...  [ ]     every layer fills the same positions
    ```

    A layer is one row of both along L; what attention reads is a slice of that along S, never a copy.
    Zero-filled, so that a kernel that loads beyond the text and masks it never meets a NaN.
    """

    # A step asks for at most three slices: where to write, what full layers see, what sliding layers see.
    _MAX_RECENT = 4

    def __init__(
        self,
        num_layers: int,
        shape: LayerShape,
        max_cache_len: int,
        *,
        batch_size: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._recent: dict[tuple[int, int, int], tuple[Slices, Slices]] = {}
        head = (num_layers, batch_size, shape.num_kv_heads, max_cache_len)
        # Tensors born in inference mode could not be written outside it later; a cache outlives such blocks.
        with torch.inference_mode(False):
            self.keys = torch.zeros(*head, shape.key_head_dim, dtype=key_dtype, device=device)
            self.values = torch.zeros(*head, shape.value_head_dim, dtype=value_dtype, device=device)

    def slices(self, batch_size: int, first: int, length: int) -> tuple[Slices, Slices]:
        """Keys and values of every layer at positions [first, first + length) of the first rows: views [B, H, n, D].

        All layers of a step ask for the same ones, so they are cut once for all and kept: on a GPU, where every call
        costs the host several microseconds, a step is then two copies a layer and little else.
        """
        key = (batch_size, first, length)
        found = self._recent.get(key)
        if found is None:
            if len(self._recent) >= self._MAX_RECENT:
                del self._recent[next(iter(self._recent))]
            found = self._recent[key] = self._cut(self.keys, *key), self._cut(self.values, *key)
        return found

    @staticmethod
    def _cut(storage: torch.Tensor, batch_size: int, first: int, length: int) -> Slices:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # kept beyond the block, as the storage is
                return StorageGroup._cut(storage, batch_size, first, length)
        rows = storage if batch_size == storage.shape[1] else storage.narrow(1, 0, batch_size)
        return rows.narrow(3, first, length).unbind(0)

    def __getstate__(self) -> dict[str, Any]:
        # Views do not survive pickling as views: without this, a loaded cache would write into copies.
        return {**self.__dict__, "_recent": {}}

    def __deepcopy__(self, memo: dict[int, Any]) -> StorageGroup:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(self.__getstate__())
        with torch.inference_mode(False):
            copied.keys, copied.values = self.keys.clone(), self.values.clone()
        return copied

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
