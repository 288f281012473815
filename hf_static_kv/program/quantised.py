"""Quantised linear layers as one operation each, found by trial.

    module(x)      ->   packed_linear(x, weight, bias)

A reader knows where a package keeps the parts of a weight. No package is imported: what a reader
takes for one of its weights is tried (`agrees`), and left alone if the module gives anything else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.overrides import wrap_torch_function

from hf_static_kv import compat
from hf_static_kv.kernels.linear import Linear, fused_linears
from hf_static_kv.kernels.packed import (
    MAX_TOKENS,
    NESTED_GROUP,
    Nested,
    Packed,
    is_readable,
    unpacked,
)
from hf_static_kv.patching import is_unmodified, replaced

# On a CPU the plain twin unpacks the weight for each token, as the packages do.
DEVICES = ("cuda",)
_TRIED_TOKENS = 8
_TRIED_COLUMNS = 16  # of each token
_MOST_INTEGERS = 1 << 17  # of a buffer that is compared by value
# Roundings of one term of a sum: of the scale, of the code with its zero, and of their product.
_ROUNDINGS = 3


@wrap_torch_function(lambda x, *args, **kwargs: (x,))  # one call for a TorchFunctionMode
def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None) -> Tensor:
    """x w^T + b of a packed weight."""
    return fused_linears(x, Linear([weight], [] if bias is None else [bias]))


@contextmanager
def one_operation_quantised(model: Any, num_tokens: int) -> Iterator[dict[Module, Packed]]:
    """The model with its quantised linear layers as one operation each, for a pass of so many
    tokens; yields their weights.
    """
    found = packed_weights(model) if num_tokens <= MAX_TOKENS else {}
    forwards = {module: _Packed(module, weight).forward for module, weight in found.items()}
    with replaced("forward", forwards):
        yield found


@contextmanager
def unrounded_inputs(model: Any) -> Iterator[None]:
    """The model with layers that multiply x as it is, where their package rounds it to eight bits."""
    found = packed_weights(model)
    plain = {module: _Unrounded(module, weight).forward for module, weight in found.items()}
    with replaced("forward", {m: forward for m, forward in plain.items() if rounds_inputs(m)}):
        yield


def rounds_inputs(module: Module) -> bool:
    """Whether a package rounds the inputs of this layer to eight bits: `Linear8bitLt`."""
    return isinstance(getattr(getattr(module, "state", None), "CB", None), Tensor)


def packed_weights(model: Any) -> dict[Module, Packed]:
    """The layers whose weights are packed, with one trial for all that differ in their numbers only.

    A trial of [N, K] computes the layer for eight tokens and unpacks the weight, for which it takes
    some bytes for each weight for a moment. A model of the shape of Llama has four kinds of layers.
    """
    known: dict[Any, bool] = {}
    found: dict[Module, Packed] = {}
    for module in model.modules():
        weight = read(module, model.dtype)
        if weight is None:
            continue
        kind = type(module), weight.shape, weight.kind, _settings(module, weight)
        if kind not in known:
            known[kind] = agrees(module, weight)
        if known[kind]:
            found[module] = weight
    return found


def read(module: Module, dtype: torch.dtype) -> Packed | None:
    """The packed weight of a linear layer; None for any other module, and for what no kernel reads."""
    weight = _stored(module)
    if weight is None or not is_unmodified(module) or list(module.children()):
        return None
    if weight.device.type not in DEVICES:
        return None
    with suppress(Exception):  # it has such an attribute, and is of no package
        for reader in READERS:
            packed = reader(module, weight)
            if packed is not None:
                packed = packed._replace(dtype=dtype)
                return packed if is_readable(packed) else None
    return None


def _stored(module: Module) -> Tensor | None:
    """The tensor with the codes: the only parameter beside the bias, or a buffer of GPTQ and AWQ."""
    own = dict(module.named_parameters(recurse=False))
    names = own.keys() - {"bias"}
    if not names:
        return dict(module.named_buffers(recurse=False)).get("qweight")
    return own[names.pop()] if len(names) == 1 else None


def _settings(module: Module, weight: Packed) -> tuple[Any, ...]:
    """The plain attributes of a module, which its `forward` may read, and its other buffers: small
    integers by value, and else by identity.
    """
    plain = bool | int | float | str | torch.dtype | None
    own = tuple((name, v) for name, v in vars(module).items() if isinstance(v, plain))
    read = {
        part.data_ptr() for part in (weight.codes, weight.scales, weight.zeros) if part is not None
    }
    buffers = dict(module.named_buffers(recurse=False))
    others = {k: v for k, v in buffers.items() if k != "bias" and v.data_ptr() not in read}
    return own + tuple((name, _value_of(v)) for name, v in others.items())


def _value_of(buffer: Tensor) -> Any:
    if buffer.is_floating_point() or buffer.numel() > _MOST_INTEGERS:
        return id(buffer)
    return buffer.dtype, tuple(buffer.shape), buffer.cpu().numpy().tobytes()


def agrees(module: Module, weight: Packed) -> bool:
    """Whether the module gives x w^T + b, up to what its package may round.

    Each token has 16 inputs that are 1 or -1, and zeros: numbers that are the same in every dtype,
    and as eight bits. So the terms of a sum are weights alone. With u = eps / 2 of the dtype, a
    package rounds each of them at most three times, and the sum and the bias once each:

        |y - y'| <= u * (3 * sum |w| + 2 |y|) + 18 float32 roundings of sum |w|

    Here |w| is the largest of its row: zeros may cancel most of a weight after a rounding. Another
    order of the codes changes y by several times their size.
    """
    with suppress(Exception), torch.no_grad():  # it takes other arguments
        x = _trial_inputs(weight)
        y = module(x)
        if y.shape != (*x.shape[:-1], weight.rows) or y.dtype != x.dtype:
            return False
        whole = unpacked(weight._replace(dtype=torch.float32))
        bias = module.bias
        expected = F.linear(x.float(), whole, None if bias is None else bias.float())  # type: ignore[arg-type]
        terms = _TRIED_COLUMNS * whole.abs().amax(dim=1) + (0 if bias is None else bias.abs())  # type: ignore[operator]
        single = torch.finfo(torch.float32).eps
        unit = torch.finfo(x.dtype).eps / 2
        bound = (_ROUNDINGS * unit + (_TRIED_COLUMNS + 2) * single) * terms
        bound = bound + 2 * unit * expected.abs()
        return bool(((y.float() - expected).abs() <= bound).all())
    return False


def _trial_inputs(weight: Packed) -> Tensor:
    """[1, 8, K]: of each token 16 seeded columns are 1 or -1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(_TRIED_TOKENS, weight.columns)
    for token in x:
        columns = torch.randperm(weight.columns, generator=generator)[:_TRIED_COLUMNS]
        token[columns] = torch.randint(0, 2, columns.shape, generator=generator) * 2.0 - 1.0
    return x.to(weight.codes.device, weight.dtype)[None]


