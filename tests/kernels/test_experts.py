"""The kernels of mixtures of experts against their formulas; on a CPU they run in Triton's
interpreter.
"""

from unittest.mock import patch

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_static_kv.kernels import experts as operations
from hf_static_kv.kernels.experts import RouteStyle, experts, experts_plain, route, route_plain
from hf_static_kv.kernels.linear import ACTIVATIONS, activate
from tests.conftest import given, settings, st, triton_module

experts_triton = triton_module("hf_static_kv.kernels.experts_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16 as integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
STYLES = [
    RouteStyle(*fields)
    for fields in ((True, True, False), (True, False, True), (False, False, False))
]


def normal(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def chosen_experts(tokens, k, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, num_experts, generator=generator).topk(k).indices.to(DEVICE)


def mixture(tokens, k, num_experts, dim, inner, dtype=torch.float32, seed=0):
    """x, index, weights, gate_up, down; after gate_up and down there is NaN, which no kernel may
    read.
    """
    x, weights = (
        normal(tokens, dim, dtype=dtype, seed=seed),
        normal(tokens, k, seed=seed).softmax(-1).to(dtype),
    )
    gate_up = normal(num_experts + 1, 2 * inner, dim, dtype=dtype, scale=dim**-0.5, seed=seed)
    down = normal(num_experts + 1, dim, inner, dtype=dtype, scale=inner**-0.5, seed=seed)
    gate_up[-1], down[-1] = float("nan"), float("nan")
    gate_up, down = gate_up[:-1], down[:-1]
    return x, chosen_experts(tokens, k, num_experts, seed), weights, gate_up, down


def assert_close_to_float64(got, x, index, weights, gate_up, down, activation):
    """Sums of K products in float32, in any order, off by K + 2 roundings; each rounding to the
    dtype is eps / 2.

    No activation is steeper than 1.13 (gelu) or larger than its argument; its exp or erf is off by
    a few eps of float32, and 1 + them may be near 0.
    """
    eps, eps32 = torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps
    pairs, chosen = x.repeat_interleave(index.shape[1], 0).double(), index.flatten()
    wide, narrow = gate_up[chosen].double(), down[chosen].double()
    sums = torch.einsum("pnk,pk->pn", wide, pairs)
    sums_off = (x.shape[1] + 2) * eps32 * torch.einsum(
        "pnk,pk->pn", wide.abs(), pairs.abs()
    ) + eps * sums.abs()
    (gate, up), (gate_off, up_off) = sums.chunk(2, -1), sums_off.chunk(2, -1)
    hidden = activate(gate, activation) * up
    hidden_off = 1.2 * gate_off * (up.abs() + up_off) + gate.abs() * up_off
    hidden_off += (eps + 8 * eps32) * (gate.abs() + gate_off) * (up.abs() + up_off)
    output = torch.einsum("pnk,pk->pn", narrow, hidden)
    largest = torch.einsum("pnk,pk->pn", narrow.abs(), hidden.abs() + hidden_off)
    output_off = (
        torch.einsum("pnk,pk->pn", narrow.abs(), hidden_off)
        + ((down.shape[2] + 2) * eps32 + eps) * largest
    )
    scale = weights.flatten().double()[:, None]
    expected = (output * scale).view(*index.shape, -1).sum(1)
    bound = ((output_off + 2 * eps * largest) * scale.abs()).view(*index.shape, -1).sum(1)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    assert ((got.double() - expected).abs() <= bound + torch.finfo(x.dtype).tiny).all()


class TestExperts:
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_against_float64(self, dtype, activation):
        parts = mixture(2, 3, 5, 20, 9, dtype=dtype)
        assert_close_to_float64(
            experts_triton.experts_triton(*parts, activation), *parts, activation
        )

    @pytest.mark.skipif(DEVICE == "cpu", reason="many programs: the interpreter takes minutes")
    @pytest.mark.parametrize(
        "sizes", [(8, 16, 2048, 768), (2, 8, 4096, 3000), (10, 16, 1000, 96)], ids=str
    )
    @pytest.mark.parametrize("tokens", [1, 5])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_sizes_of_models(self, dtype, tokens, sizes):
        parts = mixture(tokens, *sizes, dtype=dtype)
        assert_close_to_float64(experts(*parts, "silu"), *parts, "silu")

    @given(
        sizes=st.tuples(
            st.integers(1, 3),
            st.integers(1, 5),
            st.integers(5, 9),
            st.integers(1, 40),
            st.integers(1, 20),
        ),
        gated=st.sampled_from([(1, 16, 1), (2, 8, 2), (8, 32, 1)]),
        down=st.sampled_from([4, 8]),
        seed=st.integers(0, 1 << 20),
    )
    @settings(max_examples=12, deadline=None)
    def test_any_sizes_and_tiles(self, sizes, gated, down, seed):
        """Several tiles, of which the last is full or not; tokens that share experts."""
        parts, tiles = mixture(*sizes, seed=seed), experts_triton._down_tiles
        with (
            patch.object(experts_triton, "_gated_tiles", lambda dim: gated),
            patch.object(experts_triton, "_down_tiles", lambda k, dim: (tiles(k, dim)[0], down, 1)),
        ):
            assert_close_to_float64(experts_triton.experts_triton(*parts, "silu"), *parts, "silu")

    @pytest.mark.parametrize("weights_dtype", [torch.float16, torch.float32], ids=str)
    def test_outputs_are_rounded_where_torch_rounds_them(self, weights_dtype):
        """Small integers, and gates so large that silu is the identity: only the weights make a
        rounding.
        """
        generator = torch.Generator().manual_seed(0)
        x, gate_up = torch.zeros(2, 16), torch.zeros(4, 16, 16)
        x[:, :2], gate_up[:, :8, 0] = (
            torch.tensor([1, 2]),
            torch.randint(30, 40, (4, 8), generator=generator).float(),
        )
        gate_up[:, 8:, 1] = torch.randint(-2, 3, (4, 8), generator=generator).float()
        down = torch.randint(-2, 3, (4, 16, 8), generator=generator)
        x, gate_up, down = (tensor.to(DEVICE, torch.float16) for tensor in (x, gate_up, down))
        weights = normal(2, 2).softmax(-1).to(weights_dtype)
        parts = x, chosen_experts(2, 2, 4), weights, gate_up, down
        assert torch.equal(
            experts_triton.experts_triton(*parts, "silu"), experts_plain(*parts, "silu")
        )

    def test_a_token_does_not_depend_on_the_others(self):
        x, index, weights, *stacked = mixture(4, 3, 6, 20, 12, dtype=torch.float16)
        together = experts_triton.experts_triton(x, index, weights, *stacked, "silu")
        alone = experts_triton.experts_triton(x[3:4], index[3:4], weights[3:4], *stacked, "silu")
        assert torch.equal(alone, together[3:4])

    def test_inputs_with_gaps_and_an_int32_index(self):
        x, index, weights, *stacked = mixture(3, 2, 4, 20, 12)
        expected = experts_triton.experts_triton(x, index, weights, *stacked, "silu")
        gaps = (
            torch.stack([x, x], -1)[..., 0],
            index.int().t().contiguous().t(),
            weights.t().contiguous().t(),
        )
        assert torch.equal(experts_triton.experts_triton(*gaps, *stacked, "silu"), expected)

    def test_nothing_outside_of_the_weights_is_read(self):
        """An expert of another device: transformers gives it the number E and the weight 0."""
        x, index, weights, *stacked = mixture(2, 2, 4, 20, 12)
        index[:, 1], weights[:, 1] = 4, 0
        got = experts_triton.experts_triton(x, index, weights, *stacked, "silu")
        alone = experts_triton.experts_triton(x, index[:, :1], weights[:, :1], *stacked, "silu")
        torch.testing.assert_close(got, alone)

    def test_the_operation(self):
        parts = mixture(2, 2, 4, 16, 8)
        torch.testing.assert_close(experts(*parts, "gelu"), experts_plain(*parts, "gelu"))
        many = mixture(operations.MAX_PAIRS, 2, 4, 16, 8)
        assert not operations.is_supported(many[0], many[1], *many[3:])
        assert torch.equal(experts(*many, "silu"), experts_plain(*many, "silu"))

    def test_what_does_not_fit_is_refused(self):
        x, index, weights, gate_up, down = mixture(2, 2, 4, 16, 8)
        with pytest.raises(
            ValueError, match="activation must be one of silu, gelu_tanh, gelu, relu, got 'tanh'"
        ):
            experts(x, index, weights, gate_up, down, "tanh")
        with pytest.raises(
            ValueError, match=r"index \(1, 2\) and weights \(2, 2\) do not fit: \[T, H\]"
        ):
            experts(x, index[:1], weights, gate_up, down, "silu")
        with pytest.raises(
            ValueError, match=r"gate_up \(4, 15, 16\) and down \(4, 16, 8\) do not fit"
        ):
            experts(x, index, weights, gate_up[:, 1:], down, "silu")
        with pytest.raises(
            ValueError, match=r"x \(2, 15\), gate_up \(4, 16, 16\) and down \(4, 16, 8\) do not fit"
        ):
            experts(x[:, 1:], index, weights, gate_up, down, "silu")
        with pytest.raises(
            ValueError, match=r"must have one dtype, and weights that or float32, got torch.float16"
        ):
            experts(x.half(), index, weights, gate_up, down, "silu")
        with pytest.raises(ValueError, match=r"index must be int64 or int32, got torch.float32"):
            experts(x, index.float(), weights, gate_up, down, "silu")


class TestRoute:
    @given(
        tokens=st.integers(1, 3),
        num_experts=st.sampled_from([1, 3, 8, 60, 128, 512]),
        k=st.integers(1, 10),
        style=st.sampled_from(STYLES),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 1 << 20),
    )
    @settings(max_examples=40, deadline=None)
    def test_the_largest_and_their_weights(self, tokens, num_experts, k, style, dtype, seed):
        k = min(k, num_experts)
        logits = normal(tokens, num_experts, dtype=dtype, scale=3, seed=seed)
        (weights, index), (plain, _) = (
            experts_triton.route_triton(logits, k, style),
            route_plain(logits, k, style),
        )
        assert (weights.shape, weights.dtype, index.dtype) == (
            plain.shape,
            plain.dtype,
            torch.int64,
        )
        # Logits of few bits are often equal: then any of these experts may be taken.
        assert torch.equal(logits.gather(1, index), logits.topk(k).values)
        assert all(len(set(row)) == k for row in index.tolist())
        # Two ways to compute exp, the difference before it, sums of E numbers and two divisions.
        bound = (num_experts + 40) * torch.finfo(torch.float32).eps + 2 * torch.finfo(
            plain.dtype
        ).eps
        assert (
            (weights - plain).abs().double()
            <= bound * plain.double() + torch.finfo(plain.dtype).tiny
        ).all()

    def test_equal_logits(self):
        logits = torch.tensor(
            [[1.0, 2.0, 2.0, -1.0, 2.0], [0.0, -0.0, 0.0, 0.0, 0.0]], device=DEVICE
        )
        weights, index = experts_triton.route_triton(logits, 2, STYLES[0])
        assert index.tolist() == [[1, 2], [0, 2]]
        torch.testing.assert_close(weights, torch.full_like(weights, 0.5))

    def test_infinite_logits(self):
        logits = torch.tensor([[-float("inf"), 1.0, -float("inf")]], device=DEVICE)
        for style in STYLES:
            weights, index = experts_triton.route_triton(logits, 2, style)
            assert index.tolist() == [[1, 0]]
            assert weights.tolist() == [[1, 0]]

    @pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, in the interpreter
    @pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
    def test_nan_chooses_experts_that_exist(self, nan):
        logits = torch.full((1, 5), nan, device=DEVICE)
        for style in STYLES:
            weights, index = experts_triton.route_triton(logits, 3, style)
            assert weights.isnan().all()
            assert index.min() >= 0
            assert index.max() < 5

    def test_logits_with_gaps(self):
        logits = normal(3, 7)
        expected = experts_triton.route_triton(logits, 2, STYLES[0])
        for gaps in (normal(3, 9)[:, :7].copy_(logits), logits.t().contiguous().t()):
            got = experts_triton.route_triton(gaps, 2, STYLES[0])
            assert all(map(torch.equal, got, expected))

    def test_the_operation(self):
        logits = normal(2, 8)
        for style in STYLES:
            torch.testing.assert_close(route(logits, 3, style), route_plain(logits, 3, style))

    @pytest.mark.parametrize("k", [0, 9])
    def test_what_does_not_fit_is_refused(self, k):
        with pytest.raises(
            ValueError, match=rf"logits \(2, 8\) and k = {k} do not fit: \[T, E\] and 1 to E"
        ):
            route(normal(2, 8), k, STYLES[0])


def test_a_function_mode_sees_one_call_each():
    class Record(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    parts, logits, calls = mixture(2, 2, 4, 16, 8), normal(2, 4), []
    with Record():
        experts(*parts, "silu")
        route(logits, 2, STYLES[0])
    assert [func for func in calls if func in (experts, route)] == [experts, route]
    assert calls[0] is experts
