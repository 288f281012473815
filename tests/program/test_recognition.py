"""Modules are found by what they compute, replaced inside a context, and restored."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers.activations import ACT2FN, ClippedGELUActivation
from transformers.models.llama import modeling_llama

from hf_static_kv.exactness.linears import gated_mlps, mlp_activation, single_linears
from hf_static_kv.kernels import linear
from hf_static_kv.kernels.norm import Norm, NormStyle, norm_plain
from hf_static_kv.patching import replaced
from hf_static_kv.program.activations import named_activations
from hf_static_kv.program.norms import fused_norms, norm_style
from hf_static_kv.program.rotary import fused_rotary, one_operation_angles
from tests.conftest import toy_model

LLAMA, OLMO, GEMMA = NormStyle(0.0, True), NormStyle(0.0, False), NormStyle(1.0, False)
# Style and number of the norms: two in each of two layers and one at the end; Qwen3 and OLMo 2 have
# two more in each layer, for queries and keys; Gemma 3 has six in each of three.
EXPECTED = {
    "llama": (LLAMA, 5),
    "qwen3": (LLAMA, 9),
    "gemma3": (GEMMA, 19),
    "olmo2": (OLMO, 9),
    "gpt_oss": (OLMO, 5),
    "mixtral": (LLAMA, 5),
    "gpt2": (None, 0),
    "cohere2": (None, 0),
}


@contextmanager
def everything(model):
    with (
        fused_norms(model),
        fused_rotary(model),
        one_operation_angles(model),
        named_activations(model),
    ):
        yield


def everything_in(model):
    """What may be changed: the instances' own attributes, and the function in the files of their
    classes.
    """
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    functions = {home.__name__: getattr(home, "apply_rotary_pos_emb", None) for home in homes}
    return [dict(module.__dict__) for module in model.modules()], functions


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "gpt2"])
def test_a_model_with_everything_replaced_computes_the_same(name):
    model, ids = toy_model(name), torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected, before = model(ids).logits, everything_in(model)
        with everything(model):
            assert torch.equal(model(ids).logits, expected)
    assert everything_in(model) == before


def test_everything_is_put_back_after_an_exception():
    model = toy_model("gemma3")
    before, inside = everything_in(model), []

    def fail_inside():
        with everything(model):
            inside.append(everything_in(model))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_inside()
    assert inside[0][0] != before[0]
    assert inside[0][1] != before[1]
    assert everything_in(model) == before


class TestNorms:
    @pytest.mark.parametrize("name", EXPECTED)
    def test_every_one_of_a_model_is_found(self, name):
        model = toy_model(name, "eager")
        style, count = EXPECTED[name]
        with fused_norms(model) as norms:
            assert len(norms) == count
        assert {norm_style(norm) for norm in norms} == ({style} if count else set())

    def test_what_only_looks_like_one_is_left_alone(self):
        class HalfRMSNorm(torch.nn.Module):
            """Half of an RMS norm."""

            def __init__(self):
                super().__init__()
                self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

            def forward(self, x):
                return norm_plain(x, Norm(self.weight, self.eps, LLAMA)) / 2

        assert norm_style(HalfRMSNorm()) is None
        with fused_norms(torch.nn.Sequential(HalfRMSNorm())) as norms:
            assert norms == []

    @pytest.mark.parametrize("limit", [10.0, 1e4])
    def test_one_that_clamps_is_left_alone(self, limit):
        norm = toy_model("llama").model.norm
        own = type(norm)
        norm.__class__ = type(
            "Other", (own,), {"forward": lambda self, x: own.forward(self, x.clamp(-limit, limit))}
        )
        assert norm_style(norm) is None

    def test_one_with_a_forward_of_its_own_is_left_alone(self):
        model = toy_model("llama")
        norm = model.model.norm
        norm.forward = own = norm.forward  # as accelerate does
        with fused_norms(model) as norms:
            assert norm not in norms
        assert norm.forward == own

    def test_one_that_takes_other_arguments_is_left_alone(self):
        class GatedRMSNorm(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

            def forward(self, x, gate):
                return x * gate

        assert norm_style(GatedRMSNorm()) is None
        assert norm_style(torch.nn.RMSNorm(8)) is None  # its eps is None

    def test_two_settings_of_one_class_are_two_kinds(self):
        class OffsetRMSNorm(torch.nn.Module):
            def __init__(self, offset):
                super().__init__()
                self.weight, self.eps, self.offset = (
                    torch.nn.Parameter(torch.randn(8)),
                    1e-6,
                    offset,
                )

            def forward(self, x):
                return norm_plain(x, Norm(self.weight, self.eps, NormStyle(self.offset, False)))

        model, x = torch.nn.Sequential(OffsetRMSNorm(0.0), OffsetRMSNorm(1.0)), torch.randn(2, 8)
        with torch.no_grad():
            expected = model(x)
            with fused_norms(model) as norms:
                assert len(norms) == 2
                torch.testing.assert_close(model(x), expected)


class TestMLPs:
    @pytest.mark.parametrize(
        ("name", "activation"), [("llama", "silu"), ("qwen3", "silu"), ("gemma3", "gelu_tanh")]
    )
    def test_a_gated_one_is_recognised(self, name, activation):
        assert {mlp_activation(layer.mlp) for layer in toy_model(name).model.layers} == {activation}

    @pytest.mark.parametrize("name", ["gpt2", "phi3", "mixtral"])
    def test_no_other_is(self, name):
        assert {mlp_activation(module) for module in toy_model(name).modules()} == {None}

    def test_one_that_computes_something_else_is_left_alone(self):
        model = toy_model("llama")
        mlp = model.model.layers[0].mlp
        kind = type(mlp)
        mlp.__class__ = type(
            "Other", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)}
        )
        assert mlp_activation(mlp) is None

    @pytest.mark.parametrize("limit", [16.0, 1e4])
    @pytest.mark.parametrize(
        ("part", "is_lower"),
        [
            ("gate_proj", False),
            ("act_fn", False),
            ("up_proj", False),
            ("up_proj", True),
            ("down_proj", True),
        ],
    )
    def test_one_that_clamps_is_left_alone(self, part, is_lower, limit):
        """As some layers of Step 3.7, GLM-5 and DeepSeek V4 do."""
        mlp = toy_model("llama").model.layers[0].mlp
        limits = {"min": -limit} if is_lower else {"max": limit}

        def clamped(self, x):
            def run(name, x):
                output = getattr(self, name)(x)
                return output.clamp(**limits) if name == part else output

            return run("down_proj", run("act_fn", run("gate_proj", x)) * run("up_proj", x))

        mlp.__class__ = type("Clamped", (type(mlp),), {"forward": clamped})
        assert mlp_activation(mlp) is None

    def test_the_limit_of_step_3_7(self):
        name = "transformers.models.step3p7.modeling_step3p7"
        home = pytest.importorskip(name, reason="this version of transformers has no Step 3.7")
        sizes = {"hidden_size": 8, "intermediate_size": 12, "mlp_bias": False, "hidden_act": "silu"}
        config = SimpleNamespace(**sizes, swiglu_limits_shared=[0.0, 16.0])
        assert [mlp_activation(home.Step3p7MLP(config, layer)) for layer in range(2)] == [
            "silu",
            None,
        ]

    def test_recognising_draws_no_random_numbers(self):
        before = torch.get_rng_state()
        mlp_activation(toy_model("llama").model.layers[0].mlp)
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_new_hook_inside_is_called(self):
        model, ids, calls = toy_model("llama"), torch.tensor([[5, 6, 7]]), []
        with gated_mlps(model):
            handle = model.model.layers[0].mlp.gate_proj.register_forward_hook(
                lambda *args: calls.append(args)
            )
            model(ids)
            handle.remove()
        assert len(calls) == 1


class TestActivations:
    @pytest.mark.parametrize(
        ("name", "formula"), [("gelu_new", "gelu_tanh"), ("gelu_python", "gelu"), ("silu", "silu")]
    )
    def test_a_known_one_has_a_name(self, name, formula):
        model = torch.nn.Sequential(ACT2FN[name])
        with named_activations(model):
            assert model[0].forward.__self__.name == formula

    def test_a_clamped_one_has_none(self):
        model = torch.nn.Sequential(ACT2FN["gelu_10"])
        with named_activations(model):
            assert "forward" not in model[0].__dict__

    def test_each_has_limits_of_its_own(self):
        model = torch.nn.Sequential(
            ClippedGELUActivation(-torch.inf, torch.inf), ClippedGELUActivation(-10, 10)
        )
        with named_activations(model):
            assert ["forward" in module.__dict__ for module in model] == [True, False]


@pytest.mark.parametrize("limit", [10.0, 1e4])
def test_a_rotation_that_clamps_is_left_alone(limit, monkeypatch):
    model, own = toy_model("llama"), modeling_llama.apply_rotary_pos_emb

    def clamped(q, k, cos, sin):
        return own(q.clamp(-limit, limit), k, cos, sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", clamped)
    with fused_rotary(model) as files:
        assert files == []


def test_another_default_device():
    model = toy_model("llama")
    with torch.device("meta"):
        assert norm_style(model.model.norm) == LLAMA
        assert mlp_activation(model.model.layers[0].mlp) == "silu"
        with fused_rotary(model) as files:
            assert len(files) == 1
        with named_activations(toy_model("gpt2")):
            pass


class TestReplacing:
    def test_one_inside_the_other(self):
        module = torch.nn.Linear(2, 2)
        with replaced("forward", {module: lambda x: "outer"}):
            with replaced("forward", {module: lambda x: "inner"}):
                assert module(0) == "inner"
            assert module(0) == "outer"
        assert "forward" not in module.__dict__

    def test_a_value_that_another_assigned_inside_stays(self):
        module = torch.nn.Linear(2, 2)
        with replaced("forward", {module: lambda x: "ours"}):
            module.forward = lambda x: "theirs"
        assert module(0) == "theirs"


class TestSingleLinears:
    @torch.no_grad()  # with gradients a linear layer is torch's own
    def test_each_is_one_operation(self, monkeypatch):
        model, ids, calls = toy_model("llama"), torch.tensor([[5, 6, 7]]), []
        expected, own = model(ids).logits, linear.linears

        def note(x, weights, biases):
            calls.append(len(weights))
            return own(x, weights, biases)

        monkeypatch.setattr(linear, "linears", note)
        with single_linears(model) as layers:
            assert torch.equal(model(ids).logits, expected)
            # Seven in each of two layers, and the head.
            assert calls == [1] * len(layers) == [1] * 15
        calls.clear()
        with gated_mlps(model), single_linears(model):
            model(ids)
        assert calls == [1] * 11  # gate and up are one operation
        assert not any("forward" in module.__dict__ for module in model.modules())

    def test_models_that_share_a_layer(self):
        one, other = toy_model("llama"), toy_model("llama")
        other.lm_head = one.lm_head
        first, second = single_linears(one), single_linears(other)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        for model in (one, other):
            assert not any("forward" in module.__dict__ for module in model.modules())

    def test_the_input_may_be_named(self):
        module = torch.nn.Linear(2, 3)
        with single_linears(module):
            assert module(input=torch.ones(1, 2)).shape == (1, 3)
