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

Weights are bfloat16; those of linear layers may have four or eight bits, see packed.py.

`persistent_step_plain` is the reference in plain PyTorch. The kernel is in persistent_step.cu (its shares
in persistent_cuts.cuh, its attention in persistent_attention.cuh, packed weights in
persistent_packed.cuh, its PTX in hopper.cuh), and persistent_step_cuda.py compiles and launches it. A block
of threads runs on each multiprocessor for the whole step, and reads the weights ahead of the values that
they are multiplied with.
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
_STAGE_OF_PACKED = 18432  # of weights of four bits, with scales
_STAGE_OF_BYTES = 32768
# Copies of a block that are under way while it waits for values, and while it multiplies: more slow
# the exchange of values, fewer the reading. The fastest of eight pairs (Llama-3.2-1B in bfloat16,
# Llama-3.1-8B in NF4, H200, 2026-11-19).
_FLIGHT_WAIT, _FLIGHT_STREAM = 2, 6
# What values that are published by 4, 2 or 1 cost, in bytes that are read meanwhile.
_EXCHANGE = {4: 0, 2: 16000, 1: 40000}
_MOST_ROWS = 12  # of short weights in a stage
_SPARE_ROWS = 16  # the last stage of a phase may have fewer rows than others
_SPLITS = 16  # of a head's keys
_MAX_BARRIERS = 16  # stages of the ring
_WARPS = 8
# Of weights of four bits: weights that share a scale, and the bytes of the tables: of pairs and of nested
# scales, and the offsets of a layer.
_GROUP = 64
_TABLES = 65536 + 4 * NESTED_GROUP + 32

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
    """For weights of four or eight bits: see persistent_packed.cuh."""
    weights = [weight for weight in plan.weights if isinstance(weight, Packed)]
    first = weights[0]
    yield len(weights) == len(plan.weights), "some weights are packed and some are not"
    is_known = first.layout in ("high_first", "low_first", "bytes") and first.zeros is None
    yield is_known, f"it has no weights packed as {first.layout}"
    yield all(weight.kind[:2] == first.kind[:2] for weight in weights), "packed weights differ"
    yield all(weight.columns % _GROUP == 0 for weight in weights), "a row is no multiple of 64"
    parts = [part for weight in weights for part in (weight.codes, weight.scales)]
    yield all(part.data_ptr() % 16 == 0 for part in parts), "a tensor is not 16-byte aligned"
    yield all(weight.scales.is_contiguous() for weight in weights), "scales are not contiguous"
    if first.layout == "bytes":
        yield from _conditions_of_bytes(weights)
    else:
        yield from _conditions_of_four_bits(weights)


def _conditions_of_bytes(weights: list[Packed]) -> Iterator[tuple[bool, str]]:
    first = weights[0]
    yield first.midpoint == 0, "codes have a midpoint"
    has_rows = all(weight.group == weight.columns for weight in weights)
    yield has_rows, "it takes one scale for a row of bytes"
    kinds = {(weight.scales.dtype, weight.factor) for weight in weights}
    yield len(kinds) == 1, "scales differ"
    is_known = first.scales.dtype in (torch.float32, torch.bfloat16)
    yield is_known, f"scales are {first.scales.dtype}"


def _conditions_of_four_bits(weights: list[Packed]) -> Iterator[tuple[bool, str]]:
    first = weights[0]
    groups = {weight.group for weight in weights}
    yield groups == {_GROUP}, f"{groups} weights share a scale: it takes {_GROUP}"
    yield all(weight.factor == 1 for weight in weights), "scales have a factor"
    kinds = {str(weight.scales.dtype) for weight in weights}
    yield len(kinds) == 1, f"scales are {', '.join(sorted(kinds))}"
    yield _are_equal([weight.table for weight in weights]), "tables differ"
    nested = [weight.nested for weight in weights if weight.nested is not None]
    if not nested:
        yield first.scales.dtype == torch.float32, f"scales are {first.scales.dtype}"
        return
    yield _are_equal([own.table for own in nested]), "tables of scales differ"
    whole = _GROUP * NESTED_GROUP * 4  # four scales of scales are read at once
    yield all(w.numel() % whole == 0 for w in weights), f"a weight is no multiple of {whole}"
    yield all(own.absmax.data_ptr() % 16 == 0 for own in nested), "a tensor is not 16-byte aligned"


