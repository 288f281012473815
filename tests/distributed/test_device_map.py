"""`device_map`: one process, layers on several devices or offloaded. The cache is where each layer
computes.
"""

import pytest
import torch
from accelerate import dispatch_model

from hf_static_kv import GraphDecoder, StaticContiguousCache, attached
from tests.conftest import COMMON, PROMPT, toy_model

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPREAD, OFFLOADED = (
    "the model is spread over cpu, cuda:0 (device_map=0",
    "a part of the model is offloaded",
)
# Where the first and the last two of four layers are, the main device, the devices of the cache,
# the decoder's reason.
PLACES = {
    "one device": ("cpu", "cpu", "cpu", ["cpu"] * 4, None),
    "on disk": ("cpu", "disk", "cpu", ["cpu"] * 4, OFFLOADED),
    "cpu, then gpu": ("cpu", "cuda:0", "cpu", ["cpu", "cpu", "cuda:0", "cuda:0"], SPREAD),
    "gpu, then cpu": ("cuda:0", "cpu", "cpu", ["cuda:0", "cuda:0", "cpu", "cpu"], SPREAD),
    "gpu, offloaded to the cpu": ("cuda:0", "cpu", "cuda:0", ["cuda:0"] * 4, OFFLOADED),
    "gpu, offloaded to disk": ("cuda:0", "disk", "cuda:0", ["cuda:0"] * 4, OFFLOADED),
}


def dispatched(name, first, last, main_device, folder):
    model = toy_model(name, num_hidden_layers=4)
    layers = {f"model.layers.{number}": first if number < 2 else last for number in range(4)}
    others = dict.fromkeys(
        ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), first
    )
    kwargs = {"main_device": main_device, "offload_dir": folder, "force_hooks": True}
    return dispatch_model(model, {**others, **layers}, **kwargs)


@pytest.mark.parametrize(
    "place", [pytest.param(name, marks=GPU if "gpu" in name else []) for name in PLACES]
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_every_layer_is_cached_where_it_computes(name, place, tmp_path):
    first, last, main_device, devices, reason = PLACES[place]
    expected = toy_model(name, num_hidden_layers=4).generate(PROMPT, **COMMON, use_cache=False)
    model = dispatched(name, first, last, main_device, tmp_path)
    ids, decoder = PROMPT.to(model.device if model.device.type != "meta" else "cpu"), GraphDecoder()
    early, lazy = (
        StaticContiguousCache.from_model(model, 32),
        StaticContiguousCache(model.config, 32),
    )
    assert [str(layer.device) for layer in early.layers] == devices
    assert len(early.storage_groups) == len(set(devices))
    for how in (
        {"past_key_values": early},
        {"past_key_values": lazy},
        {"custom_generate": decoder},
    ):
        assert torch.equal(model.generate(ids, **COMMON, **how).cpu(), expected)
    assert [str(layer.device) for layer in lazy.layers] == devices
    assert (
        decoder.fallback_reason is None
        if reason is None
        else decoder.fallback_reason.startswith(reason)
    )
    with attached(model, reuse_prefix=True) as info:
        assert all(torch.equal(model.generate(ids, **COMMON).cpu(), expected) for _ in range(2))
        assert [str(layer.device) for layer in info.caches[0].layers] == devices
        assert info.calls == 2
