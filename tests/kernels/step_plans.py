"""Plans of a step with random tensors, and what a step of one gives in float64."""

import math
from functools import cache

import torch
import torch.nn.functional as F

from hf_static_kv.kernels.norm import STYLES
from hf_static_kv.kernels.packed import NESTED_GROUP, Nested, Packed, unpacked
from hf_static_kv.kernels.persistent_step import Plan, PlannedLayer
from tests.quantised_layers import NF4, pack_tiles

SMALL = {"L": 2, "H": 256, "I": 512, "NQ": 4, "NKV": 2, "D": 64, "V": 1000}


def in_four_bits(weight, is_nested, group=64):
    """A weight as bitsandbytes packs it."""
    blocks = weight.float().view(-1, group)
    absmax = blocks.abs().amax(dim=1)
    table = table_of(weight.device)
    codes = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1).to(torch.uint8)
    codes = codes.view(-1, 2)
    scales, nested = absmax, None
    if is_nested:
        offset = absmax.mean()
        padded = F.pad(absmax - offset, (0, -len(absmax) % NESTED_GROUP))
        outer = padded.view(-1, NESTED_GROUP).abs().amax(dim=1)
        levels = torch.linspace(-1, 1, 256, device=weight.device)
        shares = (absmax - offset) / outer.repeat_interleave(NESTED_GROUP)[: len(absmax)]
        scales = shares[:, None].sub(levels).abs().argmin(-1).to(torch.uint8)
        nested = Nested(levels, outer, offset)
    rows, columns = weight.shape
    return Packed(
        codes[:, 0] << 4 | codes[:, 1], "high_first", rows, columns, weight.dtype, group,
        scales.view(rows, -1), table, nested=nested,
    )  # fmt: skip


def in_bytes(weight):
    """A weight as bitsandbytes has it in int8."""
    largest = weight.float().abs().amax(dim=1)
    codes = (weight.float() / largest[:, None] * 127).round().to(torch.int8)
    rows, columns = weight.shape
    how = codes, "bytes", rows, columns, weight.dtype, columns, largest[:, None]
    return Packed(*how, factor=1 / 127)


def in_tiles(weight, group):
    """A weight as torchao packs it for tensor cores."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group)
    least, most = groups.amin(dim=2), groups.amax(dim=2)
    scales = ((most - least) / 15).clamp(min=1e-6).to(torch.bfloat16)
    zeros = (least + 8 * scales.float()).to(torch.bfloat16)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None] + 8).round()
    codes = codes.clamp(0, 15).to(torch.uint8).view(rows, columns)
    pairs = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()
    scales, zeros = (part.t() for part in pairs.unbind(-1))
    if weight.device.type == "meta":
        words = torch.empty(rows // 8, columns // 128, 32, 4, dtype=torch.int32, device="meta")
    else:
        words = pack_tiles(codes.cpu()).to(weight.device)
    how = words, "tiles", rows, columns, weight.dtype, group, scales
    return Packed(*how, midpoint=8, zeros=zeros, added=True)


def random_plan(
    sizes=SMALL, has_biases=False, has_head_norms=False, has_post_norms=False,
    dtype=torch.bfloat16, device="cpu", slots=48, length=20, first=0, packed=None, group=128, **how,
):  # fmt: skip
    """A plan with random tensors; with device "meta" it has sizes only."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def weight(*shape, scale=None):
        scale = shape[-1] ** -0.5 if scale is None else scale
        return (torch.randn(*shape, generator=generator, device=device) * scale).to(dtype)

    def linear(*shape):
        own = weight(*shape)
        if packed is None:
            return own
        if packed == "tiles":
            return in_tiles(own, group)
        return in_bytes(own) if packed == "bytes" else in_four_bits(own, packed == "nested")

    def norm(width, is_there=True):
        return 1 + weight(width, scale=0.1) if is_there else None

    hidden, intermediate, dim = sizes["H"], sizes["I"], sizes["D"]
    queries, heads = sizes["NQ"] * dim, sizes["NKV"] * dim
    numbers = {"dtype": torch.int64, "device": device}
    slot = torch.tensor([length], **numbers)
    angles = torch.rand(slots, dim, generator=generator, device=device) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)

    def layer():
        return PlannedLayer(
            q=linear(queries, hidden), k=linear(heads, hidden), v=linear(heads, hidden),
            o=linear(hidden, queries), gate=linear(intermediate, hidden),
            up=linear(intermediate, hidden), down=linear(hidden, intermediate),
            norm1=norm(hidden), post1=norm(hidden, has_post_norms),
            norm2=norm(hidden), post2=norm(hidden, has_post_norms),
            q_norm=norm(dim, has_head_norms), k_norm=norm(dim, has_head_norms),
            q_bias=weight(queries) if has_biases else None,
            k_bias=weight(heads) if has_biases else None,
            v_bias=weight(heads) if has_biases else None,
            keys=weight(sizes["NKV"], slots, dim, scale=1),
            values=weight(sizes["NKV"], slots, dim, scale=1),
            table=table, slot=slot, span=torch.tensor([first, first, length + 1, 0], **numbers)[:3],
        )  # fmt: skip

    own = {
        "style": STYLES[0], "eps": 1e-6, "qk_eps": 1e-5, "scale": dim**-0.5,
        "activation": "silu", "embedding_scale": None,
    }  # fmt: skip
    return Plan(
        layers=[layer() for _ in range(sizes["L"])],
        embedding=weight(sizes["V"], hidden, scale=1),
        norm=norm(hidden),
        head=weight(sizes["V"], hidden),
        token=torch.tensor([[7]], **numbers),
        position=torch.tensor([[length - first]], **numbers),
        **own | how,
    )


