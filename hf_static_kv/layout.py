"""What a model's config says about its layers: windows, shapes, bytes, and which models cannot be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_static_kv.storage import LayerShape

# From the cache's side a chunk is a window: its queries see at most `attention_chunk_size` keys, and where the chunks
# begin (left padding shifts it row by row) is said by the mask.
_WINDOW_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_SERVED_LAYER_TYPES = {"full_attention", *_WINDOW_FIELDS}

# Recurrent or otherwise stateful models whose configs do not say so in `layer_types`.
_STATEFUL_MODEL_TYPES = {"recurrent_gemma", "reformer", "rwkv", "xlnet", "xlstm"}

# Models whose positions are rows of a learned table: the table's length is a hard end of the text.
_LEARNED_POSITION_TYPES = {"biogpt", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt"}


@dataclass(frozen=True)
class LayerPlan:
    """One layer as the config describes it.

    `shape` is None where the config does not tell; `sliding_window` counts the keys that a query may see, its own
    included, and is None for full attention.
    """

    shape: LayerShape | None
    sliding_window: int | None


def plan_layers(config: PreTrainedConfig) -> list[LayerPlan]:
    """One plan for each layer that caches keys and values, or a `ValueError` naming what cannot be served."""
    refuse_unserved(config)
    config = config.get_text_config(decoder=True)
    layer_configs = _layer_configs(config)
    layer_types = _layer_types(config, layer_configs)
    # The last layers of some models (Gemma 3n) read an earlier layer's keys and values and store none.
    num_stored = len(layer_types) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return [
        LayerPlan(_layer_shape(layer_config), _sliding_window(layer_config, layer_type))
        for layer_config, layer_type in zip(layer_configs[:num_stored], layer_types[:num_stored], strict=True)
    ]


def cache_bytes(
    config: PreTrainedConfig, max_cache_len: int, batch_size: int = 1, dtype: torch.dtype | None = None
) -> int:
    """Bytes that a `StaticContiguousCache` for this config will take, before anything is allocated.

    `dtype` defaults to the config's own.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    >>> cache_bytes(config, 1024, dtype=torch.bfloat16)
    33554432
    """
    check_positive(max_cache_len=max_cache_len, batch_size=batch_size)
    own_dtype = config.get_text_config(decoder=True).dtype or config.dtype or torch.get_default_dtype()
    dtype = dtype or (getattr(torch, own_dtype) if isinstance(own_dtype, str) else own_dtype)
    shapes = known_shapes(plan_layers(config), config)
    return sum([shape.num_bytes(max_cache_len, batch_size, dtype) for shape in shapes])


def known_shapes(plans: Sequence[LayerPlan], config: PreTrainedConfig) -> list[LayerShape]:
    """The plans' shapes, or a `ValueError` where the config does not tell them."""
    shapes = [plan.shape for plan in plans if plan.shape is not None]
    if len(shapes) < len(plans):
        raise ValueError(
            f"The config of {config.model_type!r} does not tell the number of KV heads or their dim. Build "
            "`StaticContiguousCache(config, max_cache_len)`, which learns them from the first forward pass."
        )
    return shapes


