"""The layers of a cache file in pieces. One tensor of the file that fileformat.py draws:

```
keys.0      | layer 0                                 | layer 1 ...       [L, B, H, n, D]
            | row 0             | row 1               |
            | head 0  | head 1  | head 0  | head 1    |
positions   | 0 .. n-1| 0 .. n-1| ...               a piece: some positions of one head,
                                                    or several whole heads of one row
```
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from hf_static_kv.cache.fileformat import FileTensor, checksum_weights, position_checksums

PIECE_BYTES = 16 << 20  # read, copied and summed at a time


class Piece(NamedTuple):
    """States that lie in one stretch of a file."""

    row: int  # of the batch
    head: int  # the first head
    first: int  # the first position, counted from the first one in the file
    states: Tensor  # [h, m, D], a view of the storage or scratch memory


class LayerStates(NamedTuple):
    """Keys or values of one layer, in a file and in a cache."""

    tensor: FileTensor
    number: int  # of the layer in the tensor of the file
    layer_idx: int
    states: Tensor  # [B, H, n, D], a view of the storage
    skipped: int = 0  # positions of the file before `states`

    def offset(self, piece: Piece) -> int:
        """Where a piece begins, in bytes from the end of the header."""
        _, rows, heads, length, dim = self.tensor.shape
        position = ((self.number * rows + piece.row) * heads + piece.head) * length + piece.first
        return self.tensor.offset + position * dim * self.states.element_size()

    def checksums(self, pieces: Iterable[Piece]) -> Tensor:
        """One for each position, int64 [n], from the `pieces` of this layer."""
        name = self.tensor.name.partition(".")[0]
        # [B, H, W]
        weights = checksum_weights(name, self.layer_idx, self.states)
        sums = torch.zeros(self._length, dtype=torch.int64, device=self.states.device)
        for row, head, first, states in pieces:
            own = weights[row, head : head + len(states)]
            sums[first : first + states.shape[1]] += position_checksums(states, own)
        return sums

    def pieces(self) -> Iterator[Piece]:
        """In the order of the file; what is skipped in scratch memory, for its checksums."""
        rows, heads, length, dim = self.states.shape
        num_heads, step = self._piece_shape
        scratch = self.states.new_empty(1, min(step, self.skipped), dim)
        for row, head in product(range(rows), range(0, heads, num_heads)):
            for first in range(0, self.skipped, step):
                yield Piece(row, head, first, scratch[:, : self.skipped - first])
            own = self.states[row, head : head + num_heads]
            for first in range(0, length, step):
                yield Piece(row, head, self.skipped + first, own[:, first : first + step])

    @property
    def _length(self) -> int:
        return self.skipped + self.states.shape[2]

    @property
    def _piece_shape(self) -> tuple[int, int]:
        bytes_of_a_position = self.states.shape[3] * self.states.dtype.itemsize
        # A window of 1 may keep no position.
        length = max(1, self._length)
        positions = max(1, min(length, PIECE_BYTES // bytes_of_a_position))
        if self.skipped or self._length != self.tensor.shape[3]:
            return 1, positions  # other positions are between two heads
        return max(1, PIECE_BYTES // (length * bytes_of_a_position)), positions

    @property
    def is_staged(self) -> bool:
        return not self.states.is_cpu

    def on_cpu(self, piece: Piece, buffer: Tensor) -> Tensor:
        states = piece.states
        if not self.is_staged:
            return states
        return buffer[: states.nbytes].view(states.dtype).view(states.shape)


def staging(parts: Iterable[LayerStates]) -> Tensor:
    """Pinned memory for a piece between a file and a GPU."""
    is_needed = any(part.is_staged for part in parts)
    is_pinned = is_needed and torch.cuda.is_available()
    return torch.empty(PIECE_BYTES if is_needed else 0, dtype=torch.uint8, pin_memory=is_pinned)


def memories(states: Tensor) -> list[memoryview]:
    """The memory of a piece on a CPU, or of each head if they are apart."""
    heads = [states] if states.is_contiguous() else states.unbind()
    return [memoryview(head.detach().view(torch.uint8).numpy()).cast("B") for head in heads]  # type: ignore[arg-type]