class _Packed:
    def __init__(self, module: Any, weight: Packed) -> None:
        self.module = module
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        bias = self.module.bias
        dtypes = {x.dtype, self.weight.dtype} | ({bias.dtype} if bias is not None else set())
        if len(dtypes) > 1 or x.numel() > MAX_TOKENS * x.shape[-1]:
            return type(self.module).forward(self.module, x)  # type: ignore[no-any-return]
        return packed_linear(x, self.weight, bias)


class _Unrounded(_Packed):
    def forward(self, x: Tensor) -> Tensor:
        weight = unpacked(self.weight._replace(dtype=x.dtype))
        return F.linear(x, weight, self.module.bias)


# --- where packages keep the parts of a weight

# In units of the largest: quantiles of a normal distribution, and floats with one sign bit, two
# bits of exponent and one of mantissa.
_TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * number / 12.0
        for sign in (1.0, -1.0)
        for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
    ),
}  # fmt: skip


@lru_cache
def _table(name: str, device: torch.device) -> Tensor:
    """One for all layers: `Packed.kind` compares its address."""
    with torch.inference_mode(False):
        return torch.tensor(_TABLES[name], device=device)


def _bitsandbytes_4bit(module: Any, weight: Any) -> Packed | None:
    """`Linear4bit`: blocks of the flat weight; their scales may be quantised."""
    state = getattr(weight, "quant_state", None)
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return None
    nested = None
    if state.nested:
        if state.state2.blocksize != NESTED_GROUP:
            return None
        nested = Nested(state.state2.code, state.state2.absmax, state.offset)
    rows, columns = state.shape
    if columns % state.blocksize:  # blocks do not end with rows
        return None
    scales = state.absmax.view(rows, columns // state.blocksize)
    table = _table(state.quant_type, weight.device)
    group = state.blocksize
    return Packed(
        weight, "high_first", rows, columns, state.dtype, group, scales, table, nested=nested
    )


def _bitsandbytes_8bit(module: Any, weight: Any) -> Packed | None:
    """`Linear8bitLt`, after its first pass: int8, the largest of each row is 127."""
    if not rounds_inputs(module) or getattr(weight, "CB", None) is not None:
        return None
    codes = module.state.CB
    rows, columns = codes.shape
    scales = module.state.SCB.view(rows, 1)
    return Packed(codes, "bytes", rows, columns, scales.dtype, columns, scales, factor=1 / 127)


def _torchao_int8(module: Any, weight: Any) -> Packed | None:
    """`Int8Tensor` without rounded inputs; a scale for each row, or for groups of it."""
    if getattr(weight, "act_quant_kwargs", weight) is not None or weight.act_pre_scale is not None:
        return None
    rows, columns = weight.shape
    group = weight.block_size[-1]
    scales = weight.scale.view(rows, columns // group)
    return Packed(weight.qdata, "bytes", rows, columns, weight.dtype, group, scales)


def _torchao_int4_tiles(module: Any, weight: Any) -> Packed | None:
    """`Int4TilePackedTo4dTensor`: tiles for tensor cores, a scale and a zero for each group."""
    pairs = getattr(weight, "scale_and_zero", None)  # [K / G, N, 2]
    if pairs is None or weight.act_pre_scale is not None:
        return None
    rows, columns = weight.shape
    scales, zeros = pairs[..., 0].t(), pairs[..., 1].t()
    return Packed(
        weight.qdata, "tiles", rows, columns, weight.dtype, weight.block_size[-1], scales,
        midpoint=8, zeros=zeros, added=True,
    )  # fmt: skip


def _quanto_int8(module: Any, weight: Any) -> Packed | None:
    """`WeightQBytesTensor`: int8 and a scale for each row."""
    inner = compat.inner_tensors(weight)
    if not type(weight).__module__.startswith("optimum.quanto") or inner is None:
        return None
    codes, scales = inner
    if codes.dtype != torch.int8:  # float8
        return None
    rows, columns = codes.shape
    return Packed(codes, "bytes", rows, columns, scales.dtype, columns, scales.view(rows, 1))


def _hqq_4bit(module: Any, weight: Any) -> Packed | None:
    """`HQQLinear` with groups of rows: [N K / G / 2, G], the first half of the groups in upper halves."""
    meta = getattr(module, "meta", None)
    if not isinstance(meta, dict) or meta["packing"] != "4bit_u8" or meta["axis"] != 1:
        return None
    if meta["quant_zero"] or meta["quant_scale"] or meta["view_as_float"]:
        return None
    rows, columns = meta["shape"]
    group = meta["group_size"]
    scales, zeros = (meta[name].view(rows, columns // group) for name in ("scale", "zero"))
    return Packed(weight, "halves", rows, columns, scales.dtype, group, scales, zeros=zeros)


def _gptq_or_awq(module: Any, weight: Any) -> Packed | None:
    """Layers of GPTQModel (and AutoGPTQ) that multiply by unpacked weights: four bits, groups in order.

    Backends that put the words into another order (Marlin, Machete, ExLlama) fail the trial.
    """
    if getattr(module, "adapter", None) is not None:
        return None
    scales, zeros = module.scales, module.qzeros
    groups, rows = scales.shape
    if weight.shape[1] == rows:
        layout, columns = "gptq", 8 * weight.shape[0]
    else:
        layout, columns = "awq", weight.shape[0]
    group = columns // groups
    is_less_one = layout == "gptq" and not getattr(module, "REQUIRES_FORMAT_V2", False)
    if layout == "gptq" and not _are_in_order(module.g_idx, columns, group):
        return None
    if is_less_one and _has_wrapped(zeros):
        return None
    return Packed(
        weight, layout, rows, columns, scales.dtype, group, scales.t(), midpoint=int(is_less_one),
        zeros=zeros,
    )  # fmt: skip


def _are_in_order(group_of: Tensor, columns: int, group: int) -> bool:
    """Whether the groups of inputs follow each other: not so if they were sorted by their activations."""
    expected = torch.arange(columns, device=group_of.device) // group
    return torch.equal(group_of.long(), expected)


def _has_wrapped(zeros: Tensor) -> bool:
    """Whether a zero that is stored less one is 15: some kernels take it as 16, and some as 0."""
    places = torch.arange(0, 32, 4, device=zeros.device, dtype=zeros.dtype)
    return bool((zeros[..., None] >> places & 15 == 15).any())


READERS: tuple[Callable[[Any, Any], Packed | None], ...] = (
    _bitsandbytes_4bit,
    _bitsandbytes_8bit,
    _torchao_int8,
    _torchao_int4_tiles,
    _quanto_int8,
    _hqq_4bit,
    _gptq_or_awq,
)
