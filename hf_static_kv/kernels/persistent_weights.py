"""How the weights of a format lie in shared memory, in the kernel of persistent_step.py.

Dense      bfloat16: rows as they are
FourBits   bitsandbytes' codes with their scales, rows as they are   persistent_packed.cuh
Bytes      codes of eight bits with one scale a row                  persistent_packed.cuh
Tiles      torchao's tiles: eight rows together                      persistent_tiles.cuh

chunk      rows of a phase, which one block has and publishes at once
stage      rows of a block that are copied at once, into one slot of a ring in shared memory
"""

import math

import torch

from hf_static_kv.kernels.packed import NESTED_GROUP, Packed
from hf_static_kv.kernels.persistent_step import GROUP

WARPS = 8
_STAGE = 18432  # bytes of rows in bfloat16 at most, unless one is longer
_STAGE_OF_ROWS = 36864  # of packed rows of the hidden size, at most
_STAGE_OF_TILES = 16384
_ROWS_OF_TILE = 8
_GROUPS_OF_SPAN = 8  # whose inputs a warp holds
# Bytes of the tables of weights of four bits: of pairs, of nested scales, and the offsets of a layer.
_TABLES = 65536 + 4 * NESTED_GROUP + 32
# What values that are published by 4, 2 or 1 cost, in bytes that a block reads meanwhile. Gemma 3 1B
# takes 925 us, with half of these numbers 980, with twice of them 923 (H200, 2026-11-19).
_EXCHANGE = {4: 0, 2: 16000, 1: 40000}


class Dense:
    """Weights in bfloat16, and what the other formats have alike."""

    # Stages of a block that are under way while it waits for values, and while it multiplies: more
    # slow the exchange of values, fewer the reading. Ten take Llama-3.2-1B 674 us instead of 689 with
    # six, Qwen3-1.7B 1,025 instead of 1,052 and Gemma 3 1B 866 instead of 905; 13 take Llama 682 and
    # Gemma 815 where ten took 675 and 805 (H200, 2026-11-19).
    flight_wait, flight_stream = 2, 10
    least_chunk = 1
    unit_of_stage = 128  # what the bytes of a stage are a multiple of

    def __init__(self, sizes: dict[str, int]) -> None:
        self.widths = sizes["H"], sizes["I"], sizes["NQ"] * sizes["D"]
        self.stage = 0  # bytes, at least; where rows are copied as they are what they need

    def macros(self) -> dict[str, int | str]:
        return {"IS_PACKED": 0, "IS_TILED": 0, "RING_AT": 0}

    def row_bytes(self, width: int) -> int:
        """Of a row in a stage, with its scales."""
        return 2 * width

    def rows_of_stage(self, width: int, chunk: int) -> int:
        """A power of two, and at least one."""
        return next((n for n in (8, 4, 2) if n * self.row_bytes(width) <= _STAGE), 1)

    def rows_at_once(self, rows: int, width: int, weights: int, blocks: int) -> int:
        """4, 2 or 1 of a phase: what the busiest block reads, and its exchange, cost least."""
        fits = [c for c in (4, 2, 1) if rows % c == 0 and c >= self.least_chunk]
        row_bytes = weights * self.row_bytes(width)
        return min(
            fits or [self.least_chunk],
            key=lambda c: busiest(rows, c, blocks) * row_bytes + _EXCHANGE[c],
        )

    def chunk(self, rows_at_once: int) -> int:
        """How many of the rows that a block has at once it publishes at once."""
        return rows_at_once

    def stages_between(self, stage: int) -> int:
        """How many stages after one of a warp its next one may be, but for the next."""
        return 0


class _Rows(Dense):
    """Packed rows, which are multiplied in pairs."""

    flight_stream = 6  # of eight pairs with `flight_wait` the fastest with Llama-3.1-8B in NF4
    least_chunk = 2
    rows_of_hidden: int  # in a stage
    rows_multiplied: int  # at once: of several short stages, then

    def __init__(self, sizes: dict[str, int], packed: Packed) -> None:
        super().__init__(sizes)
        self.packed = packed
        rows, of_row = self.rows_of_hidden, self.row_bytes(self.widths[0])
        while rows * of_row > _STAGE_OF_ROWS:  # of a wide model, whose ring would have few slots
            rows //= 2
        self.stage = max(rows * of_row, 2 * self.row_bytes(max(self.widths)))

    def macros(self) -> dict[str, int | str]:
        return {
            "IS_PACKED": 1,
            "IS_TILED": 0,
            "IS_BYTES": int(isinstance(self, Bytes)),
            "ROWS_AT_ONCE": self.rows_multiplied,
            "RING_AT": rounded_up(self.bytes_before_ring(), 128),
            "QUANT_GROUP": GROUP,
            "SCALE_FACTOR": float_literal(self.packed.factor),
            "HAS_HALF_SCALES": int(self.packed.scales.dtype == torch.bfloat16),
            "IS_NESTED": int(self.packed.nested is not None),
            "IS_HIGH_FIRST": int(self.packed.layout == "high_first"),
        }

    def bytes_before_ring(self) -> int:
        raise NotImplementedError

    def scale_bytes(self, width: int) -> int:
        """Of a row, in a stage."""
        return 0

    def rows_of_stage(self, width: int, chunk: int) -> int:
        """A power of two, so that each lane has the products of one pair of rows."""
        most = (n for n in (16, 8, 4, 2) if n * self.row_bytes(width) <= self.stage)
        rows = next(most, 0)
        if not rows or min(rows, chunk) * self.scale_bytes(width) % 16:
            raise ValueError(f"rows of {width} columns make no whole copies")
        return rows


