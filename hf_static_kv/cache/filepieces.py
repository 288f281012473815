"""The states of a layer in pieces: the order of a file, the memory that is read and written, the checksums."""

from collections.abc import Iterator
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
        for row, head, first, piece in pieces(self.states):
            sums[first : first + len(piece)] += position_checksums(piece, weights[row, head])
        return sums

    def no_checksums(self) -> Tensor:
        return torch.zeros(self.states.shape[2], dtype=torch.int64, device=self.states.device)


def pieces(states: Tensor) -> Iterator[tuple[int, int, int, Tensor]]:
    """(batch row, head, first position, states [m, D]) in the order of a file, each contiguous in the storage."""
    rows, heads, length, _ = states.shape
    step = _step(states)
    for row, head, first in product(range(rows), range(heads), range(0, length, step)):
        yield row, head, first, states[row, head, first : first + step]


def staging_for(states: Tensor) -> Tensor | None:
    """Pinned memory for a piece of states on a GPU; None on a CPU, where files are read and written in place."""
    if not states.is_cuda:
        return None
    return torch.empty(_step(states) * states.shape[3], dtype=states.dtype, pin_memory=True)


def bytes_of(states: Tensor) -> memoryview:
    """The memory of contiguous states on a CPU."""
    return memoryview(states.detach().view(torch.uint8).numpy()).cast("B")  # type: ignore[arg-type]


def _step(states: Tensor) -> int:
    """Positions of a piece."""
    _, _, length, dim = states.shape
    return min(length, max(1, PIECE_BYTES // (dim * states.dtype.itemsize)))
