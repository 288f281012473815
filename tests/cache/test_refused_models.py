"""Which models are refused, and why; what is said of a model before its first step."""

import pytest
import torch
from transformers import Gemma3Config, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv import StaticContiguousCache, cache_bytes
from hf_static_kv.testing import dev_config
from tests.conftest import tiny_model, toy_model

REFUSED = {
    "all layers share": (
        lambda: CONFIG_MAPPING["gemma4_unified_assistant"](),
        # transformers 5.17 has no number of layers in this config.
        r"All \d+ layers of 'gemma4_unified_text' read the keys.*to that model"
        r"|'gemma4_unified_assistant' does not say",
    ),
    "openai-gpt": (
        lambda: CONFIG_MAPPING["openai-gpt"](),
        r"'openai-gpt' takes no cache.*`use_cache=False`",
    ),
    "xlm": (lambda: CONFIG_MAPPING["xlm"](), r"'xlm' takes no cache"),
    "cpmant": (lambda: CONFIG_MAPPING["cpmant"](), r"'cpmant' prepends tokens of its own"),
    "prophetnet": (
        lambda: CONFIG_MAPPING["prophetnet"](is_encoder_decoder=False),
        r"'prophetnet' computes other logits with a cache",
    ),
    "bert": (lambda: CONFIG_MAPPING["bert"](), r"'bert' is an encoder.*is_decoder=True"),
    "roberta": (lambda: CONFIG_MAPPING["roberta"](), r"'roberta' is an encoder.*is_decoder=True"),
    "minimax": (
        lambda: CONFIG_MAPPING["minimax"](),
        r"'minimax' takes a cache of its own kind only.*`generate` then",
    ),
    "mamba": (
        lambda: CONFIG_MAPPING["mamba"](),
        r"'mamba' has no layer with keys and values \(linear_attention\)",
    ),
    "deepseek_v4": (
        lambda: CONFIG_MAPPING["deepseek_v4"](),
        r"'deepseek_v4' has layers of type compressed_sparse_attention, "
        r"heavily_compressed_attention, whose state",
    ),
    "minimax_m3": (
        lambda: CONFIG_MAPPING["minimax_m3_vl_text"](
            layer_types=["minimax_m3_sparse"] * 2, num_hidden_layers=2
        ),
        r"'minimax_m3_vl_text' has layers of type minimax_m3_sparse, whose state is not",
    ),
    "glm5_next": (
        lambda: CONFIG_MAPPING["glm5_next_text"](),
        r"'glm5_next_text' asks a layer for its length in the middle of a pass",
    ),
    "mllama": (
        lambda: CONFIG_MAPPING["mllama"](),
        r"Layers \[3, .*\] of 'mllama_text_model' are cross-attention"
        r".*Leave `past_key_values` out: `generate`",
    ),
    "an encoder-decoder that is refused": (
        lambda: CONFIG_MAPPING["prophetnet"](),
        r"'prophetnet' computes other logits with a cache",
    ),
    "blt": (
        lambda: CONFIG_MAPPING["blt"](),
        r"'blt' keeps the keys of its byte encoder and .* decoder in two caches",
    ),
}
if "mistral_large4_text" in CONFIG_MAPPING:  # transformers 5.22
    REFUSED["mistral_large4"] = (
        lambda: CONFIG_MAPPING["mistral_large4_text"](),
        r"'mistral_large4_text' has layers that keep index keys alone",
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(name):
    build, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        StaticContiguousCache(build(), 8)


@pytest.mark.parametrize("act", [StaticContiguousCache, cache_bytes], ids=["cache", "cache_bytes"])
def test_a_model_in_the_place_of_its_config_is_refused(act):
    with pytest.raises(
        TypeError,
        match=r"LlamaForCausalLM is a model: .*`model.config`.*from_model\(model, max_cache",
    ):
        act(toy_model("llama"), 8)
    with pytest.raises(TypeError, match="The config is of type str"):
        act("llama", 8)


# --- warnings


@pytest.mark.parametrize(
    ("model_type", "positions"), [("gptj", 2048), ("ctrl", 256), ("mpt", 2048), ("opt", 2048)]
)
def test_room_behind_the_end_of_a_table_of_positions_is_refused(model_type, positions, caplog):
    config = CONFIG_MAPPING[model_type](use_cache=True)
    StaticContiguousCache(config, positions)
    with pytest.raises(
        ValueError,
        match=rf"positions 0 to {positions - 1}, .*={positions + 1}\. .* <= {positions}\.",
    ):
        StaticContiguousCache(config, positions + 1)
    assert caplog.text == ""


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "mpt", "opt", "ctrl"])
def test_the_table_of_positions_is_a_hard_end(model_type):
    """What the refusal says is true: the model itself fails one token further."""
    size = {"max_seq_len" if model_type == "mpt" else "n_positions": 16}
    if model_type == "opt":
        size = {"max_position_embeddings": 16, "word_embed_proj_dim": 64}
    model = tiny_model(model_type, **size)
    model(torch.arange(3, 19)[None])
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.arange(3, 20)[None])


ROPE = {"rope_theta": 10_000.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("own", "longest"),
    [
        ({}, 512),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, **ROPE}}, 2048),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ROPE}}, 2048),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **ROPE}}, 2048),
        (
            {
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ROPE},
            },
            2048,
        ),
    ],
    ids=["default", "linear", "yarn", "dynamic", "yarn, said in both"],
)
def test_more_room_than_the_model_was_trained_for_is_said(own, longest, caplog):
    config = CONFIG_MAPPING["llama"](
        **{"num_hidden_layers": 2, "max_position_embeddings": 512, **own}
    )
    StaticContiguousCache(config, longest)
    assert caplog.text == ""
    StaticContiguousCache(config, longest + 1)
    (record,) = caplog.records
    assert f"max_cache_len={longest + 1}" in record.message
    assert f"{longest} positions" in record.message


def test_no_warning_where_positions_have_no_end_or_the_model_was_trained_for_them(caplog):
    for name in ("llama-3.2-1b", "qwen3-1.7b", "gemma-3-1b", "smollm2-135m"):
        config = dev_config(name)
        StaticContiguousCache(config, config.max_position_embeddings)
    StaticContiguousCache(CONFIG_MAPPING["bloom"](), 10**6)
    StaticContiguousCache(CONFIG_MAPPING["falcon"](alibi=True), 10**6)
    assert caplog.text == ""
    gemma3 = Gemma3Config(text_config={"max_position_embeddings": 512})
    StaticContiguousCache(gemma3, 10**6)
    assert "max_cache_len=1000000" in caplog.text


def use_cache_false_in(part: str) -> PreTrainedModel:
    model = toy_model("llama")
    (model.generation_config if part == "generation config" else model.config).use_cache = False
    if part == "both":
        model.generation_config.use_cache = False
    return model


@pytest.mark.parametrize("part", ["config", "generation config", "both"])
def test_use_cache_false_is_said_once(part, caplog):
    model = use_cache_false_in(part)
    StaticContiguousCache.from_model(model, 8)
    (record,) = caplog.records
    assert "use_cache=False: call generate with use_cache=True" in record.message
    caplog.clear()
    StaticContiguousCache(model.config, 8)
    assert len(caplog.records) == (0 if part == "generation config" else 1)


def test_use_cache_false_in_the_text_config_is_said(caplog):
    config = Gemma3Config(text_config=dev_config("gemma-3-1b").to_dict())
    StaticContiguousCache(config, 8)
    assert caplog.text == ""
    config.text_config.use_cache = False
    StaticContiguousCache(config, 8)
    assert "call generate with use_cache=True" in caplog.text
