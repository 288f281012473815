"""Batch-invariant kernels: against float64, and a token with others against the same token alone."""

import pytest
import torch

from hf_static_kv.kernels.decode_attention import invariant_attention, invariant_attention_plain
from hf_static_kv.kernels.invariant_linear import (
    invariant_linear,
    invariant_linear_plain,
    invariant_sum,
    invariant_sum_plain,
    padded_tiles,
)
from hf_static_kv.kernels.linear import ACTIVATIONS
from tests.conftest import given, settings, st, triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(
        DEVICE, dtype
    )


def linear_kernel(x, weight, bias=None):
    module = triton_module("hf_static_kv.kernels.invariant_linear_triton")
    return module.invariant_linears_triton(x, [weight], [] if bias is None else [bias])


def sum_kernel(rows):
    return triton_module("hf_static_kv.kernels.invariant_linear_triton").invariant_sum_triton(rows)


def attention_kernel(query, keys, values, spans, scale):
    """The kernel of a prompt, or of a decode step for one query."""
    if query.shape[2] > 1:
        kernel = triton_module(
            "hf_static_kv.kernels.prompt_attention_triton"
        ).prompt_attention_triton
        return kernel(query, keys, values, spans, scale, None, None)
    kernel = triton_module("hf_static_kv.kernels.decode_attention_triton").decode_attention_triton
    return kernel(query, keys, values, spans[:, 0], None, scale, keys.shape[2], in_order=True)


def attention_plain(query, keys, values, spans, scale):
    return invariant_attention_plain(query, keys, values, spans, scale, None, None)


@pytest.mark.parametrize(
    "implementation", [linear_kernel, invariant_linear_plain], ids=["triton", "plain"]
)
class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("transposed", [False, True])  # as GPT-2 keeps its weights
    @pytest.mark.parametrize(
        ("rows", "dim", "size"), [(1, 48, 7), (35, 600, 20), (17, 64, 130), (90, 300, 70)]
    )
    def test_against_float64(self, implementation, rows, dim, size, transposed, dtype):
        x, bias = normal(rows, dim, dtype=dtype), normal(size, dtype=dtype)
        weight = (
            normal(dim, size, dtype=dtype).t() if transposed else normal(size, dim, dtype=dtype)
        )
        expected = x.double() @ weight.double().T + bias.double()
        magnitudes = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        # A sum of K products in float32, and a rounding to the dtype, or two where the bias is
        # added after one.
        bound = (
            (dim + 2) * torch.finfo(torch.float32).eps + 2 * torch.finfo(dtype).eps
        ) * magnitudes
        assert ((implementation(x, weight, bias).double() - expected).abs() <= bound).all()

    @given(data=st.data())
    @settings(max_examples=15, deadline=None)
    def test_a_row_alone_has_the_same_bits(self, implementation, data):
        # In Triton's interpreter numpy multiplies, whose order depends on the shape of a tile: up
        # to 8 rows have one.
        most_rows = 8 if implementation is linear_kernel and DEVICE == "cpu" else 40
        rows, dim, size = (data.draw(st.integers(1, most)) for most in (most_rows, 300, 60))
        x, weight = normal(rows, dim), normal(size, dim)
        row = data.draw(st.integers(0, rows - 1))
        assert torch.equal(
            implementation(x[row : row + 1], weight), implementation(x, weight)[row : row + 1]
        )


def test_a_weight_with_more_elements_than_32_bits_can_count():
    """Of a few rows that lie far apart in memory, most of which is never touched."""
    dim, step = 300, 9_000_000
    storage = torch.empty(dim * step, dtype=torch.float16, device=DEVICE)
    weight = storage.as_strided((4, dim), (1, step))
    weight.copy_(normal(4, dim, dtype=torch.float16))
    for rows in (2, 70):
        x = normal(rows, dim, dtype=torch.float16)
        expected, magnitudes = (
            x.double() @ weight.double().T,
            x.double().abs() @ weight.double().abs().T,
        )
        bound = (
            (dim + 2) * torch.finfo(torch.float32).eps + torch.finfo(torch.float16).eps
        ) * magnitudes
        assert ((linear_kernel(x, weight).double() - expected).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="tensor cores and their order of summing are a GPU's")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "size"), [(2048, 5000), (8192, 520), (1152, 1000), (100, 70)])
