"""What is read from a config:

windows, shapes, bytes. The numbers of the dev models are their published ones.
"""

from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    Gemma3Config,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv import StaticContiguousCache, cache_bytes
from hf_static_kv.cache import layout, storage
from hf_static_kv.cache.layout import local_shapes, missing_layers, plan_layers
from hf_static_kv.cache.storage import LayerShape
from hf_static_kv.testing import dev_config
from tests.conftest import ARCHITECTURES, tiny_model, toy_config, toy_model

LLAMA, QWEN3, GEMMA3 = (dev_config(name) for name in ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b"))


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [(LLAMA, 32_768), (QWEN3, 114_688), (GEMMA3, 26_624)],
    ids=["llama", "qwen3", "gemma3"],
)
def test_bytes_of_the_dev_models(config, bytes_per_token):
    assert cache_bytes(config, 1024, dtype=torch.bfloat16) == 1024 * bytes_per_token
    assert (
        cache_bytes(config, 8192, batch_size=3, dtype=torch.float32)
        == 2 * 3 * 8192 * bytes_per_token
    )


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
    assert (
        cache_bytes(model.config, 32, 2, torch.float32) == early.memory_bytes == lazy.memory_bytes
    )
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
# Each of its layers has two attentions, which have a layer of the cache each.
LONGCAT = {
    **LATENT,
    "num_layers": 2,
    "num_hidden_layers": 4,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "head_dim": 8,
}
# name: (config, shapes of the storage groups: layers, heads, key dim, value dim)
UNUSUAL: dict[str, tuple[PreTrainedConfig, list]] = {
    # the last two layers read earlier keys and values and store none
    "gemma3n": (
        AutoConfig.for_model(
            "gemma3n_text",
            **{**COMMON, "intermediate_size": [64] * 6},
            activation_sparsity_pattern=None,
        ),
        [(4, 2, 16, 16)],
    ),
    # full layers have larger heads than sliding ones
    "gemma4": (
        AutoConfig.for_model("gemma4_text", **COMMON, global_head_dim=32),
        [(2, 2, 16, 16), (2, 2, 32, 32)],
    ),
    # caches a latent of dim 24 as keys and the rotary part of dim 8 as values
    "deepseek_v3": (AutoConfig.for_model("deepseek_v3", **LATENT), [(2, 1, 24, 8)]),
    # one KV head, said in words of its own
    "falcon": (
        AutoConfig.for_model(
            "falcon", vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
        ),
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
    cache = (
        StaticContiguousCache.from_model(model, 32)
        if early
        else StaticContiguousCache(model.config, 32)
    )
    cached = model.generate(ids, past_key_values=cache, **options)
    assert cached.tolist() == model.generate(ids, use_cache=False, **options).tolist()
    groups = [(group.keys.shape[0], *astuple(group.shape)[:3]) for group in cache.storage_groups]
    assert groups == expected
    assert cache.memory_bytes == cache_bytes(config, 32, dtype=torch.float32)


class TestPlansThatAreKnown:
    def test_a_config_inside_of_another(self):
        """The comparison of two configs raises if their layers differ (Gemma 4, transformers 5.23)."""
        inner = AutoConfig.for_model("gemma4_text", **COMMON, global_head_dim=32)
        config = AutoConfig.for_model("gemma4", text_config=inner)
        expected = plan_layers(inner)
        assert plan_layers(config) == plan_layers(config) == expected

    def test_a_change_is_seen(self):
        config = AutoConfig.for_model("gemma3", text_config={**COMMON, "sliding_window": 8})
        windows = [plan.sliding_window for plan in plan_layers(config)]
        assert {8} <= {*windows}
        config.text_config.sliding_window = 4
        after = [plan.sliding_window for plan in plan_layers(config)]
        assert after == [window and 4 for window in windows]
        config.text_config.layer_types[0] = "full_attention"
        assert plan_layers(config)[0].sliding_window is None

    def test_few_are_kept(self):
        for _ in range(40):
            plan_layers(AutoConfig.for_model("llama", **COMMON))
        assert len(layout._PLANNED) <= 16


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
    tokens = model.generate(
        ids, past_key_values=cache, attention_mask=torch.ones_like(ids), max_new_tokens=5
    )
    assert cache.seq_len == tokens.shape[1] - 1


def test_under_autocast_keys_and_values_may_differ_in_dtype():
    """RoPE leaves the keys in float32, the values come out of their linear in bfloat16; both are
    kept as they are.
    """
    model = toy_model("qwen3")
    ids = torch.tensor([[5, 6, 7]])
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "eos_token_id": None,
    }
    cache = StaticContiguousCache(model.config, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = model.generate(ids, past_key_values=cache, **options)
        expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    assert tokens.tolist() == expected.tolist()
    assert (cache.key_storage.dtype, cache.value_storage.dtype) == (torch.float32, torch.bfloat16)


def test_each_layer_is_placed_where_it_computes():
    """A model spread over devices:

    here the second half of its layers is on `meta`, as accelerate would say it.
    """
    model = toy_model("llama", num_hidden_layers=4)
    for layer in model.model.layers[2:]:
        layer.self_attn._hf_hook = type("Hook", (), {"execution_device": "meta"})()
    cache = StaticContiguousCache.from_model(model, 16)
    assert [layer.device.type for layer in cache.layers] == ["cpu", "cpu", "meta", "meta"]
    assert [group.keys.shape[0] for group in cache.storage_groups] == [2, 2]


# --- families: what the config foretells is what the first forward pass writes


MIXED = ["full_attention", "sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict]] = {
    # caches its KV heads repeated for every query head
    "falcon, new decoder architecture": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, new, alibi": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True},
    ),
    "falcon, many queries to one key": ("falcon", {"multi_query": True}),
    "falcon, a key for every query": ("falcon", {"multi_query": False}),
    # sliding layers have twice the KV heads
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {"v_head_dim": 12, "layer_types": MIXED, "sliding_window": 8},
    ),
    # 2 modules run 16 times, and each run has a layer of the cache
    "hrm_text": ("hrm_text", {"num_hidden_layers": 2}),
    "bert as a decoder": ("bert", {"is_decoder": True}),
    "bloom": ("bloom", {}),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4", {"layer_types": MIXED, "sliding_window": 8}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "gptj": ("gptj", {}),
    "granite": ("granite", {}),
    # its config has a window and its attention applies none
    "moshi": ("moshi", {"sliding_window": 8, "audio_vocab_size": 64}),
    "mpt": ("mpt", {}),
    "opt": ("opt", {"word_embed_proj_dim": 64}),
    "phi": ("phi", {}),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {}),
    "xglm": ("xglm", {"attention_heads": 4}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_bytes_are_foretold_and_its_tokens_are_those_without_a_cache(name):
    model_type, own = FAMILIES[name]
    model = tiny_model(model_type, **own)
    early, lazy = (
        StaticContiguousCache.from_model(model, 32),
        StaticContiguousCache(model.config, 32),
    )
    assert early.memory_bytes == cache_bytes(model.config, 32, dtype=torch.float32)
    ids = torch.arange(3, 16)[None]
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, use_cache=False, **options).tolist()
    for cache in (early, lazy):
        assert (
            model.generate(ids, past_key_values=cache, use_cache=True, **options).tolist()
            == expected
        )
    assert lazy.memory_bytes == early.memory_bytes
    assert [layer.shape for layer in early.layers] == [layer.shape for layer in lazy.layers]


