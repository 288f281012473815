"""Kernels that write and read keys and values in 8 bits, against those of plain PyTorch."""

import pytest
import torch

from hf_static_kv.cache.codes import decoded, encoded
from hf_static_kv.kernels.decode_attention import attend, invariant_attention_plain
from hf_static_kv.kernels.norm import STYLES, Norm
from hf_static_kv.kernels.rotary import rotate_and_write, rotate_and_write_plain
from tests.conftest import triton_module
from tests.kernels.test_invariant_kernels import spans_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def attention_kernels():
    """By name: kernel(query, keys, values, spans, softcap, sinks), and the most tokens that it takes."""
    decode = triton_module("hf_static_kv.kernels.decode_attention_triton").decode_attention_triton
    coded = triton_module("hf_static_kv.kernels.coded_attention_triton").coded_attention_triton
    prompt = triton_module("hf_static_kv.kernels.prompt_attention_triton").prompt_attention_triton
    return {
        "split": (lambda q, k, v, s, c, z: decode(q, k, v, s, None, 0.25, k.shape[2], c, z), 16),
        "coded": (lambda q, k, v, s, c, z: coded(q, k, v, s, 0.25, k.shape[2], c, z), 4),
        "coded, whole": (
            lambda q, k, v, s, c, z: coded(q, k, v, s, 0.25, k.shape[2], c, z, is_split=False),
            4,
        ),
        "prompt": (lambda q, k, v, s, c, z: prompt(q, k, v, s, 0.25, c, z, False), 1000),
    }


@pytest.mark.parametrize("name", ["split", "coded", "coded, whole", "prompt"])
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
@pytest.mark.parametrize("has_more", [False, True], ids=["bare", "softcap and sinks"])
def test_attention_reads_codes(name, num_tokens, has_more):
    kernel, most = attention_kernels()[name]
    if num_tokens > most:
        pytest.skip(f"the kernel takes {most} tokens")
    query, keys = normal(3, 8, num_tokens, 20), normal(3, 2, 150, 20, seed=1)
    values = normal(3, 2, 150, 16, seed=2) * 10.0 ** normal(3, 2, 150, 1, seed=3)
    spans = torch.cat(
        [spans_of(1, num_tokens, n, 3, w) for n, w in ((150, None), (33, 9), (23, None))]
    )
    softcap, sinks = (3.0, normal(8)) if has_more else (None, None)
    # A storage of several layers, and rows that other batches use.
    coded = [torch.zeros(2, 4, 2, 150, s.shape[-1] + 4, dtype=torch.int8) for s in (keys, values)]
    coded = [storage.to(DEVICE)[1, :3] for storage in coded]
    for storage, states in zip(coded, (keys, values), strict=True):
        storage.copy_(encoded(states))
    got = kernel(query, *coded, spans, softcap, sinks)
    states = [decoded(storage, torch.float32) for storage in coded]
    expected = invariant_attention_plain(query, *states, spans, 0.25, softcap, sinks)
    largest = states[1].abs().max()
    torch.testing.assert_close(got, expected, rtol=0, atol=float(2e-6 * largest))


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("style", [None, STYLES[0]], ids=["no norm", "norm"])
@pytest.mark.parametrize("has_angles", [True, False])
def test_rotated_keys_are_written_as_codes(num_tokens, style, has_angles):
    query, key = normal(2, 4, num_tokens, 24), normal(2, 2, num_tokens, 24, seed=1)
    value = normal(2, 2, num_tokens, 16, seed=2)
    value[0, 1, 0] = 0.0
    angles = normal(1, num_tokens, 48, seed=3).chunk(2, dim=-1) if has_angles else (None, None)
    norms = [None if style is None else Norm(normal(24, seed=n), 1e-6, style) for n in (4, 5)]
    slots = torch.arange(num_tokens, device=DEVICE).flip(0) + torch.tensor(
        [[0], [3]], device=DEVICE
    )
    slots[1, 0] = 40  # beyond the capacity
    module = triton_module("hf_static_kv.kernels.rotary_triton")
    results = []
    for function in (module.rotate_and_write_triton, rotate_and_write_plain):
        keys, values = (
            torch.full((3, 2, 2, 30, dim + 4), 7, dtype=torch.int8, device=DEVICE)
            for dim in (24, 16)
        )
        own = query, key, value, *angles, keys[1], values[1], slots, *norms
        results.append((function(*own), keys, values))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=4e-6)
    for (got, expected), dim in zip(
        zip(*[own[1:] for own in results], strict=True), (24, 16), strict=True
    ):
        # Nothing else is written.
        written = torch.zeros(3, 2, 2, 30, dtype=torch.bool, device=DEVICE)
        for b, row in enumerate(slots.tolist()):
            written[1, b][:, [slot for slot in row if slot < 30]] = True
        assert (got[~written] == 7).all()
        apart = decoded(got[written], torch.float32) - decoded(expected[written], torch.float32)
        scale = expected[written][:, dim:].contiguous().view(torch.float32)
        # The norm may round otherwise, and so may a code.
        assert (apart.abs() <= (1.001 if style else 1e-5) * scale + 1e-6).all()


def test_the_codes_are_those_of_plain_pytorch():
    """Halves included: both round to the nearest even."""
    key = torch.arange(-24, 24).float().view(1, 2, 1, 24).to(DEVICE) / 2
    key[..., 0] = 127.0
    keys, values = (torch.zeros(1, 2, 5, 28, dtype=torch.int8, device=DEVICE) for _ in range(2))
    module = triton_module("hf_static_kv.kernels.rotary_triton")
    slots = torch.tensor([[4]], device=DEVICE)
    module.rotate_and_write_triton(key, key, key, None, None, keys, values, slots, None, None)
    for storage in (keys, values):
        assert torch.equal(storage[:, :, 4], encoded(key)[:, :, 0])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(number):
    key = torch.ones(1, 1, 1, 16, device=DEVICE)
    key[..., 3] = number
    keys, values = (torch.zeros(1, 1, 5, 20, dtype=torch.int8, device=DEVICE) for _ in range(2))
    module = triton_module("hf_static_kv.kernels.rotary_triton")
    slots = torch.tensor([[4]], device=DEVICE)
    module.rotate_and_write_triton(key, key, key, None, None, keys, values, slots, None, None)
    assert decoded(keys[:, :, 4], torch.float32).isnan().all()
    assert not decoded(keys[:, :, :4], torch.float32).any()


def test_a_captured_pass_takes_the_kernels():
    """`attend` and `rotate_and_write` as the device chooses."""
    query, keys = normal(1, 4, 1, 16), normal(1, 2, 9, 16, seed=1)
    coded = encoded(keys)
    slots = torch.tensor([[5]], device=DEVICE)
    rotate_and_write(query, keys[:, :, :1], keys[:, :, :1], None, None, coded, coded.clone(), slots)
    spans = spans_of(1, 1, 7)
    got = attend(query, coded, coded, spans, 0.25, 9, None, None)
    states = decoded(coded, torch.float32)
    expected = invariant_attention_plain(query, states, states, spans, 0.25, None, None)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert torch.equal(coded[:, :, 5], encoded(keys[:, :, 0]))
