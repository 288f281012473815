"""Experts and routers are found by what they compute, replaced inside a context, and restored."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Linear, Module, Parameter
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv.kernels.experts import MAX_PAIRS, RouteStyle, experts, experts_plain, route
from hf_static_kv.kernels.linear import ACTIVATIONS, activate
from hf_static_kv.program.experts import (
    RouterStyle,
    experts_activation,
    one_operation_experts,
    one_operation_routers,
    router_style,
)
from tests.conftest import tiny_model
from tests.fuzz.models import at_least

NORMALIZED, PLAIN = RouteStyle(True, True, False), RouteStyle(True, False, False)
IN_FLOAT32, OF_THE_LARGEST = RouteStyle(True, True, True), RouteStyle(False, False, False)
# The activation of the experts and the style of the router, None where they are something else.
EXPECTED = {
    "qwen3_moe": ("silu", RouterStyle(2, PLAIN, False)),
    "qwen2_moe": ("silu", RouterStyle(2, PLAIN, False)),
    "mixtral": ("silu", RouterStyle(2, IN_FLOAT32, False)),
    "olmoe": ("silu", RouterStyle(2, PLAIN, False)),
    "qwen3_next": ("silu", RouterStyle(2, NORMALIZED, False)),
    "gpt_oss": (None, RouterStyle(2, OF_THE_LARGEST, False)),  # biases, a clamp, weights transposed
    "granitemoe": ("silu", RouterStyle(2, OF_THE_LARGEST, True)),
    "phimoe": ("silu", None),  # a threshold between the experts
    "deepseek_v3": ("silu", None),  # sigmoid, a correction, groups
    "glm4_moe": ("silu", None),
    "ernie4_5_moe": ("silu", None),  # a correction that is added to the probabilities
    "llama": (None, None),
}
OWN = {
    "qwen3_next": {"num_hidden_layers": 4},  # the fourth has attention
    "deepseek_v3": {
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
NAMES = [
    name
    for name in EXPECTED
    if name in CONFIG_MAPPING and (name != "granitemoe" or at_least("5.22"))
]
TOKENS = torch.tensor([[5], [6]])


def found_in(model):
    """The activations and styles in a model, without those of modules that are neither."""
    activations, styles = (
        {trial(m) for m in model.modules()} for trial in (experts_activation, router_style)
    )
    return activations - {None} or {None}, styles - {None} or {None}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_in_a_model(name):
    activation, style = EXPECTED[name]
    assert found_in(tiny_model(name, **OWN.get(name, {}))) == ({activation}, {style})


class Count(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += [func] if func in (experts, route) else []
        return func(*args, **(kwargs or {}))


@contextmanager
def both(model):
    with (
        one_operation_experts(model) as found,
        one_operation_routers(model) as routers,
        Count() as count,
    ):
        yield found, routers, count.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_computes_the_same(name, dtype):
    """On a CPU each operation is the plain twin of its kernels: the bits are those of `batched_mm`."""
    model = tiny_model(name, **OWN.get(name, {})).to(dtype)
    if name != "llama":
        model.set_experts_implementation("batched_mm")
    with torch.no_grad():
        expected, before = (
            model(TOKENS).logits,
            [dict(module.__dict__) for module in model.modules()],
        )
        with both(model) as (found, routers, calls):
            assert torch.equal(model(TOKENS).logits, expected)
    activation, style = EXPECTED[name]
    assert (calls.count(experts), calls.count(route)) == (len(found), len(routers))
    assert (len(found) > 0, len(routers) > 0) == (activation is not None, style is not None)
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu"])
def test_every_implementation_of_transformers(activation, implementation):
    model = tiny_model("qwen3_moe", hidden_act=activation)
    model.set_experts_implementation(implementation)
    known = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
    assert found_in(model)[0] == {known.get(activation)}


@pytest.mark.parametrize("normalize", [False, True])
def test_the_weights_are_normalized_or_not(normalize):
    for module in tiny_model(
        "qwen3_moe", norm_topk_prob=normalize, num_experts_per_tok=3, num_experts=9
    ).modules():
        if "Router" in type(module).__name__:
            assert router_style(module) == RouterStyle(3, RouteStyle(True, normalize, False), False)


class Experts(Module):
    """Experts of four, in the manner of transformers."""

    def __init__(self, activation="silu"):
        super().__init__()
        self.gate_up_proj, self.down_proj = (
            Parameter(torch.randn(4, 12, 8)),
            Parameter(torch.randn(4, 8, 6)),
        )
        self.activation = activation

    def gate(self, gate, up):
        return activate(gate, self.activation) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        output = torch.zeros_like(hidden_states)
        for t, j in torch.ones_like(top_k_index).nonzero().tolist():
            e = top_k_index[t, j]
            hidden = self.gate(
                *F.linear(hidden_states[t : t + 1], self.gate_up_proj[e]).chunk(2, dim=-1)
            )
            output[t] += F.linear(hidden, self.down_proj[e])[0] * top_k_weights[t, j]
        return output


class Clamped(Experts):
    def gate(self, gate, up):
        return super().gate(gate.clamp(max=7), up)


class ClampedUp(Experts):
    def gate(self, gate, up):
        return super().gate(gate, up.clamp(-100, 100))


class PlusOne(Experts):
    def gate(self, gate, up):
        return super().gate(gate, up + 1)


class UpFirst(Experts):
    def gate(self, gate, up):
        return super().gate(up, gate)


class RoundedOnce(Experts):
    def gate(self, gate, up):
        return super().gate(gate.float(), up.float()).to(gate.dtype)


class Scaled(Experts):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights * 0.5)


class Shared(Experts):
    def __init__(self):
        super().__init__()
        self.shared = Linear(8, 8)


class Biased(Experts):
    def __init__(self):
        super().__init__()
        self.gate_up_proj_bias = Parameter(torch.zeros(4, 12))


class Corrected(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("correction", torch.zeros(4))


class OtherArguments(Experts):
    def forward(self, hidden_states, router_indices, routing_weights):
        return super().forward(hidden_states, router_indices, routing_weights)


class Quantised(Parameter):
    pass


def with_hook():
    module = Experts()
    module.register_forward_hook(lambda *args: None)
    return module


def with_forward():
    module = Experts()
    module.forward = module.forward  # as accelerate does
    return module


def with_quantised_weight():
    module = Experts()
    module.down_proj = Quantised(module.down_proj.detach())
    return module


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts_of_any_class(activation):
    assert experts_activation(Experts(activation)) == activation


OTHERS = [
    Clamped,
    ClampedUp,
    PlusOne,
    UpFirst,
    RoundedOnce,
    Scaled,
    Shared,
    Biased,
    Corrected,
    OtherArguments,
]


@pytest.mark.parametrize("make", [*OTHERS, with_hook, with_forward, with_quantised_weight])
def test_what_only_looks_like_experts(make):
    module = make()
    assert experts_activation(module) is None
    with one_operation_experts(module) as found:
        assert found == []


class Router(Module):
    """A router in the manner of transformers."""

    def __init__(self):
        super().__init__()
        self.weight, self.top_k = Parameter(torch.randn(6, 8)), 2

    def logits(self, hidden_states):
        return F.linear(hidden_states, self.weight)

    def probabilities(self, logits):
        return logits.float().softmax(-1)

    def forward(self, hidden_states):
        logits = self.logits(hidden_states)
        weights, index = self.probabilities(logits).topk(self.top_k)
        return logits, weights, index


class Jitter(Router):
    def logits(self, hidden_states):
        return super().logits(hidden_states * torch.empty_like(hidden_states).uniform_(0.99, 1.01))


class Sigmoid(Router):
    def probabilities(self, logits):
        return logits.float().sigmoid()


class InDtype(Router):
    def probabilities(self, logits):
        return logits.softmax(-1)


class Softcap(Router):
    def logits(self, hidden_states):
        return super().logits(hidden_states).clamp(-20, 20)


class Groups(Router):
    def probabilities(self, logits):
        p = super().probabilities(logits).view(-1, 2, 3)
        return torch.where(p.amax(-1, keepdim=True) == p.amax((1, 2), keepdim=True), p, 0).flatten(
            1
        )


class InFloat32(Router):
    def logits(self, hidden_states):
        return F.linear(hidden_states.float(), self.weight.float())


class Doubled(Router):
    def forward(self, hidden_states):
        logits, weights, index = super().forward(hidden_states)
        return logits, weights * 2, index


class OtherOrder(Router):
    def forward(self, hidden_states):
        return super().forward(hidden_states)[::-1]


class AsList(Router):
    def forward(self, hidden_states):
        return list(super().forward(hidden_states))


class CorrectedRouter(Router):
    def __init__(self):
        super().__init__()
        self.register_buffer("correction", torch.zeros(6))


def test_a_router_of_any_class():
    assert router_style(Router()) == RouterStyle(2, RouteStyle(True, False, True), False)


OTHER_ROUTERS = [
    Jitter,
    Sigmoid,
    InDtype,
    Softcap,
    Groups,
    InFloat32,
    Doubled,
    OtherOrder,
    AsList,
    CorrectedRouter,
]


@pytest.mark.parametrize("make", OTHER_ROUTERS)
def test_what_only_looks_like_a_router(make):
    module, state = make(), torch.get_rng_state()
    assert router_style(module) is None
    assert torch.equal(torch.get_rng_state(), state)
    with one_operation_routers(module) as found:
        assert found == []


def test_one_trial_for_equal_modules_and_none_for_a_hooked_one(monkeypatch):
    trials = []
    layers = torch.nn.ModuleList([Experts(), Experts("gelu"), Experts(), with_hook()])

    def count(module):
        trials.append(module)
        return experts_activation(module)

    monkeypatch.setattr("hf_static_kv.program.experts.experts_activation", count)
    with one_operation_experts(layers) as found:
        assert found == list(layers[:3])
        names = [module.forward.__self__.activation for module in found]
    assert trials == list(layers[:2])
    assert names == ["silu", "gelu", "silu"]


def test_a_trial_leaves_the_module_as_it_is():
    for module, trial in ((Experts(), experts_activation), (Router(), router_style)):
        before, state = (
            {name: tensor.clone() for name, tensor in module.state_dict().items()},
            torch.get_rng_state(),
        )
        assert trial(module) is not None
        assert torch.equal(torch.get_rng_state(), state)
        assert all(
            torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items()
        )


def test_the_modules_have_their_own_forward_back_after_an_exception():
    model = torch.nn.ModuleList([Experts(), Router()])
    inside = []

    def fail_inside():
        with both(model) as (found, routers, _):
            inside.extend("forward" in module.__dict__ for module in (*found, *routers))
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_inside()
    assert inside == [True, True]
    assert not any("forward" in module.__dict__ for module in model)


def test_many_tokens_go_to_the_model_itself():
    module = Experts()
    x, index = torch.randn(MAX_PAIRS, 8), torch.randint(4, (MAX_PAIRS, 2))
    weights = torch.rand(index.shape)
    with torch.no_grad(), both(module) as (_, _, calls):
        few, many = module(x[:3], index[:3], weights[:3]), module(x, index, weights)
    assert calls == [experts]
    expected = experts_plain(x, index, weights, module.gate_up_proj, module.down_proj, "silu")
    torch.testing.assert_close(few, expected[:3])
    torch.testing.assert_close(many, expected)


def test_an_adapter_that_is_added_later_counts():
    class Double(Module):
        def forward(self, weight):
            return 2 * weight

    module, router, index = Experts(), Router(), torch.tensor([[1, 2]])
    x, weights = torch.randn(1, 8), torch.ones(1, 2)
    with torch.no_grad(), both(torch.nn.ModuleList([module, router])) as (_, _, calls):
        before, logits = module(x, index, weights), router(x)[0]
        parametrize.register_parametrization(module, "down_proj", Double())
        parametrize.register_parametrization(router, "weight", Double())
        after = module(x, index, weights), router(x)[0]
    assert calls == [experts, route]
    torch.testing.assert_close(after, (2 * before, 2 * logits))


def test_a_router_may_be_given_batch_rows():
    router, x = Router(), torch.randn(2, 3, 8)
    expected = router(x)
    with both(router) as (_, _, calls):
        assert all(map(torch.equal, router(x), expected))
    assert calls == []
