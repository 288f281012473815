"""Linear layers of few tokens with what is before and after them; on a CPU they run in Triton's
interpreter.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import NewGELUActivation

from hf_static_kv.kernels import linear
from hf_static_kv.kernels.linear import (
    Linear,
    activate,
    activation_name,
    fused_linears,
    fused_linears_plain,
    fuses,
    linears_kernel,
)
from hf_static_kv.kernels.norm import Norm, NormStyle, norm_plain
from hf_static_kv.kernels.norm import norm as run_norm
from tests.conftest import given, settings, st, triton_module
from tests.kernels.test_step_kernels import DEVICE, DTYPES, normal

pytest.importorskip("triton", reason="triton is not installed")

from hf_static_kv.kernels import fused_linear_triton, linear_triton

LLAMA, GEMMA = NormStyle(0.0, True), NormStyle(1.0, False)


def transposed(weight):
    """The same numbers as the weight of GPT-2's Conv1D: [K, N] in memory."""
    return weight.t().contiguous().t()


def weights_of(sizes, dim, dtype, is_transposed):
    weights = [normal(size, dim, dtype=dtype, seed=i) for i, size in enumerate(sizes)]
    return [transposed(weight) for weight in weights] if is_transposed else weights


def norm_of(dim, dtype, style):
    return None if style is None else Norm(normal(dim, dtype=dtype, seed=7), 1e-5, style)


def kernel(x, weights, biases=(), *around, **options):
    return linear_triton.fused_linears_triton(x, weights, biases, *around, **options)


def exact_sums(x, weights, biases, norm):
    """norm(x) w^T + b in float64, and how far the kernel may be from it."""
    eps, dim, states = torch.finfo(torch.float32).eps, x.shape[-1], x.double()
    if norm is not None:
        states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + norm.eps)
        states = states * (norm.style.offset + norm.weight.double())
    whole = torch.cat(list(weights)).double()
    bias = (
        torch.cat(list(biases)).double()
        if biases
        else torch.zeros(len(whole), device=x.device).double()
    )
    magnitudes = states.abs() @ whole.abs().T + bias.abs()
    # Two sums of `dim` terms, of the products and of the squares, and few roundings of each term
    # and of the result.
    return states @ whole.T + bias, (2 * dim + 16) * eps * magnitudes + torch.finfo(
        x.dtype
    ).eps * magnitudes


def gated_sums(x, weights, biases, norm, activation):
    """activation(gate) * up in float64, and how far the kernel may be from it."""
    (a, a_bound), (b, b_bound) = (
        exact_sums(x, [w], [c], norm) for w, c in zip(weights, biases, strict=True)
    )
    a = linear.activate(a, activation) if activation else a
    # No activation is steeper than 1.13. It, the product and the sum are rounded; 2 eps more for
    # exp, erf and tanh.
    eps = torch.finfo(x.dtype).eps
    error = 1.2 * a_bound * (b.abs() + b_bound) + a.abs() * b_bound
    return a * b, error + eps * (4 * (a * b).abs() + b.abs() + 1)


