"""Rotation, write and attention in one launch; on a CPU it runs in Triton's interpreter."""

import pytest
import torch

from hf_static_kv.kernels import rope_attention
from hf_static_kv.kernels.decode_attention import decode_attention_plain
from hf_static_kv.kernels.norm import STYLES, Norm
from hf_static_kv.kernels.rope_attention import rotate_and_attend
from hf_static_kv.kernels.rotary import rotate_and_write_plain
from tests.conftest import triton_module
from tests.kernels.test_step_kernels import DEVICE, DTYPES, normal

pytest.importorskip("triton", reason="triton is not installed")

HEADS, KV_HEADS, CAPACITY = 6, 2, 90


def new_tokens(batch, tokens, dim, value_dim, dtype=torch.float32):
    """Query, key and value as views of one projection."""
    sizes = HEADS * dim, KV_HEADS * dim, KV_HEADS * value_dim
    parts = normal(batch, tokens, sum(sizes), dtype=dtype).split(sizes, dim=-1)
    dims = dim, dim, value_dim
    return [x.unflatten(-1, (-1, d)).transpose(1, 2) for x, d in zip(parts, dims, strict=True)]


def storage(batch, dim, dtype=torch.float32):
    return normal(batch, KV_HEADS, CAPACITY, dim, dtype=dtype, seed=dim)


def places(ends, tokens, window=None):
    """The slots [B, q] of the last tokens of rows of these lengths, and their spans [B, q, 3]."""
    slots = torch.tensor(ends)[:, None] - tokens + torch.arange(tokens)
    first = torch.full_like(slots, 2) if window is None else (slots + 1 - window).clamp(min=2)
    spans = torch.stack([torch.full_like(slots, 2), first, slots + 1], dim=-1)
    return slots.to(DEVICE), spans.to(DEVICE)


def kernel(*args):
    return triton_module("hf_static_kv.kernels.rope_attention_triton").rope_attention_triton(*args)


def check(new, angles, norms, keys, values, slots, spans, scale, softcap=None, sinks=None):
    """The storage and the output of the kernel, against one operation after the other."""
    own, expected_own = [[x.clone() for x in (keys, values)] for _ in range(2)]
    got = kernel(*new, *angles, *own, slots, *norms, spans, scale, softcap, sinks)
    query = rotate_and_write_plain(*new, *angles, *expected_own, slots, *norms)
    eps, eps_of_sums = torch.finfo(keys.dtype).eps, torch.finfo(torch.float32).eps
    # The sum of squares of a norm has another order, and an FMA of float32 rounds once.
    bound = 8 * eps if any(norms) or keys.dtype == torch.float32 else 0
    for mine, expected in zip(own, expected_own, strict=True):
        assert ((mine - expected).abs() <= bound * expected.abs().max()).all()
    expected = decode_attention_plain(query, *own, spans, None, scale, softcap, sinks)
    # A score is a sum of products of what was rounded up to 16 times. It changes the logarithm of a
    # weight, and so do all other scores. Weights and the output are rounded on either side.
    grouped = query.abs().float().unflatten(1, (KV_HEADS, -1)).flatten(2, 3)
    magnitude = (grouped @ own[0].abs().float().transpose(-1, -2)).max() * scale
    error = 2 * (query.shape[-1] + 16) * eps_of_sums * float(magnitude) + 4 * eps
    atol = error * float(own[1].abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


class TestKernel:
    @pytest.mark.parametrize("tokens", [1, 3, 5])
    @pytest.mark.parametrize("window", [None, 4, 70])
    def test_rows_of_several_lengths(self, tokens, window):
        new = new_tokens(3, tokens, 20, 16)
        angles = normal(3, tokens, 20), normal(3, tokens, 20, seed=1)
        where = places([90, 33, 12], tokens, window)
        states = storage(3, 20), storage(3, 16)
        for softcap, sinks in ((None, None), (3.0, None), (None, normal(HEADS))):
            check(new, angles, (None, None), *states, *where, 0.25, softcap, sinks)

    @pytest.mark.parametrize("style", STYLES, ids=str)
    def test_norms_of_heads(self, style):
        new = new_tokens(2, 2, 16, 16)
        angles = normal(1, 2, 16), normal(1, 2, 16, seed=1)  # of all batch rows
        norms = [Norm(normal(16, seed=i), 1e-6, style) for i in (1, 2)]
        states = storage(2, 16), storage(2, 16)
        check(new, angles, norms, *states, *places([60, 20], 2), 0.25)

    @pytest.mark.parametrize("has_norm", [False, True])
    def test_without_rotation(self, has_norm):
        norms = (Norm(normal(16), 1e-6, STYLES[0]),) * 2 if has_norm else (None, None)
        new = new_tokens(2, 1, 16, 16)
        where = places([60, 20], 1)
        check(new, (None, None), norms, storage(2, 16), storage(2, 16), *where, 0.25)

    @pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
    def test_half_precision(self, dtype):
        new = new_tokens(2, 2, 32, 32, dtype)
        angles = normal(1, 2, 32, dtype=dtype), normal(1, 2, 32, dtype=dtype, seed=1)
        states = storage(2, 32, dtype), storage(2, 32, dtype)
        check(new, angles, (None, None), *states, *places([60, 12], 2), 0.1)

    def test_a_full_cache_is_not_written(self):
        new = new_tokens(2, 2, 16, 16)
        keys, values = storage(2, 16), storage(2, 16)
        before = keys.clone(), values.clone()
        slots, spans = places([CAPACITY, CAPACITY], 2)
        slots += 1  # one is the last slot of the storage, and one is behind it
        kernel(*new, None, None, keys, values, slots, None, None, spans, 0.25, None, None)
        for states, old, its_new in zip((keys, values), before, new[1:], strict=True):
            assert torch.equal(states[:, :, :-1], old[:, :, :-1])
            assert torch.equal(states[:, :, -1], its_new[:, :, 0])


def arguments():
    where = places([60, 20], 1)
    angles = normal(1, 1, 16), normal(1, 1, 16, seed=1)
    return [
        *new_tokens(2, 1, 16, 16), *angles, storage(2, 16), storage(2, 16), where[0], None, None,
        where[1], 0.25, CAPACITY, None, None,
    ]  # fmt: skip


def test_few_rows_run_one_kernel_after_the_other():
    args = arguments()
    args[0] = args[0].cpu()  # a device that no number of rows fills
    args = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
    own = [x.clone() for x in args[5:7]]
    query = rotate_and_write_plain(*args[:5], *own, *args[7:10])
    expected = decode_attention_plain(query, *own, args[10], None, 0.25)
    torch.testing.assert_close(rotate_and_attend(*args), expected, rtol=0, atol=2e-6)
    assert torch.equal(args[5], own[0])


def test_many_rows_run_the_kernel(monkeypatch):
    module = triton_module("hf_static_kv.kernels.rope_attention_triton")
    monkeypatch.setattr(rope_attention, "is_joined", lambda *args: True)
    monkeypatch.setattr(module, "rope_attention_triton", lambda *args: len(args))
    assert rotate_and_attend(*arguments()) == 14


def test_what_does_not_fit_is_refused():
    args = arguments()
    args[7] = args[7][:1]
    with pytest.raises(ValueError, match="do not fit"):
        rotate_and_attend(*args)