def exact(weight):
    """In float64."""
    if isinstance(weight, Packed):
        weight = unpacked(weight._replace(dtype=torch.float32))
    return weight.to(torch.float64)


def float64_step(plan):
    """The logits, and the newest keys and values of each layer, by formulas of this test alone."""
    real = torch.float64
    h = plan.embedding[plan.token.flatten()].to(real)[0] * (plan.embedding_scale or 1)

    def norm(x, weight, eps):
        if weight is None:
            return x
        weight = weight.to(real) + plan.style.offset
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def rotate(x, angles):
        half = x.shape[-1] // 2
        cos, sin = angles[: 2 * half], angles[2 * half :]
        return x * cos + torch.cat([-x[:, half:], x[:, :half]], dim=-1) * sin

    written = []
    for layer in plan.layers:
        dim = layer.keys.shape[2]
        z = norm(h, layer.norm1, plan.eps)
        q, k, v = (
            (exact(weight) @ z + (0 if bias is None else bias.to(real))).view(-1, dim)
            for weight, bias in (
                (layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias)
            )
        )  # fmt: skip
        angles = layer.table[int(plan.position)].to(real)
        q = rotate(norm(q, layer.q_norm, plan.qk_eps), angles)
        k = rotate(norm(k, layer.k_norm, plan.qk_eps), angles)
        written += [k, v]
        first, end = layer.span[1:].tolist()
        slot = int(layer.slot)
        keys, values = layer.keys.to(real).clone(), layer.values.to(real).clone()
        keys[:, slot], values[:, slot] = k, v
        group = len(q) // len(k)
        keys, values = (x[:, first:end].repeat_interleave(group, 0) for x in (keys, values))
        weights = torch.softmax(plan.scale * torch.einsum("hd,hnd->hn", q, keys), dim=-1)
        a = torch.einsum("hn,hnd->hd", weights, values).flatten()
        h = h + norm(exact(layer.o) @ a, layer.post1, plan.eps)
        z = norm(h, layer.norm2, plan.eps)
        gate, up = exact(layer.gate) @ z, exact(layer.up) @ z
        if plan.activation == "silu":
            gate = gate * torch.sigmoid(gate)
        else:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gate = 0.5 * gate * (1 + torch.tanh(inner))
        h = h + norm(exact(layer.down) @ (gate * up), layer.post2, plan.eps)
    return plan.head.to(real) @ norm(h, plan.norm, plan.eps), written


CASES = {
    "plain": {},
    "biases": {"has_biases": True},
    "gemma": {
        "has_head_norms": True, "has_post_norms": True, "style": STYLES[2],
        "activation": "gelu_tanh", "embedding_scale": 16.0,
    },
    "qwen": {"has_head_norms": True, "sizes": {**SMALL, "D": 128}},
    "wide heads": {"sizes": {**SMALL, "D": 256, "NKV": 1}},
    "odd vocabulary": {"sizes": {**SMALL, "V": 999}},
    "nine heads": {"sizes": {**SMALL, "NQ": 9, "NKV": 3, "H": 576, "I": 1536}},
    "one token": {"length": 0},
    "window": {"length": 40, "first": 33},
    "full": {"length": 47},
    "long": {"length": 3000, "slots": 3001},
    "four bits": {"packed": "plain", "sizes": {**SMALL, "I": 2304}},
    "four bits, gemma": {
        "packed": "plain", "has_biases": True, "has_head_norms": True, "has_post_norms": True,
        "style": STYLES[2], "activation": "gelu_tanh", "embedding_scale": 16.0,
    },
    "int8": {"packed": "bytes", "has_biases": True, "sizes": {**SMALL, "I": 1088}},
    "tiles": {"packed": "tiles", "has_biases": True, "sizes": {**SMALL, "I": 1152}},
    "tiles, groups of 32": {"packed": "tiles", "group": 32, "sizes": {**SMALL, "I": 2304}},
    "tiles, groups of 64": {
        "packed": "tiles", "group": 64, "has_head_norms": True, "has_post_norms": True,
        "style": STYLES[2], "activation": "gelu_tanh", "embedding_scale": 16.0,
    },
    "tiles, groups of 256": {"packed": "tiles", "group": 256, "sizes": {**SMALL, "I": 1536}},
    "nested scales": {"packed": "nested", "sizes": {**SMALL, "H": 512, "I": 1536, "NQ": 8}},
}  # fmt: skip


def largest_error(got, plan, before):
    """Of logits, keys and values, as a share of the largest number of each."""
    expected, written = float64_step(before)
    pairs = [(got.flatten(), expected)]
    for n, state in enumerate(written):
        layer = plan.layers[n // 2]
        pairs.append(((layer.values if n % 2 else layer.keys)[:, int(layer.slot)], state))
    assert all(own.shape == true.shape for own, true in pairs)
    errors = [(own.double() - true).abs().max() / true.abs().max() for own, true in pairs]
    return float(torch.stack(errors).max())  # NaN if one is


def copied(plan):
    """With storage of its own."""
    layers = [x._replace(keys=x.keys.clone(), values=x.values.clone()) for x in plan.layers]
    return plan._replace(layers=layers)


@cache
def table_of(device):
    """One for all weights, as a package has it."""
    return torch.tensor(NF4, device=device)