# --- the layers that the modules have


def vision_language_model() -> PreTrainedModel:
    text = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
    }
    config = Gemma3Config(
        text_config={**text, "num_attention_heads": 4, "num_key_value_heads": 2},
        vision_config={**vision, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    return AutoModelForImageTextToText.from_config(config)


def gemma3n() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(UNUSUAL["gemma3n"][0])


def cut(model: PreTrainedModel, layers: slice) -> PreTrainedModel:
    decoder = model.get_decoder()
    decoder.layers = decoder.layers[layers]
    return model


@pytest.mark.parametrize(
    ("build", "num_layers", "missing"),
    [
        (lambda: toy_model("llama", num_hidden_layers=4), 4, []),
        (lambda: cut(toy_model("llama", num_hidden_layers=4), slice(2)), 4, [2, 3]),
        (lambda: cut(toy_model("llama", num_hidden_layers=4), slice(0, 4, 2)), 4, [1, 3]),
        (lambda: toy_model("gpt2"), 2, []),
        (lambda: tiny_model("hrm_text", num_hidden_layers=2), 16, []),
        (vision_language_model, 4, []),
        (lambda: cut(vision_language_model(), slice(3)), 4, [3]),
        (gemma3n, 4, []),
        (lambda: cut(gemma3n(), slice(4)), 4, []),
        (lambda: cut(gemma3n(), slice(3)), 4, [3]),
        (lambda: tiny_model("mpt"), 3, []),
        (lambda: tiny_model("bloom"), 3, []),
        (
            lambda: AutoModelForCausalLM.from_config(CONFIG_MAPPING["longcat_flash"](**LONGCAT)),
            4,
            [],
        ),
    ],
    ids=[
        "llama",
        "llama, cut",
        "llama, every second layer",
        "gpt2",
        "hrm_text",
        "vision",
        "vision, text part cut",
        "gemma3n",
        "gemma3n, only sharing layers cut",
        "gemma3n, cut",
        "mpt",
        "bloom",
        "longcat_flash",
    ],
)
def test_layers_of_the_cache_that_no_module_has(build, num_layers, missing):
    assert missing_layers(build(), num_layers) == missing


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (
            lambda: cut(toy_model("llama", num_hidden_layers=4), slice(2)),
            r"has 2 layers .* says 4.* layer 2, 3\. Set `model.config.num_hidden_layers = 2`\.",
        ),
        (
            lambda: cut(vision_language_model(), slice(3)),
            r"has 3 layers .* layer 3\. Set `model.config.get_text_config\(\).num_hidden_layers = 3`"
            r" and .*layer_types",
        ),
        (
            lambda: cut(toy_model("llama", num_hidden_layers=4), slice(0, 4, 2)),
            r"has 2 layers .* layer 1, 3\. .*from 0 to 1 \(`layer_idx`",
        ),
        (lambda: cut(gemma3n(), slice(3)), r"has 3 layers .* layer 3\. .*config that describes"),
    ],
    ids=["llama", "vision", "every second layer", "shared"],
)
def test_a_cut_model_is_refused_with_the_edit_that_mends_it(build, remedy):
    with pytest.raises(ValueError, match=remedy):
        StaticContiguousCache.from_model(build(), 8)


