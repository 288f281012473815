"""The small kernels of a captured step, each against its formula; on a CPU they run in Triton's
interpreter.
"""

import pytest
import torch
import torch.nn.functional as F

from hf_static_kv.kernels import linear
from hf_static_kv.kernels.linear import linears_kernel
from hf_static_kv.kernels.positions import NOWHERE, place_tokens_plain
from hf_static_kv.kernels.select_greedy import GreedyState, most_likely_plain, select_greedy_plain
from tests.conftest import given, settings, st

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl

from hf_static_kv.kernels import linear_triton, select_greedy_triton
from hf_static_kv.kernels.joint_linear_triton import linear_parts_triton
from hf_static_kv.kernels.launch_triton import compile_only, launch
from hf_static_kv.kernels.positions_triton import place_tokens_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16 as integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])

# Of more tokens in float32 a library computes all.
TOKENS = [(dtype, rows) for dtype in DTYPES for rows in (1, 3, 40)]
TOKENS.remove((torch.float32, 40))


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
    @pytest.mark.parametrize(("dtype", "rows"), TOKENS, ids=str)
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

    @pytest.mark.parametrize("parts", [2, 3])
    @pytest.mark.parametrize("dim", [200, 640])  # the last part is shorter, or empty
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_parts_of_a_sum(self, dtype, dim, parts):
        x, weight = normal(2, 10, dim, dtype=dtype), normal(40, dim, dtype=dtype)
        got = linear_parts_triton(x, weight, parts)
        assert got.shape == (parts, 2, 10, 40)
        assert got.dtype == torch.float32
        expected = x.double() @ weight.double().T
        assert ((got.double().sum(0) - expected).abs() <= error_bound(x, weight)).all()

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
    @pytest.mark.parametrize(("dtype", "rows"), TOKENS, ids=str)
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


def by_kernel(*arguments, advances):
    place_tokens_triton(*arguments, advances)


class TestPlaceTokens:
    @given(
        rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), min_size=1, max_size=4),
        layers=st.lists(
            st.tuples(st.integers(1, 12), st.sampled_from([3, 5, 1 << 60])), min_size=1, max_size=5
        ),
        num_tokens=st.sampled_from([1, 2, 5, 70]),  # 70: three tiles
        padding=st.lists(st.integers(0, 5), min_size=4, max_size=4),
        offset=st.integers(0, 7),
        columns=st.sampled_from([3, 4]),
        parts=st.sampled_from([None, [], [1], [3]]),
        advances=st.booleans(),
    )
    @settings(max_examples=20, deadline=None)
    def test_against_a_naive_loop(
        self, rows, layers, num_tokens, padding, offset, columns, parts, advances
    ):
        """Spans may be a view of wider ones, as in a pass: the columns after them stay."""
        states = []
        starts = [start for start, _ in rows]
        lengths = [start + more for start, more in rows]
        padding = [min(n, num_tokens - 1) for n in padding[: len(rows)]]
        counts = [num_tokens - n for n in padding]
        for place in (place_tokens_plain, by_kernel):
            numbers = [lengths, starts, counts, [offset], *zip(*layers, strict=True)]
            tensors = [torch.tensor(list(own), device=DEVICE) for own in numbers]
            slots = torch.full((len(rows), num_tokens), -1, device=DEVICE)
            spans = torch.full((len(rows), len(layers), num_tokens, columns), -1, device=DEVICE)
            ids = shift = None
            if parts is not None:
                shift = torch.arange(len(rows) * max([1, *parts]), device=DEVICE)
                shift = shift.view(*parts, len(rows))
                ids = torch.zeros(*parts, len(rows), num_tokens, dtype=torch.int64, device=DEVICE)
            place(*tensors, slots, spans[..., :3], shift, ids, advances=advances)
            if ids is not None:
                ids = (ids - shift[..., None]).view(-1, num_tokens).tolist()
            states.append([tensors[0].tolist(), slots.tolist(), spans.tolist(), ids])
        positions = [
            [length + max(0, t - n) for t in range(num_tokens)]
            for length, n in zip(lengths, padding, strict=True)
        ]
        rest = [-1] * (columns - 3)

        def span(start, at, window, chunk):
            first = next(
                p
                for p in range(start, at + 1)
                if at - p < window and (p - start) // chunk == (at - start) // chunk
            )
            return [start - offset, first - offset, at + 1 - offset, *rest]

        naive = [
            [n + count * advances for n, count in zip(lengths, counts, strict=True)],
            [[at - offset for at in row] for row in positions],
            [
                [[span(start, at, *layer) for at in row] for layer in layers]
                for start, row in zip(starts, positions, strict=True)
            ],
        ]
        for b, n in enumerate(padding):
            naive[1][b][:n] = [NOWHERE] * n
            for of_layer in naive[2][b]:
                for own in of_layer[:n]:
                    own[2] = own[1]  # empty
        distances = [
            [at - start for at in row] for start, row in zip(starts, positions, strict=True)
        ]
        assert states[0] == states[1]
        assert states[0][:3] == naive
        assert states[0][3] == (None if parts is None else distances * max([1, *parts]))

    def test_spans_with_a_stride_in_their_last_dim_are_refused(self):
        number = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        spans = torch.zeros(3, 1, 1, 2, dtype=torch.int64, device=DEVICE).permute(3, 1, 2, 0)
        with pytest.raises(ValueError, match="spans whose last dim has stride 1"):
            place_tokens_triton(*[number] * 6, number[:, None], spans, None, None, True)