def _are_equal(tables: list[Tensor | None]) -> bool:
    first = tables[0]
    return first is not None and all(own is not None and torch.equal(own, first) for own in tables)


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
    stage = _stage_bytes(sizes, packed)
    found |= _cuts(sizes, blocks, stage, packed)
    found |= _of_packed(packed, widest)
    sums = 2 * _SUM_ROWS * _WARPS
    scratch = _scratch_floats(sizes)
    rest = shared_bytes - int(found["RING_AT"]) - _fixed_bytes(sums, scratch)
    slots = min(rest // stage, _MAX_BARRIERS)
    splits = min(_SPLITS, blocks // sizes["NKV"])
    if slots <= _FLIGHT_WAIT or not splits:
        raise ValueError(f"{shared_bytes} bytes on {blocks} multiprocessors are too few for it")
    found |= {"BLOCKS": blocks, "PROFILE": 0, "STAGE": stage, "SLOTS": slots}
    found |= {"FLIGHT_WAIT": _FLIGHT_WAIT, "FLIGHT_STREAM": min(_FLIGHT_STREAM, slots)}
    found |= {"SPLITS": splits, "SUM_ROWS": _SUM_ROWS, "SCRATCH": scratch}
    return found | {"EXCHANGED_BYTES": exchanged_bytes(found)}


def _stage_bytes(sizes: dict[str, int], packed: Packed | None) -> int:
    if packed is None:
        return max(_STAGE, 2 * max(sizes["H"], sizes["I"], sizes["NQ"] * sizes["D"]))
    # Rows of the head are bfloat16.
    least = _STAGE_OF_BYTES if packed.layout == "bytes" else _STAGE_OF_PACKED
    return max(least, 2 * sizes["H"])


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
    """The macros of packed weights, where the ring begins, and how many parts a row's sum has."""
    if packed is None:
        return {"IS_PACKED": 0, "RING_AT": 0}
    has_bytes = packed.layout == "bytes"
    ring_at = 2 * _rounded_up(widest, 8 * _GROUP) if has_bytes else _rounded_up(_TABLES, 128)
    return {
        "IS_PACKED": 1,
        "IS_BYTES": int(has_bytes),
        "RING_AT": ring_at,
        "QUANT_GROUP": _GROUP,
        "SCALE_FACTOR": _float_literal(packed.factor),
        "HAS_HALF_SCALES": int(packed.scales.dtype == torch.bfloat16),
        "IS_NESTED": int(packed.nested is not None),
        "IS_HIGH_FIRST": int(packed.layout == "high_first"),
    }


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
    return 0 if packed.layout == "bytes" else width // _GROUP * packed.scales.dtype.itemsize


def _cuts(
    sizes: dict[str, int], blocks: int, stage: int, packed: Packed | None
) -> dict[str, int | str]:
    """C_x, the rows of a chunk, and RS_x, the rows of a stage, of each phase."""
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
        own = None if name == "HEAD" else packed
        row_bytes = weights * _row_bytes(own, width)
        chunk = _rows_of_chunk(rows, row_bytes, blocks, 1 if own is None else 2)  # packed: pairs
        if name != "HEAD" and _busiest(rows, chunk, blocks) * weights > _SUM_ROWS - _SPARE_ROWS:
            raise ValueError(f"{rows} rows are too many for {blocks} multiprocessors")
        found[f"C_{name}"] = chunk
        if own is None:
            chunks = _SUM_ROWS // 4 if name == "HEAD" else math.ceil(rows / chunk / blocks)
            found[f"RS_{name}"] = _rows_of_stage(chunk * weights, 2 * width, stage, chunks)
        else:
            found[f"RS_{name}"] = _rows_of_packed_stage(own, width, chunk, stage)
    return found


def _busiest(rows: int, chunk: int, blocks: int) -> int:
    """The rows of the block that has the most."""
    return math.ceil(rows / chunk / blocks) * chunk


def _rows_of_chunk(rows: int, row_bytes: int, blocks: int, least: int) -> int:
    """4, 2 or 1, from `least` on: what the busiest block reads, and what its exchange takes, is least."""
    fits = [c for c in (4, 2, 1) if rows % c == 0 and c >= least]
    return min(fits, key=lambda c: _busiest(rows, c, blocks) * row_bytes + _EXCHANGE[c])


def _rows_of_stage(rows: int, row_bytes: int, stage: int, chunks: int) -> int:
    """Rows that are copied at once: as many of the block's chunks as fit, in equal parts, or the
    largest part of a chunk of `rows`.
    """
    if rows * row_bytes > stage:
        return next(r for r in range(rows, 0, -1) if rows % r == 0 and r * row_bytes <= stage)
    most = max(1, min(stage // row_bytes, _MOST_ROWS) // rows)
    return rows * math.ceil(chunks / math.ceil(chunks / most))


def _rows_of_packed_stage(packed: Packed, width: int, chunk: int, stage: int) -> int:
    """As `_rows_of_stage`: a power of two, so that each lane has the products of one pair of rows."""
    most = (n for n in (16, 8, 4, 2) if n * _row_bytes(packed, width) <= stage)
    rows = next(most, 0)
    if not rows or min(rows, chunk) * _scale_bytes(packed, width) % 16:
        raise ValueError(f"rows of {width} columns make no whole copies")
    return rows


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