class TestManyRowsAndFew:
    """Two kernels, for many rows and for few: a row has the same bits in both."""

    ROWS = (
        slice(0, 1),
        slice(77, 78),
        slice(80, 88),
        slice(80, 89),
        slice(0, 64),
        slice(0, 65),
        slice(100, 117),
    )

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("exponents", [0, 10])
    def test_linear(self, dim, size, dtype, transposed, exponents):
        """With numbers of unlike size too, where an order of summing shows."""
        x = (normal(150, dim) * 2.0 ** (exponents * normal(150, dim, seed=1)).clamp(-12, 8)).to(
            dtype
        )
        weight, bias = normal(size, dim, dtype=dtype), normal(size, dtype=dtype)
        weight = weight.t().contiguous().t() if transposed else weight
        many = linear_kernel(x, weight, bias)
        for rows in self.ROWS:
            assert torch.equal(linear_kernel(x[rows], weight, bias), many[rows])

    def test_gated_linear(self, dim, size, dtype):
        from hf_static_kv.kernels.invariant_linear_triton import invariant_linears_triton

        x, gate, up = (
            normal(150, dim, dtype=dtype),
            *(normal(size, dim, dtype=dtype, seed=i) / 16 for i in (1, 2)),
        )
        activation = list(ACTIVATIONS)[dim % 3]
        many = invariant_linears_triton(x, [gate, up], [], activation)
        for rows in self.ROWS:
            assert torch.equal(
                invariant_linears_triton(x[rows], [gate, up], [], activation), many[rows]
            )


@pytest.mark.parametrize(
    "implementation", [sum_kernel, invariant_sum_plain], ids=["triton", "plain"]
)
@pytest.mark.parametrize(("rows", "dim"), [(1, 5), (20, 300), (3, 5000)])
def test_sums(implementation, rows, dim):
    x = normal(rows, dim)
    got = implementation(x)
    bound = dim * torch.finfo(torch.float32).eps * x.double().abs().sum(-1)
    assert ((got.double() - x.double().sum(-1)).abs() <= bound).all()
    assert torch.equal(implementation(x[-1:]), got[-1:])
    assert torch.equal(invariant_sum(x[None])[0], invariant_sum(x))


def spans_of(batch, queries, keys, seq_start=0, window=None):
    end = torch.arange(keys - queries + 1, keys + 1)
    first = (end - window).clamp(min=seq_start) if window else torch.full_like(end, seq_start)
    return (
        torch.stack([torch.full_like(end, seq_start), first, end], dim=-1)
        .expand(batch, -1, -1)
        .to(DEVICE)
    )


