"""What the kernel of persistent_step.py is compiled with, for a plan and a device.

phase     rows that a block multiplies with one input: q, k and v; o; gate and up; down; the head
chunk     C_x rows of a phase, which one block has and publishes at once
stage     RS_x rows of a block that are copied at once, into one slot of a ring in shared memory
shared    tables of packed weights | SLOTS stages | sums, squares, scratch of attention, barriers
"""

import math

import torch

from hf_static_kv.kernels.packed import NESTED_GROUP, Packed
from hf_static_kv.kernels.persistent_step import ACTIVATIONS, GROUP, Plan

_WARPS = 8
_CONSUMERS = 32 * _WARPS
_SUM_ROWS = 256  # output rows of a block in one phase, at most
_ROWS_OF_BATCH = 32  # that are added up at once: the last batch of a phase may have fewer
_SPLITS = 16  # of a head's keys
_WIDEST_HEAD = 256  # elements: as many as a warp loads at once
_STAGE = 18432  # bytes at most, unless a row is longer
_STAGE_OF_TILES = 16384
# Rows of the hidden size that a stage of packed weights has. Of eight layers of Llama-3.1-8B in four bits
# 16 take 437 us; in stages of 18 KB, with two rows of the intermediate size, they took 470. In eight bits 8
# take 584, and 12 583 (H200, 2026-11-19).
_ROWS_OF_STAGE = {"bytes": 8, "four bits": 16}
_ROWS_AT_ONCE = 8  # that are multiplied at once: of bfloat16 a stage has a part of them
_ROWS_OF_TILE = 8
# Of packed weights: several short stages, then. In four bits 2, 4 and 8 take the layers above 442, 444 and
# 436 us; in eight bits 2, 4 and 8 take 584, 588 and 640.
_ROWS_AT_ONCE_OF_PACKED = {"bytes": 2, "four bits": 8}
_GROUPS_OF_SPAN = 8  # whose inputs a warp holds
_MAX_BARRIERS = 16  # stages of the ring
_LAYER = 384  # bytes of `struct Layer`, at most
# Stages of a block that are under way while it waits for values, and while it multiplies: more slow
# the exchange of values, fewer the reading. In bfloat16 ten take Llama-3.2-1B 674 us instead of 689 with
# six, Qwen3-1.7B 1,025 instead of 1,052 and Gemma 3 1B 866 instead of 905; 13 take Llama 682 and Gemma
# 815 where ten took 675 and 805. Of eight pairs the fastest with Llama-3.1-8B in NF4 (H200, 2026-11-19).
_FLIGHT_WAIT = 2
_FLIGHT_STREAM = 10
_FLIGHT_STREAM_OF_PACKED = 6
# With Llama-3.1-8B in tiles 1,619 us instead of 1,674 with two (H200, 2026-11-19).
_FLIGHT_WAIT_OF_TILES = 1
# What values that are published by 4, 2 or 1 cost, in bytes that a block reads meanwhile. Gemma 3 1B
# takes 925 us, with half of these numbers 980, with twice of them 923 (H200, 2026-11-19).
_EXCHANGE = {4: 0, 2: 16000, 1: 40000}
# Bytes of the tables of weights of four bits: of pairs, of nested scales, and the offsets of a layer.
_TABLES = 65536 + 4 * NESTED_GROUP + 32


