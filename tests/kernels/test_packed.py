"""Packed weights: unpacking in plain PyTorch, and the kernels against float64; on a CPU they run in
Triton's interpreter.
"""

import re

import numpy as np
import pytest
import torch

from hf_static_kv.kernels import linear
from hf_static_kv.kernels.linear import Linear, fused_linears, fused_linears_plain
from hf_static_kv.kernels.norm import Norm, NormStyle
from hf_static_kv.kernels.packed import (
    LAYOUTS,
    MAX_TOKENS,
    TILE_STEPS,
    TRANSPOSED,
    is_readable,
    layout_of,
    unpacked,
)
from tests.kernels.test_step_kernels import DEVICE, DTYPES, normal
from tests.quantised_layers import FORMATS, Made, pack

pytest.importorskip("triton", reason="triton is not installed")

from hf_static_kv.kernels import packed_codes_triton, packed_triton
from hf_static_kv.kernels.packed_triton import packed_linears_triton

GEMMA = NormStyle(1.0, False)
SINGLE = torch.finfo(torch.float32).eps


def made(name, rows=24, columns=256, dtype=torch.float32, seed=0):
    return Made(name, rows, columns, dtype, DEVICE, seed)


def sums(x, weights, bias=0.0):
    """x w^T + b in float64, and how far float32 sums of rounded terms may be from it.

    A term is rounded four times (value with zero, scale, product, factor), a sum of K terms K times
    and at its end three times (row scale, bias, dtype).
    """
    whole = torch.cat([weight.exact for weight in weights])
    largest = torch.cat([weight.largest for weight in weights])
    exact = x.double() @ whole.T + bias
    terms = x.double().abs() @ largest.T + (bias.abs() if torch.is_tensor(bias) else 0.0)
    return exact, (x.shape[-1] + 8) * SINGLE * terms + torch.finfo(x.dtype).eps * exact.abs(), terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_unpacked_against_float64(name, dtype):
    weight = made(name, dtype=dtype)
    got = unpacked(weight.packed)
    bound = 4 * SINGLE * weight.largest + torch.finfo(dtype).eps * weight.exact.abs()
    assert got.dtype == dtype
    assert got.shape == weight.packed.shape == (24, 256)
    assert ((got.double() - weight.exact).abs() <= bound).all()
    assert is_readable(weight.packed)


