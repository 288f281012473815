"""The small kernels of a captured step, each against its formula; on a CPU they run in Triton's
interpreter.
"""

import pytest
import torch
import torch.nn.functional as F

from hf_static_kv.kernels import linear
from hf_static_kv.kernels.linear import linears_kernel
from hf_static_kv.kernels.step_state import GreedyState, advance_plain, select_greedy_plain
from tests.conftest import given, settings, st

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl

from hf_static_kv.kernels import linear_triton, step_state_triton
from hf_static_kv.kernels.launch_triton import compile_only, launch
from hf_static_kv.kernels.step_state_triton import advance_triton, select_greedy_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16 as integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def error_bound(x, weight):
    """A sum of K products in float32, in any order, then one rounding to the dtype."""
    magnitudes = x.double().abs() @ weight.double().abs().T
    return (x.shape[-1] + 2) * torch.finfo(torch.float32).eps * magnitudes + torch.finfo(
        x.dtype
    ).eps * magnitudes


class TestLinears:
    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("sizes", [(7,), (5, 3), (33, 6, 2)], ids=str)
    @pytest.mark.parametrize("dim", [48, 1024, 1100])
    @pytest.mark.parametrize("rows", [1, 3, 70])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_against_float64(self, dtype, rows, dim, sizes, has_bias):
        x, weights = (
            normal(rows, dim, dtype=dtype),
            [normal(size, dim, dtype=dtype) for size in sizes],
        )
        biases = [normal(size, dtype=dtype) for size in sizes] if has_bias else []
        got = linears_kernel(x, weights, biases)
        whole, bias = torch.cat(weights), torch.cat(biases).double() if has_bias else 0
        assert got.dtype == dtype
        assert got.shape == (rows, sum(sizes))
        bound = error_bound(x, whole) + torch.finfo(dtype).eps * (abs(bias) if has_bias else 0)
        assert ((got.double() - (x.double() @ whole.double().T + bias)).abs() <= bound).all()

    @pytest.mark.parametrize(("size", "dim"), [(8200, 64), (20, 4100)])
    def test_the_tiles_of_large_weights(self, size, dim, monkeypatch):
        tiles = linear_triton._tiles(size, dim, False)
        monkeypatch.setattr(linear_triton, "_tiles", lambda *args: tiles)
        size = 20 if DEVICE == "cpu" else size  # the interpreter takes 10 ms for a program
        x, weight = normal(1, dim), normal(size, dim)
        got = linears_kernel(x, [weight], [])
        assert (
            (got.double() - x.double() @ weight.double().T).abs() <= error_bound(x, weight)
        ).all()

    @pytest.mark.parametrize("rows", [1, 3])
    def test_weights_of_which_one_is_transposed(self, rows):
        x, weights = normal(rows, 40), [normal(8, 40), normal(40, 6).t()]
        torch.testing.assert_close(
            linear.linears(x, weights, []), linear.linears_plain(x, weights, [])
        )
        if rows > 1:
            torch.testing.assert_close(
                linears_kernel(x, weights, []), linear.linears_plain(x, weights, [])
            )

    def test_the_shape_before_the_last_dim_is_kept(self):
        x, weights = normal(2, 1, 32), [normal(4, 32), normal(3, 32)]
        assert linears_kernel(x, weights, []).shape == (2, 1, 7)
        assert linear.linears(x, weights, []).shape == (2, 1, 7)

    def test_a_row_does_not_depend_on_the_others(self):
        x, weight = normal(9, 300, dtype=torch.float16), normal(40, 300, dtype=torch.float16)
        together = linears_kernel(x, [weight], [])
        assert torch.equal(linears_kernel(x[4:6], [weight], []), together[4:6])

    def test_a_kernel_takes_as_many_weights_as_the_operation(self):
        assert linear_triton.WEIGHT_ARGUMENTS == linear.MAX_WEIGHTS

    @pytest.mark.parametrize("weights", [0, 4])
    def test_the_number_of_weights(self, weights):
        with pytest.raises(
            ValueError,
            match=f"linears takes 1 to 3 weights and as many biases or none, got {weights}",
        ):
            linear.linears(torch.ones(1, 4), [torch.ones(2, 4)] * weights, [])

    def test_a_weight_of_another_dim_is_refused(self):
        with pytest.raises(ValueError, match=r"x \(1, 4\) and weights \[\(2, 5\)\] do not fit"):
            linear.linears(torch.ones(1, 4), [torch.ones(2, 5)], [])

    def test_another_dtype_is_refused(self):
        with pytest.raises(
            ValueError, match=r"must have one dtype, got torch.float16 and torch.float32"
        ):
            linear.linears(torch.ones(1, 4), [torch.ones(2, 4).half()], [])