class FourBits(_Rows):
    # Eight layers of Llama-3.1-8B take 437 us; with stages of 18 KB, of two rows of the intermediate
    # size, they took 470. With 2, 4 and 8 rows multiplied 442, 444 and 436 (H200, 2026-11-19).
    rows_of_hidden, rows_multiplied = 16, 8

    def bytes_before_ring(self) -> int:
        return _TABLES

    def row_bytes(self, width: int) -> int:
        # Of nested scales a copy has up to eight more, for two rows or more.
        return width // 2 + self.scale_bytes(width) + (0 if self.packed.nested is None else 16)

    def scale_bytes(self, width: int) -> int:
        return width // GROUP * self.packed.scales.dtype.itemsize


class Bytes(_Rows):
    # The layers above take 584 us, with 12 rows in a stage 583. With 2, 4 and 8 rows multiplied 584, 588
    # and 640.
    rows_of_hidden, rows_multiplied = 8, 2

    def bytes_before_ring(self) -> int:
        """Inputs of whole spans, and their scales."""
        inputs = rounded_up(max(self.widths), 8 * GROUP)
        return 2 * inputs + 4 * inputs // GROUP

    def row_bytes(self, width: int) -> int:
        return width


class Tiles(Dense):
    # With Llama-3.1-8B one stage takes 1,619 us, two take 1,674 (H200, 2026-11-19).
    flight_wait, flight_stream = 1, 6

    def __init__(self, sizes: dict[str, int], packed: Packed) -> None:
        super().__init__(sizes)
        self.packed = packed
        # What the kernel takes for a group: the inputs of a larger one are too many for registers.
        self.group = min(packed.group, 128)
        self.stage = _STAGE_OF_TILES
        self.unit_of_stage = _ROWS_OF_TILE * _GROUPS_OF_SPAN * self.group // 2  # a span

    def macros(self) -> dict[str, int | str]:
        # Groups of inputs lie 16 bytes apart, and spans are whole.
        groups = rounded_up(max(self.widths) // self.group, _GROUPS_OF_SPAN)
        ring_at = rounded_up(groups * (2 * self.group + 16), 128)
        return {
            "IS_PACKED": 1, "IS_TILED": 1, "RING_AT": ring_at, "QUANT_GROUP": self.packed.group,
        }  # fmt: skip

    def rows_of_stage(self, width: int, chunk: int) -> int:
        return _ROWS_OF_TILE

    def rows_at_once(self, rows: int, width: int, weights: int, blocks: int) -> int:
        return _ROWS_OF_TILE

    def chunk(self, rows_at_once: int) -> int:
        return rows_at_once // 2

    def stages_between(self, stage: int) -> int:
        """SETS * PARTS of persistent_tiles.cuh."""
        between = 0
        for width in self.widths:
            spans = math.ceil(width / (_GROUPS_OF_SPAN * self.group))
            warps = next(n for n in (1, 2, 4, 8) if n >= min(spans, WARPS))
            parts = math.ceil(_ROWS_OF_TILE * width / 2 / stage)
            between = max(between, WARPS // warps * parts)
        return between


def format_of(sizes: dict[str, int], packed: Packed | None) -> Dense:
    if packed is None:
        return Dense(sizes)
    kinds: dict[str, type[Bytes | FourBits | Tiles]] = {"bytes": Bytes, "tiles": Tiles}
    return kinds.get(packed.layout, FourBits)(sizes, packed)


def busiest(rows: int, chunk: int, blocks: int) -> int:
    """The rows of the block that has the most."""
    return math.ceil(rows / chunk / blocks) * chunk


def rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def float_literal(number: float) -> str:
    return f"{float(number)!r}f"
