"""The dev models, at toy size with random weights: small enough for a CPU, true to their architecture."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# What all three have in common; grouped-query attention and a window of 8 that any prompt of 9 tokens crosses.
_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

TINY_DEV_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": 8, "num_key_value_heads": 1}),
}


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The toy config of a dev model: "llama", "qwen3" or "gemma3" (5 sliding layers to 1 full, window 8)."""
    if name not in TINY_DEV_MODELS:
        raise ValueError(f"Unknown dev model {name!r}: choose one of {', '.join(TINY_DEV_MODELS)}.")
    model_type, own = TINY_DEV_MODELS[name]
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**{**_TINY, **own, **overrides})
    return config


def random_model(config: PreTrainedConfig, seed: int = 0, **kwargs: Any) -> PreTrainedModel:
    """A model of this config with random weights, in eval mode; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **kwargs)  # type: ignore[no-untyped-call]
    model.train(False)
    return model
