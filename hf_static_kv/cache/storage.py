"""The two tensors behind the cache: shapes, allocation, bytes. Knows no transformers."""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_static_kv.cache.codes import coded_dim

Dtypes = tuple[torch.dtype, torch.dtype]  # of key states, of value states
Members = tuple["LayerShape", torch.device, Sequence[int]]  # of a group, with its layers
# Positions that a compact layer keeps beyond its window, so that `crop` can go back.
SLACK = 64
CAPTURING = Lock()  # sync-debug mode and graph capture are process-wide: one capture at a time
_LARGE = 4 << 20  # bytes from which numpy asks the system for large pages
_ALIGNMENT = 64  # bytes; of all that torch allocates on a CPU


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for one token."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    window: int | None = None  # of a compact layer; None: every position is stored
    kv_dtype: str | None = None  # of codes (codes.py); None: the states are stored as they are

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, window: int | None = None, kv_dtype: str | None = None
    ) -> "LayerShape":
        return cls(keys.shape[1], keys.shape[3], values.shape[3], window, kv_dtype)

    @property
    def of_a_token(self) -> "LayerShape":
        """Without the window."""
        return replace(self, window=None)

    def num_slots(self, max_cache_len: int) -> int:
        if self.window is None:
            return max_cache_len
        return min(max_cache_len, 2 * (self.window + SLACK))

    def stored(self, dtypes: Dtypes) -> list[tuple[int, torch.dtype]]:
        """Numbers of a head, and their dtype, in the storage of keys and of values."""
        dims = self.key_head_dim, self.value_head_dim
        if self.kv_dtype is not None:
            return [(coded_dim(dim), torch.int8) for dim in dims]
        return list(zip(dims, dtypes, strict=True))

    def num_bytes(self, max_cache_len: int, batch_size: int, dtypes: Dtypes) -> int:
        per_head = sum(dim * dtype.itemsize for dim, dtype in self.stored(dtypes))
        return batch_size * self.num_slots(max_cache_len) * self.num_kv_heads * per_head

    def __str__(self) -> str:
        text = f"{self.num_kv_heads} KV heads of dim {self.key_head_dim}"
        if self.value_head_dim != self.key_head_dim:
            text += f" (keys) and {self.value_head_dim} (values)"
        if self.window is not None:
            text += f", compact with a window of {self.window}"
        if self.kv_dtype is not None:
            text += f", in {self.kv_dtype}"
        return text


