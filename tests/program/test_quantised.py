"""Quantised linear layers are found by trial and become packed weights of a recorded list."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, Parameter

from hf_static_kv import StaticContiguousCache
from hf_static_kv.kernels.packed import unpacked
from hf_static_kv.kernels.persistent_step import persistent_step_plain
from hf_static_kv.patching import ATTENTION_NAME, attention_implementation
from hf_static_kv.program import quantised
from hf_static_kv.program.persistent import plan_of
from hf_static_kv.program.quantised import (
    one_operation_quantised,
    packed_linear,
    packed_weights,
    read,
    rounds_inputs,
    unrounded_inputs,
)
from hf_static_kv.program.record import Recorder
from hf_static_kv.program.rules import RULES, run_linear
from hf_static_kv.program.step import DecodeStep
from tests.conftest import toy_model
from tests.quantised_layers import (
    AwqTorchLinear,
    Linear4bit,
    Linear8bit,
    TorchLinear,
    TorchLinearV1,
    layers_of,
    quantise,
)

SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch):
    monkeypatch.setattr(quantised, "DEVICES", ("cpu", "cuda"))


def model_of(name="llama", kind=Linear4bit, **sizes):
    return quantise(toy_model(name, **SIZES, **sizes), kind)


class Holder(Module):
    """A model with one layer."""

    def __init__(self, layer, dtype=torch.float32):
        super().__init__()
        self.layer, self.dtype = layer.to(dtype), dtype


def layer_of(rows=12, columns=128, bias=True):
    return Linear4bit(Linear(columns, rows, bias))


# --- found by trial


def test_a_layer_is_found_and_computes_the_same():
    layer = layer_of()
    x = torch.randn(1, 3, 128)
    with torch.no_grad():
        expected = layer(x)
        with one_operation_quantised(Holder(layer), 3) as found:
            assert list(found) == [layer]
            got = layer(x)
            many = layer(torch.randn(1, 17, 128))  # by its package
    assert torch.equal(got, expected)
    assert many.shape == (1, 17, 12)
    assert "forward" not in vars(layer)


def test_nothing_is_found_for_many_tokens_and_on_other_devices(monkeypatch):
    model = Holder(layer_of())
    with one_operation_quantised(model, 17) as found:
        assert not found
    monkeypatch.setattr(quantised, "DEVICES", ("cuda",))
    with one_operation_quantised(model, 1) as found:
        assert not found


class Wrong(Linear4bit):
    """Its result is not that of its weight; `how` is set by a test."""

    def forward(self, x):
        return self.how(super().forward(x))


class OtherBlocks(Linear4bit):
    def unpacked(self):
        return super().unpacked().flip(0)


class OtherOrder(Linear4bit):
    """The halves of a byte in the other order, as torchao has them."""

    def unpacked(self):
        return super().unpacked().unflatten(1, (-1, 2)).flip(-1).flatten(1)


class LargeInputs(Linear4bit):
    def forward(self, x):
        return super().forward(x.clamp(-0.9, 0.9))


@pytest.mark.parametrize(
    "how",
    [
        lambda y: y * 1.001,
        lambda y: y + 1e-3,
        lambda y: y.flip(-1),
        lambda y: y.double(),
        lambda y: y[..., 1:],
        lambda y: torch.cat([y[..., :-1], -y[..., -1:]], dim=-1),
    ],
)
def test_a_layer_that_computes_something_else_is_left_alone(how):
    layer = Wrong(Linear(128, 12))
    layer.how = how
    assert not packed_weights(Holder(layer))
    layer.how = lambda y: y
    assert packed_weights(Holder(layer))


@pytest.mark.parametrize("kind", [OtherBlocks, OtherOrder, LargeInputs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_layout_is_left_alone(kind, dtype):
    assert not packed_weights(Holder(kind(Linear(128, 12)), dtype))
    assert packed_weights(Holder(layer_of(), dtype))


def test_layers_that_are_no_longer_what_their_class_says():
    layer = layer_of()
    handle = layer.register_forward_hook(lambda module, args, output: output)
    assert not packed_weights(Holder(layer))
    handle.remove()
    layer.forward = layer.forward
    assert not packed_weights(Holder(layer))
    del layer.forward
    layer.low_rank = Parameter(torch.zeros(4))  # an adapter that does nothing yet
    assert not packed_weights(Holder(layer))
    del layer.low_rank
    layer.child = torch.nn.Identity()
    assert not packed_weights(Holder(layer))
    del layer.child
    assert packed_weights(Holder(layer))


def test_a_wrapper_with_the_attributes_of_its_layer():
    """As PEFT's: only the layer inside is packed, and the adapter is computed as it was."""

    class Wrapper(Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.low, self.high = Linear(128, 4, False), Linear(4, 12, False)
            torch.nn.init.zeros_(self.high.weight)

        @property
        def weight(self):
            return self.base.weight

        def forward(self, x):
            return self.base(x) + self.high(self.low(x))

    wrapper = Wrapper(layer_of())
    assert list(packed_weights(Holder(wrapper))) == [wrapper.base]


def test_one_trial_for_all_layers_of_a_kind(monkeypatch):
    tried = []
    monkeypatch.setattr(
        quantised, "agrees", lambda module, weight: tried.append(weight.shape) or True
    )
    model = model_of()
    assert len(packed_weights(model)) == 14
    # q and o, k and v, gate and up, down.
    assert sorted(tried) == [(32, 64), (64, 64), (64, 128), (128, 64)]


def test_shapes_that_no_kernel_reads_are_left_alone():
    layer = layer_of()
    layer.quant_state.blocksize = 96
    assert read(layer, torch.float32) is None


def test_inputs_and_biases_of_another_dtype_go_to_the_package():
    layer = layer_of()
    with (
        torch.no_grad(),
        one_operation_quantised(Holder(layer), 1) as found,
        Recorder() as recorder,
    ):
        assert found
        layer.bias.data = layer.bias.data.double()
        with pytest.raises(RuntimeError):
            layer(torch.randn(1, 128))  # as without us
        layer.bias.data = layer.bias.data.float()
        layer(torch.randn(1, 128))
    assert [call.func for call in recorder.calls if call.func is packed_linear]


# --- in a recorded list


LENGTH, START = 5, torch.zeros(1, dtype=torch.int64)
PROMPT, TOKEN = torch.arange(LENGTH)[None] + 5, torch.tensor([[9]])


def recorded(model, rows=1, **how):
    """A recorded step after a prompt, and its list."""
    cache = StaticContiguousCache.from_model(model, 40, rows)
    with torch.no_grad(), attention_implementation(model, ATTENTION_NAME):
        model(PROMPT.expand(rows, -1), past_key_values=cache)
        step = DecodeStep(model, cache, rows)
        program = step.record(LENGTH, START.expand(rows), **how)
    return step, program


def logits_of(step, rows=1):
    with torch.no_grad():
        step.set_position(LENGTH, START.expand(rows))
        return step.run(TOKEN.expand(rows, -1))


def packed_layers(program):
    """The packed layers of a list: how many weights each has, and what follows them."""
    layers = [call.args[1] for call in program if call.func is run_linear]
    return [one for one in layers if not isinstance(one.weights[0], torch.Tensor)]


def test_the_list_of_a_llama():
    _, program = recorded(model_of())
    found = packed_layers(program)
    assert len(found) == 2 * 4
    for joint, out, gate, down in (found[:4], found[4:]):
        assert [weight.shape[0] for weight in joint.weights] == [64, 32, 32]
        assert joint.norm is not None  # of a small weight
        assert out.weights[0].shape == (64, 64)
        assert gate.is_gated
        assert gate.activation == "silu"
        assert down.weights[0].shape == (64, 128)
    assert not program.calls_of(packed_linear)


def test_the_packed_weights_of_a_list_are_those_of_the_model():
    model = model_of()
    _, program = recorded(model)
    codes = {w.codes.data_ptr() for layer in packed_layers(program) for w in layer.weights}
    assert codes == {layer.weight.data_ptr() for layer in layers_of(model)}


def test_without_the_rule_layers_are_recorded_as_they_are():
    _, program = recorded(model_of(), without=["packed_weights"])
    assert not packed_layers(program)
    assert not program.calls_of(packed_linear)
    _, program = recorded(model_of(), is_exact=True)
    assert not packed_layers(program)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_gives_the_logits_of_the_model(rows):
    model = model_of()
    step, program = recorded(model, rows)
    assert packed_layers(program)
    with torch.no_grad():
        expected = model(torch.cat([PROMPT, TOKEN], dim=1)).logits[:, -1].expand(rows, -1)
    torch.testing.assert_close(logits_of(step, rows), expected, rtol=1e-4, atol=1e-4)


def test_a_list_reads_what_is_in_the_memory_of_the_model():
    """Nothing of a weight is computed when it is recorded."""
    model = model_of()
    step, _ = recorded(model)
    before = logits_of(step)
    for layer in layers_of(model):
        layer.quant_state.absmax.mul_(1.5)
        layer.weight.bitwise_xor_(3)
    got = logits_of(step)
    assert not torch.allclose(before, got, rtol=1e-2)
    with torch.no_grad(), attention_implementation(model, ATTENTION_NAME):
        step.record(LENGTH, START)  # over the keys of the prompt that are there
    torch.testing.assert_close(got, logits_of(step), rtol=0, atol=0)


def test_the_plan_of_one_kernel_has_the_packed_weights():
    model = model_of()
    step, program = recorded(model)
    plan = plan_of(program)
    codes = [weight.codes.data_ptr() for weight in plan.weights]
    assert codes == [layer.weight.data_ptr() for layer in layers_of(model)]
    expected = logits_of(step)
    torch.testing.assert_close(persistent_step_plain(plan), expected, rtol=0, atol=1e-5)


def test_two_halves_of_one_packed_weight_are_no_gate():
    """Phi 3: rows of a packed weight are not split."""
    _, program = recorded(model_of("phi3", head_dim=16))
    layers = packed_layers(program)
    assert layers
    assert not any(layer.is_gated for layer in layers)


def test_packed_weights_of_two_kinds_are_not_joined():
    first, second = layer_of(bias=False), layer_of(bias=False)
    second.quant_state.quant_type = "fp4"
    weights = [read(layer, torch.float32) for layer in (first, second, first)]
    x = torch.randn(1, 1, 128)
    with torch.no_grad(), Recorder() as recorder:
        y = sum(packed_linear(x, weight, None) for weight in weights)
    program = recorder.program(y)
    for name in ("packed_weights", "shared_input"):
        RULES[name].apply(program)
    assert sorted(len(layer.weights) for layer in packed_layers(program)) == [1, 2]
    with torch.no_grad():
        expected = sum(F.linear(x, unpacked(weight)) for weight in weights)
    torch.testing.assert_close(program.compiled()(), expected)


# --- packages that round the inputs of a layer


def test_a_layer_that_rounds_its_inputs_is_found():
    layer = Linear8bit(Linear(128, 12))
    model = Holder(layer)
    x = torch.randn(1, 1, 128)
    assert rounds_inputs(layer)
    with torch.no_grad():
        exact = F.linear(x, layer.unpacked(), layer.bias)
        with one_operation_quantised(model, 1) as found:
            assert list(found) == [layer]
            torch.testing.assert_close(layer(x), exact)
        assert not torch.allclose(layer(x), exact)
        with unrounded_inputs(model):
            torch.testing.assert_close(layer(x), exact)


def test_only_layers_that_round_their_inputs_are_unrounded():
    layer = layer_of()
    with unrounded_inputs(Holder(layer)):
        assert "forward" not in vars(layer)
    assert not rounds_inputs(layer)


def test_a_step_tells_that_it_rounds_fewer_inputs():
    assert recorded(model_of(kind=Linear8bit))[0].rounds_fewer_inputs
    assert not recorded(model_of())[0].rounds_fewer_inputs
    assert not recorded(model_of(kind=Linear8bit), without=["packed_weights"])[
        0
    ].rounds_fewer_inputs


class Smoothed(Linear4bit):
    """Divides its inputs by a buffer, which one trial for all layers of a kind would not see."""

    def __init__(self, linear):
        super().__init__(linear)
        self.register_buffer("smooth", torch.ones(linear.in_features))

    def forward(self, x):
        return super().forward(x / self.smooth)


def test_layers_that_differ_in_a_buffer_are_tried_apart():
    model = model_of(kind=Smoothed)
    other = model.model.layers[1].mlp.down_proj
    other.smooth.fill_(1.5)
    found = packed_weights(model)
    assert other not in found
    assert model.model.layers[0].mlp.down_proj in found


# --- GPTQ and AWQ, whose layers have buffers alone

TRANSPOSED = [TorchLinear, TorchLinearV1, AwqTorchLinear]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_words_of_gptq_and_awq_are_found(kind, has_bias, dtype):
    layer = kind(Linear(128, 24, has_bias))
    if has_bias:
        layer.bias = layer.bias.to(dtype)
    weight = read(layer, dtype)
    model = Holder(torch.nn.Identity(), dtype)
    model.layer = layer  # its scales stay float16
    # The package rounds to float16, so a float32 model keeps it.
    assert list(packed_weights(model)) == ([] if dtype == torch.float32 else [layer])
    layer.computes_in = torch.float32
    assert list(packed_weights(model)) == [layer]
    layer.computes_in = torch.float16
    assert weight.codes.data_ptr() == layer.qweight.data_ptr()
    assert weight.scales.data_ptr() == layer.scales.data_ptr()
    assert weight.zeros.data_ptr() == layer.qzeros.data_ptr()
    single = unpacked(weight._replace(dtype=torch.float32))
    assert torch.equal(single.to(torch.float16), layer.unpacked().t())


@pytest.mark.parametrize("kind", TRANSPOSED)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_of_gptq_and_awq_gives_the_logits_of_the_model(kind, rows, monkeypatch):
    monkeypatch.setattr(TorchLinear, "computes_in", torch.float32)
    model = model_of(kind=kind)
    step, program = recorded(model, rows)
    assert sum(len(layer.weights) for layer in packed_layers(program)) == len(
        layers_of(model, kind)
    )
    with torch.no_grad():
        expected = model(torch.cat([PROMPT, TOKEN], dim=1)).logits[:, -1].expand(rows, -1)
    torch.testing.assert_close(logits_of(step, rows), expected, rtol=1e-4, atol=1e-4)


def test_one_trial_for_gptq_layers_that_differ_in_buffers(monkeypatch):
    tried = []
    monkeypatch.setattr(
        quantised, "agrees", lambda module, weight: tried.append(weight.shape) or True
    )
    model = model_of(kind=TorchLinear)
    assert len(packed_weights(model)) == 14
    assert sorted(tried) == [(32, 64), (64, 64), (64, 128), (128, 64)]
    model.model.layers[1].mlp.down_proj.shifts += 1  # another small buffer that it may read
    packed_weights(model)
    assert len(tried) == 4 + 5


def test_groups_of_inputs_that_are_not_in_order_are_left_alone():
    """As with `desc_act`: inputs were sorted by their activations when groups were made."""
    layer = TorchLinear(Linear(128, 24))
    assert read(layer, torch.float32) is not None
    layer.g_idx = layer.g_idx.flip(0)
    assert read(layer, torch.float32) is None


def test_a_zero_that_has_wrapped_is_left_alone():
    layer = TorchLinearV1(Linear(128, 24))
    assert read(layer, torch.float32) is not None
    layer.qzeros[0, 0] |= 15
    assert read(layer, torch.float32) is None


def test_an_adapter_of_gptq_is_left_alone():
    layer = TorchLinear(Linear(128, 24))
    layer.adapter = object()
    assert read(layer, torch.float32) is None


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_words_in_another_order_are_left_alone(kind):
    """As ExLlama's kernel has them, which shuffles them where they are."""
    layer = kind(Linear(128, 24))
    model = Holder(layer, torch.float16)
    expected = layer.unpacked()
    layer.unpacked = lambda: expected
    assert packed_weights(model)
    layer.qweight.copy_(layer.qweight << 4 | layer.qweight >> 28 & 15)
    assert not packed_weights(model)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_bits_of_gptq_are_left_alone(bits):
    layer = TorchLinear(Linear(128, 24))
    words = torch.zeros(128 * bits // 32, 24, dtype=torch.int32)
    layer.bits, layer.qweight = bits, words
    assert not packed_weights(Holder(layer, torch.float16))
