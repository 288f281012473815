"""The two tensors behind the cache: shapes, allocation, bytes. Knows no transformers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# One view for each layer of a group.
Slices = tuple[torch.Tensor, ...]
# The layers of one group: what they store, where, and their indices in the model.
Members = tuple["LayerShape", torch.device, Sequence[int]]


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

    def num_bytes(
        self, max_cache_len: int, batch_size: int, dtype: torch.dtype, value_dtype: torch.dtype | None = None
    ) -> int:
        """Bytes of one layer's keys and values at full capacity; `value_dtype` where values have one of their own."""
        per_head = self.key_head_dim * dtype.itemsize + self.value_head_dim * (value_dtype or dtype).itemsize
        return batch_size * max_cache_len * self.num_kv_heads * per_head

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
    # (rows, positions) that a pickle keeps; None: all.
    _pickled: tuple[int, int] | None = None

    def __init__(
        self,
        num_layers: int,
        shape: LayerShape,
        max_cache_len: int,
        batch_size: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._recent: dict[tuple[int, int, int], tuple[Slices, Slices]] = {}
        head = (num_layers, batch_size, shape.num_kv_heads, max_cache_len)
        # Tensors born in inference mode could not be written outside it later; a cache outlives such blocks.
        with torch.inference_mode(False):
            self.keys = torch.zeros(*head, shape.key_head_dim, dtype=dtypes[0], device=device)
            try:
                self.values = torch.zeros(*head, shape.value_head_dim, dtype=dtypes[1], device=device)
            except RuntimeError:
                del self.keys  # the traceback keeps `self` alive
                raise

    def views(self, row: int, batch_size: int, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, H, n, D] of one layer at positions [first, first + length) of the first rows.

        All layers of a step ask for the same ones, so they are cut once for all and kept: on a GPU, where every call
        costs the host several microseconds, a step is then two copies a layer and little else.
        """
        if torch.compiler.is_compiling():  # traced once: nothing to keep, and each kept slice would be guarded
            keys, values = self.keys[row, :batch_size], self.values[row, :batch_size]
            return keys.narrow(2, first, length), values.narrow(2, first, length)
        key = (batch_size, first, length)
        found = self._recent.get(key)
        if found is None:
            if len(self._recent) >= self._MAX_RECENT:
                del self._recent[next(iter(self._recent))]
            found = self._recent[key] = self._cut(self.keys, *key), self._cut(self.values, *key)
        return found[0][row], found[1][row]

    @staticmethod
    def _cut(storage: torch.Tensor, batch_size: int, first: int, length: int) -> Slices:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # kept beyond the block, as the storage is
                return StorageGroup._cut(storage, batch_size, first, length)
        rows = storage if batch_size == storage.shape[1] else storage.narrow(1, 0, batch_size)
        return rows.narrow(3, first, length).unbind(0)

    def scratch(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for `rows` rows and `length` positions of one layer: keys and values [rows, H, length, D]."""
        head = (rows, self.shape.num_kv_heads, length)
        keys = self.keys.new_empty(*head, self.shape.key_head_dim)
        return keys, self.values.new_empty(*head, self.shape.value_head_dim)

    def to_pickle(self, rows: int, length: int) -> StorageGroup:
        """The same storage, of which a pickle keeps `rows` rows and `length` positions; loaded, it has all its room."""
        group = copy.copy(self)
        group._pickled = (rows, length)
        return group

    def __getstate__(self) -> dict[str, Any]:
        # Views do not survive pickling as views: without this, a loaded cache would write into copies.
        state = {**self.__dict__, "_recent": {}}
        if self._pickled is not None:
            rows, length = state.pop("_pickled")
            state["_sizes"] = self.keys.shape, self.values.shape
            for name in ("keys", "values"):  # a clone, since a view would be saved with all of its storage
                state[name] = getattr(self, name)[:, :rows, :, :length].clone()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        sizes = state.pop("_sizes", None)
        self.__dict__.update(state)
        if sizes is not None:
            with torch.inference_mode(False):
                self.keys, self.values = _grown(self.keys, sizes[0]), _grown(self.values, sizes[1])

    def __copy__(self) -> StorageGroup:
        copied = type(self).__new__(type(self))
        copied.__dict__.update({**self.__dict__, "_recent": {}})
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> StorageGroup:
        copied = memo[id(self)] = copy.copy(self)
        copied._pickled = None
        with torch.inference_mode(False):
            copied.keys, copied.values = self.keys.clone(), self.values.clone()
        return copied

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _grown(text: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Zeros of this size that begin, in every dim, with the text."""
    storage = text.new_zeros(size)
    storage[:, : text.shape[1], :, : text.shape[3]].copy_(text)
    return storage


def allocate_groups(
    members: Sequence[Members], max_cache_len: int, batch_size: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> list[StorageGroup]:
    """One group for each of `members`: all of them, or an error that says what would fit and nothing allocated."""
    groups: list[StorageGroup] = []
    try:
        for shape, device, layers in members:
            groups.append(StorageGroup(len(layers), shape, max_cache_len, batch_size, dtypes, device))
    except RuntimeError as error:
        groups.clear()  # the traceback keeps this frame alive
        # The CPU's allocator has no exception of its own, and says it in other words on other machines.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise type(error)(_what_fits(members, max_cache_len, batch_size, dtypes)) from error
    return groups


def _what_fits(
    members: Sequence[Members], max_cache_len: int, batch_size: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> str:
    wanted: dict[torch.device, int] = {}
    for shape, device, layers in members:
        num_bytes = len(layers) * shape.num_bytes(max_cache_len, batch_size, *dtypes)
        wanted[device] = wanted.get(device, 0) + num_bytes
    free = {device: _free_bytes(device) for device in wanted if device.type == "cuda"}
    places = [
        f"{num_bytes:,} bytes on {device}" + (f", where {free[device]:,} are free" if device in free else "")
        for device, num_bytes in wanted.items()
    ]
    message = (
        f"The cache does not fit: max_cache_len={max_cache_len} with batch_size={batch_size} in {dtypes[0]} takes "
        f"{'; '.join(places)}. "
    )
    if free:
        longest = min(max_cache_len * free[device] // wanted[device] for device in free)
        message += f"About max_cache_len={longest} would fit. " if longest else "Not one token would fit. "
    return message + "Take a shorter max_cache_len, fewer rows (beams count as rows), or a model in a smaller dtype."


def _free_bytes(device: torch.device) -> int:
    """Free on the device, or held by torch's own allocator and not in use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
