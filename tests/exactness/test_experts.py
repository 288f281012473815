"""Mixtures of experts inside `exact`: tokens that share an expert, ties of the router, what the
kernel needs.
"""

import pytest
import torch

from hf_static_kv import exact
from hf_static_kv.exactness.experts import EXACT_EXPERTS_NAME
from hf_static_kv.exactness.invariant_operations import invariant_operation
from hf_static_kv.kernels.invariant_linear import expert_linear
from tests.conftest import given, settings, st, toy_model, triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss"]
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no bfloat16


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def chosen_experts(tokens, experts, seed=0):
    return torch.randint(0, experts, (tokens,), generator=torch.Generator().manual_seed(seed)).to(
        DEVICE
    )


def kernel(x, weight, experts, bias=None):
    return triton_module("hf_static_kv.kernels.invariant_linear_triton").expert_linear_triton(
        x, weight, experts, bias
    )


def plain(x, weight, experts, bias=None):
    return expert_linear(
        x.cpu(), weight.cpu(), experts.cpu(), None if bias is None else bias.cpu()
    ).to(DEVICE)


@pytest.mark.parametrize("implementation", [kernel, plain], ids=["triton", "plain"])
class TestExpertLinear:
    @pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
    @pytest.mark.parametrize("transposed", [False, True])  # as gpt-oss keeps its weights
    # The last one is one token more than few. In float32 the interpreter runs a program for every
    # token.
    @pytest.mark.parametrize(("tokens", "dim", "size"), [(1, 48, 7), (9, 300, 20), (65, 64, 70)])
    def test_against_float64(self, implementation, tokens, dim, size, transposed, dtype):
        x, bias, experts = (
            normal(tokens, dim, dtype=dtype),
            normal(5, size, dtype=dtype),
            chosen_experts(tokens, 5),
        )
        weight = (
            normal(5, dim, size, dtype=dtype).mT
            if transposed
            else normal(5, size, dim, dtype=dtype)
        )
        products = torch.einsum("mk,mnk->mnk", x.double(), weight[experts].double())
        expected = products.sum(-1) + bias[experts].double()
        magnitudes = products.abs().sum(-1) + bias[experts].double().abs()
        bound = (
            (dim + 2) * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
        ) * magnitudes
        got = implementation(x, weight, experts, bias)
        assert got.dtype == dtype
        assert ((got.double() - expected).abs() <= bound).all()

    def test_a_token_alone_has_the_same_bits(self, implementation):
        x, weight, experts = normal(20, 90), normal(4, 30, 90, seed=1), chosen_experts(20, 4)
        whole = implementation(x, weight, experts)
        for i in (0, 7, 19):
            assert torch.equal(
                implementation(x[i : i + 1], weight, experts[i : i + 1]), whole[i : i + 1]
            )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="tensor cores and their order of summing are a GPU's")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_many_tokens_and_few_have_the_same_bits(dtype, transposed):
    """Sorted by their expert, or each alone."""
    x, experts = normal(1500, 768, dtype=dtype), chosen_experts(1500, 6)
    weight = normal(6, 768, 520, dtype=dtype).mT if transposed else normal(6, 520, 768, dtype=dtype)
    many = kernel(x, weight, experts)
    for tokens in (slice(0, 1), slice(77, 95), slice(1000, 1064), slice(0, 65), slice(200, 900)):
        assert torch.equal(kernel(x[tokens], weight, experts[tokens]), many[tokens])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tiles_hold_every_token_once_and_one_expert_each(data):
    num_experts, tile = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 3, 16]))
    experts = torch.tensor(
        sorted(data.draw(st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=80)))
    )
    module = triton_module("hf_static_kv.kernels.invariant_linear_triton")
    tiles = module.tiles_of_groups(experts, num_experts, tile).tolist()
    held = [token for begin, end, _ in tiles for token in range(begin, end)]
    assert sorted(held) == list(range(len(experts)))
    assert all(end - begin <= tile for begin, end, _ in tiles)
    assert all(
        experts[token] == expert for begin, end, expert in tiles for token in range(begin, end)
    )


@pytest.mark.parametrize("name", EXPERTS)
def test_logits_are_those_of_the_model_up_to_rounding(name):
    model, ids = toy_model(name, "eager"), torch.arange(5, 45).view(2, 20)
    with torch.no_grad():
        expected = model(ids).logits
        with exact(model):
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EXPERTS)
def test_the_implementation_is_put_back(name):
    model = toy_model(name, "eager")
    before = model.get_experts_implementation()
    with exact(model):
        assert set(model.get_experts_implementation().values()) == {EXACT_EXPERTS_NAME}
    assert model.get_experts_implementation() == before
    with pytest.raises(RuntimeError, match="twice"), exact(model), exact(model):
        pass
    assert model.get_experts_implementation() == before


def test_of_equal_scores_the_first_ones_are_taken():
    """Which ones torch takes depends on the shape: two tokens would choose other experts alone and
    together.
    """
    scores = torch.tensor([[0.5, 0.25, 0.5, 0.5], [0.1, 0.2, 0.2, 0.0]])
    values, index = invariant_operation(torch.ops.aten.topk.default)(scores, 2)
    assert index.tolist() == [[0, 2], [1, 2]]
    assert torch.equal(values, scores.gather(1, index))


def test_shapes_that_do_not_fit():
    with pytest.raises(
        ValueError, match=r"x \(2, 3\), weight \(4, 5, 6\) and experts \(2,\) do not fit"
    ):
        expert_linear(torch.ones(2, 3), torch.ones(4, 5, 6), torch.zeros(2, dtype=torch.long), None)


def test_expert_parallel_models_are_refused():
    model = toy_model("mixtral", "eager")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with exact(model), pytest.raises(ValueError, match="expert parallel"):
        model(torch.ones(1, 3, dtype=torch.long))


class LikeParamWrapper(torch.nn.Module):
    """As PEFT wraps a module of which it adapts a parameter."""

    parameter_name, active_adapters, disable_adapters, merged = (
        "down_proj",
        ["default"],
        False,
        False,
    )

    def __init__(self, experts):
        super().__init__()
        self.base_layer, self.lora_A = (
            experts,
            torch.nn.ModuleDict({"default": torch.nn.Linear(2, 2)}),
        )

    def forward(self, *args):
        return self.base_layer(*args)


def test_an_adapter_of_stacked_experts_is_refused_while_it_is_in_use():
    model, ids = toy_model("mixtral", "eager"), torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad(), exact(model):
        expected = model(ids).logits
    adapter = model.model.layers[1].mlp.experts = LikeParamWrapper(
        model.model.layers[1].mlp.experts
    )
    with torch.no_grad(), exact(model):
        with pytest.raises(
            ValueError,
            match=r"^model\.layers\.1\.mlp\.experts has a LoRA.*down_proj.* Merge the adapter",
        ):
            model(ids)
        for name, value in {
            "merged": True,
            "disable_adapters": True,
            "active_adapters": ["another"],
        }.items():
            before = getattr(adapter, name)
            setattr(adapter, name, value)
            assert torch.equal(model(ids).logits, expected)
            setattr(adapter, name, before)
