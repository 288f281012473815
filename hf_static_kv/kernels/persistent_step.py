"""One decode step of a model as one kernel: one new token of one batch row, from its embedding to
its logits.

    h = embedding[token] * embedding_scale
    in each layer
        q, k, v = norm1(h) wq^T + bq, norm1(h) wk^T + bk, norm1(h) wv^T + bv
        q, k    = rotary(q_norm(q), k_norm(k), table[position])
        keys[:, slot], values[:, slot] = k, v
        a = softmax(scale * q keys^T) values             over the slots [first, end) of the span
        h = h + post1(a wo^T)
        m = activation(norm2(h) wgate^T) * (norm2(h) wup^T)
        h = h + post2(m wdown^T)
    logits = norm(h) head^T

    q, k, v, o, gate, up, down: [N, K]   embedding, head: [V, H]   table: [positions, 2 D], cosines and sines
    keys, values: [NKV, S, D], of the row   token, position, slot: [1]   span: seq_start, first, end

L layers of NQ query heads and NKV heads of keys and values, D wide; H is the hidden size, I the
intermediate one. Norms are RMS norms; biases, norms of heads and norms after a layer may be absent.

`persistent_step_plain` is the reference in plain PyTorch. The kernel is in persistent_step.cu (its
attention in persistent_attention.cuh, its PTX in hopper.cuh), and persistent_step_cuda.py compiles and
launches it. A block of threads runs on each multiprocessor for
the whole step, and reads the weights ahead of the values that they are multiplied with.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from hf_static_kv.kernels.decode_attention import decode_attention_plain
from hf_static_kv.kernels.linear import activate
from hf_static_kv.kernels.norm import STYLES, Norm, NormStyle, norm_plain
from hf_static_kv.kernels.packed import NESTED_GROUP, Packed, Weight, unpacked
from hf_static_kv.kernels.rotary import rotate_and_write_plain

# In the order of their numbers in the kernel.
ACTIVATIONS = ("silu", "gelu_tanh")
_HEAD_DIMS = (64, 128, 256)
_MAX_GROUP = 8  # query heads of a head of keys
_MAX_WIDTH = 16384  # a thread holds 1 / 128 of an input in registers
_CONSUMERS = 256
_SUM_ROWS = 256  # output rows of a block in one phase
_STAGE = 16384  # bytes of a copy, unless a row is longer
# Copies of a block that are under way while it waits for values, and while it multiplies: more slow
# the exchange of values, fewer the reading. Of six pairs the fastest (Llama-3.2-1B, H200, 2026-11-18).
_FLIGHT = {"FLIGHT_WAIT": 2, "FLIGHT_STREAM": 3}
_MOST_ROWS = 12  # of short weights in a stage
_SPLITS = 16  # of a head's keys
_MAX_BARRIERS = 16  # stages of the ring
_WARPS = 8
# Of packed weights: columns of a step, rows of a tile, weights that share a scale, and the bytes of the
# tables of pairs and of nested scales.
_STEP = 128
_TILE_ROWS = 16
_GROUPS = (32, 64)
_TABLES = 65536 + 4 * NESTED_GROUP


NUM_WEIGHTS = 7  # of a layer; they are its first fields


class PlannedLayer(NamedTuple):
    """The tensors of a layer, in the order of `struct Layer`."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    gate: Weight
    up: Weight
    down: Weight
    norm1: Tensor
    post1: Tensor | None
    norm2: Tensor
    post2: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    keys: Tensor
    values: Tensor
    table: Tensor
    slot: Tensor
    span: Tensor


