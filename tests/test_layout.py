"""What is read from a config: windows, shapes, bytes. The numbers of the dev models are their published ones."""

import pytest
import torch
from accelerate import cpu_offload
from architectures import ARCHITECTURES, toy_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3Config,
    PreTrainedConfig,
)

from hf_static_kv import StaticContiguousCache, cache_bytes
from hf_static_kv.layout import plan_layers
from hf_static_kv.storage import LayerShape
from hf_static_kv.testing import dev_config

LLAMA, QWEN3, GEMMA3 = (dev_config(name) for name in ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"))


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [(LLAMA, 32_768), (QWEN3, 114_688), (GEMMA3, 26_624)],
    ids=["llama", "qwen3", "gemma3"],
)
def test_bytes_of_the_dev_models(config, bytes_per_token):
    assert cache_bytes(config, 1024, dtype=torch.bfloat16) == 1024 * bytes_per_token
    assert cache_bytes(config, 8192, batch_size=3, dtype=torch.float32) == 2 * 3 * 8192 * bytes_per_token


def test_the_dtype_defaults_to_the_configs_own():
    config = dev_config("llama-3.2-1b")
    config.dtype = torch.bfloat16
    assert cache_bytes(config, 1024) == 1024 * 32_768


def test_gemma_3_has_five_sliding_layers_to_one_full():
    windows = [plan.sliding_window for plan in plan_layers(GEMMA3)]
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17, 23]
    assert {window for window in windows if window is not None} == {512}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bytes_foretold_are_the_bytes_allocated(name):
    """`cache_bytes`, `from_model` and the storage that the states ask for agree."""
    model = toy_model(name, attn="eager")
    early = StaticContiguousCache.from_model(model, 32, batch_size=2)
    lazy = StaticContiguousCache(model.config, 32)
    with torch.no_grad():
        model(torch.ones(2, 3, dtype=torch.long), past_key_values=lazy)
    assert cache_bytes(model.config, 32, 2, torch.float32) == early.memory_bytes == lazy.memory_bytes
    assert len(early.storage_groups) == len(lazy.storage_groups) == 1
    assert early.key_storage.shape == lazy.key_storage.shape


COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
LATENT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
# name: (config, shapes of the storage groups: layers, heads, key dim, value dim)
UNUSUAL: dict[str, tuple[PreTrainedConfig, list]] = {
    # the last two layers read earlier keys and values and store none
    "gemma3n": (
        AutoConfig.for_model(
            "gemma3n_text", **{**COMMON, "intermediate_size": [64] * 6}, activation_sparsity_pattern=None
        ),
        [(4, 2, 16, 16)],
    ),
    # full layers have larger heads than sliding ones
    "gemma4": (AutoConfig.for_model("gemma4_text", **COMMON, global_head_dim=32), [(2, 2, 16, 16), (2, 2, 32, 32)]),
    # caches a latent of dim 24 as keys and the rotary part of dim 8 as values
    "deepseek_v3": (AutoConfig.for_model("deepseek_v3", **LATENT), [(2, 1, 24, 8)]),
    # one KV head, said in words of its own
    "falcon": (
        AutoConfig.for_model("falcon", vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        [(2, 1, 16, 16)],
    ),
}


@pytest.mark.parametrize("early", [True, False], ids=["from_model", "lazy"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_layers(name, early):
    config, expected = UNUSUAL[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(3, 16)[None]
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cache = StaticContiguousCache.from_model(model, 32) if early else StaticContiguousCache(model.config, 32)
    cached = model.generate(ids, past_key_values=cache, **options)
    assert cached.tolist() == model.generate(ids, use_cache=False, **options).tolist()
    groups = [
        (group.keys.shape[0], *(vars(group.shape)[f] for f in vars(group.shape))) for group in cache.storage_groups
    ]
    assert groups == expected
    assert cache.memory_bytes == cache_bytes(config, 32, dtype=torch.float32)


def test_a_config_that_does_not_tell_its_heads_is_learned_from_the_states():
    class BareConfig(PreTrainedConfig):
        model_type = "bare"
        num_hidden_layers = 2

    with pytest.raises(ValueError, match="config of 'bare' does not tell the number of KV heads"):
        cache_bytes(BareConfig(), 8)
    cache = StaticContiguousCache(BareConfig(), 8)
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert [layer.shape for layer in cache.layers] == [LayerShape(2, 4, 4)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_the_dtype_of_a_composite_config_is_its_text_configs(dtype):
    config = Gemma3Config(text_config=GEMMA3.to_dict())
    config.dtype = None
    config.text_config.dtype = dtype
    assert cache_bytes(config, 1024) == 1024 * 26_624


def test_an_offloaded_model_computes_on_its_execution_device():
    model = cpu_offload(toy_model("llama"), execution_device=torch.device("cpu"))
    cache = StaticContiguousCache.from_model(model, 16)
    assert [layer.device.type for layer in cache.layers] == ["cpu", "cpu"]
    ids = torch.tensor([[5, 6, 7]])
    tokens = model.generate(ids, past_key_values=cache, attention_mask=torch.ones_like(ids), max_new_tokens=5)
    assert cache.seq_len == tokens.shape[1] - 1


def test_under_autocast_keys_and_values_may_differ_in_dtype():
    """RoPE leaves the keys in float32, the values come out of their linear in bfloat16; both are kept as they are."""
    model = toy_model("qwen3")
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    cache = StaticContiguousCache(model.config, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = model.generate(ids, past_key_values=cache, **options)
        expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    assert tokens.tolist() == expected.tolist()
    assert (cache.key_storage.dtype, cache.value_storage.dtype) == (torch.float32, torch.bfloat16)


def test_each_layer_is_placed_where_it_computes():
    """A model spread over devices: here the second half of its layers is on `meta`, as accelerate would say it."""
    model = toy_model("llama", num_hidden_layers=4)
    for layer in model.model.layers[2:]:
        layer.self_attn._hf_hook = type("Hook", (), {"execution_device": "meta"})()
    cache = StaticContiguousCache.from_model(model, 16)
    assert [layer.device.type for layer in cache.layers] == ["cpu", "cpu", "meta", "meta"]
    assert [group.keys.shape[0] for group in cache.storage_groups] == [2, 2]
