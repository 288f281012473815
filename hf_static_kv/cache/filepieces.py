"""The states of a layer in pieces: the order of a file, the memory that is read and written, the checksums."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from hf_static_kv.cache.fileformat import Entry, checksum_weights, position_checksums

PIECE_BYTES = 8 << 20  # read, copied and summed at a time


class LayerStates(NamedTuple):
    """Keys or values of one layer, in a file and in a cache."""

    entry: Entry
    number: int  # of the layer in the tensor of the file
    layer_idx: int
    states: Tensor  # [B, H, n, D], a view of the storage
    skipped: int = 0  # positions of the file before `states` that the cache does not keep

    @property
    def offset(self) -> int:
        """Where the layer begins, from the end of the header."""
        return self.entry.offset + self.number * (self.entry.num_bytes // self.entry.shape[0])

    def weights(self) -> Tensor:
        """[B, H, W] for the checksums."""
        return checksum_weights(self.entry.name.partition(".")[0], self.layer_idx, self.states)

    def checksums(self) -> Tensor:
        """int64 [n], on the device of the states."""
        weights, sums = self.weights(), self.no_checksums()
        for row, head, first, piece in self.pieces():
            sums[first : first + len(piece)] += position_checksums(piece, weights[row, head])
        return sums

    def no_checksums(self) -> Tensor:
        length = self.skipped + self.states.shape[2]
        return torch.zeros(length, dtype=torch.int64, device=self.states.device)

    def pieces(self) -> Iterator[tuple[int, int, int, Tensor]]:
        """(batch row, head, first of the saved positions, states [m, D]) in the order of a file, each contiguous.

        What is skipped comes in scratch memory: it is read for the checksums alone.
        """
        rows, heads, length, dim = self.states.shape
        step = self.step
        scratch = self.states.new_empty(min(step, self.skipped), dim)
        for row, head in product(range(rows), range(heads)):
            for first in range(0, self.skipped, step):
                yield row, head, first, scratch[: self.skipped - first]
            for first in range(0, length, step):
                yield row, head, self.skipped + first, self.states[row, head, first : first + step]

    @property
    def step(self) -> int:
        """Positions of a piece."""
        length, row_bytes = self.skipped + self.states.shape[2], self.states.shape[3] * self.states.dtype.itemsize
        return max(1, min(length, PIECE_BYTES // row_bytes))

    @property
    def is_staged(self) -> bool:
        """Whether a file is not read in place: on a GPU."""
        return self.states.is_cuda


class Staging:
    """Two buffers of pinned memory, in turns: one is read from a file while the other is copied to a GPU."""

    def __init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def read(self, piece: Tensor, read: Callable[[memoryview], None]) -> None:
        """Have a buffer filled, and copy it to the piece. The host does not wait for the copy."""
        self._buffers.reverse()
        self._copied.reverse()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()
        source = self._buffers[0][: piece.nbytes]
        read(bytes_of(source))
        piece.copy_(source.view(piece.dtype).view(piece.shape), non_blocking=True)
        if piece.is_cuda:
            self._copied[0] = torch.cuda.current_stream(piece.device).record_event()


def bytes_of(states: Tensor) -> memoryview:
    """The memory of contiguous states on a CPU."""
    return memoryview(states.detach().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