class TestGatedLinear:
    @pytest.mark.parametrize("activation", linear.ACTIVATIONS)
    @pytest.mark.parametrize("dim", [96, 2048])
    @pytest.mark.parametrize("rows", [1, 3, 70])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_against_the_parts(self, dtype, rows, dim, activation):
        x, gate, up = (
            normal(*shape, dtype=dtype) for shape in ((1, rows, dim), (9, dim), (9, dim))
        )
        got = linears_kernel(x, [gate / 8, up], [], activation)
        parts = [linears_kernel(x, [weight], []) for weight in (gate / 8, up)]
        expected = linear.activate(parts[0], activation) * parts[1]
        # Each sum is off by its bound on either side, so by twice that between them. No activation
        # is steeper than 1.13 (gelu) or larger than its argument. On either side the activation and
        # the product are rounded, by eps / 2 each, which makes 2 eps; 2 more for two ways to
        # compute exp, erf and tanh, and eps where 1 + them is near 0.
        sums = [error_bound(x[0], weight) for weight in (gate / 8, up)]
        bound = 1.2 * sums[0] * parts[1][0].abs() + sums[1] * parts[0][0].abs()
        eps = torch.finfo(dtype).eps
        assert (
            (got - expected)[0].double().abs() <= 2 * bound + 4 * eps * expected[0].abs() + eps
        ).all()

    def test_on_a_cpu_it_is_the_same_formula(self):
        x, gate, up = torch.randn(2, 8), torch.randn(5, 8), torch.randn(5, 8)
        expected = F.silu(F.linear(x, gate)) * F.linear(x, up)
        torch.testing.assert_close(linear.gated_linear(x, gate, up, "silu"), expected)

    def test_what_does_not_fit_is_refused(self):
        with pytest.raises(
            ValueError, match="activation must be one of silu, gelu_tanh, gelu, relu, got 'tanh'"
        ):
            linear.gated_linear(torch.ones(1, 4), torch.ones(2, 4), torch.ones(2, 4), "tanh")
        with pytest.raises(ValueError, match=r"gate \(2, 4\) and up \(3, 4\) do not fit"):
            linear.gated_linear(torch.ones(1, 4), torch.ones(2, 4), torch.ones(3, 4), "silu")


class TestAdvance:
    @given(
        seq_start=st.lists(
            st.integers(-30, 9), min_size=1, max_size=5
        ),  # negative in compact layers
        windows=st.lists(st.integers(1, 12), min_size=1, max_size=7),
        position=st.integers(9, 40),
        columns=st.sampled_from([3, 4, 5]),
        parts=st.sampled_from([[], [1], [4]]),
    )
    @settings(max_examples=20, deadline=None)
    def test_one_position_further(self, seq_start, windows, position, columns, parts):
        """Spans may be a view of wider ones, as in a captured step:

        the columns after them stay as they are.
        """
        states = []
        for advance in (advance_plain, advance_triton):
            tensors = [
                torch.tensor(numbers, device=DEVICE) for numbers in ([position], seq_start, windows)
            ]
            spans = torch.full((len(seq_start), len(windows), columns), -1, device=DEVICE)
            positions = torch.arange(len(seq_start) * max([1, *parts]), device=DEVICE).view(
                *parts, len(seq_start), 1
            )
            advance(tensors[0], tensors[1][:, None], tensors[2], spans[..., :3], positions)
            states.append([tensors[0].tolist(), spans.tolist(), positions.flatten().tolist()])
        end, rest = position + 2, [-1] * (columns - 3)
        naive = [
            [[start, max(start, end - window), end, *rest] for window in windows]
            for start in seq_start
        ]
        further = [number + 1 for number in range(len(seq_start) * max([1, *parts]))]
        assert states[0] == states[1] == [[position + 1], naive, further]

    def test_spans_with_a_stride_in_their_last_dim_are_refused(self):
        numbers = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
        spans = torch.zeros(3, 1, 2, dtype=torch.int64, device=DEVICE).permute(2, 1, 0)
        with pytest.raises(ValueError, match="spans whose last dim has stride 1"):
            advance_triton(numbers[0], numbers, numbers[0], spans, numbers)


