"""Packed weights and quantised layers made by hand, as packages lay them out: no package is needed."""

from functools import cache
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, Parameter

from hf_static_kv.kernels.packed import LAYOUTS, NESTED_GROUP, TRANSPOSED, Nested, Packed

BLOCK = 64


def pack(codes, layout):
    """Codes [N, K] in the memory of a layout."""
    codes = codes.to(torch.uint8)
    if layout == "bytes":
        return codes.view(torch.int8)
    if layout == "high_first":
        return (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1)
    if layout == "low_first":
        return codes[:, 1::2] << 4 | codes[:, ::2]
    if layout == "halves":
        first, second = codes.chunk(2)
        return first << 4 | second
    if layout == "gptq":
        return words_of(codes).t().contiguous()
    if layout == "awq":
        return words_of(codes.t(), AWQ_ORDER)
    return pack_tiles(codes)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of(codes, order=range(8)):
    """Eight codes along the last dimension in an int32; `order` names them from the lowest bits on."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for position, i in enumerate(order):
        words |= codes.long()[..., i::8] << 4 * position
    return words.to(torch.int32)  # the upper half as negative numbers


def pack_tiles(codes):
    """As torch packs them for tensor cores: two tiles of 16 columns in a word, 32 lanes of 4 words."""
    rows, columns = codes.shape
    # Another device may be the default one.
    words = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.int64, device=codes.device)
    for lane in range(32):
        for word in range(4):
            first = 32 * word + lane % 4 * 2
            own = [first + step for step in (0, 1, 8, 9, 16, 17, 24, 25)]
            v = codes.long().view(rows // 8, 8, columns // 128, 128)[:, lane // 4][..., own]
            for position, i in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[:, :, lane, word] |= v[..., i] << 4 * position
    return words.to(torch.int32)  # the upper half as negative numbers


class Made:
    """A packed weight of random numbers, and the same in float64."""

    def __init__(self, name, rows, columns, dtype=torch.float32, device="cpu", seed=0):
        layout, group, kind = FORMATS[name]
        group = group or columns
        generator = torch.Generator().manual_seed(seed)
        groups = rows, columns // group
        codes = torch.randint(0, 1 << LAYOUTS[layout].bits, (rows, columns), generator=generator)
        scales = torch.rand(groups, generator=generator) + 0.5
        made = {}
        values, scale = codes.double(), scales.double()
        if layout == "bytes":
            values = codes.to(torch.uint8).view(torch.int8).double()
            made["factor"] = 1 / 127
            scale = scale * made["factor"]
        if kind in ("table", "nested"):
            made["table"] = table_of(device)
            values = made["table"].cpu().double()[codes]
        if kind == "nested":
            table = torch.rand(256, generator=generator)
            absmax = torch.rand(-(-scales.numel() // NESTED_GROUP), generator=generator)
            offset = torch.tensor(0.3)
            scales = torch.randint(0, 256, groups, generator=generator, dtype=torch.uint8)
            outer = absmax.double()[torch.arange(scales.numel()) // NESTED_GROUP]
            scale = table.double()[scales.int()] * outer.view(groups) + offset.double()
            made["nested"] = Nested(table.to(device), absmax.to(device), offset.to(device))
        zero = torch.zeros(groups).double()
        if kind in ("subtracted", "added"):
            made["zeros"] = torch.rand(groups, generator=generator) * 8
            zero = made["zeros"].double()
        if kind == "added":  # scales and zeros of a group side by side, [K / G, N, 2]
            pairs = torch.stack([scales, made["zeros"]], dim=-1).transpose(0, 1).contiguous()
            scales, made["zeros"] = (part.t() for part in pairs.to(device).unbind(-1))
            made |= {"added": True, "midpoint": 8}
            values = values - 8
        if layout in TRANSPOSED:
            scales = scales.to(torch.float16)
            scale = scales.double()
            scales = scales.t().contiguous().t()
            integers = torch.randint(0, 16, groups, generator=generator)
            integers[0, 0] = 15
            made["zeros"] = words_of(integers.t(), AWQ_ORDER if layout == "awq" else range(8))
            made["midpoint"] = int(kind == "less one")
            zero = (integers + made["midpoint"]).double()
        if "zeros" in made:
            made["zeros"] = made["zeros"].to(device)
        packed = pack(codes, layout).to(device), layout, rows, columns, dtype, group
        self.packed = Packed(*packed, scales.to(device), **made)  # keeps strides
        grouped = values.view(*groups, group)
        zero, scale = zero[..., None], scale[..., None]
        exact = grouped * scale + zero if kind == "added" else (grouped - zero) * scale
        largest = grouped.abs() * scale.abs() + (zero if kind == "added" else zero * scale).abs()
        self.exact = exact.view(rows, columns).to(device)
        self.largest = largest.view(rows, columns).to(device)  # what is rounded on the way


@cache
def table_of(device):
    """One for all weights, as those of a launch have."""
    return torch.randn(16, generator=torch.Generator().manual_seed(5)).to(device)


# By name: layout, group (0: a row), and what multiplies the codes.
FORMATS = {
    "blocks": ("high_first", BLOCK, "table"),
    "nested blocks": ("high_first", BLOCK, "nested"),
    "small blocks": ("high_first", 32, "table"),
    "int8 rows": ("bytes", 0, ""),
    "int8 groups": ("bytes", 32, ""),
    "int4 groups": ("low_first", 32, "subtracted"),
    "int4 halves": ("halves", 32, "subtracted"),
    "int4 tiles": ("tiles", 32, "added"),
    "wide int4 tiles": ("tiles", 128, "added"),
    "gptq": ("gptq", 128, "packed"),
    "gptq, zeros less one": ("gptq", 32, "less one"),
    "gptq rows": ("gptq", 0, "packed"),
    "awq": ("awq", 128, "packed"),
    "small awq": ("awq", 32, "packed"),
}


class Linear4bit(Linear):
    """As the layer of bitsandbytes, with its own way to unpack: one value after the other."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        blocks = linear.weight.data.float().view(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1)
        table = torch.tensor(NF4, device=absmax.device)
        codes = (blocks[..., None] / absmax[:, None, None] - table).abs().argmin(-1)
        self.weight = Parameter(pack(codes.view(linear.weight.shape), "high_first"), False)
        self.bias = linear.bias
        self.quant_state = self.weight.quant_state = SimpleNamespace(
            absmax=absmax, blocksize=BLOCK, quant_type="nf4", shape=linear.weight.shape,
            dtype=linear.weight.dtype, nested=False, code=table, offset=None, state2=None,
        )  # fmt: skip

    def unpacked(self):
        state = self.quant_state
        both = torch.cat([self.weight >> 4, self.weight & 15], dim=1).view(-1, state.blocksize)
        values = torch.zeros(both.shape, device=both.device)
        for code, value in enumerate(NF4):
            values = torch.where(both == code, value, values)
        return (values * state.absmax[:, None]).view(state.shape)

    def forward(self, x):
        return F.linear(x, self.unpacked().to(x.dtype), self.bias)


