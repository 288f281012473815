"""The states of a layer in pieces: the order of a file, the memory that is read and written, the checksums."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from hf_static_kv.cache.fileformat import Entry, checksum_weights, position_checksums

PIECE_BYTES = 16 << 20  # read, copied and summed at a time: each costs some calls from Python


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
        for row, heads, first, piece in self.pieces():
            sums[first : first + piece.shape[1]] += position_checksums(piece, weights[row, heads])
        return sums

    def no_checksums(self) -> Tensor:
        length = self.skipped + self.states.shape[2]
        return torch.zeros(length, dtype=torch.int64, device=self.states.device)

    def pieces(self) -> Iterator[tuple[int, slice, int, Tensor]]:
        """(batch row, heads, first of the saved positions, states [h, m, D]), each in one stretch of the file.

        What is skipped comes in scratch memory: it is read for the checksums alone.
        """
        rows, heads, length, dim = self.states.shape
        num_heads, step = self._piece_shape
        scratch = self.states.new_empty(1, min(step, self.skipped), dim)
        for row, head in product(range(rows), range(0, heads, num_heads)):
            own = slice(head, head + num_heads)
            for first in range(0, self.skipped, step):
                yield row, own, first, scratch[:, : self.skipped - first]
            for first in range(0, length, step):
                yield row, own, self.skipped + first, self.states[row, own, first : first + step]

    @property
    def _piece_shape(self) -> tuple[int, int]:
        """Heads and positions of a piece. Several heads on a GPU alone: on a CPU they are apart, and read in place."""
        length, row_bytes = self.skipped + self.states.shape[2], self.states.shape[3] * self.states.dtype.itemsize
        num_heads = PIECE_BYTES // (length * row_bytes)
        is_whole = self.skipped == 0 and length == self.entry.shape[3]  # else the file has others between two heads
        return max(1, num_heads if self.is_staged and is_whole else 1), max(1, min(length, PIECE_BYTES // row_bytes))

    @property
    def is_staged(self) -> bool:
        """Whether a file is not read in place: on a GPU."""
        return self.states.is_cuda


def staging() -> Tensor:
    """Memory for a piece on its way to a GPU: pinned, where there is a GPU."""
    return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def bytes_of(states: Tensor) -> memoryview:
    """The memory of contiguous states on a CPU."""
    return memoryview(states.detach().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]