class TestGreedy:
    @pytest.fixture(autouse=True)
    def _few_chunks(self, monkeypatch):
        """The interpreter takes 10 ms for a program."""
        if DEVICE == "cpu":
            monkeypatch.setattr(select_greedy_triton, "_NUM_CHUNKS", 8)

    @given(data=st.data(), vocabulary=st.sampled_from([5, 128, 300, 1000]), batch=st.integers(1, 5))
    @settings(max_examples=10, deadline=None)
    def test_selection(self, data, vocabulary, batch):
        # Few values, so that the largest is often there twice: the first one counts.
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
        logits = torch.randint(-2, 3, (batch, vocabulary), generator=generator).float().to(DEVICE)
        unfinished = [[data.draw(st.booleans())] for _ in range(batch)]
        ends = st.lists(st.integers(0, 6), min_size=1, max_size=3)
        eos = [(data.draw(ends) + [-1] * 16)[:16] for _ in range(batch)]
        at = [2, 4, 1, 0, data.draw(st.sampled_from([3, 1 << 40]))]  # the last row may be idle
        last = [9, 5, 3, data.draw(st.sampled_from([1, 2])), 9]
        states = []
        for select in (
            select_greedy_plain,
            lambda logits, at, state: select_greedy_triton.select_greedy_triton(logits, at, *state),
        ):
            state = GreedyState(
                sequences=torch.zeros(batch, 6, dtype=torch.int64, device=DEVICE),
                token=torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE),
                unfinished=torch.tensor(unfinished, device=DEVICE),
                eos=torch.tensor(eos, device=DEVICE),
                pad=torch.tensor([3, 4, 5, 6, 7], device=DEVICE)[:batch],
                is_over=torch.tensor(False, device=DEVICE),
                last=torch.tensor(last, device=DEVICE)[:batch],
                counts=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
                report=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
            )
            select(logits, torch.tensor(at, device=DEVICE)[:batch], state)
            states.append([tensor.tolist() for tensor in state])
        tokens = [
            row.index(max(row)) if running else pad
            for row, (running,), pad in zip(
                logits.tolist(), unfinished, (3, 4, 5, 6, 7), strict=False
            )
        ]
        assert states[0] == states[1]
        for row, position, token in zip(states[0][0], at, tokens, strict=False):
            assert row == [token if i == position + 1 else 0 for i in range(6)]
        assert states[0][2] == [
            [running and t not in eos[b] and at[b] + 1 < last[b]]
            for b, (t, (running,)) in enumerate(zip(tokens, unfinished, strict=True))
        ]
        assert states[0][5] == (not any(running for (running,) in states[0][2]))
        assert states[0][7] == [int(running) for (running,) in states[0][2]]
        assert states[0][8] == [
            t if running else ~t for t, (running,) in zip(tokens, states[0][2], strict=True)
        ]

    def test_selection_from_the_largest_logits_of_chunks(self):
        """132 of them, and what is no chunk up to 256; the logits are not read."""
        maxima = torch.full((1, 256), -torch.inf, device=DEVICE)
        tokens = torch.full((1, 256), 999, dtype=torch.int32, device=DEVICE)
        maxima[0, :132] = -3.0
        tokens[0, :132] = torch.arange(132).flip(0)
        maxima[0, [40, 70]] = -1.0
        row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        token, running = row[:, None].clone(), torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
        sequences, eos = torch.zeros(1, 6, dtype=torch.int64, device=DEVICE), token - 1
        state = GreedyState(
            sequences,
            token,
            running,
            eos,
            row,
            running[0, 0].clone(),
            row + 5,
            row.clone(),
            row.clone(),
        )
        logits = torch.zeros(1, 1000, device=DEVICE)
        select_greedy_triton.select_greedy_triton(logits, row + 2, *state, chunks=(maxima, tokens))
        assert sequences.tolist() == [[0, 0, 0, 61, 0, 0]]
        assert state.token.tolist() == [[61]]

    @pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (3, 300), (70, 129)])
    def test_most_likely(self, rows, vocabulary):
        """Few values, so that the first of the largest counts; in rows of a tensor, or in columns."""
        generator = torch.Generator().manual_seed(rows)
        logits = torch.randint(-2, 3, (rows, vocabulary + 3), generator=generator).to(DEVICE)
        logits = logits.float()
        for own in (logits[:, 3:], logits[:, :4].t()):
            expected = [row.index(max(row)) for row in own.tolist()]
            assert most_likely_plain(own).tolist() == expected
            assert select_greedy_triton.most_likely_triton(own).tolist() == expected

    def test_most_likely_of_nan_is_a_token(self):
        logits = torch.full((2, 300), torch.nan, device=DEVICE)
        logits[1] = -torch.inf
        for token in select_greedy_triton.most_likely_triton(logits).tolist():
            assert 0 <= token < 300


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is compiled in Triton's interpreter")
def test_kernels_that_are_only_compiled_do_not_run():
    length, *others = (torch.tensor([n], device=DEVICE) for n in (4, 0, 1, 0, 7, 1 << 60))
    spans = torch.zeros(1, 1, 1, 3, dtype=torch.int64, device=DEVICE)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    with compile_only():
        place_tokens_triton(length, *others, slots, spans, None, None, True)
    assert length.tolist() == [4]
    place_tokens_triton(length, *others, slots, spans, None, None, True)
    assert length.tolist() == [5]


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