class Linear8bit(Linear):
    """As the layer of bitsandbytes: inputs are rounded to eight bits, too."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        largest = linear.weight.data.abs().amax(1)
        codes = (linear.weight.data / largest[:, None] * 127).round().to(torch.int8)
        self.weight = Parameter(codes, requires_grad=False)
        self.bias = linear.bias
        self.state = SimpleNamespace(CB=self.weight.data, SCB=largest)

    def unpacked(self):
        return self.state.CB.float() * self.state.SCB[:, None] / 127

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
        return F.linear((x / scale).round() * scale, self.unpacked().to(x.dtype), self.bias)


class TorchLinear(Module):
    """As the layer of GPTQModel for GPTQ: buffers alone, and inputs of a group by `g_idx`."""

    REQUIRES_FORMAT_V2 = True  # else zeros are stored less one
    order = range(8)  # of zeros
    group_size = 32
    computes_in = torch.float16  # weights: in the dtype of the scales

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.adapter = 4, None
        groups = linear.weight.detach().t().unflatten(0, (-1, self.group_size))  # [groups, G, N]
        least = groups.amin(1).clamp(max=0.0)
        scales = ((groups.amax(1).clamp(min=0.0) - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(1, 15)
        codes = groups / scales.float()[:, None] + zeros[:, None]
        stored = zeros.long() - (0 if self.REQUIRES_FORMAT_V2 else 1)
        self.register_buffer(
            "qweight", self.packed(codes.round().clamp(0, 15).long().flatten(0, 1))
        )
        self.register_buffer("qzeros", words_of(stored, self.order))
        self.register_buffer("scales", scales)
        g_idx = torch.arange(self.in_features, dtype=torch.int32) // self.group_size
        self.register_buffer("g_idx", g_idx)
        self.register_buffer("shifts", torch.arange(0, 32, 4)[:, None])
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())

    def packed(self, codes):
        """Codes [K, N] in words."""
        return words_of(codes.t()).t().contiguous()

    def codes(self):
        return (self.qweight[:, None] >> self.shifts & 15).flatten(0, 1)

    def zeros(self):
        zeros = (self.qzeros[..., None] >> self.shifts[:, 0] & 15).flatten(1)
        return zeros if self.REQUIRES_FORMAT_V2 else zeros + 1

    def unpacked(self):
        group = self.g_idx.long()
        return self.scales[group].to(self.computes_in) * (self.codes() - self.zeros()[group])

    def forward(self, x):
        y = x @ self.unpacked().to(x.dtype)
        return y if self.bias is None else y + self.bias


class TorchLinearV1(TorchLinear):
    REQUIRES_FORMAT_V2 = False


class AwqTorchLinear(TorchLinear):
    """As the layer of GPTQModel for AWQ; it has no `g_idx`."""

    order = AWQ_ORDER

    def __init__(self, linear):
        super().__init__(linear)
        self.of_place = [AWQ_ORDER.index(i) for i in range(8)]
        del self.g_idx

    def packed(self, codes):
        return words_of(codes, AWQ_ORDER)

    def in_order(self, words):
        return (words[..., None] >> self.shifts[:, 0] & 15)[..., self.of_place].flatten(1)

    def unpacked(self):
        codes, zeros = self.in_order(self.qweight), self.in_order(self.qzeros)
        scales, zeros = (
            part.repeat_interleave(self.group_size, 0) for part in (self.scales, zeros)
        )
        return (codes - zeros) * scales.to(self.computes_in)


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip


def quantise(model, kind=Linear4bit):
    """Every linear layer of the decoder's layers in four bits."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is Linear and child is not model.get_output_embeddings():
                setattr(module, name, kind(child))
    return model


def layers_of(model, kind=Linear4bit) -> list[Module]:
    return [module for module in model.modules() if isinstance(module, kind)]
