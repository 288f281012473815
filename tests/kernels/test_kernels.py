"""Each kernel and its plain twin against float64 on odd shapes; on a CPU the kernel runs in
Triton's interpreter.
"""

import pytest
import torch

from hf_static_kv.kernels.decode_attention import decode_attention, decode_attention_plain
from hf_static_kv.kernels.positions import write_tokens
from tests.conftest import triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def skip_bfloat16_on_a_cpu(tensor):
    if DEVICE == "cpu" and tensor.dtype == torch.bfloat16:
        pytest.skip(
            "Triton's interpreter multiplies bfloat16 as integers and cuts off instead of rounding"
        )


def kernel(
    query,
    keys,
    values,
    spans,
    scale,
    softcap=None,
    sinks=None,
    max_span=None,
    seen=None,
    weights=None,
    in_order=False,
):
    """The Triton kernel itself, which `decode_attention` takes on a GPU only."""
    triton_kernel = triton_module("hf_static_kv.kernels.decode_attention_triton")
    skip_bfloat16_on_a_cpu(query)
    span = min(max_span or keys.shape[2], keys.shape[2])
    return triton_kernel.decode_attention_triton(
        query, keys, values, spans, seen, scale, span, softcap, sinks, weights, in_order=in_order
    )


def plain(
    query,
    keys,
    values,
    spans,
    scale,
    softcap=None,
    sinks=None,
    max_span=None,
    seen=None,
    weights=None,
):
    return decode_attention_plain(query, keys, values, spans, seen, scale, softcap, sinks, weights)