class TestSums:
    """Sums of contiguous weights without a norm are those of `linears`, in test_step_kernels.py."""

    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize(
        ("is_transposed", "style"),
        [(False, LLAMA), (False, GEMMA), (True, None)],
        ids=["rows, llama", "rows, gemma", "transposed"],
    )
    @pytest.mark.parametrize("sizes", [(7,), (33, 6, 2), (48, 16)], ids=str)
    @pytest.mark.parametrize("dim", [48, 1100] if DEVICE == "cpu" else [48, 1024, 1100, 2100])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_against_float64(self, dtype, dim, sizes, is_transposed, style, has_bias):
        x, weights = 5 * normal(1, dim, dtype=dtype), weights_of(sizes, dim, dtype, is_transposed)
        biases, norm = (
            [normal(size, dtype=dtype) for size in sizes] if has_bias else [],
            norm_of(dim, dtype, style),
        )
        got = kernel(x, weights, biases, norm)
        expected, bound = exact_sums(x, weights, biases, norm)
        assert got.dtype == dtype
        assert got.shape == (1, sum(sizes))
        assert ((got.double() - expected).abs() <= bound).all()

    @pytest.mark.parametrize("dim", [40, 300, 700])
    @pytest.mark.parametrize("size", [50, 33, 1])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_parts_of_transposed_weights(self, dtype, size, dim):
        x, weights = normal(1, dim, dtype=dtype), weights_of((size,), dim, dtype, True)
        expected, bound = exact_sums(x, weights, [], None)
        assert ((kernel(x, weights).double() - expected).abs() <= bound).all()

    @pytest.mark.parametrize("style", [None, GEMMA], ids=["no norm", "gemma"])
    @pytest.mark.parametrize("dim", [1, 50, 51, 576, 2048])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows_that_fit_into_a_tile(self, dtype, dim, style, monkeypatch):
        monkeypatch.setattr(linear_triton, "_tiles", lambda *args: (2, 2048, 4))
        x, weights, norm = (
            normal(1, dim, dtype=dtype),
            weights_of((5, 4), dim, dtype, False),
            norm_of(dim, dtype, style),
        )
        expected, bound = exact_sums(x, weights, [], norm)
        assert ((kernel(x, weights, norm=norm).double() - expected).abs() <= bound).all()

    def test_numbers_that_are_no_pairs(self):
        """Weights that begin in the middle of an int32."""
        flat = normal(1 + 6 * 40, dtype=torch.float16)
        for weight in (flat[1:].view(6, 40), flat[1:].view(40, 6).t()):
            x = normal(1, 40, dtype=torch.float16)
            expected, bound = exact_sums(x, [weight], [], None)
            assert ((kernel(x, [weight]).double() - expected).abs() <= bound).all()

    @pytest.mark.parametrize("dim", [48, 1100])
    def test_linears_of_transposed_weights(self, dim):
        x, weights = normal(1, 1, dim), weights_of((5, 3), dim, torch.float32, True)
        expected, bound = exact_sums(x[0], weights, [], None)
        assert ((linears_kernel(x, weights, [])[0].double() - expected).abs() <= bound).all()
        assert ((linear.linears(x, weights, [])[0].double() - expected).abs() <= bound).all()

    def test_one_row_is_contiguous_and_transposed(self):
        x, weights = normal(1, 40), [normal(1, 40), transposed(normal(6, 40))]
        expected, bound = exact_sums(x, weights, [], None)
        assert ((kernel(x, weights).double() - expected).abs() <= bound).all()

    def test_an_input_with_strides(self):
        x, weights, residual = normal(40, 1).t(), [normal(6, 40)], normal(6, 2)[:, 1].view(1, 6)
        assert torch.equal(
            kernel(x, weights, residual=residual), residual + kernel(x.contiguous(), weights)
        )

    @given(
        dim=st.integers(1, 150),
        size=st.integers(1, 40),
        more=st.integers(1, 40),
        is_transposed=st.booleans(),
        is_gated=st.booleans(),
        activation=st.sampled_from(["", "relu"]),
        seed=st.integers(0, 1 << 30),
    )
    @settings(max_examples=40, deadline=None)
    def test_integers_have_no_error(
        self, dim, size, more, is_transposed, is_gated, activation, seed
    ):
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape):
            return torch.randint(-4, 5, shape, generator=generator).to(DEVICE, torch.float32)

        sizes = (size, size) if is_gated else (size, more)
        x, weights, biases = (
            integers(1, dim),
            [integers(n, dim) for n in sizes],
            [integers(n) for n in sizes],
        )
        residual = integers(1, size if is_gated else size + more)
        expected = fused_linears_plain(
            x, Linear(weights, biases, None, activation, is_gated, residual)
        )
        weights = (
            [transposed(weight) for weight in weights]
            if is_transposed and not is_gated
            else weights
        )
        assert torch.equal(
            kernel(x, weights, biases, None, activation, is_gated, residual), expected
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEpilogue:
    @pytest.mark.parametrize("activation", ["", *linear.ACTIVATIONS])
    @pytest.mark.parametrize(
        ("is_transposed", "style"), [(False, None), (False, LLAMA), (True, None)], ids=str
    )
    def test_activation_and_residual(self, dtype, is_transposed, activation, style):
        sizes, dim = (33 if is_transposed else 9, 6), 300  # more than one tile
        x, weights = (
            normal(1, 1, dim, dtype=dtype),
            [w / 8 for w in weights_of(sizes, dim, dtype, is_transposed)],
        )
        biases, norm = [normal(size, dtype=dtype) for size in sizes], norm_of(dim, dtype, style)
        residual = normal(1, 1, sum(sizes), dtype=dtype)
        y = kernel(x, weights, biases, norm)
        expected = residual + (linear.activate(y, activation) if activation else y)
        got = kernel(x, weights, biases, norm, activation, residual=residual)
        if activation in ("", "relu"):
            assert torch.equal(got, expected)
        # Two ways to compute exp, erf and tanh: 2 eps of the activation, which is no larger than y,
        # and eps where 1 + them is near 0. The activation and the sum are rounded on either side.
        eps = torch.finfo(dtype).eps
        assert (
            (got - expected).double().abs() <= 4 * eps * y.abs() + eps * expected.abs() + eps
        ).all()

    @pytest.mark.parametrize("activation", ["", *linear.ACTIVATIONS])
    @pytest.mark.parametrize("style", [None, GEMMA], ids=["no norm", "gemma"])
    @pytest.mark.parametrize("dim", [96, 2048])
    def test_gated(self, dtype, activation, style, dim):
        x, (gate, up) = normal(1, dim, dtype=dtype), weights_of((9, 9), dim, dtype, False)
        gate, norm, biases = (
            gate / 8,
            norm_of(dim, dtype, style),
            [normal(9, dtype=dtype, seed=i) for i in (1, 2)],
        )
        residual = normal(1, 9, dtype=dtype)
        got = kernel(x, [gate, up], biases, norm, activation, True, residual).double()
        expected, bound = gated_sums(x, (gate, up), biases, norm, activation)
        expected = residual.double() + expected
        assert ((got - expected).abs() <= bound + torch.finfo(dtype).eps * expected.abs()).all()


def few(x, weights, biases=(), *around, **options):
    return fused_linear_triton.fused_linears_of_few_triton(x, weights, biases, *around, **options)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("tokens", [2, 5, 8])
class TestFewTokens:
    """Tensor cores. A product of x and the norm's weight is rounded, which `exact_sums` allows: its
    bound has twice the error of rounding once.
    """

    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("style", [None, LLAMA, GEMMA], ids=["no norm", "llama", "gemma"])
    @pytest.mark.parametrize("sizes", [(7,), (33, 6, 2)], ids=str)
    @pytest.mark.parametrize("dim", [48, 1024, 1100])
    def test_against_float64(self, dtype, tokens, dim, sizes, style, has_bias):
        x, weights = 5 * normal(tokens, dim, dtype=dtype), weights_of(sizes, dim, dtype, False)
        biases = [normal(size, dtype=dtype) for size in sizes] if has_bias else []
        norm = norm_of(dim, dtype, style)
        got = few(x, weights, biases, norm)
        expected, bound = exact_sums(x, weights, biases, norm)
        assert (got.dtype, got.shape) == (dtype, (tokens, sum(sizes)))
        assert ((got.double() - expected).abs() <= bound).all()

    @pytest.mark.parametrize("activation", ["", "relu"])
    @pytest.mark.parametrize("style", [None, LLAMA], ids=["no norm", "llama"])
    @pytest.mark.parametrize("dim", [300, 4352])
    def test_activation_and_residual(self, dtype, tokens, dim, style, activation):
        x, weights = normal(tokens, dim, dtype=dtype), weights_of((9, 6), dim, dtype, False)
        biases, norm = [normal(size, dtype=dtype) for size in (9, 6)], norm_of(dim, dtype, style)
        residual = normal(tokens, 15, dtype=dtype)
        y = few(x, weights, biases, norm)
        expected = residual + (activate(y, activation) if activation else y)
        got = few(x, weights, biases, norm, activation, residual=residual)
        assert torch.equal(got, expected)

    @pytest.mark.parametrize("activation", ["", *linear.ACTIVATIONS])
    @pytest.mark.parametrize("style", [None, GEMMA], ids=["no norm", "gemma"])
    def test_gated(self, dtype, tokens, activation, style):
        dim = 300
        x, (gate, up) = normal(tokens, dim, dtype=dtype), weights_of((9, 9), dim, dtype, False)
        gate, norm = gate / 8, norm_of(dim, dtype, style)
        biases = [normal(9, dtype=dtype, seed=i) for i in (1, 2)]
        residual = normal(tokens, 9, dtype=dtype)
        got = few(x, [gate, up], biases, norm, activation, True, residual).double()
        expected, bound = gated_sums(x, (gate, up), biases, norm, activation)
        expected = residual.double() + expected
        assert ((got - expected).abs() <= bound + torch.finfo(dtype).eps * expected.abs()).all()

    def test_an_input_with_strides(self, dtype, tokens):
        x, weights = normal(40, tokens, dtype=dtype).t(), [normal(6, 40, dtype=dtype)]
        residual = normal(6, 2 * tokens, dtype=dtype)[:, ::2].t()
        expected = residual + few(x.contiguous(), weights)
        assert torch.equal(few(x, weights, residual=residual), expected)


class TestParts:
    """The sums over K of transposed weights are computed in parts, and each block of features
    counts its parts.
    """

    def test_the_counters_are_left_as_zeros(self, monkeypatch):
        counters = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        monkeypatch.setattr(linear_triton, "counters_of", lambda x, number: counters)
        # 2 blocks and 1, 5 parts.
        x, weights = (
            normal(1, 300),
            weights_of((40, 30), 300, torch.float32, True),
        )
        first = kernel(x, weights)
        assert not counters.any()
        assert torch.equal(kernel(x, weights), first)

    def test_one_part_takes_no_counters(self, monkeypatch):
        monkeypatch.delattr(linear_triton, "counters_of")
        x, weights = normal(1, 40), weights_of((6,), 40, torch.float32, True)
        expected, bound = exact_sums(x, weights, [], None)
        assert ((kernel(x, weights).double() - expected).abs() <= bound).all()

    def test_norm_and_gate_are_refused(self):
        x, weights = normal(1, 40), weights_of((6, 6), 40, torch.float32, True)
        with pytest.raises(ValueError, match="without norm and without gate"):
            kernel(x, weights, norm=norm_of(40, torch.float32, LLAMA))
        with pytest.raises(ValueError, match="without norm and without gate"):
            kernel(x, weights, activation="silu", is_gated=True)

    def test_a_pool_hands_out_each_counter_once_and_begins_again(self):
        pool = linear_triton._Pool(torch.arange(16))
        assert [pool.take(n).tolist() for n in (3, 4, 5)] == [
            [0, 1, 2],
            [4, 5, 6, 7],
            [8, 9, 10, 11, 12],
        ]
        assert pool.take(2).tolist() == [0, 1]
        assert pool.take(12).tolist() == list(range(4, 16))


class TestPlain:
    """More than few tokens, and a CPU: the operations of a model."""

    @pytest.mark.parametrize("rows", [1, 3])
    def test_the_operations_of_a_model(self, rows):
        x, weights, biases = (
            torch.randn(1, rows, 24),
            [torch.randn(8, 24) for _ in range(2)],
            [torch.randn(8)] * 2,
        )
        norm, residual = Norm(torch.randn(24), 1e-5, LLAMA), torch.randn(1, rows, 8)
        n = norm_plain(x, norm)
        parts = [F.linear(n, w, b) for w, b in zip(weights, biases, strict=True)]
        got = fused_linears(x, Linear(weights, biases, norm, "silu", True, residual))
        assert torch.equal(got, residual + F.silu(parts[0]) * parts[1])
        assert torch.equal(
            fused_linears(x, Linear(weights, biases, norm)), torch.cat(parts, dim=-1)
        )
        got = fused_linears(x, Linear(weights[:1], [], activation="relu"))
        assert torch.equal(got, F.relu(F.linear(x, weights[0])))

    @pytest.mark.parametrize("is_gated", [False, True])
    def test_the_kernel_computes_the_same(self, is_gated):
        x, weights = normal(1, 60), weights_of((8, 8), 60, torch.float32, False)
        norm, residual = norm_of(60, torch.float32, GEMMA), normal(1, 8 if is_gated else 16)
        layer = Linear(weights, [], norm, "gelu", is_gated, residual)
        torch.testing.assert_close(
            kernel(x, *layer), fused_linears_plain(x, layer), rtol=1e-4, atol=1e-4
        )

    def test_gelu_tanh_is_the_activation_of_gpt2(self, monkeypatch):
        # 8 programs, not 500.
        monkeypatch.setattr(linear_triton, "_tiles", lambda *args: (128, 128, 4))
        x = torch.linspace(-8, 8, 999, device=DEVICE)
        torch.testing.assert_close(linear.activate(x, "gelu_tanh"), NewGELUActivation()(x))
        got = kernel(torch.ones(1, 1, device=DEVICE), [x[:, None]], activation="gelu_tanh")
        torch.testing.assert_close(got[0], NewGELUActivation()(x))

    def test_relu_keeps_what_is_not_a_number(self):
        x = torch.tensor([[float("nan")]], device=DEVICE)
        assert kernel(x, [torch.ones(1, 1, device=DEVICE)], activation="relu").isnan().all()


@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU the kernel takes nothing")
class TestOnAGPU:
    def test_what_the_kernel_takes(self):
        x, weight = normal(1, 1, 32, dtype=torch.bfloat16), normal(8, 32, dtype=torch.bfloat16)
        assert fuses(x, Linear([weight, weight], []))
        assert fuses(x, Linear([transposed(weight)], []))
        assert not fuses(x, Linear([transposed(weight)] * 2, [], is_gated=True))
        assert not fuses(x, Linear([weight, transposed(weight)], []))
        assert fuses(x.expand(1, 8, 32), Linear([weight], []))
        assert not fuses(x.expand(1, 9, 32), Linear([weight], []))
        assert not fuses(x.expand(1, 2, 32), Linear([transposed(weight)], []))
        assert not fuses(x.double(), Linear([weight.double()], []))
        assert not fuses(x, Linear([weight.float()], []))

    def test_one_token_runs_in_the_kernel(self):
        x, weights = normal(1, 64), weights_of((9, 9), 64, torch.float32, False)
        norm, residual = norm_of(64, torch.float32, LLAMA), normal(1, 9)
        layer = Linear(weights, [], norm, "silu", True, residual)
        assert torch.equal(fused_linears(x, layer), kernel(x, *layer))

    @pytest.mark.parametrize("tokens", [2, 8])
    def test_few_tokens_run_in_their_kernel(self, tokens):
        dtype = torch.bfloat16
        x, weights = normal(1, tokens, 64, dtype=dtype), weights_of((9, 9), 64, dtype, False)
        norm, residual = norm_of(64, dtype, LLAMA), normal(1, tokens, 9, dtype=dtype)
        layer = Linear(weights, [], norm, "silu", True, residual)
        assert torch.equal(fused_linears(x, layer), few(x, *layer))

    def test_transposed_weights_after_a_norm_and_with_a_gate(self):
        x, weights = normal(1, 200), weights_of((9, 9), 200, torch.float32, True)
        norm = norm_of(200, torch.float32, LLAMA)
        assert torch.equal(
            fused_linears(x, Linear(weights, [], norm)), kernel(run_norm(x, norm), weights)
        )
        gate, up = (F.linear(x, weight) for weight in weights)
        got = fused_linears(x, Linear(weights, [], activation="silu", is_gated=True))
        assert torch.equal(got, F.silu(gate) * up)
        assert torch.equal(linear.gated_linear(x, *weights, "silu"), F.silu(gate) * up)

    @pytest.mark.parametrize("activation", list(linear.ACTIVATIONS))
    @pytest.mark.parametrize("size", [5, 4100])
    def test_the_gate_of_many_tokens(self, size, activation):
        """Rounded twice, as the operations of a model do."""
        gate, up = normal(3, size), normal(3, size, seed=1)
        module = triton_module("hf_static_kv.kernels.linear_triton")
        got = module.activated_product_triton(gate, up, activation)
        expected = linear.activate(gate.double(), activation) * up.double()
        # The formula of an activation rounds up to eight times; a part of it may be as large as x.
        bound = 10 * torch.finfo(torch.float32).eps * (gate * up).double().abs()
        assert ((got.double() - expected).abs() <= bound).all()

    def test_the_parts_of_a_captured_launch(self):
        """Graphs with launches that follow each other, against the same launches outside of a
        graph: the same bits.
        """
        dim, dtype = 1600, torch.bfloat16
        weights = [w / 40 for w in weights_of((dim, dim, dim), dim, dtype, True)]

        def chain(x):
            for weight in weights:
                x = kernel(x, [weight], residual=x)
            return x

        x = normal(1, dim, dtype=dtype)
        expected = [chain(x * i) for i in range(1, 5)]
        static, graphs = x.clone(), [torch.cuda.CUDAGraph() for _ in range(2)]
        outputs = []
        for graph in graphs:
            with torch.cuda.graph(graph):
                outputs.append(chain(static))
        for i in range(1, 5):
            static.copy_(x * i)
            for graph, output in zip(graphs, outputs, strict=True):
                for _ in range(20):
                    graph.replay()
                assert torch.equal(output, expected[i - 1])
        assert not linear_triton._POOLS[x.device].zeros.any()

    def test_what_it_does_not_take_is_computed_plainly(self):
        x, weights = normal(1, 40), [normal(8, 40), transposed(normal(6, 40))]
        assert torch.equal(
            fused_linears(x, Linear(weights, [])), linear.linears_plain(x, weights, [])
        )


def test_on_a_cpu_nothing_is_fused():
    assert not fuses(torch.ones(1, 4), Linear([torch.ones(2, 4)], []))


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_kernel_without_the_formula_of_an_activation_is_an_error(is_gated):
    """Not another activation in its place."""
    weights = [normal(4, 8), normal(4, 8)][: 1 + is_gated]
    with pytest.raises(Exception) as error:  # noqa: PT011  # of the compiler or of the interpreter
        linear_triton.fused_linears_triton(normal(1, 8), weights, [], None, "tanh", is_gated)
    found: BaseException | None = error.value
    while found is not None and "unknown activation" not in str(found):
        found = found.__cause__ or found.__context__  # a compiler has one for each inlined function
    assert found is not None


def test_an_unknown_activation_is_refused_in_plain_pytorch():
    message = "activation must be one of silu, gelu_tanh, gelu, relu, got 'tanh'"
    with pytest.raises(ValueError, match=message):
        activate(torch.ones(2), "tanh")


@pytest.mark.parametrize(
    ("function", "keywords", "name"),
    [
        (F.silu, {"inplace": False}, "silu"),
        (F.gelu, {}, "gelu"),
        (F.gelu, {"approximate": "none"}, "gelu"),
        (F.gelu, {"approximate": "tanh"}, "gelu_tanh"),
        (F.gelu, {"approximate": "another"}, ""),
        (F.elu, {}, ""),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_name_of_an_activation(function, keywords, name):
    assert activation_name(function, keywords) == name


class _CentredStyle(NamedTuple):
    offset: float = 0.0
    cast_first: bool = False
    is_centred: bool = True


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (
            r"activation must be empty or one of silu, gelu_tanh, gelu, relu, got 'tanh'",
            {"activation": "tanh"},
        ),
        (r"two weights of one shape, got \[\(2, 4\)\]", {"is_gated": True}),
        (
            r"two weights of one shape, got \[\(2, 4\), \(3, 4\)\]",
            {"is_gated": True, "sizes": (2, 3)},
        ),
        (r"biases \[\(3,\)\] and weights of \[2\] rows do not fit", {"biases": [torch.ones(3)]}),
        (r"x \(1, 4\) and weights \[\(2, 5\)\] do not fit", {"weights": [torch.ones(2, 5)]}),
        (r"x \(1, 4\) and norm \(5,\) do not fit", {"norm": Norm(torch.ones(5), 1e-5, LLAMA)}),
        (r"takes an RMS norm without bias", {"norm": Norm(torch.ones(4), 1e-5, _CentredStyle())}),
        (
            r"residual must be as the output, \(1, 2\) torch.float32, got \(1, 3\)",
            {"residual": torch.ones(1, 3)},
        ),
        (r"got \(1, 2\) torch.float16", {"residual": torch.ones(1, 2).half()}),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(message, options):
    weights, biases = (
        [torch.ones(size, 4) for size in options.pop("sizes", (2,))],
        options.pop("biases", []),
    )
    with pytest.raises(ValueError, match=message):
        fused_linears(torch.ones(1, 4), Linear(options.pop("weights", weights), biases, **options))