def macros(plan: Plan, blocks: int, shared_bytes: int) -> dict[str, int | str]:
    """The macros of the kernel for this plan, on so many blocks of so much shared memory.

    Raises ValueError if the plan does not fit.
    """
    sizes = plan.sizes
    found: dict[str, int | str] = {**sizes, **_options(plan)}
    widest = max(sizes["H"], sizes["I"], sizes["NQ"] * sizes["D"])
    packed = plan.packed
    found |= _cuts(sizes, blocks, packed)
    stage = int(found["STAGE"])
    sum_rows = int(found["SUM_ROWS"])
    found |= _of_packed(packed, widest)
    sums = 2 * sum_rows * _WARPS
    unit_heads = _unit_heads(sizes)
    scratch = _scratch_floats(sizes["D"], unit_heads)
    rest = shared_bytes - int(found["RING_AT"]) - _fixed_bytes(sums, scratch)
    slots = min(rest // stage, _MAX_BARRIERS)
    splits = min(_SPLITS, blocks * unit_heads // sizes["NQ"])
    waiting, streamed = _flights(sizes, packed, stage, slots)
    if min(slots - 1, streamed) < waiting or not splits:
        raise ValueError(f"{shared_bytes} bytes on {blocks} multiprocessors are too few for it")
    found |= {"BLOCKS": blocks, "PROFILE": 0, "SLOTS": slots}
    found |= {"FLIGHT_WAIT": waiting, "FLIGHT_STREAM": streamed}
    found |= {"SPLITS": splits, "UNIT_HEADS": unit_heads, "SCRATCH": scratch}
    return found | {"EXCHANGED_BYTES": exchanged_bytes(found)}


def _flights(
    sizes: dict[str, int], packed: Packed | None, stage: int, slots: int
) -> tuple[int, int]:
    """Stages that may be under way while a block waits, and while it multiplies."""
    if packed is None:
        return _FLIGHT_WAIT, min(_FLIGHT_STREAM, slots)
    if packed.layout != "tiles":
        return _FLIGHT_WAIT, min(_FLIGHT_STREAM_OF_PACKED, slots)
    between = _stages_between(sizes, packed, stage)
    return _FLIGHT_WAIT_OF_TILES, min(_FLIGHT_STREAM_OF_PACKED, slots - between)


def used_shared_bytes(macros: dict[str, int | str]) -> int:
    """The dynamic shared memory of a block."""
    names = ("RING_AT", "STAGE", "SLOTS", "SUM_ROWS", "SCRATCH")
    ring_at, stage, slots, rows, scratch = (int(macros[name]) for name in names)
    return ring_at + stage * slots + _fixed_bytes(2 * rows * _WARPS, scratch)


def exchanged_bytes(macros: dict[str, int | str]) -> int:
    """What the blocks tell each other in two steps: twice WORDS of the kernel."""
    names = ("L", "H", "I", "NQ", "NKV", "D", "SPLITS")
    num_layers, hidden, intermediate, queries, heads, dim, splits = (int(macros[n]) for n in names)
    halves = (queries + 2 * heads) * dim + queries * dim + 2 * hidden + intermediate
    parts = queries * splits * (dim + 4)
    return 2 * num_layers * _rounded_up(2 * halves + 4 * parts, 128)


def _options(plan: Plan) -> dict[str, int | str]:
    layer = plan.layers[0]
    return {
        "EPS": _float_literal(plan.eps),
        "QK_EPS": _float_literal(plan.qk_eps),
        "SCALE": _float_literal(plan.scale),
        "ACTIVATION": ACTIVATIONS.index(plan.activation),
        "NORM_OFFSET": int(plan.style.offset),
        "HAS_QK_NORM": int(layer.q_norm is not None),
        "HAS_POST_NORMS": int(layer.post1 is not None),
        "HAS_QKV_BIAS": int(layer.q_bias is not None),
        "HAS_EMBED_SCALE": int(plan.embedding_scale is not None),
        "EMBED_SCALE": _float_literal(plan.embedding_scale or 1),
        "INFINITY_": "__int_as_float(0x7f800000)",
    }


def _float_literal(number: float) -> str:
    return f"{float(number)!r}f"


def _of_packed(packed: Packed | None, widest: int) -> dict[str, int | str]:
    """The macros of packed weights, and where the ring begins."""
    if packed is None:
        return {"IS_PACKED": 0, "IS_TILED": 0, "RING_AT": 0}
    if packed.layout == "tiles":
        return {
            "IS_PACKED": 1,
            "IS_TILED": 1,
            "RING_AT": _rounded_up(_inputs_of_tiles(widest, _group_of_tiles(packed)), 128),
            "QUANT_GROUP": packed.group,
        }
    has_bytes = packed.layout == "bytes"
    ring_at = _rounded_up(_inputs_of_bytes(widest) if has_bytes else _TABLES, 128)
    return {
        "IS_PACKED": 1,
        "IS_TILED": 0,
        "IS_BYTES": int(has_bytes),
        "ROWS_AT_ONCE": _ROWS_AT_ONCE_OF_PACKED["bytes" if has_bytes else "four bits"],
        "RING_AT": ring_at,
        "QUANT_GROUP": GROUP,
        "SCALE_FACTOR": _float_literal(packed.factor),
        "HAS_HALF_SCALES": int(packed.scales.dtype == torch.bfloat16),
        "IS_NESTED": int(packed.nested is not None),
        "IS_HIGH_FIRST": int(packed.layout == "high_first"),
    }


def _inputs_of_bytes(width: int) -> int:
    """The bytes of a phase's inputs of whole spans, and of their scales."""
    inputs = _rounded_up(width, 8 * GROUP)
    return 2 * inputs + 4 * inputs // GROUP


def _group_of_tiles(packed: Packed) -> int:
    """What the kernel takes for a group: the inputs of a larger one are too many for registers."""
    return min(packed.group, 128)


def _inputs_of_tiles(width: int, group: int) -> int:
    """The bytes of a phase's inputs: groups lie 16 bytes apart, and spans are whole."""
    groups = _rounded_up(width // group, _GROUPS_OF_SPAN)
    return groups * (2 * group + 16)


def _stages_between(sizes: dict[str, int], packed: Packed, stage: int) -> int:
    """How many stages after one of a warp its next one may be: SETS * PARTS of persistent_tiles.cuh."""
    between = 0
    for width in (sizes["H"], sizes["I"], sizes["NQ"] * sizes["D"]):
        spans = math.ceil(width / (_GROUPS_OF_SPAN * _group_of_tiles(packed)))
        warps = next(n for n in (1, 2, 4, 8) if n >= min(spans, _WARPS))
        parts = math.ceil(_ROWS_OF_TILE * width / 2 / stage)
        between = max(between, _WARPS // warps * parts)
    return between


def _row_bytes(packed: Packed | None, width: int) -> int:
    """Of a row of weights in a stage, with its scales."""
    if packed is None:
        return 2 * width
    if packed.layout == "bytes":
        return width
    # Of nested scales a copy has up to eight more, for two rows or more.
    return width // 2 + _scale_bytes(packed, width) + (0 if packed.nested is None else 16)


def _scale_bytes(packed: Packed, width: int) -> int:
    """Of a row, in a stage."""
    return 0 if packed.layout == "bytes" else width // GROUP * packed.scales.dtype.itemsize


def _cuts(sizes: dict[str, int], blocks: int, packed: Packed | None) -> dict[str, int | str]:
    """C_x, the rows of a chunk, and RS_x, the rows of a stage, of each phase; the bytes of a stage."""
    hidden, intermediate, dim = (sizes[name] for name in ("H", "I", "D"))
    # Rows, inputs, and weights that are read together.
    phases = {
        "QKV": ((sizes["NQ"] + 2 * sizes["NKV"]) * dim, hidden, 1),
        "O": (hidden, sizes["NQ"] * dim, 1),
        "GATE": (intermediate, hidden, 2),
        "DOWN": (hidden, intermediate, 1),
        "HEAD": (sizes["V"], hidden, 1),
    }
    found: dict[str, int | str] = {}
    stage = _least_stage(packed, hidden, intermediate)
    sums = 0
    for name, (rows, width, weights) in phases.items():
        own = None if name == "HEAD" else packed
        row_bytes = _row_bytes(own, width)
        least = 1 if own is None else 2  # packed rows have pairs
        is_tiled = own is not None and own.layout == "tiles"
        chunk = _rows_of_chunk(rows, weights * row_bytes, blocks, least)
        if is_tiled:
            chunk = _ROWS_OF_TILE
        if name != "HEAD":  # which goes on when its sums have been read
            sums = max(sums, _busiest(rows, chunk, blocks) * weights)
        if sums > _SUM_ROWS:
            raise ValueError(f"{rows} rows are too many for {blocks} multiprocessors")
        if is_tiled:  # four rows are published at once
            chunk = _ROWS_OF_TILE // 2
            rows_of_stage = _ROWS_OF_TILE
        elif own is None:
            rows_of_stage = _rows_of_stage(row_bytes)
            stage = max(stage, rows_of_stage * row_bytes)
        else:
            rows_of_stage = _rows_of_packed_stage(own, width, chunk, stage)
        found |= {f"C_{name}": chunk, f"RS_{name}": rows_of_stage}
    found["STAGE"] = _rounded_up(stage, _unit_of_stage(packed))
    return found | {"SUM_ROWS": _rounded_up(sums, _ROWS_OF_BATCH)}


def _least_stage(packed: Packed | None, hidden: int, intermediate: int) -> int:
    if packed is None:
        return 0
    if packed.layout == "tiles":
        return _STAGE_OF_TILES
    rows = _ROWS_OF_STAGE["bytes" if packed.layout == "bytes" else "four bits"]
    return max(rows * _row_bytes(packed, hidden), 2 * _row_bytes(packed, intermediate))


def _unit_of_stage(packed: Packed | None) -> int:
    """What the bytes of a stage are a multiple of: with tiles a span."""
    if packed is None or packed.layout != "tiles":
        return 128
    return _ROWS_OF_TILE * _GROUPS_OF_SPAN * _group_of_tiles(packed) // 2


def _busiest(rows: int, chunk: int, blocks: int) -> int:
    """The rows of the block that has the most."""
    return math.ceil(rows / chunk / blocks) * chunk


def _rows_of_chunk(rows: int, row_bytes: int, blocks: int, least: int) -> int:
    """4, 2 or 1, and not under `least`: what the busiest block reads, and its exchange, cost least."""
    fits = [c for c in (4, 2, 1) if rows % c == 0 and c >= least] or [least]
    return min(fits, key=lambda c: _busiest(rows, c, blocks) * row_bytes + _EXCHANGE[c])


def _rows_of_stage(row_bytes: int) -> int:
    """Rows of bfloat16 that are copied at once: a power of two, and at least one."""
    fits = (n for n in (_ROWS_AT_ONCE, 4, 2) if n * row_bytes <= _STAGE)
    return next(fits, 1)


def _rows_of_packed_stage(packed: Packed, width: int, chunk: int, stage: int) -> int:
    """As `_rows_of_stage`: a power of two, so that each lane has the products of one pair of rows."""
    most = (n for n in (16, 8, 4, 2) if n * _row_bytes(packed, width) <= stage)
    rows = next(most, 0)
    if not rows or min(rows, chunk) * _scale_bytes(packed, width) % 16:
        raise ValueError(f"rows of {width} columns make no whole copies")
    return rows


def _unit_heads(sizes: dict[str, int]) -> int:
    """Query heads that a block attends for at once: those that share keys, or one if a warp has room for
    one. Then a block has more tokens at once, which saves more than the other reads of the keys cost.
    """
    return 1 if sizes["D"] == _WIDEST_HEAD else sizes["NQ"] // sizes["NKV"]


def _scratch_floats(dim: int, heads: int) -> int:
    """Of attention: queries of a unit, the new key and value, and the partial sums of warps."""
    groups = next(n for n in (1, 2, 4, 8) if 32 * n >= heads * dim // 8)  # of heads, for the warps
    attention = heads * dim + 2 * dim + 8 // groups * heads * (dim + 2)
    return _rounded_up(max(attention, _CONSUMERS // dim * (dim + 2)), 4)


def _fixed_bytes(sums: int, scratch: int) -> int:
    """Shared memory behind the ring: sums, squares, scratch, barriers, a number and two layers."""
    return sums * 4 + 64 + scratch * 4 + _MAX_BARRIERS * 16 + 8 + 2 * _LAYER


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
