"""Weights with four or eight bits, which stay as a quantisation package holds them.

    W[n, k] = value(code(n, k)) * scale(n, k // G) * factor

    value(c)    table[c], or c - midpoint
    scale       a number of each group of G weights of a row, or of each row (G = K)
    with zeros  (value - zero(n, k // G)) * scale * factor; if they are `added`: value * scale + zero

`code(n, k)` in memory, by `layout`; four bytes are one int32:

    bytes       int8, [N, K]
    high_first  two codes in a byte, the first in its upper half, [N, K / 2]
    low_first   the same, the first in its lower half
    halves      [N / 2, K] bytes: row n in the upper half of a byte, row n + N / 2 in the lower
    tiles       torch's `_convert_weight_to_int4pack`: [N / 8, K / 128, 32, 4] int32
    gptq        [K / 8, N] int32: a word has 8 inputs of one row, the first in its lowest bits
    awq         [K, N / 8] int32: a word has one input of 8 rows, in the order of `AWQ_ROWS`

The last two are transposed: outputs lie side by side. Their zeros have four bits, too: words of eight
rows, [K / G, N / 8] int32, in the order of rows (gptq) or of `AWQ_ROWS`.

`fused_linears` (linear.py) takes such weights for 1 to 16 tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_TOKENS = 16


class Layout(NamedTuple):
    """How codes lie in memory."""

    bits: int  # of a code
    in_word: int  # codes of one row in an int32
    span: int  # columns from which a word has its codes


LAYOUTS = {
    "bytes": Layout(8, 4, 4),
    "high_first": Layout(4, 8, 8),
    "low_first": Layout(4, 8, 8),
    "halves": Layout(4, 4, 4),
    "tiles": Layout(4, 8, 32),
    "gptq": Layout(4, 8, 32),
    "awq": Layout(4, 1, 32),
}
TRANSPOSED = ("gptq", "awq")
# Of the eight codes of a word in "awq", from its lowest bits on: the row behind the first.
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
_ZEROS_OF_WORD = 8  # of a transposed layout
_TILE_ROWS = 8  # of the layout "tiles"
_TILE_COLUMNS = 128
NESTED_GROUP = 256  # scales that share an absmax


class Nested(NamedTuple):
    """Scales that are quantised themselves: scale[i] = table[scales[i]] * absmax[i // 256] + offset."""

    table: Tensor  # [256], float32
    absmax: Tensor  # float32
    offset: Tensor  # one number, float32


class Packed(NamedTuple):
    """A weight [N, K] in the memory of a package. The tensors are the package's own: nothing is copied."""

    codes: Tensor
    layout: str
    rows: int  # N
    columns: int  # K
    dtype: torch.dtype  # of the layer's input and output
    group: int  # G
    scales: Tensor  # [N, K / G] of any strides; uint8 if they are nested
    table: Tensor | None = None  # float32 [16]
    midpoint: int = 0
    factor: float = 1.0
    nested: Nested | None = None
    zeros: Tensor | None = None  # as the scales, in the same strides; packed if it is transposed
    added: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.columns))

    def numel(self) -> int:
        return self.rows * self.columns

    def stride(self) -> tuple[int, int]:
        return self.columns, 1

    def is_contiguous(self) -> bool:
        return True

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the weights of one launch have in common."""
        table = None if self.table is None else self.table.data_ptr()
        scales = [None if part is None else part.dtype for part in (self.scales, self.zeros)]
        settings = self.columns, self.midpoint, self.factor, self.nested is not None, self.added
        return self.layout, self.dtype, self.group, table, *scales, *settings


Weight = Tensor | Packed


def layout_of(weight: Weight) -> Any:
    """What weights must have in common to be read by one launch, beside the input."""
    return weight.kind if isinstance(weight, Packed) else (weight.dtype, weight.is_contiguous())


def is_readable(packed: Packed) -> bool:
    """Whether the kernels read it: rows of whole words, groups of a power of two of words."""
    bits, in_word, span = LAYOUTS[packed.layout]
    if packed.layout in TRANSPOSED and not _is_readable_transposed(packed):
        return False
    groups_fit = packed.group == packed.columns or (
        packed.columns % packed.group == 0
        and packed.group % span == 0
        and packed.group & (packed.group - 1) == 0
    )
    is_tiled = packed.rows % _TILE_ROWS == 0 and packed.columns % _TILE_COLUMNS == 0
    return (
        packed.columns % in_word == 0
        and groups_fit
        and (packed.layout != "tiles" or is_tiled)
        and (packed.layout != "halves" or packed.rows % 2 == 0)
        and packed.codes.is_contiguous()
        and packed.codes.nbytes * 8 == packed.numel() * bits
        and packed.codes.data_ptr() % 4 == 0
        and packed.scales.shape == (packed.rows, packed.columns // packed.group)
        and (packed.nested is None or packed.scales.is_contiguous())
        and (packed.zeros is None or _zeros_fit(packed))
    )


def _zeros_fit(packed: Packed) -> bool:
    assert packed.zeros is not None
    if packed.layout in TRANSPOSED:
        groups, rows = packed.columns // packed.group, packed.rows // _ZEROS_OF_WORD
        return packed.zeros.shape == (groups, rows) and packed.zeros.is_contiguous()
    return packed.zeros.stride() == packed.scales.stride()


def _is_readable_transposed(packed: Packed) -> bool:
    """Whole words of zeros and of inputs, packed zeros, scales of 16 bits; read in 16 bytes."""
    zeros = packed.zeros
    parts = packed.codes, packed.scales, zeros
    rows, columns = packed.shape
    shape = (columns // 8, rows) if packed.layout == "gptq" else (columns, rows // 8)
    return (
        zeros is not None
        and packed.rows % _ZEROS_OF_WORD == 0
        and packed.columns % LAYOUTS[packed.layout].span == 0
        and packed.codes.shape == shape
        and packed.codes.dtype == zeros.dtype == torch.int32
        and packed.scales.dtype in (torch.float16, torch.bfloat16)
        and packed.scales.t().is_contiguous()
        and all(part.data_ptr() % 16 == 0 for part in parts if part is not None)
        and packed.midpoint in (0, 1)
        and (packed.factor, packed.table, packed.nested, packed.added) == (1.0, None, None, False)
    )


def unpacked(packed: Packed) -> Tensor:
    """The weight [N, K] in its dtype: computed in float32 and rounded once."""
    values = _values(packed)
    grouped = values.view(packed.rows, -1, packed.group)
    scale = _scales(packed)[:, :, None]
    zero = None if packed.zeros is None else _zeros(packed)[:, :, None]
    if zero is not None and not packed.added:
        grouped -= zero
    grouped *= scale
    grouped *= packed.factor
    if zero is not None and packed.added:
        grouped += zero
    return values.to(packed.dtype)


def _values(packed: Packed) -> Tensor:
    """The value of each code, [N, K] in float32."""
    stored = packed.codes.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)
    if packed.layout == "bytes":
        return stored.view(torch.int8).view(packed.shape).float() - packed.midpoint
    if packed.layout in TRANSPOSED:
        codes = _transposed(packed)
    else:
        codes = _CODES[packed.layout](stored, packed)
    if packed.table is not None:
        return packed.table[codes.int()]
    return codes.float() - packed.midpoint


def _high_first(stored: Tensor, packed: Packed) -> Tensor:
    return torch.stack([stored >> 4, stored & 15], dim=-1).view(packed.shape)


def _low_first(stored: Tensor, packed: Packed) -> Tensor:
    return torch.stack([stored & 15, stored >> 4], dim=-1).view(packed.shape)


def _halves(stored: Tensor, packed: Packed) -> Tensor:
    return torch.cat([stored >> 4, stored & 15]).view(packed.shape)


def _tiles(stored: Tensor, packed: Packed) -> Tensor:
    """Word j of lane 4 r + q has row r, and of the columns 32 j + 2 q + those of `_TILE_STEPS`, one in
    each half of its bytes.
    """
    words = stored.view(-1, _TILE_ROWS, 4, 4, 4)  # [tile, row, q, j, byte]
    both = torch.stack([words & 15, words >> 4], dim=-1).flatten(-2)  # by position
    column = torch.tensor(
        [[[32 * j + 2 * q + step for step in TILE_STEPS] for j in range(4)] for q in range(4)],
        device=stored.device,
    )
    codes = torch.empty(
        len(words), _TILE_ROWS, _TILE_COLUMNS, dtype=torch.uint8, device=stored.device
    )
    codes[:, :, column.flatten()] = both.flatten(2)
    tiles = codes.view(packed.rows // _TILE_ROWS, -1, _TILE_ROWS, _TILE_COLUMNS)
    return tiles.transpose(1, 2).reshape(packed.shape)


def _transposed(packed: Packed) -> Tensor:
    words = packed.codes.detach().as_subclass(Tensor)
    if packed.layout == "awq":
        return _of_words(words, AWQ_ROWS).t()
    return _of_words(words.t()).view(packed.shape)


def _of_words(words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """The codes of words side by side, [..., n] int32 to [..., 8 n]: `order` names their places."""
    codes = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for position, place in enumerate(order):
        codes[..., place] = words >> 4 * position & 15
    return codes.flatten(-2)


def _zeros(packed: Packed) -> Tensor:
    """The zeros [N, K / G] in float32."""
    assert packed.zeros is not None
    if packed.layout not in TRANSPOSED:
        return packed.zeros.float()
    order = AWQ_ROWS if packed.layout == "awq" else range(_ZEROS_OF_WORD)
    return _of_words(packed.zeros, order).t().float()


# Of the eight codes of a word in "tiles", from its lowest bits on: the column behind the first.
TILE_STEPS = (0, 8, 16, 24, 1, 9, 17, 25)
_CODES = {"high_first": _high_first, "low_first": _low_first, "halves": _halves, "tiles": _tiles}


def _scales(packed: Packed) -> Tensor:
    """The scales [N, K / G] in float32, without `factor`."""
    if packed.nested is None:
        return packed.scales.float()
    table, absmax, offset = packed.nested
    outer = absmax.repeat_interleave(NESTED_GROUP)[: packed.scales.numel()]
    return table[packed.scales.int()] * outer.view(packed.scales.shape) + offset