@pytest.mark.parametrize(
    "implementation", [attention_kernel, attention_plain], ids=["triton", "plain"]
)
class TestAttention:
    @pytest.mark.parametrize("window", [None, 70])
    @pytest.mark.parametrize(("queries", "keys"), [(1, 200), (9, 150), (5, 5)])
    def test_against_float64(self, implementation, queries, keys, window):
        query, key, value = (
            normal(2, 4, queries, 16),
            normal(2, 2, keys, 16),
            normal(2, 2, keys, 16, seed=1),
        )
        spans = spans_of(2, queries, keys, window=window)
        position = torch.arange(keys, device=DEVICE)
        seen = (position >= spans[0, :, 1:2]) & (position < spans[0, :, 2:3])
        scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3) * 0.25
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        expected = (weights @ value.double().repeat_interleave(2, 1)).transpose(1, 2)
        torch.testing.assert_close(
            implementation(query, key, value, spans, 0.25).double(), expected, rtol=0, atol=2e-6
        )

    @pytest.mark.parametrize("window", [None, 70])
    def test_a_query_has_the_bits_of_a_decode_step_at_its_place(self, implementation, window):
        """Over the keys that a cache has by then, and handed out from the window's beginning on."""
        query, key, value = (
            normal(1, 4, 12, 16),
            normal(1, 2, 140, 16),
            normal(1, 2, 140, 16, seed=1),
        )
        # Over the border between two pieces of 128, and of 64.
        spans = spans_of(1, 12, 140, window=window)
        whole = implementation(query, key, value, spans, 0.25)
        for t in (0, 4, 11):
            begin, end = spans[0, t, 1:].tolist()
            view = [tensor[:, :, begin:end] for tensor in (key, value)]
            step = implementation(query[:, :, t : t + 1], *view, spans[:, t : t + 1] - begin, 0.25)
            assert torch.equal(step, whole[:, t : t + 1])

    @pytest.mark.parametrize("groups", [1, 3, 17])
    def test_queries_of_one_program_that_begin_with_unlike_pieces(self, implementation, groups):
        """A window over a border between pieces, rows of unlike seq_start, and one row that begins
        inside.
        """
        # Of 17 query heads a program has one query.
        heads, queries = (2, 9) if groups < 17 else (1, 4)
        query = normal(2, heads * groups, queries, 20)
        key, value = normal(2, heads, 300, 20), normal(2, heads, 300, 20, seed=1)
        spans = torch.cat(
            [spans_of(1, queries, 261, window=133), spans_of(1, queries, 300, seq_start=295)]
        )
        spans[1, : queries // 2] = 295  # padding: these see nothing
        whole = implementation(query, key, value, spans, 0.25)
        expected = attention_plain(query, key, value, spans, 0.25)
        torch.testing.assert_close(whole, expected, rtol=0, atol=2e-6)
        for t in (0, queries // 2, queries - 1):
            one = implementation(query[:, :, t : t + 1], key, value, spans[:, t : t + 1], 0.25)
            assert torch.equal(one, whole[:, t : t + 1])

    def test_the_padding_to_its_left_changes_nothing(self, implementation):
        query, key, value = normal(1, 4, 3, 16), normal(1, 2, 90, 16), normal(1, 2, 90, 16, seed=1)
        padded = [
            torch.cat([torch.full_like(t[:, :, :7], torch.nan), t], dim=2) for t in (key, value)
        ]
        bare = implementation(query, key, value, spans_of(1, 3, 90), 0.25)
        assert torch.equal(
            implementation(query, *padded, spans_of(1, 3, 97, seq_start=7), 0.25), bare
        )

    def test_a_query_that_sees_nothing_gives_zeros(self, implementation):
        query, key = normal(1, 2, 1, 16), normal(1, 2, 8, 16)
        spans = torch.full((1, 1, 3), 5, device=DEVICE)
        assert torch.equal(
            implementation(query, key, key, spans, 0.25), torch.zeros(1, 1, 2, 16, device=DEVICE)
        )


class TestFastAttentionOfAPrompt:
    """Not in the order of decode steps: large tiles, and masks at the edges of spans only."""

    def check(self, query, key, value, spans, softcap=None, sinks=None):
        module = triton_module("hf_static_kv.kernels.prompt_attention_triton")
        how = spans, 0.25, softcap, sinks
        got = module.prompt_attention_triton(query, key, value, *how, in_order=False)
        expected = invariant_attention_plain(query, key, value, *how)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)

    @pytest.mark.parametrize("window", [None, 9, 70])
    @pytest.mark.parametrize("queries", [17, 40])
    def test_windows_and_prefixes(self, queries, window):
        query, key = normal(2, 4, queries, 20), normal(2, 2, 150, 20)
        spans = torch.cat([spans_of(1, queries, n, window=window) for n in (150, queries)])
        self.check(query, key, normal(2, 2, 150, 16, seed=1), spans)

    def test_padding_softcap_and_sinks(self):
        query, key = normal(2, 6, 20, 16), normal(2, 2, 90, 16)
        spans = torch.cat([spans_of(1, 20, 90, 3, 40), spans_of(1, 20, 25, 5)])
        spans[1, :6] = 5  # padding: these see nothing
        self.check(query, key, key.clone(), spans, 3.0, normal(6))

    @pytest.mark.parametrize("queries", [1, 3])
    @pytest.mark.parametrize("window", [None, 9, 70])
    def test_a_few_queries_of_each_row(self, queries, window):
        """The kernel of many rows: warps have sums of their own."""
        module = triton_module("hf_static_kv.kernels.rows_attention_triton")
        query, key = normal(3, 8, queries, 20), normal(3, 2, 150, 20)
        value = normal(3, 2, 150, 16, seed=1)
        spans = torch.cat([spans_of(1, queries, n, 3, window) for n in (150, 33, 12)])
        spans[2, 0] = 5  # a row that sees nothing
        for softcap, sinks in ((None, None), (3.0, None), (None, normal(8)), (3.0, normal(8))):
            got = module.rows_attention_triton(query, key, value, spans, 0.25, softcap, sinks)
            expected = invariant_attention_plain(query, key, value, spans, 0.25, softcap, sinks)
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)

    def test_the_spans_of_a_layer_of_a_captured_pass(self):
        query, key = normal(1, 2, 20, 16), normal(1, 2, 90, 16)
        of_layers = torch.zeros(1, 3, 20, 4, dtype=torch.int64, device=DEVICE)[..., :3]
        of_layers[:, 1] = spans_of(1, 20, 90)
        self.check(query, key, key.clone(), of_layers[:, 1])


def test_tiles_have_one_shape_and_memory_of_their_own():
    x = torch.arange(36.0).view(18, 2)
    tiles = padded_tiles(x)
    assert [tuple(tile.shape) for tile in tiles] == [(16, 2), (16, 2)]
    assert torch.equal(torch.cat(tiles)[:18], x)
    assert torch.cat(tiles)[18:].abs().sum() == 0
    tiles[0].zero_()
    assert x[0, 1] == 1


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"x \(2, 3\) and weight \(4, 5\) do not fit"):
        invariant_linear(torch.ones(2, 3), torch.ones(4, 5))
    states, spans = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"spans must be \[1, 3, 3\] of seq_start, first, end, got \[1, 2, 3\]"
    ):
        invariant_attention(states, states, states, spans, 1.0, None, None)
    with pytest.raises(
        ValueError, match=r"one dtype, got torch.float32, torch.float16, torch.float16"
    ):
        invariant_attention(
            states,
            states.half(),
            states.half(),
            torch.zeros(1, 3, 3, dtype=torch.long),
            1.0,
            None,
            None,
        )
