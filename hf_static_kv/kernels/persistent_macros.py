"""What the kernel of persistent_step.py is compiled with, for a plan and a device.

phase     rows that a block multiplies with one input: q, k and v; o; gate and up; down; the head
C_x       rows of a chunk of phase x: see persistent_weights.py
RS_x      rows of a stage
shared    tables or inputs of packed weights | SLOTS stages | sums, squares, scratch of attention, barriers
"""

from hf_static_kv.kernels.persistent_step import ACTIVATIONS, Plan
from hf_static_kv.kernels.persistent_weights import (
    WARPS,
    Dense,
    busiest,
    float_literal,
    format_of,
    rounded_up,
)

_CONSUMERS = 32 * WARPS
_SUM_ROWS = 256  # output rows of a block in one phase, at most
_ROWS_OF_BATCH = 32  # that are added up at once: the last batch of a phase may have fewer
_SPLITS = 16  # of a head's keys
_WIDEST_HEAD = 256  # elements: as many as a warp loads at once
_MAX_BARRIERS = 16  # stages of the ring
_LAYER = 384  # bytes of `struct Layer`, at most


def macros(plan: Plan, blocks: int, shared_bytes: int) -> dict[str, int | str]:
    """The macros of the kernel for this plan, on so many blocks of so much shared memory.

    Raises ValueError if the plan does not fit.
    """
    sizes = plan.sizes
    weights = format_of(sizes, plan.packed)
    found: dict[str, int | str] = {**sizes, **_options(plan), **_cuts(sizes, blocks, weights)}
    found |= weights.macros()
    stage = int(found["STAGE"])
    unit_heads = _unit_heads(sizes)
    scratch = _scratch_floats(sizes["D"], unit_heads)
    fixed = _fixed_bytes(2 * int(found["SUM_ROWS"]) * WARPS, scratch)
    slots = min((shared_bytes - int(found["RING_AT"]) - fixed) // stage, _MAX_BARRIERS)
    splits = min(_SPLITS, blocks * unit_heads // sizes["NQ"])
    streamed = min(weights.flight_stream, slots - weights.stages_between(stage))
    if min(slots - 1, streamed) < weights.flight_wait or not splits:
        raise ValueError(f"{shared_bytes} bytes on {blocks} multiprocessors are too few for it")
    found |= {"BLOCKS": blocks, "PROFILE": 0, "SLOTS": slots}
    found |= {"FLIGHT_WAIT": weights.flight_wait, "FLIGHT_STREAM": streamed}
    found |= {"SPLITS": splits, "UNIT_HEADS": unit_heads, "SCRATCH": scratch}
    return found | {"EXCHANGED_BYTES": exchanged_bytes(found)}


def used_shared_bytes(macros: dict[str, int | str]) -> int:
    """The dynamic shared memory of a block."""
    names = ("RING_AT", "STAGE", "SLOTS", "SUM_ROWS", "SCRATCH")
    ring_at, stage, slots, rows, scratch = (int(macros[name]) for name in names)
    return ring_at + stage * slots + _fixed_bytes(2 * rows * WARPS, scratch)


def exchanged_bytes(macros: dict[str, int | str]) -> int:
    """What the blocks tell each other in two steps: twice WORDS of the kernel."""
    names = ("L", "H", "I", "NQ", "NKV", "D", "SPLITS")
    num_layers, hidden, intermediate, queries, heads, dim, splits = (int(macros[n]) for n in names)
    halves = (queries + 2 * heads) * dim + queries * dim + 2 * hidden + intermediate
    parts = queries * splits * (dim + 4)
    return 2 * num_layers * rounded_up(2 * halves + 4 * parts, 128)


def _options(plan: Plan) -> dict[str, int | str]:
    layer = plan.layers[0]
    return {
        "EPS": float_literal(plan.eps),
        "QK_EPS": float_literal(plan.qk_eps),
        "SCALE": float_literal(plan.scale),
        "ACTIVATION": ACTIVATIONS.index(plan.activation),
        "NORM_OFFSET": int(plan.style.offset),
        "HAS_QK_NORM": int(layer.q_norm is not None),
        "HAS_POST_NORMS": int(layer.post1 is not None),
        "HAS_QKV_BIAS": int(layer.q_bias is not None),
        "HAS_EMBED_SCALE": int(plan.embedding_scale is not None),
        "EMBED_SCALE": float_literal(plan.embedding_scale or 1),
        "INFINITY_": "__int_as_float(0x7f800000)",
    }


def _cuts(sizes: dict[str, int], blocks: int, weights: Dense) -> dict[str, int | str]:
    """C_x and RS_x of each phase; the bytes of a stage, and the rows of sums."""
    hidden, intermediate, dim = (sizes[name] for name in ("H", "I", "D"))
    head = Dense(sizes)
    # Rows, inputs, and weights that are read together.
    phases = {
        "QKV": ((sizes["NQ"] + 2 * sizes["NKV"]) * dim, hidden, 1, weights),
        "O": (hidden, sizes["NQ"] * dim, 1, weights),
        "GATE": (intermediate, hidden, 2, weights),
        "DOWN": (hidden, intermediate, 1, weights),
        "HEAD": (sizes["V"], hidden, 1, head),
    }
    found: dict[str, int | str] = {}
    stage, sums = weights.stage, 0
    for name, (rows, width, together, own) in phases.items():
        at_once = own.rows_at_once(rows, width, together, blocks)
        if name != "HEAD":  # which goes on when its sums have been read
            sums = max(sums, busiest(rows, at_once, blocks) * together)
        if sums > _SUM_ROWS:
            raise ValueError(f"{rows} rows are too many for {blocks} multiprocessors")
        chunk = own.chunk(at_once)
        rows_of_stage = own.rows_of_stage(width, chunk)
        if not own.stage:
            stage = max(stage, rows_of_stage * own.row_bytes(width))
        found |= {f"C_{name}": chunk, f"RS_{name}": rows_of_stage}
    found["STAGE"] = rounded_up(stage, weights.unit_of_stage)
    return found | {"SUM_ROWS": rounded_up(sums, _ROWS_OF_BATCH)}


def _unit_heads(sizes: dict[str, int]) -> int:
    """Query heads that a block attends for at once: those that share keys, or one if a warp has room for
    one. Then a block has more tokens at once, which saves more than the other reads of the keys cost.
    """
    return 1 if sizes["D"] == _WIDEST_HEAD else sizes["NQ"] // sizes["NKV"]


def _scratch_floats(dim: int, heads: int) -> int:
    """Of attention: queries of a unit, the new key and value, and the partial sums of warps."""
    groups = next(n for n in (1, 2, 4, 8) if 32 * n >= heads * dim // 8)  # of heads, for the warps
    attention = heads * dim + 2 * dim + 8 // groups * heads * (dim + 2)
    return rounded_up(max(attention, _CONSUMERS // dim * (dim + 2)), 4)


def _fixed_bytes(sums: int, scratch: int) -> int:
    """Shared memory behind the ring: sums, squares, scratch, barriers, a number and two layers."""
    return sums * 4 + 64 + scratch * 4 + _MAX_BARRIERS * 16 + 8 + 2 * _LAYER