def in_float64(query, keys, values, spans, scale, softcap=None, sinks=None, seen=None):
    """Every score of every position, masked: nothing in common with either implementation."""
    query, keys, values = query.double().cpu(), keys.double().cpu(), values.double().cpu()
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("bhqd,bhsd->bhqs", query, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(keys.shape[2])
    spans = spans.cpu()
    hidden = (position < spans[..., 1:2]) | (position >= spans[..., 2:3])  # [B, q, S]
    if seen is not None:
        hidden |= ~seen.cpu()[:, None]
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks is not None:
        column = sinks.double().cpu()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return torch.einsum("bhqs,bhsd->bqhd", scores.softmax(-1)[..., : keys.shape[2]], values)


def error_bound(query, keys, values, scale):
    """How far rounding alone can take the result from the float64 one, which starts from the same
    rounded inputs.

    A score is a sum of D products in float32: off by D eps32 times the sum of their magnitudes,
    which moves every weight by that share. Weights and sums over n positions add n eps32. A weight
    is rounded to the values' dtype before it multiplies them, and so is the result: one eps of that
    dtype together.
    """
    groups = query.shape[1] // keys.shape[1]
    magnitudes = (
        query.double().abs()
        @ keys.double().abs().repeat_interleave(groups, 1).transpose(2, 3)
        * scale
    )
    score_error = (query.shape[-1] + 4) * torch.finfo(torch.float32).eps * magnitudes.max().item()
    summing = (keys.shape[2] + 8) * torch.finfo(torch.float32).eps
    own = torch.finfo(values.dtype).eps if values.dtype != torch.float32 else 0.0
    return (2 * score_error + summing + own) * values.double().abs().max().item()


def tensors(
    heads, kv_heads, dim, room, batch=1, dtype=torch.float32, value_dim=None, seed=0, num_tokens=1
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    return (
        normal(batch, heads, num_tokens, dim),
        normal(batch, kv_heads, room, dim),
        normal(batch, kv_heads, room, value_dim or dim),
    )


def spans_of(*rows):
    """[B, 1, 3]: one token of each row."""
    return torch.tensor(rows, device=DEVICE)[:, None]


# query heads, KV heads, head dim: the dev models, one group, a large group, dims that are no power
# of two
SHAPES = {
    "llama": (32, 8, 64),
    "qwen3": (16, 8, 128),
    "gemma3": (4, 1, 256),
    "smollm2": (9, 3, 64),
    "multi-head": (3, 3, 80),
    "multi-query": (20, 1, 96),
}


@pytest.mark.parametrize("implementation", [kernel, plain], ids=["triton", "plain"])
class TestDecodeAttention:
    # All lengths on one shape; on the others one piece and two, since the interpreter takes seconds
    # for many heads.
    @pytest.mark.parametrize(
        ("shape", "length"),
        [("smollm2", length) for length in (1, 31, 64, 255, 256, 257, 300)]
        + [(shape, length) for shape in SHAPES if shape != "smollm2" for length in (1, 257)],
    )
    def test_every_length_of_a_text(self, implementation, shape, length):
        query, keys, values = tensors(*SHAPES[shape], room=300)
        spans = spans_of([0, 0, length])
        scale = query.shape[-1] ** -0.5
        got = implementation(query, keys, values, spans, scale)
        expected = in_float64(query, keys, values, spans, scale)
        assert got.shape == expected.shape
        assert (got.double().cpu() - expected).abs().max() <= error_bound(
            query, keys, values, scale
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_dtypes_on_padded_rows_of_unlike_length_under_a_window(self, implementation, dtype):
        query, keys, values = tensors(4, 2, 64, room=600, batch=3, dtype=dtype)
        spans = spans_of([0, 420, 520], [7, 420, 520], [500, 500, 520])
        got = implementation(query, keys, values, spans, 0.125, max_span=100)
        expected = in_float64(query, keys, values, spans, 0.125)
        assert got.dtype == dtype
        assert (got.double().cpu() - expected).abs().max() <= error_bound(
            query, keys, values, 0.125
        )

    def test_soft_cap_and_sinks(self, implementation):
        query, keys, values = tensors(4, 2, 64, room=40)
        query = query * 20  # far into the cap
        sinks = torch.tensor([-1.0, 0.0, 3.0, 50.0], device=DEVICE)
        spans = spans_of([3, 3, 33])
        got = implementation(query, keys, values, spans, 0.125, softcap=30.0, sinks=sinks)
        expected = in_float64(query, keys, values, spans, 0.125, softcap=30.0, sinks=sinks)
        assert (got.double().cpu() - expected).abs().max() <= error_bound(
            query, keys, values, 0.125
        )
        assert got[0, 0, 3].abs().max() < 1e-6  # a sink that takes everything leaves nothing

    def test_a_mask_with_holes(self, implementation):
        """Rows of a chat that was padded in the middle; in one of them the first pieces are hidden
        altogether.
        """
        query, keys, values = tensors(4, 2, 64, room=600, batch=2)
        seen = torch.rand(2, 600, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
        seen[1, :520], seen[:, 599] = False, True
        spans = spans_of([0, 0, 600], [0, 0, 600])
        got = implementation(query, keys, values, spans, 0.125, seen=seen)
        expected = in_float64(query, keys, values, spans, 0.125, seen=seen)
        assert (got.double().cpu() - expected).abs().max() <= error_bound(
            query, keys, values, 0.125
        )

    @pytest.mark.parametrize("case", ["plain", "window and padding", "holes", "sinks"])
    def test_it_keeps_its_weights(self, implementation, case):
        """The softmax itself, laid on the positions; nothing outside of the span is written."""
        query, keys, values = tensors(6, 2, 16, 300, batch=2)
        spans = (
            spans_of([0, 0, 290], [17, 160, 300])
            if case == "window and padding"
            else spans_of([0, 0, 290], [0, 0, 5])
        )
        seen = torch.arange(300, device=DEVICE).expand(2, -1) % 3 != 1 if case == "holes" else None
        sinks = torch.randn(6, device=DEVICE) if case == "sinks" else None
        weights = torch.full((2, 6, 300), -1.0, device=DEVICE)
        got = implementation(
            query, keys, values, spans, 0.25, sinks=sinks, seen=seen, weights=weights
        )
        assert torch.equal(
            got, implementation(query, keys, values, spans, 0.25, sinks=sinks, seen=seen)
        )
        for b, ((_, first, end),) in enumerate(spans.tolist()):
            row = weights[b, :, first:end].double()
            assert (weights[b, :, :first] == -1).all()
            assert (weights[b, :, end:] == -1).all()
            assert ((row >= 0) & (row <= 1)).all()
            if seen is not None:
                assert (row[:, ~seen[b, first:end]] == 0).all()
            if sinks is None:
                torch.testing.assert_close(
                    row.sum(-1), torch.ones(6, device=DEVICE).double(), rtol=0, atol=1e-5
                )
            output = torch.einsum(
                "hgn,hnd->hgd", row.view(2, 3, -1), values[b, :, first:end].double()
            )
            torch.testing.assert_close(output.reshape(6, 16), got[b, 0].double(), rtol=0, atol=1e-5)

    def test_values_of_another_dim(self, implementation):
        query, keys, values = tensors(4, 2, 48, room=20, value_dim=32)
        spans = spans_of([0, 0, 20])
        got = implementation(query, keys, values, spans, 0.2)
        assert got.shape == (1, 1, 4, 32)
        assert (
            got.double().cpu() - in_float64(query, keys, values, spans, 0.2)
        ).abs().max() <= error_bound(query, keys, values, 0.2)

    def test_what_lies_outside_the_span_is_never_read(self, implementation):
        query, keys, values = tensors(4, 2, 16, room=300)
        spans = spans_of([2, 5, 290])
        expected = implementation(query, keys, values, spans, 0.25)
        for unread in (slice(0, 5), slice(290, 300)):
            keys[:, :, unread], values[:, :, unread] = torch.nan, torch.inf
        assert torch.equal(implementation(query, keys, values, spans, 0.25), expected)

    def test_views_of_the_storage_of_all_layers(self, implementation):
        """As a captured step passes them: one layer of the storage, and spans padded to four
        columns.
        """
        query, keys, values = tensors(4, 2, 16, room=50, batch=2)
        # Keys and values of [L, B, H, S, D].
        storage = torch.full((2, 3, 5, 2, 80, 16), torch.nan, device=DEVICE)
        storage[0, 1, :2, :, :50], storage[1, 1, :2, :, :50] = keys, values
        whole = torch.full((2, 3, 1, 4), 99, device=DEVICE)
        spans = whole[:, 1, :, :3]
        spans.copy_(spans_of([0, 0, 50], [10, 10, 50]))
        got = implementation(query, storage[0, 1, :2], storage[1, 1, :2], spans, 0.25)
        assert torch.equal(got, implementation(query, keys, values, spans.contiguous(), 0.25))

    @pytest.mark.parametrize("case", ["plain", "window", "seen", "softcap", "sinks"])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "num_tokens"), [(4, 2, 3), (2, 2, 16), (5, 1, 5)]
    )
    def test_several_tokens_of_rows_of_their_own_lengths(
        self, heads, kv_heads, num_tokens, case, implementation
    ):
        query, keys, values = tensors(heads, kv_heads, 16, 300, 2, num_tokens=num_tokens)
        window = 40 if case == "window" else 1000
        lengths = [270, 33]
        spans = torch.tensor(
            [
                [[s, max(s, n + t + 1 - window), n + t + 1] for t in range(num_tokens)]
                for s, n in zip((0, 7), lengths, strict=True)
            ],
            device=DEVICE,
        )
        how = {}
        if case == "seen":
            how["seen"] = (
                torch.rand(2, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.3
            )
            how["seen"][:, 40] = True
        elif case == "softcap":
            how["softcap"] = 3.0
        elif case == "sinks":
            how["sinks"] = torch.linspace(-1, 1, heads, device=DEVICE)
        got = implementation(query, keys, values, spans, 0.25, max_span=min(window, 300), **how)
        expected = in_float64(query, keys, values, spans, 0.25, **how)
        assert got.shape == (2, num_tokens, heads, 16)
        bound = error_bound(query, keys, values, 0.25)
        assert (got.double().cpu() - expected).abs().max() <= bound


class TestBits:
    """In order the kernel's result for a row is the same to the bit wherever the row stands."""

    def test_room_padding_and_neighbours_change_nothing(self):
        query, keys, values = tensors(4, 2, 64, room=700)
        alone = kernel(query, keys, values, spans_of([0, 0, 700]), 0.125, in_order=True)
        # A larger room, a prefix of padding that is no multiple of anything, and a second row.
        batch_query, wide_keys, wide_values = tensors(4, 2, 64, room=6000, batch=2, seed=1)
        batch_query[1], wide_keys[1, :, 37:737], wide_values[1, :, 37:737] = (
            query[0],
            keys[0],
            values[0],
        )
        both = kernel(
            batch_query,
            wide_keys,
            wide_values,
            spans_of([0, 0, 737], [37, 37, 737]),
            0.125,
            in_order=True,
        )
        assert torch.equal(both[1], alone[0])

    @pytest.mark.parametrize("in_order", [False, True])
    def test_room_and_padding(self, in_order):
        query, keys, values = tensors(4, 2, 64, room=700)
        alone = kernel(query, keys, values, spans_of([0, 0, 700]), 0.125, in_order=in_order)
        _, wide_keys, wide_values = tensors(4, 2, 64, room=6000, seed=1)
        wide_keys[:, :, 37:737], wide_values[:, :, 37:737] = keys, values
        spans = spans_of([37, 37, 737])
        wide = kernel(query, wide_keys, wide_values, spans, 0.125, in_order=in_order)
        assert torch.equal(wide, alone)

    def test_under_a_window(self):
        query, keys, values = tensors(4, 1, 64, room=900)
        alone = kernel(
            query, keys, values, spans_of([0, 400, 900]), 0.125, max_span=500, in_order=True
        )
        shifted_keys, shifted_values = (
            torch.zeros(1, 1, 2000, 64, device=DEVICE) for _ in range(2)
        )
        shifted_keys[:, :, 11:911], shifted_values[:, :, 11:911] = keys, values
        spans = spans_of([11, 411, 911])
        assert torch.equal(
            kernel(query, shifted_keys, shifted_values, spans, 0.125, max_span=500, in_order=True),
            alone,
        )

    @pytest.mark.parametrize("moved", [1, 64, 399])
    def test_in_a_compact_layer(self, moved):
        """Its first slot is a later position, so the sequence begins before it."""
        query, keys, values = tensors(4, 1, 64, room=900)
        alone = kernel(
            query, keys, values, spans_of([3, 400, 900]), 0.125, max_span=500, in_order=True
        )
        keys, values = (states[:, :, moved:].contiguous() for states in (keys, values))
        spans = spans_of([3 - moved, 400 - moved, 900 - moved])
        assert torch.equal(
            kernel(query, keys, values, spans, 0.125, max_span=500, in_order=True), alone
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda q, k, v, s: (q.expand(-1, -1, 17, -1), k, v, s),
            "1 to 16 tokens of a batch row, got 17",
        ),
        (lambda q, k, v, s: (q[:, :3], k, v, s), "Hq a multiple of H"),
        (lambda q, k, v, s: (q, k, v[:, :, :9], s), "do not fit"),
        (
            lambda q, k, v, s: (q, k, v, s[..., :2]),
            r"spans must be \[1, 1, 3\] of seq_start, first, end, got \[1, 1, 2\]",
        ),
        (lambda q, k, v, s: (q, k, v.half(), s), "must have one dtype"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    query, keys, values = tensors(4, 2, 16, room=10)
    with pytest.raises(ValueError, match=message):
        decode_attention(*change(query, keys, values, spans_of([0, 0, 5])), scale=0.25)


@pytest.mark.parametrize("case", ["alone", "sinks", "weights"])
def test_spans_that_are_ready_change_no_bit(case):
    """They are read before the wait for the previous kernel, and the result is the same."""
    module = triton_module("hf_static_kv.kernels.decode_attention_triton")
    query, keys, values = tensors(4, 2, 16, room=300, batch=2)
    spans, results = spans_of([0, 0, 290], [17, 160, 300]), []
    for spans_ready in (False, True):
        sinks = torch.ones(4, device=DEVICE) if case == "sinks" else None
        weights = torch.zeros(2, 4, 300, device=DEVICE) if case == "weights" else None
        got = module.decode_attention_triton(
            query,
            keys,
            values,
            spans,
            None,
            0.25,
            300,
            None,
            sinks,
            weights,
            spans_ready=spans_ready,
        )
        results.append((got, weights if weights is not None else got))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_last_dim_with_a_stride_is_refused():
    module = triton_module("hf_static_kv.kernels.decode_attention_triton")
    query, keys, values = tensors(4, 2, 16, room=10)
    spans = spans_of([0, 0], [0, 0], [5, 5]).transpose(0, 2)[:1]
    with pytest.raises(ValueError, match="spans whose last dim has stride 1"):
        module.decode_attention_triton(query, keys, values, spans, None, 0.25, 10)


def test_the_choice_follows_the_device():
    query, keys, values = tensors(4, 2, 16, room=10)
    spans = spans_of([0, 0, 5])
    expected = (kernel if DEVICE == "cuda" else plain)(query, keys, values, spans, 0.25)
    assert torch.equal(decode_attention(query, keys, values, spans, scale=0.25), expected)


class TestWriteTokens:
    @pytest.mark.parametrize("slots", [[[7], [7]], [[7], [2]], [[3, 4, 5], [0, 1, 2]]], ids=str)
    @pytest.mark.parametrize("implementation", ["triton", "as the device chooses"])
    def test_the_slots_of_one_layer_and_nothing_else(self, implementation, slots):
        keys = torch.zeros(3, 4, 2, 10, 24, device=DEVICE)
        values = torch.zeros(3, 4, 2, 10, 16, device=DEVICE)
        # As a projection leaves them: heads and tokens transposed. Two of four batch rows are in
        # use.
        num_tokens = len(slots[0])
        key_states = torch.randn(2, num_tokens, 2, 24, device=DEVICE).transpose(1, 2)
        value_states = torch.randn(2, num_tokens, 2, 16, device=DEVICE).transpose(1, 2)
        places = torch.tensor(slots, device=DEVICE)
        arguments = keys[1, :2], values[1, :2], key_states, value_states, places
        if implementation == "triton":
            module = triton_module("hf_static_kv.kernels.positions_triton")
            module.write_tokens_triton(*arguments)
        else:
            write_tokens(*arguments)
        for storage, states in ((keys, key_states), (values, value_states)):
            expected = torch.zeros_like(storage)
            for b, row in enumerate(slots):
                for t, slot in enumerate(row):
                    expected[1, b, :, slot] = states[b, :, t]
            assert torch.equal(storage, expected)

    def test_a_slot_beyond_the_capacity_is_not_written(self):
        module = triton_module("hf_static_kv.kernels.positions_triton")
        storage = torch.zeros(2, 2, 2, 4, 8, device=DEVICE)
        states = torch.ones(1, 2, 1, 8, device=DEVICE)
        slots = torch.tensor([[4]], device=DEVICE)
        module.write_tokens_triton(storage[0, :1], storage[1, :1], states, states, slots)
        assert storage.abs().sum() == 0

    @pytest.mark.parametrize(
        ("shape", "dtype", "message"),
        [
            (
                (1, 1, 1, 8),
                torch.bfloat16,
                "storage is torch.float32 and the states are torch.bfloat16",
            ),
            (
                (2, 1, 1, 8),
                torch.float32,
                r"must be \[1, 1, 1, 8\], as storage and slots, got \[2, 1, 1, 8\]",
            ),
            (
                (1, 1, 2, 8),
                torch.float32,
                r"must be \[1, 1, 1, 8\], as storage and slots, got \[1, 1, 2, 8\]",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, shape, dtype, message):
        storage, states = torch.zeros(1, 1, 4, 8), torch.zeros(shape, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            write_tokens(storage, storage.clone(), states, states, torch.tensor([[0]]))
        assert storage.abs().sum() == 0
