"""The dev models, at toy size with random weights: small enough for a CPU, true to their architecture."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
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


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Where and with what a record was made: hardware, versions, commit, command.

    Outside a git checkout the commit is read from the environment variable `COMMIT`.
    """
    on_gpu = device.startswith("cuda")
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "hardware": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit or os.environ.get("COMMIT", "unknown"),
        "command": " ".join(["python", *sys.argv]),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
