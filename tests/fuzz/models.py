"""Tiny random models of many decoder families, each in a few variants."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import transformers
from packaging import version
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_static_kv.attention import ATTENTION_NAME
from hf_static_kv.testing import random_model

VARIANTS = 8  # of each architecture
POSITIONS = 256  # longer than any text of a case
_EMBEDDING_STD = 0.7
_GAIN = 1.6  # attention scores vary by about 2.5, so one changed key shows in the logits


@dataclass(frozen=True)
class Architecture:
    """One family: its `model_type` and how its config fields differ from the common ones.

    `fields` is called with the random numbers of a variant. `rename` maps common names to those of
    this config; a name mapped to None is left out. `attention` lists the implementations that the
    family supports. `since`: transformers' version from which the family computes the same with any
    cache as with none.
    """

    model_type: str
    fields: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    rename: dict[str, str | None] | None = None
    attention: tuple[str, ...] = ("eager", "sdpa", ATTENTION_NAME)
    takes_embeds: bool = True
    since: str = "5.17"


def _common(rng: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": rng.choice([64, 80, 97]),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": rng.choice([2, 2, 3]),
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice([1, 2, 4]),
        "head_dim": rng.choice([8, 16]),
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": rng.random() < 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _window(rng: random.Random) -> int:
    return rng.choice([3, 4, 6, 8])


def _alternating(
    rng: random.Random, other: str = "sliding_attention", num_layers: int = 3
) -> dict[str, Any]:
    """Layers of both types, in random order."""
    types = [other, "full_attention", *rng.choices([other, "full_attention"], k=num_layers - 2)]
    rng.shuffle(types)
    return {"num_hidden_layers": num_layers, "layer_types": types}


def _sliding(rng: random.Random) -> dict[str, Any]:
    return {**_alternating(rng), "sliding_window": _window(rng)}


def _every_layer_sliding(rng: random.Random) -> dict[str, Any]:
    return {"sliding_window": rng.choice([None, _window(rng), _window(rng)])}


def _sliding_by_switch(rng: random.Random) -> dict[str, Any]:
    """As Qwen2 says it: a switch, a window, and how many of the first layers see everything."""
    if rng.random() < 0.5:
        return {}
    return {
        "use_sliding_window": True,
        "sliding_window": _window(rng),
        "max_window_layers": rng.choice([0, 1]),
    }


def _experts(rng: random.Random) -> dict[str, Any]:
    return {
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": rng.choice([1, 2]),
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


def _latent(rng: random.Random) -> dict[str, Any]:
    return {
        **_experts(rng),
        "num_key_value_heads": 4,
        "kv_lora_rank": rng.choice([8, 16]),
        "q_lora_rank": rng.choice([None, 12]),
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": rng.choice([8, 12]),
        "head_dim": 8,
    }


def _both(
    *parts: Callable[[random.Random], dict[str, Any]],
) -> Callable[[random.Random], dict[str, Any]]:
    return lambda rng: {key: value for part in parts for key, value in part(rng).items()}


def _always(**fields: Any) -> Callable[[random.Random], dict[str, Any]]:
    return lambda rng: fields


def _full_heads(rng: random.Random) -> dict[str, Any]:
    """For families without grouped heads, whose heads divide the hidden size."""
    return {"num_key_value_heads": 4, "head_dim": 8}


def _gemma3n(rng: random.Random) -> dict[str, Any]:
    return {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
        "num_kv_shared_layers": rng.choice([1, 2, 3]),
        "sliding_window": _window(rng),
        "vocab_size_per_layer_input": 64,
        "vocab_size": 64,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.0] * 5,
    }


def _llama4(rng: random.Random) -> dict[str, Any]:
    chunked = _alternating(rng, "chunked_attention")
    return {
        **_experts(rng),
        **chunked,
        "attention_chunk_size": rng.choice([4, 6, 8]),
        "intermediate_size_mlp": 48,
        "interleave_moe_layer_step": rng.choice([1, 2]),
        "no_rope_layers": [int(kind == "chunked_attention") for kind in chunked["layer_types"]],
    }


def _gpt_neo(rng: random.Random) -> dict[str, Any]:
    kinds = rng.choice([["global", "local"], ["local", "global"], ["local", "local"]])
    return {"attention_types": [[kinds, 1]], "num_layers": 2, "window_size": _window(rng)}


def _falcon(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["rotary", "alibi", "new", "many heads"])
    return {
        "alibi": kind == "alibi",
        "new_decoder_architecture": kind == "new",
        "num_kv_heads": 2 if kind == "new" else 4,
        "multi_query": kind in ("rotary", "new"),
        "parallel_attn": rng.random() < 0.5,
        "bias": rng.random() < 0.5,
    }


def _mimo(rng: random.Random) -> dict[str, Any]:
    return {
        "num_key_value_heads": 2,
        "swa_num_key_value_heads": 4,
        "v_head_dim": 8,
        "swa_v_head_dim": 8,
    }


_NO_GROUPS = {"num_key_value_heads": None, "head_dim": None}
_GPT2 = {
    **_NO_GROUPS,
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": None,
}
_EAGER_AND_OURS = ("eager", ATTENTION_NAME)

# Soft caps and sinks are what SDPA cannot compute. Alibi and GPT-J attention know no implementation
# but their own.
ARCHITECTURES = {
    "llama": Architecture("llama"),
    "llama (yarn)": Architecture(
        "llama", _always(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    ),
    "llama (linear)": Architecture(
        "llama", _always(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    ),
    "qwen2": Architecture("qwen2", _sliding_by_switch),
    "qwen3": Architecture("qwen3", _sliding_by_switch),
    "qwen2_moe": Architecture("qwen2_moe", _both(_experts, _sliding_by_switch)),
    "qwen3_moe": Architecture("qwen3_moe", _experts),
    "gemma": Architecture("gemma"),
    "gemma2": Architecture(
        "gemma2", _both(_sliding, _always(query_pre_attn_scalar=16)), attention=_EAGER_AND_OURS
    ),
    "gemma3": Architecture("gemma3_text", _both(_sliding, _always(query_pre_attn_scalar=16))),
    "gemma3n": Architecture("gemma3n_text", _gemma3n, takes_embeds=False),
    "vaultgemma": Architecture(
        "vaultgemma", _both(_sliding, _always(query_pre_attn_scalar=16)), attention=_EAGER_AND_OURS
    ),
    "mistral": Architecture("mistral", _every_layer_sliding),
    "ministral": Architecture("ministral", _sliding),
    "mixtral": Architecture("mixtral", _both(_experts, _every_layer_sliding)),
    "phi": Architecture("phi", _full_heads, {"head_dim": None}),
    "phi3": Architecture("phi3", _every_layer_sliding, {"head_dim": None}),
    "phimoe": Architecture("phimoe", _both(_experts, _every_layer_sliding), {"head_dim": None}),
    "olmo": Architecture("olmo", rename={"head_dim": None}),
    "olmo2": Architecture("olmo2", rename={"head_dim": None}),
    "olmo3": Architecture("olmo3", _sliding, {"head_dim": None}),
    "olmoe": Architecture("olmoe", _experts, {"head_dim": None}),
    "gpt2": Architecture("gpt2", rename=_GPT2),
    "gpt_bigcode": Architecture(
        "gpt_bigcode", lambda rng: {"multi_query": rng.random() < 0.5}, _GPT2
    ),
    "gpt_neo": Architecture(
        "gpt_neo",
        _gpt_neo,
        {**_NO_GROUPS, "num_attention_heads": "num_heads", "num_hidden_layers": None},
        attention=("eager",),
    ),
    "gptj": Architecture("gptj", _always(rotary_dim=4), _GPT2, attention=("eager",)),
    "codegen": Architecture("codegen", _always(rotary_dim=4), _GPT2, attention=("eager",)),
    "gpt_neox": Architecture("gpt_neox", rename=_NO_GROUPS),
    "gpt_neox_japanese": Architecture("gpt_neox_japanese", rename=_NO_GROUPS, attention=("eager",)),
    "gpt_oss": Architecture("gpt_oss", _both(_experts, _sliding), attention=_EAGER_AND_OURS),
    "opt": Architecture(
        "opt",
        _always(ffn_dim=48, word_embed_proj_dim=32),
        {**_NO_GROUPS, "intermediate_size": None},
    ),
    "biogpt": Architecture("biogpt", rename=_NO_GROUPS),
    "xglm": Architecture(
        "xglm",
        _always(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
        {**_NO_GROUPS, "intermediate_size": None, "hidden_size": None, "num_hidden_layers": None}
        | {"num_attention_heads": None},
        attention=("eager",),
    ),
    "bloom": Architecture(
        "bloom", rename={**_GPT2, "hidden_size": "hidden_size"}, attention=("eager",)
    ),
    "mpt": Architecture(
        "mpt",
        _always(
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=POSITIONS,
            expansion_ratio=2,
            use_cache=True,
        ),
        {**_NO_GROUPS, "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None}
        | {"intermediate_size": None, "max_position_embeddings": None},
        attention=("eager",),
    ),
    "falcon": Architecture("falcon", _falcon, _NO_GROUPS, attention=("eager", "sdpa")),
    "starcoder2": Architecture("starcoder2", _every_layer_sliding, {"head_dim": None}),
    "stablelm": Architecture(
        "stablelm", lambda rng: {"qk_layernorm": rng.random() < 0.5}, {"head_dim": None}
    ),
    "granite": Architecture("granite", rename={"head_dim": None}),
    "granitemoe": Architecture("granitemoe", _experts, {"head_dim": None}),
    "cohere": Architecture("cohere", _always(logit_scale=1.0), {"head_dim": None}),
    "cohere2": Architecture("cohere2", _both(_sliding, _always(logit_scale=1.0))),
    "glm": Architecture("glm"),
    "glm4": Architecture("glm4"),
    "glm4_moe": Architecture("glm4_moe", _experts),
    "smollm3": Architecture("smollm3", _always(num_hidden_layers=3, no_rope_layers=[1, 0, 1])),
    "deepseek_v2": Architecture("deepseek_v2", _both(_latent, _always(topk_method="greedy"))),
    "deepseek_v3": Architecture("deepseek_v3", _latent),
    "llama4": Architecture("llama4_text", _llama4),
    "exaone4": Architecture("exaone4", _sliding),
    "nemotron": Architecture("nemotron"),
    "persimmon": Architecture("persimmon", rename=_NO_GROUPS),
    "arcee": Architecture("arcee"),
    "apertus": Architecture("apertus"),
    "seed_oss": Architecture("seed_oss"),
    "helium": Architecture("helium", _always(head_dim=8)),
    "diffllama": Architecture(
        "diffllama", _always(num_key_value_heads=2), attention=("eager", "sdpa")
    ),
    "doge": Architecture("doge", since="5.22"),
    "ernie4_5": Architecture("ernie4_5"),
    "hunyuan_v1_dense": Architecture("hunyuan_v1_dense"),
    "bitnet": Architecture("bitnet", _always(head_dim=8)),
    "nanochat": Architecture("nanochat"),
    "jetmoe": Architecture(
        "jetmoe", _always(kv_channels=8, num_key_value_heads=2, num_local_experts=4)
    ),
    "minimax_m2": Architecture("minimax_m2", _experts),
    "afmoe": Architecture("afmoe", _both(_experts, _sliding)),
    "cwm": Architecture("cwm", _sliding),
    "modernbert-decoder": Architecture("modernbert-decoder", _sliding, _NO_GROUPS),
    "granite_swa": Architecture(
        "granite_swa", _sliding, {"head_dim": None}, attention=_EAGER_AND_OURS
    ),
    "mimo_v2_flash": Architecture(
        "mimo_v2_flash", _both(_experts, _sliding, _mimo), attention=_EAGER_AND_OURS
    ),
}


def at_least(release: str) -> bool:
    return version.parse(transformers.__version__) >= version.parse(release)


@cache
def available() -> list[str]:
    """The architectures that this version of transformers has."""
    known = {
        name: family
        for name, family in ARCHITECTURES.items()
        if family.model_type in CONFIG_MAPPING
    }
    return [name for name, family in known.items() if at_least(family.since)]


def variant_config(name: str, variant: int) -> tuple[PreTrainedConfig, str]:
    """The config of a variant, and its attention implementation."""
    rng = random.Random(f"{name}/{variant}")
    architecture = ARCHITECTURES[name]
    rename = architecture.rename or {}
    common = {rename.get(key, key): value for key, value in _common(rng).items()}
    fields = {**common, **architecture.fields(rng)}
    fields.pop(None, None)
    return CONFIG_MAPPING[architecture.model_type](**fields), rng.choice(architecture.attention)


@lru_cache(maxsize=16)
def build_model(name: str, variant: int, device: str) -> PreTrainedModel:
    config, attention = variant_config(name, variant)
    model = random_model(config, attn_implementation=attention)
    draw_weights(model, seed=variant)
    # A call ends rows and pads only by what it says itself.
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config.update(**dict.fromkeys(ids))
    return model.to(device)


def offloaded_model(name: str, variant: int, device: str) -> PreTrainedModel:
    """The same model with its weights in the memory of the host: accelerate brings each module's
    when it runs.
    """
    from accelerate import cpu_offload  # the only case that needs it

    return cpu_offload(copy.deepcopy(build_model(name, variant, device)), torch.device(device))


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Weights of one size in all families.

    Initializers differ between families: many are so small that attention hardly moves the logits,
    and set biases to zero, which would hide a missing one.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter += 0.2 * noise
        elif id(parameter) in embeddings:
            parameter.copy_(_EMBEDDING_STD * noise)
        else:
            parameter.copy_(_GAIN * parameter.shape[-1] ** -0.5 * noise)
