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
in persistent_cuts.cuh, its attention in persistent_attention.cuh, packed weights in persistent_packed.cuh
and persistent_tiles.cuh, its PTX in hopper.cuh), its sizes in persistent_macros.py and
persistent_weights.py. persistent_step_cuda.py compiles and launches it. A block of threads runs on each
multiprocessor for the whole step, and reads the weights ahead of the values that they are multiplied
with.
"""

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
GROUP = 64  # packed weights of four bits that share a scale
_TILE = (32, 4)  # lanes and words: `inner_k_tiles` is 8
_GROUPS_OF_TILES = (32, 64, 128, 256)
_HEAD_DIMS = (64, 128, 256)
_MAX_GROUP = 8  # query heads of a head of keys
_MAX_WIDTH = 16384  # a thread holds 1 / 256 of an input in registers

# Of a layer: all of these are there, or none.
_TOGETHER = (("q_bias", "k_bias", "v_bias"), ("post1", "post2"), ("q_norm", "k_norm"))
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
    for names in _TOGETHER:
        is_there = {getattr(plan.layers[0], name) is not None for name in names}
        yield len(is_there) == 1, f"of {', '.join(names)} only some are there"
    yield from _conditions_of_sizes(plan)
    if any(isinstance(weight, Packed) for weight in plan.weights):
        yield from _conditions_of_packed(plan)


def _conditions_of_packed(plan: Plan) -> Iterator[tuple[bool, str]]:
    """For weights of four or eight bits: see persistent_packed.cuh."""
    weights = [weight for weight in plan.weights if isinstance(weight, Packed)]
    first = weights[0]
    yield len(weights) == len(plan.weights), "some weights are packed and some are not"
    is_tiled = first.layout == "tiles"
    is_known = is_tiled or first.layout in ("high_first", "low_first", "bytes")
    has_zeros = any(weight.zeros is not None for weight in weights)
    yield is_known and has_zeros <= is_tiled, f"it has no weights packed as {first.layout}"
    kinds = sorted({str(weight.dtype) for weight in weights})
    yield kinds == ["torch.bfloat16"], f"it takes torch.bfloat16, not {', '.join(kinds)}"
    yield all(weight.kind[:2] == first.kind[:2] for weight in weights), "packed weights differ"
    yield all(weight.columns % GROUP == 0 for weight in weights), "a row is no multiple of 64"
    parts = [part for weight in weights for part in (weight.codes, weight.scales)]
    yield all(part.data_ptr() % 16 == 0 for part in parts), "a tensor is not 16-byte aligned"
    devices = {part.device for part in parts}
    yield devices == {plan.token.device}, "the tensors are on several devices"
    if is_tiled:
        yield from _conditions_of_tiles(weights)
        return
    yield all(weight.scales.is_contiguous() for weight in weights), "scales are not contiguous"
    if first.layout == "bytes":
        yield from _conditions_of_bytes(weights)
    else:
        yield from _conditions_of_four_bits(weights)


def _conditions_of_tiles(weights: list[Packed]) -> Iterator[tuple[bool, str]]:
    """See persistent_tiles.cuh."""
    shapes = {tuple(weight.codes.shape[2:]) for weight in weights}
    is_known = shapes == {_TILE} and all(map(_has_whole_tiles, weights))
    yield is_known, f"tiles are {sorted(shapes)}: it takes whole ones of {_TILE}"
    groups = sorted({weight.group for weight in weights})
    is_known = len(groups) == 1 and groups[0] in _GROUPS_OF_TILES
    yield is_known, f"{groups} weights share a scale: it takes one of {_GROUPS_OF_TILES}"
    yield all(w.columns % w.group == 0 for w in weights), "a row is no multiple of its groups"
    yield all(map(_has_pairs, weights)), "scales and zeros are no pairs of torch.bfloat16"


def _has_whole_tiles(packed: Packed) -> bool:
    codes = packed.codes
    is_whole = codes.shape[:2] == (packed.rows // 8, packed.columns // 128)
    is_dense = codes.dtype == torch.int32 and codes.is_contiguous()
    return is_whole and is_dense and packed.numel() == 8 * codes.numel()


def _has_pairs(packed: Packed) -> bool:
    """Whether scale and zero of a group lie side by side, [K / G, N, 2], and nothing else is computed."""
    scales = packed.scales
    zeros = packed.zeros
    if zeros is None or not packed.added or packed.table is not None or packed.nested is not None:
        return False
    lie_together = zeros.data_ptr() == scales.data_ptr() + scales.dtype.itemsize
    of_row, of_group = scales.stride()
    is_dense = of_row == 2 and (of_group == 2 * packed.rows or scales.shape[1] == 1)
    have_strides = is_dense and zeros.stride() == scales.stride()
    dtypes = {scales.dtype, zeros.dtype}
    is_plain = (packed.midpoint, packed.factor) == (8, 1)
    return lie_together and have_strides and is_plain and dtypes == {torch.bfloat16}


def _conditions_of_bytes(weights: list[Packed]) -> Iterator[tuple[bool, str]]:
    first = weights[0]
    yield all(weight.midpoint == 0 for weight in weights), "codes have a midpoint"
    has_rows = all(weight.group == weight.columns for weight in weights)
    yield has_rows, "it takes one scale for a row of bytes"
    kinds = {(weight.scales.dtype, weight.factor) for weight in weights}
    yield len(kinds) == 1, "scales differ"
    is_known = first.scales.dtype in (torch.float32, torch.bfloat16)
    yield is_known, f"scales are {first.scales.dtype}"


def _conditions_of_four_bits(weights: list[Packed]) -> Iterator[tuple[bool, str]]:
    first = weights[0]
    groups = {weight.group for weight in weights}
    yield groups == {GROUP}, f"{groups} weights share a scale: it takes {GROUP}"
    yield all(weight.factor == 1 for weight in weights), "scales have a factor"
    kinds = {str(weight.scales.dtype) for weight in weights}
    yield len(kinds) == 1, f"scales are {', '.join(sorted(kinds))}"
    yield _are_equal([weight.table for weight in weights]), "tables differ"
    nested = [weight.nested for weight in weights if weight.nested is not None]
    yield len(nested) in (0, len(weights)), "only some scales are nested"
    if not nested:
        yield first.scales.dtype == torch.float32, f"scales are {first.scales.dtype}"
        return
    yield _are_equal([own.table for own in nested]), "tables of scales differ"
    kinds = {str(part.dtype) for own in nested for part in own}
    yield kinds == {"torch.float32"}, f"scales of scales are {', '.join(sorted(kinds))}"
    whole = GROUP * NESTED_GROUP * 4  # four scales of scales are read at once
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