class StorageGroup:
    """One pair of contiguous tensors for all layers of one shape on one device.

    ```
    keys    [L, B, H, S, Dk]      L layers, B batch rows, H KV heads,
    values  [L, B, H, S, Dv]      S positions (max_cache_len), D head dim

             position  0   1   2   3   4   5  ...  S-1
    layer 0, row 0    [k] [k] [k] [ ] [ ] [ ] ...  [ ]     seq_len = 3: the rest is free
    layer 1, row 0    [k] [k] [k] [ ] [ ] [ ] ...  [ ]     every layer fills the same positions
    ```

    Attention reads a slice of one layer along S, never a copy. Zero-filled: a
    kernel may load free positions and mask them. A compact group has fewer
    slots (`LayerSlots`); one with a `kv_dtype` has codes (codes.py).
    """

    def __init__(
        self, members: Members, max_cache_len: int, batch_size: int, dtypes: Dtypes
    ) -> None:
        self.shape, device, layers = members
        self.dtypes = dtypes
        self._recent: dict[tuple[int, int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._pickled: tuple[int, int] | None = None  # (rows, positions); None: all
        slots = self.shape.num_slots(max_cache_len)
        head = (len(layers), batch_size, self.shape.num_kv_heads, slots)
        (key_dim, key_dtype), (value_dim, value_dtype) = self.shape.stored(dtypes)
        with torch.inference_mode(False):
            self.keys = _zeros((*head, key_dim), key_dtype, device)
            try:
                self.values = _zeros((*head, value_dim), value_dtype, device)
            except RuntimeError:
                del self.keys  # the traceback keeps `self` alive
                raise

    def views(self, index: int, batch_size: int, first: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, n, D] of one layer at the slots [first, first + length)."""
        if torch.compiler.is_compiling():  # a kept slice would be guarded
            keys, values = self.keys[index, :batch_size], self.values[index, :batch_size]
            return keys.narrow(2, first, length), values.narrow(2, first, length)
        # Made once for all layers of a step: a torch call takes microseconds on the host.
        key = (batch_size, first, length)
        if (found := self._recent.get(key)) is None:
            # A step needs three: where to write, what full and what sliding layers see.
            if len(self._recent) >= 4:
                del self._recent[next(iter(self._recent))]
            with outside_inference_mode():
                found = _slices(self.keys, *key), _slices(self.values, *key)
            self._recent[key] = found
        return found[0][index], found[1][index]

    def copy_with_capacity(self, max_cache_len: int, batch_size: int) -> "StorageGroup":
        """The same states in larger storage, or this group if it is large enough."""
        layers, rows, _, length, _ = self.keys.shape
        if batch_size <= rows and length == self.shape.num_slots(max_cache_len):
            return self
        members = self.shape, self.keys.device, range(layers)
        (group,) = allocate_groups([members], max_cache_len, max(rows, batch_size), self.dtypes)
        group.keys[:, :rows, :, :length] = self.keys
        group.values[:, :rows, :, :length] = self.values
        return group

    def _with(self, **changes: Any) -> "StorageGroup":
        group = type(self).__new__(type(self))
        group.__dict__.update(self.__dict__, _recent={}, **changes)
        return group

    def shared(self) -> "StorageGroup":
        """The same memory in other tensors, whose users can be counted."""
        with torch.inference_mode(False):
            return self._with(keys=self.keys.detach(), values=self.values.detach())

    def to_pickle(self, rows: int, length: int) -> "StorageGroup":
        """The same storage. Its pickle keeps `rows` and `length`, and loads at full size."""
        return self._with(_pickled=(rows, length))

    def __getstate__(self) -> dict[str, Any]:
        # A pickle makes copies of the views in `_recent`.
        state = {**self.__dict__, "_recent": {}, "_pickled": None}
        if self._pickled is not None:
            rows, length = self._pickled
            for name in ("keys", "values"):
                # A clone: a view would be saved with all of its storage.
                state[name] = state[name][:, :rows, :, :length].clone(), state[name].shape
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("keys", "values"):
            if isinstance(state[name], tuple):
                states, size = state[name]
                with torch.inference_mode(False):
                    state[name] = states.new_zeros(size)
                    state[name][:, : states.shape[1], :, : states.shape[3]].copy_(states)
        state.setdefault("dtypes", (state["keys"].dtype, state["values"].dtype))  # of older pickles
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "StorageGroup":
        with torch.inference_mode(False):
            own = {"keys": self.keys.clone(), "values": self.values.clone()}
        copied = memo[id(self)] = self._with(**own, _pickled=None)
        return copied

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


def _slices(storage: Tensor, batch_size: int, first: int, length: int) -> tuple[Tensor, ...]:
    rows = storage if batch_size == storage.shape[1] else storage.narrow(1, 0, batch_size)
    return rows.narrow(3, first, length).unbind(0)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system zeroes a large tensor when a page is first touched."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type == "cpu" and not torch.compiler.is_compiling() and num_bytes >= _LARGE:
        with suppress(MemoryError):  # torch has an error of its own
            memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
            first = -memory.ctypes.data % _ALIGNMENT
            return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(size)
    return torch.zeros(size, dtype=dtype, device=device)


def allocate_groups(
    members: Sequence[Members], max_cache_len: int, batch_size: int, dtypes: Dtypes
) -> list[StorageGroup]:
    """One group for each of `members`. An error for lack of memory says what would fit."""
    try:
        return [StorageGroup(layers, max_cache_len, batch_size, dtypes) for layers in members]
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise type(error)(_what_fits(members, max_cache_len, batch_size, dtypes)) from error


def outside_inference_mode() -> Any:
    """For tensors that are kept: one made in inference mode cannot be written outside of it."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return nullcontext()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error, or its cause, is a lack of memory on a device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Torch has no exception of its own for the host.
    is_of_host = "DefaultCPUAllocator" in str(error)
    return is_of_host or (error.__cause__ is not None and is_out_of_memory(error.__cause__))


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what torch has reserved and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _what_fits(
    members: Sequence[Members], max_cache_len: int, batch_size: int, dtypes: Dtypes
) -> str:
    wanted = Counter[torch.device]()
    fixed = Counter[torch.device]()  # of compact layers, whatever the capacity
    for shape, device, layers in members:
        num_bytes = len(layers) * shape.num_bytes(max_cache_len, batch_size, dtypes)
        wanted[device] += num_bytes
        fixed[device] += 0 if shape.window is None else num_bytes
    places = []
    lengths = []
    for device, num_bytes in wanted.items():
        place = f"{num_bytes:,} bytes on {device}"
        if device.type == "cuda":
            free = free_bytes(device)
            place += f", where {free:,} are free"
            growing = max(1, num_bytes - fixed[device])
            lengths.append(max_cache_len * max(0, free - fixed[device]) // growing)
        places.append(place)
    fits = ""
    if lengths:
        most = f"About max_cache_len={min(lengths)}" if min(lengths) else "Not one token"
        fits = f"{most} would fit. "
    return (
        f"The cache does not fit: max_cache_len={max_cache_len} with batch_size={batch_size} in "
        f"{dtypes[0]} takes {'; '.join(places)}. {fits}Use a shorter max_cache_len, a smaller "
        "batch (beams count), or a model in a smaller dtype."
    )
