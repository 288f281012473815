"""Samples of weights: what a write into a weight changes, read by a graph where that is known."""

import pytest
import torch

from hf_static_kv.cache.samples import NUM_SAMPLED, Samples, sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.slow)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_a_sample_is_spread_over_the_whole_tensor(device, dtype):
    tensor = torch.arange(160, device=device).to(dtype)
    bits = tensor.view(torch.uint8) if dtype.itemsize == 1 else tensor
    assert torch.equal(sample(tensor), bits[::10])
    assert torch.equal(sample(tensor.view(10, 16).T), bits.view(10, 16).T.flatten()[::10])
    assert len(sample(tensor[:3])) == 3
    assert len(sample(tensor[:100])) == NUM_SAMPLED


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_read_again_follows_the_weights(device):
    weights = [torch.randn(40, device=device), torch.randn(3, 5, device=device).bfloat16()]
    samples = Samples()
    places = [weight.data_ptr() for weight in weights]
    read = [samples.read(weights, places) for _ in range(3)]
    assert read[0] == read[1] == read[2]
    assert read[0] == (tuple(weights[0][::2][:16].tolist()), tuple(weights[1].flatten().tolist()))
    weights[1].data[0, 0] = 7
    assert samples.read(weights, places)[1][0] == 7
    other = [weights[0] + 1, weights[1]]
    moved = samples.read(other, [weight.data_ptr() for weight in other])
    assert moved[0] == tuple((weights[0] + 1)[::2][:16].tolist())


@pytest.mark.slow
def test_a_graph_keeps_no_weight_alive():
    weight = torch.zeros(64 << 20, device="cuda")
    samples = Samples()
    for _ in range(2):
        samples.read([weight], weight.data_ptr())
    before = torch.cuda.memory_allocated()
    del weight
    assert torch.cuda.memory_allocated() <= before - (256 << 20)
