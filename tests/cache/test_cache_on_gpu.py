"""The cache on a CUDA device:

the same tokens, a stable address, and no device-side assert from bad input.
"""

import pytest
import torch

from hf_static_kv import StaticContiguousCache
from tests.conftest import ARCHITECTURES, toy_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COMMON = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}


def run(model, ids, cache, **options):
    torch.manual_seed(42)
    how = {"use_cache": False} if cache is None else {"past_key_values": cache}
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, **COMMON, **how, **options).tolist()


def toy(name):
    return toy_model(name, attn="eager" if name in ("gemma2", "gpt_oss") else "sdpa").cuda()


@pytest.mark.parametrize(
    "options", [{"do_sample": True, "temperature": 0.7}, {"num_beams": 3}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mistral", "gpt2"])
def test_sampling_and_beams(name, options):
    """In float64, whole prompts, five architectures.

    Not covered: seeded sampling in float32 on a left-padded batch. On an H200 (torch 2.11) 1 of 14
    runs parted from `use_cache=False` in its last tokens (Cohere2); why is not known. On a CPU none
    of 348 did.
    """
    model = toy(name).double()
    ids = torch.randint(3, 128, (2, 13), device="cuda")
    cache = StaticContiguousCache(model.config, 64)
    assert run(model, ids, cache, **options) == run(model, ids, None, **options)
    assert cache.key_storage.is_cuda


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_on_a_left_padded_batch(name):
    model = toy(name)
    ids = torch.randint(3, 128, (2, 13), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cached = run(
        model, ids, StaticContiguousCache(model.config, 64), attention_mask=mask, do_sample=False
    )
    assert cached == run(model, ids, None, attention_mask=mask, do_sample=False)


def test_bad_input_is_refused_before_the_device_sees_it():
    """After each refusal the device still works: nothing was asserted there."""
    model = toy_model("llama").cuda()
    cache = StaticContiguousCache.from_model(model, 20, batch_size=2)
    ids = torch.randint(3, 128, (2, 10), device="cuda")
    with torch.no_grad():
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="Row 7 is out of range"):
        cache.reorder_cache(torch.tensor([0, 7], device="cuda"))
    with pytest.raises(ValueError, match="cache is full"), torch.no_grad():
        model(ids[:, :1].repeat(1, 11), past_key_values=cache)
    cpu_states = torch.ones(2, 2, 1, 16)
    with pytest.raises(ValueError, match=r"cpu.*storage is.*cuda"):
        cache.update(cpu_states, cpu_states, 0)
    torch.cuda.synchronize()
    assert cache.seq_len == 10
    cache.reset()
    assert (
        run(model, ids[:, :3], None, do_sample=False)[0][:5]
        == run(model, ids[:, :3], StaticContiguousCache(model.config, 64), do_sample=False)[0][:5]
    )


def test_storage_lands_where_the_model_is():
    model = toy_model("llama", num_hidden_layers=2).cuda()
    cache = StaticContiguousCache.from_model(model, 8)
    assert {layer.device for layer in cache.layers} == {model.device}
