"""Weights of the packages themselves: the plain twin unpacks them as their package does, bit for bit,
and their layers are found.
"""

import pytest
import torch
from torch.nn import Linear, Module

from hf_static_kv.kernels.packed import unpacked
from hf_static_kv.program import quantised

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch):
    monkeypatch.setattr(quantised, "DEVICES", (DEVICE,))


class Holder(Module):
    """A model with one layer."""

    def __init__(self, layer, dtype):
        super().__init__()
        self.layer, self.dtype = layer, dtype


def linear(dtype, rows=96, columns=256):
    return Linear(columns, rows, device=DEVICE, dtype=dtype).requires_grad_(False)


def package(name):
    return pytest.importorskip(name, reason=f"{name} is not installed: see the extra `clients`")


def found_and_unpacked(layer, dtype):
    """Whether the layer is found, and its weight as we unpack it."""
    weight = quantised.read(layer, dtype)
    return list(quantised.packed_weights(Holder(layer, dtype))) == [layer], unpacked(weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4bit(kind, is_nested, dtype):
    bitsandbytes = package("bitsandbytes")
    own = linear(dtype)
    layer = bitsandbytes.nn.Linear4bit(256, 96, True, dtype, is_nested, kind)
    layer.weight = bitsandbytes.nn.Params4bit(
        own.weight.data, False, compress_statistics=is_nested, quant_type=kind, module=layer
    )
    layer.bias = own.bias
    layer = layer.to(DEVICE).eval()
    layer.support_avx512bf16_for_cpu = False
    is_found, weight = found_and_unpacked(layer, dtype)
    unpack = bitsandbytes.functional.dequantize_4bit
    assert is_found
    assert torch.equal(weight, unpack(layer.weight.data, layer.weight.quant_state))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bitsandbytes_8bit(dtype):
    bitsandbytes = package("bitsandbytes")
    own = linear(dtype)
    layer = bitsandbytes.nn.Linear8bitLt(256, 96, has_fp16_weights=False, threshold=6.0)
    layer.weight = bitsandbytes.nn.Int8Params(own.weight.data.cpu(), False, has_fp16_weights=False)
    layer.bias = own.bias
    layer = layer.to(DEVICE).eval()
    assert quantised.read(layer, dtype) is None  # before its first pass
    with torch.no_grad():
        layer(torch.randn(1, 3, 256, device=DEVICE).to(dtype))
    is_found, weight = found_and_unpacked(layer, dtype)
    unpack = bitsandbytes.functional.int8_vectorwise_dequant
    # The package rounds to float16, so a float32 model keeps it.
    assert is_found == (dtype != torch.float32)
    assert quantised.rounds_inputs(layer)
    assert torch.equal(weight, unpack(layer.state.CB, layer.state.SCB).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchao_int8(dtype):
    torchao = package("torchao.quantization")
    layer = linear(dtype)
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    is_found, weight = found_and_unpacked(layer, dtype)
    assert is_found
    assert torch.equal(weight, layer.weight.dequantize())


def test_torchao_with_rounded_inputs_is_left_alone():
    torchao = package("torchao.quantization")
    layer = linear(torch.float32)
    torchao.quantize_(layer, torchao.Int8DynamicActivationInt8WeightConfig())
    assert quantised.read(layer, torch.float32) is None


@pytest.mark.gpu
def test_torchao_int4_tiles():
    torchao = package("torchao.quantization")
    layer = linear(torch.bfloat16, 96, 1024)
    config = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}
    torchao.quantize_(layer, torchao.Int4WeightOnlyConfig(**config))
    assert found_and_unpacked(layer, torch.bfloat16)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quanto_int8(dtype):
    quanto = package("optimum.quanto")
    layer = quanto.QLinear.from_module(linear(dtype), weights=quanto.qint8)
    layer.freeze()
    is_found, weight = found_and_unpacked(layer, dtype)
    assert is_found
    assert torch.equal(weight, layer.weight.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hqq_4bit(dtype):
    hqq = package("hqq.core.quantize")
    config = hqq.BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    layer = hqq.HQQLinear(linear(dtype), config, compute_dtype=dtype, device=DEVICE)
    is_found, weight = found_and_unpacked(layer, dtype)
    assert is_found
    # The package rounds the difference of code and zero, too.
    largest = (15 * layer.meta["scale"].abs()).max().float()
    bound = torch.finfo(dtype).eps * largest
    assert ((weight.float() - layer.dequantize().float()).abs() <= bound).all()


@pytest.mark.parametrize("has_order", [False, True], ids=["", "sorted by activations"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gptqmodel_gptq(dtype, has_order, monkeypatch):
    package("gptqmodel")
    monkeypatch.setenv("GPTQMODEL_DISABLE_PACK_EXT", "1")  # which is compiled
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    how = {"bits": 4, "group_size": 32, "sym": False, "desc_act": has_order, "bias": True}
    layer = TorchLinear(in_features=256, out_features=96, register_buffers=True, **how)
    group_of = torch.arange(256, dtype=torch.int32) // 32
    if has_order:
        group_of = group_of[torch.randperm(256)]
    own = linear(torch.float32).cpu()
    scales, zeros = torch.rand(96, 8) * 0.01 + 0.01, torch.randint(1, 16, (96, 8)).float()
    layer.pack(own, scales, zeros, group_of)
    layer.optimized = True  # not compiled
    layer.post_init()
    layer = layer.to(DEVICE).eval()
    layer.bias = layer.bias.to(dtype)
    if has_order:
        assert quantised.read(layer, dtype) is None
        return
    assert found_and_unpacked(layer, dtype)[0]
    _, weight = found_and_unpacked(layer, torch.float16)  # as the scales
    assert torch.equal(weight, layer.dequantize_weight().t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gptqmodel_awq(dtype):
    package("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    how = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "bias": True}
    layer = AwqTorchLinear(in_features=256, out_features=96, dtype=dtype, **how)
    own = linear(dtype).cpu()
    scales, zeros = torch.rand(96, 8) * 0.01 + 0.01, torch.randint(0, 16, (96, 8)).float()
    layer.pack(own, scales.to(dtype), zeros.to(dtype))
    layer.post_init()
    layer = layer.to(DEVICE).eval()
    is_found, weight = found_and_unpacked(layer, dtype)
    assert is_found
    x = torch.eye(256, device=DEVICE, dtype=dtype)
    layer.bias = None
    assert torch.equal(weight, layer(x).t())