class Plan(NamedTuple):
    """What a step computes, and with which tensors."""

    layers: list[PlannedLayer]
    embedding: Tensor
    norm: Tensor
    head: Tensor
    token: Tensor
    position: Tensor
    style: NormStyle  # of all norms
    eps: float
    qk_eps: float
    scale: float
    activation: str
    embedding_scale: float | None

    @property
    def sizes(self) -> dict[str, int]:
        """L, H, I, NQ, NKV, D and V."""
        layer = self.layers[0]
        heads, _, dim = layer.keys.shape
        intermediate, hidden = layer.gate.shape
        counts = {"L": len(self.layers), "H": hidden, "I": intermediate}
        heads_of = {"NQ": layer.q.shape[0] // dim, "NKV": heads, "D": dim}
        return counts | heads_of | {"V": self.head.shape[0]}

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that the step reads or writes, but those of packed weights."""
        own = [self.embedding, self.norm, self.head, self.token, self.position]
        return own + [t for layer in self.layers for t in layer if isinstance(t, Tensor)]

    @property
    def weights(self) -> list[Weight]:
        """Those of all linear layers but the head."""
        own = (weight for layer in self.layers for weight in layer[:NUM_WEIGHTS])
        return [weight for weight in own if weight is not None]

    @property
    def packed(self) -> Packed | None:
        """A weight of four or eight bits, which stands for all; None: they have 16."""
        first = self.weights[0]
        return first if isinstance(first, Packed) else None


# --- the reference


def persistent_step_plain(plan: Plan) -> Tensor:
    """The logits [1, V]; keys and values are written in place."""
    h = F.embedding(plan.token.reshape(1), plan.embedding)  # [1, H]
    if plan.embedding_scale is not None:
        h = h * plan.embedding_scale
    for layer in plan.layers:
        h = h + _normed(plan, _attention(plan, layer, _normed(plan, h, layer.norm1)), layer.post1)
        h = h + _normed(plan, _gated(plan, layer, _normed(plan, h, layer.norm2)), layer.post2)
    return F.linear(_normed(plan, h, plan.norm), plan.head)


def _normed(plan: Plan, x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else norm_plain(x, Norm(weight, plan.eps, plan.style))


def _attention(plan: Plan, layer: PlannedLayer, x: Tensor) -> Tensor:
    query, key, value = (
        _linear(x, weight, bias).view(1, -1, 1, layer.keys.shape[-1])  # [1, heads, 1, D]
        for weight, bias in (
            (layer.q, layer.q_bias),
            (layer.k, layer.k_bias),
            (layer.v, layer.v_bias),
        )
    )
    cos, sin = F.embedding(plan.position.reshape(1, 1), layer.table).chunk(2, dim=-1)
    norms = [
        None if weight is None else Norm(weight, plan.qk_eps, plan.style)
        for weight in (layer.q_norm, layer.k_norm)
    ]
    keys = layer.keys[None]
    values = layer.values[None]
    slots = layer.slot.reshape(1, 1)
    query = rotate_and_write_plain(query, key, value, cos, sin, keys, values, slots, *norms)
    spans = layer.span.reshape(1, 1, 3)
    y = decode_attention_plain(query, keys, values, spans, None, plan.scale)
    return _linear(y.reshape(1, -1), layer.o)


def _gated(plan: Plan, layer: PlannedLayer, x: Tensor) -> Tensor:
    gate = activate(_linear(x, layer.gate), plan.activation)
    return _linear(gate * _linear(x, layer.up), layer.down)


def _linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, unpacked(weight) if isinstance(weight, Packed) else weight, bias)


# --- what the kernel takes


def check_plan(plan: Plan) -> None:
    """Raise ValueError with the reason if the kernel cannot take the plan."""
    for holds, reason in _conditions(plan):
        if not holds:
            raise ValueError(reason)


def _conditions(plan: Plan) -> Iterator[tuple[bool, str]]:
    """Each condition, with what is said where it does not hold."""
    yield plan.token.numel() == plan.position.numel() == 1, "it takes one token of one batch row"
    numbers = [plan.token, plan.position]
    numbers += [t for layer in plan.layers for t in (layer.slot, layer.span)]
    halves = [t for t in plan.tensors if all(t is not number for number in numbers)]
    kinds = sorted({str(t.dtype) for t in halves})
    yield kinds == ["torch.bfloat16"], f"it takes torch.bfloat16, not {', '.join(kinds)}"
    yield all(t.dtype == torch.int64 for t in numbers), "positions and slots must be torch.int64"
    yield len({t.device for t in plan.tensors}) == 1, "the tensors are on several devices"
    yield all(type(t) in (Tensor, Parameter) for t in halves), "a weight has a class of its own"
    yield all(map(_is_dense, halves)), "a weight or the storage is not contiguous"
    yield all(t.data_ptr() % 16 == 0 for t in halves), "a tensor is not 16-byte aligned"
    kinds_of_layers = {tuple(t is None or tuple(t.shape) for t in own) for own in _alike(plan)}
    yield len(kinds_of_layers) == 1, "its layers differ in their shapes or norms"
    yield from _conditions_of_sizes(plan)
    if any(isinstance(weight, Packed) for weight in plan.weights):
        yield from _conditions_of_packed(plan)


def _conditions_of_packed(plan: Plan) -> Iterator[tuple[bool, str]]:
    """For weights of four bits: see persistent_packed.cuh."""
    weights = [weight for weight in plan.weights if isinstance(weight, Packed)]
    first = weights[0]
    yield len(weights) == len(plan.weights), "some weights are packed and some are not"
    yield all(weight.kind[:2] == first.kind[:2] for weight in weights), "packed weights differ"
    parts = [part for weight in weights for part in (weight.codes, weight.scales)]
    yield all(part.data_ptr() % 16 == 0 for part in parts), "a tensor is not 16-byte aligned"
    yield all(weight.factor == first.factor for weight in weights), "factors differ"
    is_tiled = first.layout == "tiles"
    is_dense = is_tiled or all(weight.scales.is_contiguous() for weight in weights)
    yield is_dense, "scales are not contiguous"
    if first.layout == "bytes":
        yield first.zeros is None and first.midpoint == 0, "it has no zeros"
        yield (
            all(weight.group == weight.columns for weight in weights),
            "it takes a scale for a row",
        )
        yield all(weight.scales.dtype == first.scales.dtype for weight in weights), "scales differ"
        is_known = first.scales.dtype in (torch.float32, torch.bfloat16)
        yield is_known, f"scales are {first.scales.dtype}"
        yield all(weight.columns % 16 == 0 for weight in weights), "a row is no multiple of 16"
        return
    if first.layout == "tiles":
        yield first.group in (*_GROUPS, _STEP), f"{first.group} weights share a scale"
        yield all(map(_has_pairs, weights)), "scales and zeros are no pairs of bfloat16"
        yield all(weight.rows % _TILE_ROWS == 0 for weight in weights), "rows are no multiple of 16"
        return
    is_known = first.layout in ("high_first", "low_first") and first.table is not None
    yield is_known and first.zeros is None, f"it has no weights packed as {first.layout}"
    yield first.group in _GROUPS, f"{first.group} weights share a scale: it takes 32 and 64"
    yield (
        all(weight.group == first.group and weight.factor == 1 for weight in weights),
        "scales differ",
    )
    is_nested = first.nested is not None
    yield all((weight.nested is not None) == is_nested for weight in weights), "scales differ"
    yield is_nested or first.scales.dtype == torch.float32, f"scales are {first.scales.dtype}"
    steps = [weight.columns // _STEP for weight in weights]
    scale_bytes = first.scales.dtype.itemsize * (_STEP // first.group)
    yield all(weight.columns % _STEP == 0 for weight in weights), "a row is no multiple of 128"
    yield (
        all(n * scale_bytes % 16 == 0 for n in steps),
        "the scales of a row are no multiple of 16 bytes",
    )
    yield all(weight.rows % _TILE_ROWS == 0 for weight in weights), "rows are no multiple of 16"
    tables = [weight.nested.table for weight in weights if weight.nested is not None]
    yield all(torch.equal(table, tables[0]) for table in tables), "tables of scales differ"


def _has_pairs(packed: Packed) -> bool:
    """Whether scale and zero of a group lie side by side, [K / G, N, 2]."""
    scales, zeros = packed.scales, packed.zeros
    if zeros is None or not packed.added or packed.factor != 1 or packed.table is not None:
        return False
    is_pair = zeros.data_ptr() == scales.data_ptr() + scales.dtype.itemsize
    strides = 2, 2 * packed.rows
    has_strides = scales.stride() == strides == zeros.stride()
    return is_pair and has_strides and scales.dtype == zeros.dtype == torch.bfloat16


def _alike(plan: Plan) -> list[list[Weight | None]]:
    """Of each layer what must have one shape: the storage of compact layers is shorter, and tables
    may be.
    """
    differ = ("keys", "values", "table")
    names = PlannedLayer._fields
    return [
        [t for name, t in zip(names, layer, strict=True) if name not in differ]
        for layer in plan.layers
    ]


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, but for the distance of its first dim if it has three."""
    return (tensor[0] if tensor.ndim == 3 else tensor).is_contiguous()


def _conditions_of_sizes(plan: Plan) -> Iterator[tuple[bool, str]]:
    sizes = plan.sizes
    hidden, intermediate, dim = (sizes[name] for name in ("H", "I", "D"))
    yield dim in _HEAD_DIMS, f"a head is {dim} wide: it takes 64, 128 and 256"
    group = sizes["NQ"] / sizes["NKV"]
    yield group in range(1, _MAX_GROUP + 1), f"{group:g} query heads share a head of keys"
    yield hidden % 8 == intermediate % 8 == 0, f"{hidden} or {intermediate} is no multiple of 8"
    widest = max(hidden, intermediate, sizes["NQ"] * dim)
    yield widest <= _MAX_WIDTH, f"an input is {widest} wide: it takes up to {_MAX_WIDTH}"
    yield all(map(_fits, plan.layers)), "the storage or the table has another shape"
    yield plan.activation in ACTIVATIONS, f"it has no activation {plan.activation}"
    served = [STYLES[0], STYLES[2]]
    yield plan.style in served, f"it has no norm {plan.style}"


def _fits(layer: PlannedLayer) -> bool:
    """Whether keys, values and table have the shapes that the kernel computes addresses with."""
    keys = layer.keys
    values = layer.values
    has_one_shape = keys.shape == values.shape and keys.stride() == values.stride()
    return has_one_shape and layer.table.shape[1] == 2 * keys.shape[2] and keys.stride(0) % 8 == 0


# --- what the kernel is compiled with


def macros(plan: Plan, blocks: int, shared_bytes: int) -> dict[str, int | str]:
    """The macros of the kernel for this plan, on so many blocks of so much shared memory.

    Raises ValueError if the plan does not fit.
    """
    sizes = plan.sizes
    found: dict[str, int | str] = {**sizes, **_options(plan)}
    widest = max(sizes["H"], sizes["I"], sizes["NQ"] * sizes["D"])
    packed = plan.packed
    has_bytes = packed is not None and packed.layout == "bytes"
    has_tiles = packed is not None and not has_bytes
    stage = max(_STAGE, widest if has_bytes else 2 * widest, 2 * sizes["H"])
    if packed is not None and has_tiles:
        stage = max(_stage_of_packed(packed), 2 * sizes["H"])
    of_weight = {True: 0, False: 1 if has_bytes else 2}[has_tiles]
    found |= _cuts(sizes, blocks, stage, of_weight)
    found |= _of_packed(packed, widest)
    sums = 4 * _SUM_ROWS
    if has_tiles:
        tile_rows = _most_tile_rows(sizes, blocks)
        if tile_rows > 4 * _CONSUMERS:  # a thread ends four
            raise ValueError(f"{tile_rows} rows are too many for a multiprocessor")
        sums = max(sums, _WARPS * tile_rows)
    found |= {"SUM_FLOATS": sums}
    scratch = _scratch_floats(sizes)
    rest = shared_bytes - int(found["RING_AT"]) - _fixed_bytes(sums, scratch)
    slots = min(rest // stage // 2 * 2, _MAX_BARRIERS)  # half of them for each group of warps
    splits = min(_SPLITS, blocks // sizes["NKV"])
    if slots < max(_FLIGHT.values()) or not splits:
        raise ValueError(f"{shared_bytes} bytes on {blocks} multiprocessors are too few for it")
    found |= {"BLOCKS": blocks, "PROFILE": 0, "STAGE": stage, "SLOTS": slots, **_FLIGHT}
    found |= {"SPLITS": splits, "SUM_ROWS": _SUM_ROWS, "SCRATCH": scratch}
    return found | {"EXCHANGED_BYTES": exchanged_bytes(found)}


def used_shared_bytes(macros: dict[str, int | str]) -> int:
    """The dynamic shared memory of a block."""
    names = ("RING_AT", "STAGE", "SLOTS", "SUM_FLOATS", "SCRATCH")
    ring_at, stage, slots, sums, scratch = (int(macros[name]) for name in names)
    return ring_at + stage * slots + _fixed_bytes(sums, scratch)


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
    """The macros of packed weights, and where the ring begins: behind their tables and an input."""
    if packed is None:
        return {"IS_PACKED": 0, "IS_BYTES": 0, "RING_AT": 0}
    if packed.layout == "bytes":
        return {
            "IS_PACKED": 0, "IS_BYTES": 1, "RING_AT": 0, "SCALE_FACTOR": _float_literal(packed.factor),
            "HAS_HALF_SCALES": int(packed.scales.dtype == torch.bfloat16),
        }  # fmt: skip
    return {
        "IS_PACKED": 1,
        "IS_BYTES": 0,
        "IS_TILED": int(packed.layout == "tiles"),
        "RING_AT": _rounded_up(_TABLES + 2 * widest + 4 * widest // packed.group, 128),
        "QUANT_GROUP": packed.group,
        "IS_NESTED": int(packed.nested is not None),
        "IS_HIGH_FIRST": int(packed.layout == "high_first"),
    }


def _stage_of_packed(packed: Packed) -> int:
    """The bytes of 16 rows of 16 steps, their scales, and what keeps lanes in banks of their own."""
    scales = 16 * _STEP // packed.group * packed.scales.dtype.itemsize
    if packed.layout == "tiles":  # with zeros
        scales = 2 * scales
    return _rounded_up(_TILE_ROWS * (16 * _STEP // 2 + 64 + scales + 16), 128)


def _most_tile_rows(sizes: dict[str, int], blocks: int) -> int:
    """Rows of weights that the busiest block has in a phase."""
    rows = (sizes["NQ"] + 2 * sizes["NKV"]) * sizes["D"], sizes["H"], 2 * sizes["I"]
    return max(_TILE_ROWS * math.ceil(n / _TILE_ROWS / blocks) for n in rows)


def _cuts(sizes: dict[str, int], blocks: int, stage: int, of_weight: int) -> dict[str, int | str]:
    """C_x, the rows of a chunk, and RS_x, the rows of a stage, of each phase.

    `of_weight` are the bytes of a weight. 0: weights of four bits have tiles, and four of their rows
    are published at once.
    """
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
    for name, (rows, width, weights) in phases.items():
        if not of_weight and name != "HEAD":
            found[f"C_{name}"] = 4
            continue
        chunk = _rows_of_chunk(rows, blocks)
        if name != "HEAD" and _busiest(rows, chunk, blocks) * weights > _SUM_ROWS - _MOST_ROWS:
            raise ValueError(f"{rows} rows are too many for {blocks} multiprocessors")
        found[f"C_{name}"] = chunk
        chunks = _SUM_ROWS // 4 if name == "HEAD" else math.ceil(rows / chunk / blocks)
        found[f"RS_{name}"] = _rows_of_stage(
            chunk * weights, (2 if name == "HEAD" else of_weight) * width, stage, chunks
        )
    return found


def _busiest(rows: int, chunk: int, blocks: int) -> int:
    """The rows of the block that has the most."""
    return math.ceil(rows / chunk / blocks) * chunk


def _rows_of_chunk(rows: int, blocks: int) -> int:
    """The most of 4, 2 and 1 with which the busiest block has at most 4 % more than with 1."""
    most = 1.04 * _busiest(rows, 1, blocks)
    return next(c for c in (4, 2, 1) if rows % c == 0 and _busiest(rows, c, blocks) <= most)


def _rows_of_stage(rows: int, row_bytes: int, stage: int, chunks: int) -> int:
    """Rows that are copied at once: as many of the block's chunks as fit, in equal parts, or the
    largest part of a chunk of `rows`.
    """
    if rows * row_bytes > stage:
        return next(r for r in range(rows, 0, -1) if rows % r == 0 and r * row_bytes <= stage)
    most = max(1, min(stage // row_bytes, _MOST_ROWS) // rows)
    return rows * math.ceil(chunks / math.ceil(chunks / most))


def _scratch_floats(sizes: dict[str, int]) -> int:
    """Of attention: queries, the new key and value, and the partial sums of warps."""
    group = sizes["NQ"] // sizes["NKV"]
    dim = sizes["D"]
    groups = next(n for n in (1, 2, 4, 8) if 32 * n >= group * dim // 8)  # of heads, for the warps
    attention = group * dim + 2 * dim + 8 // groups * group * (dim + 2)
    return _rounded_up(max(attention, _CONSUMERS // dim * (dim + 2)), 4)


def _fixed_bytes(sums: int, scratch: int) -> int:
    """Shared memory behind the ring: sums, squares, scratch, barriers and a number."""
    return sums * 4 + 64 + scratch * 4 + _MAX_BARRIERS * 16 + 96


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
