"""Toy configs of the architectures in the generate matrix. Windows and chunks are shorter than every prompt."""

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv.testing import random_model

WINDOW = 8
_COMMON = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Untied and far above the usual 0.02, so that attention moves the logits and a wrong key shows in the tokens.
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
_MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# name: (model_type, what differs from _COMMON)
ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": WINDOW, "num_key_value_heads": 1}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "gpt2": ("gpt2", {}),
    "phi3": ("phi3", {"head_dim": 12}),
    "gpt_neox": ("gpt_neox", {}),
    "olmo2": ("olmo2", {}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW, "num_hidden_layers": 4, "logit_scale": 1.0}),
    "mixtral": ("mixtral", _MOE),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "gpt_oss": ("gpt_oss", {**_MOE, "sliding_window": WINDOW}),
    "llama4": (
        "llama4_text",
        {**_MOE, "attention_chunk_size": WINDOW, "num_hidden_layers": 4, "intermediate_size_mlp": 64},
    ),
}
_GPT2_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_NOT_IN = {
    "gpt2": {"intermediate_size", "num_key_value_heads", "head_dim"},
    "gpt_neox": {"num_key_value_heads", "head_dim"},
    "phi3": {"head_dim"},
}


def toy_config(name: str, **overrides) -> PreTrainedConfig:
    model_type, own = ARCHITECTURES[name]
    fields = {**_COMMON, **own, **overrides}
    fields = {key: value for key, value in fields.items() if key not in _NOT_IN.get(model_type, ())}
    if model_type == "gpt2":
        fields = {_GPT2_NAMES.get(key, key): value for key, value in fields.items()}
        fields["n_positions"] = fields.pop("max_position_embeddings")
    return CONFIG_MAPPING[model_type](**fields)


def toy_model(name: str, attn: str = "sdpa", seed: int = 0, **overrides) -> PreTrainedModel:
    return random_model(toy_config(name, **overrides), seed=seed, attn_implementation=attn)