def refuse_unserved(config: PreTrainedConfig) -> None:
    """Raise a `ValueError` that names the part of the model that one KV cache cannot hold."""
    text_config = config.get_text_config(decoder=True)
    name = text_config.model_type
    remedy = "Leave `past_key_values` out: `generate` then builds the cache that this model needs."
    if not getattr(text_config, "num_hidden_layers", None):
        raise ValueError(f"The config of {name!r} does not say how many layers there are. {remedy}")
    if config.is_encoder_decoder:
        raise ValueError(f"{config.model_type!r} is an encoder-decoder: it needs a cross-attention cache too. {remedy}")
    if getattr(text_config, "cross_attention_layers", None):
        layers = list(text_config.cross_attention_layers)
        raise ValueError(f"Layers {layers} of {name!r} are cross-attention, which is not cached by position. {remedy}")
    unserved = sorted(set(getattr(text_config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES)
    if unserved:
        raise ValueError(
            f"{name!r} has layers of type {', '.join(unserved)}, whose state is not keys and values by position "
            f"({', '.join(sorted(_SERVED_LAYER_TYPES))} can be cached). {remedy}"
        )
    if name in _STATEFUL_MODEL_TYPES:
        raise ValueError(f"{name!r} keeps a recurrent or custom state, which a KV cache cannot hold. {remedy}")


def refuse_beyond_positions(config: PreTrainedConfig, max_cache_len: int) -> None:
    """Raise a `ValueError` when a model with learned positions is given room that it can never use."""
    config = config.get_text_config(decoder=True)
    num_positions = getattr(config, "max_position_embeddings", None)
    if config.model_type in _LEARNED_POSITION_TYPES and num_positions and max_cache_len > num_positions:
        raise ValueError(
            f"{config.model_type!r} has learned positions 0 to {num_positions - 1} and no text of "
            f"max_cache_len={max_cache_len} tokens. Use max_cache_len <= {num_positions}."
        )


def check_positive(**sizes: int) -> None:
    """Raise a `ValueError` naming the first of `sizes` that is not a positive int."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a positive int, got {size!r}.")


def layer_devices(model: PreTrainedModel, num_layers: int) -> list[torch.device]:
    """The device on which each layer computes, also when accelerate has spread or offloaded the model."""
    devices: dict[int, torch.device] = {}
    for module in model.modules():
        layer_idx = getattr(module, "layer_idx", None)
        if isinstance(layer_idx, int) and (device := _compute_device(module)) is not None:
            devices[layer_idx] = device
    found = max(devices, default=num_layers - 1) + 1
    if found < num_layers:
        raise ValueError(
            f"The model has {found} layers and its config says {num_layers}: a step would never be complete. "
            f"Set `model.config.num_hidden_layers = {found}`."
        )
    return [devices.get(layer_idx, model.device) for layer_idx in range(num_layers)]


def refuse_missing_layers(model: PreTrainedModel, num_layers: int) -> None:
    """Raise a `ValueError` where a cache of `num_layers` has layers that no module of the model writes."""
    missing = missing_layers(model, num_layers)
    if missing:
        raise ValueError(
            f"The cache has layers 0 to {num_layers - 1}, and {type(model).__name__} has no layer "
            f"{', '.join(map(str, missing))}: a step would never be complete. Build the cache with the config of the "
            f"model that runs; where layers were cut off, set `model.config.num_hidden_layers = {missing[0]}` first."
        )


def missing_layers(model: PreTrainedModel, num_layers: int) -> list[int]:
    """The numbers below `num_layers` that no module of the model has as its `layer_idx`; none where none has one."""
    found = {getattr(module, "layer_idx", None) for module in model.modules()} - {None}
    return [number for number in range(num_layers) if number not in found] if found else []


def _layer_configs(config: PreTrainedConfig) -> list[Any]:
    # Configs whose layers differ (Gemma 4) list them; reading such a field from the whole config would raise.
    return list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)


def _layer_types(config: PreTrainedConfig, layer_configs: Sequence[Any]) -> list[str]:
    stated = getattr(config, "layer_types", None)
    return list(stated) if stated is not None else [_implied_type(layer_config) for layer_config in layer_configs]


def _implied_type(layer_config: Any) -> str:
    for layer_type, field in _WINDOW_FIELDS.items():
        if getattr(layer_config, field, None) is not None:
            return layer_type
    return "full_attention"


def _sliding_window(layer_config: Any, layer_type: str) -> int | None:
    field = _WINDOW_FIELDS.get(layer_type)
    return None if field is None else getattr(layer_config, field)


def _layer_shape(layer_config: Any) -> LayerShape | None:
    if getattr(layer_config, "kv_lora_rank", None):
        # Multi-head latent attention (DeepSeek) caches the latent as keys and the shared rotary part as values.
        return LayerShape(1, layer_config.kv_lora_rank, layer_config.qk_rope_head_dim)
    num_heads = getattr(layer_config, "num_attention_heads", None)
    num_kv_heads = _num_kv_heads(layer_config, num_heads)
    head_dim = getattr(layer_config, "head_dim", None)
    if head_dim is None and num_heads:
        head_dim = layer_config.hidden_size // num_heads
    if not num_kv_heads or not head_dim:
        return None
    return LayerShape(num_kv_heads, head_dim, getattr(layer_config, "v_head_dim", None) or head_dim)


def _num_kv_heads(layer_config: Any, num_heads: int | None) -> int | None:
    stated: int | None = getattr(layer_config, "num_key_value_heads", None)
    if stated is not None:
        return stated
    if getattr(layer_config, "new_decoder_architecture", False):  # Falcon
        return getattr(layer_config, "num_kv_heads", num_heads)
    return 1 if getattr(layer_config, "multi_query", False) else num_heads


def _compute_device(module: torch.nn.Module) -> torch.device | None:
    hooks = (getattr(part, "_hf_hook", None) for part in module.modules())
    planned = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((device for device in planned if device is not None), None)
    if device is not None:
        return torch.device(device)
    parameter = next(module.parameters(), None)
    return None if parameter is None else parameter.device
