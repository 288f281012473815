"""Norms and rotary embeddings, each against its formula; on a CPU the kernels run in Triton's
interpreter.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_static_kv.kernels.linear import Linear, fused_linears
from hf_static_kv.kernels.norm import (
    KNOWN_STYLES,
    LAYER_NORM,
    STYLES,
    Norm,
    NormStyle,
    add_norm,
    norm,
    norm_plain,
)
from hf_static_kv.kernels.rotary import (
    rotary,
    rotary_plain,
    rotate_and_write,
    rotate_and_write_plain,
)
from tests.conftest import given, settings, st

pytest.importorskip("triton", reason="triton is not installed")
from hf_static_kv.kernels import norm_triton as norm_module
from hf_static_kv.kernels.norm_triton import norm_triton
from hf_static_kv.kernels.positions_triton import write_tokens_triton
from hf_static_kv.kernels.rotary_triton import rotary_triton, rotate_and_write_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies bfloat16 as integers and cuts off instead of rounding.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
ALL_STYLES = KNOWN_STYLES
EPS_32 = torch.finfo(torch.float32).eps


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def norm_of(dim, style, dtype=torch.float32, seed=0, eps=1e-6):
    bias = normal(dim, dtype=dtype, seed=seed + 2) if style.is_centred else None
    return Norm(normal(dim, dtype=dtype, seed=seed + 1), eps, style, bias)


def to_cpu(norm):
    return norm._replace(
        weight=norm.weight.cpu(), bias=None if norm.bias is None else norm.bias.cpu()
    )


def kernel(x, norm):
    """The Triton kernel itself, which `norm` takes on a GPU only."""
    return norm_triton(x, None, norm, None)[1]


def rms_norm_in_float64(x, norm):
    x, weight = x.double(), norm.weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * (norm.style.offset + weight)


@pytest.mark.parametrize("implementation", [kernel, norm_plain], ids=["triton", "plain"])
class TestNorm:
    @pytest.mark.parametrize("style", STYLES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "shape", [(1, 1, 2048), (2, 3, 1152), (1, 4, 1, 128), (5, 48)], ids=str
    )
    def test_rms_norm_against_float64(self, implementation, shape, dtype, style):
        x, its_norm = normal(*shape, dtype=dtype) * 3, norm_of(shape[-1], style, dtype)
        got, expected = implementation(x, its_norm), rms_norm_in_float64(x, its_norm)
        assert got.shape == x.shape
        assert got.dtype == dtype
        # The mean of D squares in float32 is off by (D + 4) eps32 at most, its root by half of
        # that; then two roundings to the model's dtype, of y and of the product: half of an eps
        # each, or of the spacing of the least numbers.
        info = torch.finfo(dtype)
        relative = (shape[-1] + 8) * EPS_32 + info.eps
        least = info.smallest_normal * info.eps * (1 + its_norm.weight.double().abs().max().item())
        assert ((got.double() - expected).abs() <= relative * expected.abs() + least).all()

    @pytest.mark.parametrize("mean", [0, 30])
    @pytest.mark.parametrize("has_bias", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "shape", [(1, 1, 2048), (2, 3, 1152), (1, 4, 1, 128), (5, 50), (3, 1)], ids=str
    )
    def test_layer_norm_against_float64(self, implementation, shape, dtype, has_bias, mean):
        x, (weight, eps, style, bias) = (
            normal(*shape, dtype=dtype) * 3 + mean,
            norm_of(shape[-1], LAYER_NORM, dtype),
        )
        got = implementation(x, Norm(weight, eps, style, bias if has_bias else None))
        assert got.shape == x.shape
        assert got.dtype == dtype
        x, weight, bias = (
            x.double(),
            weight.double(),
            bias.double() if has_bias else torch.zeros(1, device=DEVICE),
        )
        difference = x - x.mean(-1, keepdim=True)
        variance = difference.pow(2).mean(-1, keepdim=True)
        scaled = difference / (variance + eps).sqrt() * weight
        # In float32 the mean is off by e <= (D + 4) eps32 mean|x|, and so is each difference. That
        # adds e^2 to their mean square, as they sum to 0; the sum adds (D + 4) eps32, of which the
        # root halves all. A few eps32 for the other operations, at the size of x for PyTorch, which
        # computes x * scale - mean * scale. One rounding.
        dim = shape[-1]
        e = (dim + 4) * EPS_32 * x.abs().mean(-1, keepdim=True)
        absolute = (e + 4 * EPS_32 * x.abs()) * weight.abs() / (variance + eps).sqrt()
        relative = e.pow(2) / (2 * (variance + eps)) + (dim / 2 + 8) * EPS_32
        info = torch.finfo(dtype)
        rounding = (info.eps / 2 + 2 * EPS_32) * (
            scaled.abs() + bias.abs()
        ) + info.smallest_normal * info.eps
        assert (
            (got.double() - scaled - bias).abs()
            <= 1.01 * (absolute + relative * scaled.abs()) + rounding
        ).all()

    @pytest.mark.parametrize("style", ALL_STYLES, ids=str)
    def test_a_view_that_is_not_contiguous(self, implementation, style):
        x, its_norm = normal(4, 6, 32).transpose(0, 1), norm_of(32, style)
        assert torch.equal(implementation(x, its_norm), implementation(x.contiguous(), its_norm))

    @pytest.mark.parametrize("style", [STYLES[0], LAYER_NORM], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    # Not all are aligned.
    @pytest.mark.parametrize(("width", "dim"), [(2048, 128), (640, 64), (100, 20), (1000, 64)])
    def test_heads_beside_others_have_the_bits_of_heads_alone(
        self, implementation, width, dim, dtype, style
    ):
        x, its_norm = normal(3, 2, width, dtype=dtype), norm_of(dim, style, dtype)
        heads = x[..., dim : 5 * dim].unflatten(-1, (4, dim))
        assert torch.equal(
            implementation(heads, its_norm), implementation(heads.contiguous(), its_norm)
        )

    @pytest.mark.parametrize("style", ALL_STYLES, ids=str)
    def test_a_row_does_not_depend_on_the_others(self, implementation, style):
        x, its_norm = normal(7, 200), norm_of(200, style)
        assert torch.equal(implementation(x, its_norm)[3:4], implementation(x[3:4], its_norm))


def test_heads_that_stand_beside_others_are_not_copied(monkeypatch):
    projected, read = normal(3, 1, 640), []
    monkeypatch.setattr(
        norm_module, "launch", lambda kernel, grid, x, *args, **options: read.append(x)
    )
    heads = projected[..., 256:512].unflatten(-1, (4, 64))
    kernel(heads, norm_of(64, STYLES[0]))
    assert read[0].data_ptr() == heads.data_ptr()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_plain_layer_norm_is_torchs(has_bias):
    x, its_norm = normal(2, 40), norm_of(40, LAYER_NORM)
    its_norm = its_norm if has_bias else its_norm._replace(bias=None)
    assert torch.equal(
        norm_plain(x, its_norm),
        F.layer_norm(x, (40,), its_norm.weight, its_norm.bias, its_norm.eps),
    )


class TestAddNorm:
    @pytest.mark.parametrize("style", ALL_STYLES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dim", [96, 2048])
    def test_the_norm_of_a_sum_is_that_of_the_rounded_sum(self, dim, dtype, style):
        x, other, its_norm = (
            normal(2, 1, dim, dtype=dtype),
            normal(2, 1, dim, dtype=dtype, seed=1),
            norm_of(dim, style),
        )
        total, normed = norm_triton(x, other, its_norm, None)
        assert torch.equal(total, x + other)
        assert torch.equal(normed, kernel(x + other, its_norm))

    @pytest.mark.parametrize("style", ALL_STYLES, ids=str)
    @pytest.mark.parametrize("pre_style", ALL_STYLES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dim", [96] if DEVICE == "cpu" else [96, 1152])
    def test_a_norm_before_the_sum_has_the_bits_of_one_by_itself(
        self, dim, dtype, pre_style, style
    ):
        x, other = normal(2, 3, dim, dtype=dtype), normal(2, 3, dim, dtype=dtype, seed=1)
        its_norm, pre_norm = (
            norm_of(dim, style, dtype),
            norm_of(dim, pre_style, dtype, seed=5, eps=1e-5),
        )
        expected = x + kernel(other, pre_norm)
        total, normed = norm_triton(x, other, its_norm, pre_norm)
        assert torch.equal(total, expected)
        assert torch.equal(normed, kernel(expected, its_norm))

    @pytest.mark.parametrize("pre_style", [None, ALL_STYLES[-1]], ids=str)
    @pytest.mark.parametrize("parts", [1, 3])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_parts_are_added_and_rounded(self, dtype, parts, pre_style):
        x, others = normal(2, 3, 96, dtype=dtype), normal(parts, 2, 3, 96)
        its_norm = norm_of(96, ALL_STYLES[0], dtype)
        pre_norm = None if pre_style is None else norm_of(96, pre_style, dtype, seed=5)
        other = sum(others[1:], others[0]).to(dtype)  # in their order
        for run in (norm_triton, add_norm):
            got, expected = (run(x, y, its_norm, pre_norm) for y in (others, other))
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1])

    @pytest.mark.parametrize("pre_style", [None, *ALL_STYLES], ids=str)
    @pytest.mark.parametrize("style", ALL_STYLES, ids=str)
    def test_on_a_cpu_it_is_the_same_formula(self, style, pre_style):
        x, other, its_norm = (
            normal(2, 24).cpu(),
            normal(2, 24, seed=1).cpu(),
            to_cpu(norm_of(24, style)),
        )
        pre_norm = None if pre_style is None else to_cpu(norm_of(24, pre_style, seed=5))
        total, normed = add_norm(x, other, its_norm, pre_norm)
        assert torch.equal(total, x + (other if pre_norm is None else norm_plain(other, pre_norm)))
        assert torch.equal(normed, norm_plain(total, its_norm))


class TestWhatDoesNotFit:
    x, rms = torch.ones(2, 8), Norm(torch.ones(8), 1e-6, STYLES[0])

    def test_a_sum_of_unlike_tensors(self):
        message = r"x \(2, 8\) torch.float32 and other \(1, 8\) torch.float32 must be alike"
        with pytest.raises(ValueError, match=message):
            add_norm(self.x, torch.ones(1, 8), self.rms)

    @pytest.mark.parametrize("parts", [torch.ones(3, 1, 8), torch.ones(3, 2, 8).half()])
    def test_parts_of_another_sum(self, parts):
        with pytest.raises(ValueError, match="must be alike"):
            add_norm(self.x, parts, self.rms)

    @pytest.mark.parametrize(
        "weight", [torch.ones(4), torch.ones(2, 8), torch.ones(())], ids=lambda x: str(x.shape)
    )
    def test_a_weight_of_another_shape(self, weight):
        wrong = self.rms._replace(weight=weight)
        with pytest.raises(ValueError, match=r"x \(2, 8\) and weight \(.*\) do not fit"):
            norm(self.x, wrong)
        with pytest.raises(ValueError, match=r"x \(2, 8\) and weight \(.*\) do not fit"):
            add_norm(self.x, self.x, self.rms, wrong)

    def test_a_bias(self):
        with pytest.raises(ValueError, match=r"x \(2, 8\) and bias \(4,\) do not fit"):
            norm(self.x, Norm(torch.ones(8), 1e-6, LAYER_NORM, torch.ones(4)))
        with pytest.raises(ValueError, match="Only a LayerNorm has a bias"):
            norm(self.x, self.rms._replace(bias=torch.ones(8)))

    def test_a_layer_norm_of_another_style(self):
        with pytest.raises(ValueError, match=r"must be LAYER_NORM, .*, got NormStyle\(offset=1.0"):
            norm(self.x, self.rms._replace(style=NormStyle(1.0, False, True)))

    def test_an_unknown_style(self):
        """An offset would have no effect on a norm that is rounded before the product."""
        unknown = self.rms._replace(style=NormStyle(1.0, True))
        for run in (norm, lambda x, norm: fused_linears(x, Linear([self.x], [], norm))):
            with pytest.raises(ValueError, match=r"one of STYLES, .*, got NormStyle\(offset=1.0"):
                run(self.x, unknown)


class TestRotary:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (3, 1, 20)])
    @pytest.mark.parametrize(("length", "angle_rows"), [(1, 2), (5, 2), (5, 1)])
    def test_each_product_and_the_sum_are_rounded_as_by_themselves(
        self, dtype, heads, kv_heads, dim, length, angle_rows
    ):
        # Heads and tokens transposed, as a projection leaves them; cosines and sines side by side,
        # as a table has them.
        query, key = (
            normal(2, length, h, dim, dtype=dtype).transpose(1, 2) for h in (heads, kv_heads)
        )
        cos, sin = normal(angle_rows, length, 2 * dim, dtype=dtype).chunk(2, dim=-1)
        got, expected = rotary_triton(query, key, cos, sin), rotary_plain(query, key, cos, sin)
        for a, b in zip(got, expected, strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)

    @pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU the kernel takes nothing")
    def test_what_the_kernel_does_not_take_is_computed_plainly(self):
        # Of another dtype.
        query, key, angles = (
            normal(1, 2, 3, 8),
            normal(1, 1, 3, 8),
            normal(1, 3, 8).double(),
        )
        assert torch.equal(
            rotary(query, key, angles, angles)[0], rotary_plain(query, key, angles, angles)[0]
        )


def joint_heads(batch, sizes, dims, dtype=torch.float32, num_tokens=1):
    """Query, key and value [B, heads, q, dim] as views of one joint projection [B, q, N]."""
    widths = [size * dim for size, dim in zip(sizes, dims, strict=True)]
    parts = normal(batch, num_tokens, sum(widths), dtype=dtype).split(widths, dim=-1)
    return [
        part.unflatten(-1, (-1, dim)).transpose(1, 2) for part, dim in zip(parts, dims, strict=True)
    ]


def arguments(
    batch, sizes, dims, capacity, slots, dtype=torch.float32, angle_rows=1, styles=(None, None)
):
    """Those of `rotate_and_write`; the storage is that of one layer and of the first batch rows."""
    (heads, *_), (dim, _, value_dim) = sizes[1:], dims
    keys, values = (
        normal(2, batch + 1, heads, capacity, d, dtype=dtype)[1, :batch] for d in (dim, value_dim)
    )
    slots = [[slots]] * batch if isinstance(slots, int) else slots
    num_tokens = len(slots[0])
    angles = (None, None)
    if angle_rows:
        angles = normal(angle_rows, num_tokens, 2 * dim, dtype=dtype).chunk(2, dim=-1)
    norms = [
        None if style is None else norm_of(dim, style, dtype, seed=i)
        for i, style in enumerate(styles)
    ]
    heads = joint_heads(batch, sizes, dims, dtype, num_tokens=num_tokens)
    return [*heads, *angles, keys, values, torch.tensor(slots, device=DEVICE), *norms]


def clone_storage(arguments):
    """The same arguments with a storage of their own, of the same strides."""
    whole = [
        tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.element_size())
        for tensor in arguments[5:7]
    ]
    storage = []
    for copy, tensor in zip(whole, arguments[5:7], strict=True):
        copy.copy_(tensor.as_strided(copy.shape, (1,), 0))
        storage.append(copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return [*arguments[:5], *storage, *arguments[7:]], whole


def separate_kernels(query, key, value, cos, sin, keys, values, slots, query_norm, key_norm):
    query = query if query_norm is None else kernel(query, query_norm)
    key = key if key_norm is None else kernel(key, key_norm)
    if cos is not None:
        query, key = rotary_triton(query, key, cos, sin)
    write_tokens_triton(keys, values, key, value, slots)
    return query


def check_bits(arguments, **options):
    """One kernel has the bits of the separate ones, in the query and in the whole storage around
    what it writes.
    """
    results = []
    for function in (rotate_and_write_triton, separate_kernels):
        own, whole = clone_storage(arguments)
        results.append(
            (function(*own, **(options if function is rotate_and_write_triton else {})), *whole)
        )
    assert results[0][0].is_contiguous()
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert torch.equal(got, expected)
    return results[0]


class TestRotateAndWrite:
    @pytest.mark.parametrize("angles_ready", [False, True])
    @pytest.mark.parametrize("style", [None, *STYLES], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    # The interpreter takes its time.
    @pytest.mark.parametrize("dim", [80] if DEVICE == "cpu" else [64, 80, 128, 256])
    @pytest.mark.parametrize("batch", [1, 2])
    def test_the_shapes_of_models(self, batch, dim, dtype, style, angles_ready):
        check_bits(
            arguments(batch, (2, 1, 1), (dim,) * 3, 9, 4, dtype, styles=(style, style)),
            angles_ready=angles_ready,
        )

    @pytest.mark.parametrize("style", [None, *STYLES], ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dim", [80] if DEVICE == "cpu" else [64, 80, 128, 256, 512])
    @pytest.mark.parametrize("num_tokens", [17, 40])
    def test_many_tokens(self, num_tokens, dim, dtype, style):
        """Several in a kernel instance; the last ones, and those of padding, have no slot."""
        slots = [[1 << 40] * 3 + list(range(5, num_tokens + 2))] * 2
        check_bits(arguments(2, (4, 2, 2), (dim,) * 3, num_tokens, slots, dtype, 2, (style, style)))

    @given(
        batch=st.integers(1, 3),
        groups=st.integers(1, 3),
        heads=st.integers(1, 2),
        half=st.integers(1, 40),
        value_dim=st.integers(1, 70),
        num_tokens=st.integers(1, 3),
        begin=st.integers(0, 7),  # the capacity is 6
        dtype=st.sampled_from(DTYPES),
        angle_rows=st.sampled_from(["none", "one", "all"]),
        style=st.sampled_from([None, *STYLES]),
        angles_ready=st.booleans(),
    )
    @settings(max_examples=20, deadline=None)
    def test_the_bits_of_the_separate_kernels(
        self,
        batch,
        groups,
        heads,
        half,
        value_dim,
        num_tokens,
        begin,
        dtype,
        angle_rows,
        style,
        angles_ready,
    ):
        sizes, dims = (groups * heads, heads, heads), (2 * half, 2 * half, value_dim)
        rows = {"none": 0, "one": 1, "all": batch}[angle_rows]
        slots = [[(begin + b) % 8 + t for t in range(num_tokens)] for b in range(batch)]
        own = arguments(batch, sizes, dims, 6, slots, dtype, rows, (style, style))
        before = clone_storage(own)[1]
        _, *after = check_bits(own, angles_ready=angles_ready)
        if min(map(min, slots)) >= 6:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        elif style is None and max(map(max, slots)) < 6:
            own, whole = clone_storage(own)
            rotate_and_write_plain(*own)
            assert all(torch.equal(a, b) for a, b in zip(whole, after, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dim", [6, 64])
    def test_heads_of_other_strides(self, dim, dtype):
        """As GPT-NeoX has them, query, key and value of a head side by side; then with a stride in
        the last dim.
        """
        heads = normal(2, 1, 4, 3 * dim, dtype=dtype).transpose(1, 2).chunk(3, dim=-1)
        rest = arguments(2, (4, 4, 4), (dim,) * 3, 5, 3, dtype, styles=STYLES[:1] * 2)[3:]
        check_bits([*heads, *rest])
        strided = normal(2, 12, dim, 1, dtype=dtype).transpose(2, 3).split(4, dim=1)
        check_bits([*strided, *rest])

    @pytest.mark.parametrize(
        "styles", [(STYLES[0], None), (None, STYLES[2]), STYLES[:2], STYLES[1:2] * 2], ids=str
    )
    def test_as_the_device_chooses(self, styles):
        own, whole = clone_storage(arguments(2, (4, 2, 2), (16, 16, 8), 6, 5, styles=styles))
        twin, expected = clone_storage(own)
        query, expected_query = rotate_and_write(*own), rotate_and_write_plain(*twin)
        assert query.shape == (2, 4, 1, 16)
        assert query.is_contiguous()
        assert torch.equal(query, expected_query)
        assert all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True))

    def test_the_plain_twin_is_the_formula(self):
        query, key, value, cos, sin, keys, values, position, *norms = arguments(
            2, (4, 2, 2), (16, 16, 8), 6, 5, styles=STYLES[:1] * 2
        )
        got = rotate_and_write(query, key, value, cos, sin, keys, values, position, *norms)
        query, key = rotary_plain(norm_plain(query, norms[0]), norm_plain(key, norms[1]), cos, sin)
        torch.testing.assert_close(got, query)
        torch.testing.assert_close(keys[:, :, 5:], key)
        assert torch.equal(values[:, :, 5:], value)

    @pytest.mark.parametrize(
        ("index", "wrong", "message"),
        [
            (
                0,
                torch.ones(2, 4, 2, 16),
                r"query \[2, 4, 2, 16\], key \[2, 2, 1, 16\], .* do not fit",
            ),
            (
                1,
                torch.ones(2, 2, 1, 14),
                r"key \[2, 2, 1, 14\], value \[2, 2, 1, 8\], .* do not fit",
            ),
            (
                2,
                torch.ones(2, 3, 1, 8),
                r"value \[2, 3, 1, 8\], keys \[2, 2, 6, 16\], .* do not fit",
            ),
            (
                5,
                torch.ones(3, 2, 6, 16),
                r"keys \[3, 2, 6, 16\], values \[2, 2, 6, 8\] and .* do not fit",
            ),
            (
                6,
                torch.ones(2, 2, 5, 8),
                r"keys \[2, 2, 6, 16\], values \[2, 2, 5, 8\] and .* do not fit",
            ),
            (6, torch.ones(2, 2, 6), r"keys \[2, 2, 6, 16\], values \[2, 2, 6\] and .* do not fit"),
            (
                3,
                None,
                r"must be \[2, 1, 16\] or \[1, 1, 16\], or both None, got None and \[1, 1, 16\]",
            ),
            (
                4,
                torch.ones(1, 1, 8),
                r"must be \[2, 1, 16\] or .*, got \[1, 1, 16\] and \[1, 1, 8\]",
            ),
            (
                2,
                torch.ones(2, 2, 1, 8).half(),
                "must have one dtype, got torch.float32, torch.float32, torch.float16",
            ),
            (7, torch.tensor([[1], [2], [3]]), r"and slots \[3, 1\] do not fit"),
            (7, torch.tensor([[1.0], [2.0]]), "slots must be torch.int64, got torch.float32"),
            (
                8,
                Norm(torch.ones(8), 1e-6, STYLES[0]),
                r"x \(2, 4, 1, 16\) and weight \(8,\) do not fit",
            ),
            (9, Norm(torch.ones(16), 1e-6, LAYER_NORM), "takes RMS norms, got a LayerNorm"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, index, wrong, message):
        own = arguments(2, (4, 2, 2), (16, 16, 8), 6, 5)
        own[index] = wrong
        with pytest.raises(ValueError, match=message):
            rotate_and_write(*own)

    def test_an_odd_head_dim_is_refused(self):
        with pytest.raises(ValueError, match="needs an even head dim, got 5"):
            rotate_and_write(*arguments(1, (2, 1, 1), (5, 5, 5), 6, 5))

    def test_a_storage_with_a_stride_in_its_last_dim_is_refused(self):
        own = arguments(1, (2, 1, 1), (16, 16, 16), 16, 5)
        own[5] = own[5].transpose(2, 3)
        with pytest.raises(ValueError, match="keys and values whose last dim has stride 1"):
            rotate_and_write_triton(*own)


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "function", [norm, add_norm, rotary, rotate_and_write], ids=lambda f: f.__name__
)
def test_a_function_mode_sees_one_call(function):
    x, its_norm = normal(2, 16), norm_of(16, STYLES[0])
    own = arguments(2, (4, 2, 2), (16, 16, 8), 6, 5, styles=STYLES[:1] * 2)
    query, key, _, cos, sin, *_ = own
    given = {
        norm: [x, its_norm],
        add_norm: [x, x, its_norm],
        rotary: [query, key, cos, sin],
        rotate_and_write: own,
    }
    expected = function(*given[function])
    with Calls() as calls:
        got = function(*given[function])
    assert calls.functions == [function]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_function_mode_sees_keywords():
    own = arguments(2, (4, 2, 2), (16, 16, 8), 6, 5)
    with Calls() as calls:
        rotate_and_write(*own, angles_ready=True)
    assert calls.functions == [rotate_and_write]