@pytest.mark.parametrize(
    "build", [lambda: toy_model("llama", num_hidden_layers=4), vision_language_model]
)
def test_the_edit_for_a_cut_model_works(build):
    model = cut(build(), slice(2)).eval()
    text_config = model.config.get_text_config()
    text_config.num_hidden_layers = 2
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:2]
    cache = StaticContiguousCache.from_model(model, 16)
    model.generate(
        torch.tensor([[5, 6, 7]]),
        past_key_values=cache,
        max_new_tokens=4,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert cache.seq_len == 6


# --- tensor parallelism: every rank has a part of the KV heads


def plan_of(style, module="k_proj"):
    return {f"model.layers.*.self_attn.{module}": style, "model.layers.*.mlp.up_proj": "colwise"}


@pytest.mark.parametrize(
    ("ranks", "plan", "heads"),
    [
        (None, plan_of("colwise"), 4),
        (1, plan_of("colwise"), 4),
        (2, plan_of("colwise"), 2),
        (4, plan_of("colwise", "qkv_proj"), 1),
        (2, plan_of("colwise_gather_output"), 4),
        (3, plan_of("mla_kv_a_proj", "kv_a_proj_with_mqa"), 4),  # one latent, which all ranks hold
        (2, {}, 4),
        (2, plan_of("a style of its own"), None),
        (2, plan_of("colwise", "an unknown projection"), None),
    ],
)
def test_the_kv_heads_of_one_rank(ranks, plan, heads):
    model = SimpleNamespace(tp_size=ranks, tp_plan=plan)
    expected = None if heads is None else [LayerShape(heads, 16, 12)]
    assert local_shapes(model, [LayerShape(4, 16, 12)]) == expected


def test_where_the_heads_of_a_rank_are_not_certain_the_first_pass_allocates(monkeypatch, caplog):
    model = toy_model("llama")
    monkeypatch.setattr(model, "_tp_size", 3)
    monkeypatch.setattr(model, "_tp_plan", plan_of("a style of its own"))
    cache = StaticContiguousCache.from_model(model, 16)
    assert cache.memory_bytes == 0
    assert "tp_size=3" in caplog.text
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), past_key_values=cache)
    assert cache.memory_bytes == cache_bytes(model.config, 16, dtype=torch.float32)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "olmo2", "gpt2"])
def test_bytes_of_one_rank(name):
    """From the plan of the config: olmo2's gives all heads to every rank, gpt2 has none."""
    config = toy_config(name) if name == "gpt2" else toy_config(name, num_key_value_heads=4)
    parts = 1 if name in ("olmo2", "gpt2") else 4
    assert cache_bytes(config, 16, tp=4) == cache_bytes(config, 16) // parts


def test_bytes_that_cannot_be_told():
    config = toy_config("llama")
    with pytest.raises(ValueError, match="2 KV heads cannot be split over tp_size=4 ranks"):
        cache_bytes(config, 16, tp=4)
    assert cache_bytes(config, 16, tp=4, tp_plan=plan_of("colwise_gather_output")) == cache_bytes(
        config, 16
    )
    with pytest.raises(ValueError, match="does not tell how tp=2 ranks share"):
        cache_bytes(config, 16, tp=2, tp_plan=plan_of("a style of its own"))
    with pytest.raises(ValueError, match="tp must be a positive int, got 0"):
        cache_bytes(config, 16, tp=0)


@pytest.mark.parametrize(
    ("length", "answer"),
    [(0, "Not one token would fit"), (250, "About max_cache_len=250 would fit")],
)
def test_an_error_for_lack_of_memory_says_what_would_fit(length, answer, monkeypatch):
    """A compact layer takes the same whatever the capacity."""
    gpu = torch.device("cuda")
    dtypes = torch.float32, torch.float32
    full = LayerShape(2, 64, 64)
    compact = LayerShape(2, 64, 64, window=436)
    free = compact.num_bytes(2000, 1, dtypes) + 2 * full.num_bytes(length, 1, dtypes)
    monkeypatch.setattr(storage, "free_bytes", lambda device: free)
    members = [(full, gpu, [0, 2]), (compact, gpu, [1])]
    assert answer in storage._what_fits(members, 2000, 1, dtypes)
