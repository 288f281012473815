"""Decode attention over codes, by its own kernel."""

import re

import numpy as np
import pytest
import torch

from hf_static_kv.cache.codes import decoded, encoded
from hf_static_kv.kernels.decode_attention import attend, invariant_attention_plain
from tests.conftest import triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def module():
    return triton_module("hf_static_kv.kernels.coded_attention_triton")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def coded_rows(spans, heads, capacity, dim, seed):
    """Codes [B, H, S, D + 4] of the positions that a query attends to; all others are any bytes."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(spans), heads, capacity, dim + 4
    coded = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    for row, own in zip(coded, spans.tolist(), strict=True):
        positions = slice(min(first for _, first, _ in own), max(end for *_, end in own))
        states = torch.randn(heads, capacity, dim, generator=generator)
        row[:, positions] = encoded(states)[:, positions]
    return coded.to(DEVICE)


def expected(query, coded, spans, softcap=None, sinks=None):
    """In float64, of the codes as they are; zeros where a span is empty."""
    keys, values = (decoded(own, torch.float64).nan_to_num(0.0, 0.0, 0.0) for own in coded)
    sinks = None if sinks is None else sinks.double()
    return invariant_attention_plain(query.double(), keys, values, spans, 0.25, softcap, sinks)


# One token, of a batch row with padding; the last positions; nothing; several tokens, with a window.
SPANS = {
    "one token": [[[0, 0, 1]], [[3, 3, 37]]],
    "full": [[[0, 0, -1]], [[0, 40, -1]]],
    "empty": [[[0, 0, 0]], [[5, 5, 5]]],
    "three tokens": [[[0, 0, 40], [0, 1, 41], [0, 30, 42]], [[9, 9, 46], [9, 9, 47], [9, 9, 48]]],
}


@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("capacity", [50, 130, 400])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_every_span_and_capacity(name, capacity, parts, monkeypatch):
    """Shorter than a tile, a little longer, and of several tiles."""
    ours = module()
    monkeypatch.setattr(ours, "processors", lambda tensor: parts)
    monkeypatch.setattr(ours, "_SPLIT", {64: (2, 32, 3, 4)})  # of two rows with two heads
    spans = torch.tensor(SPANS[name], device=DEVICE)
    spans[spans == -1] = capacity
    coded = [coded_rows(spans, 2, capacity, dim, seed) for seed, dim in ((1, 32), (2, 20))]
    query = normal(2, 6, spans.shape[1], 32)
    how = {"is_split": parts > 0}
    got = ours.coded_attention_triton(query, *coded, spans, 0.25, capacity, **how)
    torch.testing.assert_close(got.double(), expected(query, coded, spans), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_split", [True, False])
def test_in_half_precision(dtype, is_split):
    """On a GPU the codes are unpacked by PTX. A weight and the output are rounded to the dtype."""
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16")
    spans = torch.tensor([[[0, 0, 300]], [[0, 30, 299]]], device=DEVICE)
    coded = [coded_rows(spans, 2, 300, 64, seed) for seed in (1, 2)]
    query, sinks = normal(2, 6, 1, 64).to(dtype), normal(6).to(dtype)
    how = 20.0, sinks, False, is_split
    got = module().coded_attention_triton(query, *coded, spans, 0.25, 300, *how)
    right = expected(query, coded, spans, 20.0, sinks)
    largest = decoded(coded[1][:, :, 30:299], torch.float64).abs().max().item()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), right, rtol=0, atol=eps * largest)


def test_a_layer_that_begins_anywhere():
    """The second layer of a storage begins 4 bytes behind a multiple of 16."""
    spans = torch.tensor([[[0, 5, 149]]], device=DEVICE)
    coded = [coded_rows(spans, 1, 149, 32, seed) for seed in (1, 2)]
    layers = [torch.stack([own, own])[1] for own in coded]
    assert layers[0].storage_offset() % 16 == 4
    query = normal(1, 2, 1, 32)
    got, right = (
        module().coded_attention_triton(query, *own, spans, 0.25, 149) for own in (layers, coded)
    )
    assert torch.equal(got, right)


def test_the_capacity_changes_no_bit():
    """Also of a span that ends with the buffer, or near its end."""
    spans = torch.tensor([[[0, 7, 130]]], device=DEVICE)
    coded = [coded_rows(spans, 2, 400, 64, seed) for seed in (1, 2)]
    query = normal(1, 6, 1, 64)
    first, *others = (
        module().coded_attention_triton(
            query, *[own[:, :, :capacity].contiguous() for own in coded], spans, 0.25, capacity
        )
        for capacity in (130, 131, 200, 257, 400)
    )
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_shows(number):
    spans = torch.tensor([[[0, 0, 200]]], device=DEVICE)
    coded = [coded_rows(spans, 1, 200, 32, seed) for seed in (1, 2)]
    states = torch.full((1, 32), 1.0)
    states[0, 3] = number
    coded[1][0, 0, 150] = encoded(states)[0]
    got = module().coded_attention_triton(normal(1, 2, 1, 32), *coded, spans, 0.25, 200)
    assert got.isnan().all()


def test_a_captured_pass_takes_the_kernel():
    """`attend` as the device chooses."""
    spans = torch.tensor([[[0, 0, 300]]], device=DEVICE)
    coded = [coded_rows(spans, 2, 400, 64, seed) for seed in (1, 2)]
    query = normal(1, 6, 1, 64).bfloat16()
    got = attend(query, *coded, spans, 0.25, 400, None, None)
    right = expected(query, coded, spans)
    # On a CPU keys and values are rounded as well.
    torch.testing.assert_close(got.double(), right, rtol=0, atol=0.05)


def pairs_of(name, ptx, pairs):
    """$0 and $1 after the PTX that unpacks two pairs: an array of them in place of $2."""
    registers = {"$2": pairs.astype(np.uint32)}

    def number(of):
        return registers[of] if of in registers else np.uint32(int(of, 0))

    def halves(of):
        """The two numbers in half precision in 32 bits."""
        bits = np.stack([number(of) & 0xFFFF, number(of) >> 16]).astype(np.uint32)
        if name == "f16":
            return bits.astype(np.uint16).view(np.float16).astype(np.float64)
        return (bits << 16).view(np.float32).astype(np.float64)

    for operation, arguments in re.findall(r"(?<![.\w])([a-z][a-z0-9.]*) ([^;{}]+);", ptx):
        to, *of = arguments.split(", ")
        if operation == "shr.u32":
            registers[to] = number(of[0]) >> number(of[1])
        elif operation == "mov.b32":
            registers[to] = np.broadcast_to(number(of[0]), pairs.shape)
        elif operation == "lop3.b32":
            assert of[3] == "0x6a"
            registers[to] = number(of[0]) & number(of[1]) ^ number(of[2])
        else:
            assert operation == f"fma.rn.{name}x2"
            registers[to] = halves(of[0]) * halves(of[1]) + halves(of[2])
    return registers["$0"], registers["$1"]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_all_pairs_are_unpacked(name):
    """The interpreter does not run the PTX: here it is done by hand."""
    ours = module()
    dtype = torch.float16 if name == "f16" else torch.bfloat16
    ptx = ours._UNPACK_FLOAT16 if name == "f16" else ours._UNPACK_BFLOAT16
    pair = np.arange(1 << 16, dtype=np.uint32)
    low, high = pairs_of(name, ptx.value, pair | pair[::-1] << 16)
    codes = pair.astype(np.uint16).view(np.int8).reshape(-1, 2).astype(np.float64)
    unit = ours._UNITS[dtype]
    for got, own in zip((low, high), codes.T, strict=True):
        np.testing.assert_array_equal(got * unit, [own, own[::-1]])
    numbers = torch.arange(-128, 128) / unit
    assert torch.equal(numbers.to(dtype).float(), numbers)  # each code is exact