class TestOneToken:
    # Whole rows, and tiles that K does not fill.
    @pytest.mark.parametrize(("columns", "has_bias"), [(256, True), (2304, False)])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_against_float64(self, name, dtype, columns, has_bias):
        weights = [made(name, rows, columns, dtype, rows) for rows in (16, 8, 24)]
        x = normal(1, columns, dtype=dtype)
        biases = [normal(weight.packed.rows, dtype=dtype) for weight in weights] if has_bias else []
        bias = torch.cat(biases).double() if has_bias else 0.0
        exact, bound, _ = sums(x, weights, bias)
        got = packed_linears_triton(x, [weight.packed for weight in weights], biases)
        assert got.dtype == dtype
        assert ((got.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("columns", [4, 12, 100])
    def test_short_rows(self, columns):
        weight, x = made("int8 rows", 5, columns), normal(1, columns)
        exact, bound, _ = sums(x, [weight])
        got = packed_linears_triton(x, [weight.packed], [])
        assert is_readable(weight.packed)
        assert ((got.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("name", ["blocks", "int8 groups", "wide int4 tiles"])
    def test_inputs_and_codes_that_are_not_aligned(self, name):
        weight = made(name, dtype=torch.float16)
        x = normal(1, 257, dtype=torch.float16)[:, 1:]
        stored = weight.packed.codes.view(-1).view(torch.uint8)
        codes = torch.cat([stored[:4], stored])[4:].view(weight.packed.codes.dtype)
        packed = weight.packed._replace(codes=codes.view(weight.packed.codes.shape))
        assert x.data_ptr() % 16 == 2
        assert packed.codes.data_ptr() % 16 == 4
        exact, bound, _ = sums(x, [weight])
        got = packed_linears_triton(x, [packed], [])
        assert ((got.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("rows", [1, 7])
    def test_an_odd_number_of_rows(self, rows):
        weights = [made("blocks", rows), made("blocks", 1, seed=1)]
        x = normal(1, 256)
        exact, bound, _ = sums(x, weights)
        got = packed_linears_triton(x, [weight.packed for weight in weights], [])
        assert ((got.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_a_norm_before(self, name, dtype):
        weight = made(name, dtype=dtype)
        x = 5 * normal(1, 256, dtype=dtype)
        norm = Norm(normal(256, dtype=dtype, seed=7), 1e-5, GEMMA)
        factor = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + norm.eps)
        states = x.double() * factor * (1 + norm.weight.double())
        exact = states @ weight.exact.T
        terms = states.abs() @ weight.largest.T
        got = packed_linears_triton(x, [weight.packed], [], norm)
        # Sums of the products and of the squares, and as many roundings of a term as of the sum.
        bound = (2 * 256 + 24) * SINGLE * terms + torch.finfo(dtype).eps * exact.abs()
        assert ((got.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("activation", ["", *linear.ACTIVATIONS])
    @pytest.mark.parametrize("is_gated", [False, True])
    def test_what_follows_the_sum(self, activation, is_gated):
        dtype = torch.float16
        weights = [made("blocks", dtype=dtype, seed=seed).packed for seed in (0, 1)]
        x = normal(1, 256, dtype=dtype) / 16
        residual = normal(1, 24 if is_gated else 48, dtype=dtype)
        layer = Linear(weights, [], None, activation, is_gated, residual)
        y = packed_linears_triton(x, weights, [])
        first, up = y.chunk(2, dim=-1) if is_gated else (y, 1)
        expected = residual + (linear.activate(first, activation) if activation else first) * up
        got = packed_linears_triton(x, *layer)
        # Two ways to compute exp, erf and tanh: 2 eps of what is rounded next, three times.
        bound = 8 * torch.finfo(dtype).eps * (residual.abs() + (first * up).abs() + first.abs())
        assert ((got - expected).abs() <= bound).all()


class TestFewTokens:
    @pytest.mark.parametrize("tokens", [2, 11, MAX_TOKENS])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("name", FORMATS)
    def test_against_float64(self, name, dtype, tokens):
        weights = [made(name, rows, 384, dtype, rows) for rows in (16, 8, 24)]
        x = normal(tokens, 384, dtype=dtype)
        biases = [normal(weight.packed.rows, dtype=dtype) for weight in weights]
        exact, bound, terms = sums(x, weights, torch.cat(biases).double())
        packed = weights[0].packed
        # A weight with groups is rounded to the dtype of x; a transposed one always is.
        if packed.group < 384 or packed.layout in TRANSPOSED:
            bound += torch.finfo(dtype).eps / 2 * terms
        got = packed_linears_triton(x, [weight.packed for weight in weights], biases)
        assert ((got.double() - exact).abs() <= bound).all()

    @pytest.mark.parametrize("name", ["nested blocks", "int8 rows", "int4 tiles"])
    def test_a_gate(self, name):
        weights = [made(name, seed=seed).packed for seed in (0, 1)]
        x = normal(3, 256) / 16
        got = packed_linears_triton(x, weights, [], None, "silu", True)
        expected = fused_linears_plain(x, Linear(weights, [], None, "silu", True))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    def test_what_follows_the_sum_of_one_token_alone(self):
        weight, x = made("blocks").packed, normal(2, 256)
        for around in ((None, "relu"), (None, "", False, x), (Norm(x[0], 1e-5, GEMMA),)):
            with pytest.raises(ValueError, match="run these apart"):
                packed_linears_triton(x, [weight], [], *around)


def result_of(ptx, operands, lanes=()):
    """$0 after some PTX: registers are float32 or, for operations of .b32 and .u32, their bits."""
    registers = {f"${i + 1}": value for i, value in enumerate(operands)}

    def number(name):
        if name not in registers:
            return np.uint32(int(name, 0))
        value = registers[name]
        return value.view(np.uint32) if isinstance(value, np.float32) else np.uint32(value)

    def real(name):
        value = registers[name]
        return value.view(np.float32) if isinstance(value, np.uint32) else value

    for line in re.findall(r"(?<![.\w])([a-z][a-z0-9.]*) ([^;{}]+);", ptx):
        name, arguments = line[0].split(".")[0], line[1].split(", ")
        to, of = arguments[0], arguments[1:]
        if name == "shr":
            registers[to] = number(of[0]) >> number(of[1])
        elif name == "mov":
            registers[to] = np.float32(of[0])
        elif name == "xor":
            registers[to] = number(of[0]) ^ number(of[1])
        elif name == "lop3":
            assert of[3] == "0xEA"
            registers[to] = number(of[0]) & number(of[1]) | number(of[2])
        elif name == "prmt":
            both = number(of[0]).tobytes() + number(of[1]).tobytes()
            chosen = [both[int(number(of[2])) >> 4 * i & 7] for i in range(4)]
            registers[to] = np.frombuffer(bytes(chosen), np.uint32)[0]
        elif name == "shfl":
            registers[to] = lanes[int(number(of[1])) & 31]
        elif name == "add":
            registers[to] = real(of[0]) + real(of[1])
        elif name == "fma":
            registers[to] = real(of[0]) * real(of[1]) + real(of[2])
        else:
            raise AssertionError(line)
    return float(registers["$0"])


class TestSumsOfWords:
    """The interpreter does not run the PTX: here it is done by hand, on words of each layout."""

    @staticmethod
    def words_and_codes(layout):
        """int32 words as the kernel has them, and the codes of each by position, of the first row."""
        bits, in_word, _ = LAYOUTS[layout]
        codes = torch.randint(0, 1 << bits, (8, 128))
        words = pack(codes, layout).reshape(-1).view(torch.int32).numpy().view(np.uint32)
        if layout == "halves":
            words = words >> 4 & 0x0F0F0F0F
        steps = TILE_STEPS if layout == "tiles" else range(in_word)
        for i in range(4):
            first = 32 * i if layout == "tiles" else in_word * i
            yield words[i], codes[0, [first + step for step in steps]].numpy()

    @pytest.mark.parametrize("layout", ["high_first", "low_first", "tiles"])
    def test_of_a_table(self, layout):
        text = packed_codes_triton._SUM_OF_LOW_FIRST
        if layout == "high_first":
            text = packed_codes_triton._SUM_OF_HIGH_FIRST
        table = np.random.default_rng(0).standard_normal(16).astype(np.float32)
        for word, codes in self.words_and_codes(layout):
            x = np.random.default_rng(1).standard_normal(8).astype(np.float32)
            got = result_of(text.value, [np.float32(9), word, *x], [*table, *table])
            assert got == pytest.approx(float(table[codes] @ x), rel=1e-5, abs=1e-5)

    @pytest.mark.parametrize("midpoint", [0, 8])
    @pytest.mark.parametrize("layout", ["low_first", "tiles"])
    def test_of_four_bits(self, layout, midpoint):
        zeros = [np.float32(-(2**23) - midpoint * 16**i) for i in range(4)]
        for word, codes in self.words_and_codes(layout):
            x = np.random.default_rng(1).standard_normal(8).astype(np.float32)
            inputs = [x[i] / np.float32(16 ** (i % 4)) for i in range(8)]
            got = result_of(packed_codes_triton._SUM_OF_INTEGERS.value, [word, *zeros, *inputs])
            expected = float((codes.astype(float) - midpoint) @ x)
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-5)

    @pytest.mark.parametrize("midpoint", [0, 3])
    @pytest.mark.parametrize("layout", ["bytes", "halves"])
    def test_of_bytes(self, layout, midpoint):
        zero = np.float32(-(2**23) - 128 - midpoint)
        for word, codes in self.words_and_codes(layout):
            x = np.random.default_rng(1).standard_normal(4).astype(np.float32)
            got = result_of(packed_codes_triton._SUM_OF_BYTES.value, [word, zero, *x])
            values = codes.astype(np.uint8).view(np.int8).astype(float) - midpoint
            assert got == pytest.approx(float(values @ x), rel=1e-5, abs=1e-3)


class TestPacked:
    def test_what_no_kernel_reads(self):
        weight = made("blocks").packed
        assert is_readable(weight)
        for wrong in (
            {"columns": 255},  # no whole words
            {"group": 96},  # groups do not end with rows
            {"rows": 25},  # more than there are codes
            {"codes": weight.codes[:, 0][::2]},
            {"scales": weight.scales[1:]},
            {"layout": "bytes"},
        ):
            assert not is_readable(weight._replace(**wrong)), wrong
        words = made("gptq").packed
        for wrong in (
            {"group": 16},  # groups of half a span
            {"scales": words.scales.contiguous()},
            {"scales": words.scales.float()},
            {"zeros": None},
            {"zeros": words.zeros.float()},
            {"zeros": words.zeros[1:]},
            {"midpoint": 8},
            {"layout": "awq"},
        ):
            assert not is_readable(words._replace(**wrong)), wrong
        tiles = made("int4 tiles", 24).packed
        assert not is_readable(tiles._replace(group=16))  # a word spans 32 columns

    def test_weights_of_one_launch_are_of_one_kind(self):
        blocks, rows = made("blocks").packed, made("int8 rows").packed
        assert layout_of(blocks) != layout_of(rows)
        assert layout_of(blocks) == layout_of(blocks._replace(rows=4))
        assert layout_of(made("blocks", seed=1).packed) == layout_of(blocks)
        assert layout_of(blocks._replace(table=blocks.table + 1)) != layout_of(blocks)
        with pytest.raises(ValueError, match="one kind"):
            fused_linears(normal(1, 256), Linear([blocks, rows], []))

    def test_shapes_and_dtypes_are_checked(self):
        weight = made("blocks").packed
        with pytest.raises(ValueError, match="do not fit"):
            fused_linears(normal(1, 128), Linear([weight], []))
        with pytest.raises(ValueError, match="one dtype"):
            fused_linears(normal(1, 256).half(), Linear([weight], []))

    def test_nothing_is_copied(self):
        weight = made("blocks").packed
        assert packed_triton._words(weight).data_ptr() == weight.codes.data_ptr()