class TestGreedy:
    @pytest.fixture(autouse=True)
    def _few_chunks(self, monkeypatch):
        """The interpreter takes 10 ms for a program."""
        if DEVICE == "cpu":
            monkeypatch.setattr(step_state_triton, "_NUM_CHUNKS", 8)

    @given(data=st.data(), vocabulary=st.sampled_from([5, 128, 300, 1000]), batch=st.integers(1, 5))
    @settings(max_examples=10, deadline=None)
    def test_selection(self, data, vocabulary, batch):
        # Few values, so that the largest is often there twice: the first one counts.
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
        logits = torch.randint(-2, 3, (batch, vocabulary), generator=generator).float().to(DEVICE)
        unfinished = [[data.draw(st.booleans())] for _ in range(batch)]
        eos = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
        states = []
        for select in (
            select_greedy_plain,
            lambda logits, at, state: select_greedy_triton(logits, at, *state),
        ):
            state = GreedyState(
                sequences=torch.zeros(batch, 6, dtype=torch.int64, device=DEVICE),
                token=torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE),
                unfinished=torch.tensor(unfinished, device=DEVICE),
                eos=torch.tensor([eos + [-1] * (16 - len(eos))], device=DEVICE),
                pad=torch.tensor([3], device=DEVICE),
                is_over=torch.tensor(False, device=DEVICE),
            )
            select(logits, torch.tensor([2], device=DEVICE), state)
            states.append([tensor.tolist() for tensor in state])
        tokens = [
            row.index(max(row)) if running else 3
            for row, (running,) in zip(logits.tolist(), unfinished, strict=True)
        ]
        assert states[0] == states[1]
        assert states[0][0] == [[0, 0, 0, token, 0, 0] for token in tokens]
        assert states[0][2] == [
            [running and t not in eos] for t, (running,) in zip(tokens, unfinished, strict=True)
        ]
        assert states[0][5] == (not any(running for (running,) in states[0][2]))


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled in Triton's interpreter")
def test_kernels_that_are_only_compiled_do_not_run():
    seq_start = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    windows, spans = (
        torch.tensor([7], device=DEVICE),
        torch.zeros(1, 1, 3, dtype=torch.int64, device=DEVICE),
    )
    cache_position = torch.tensor([4], device=DEVICE)
    with compile_only():
        advance_triton(cache_position, seq_start, windows, spans, seq_start.clone())
    assert cache_position.tolist() == [4]
    advance_triton(cache_position, seq_start, windows, spans, seq_start.clone())
    assert cache_position.tolist() == [5]


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled in Triton's interpreter")
def test_a_kernel_that_cannot_be_compiled_is_told_and_is_the_only_one():
    x = torch.zeros(1, device=DEVICE)
    with pytest.raises(triton.CompilationError, match="never"), compile_only():
        launch(_broken, (1,), x)
    with compile_only():
        launch(_fill_with_ones, (1,), x)
    assert x.tolist() == [0]
    launch(_fill_with_ones, (1,), x)
    assert x.tolist() == [1]


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled in Triton's interpreter")
def test_the_launcher_is_built_while_the_kernel_is_compiled(monkeypatch):
    """Where Triton's compilation no longer holds its source, it is built later, and nobody would
    notice.
    """
    active, known = triton.runtime.driver.active, []
    original = active.launcher_cls

    def launcher(source, metadata):
        known.append((source.fn.__name__, metadata is not None))
        return original(source, metadata)

    monkeypatch.setattr(active, "launcher_cls", launcher)
    with compile_only():
        launch(_fill_with_twos, (1,), torch.zeros(1, device=DEVICE))
    assert known == [("_fill_with_twos", False), ("_fill_with_twos", True)]


@triton.jit
def _broken(x, PDL: tl.constexpr):
    tl.static_assert(False, "never")


@triton.jit
def _fill_with_ones(x, PDL: tl.constexpr):
    tl.store(x, 1.0)


@triton.jit
def _fill_with_twos(x, PDL: tl.constexpr):
    tl.store(x, 2.0)
