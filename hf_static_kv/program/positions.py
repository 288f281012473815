"""Where a pass writes its tokens and what they attend to, kept on the device.

A pass has B batch rows of q tokens each, and every row has a length of its own. The host sets lengths
once; then each pass places its tokens behind them and moves them on, so that a captured graph runs
again and again without the host.

                  |<-- attended to -->|
    [ padding | old tokens            | new tokens | free ]      one batch row of a layer
              seq_start               lengths[b]   lengths[b] + counts[b]

A row may have fewer new tokens than q: they are its last ones, and what is before them is padding,
which is written nowhere and seen by nobody.

A compact layer keeps the newest positions only: its slot 0 is a later position (`offset`), which
changes when the host compacts the layer. The layers of one window share a cursor.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_static_kv.kernels.positions import place_tokens, place_tokens_plain

_UNLIMITED = torch.iinfo(torch.int64).max // 2


class Cursor(NamedTuple):
    """Slots and spans of the new tokens: in the full layers, or in the compact ones of a window."""

    offset: Tensor  # [1], the position in slot 0
    slots: Tensor  # [B, q]
    spans: Tensor  # [B, L, q, 3], in slots: seq_start, first, end


class Positions:
    """The lengths of B rows, and the slots, spans and position ids of q new tokens in each.

    Args:
        windows: of each layer, the positions that a token attends to; None: all.
        are_chunked: whether the window of a layer is a chunk of the sequence.
        compact_windows: the windows whose layers are compact.
        parts: the leading dims of `position_ids`, as [3] for [3, B, q].
        computes_ids: False: the host writes `position_ids` before each pass.
        shared: the positions of another pass over the same rows, which this one goes on from.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        are_chunked: Sequence[bool],
        compact_windows: Sequence[int | None],
        batch_size: int,
        num_tokens: int,
        parts: Sequence[int],
        device: torch.device,
        computes_ids: bool = True,
        shared: "Positions | None" = None,
    ) -> None:
        self.computes_ids = computes_ids
        chunks = [w if c else None for w, c in zip(windows, are_chunked, strict=True)]
        self.windows = torch.tensor([w or _UNLIMITED for w in windows], device=device)  # [L]
        self.chunks = torch.tensor([c or _UNLIMITED for c in chunks], device=device)  # [L]
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.seq_start = torch.zeros_like(self.lengths)
        self.counts = torch.full_like(self.lengths, num_tokens)
        # The id of a token's position is its distance from seq_start plus this.
        self.shift = self.lengths.new_zeros(*parts, batch_size)
        self.position_ids = self.lengths.new_zeros(*parts, batch_size, num_tokens)
        self.full = self._new_cursor(num_tokens)
        self.compact = {window: self._new_cursor(num_tokens) for window in compact_windows}
        if shared is not None:
            self._share(shared)

    def _share(self, other: "Positions") -> None:
        self.lengths = other.lengths
        self.seq_start = other.seq_start
        self.shift = other.shift
        for window, cursor in self.compact.items():
            self.compact[window] = cursor._replace(offset=other.compact[window].offset)

    def _new_cursor(self, num_tokens: int) -> Cursor:
        batch_size = len(self.lengths)
        slots = self.lengths.new_zeros(batch_size, num_tokens)
        # Padded to four columns so that every layer's are 16-byte aligned and Triton compiles one
        # variant.
        spans = self.lengths.new_zeros(batch_size, len(self.windows), num_tokens, 4)[..., :3]
        return Cursor(self.lengths.new_zeros(1), slots, spans)

    @property
    def tensors(self) -> list[Tensor]:
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own + [t for cursor in (self.full, *self.compact.values()) for t in cursor]

    def cursor(self, compact_window: int | None) -> Cursor:
        return self.full if compact_window is None else self.compact[compact_window]

    def set(self, lengths: int | Tensor, seq_start: Tensor, position_ids: Tensor | None) -> None:
        """The next tokens of row b go to `lengths[b]`; its sequence begins at `seq_start[b]`.

        The model is told that the position of the first of them is `position_ids` [..., B, 1]; None:
        its distance from the beginning.
        """
        if isinstance(lengths, int):
            self.lengths.fill_(lengths)
        else:
            self.lengths.copy_(lengths)
        self.seq_start.copy_(seq_start)
        if position_ids is None:
            self.shift.zero_()
        else:
            self.shift.copy_(position_ids[..., 0] - (self.lengths - self.seq_start))

    def set_offsets(self, offsets: Mapping[int | None, int]) -> None:
        """Tell which position is in slot 0 of the compact layers of each window."""
        for window, offset in offsets.items():
            self.compact[window].offset.fill_(offset)

    def set_back(self, num_tokens: Tensor) -> None:
        """Take back the last `num_tokens` [B] of each row: the next pass writes over them."""
        self.lengths -= num_tokens

    def place(self, by_kernel: bool = True) -> None:
        """Place the tokens of the next pass behind the lengths, which move on."""
        place = place_tokens if by_kernel else place_tokens_plain
        inputs = self.lengths, self.seq_start, self.counts
        layers = self.windows, self.chunks
        for offset, slots, spans in self.compact.values():
            place(*inputs, offset, *layers, slots, spans, None, None, advances=False)
        offset, slots, spans = self.full
        ids = (self.shift, self.position_ids) if self.computes_ids else (None, None)
        place(*inputs, offset, *layers, slots, spans, *ids, advances=True)
