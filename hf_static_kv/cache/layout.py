"""What a model's config and modules say about its layers: windows, shapes, bytes, devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.cache.storage import LayerShape
from hf_static_kv.cache.support import WINDOW_FIELDS, refuse_unserved, require_config

logger = logging.getLogger(__name__)

# Projections whose output has the keys, alone or beside queries and values.
_KEY_PROJECTIONS = {"k_proj", "qkv_proj", "query_key_value"}
# Models whose config has a window that their attention mask ignores: without a cache they see all tokens.
_IGNORED_WINDOW_TYPES = {"moshi"}


@dataclass(frozen=True)
class LayerPlan:
    """One layer as the config describes it."""

    shape: LayerShape | None  # None: the config does not tell
    sliding_window: int | None  # keys that a query may see, its own included; None: full attention


def plan_layers(config: PreTrainedConfig) -> list[LayerPlan]:
    """One plan for each layer that caches keys and values, or a `ValueError` naming what cannot be served."""
    refuse_unserved(config)
    config = config.get_text_config(decoder=True)
    layer_configs = _layer_configs(config)
    layer_types = _layer_types(config, layer_configs)
    # The last layers of some models (Gemma 3n) read an earlier layer's keys and values and store none.
    num_stored = len(layer_types) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return [
        LayerPlan(_layer_shape(layer_config, layer_type), _sliding_window(layer_config, layer_type))
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
    require_config(config)
    check_positive(max_cache_len=max_cache_len, batch_size=batch_size)
    own_dtype = config.get_text_config(decoder=True).dtype or config.dtype or torch.get_default_dtype()
    dtype = dtype or (getattr(torch, own_dtype) if isinstance(own_dtype, str) else own_dtype)
    shapes = known_shapes(plan_layers(config), config)
    return sum([shape.num_bytes(max_cache_len, batch_size, (dtype, dtype)) for shape in shapes])


def known_shapes(plans: Sequence[LayerPlan], config: PreTrainedConfig) -> list[LayerShape]:
    """The plans' shapes, or a `ValueError` where the config does not tell them."""
    shapes = [plan.shape for plan in plans if plan.shape is not None]
    if len(shapes) < len(plans):
        raise ValueError(
            f"The config of {config.model_type!r} does not tell the number of KV heads or their dim. Build "
            "`StaticContiguousCache(config, max_cache_len)`, which learns them from the first forward pass."
        )
    return shapes


def local_shapes(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> list[LayerShape] | None:
    """The shapes on this rank, where tensor parallelism may have split the KV heads; None where that is not certain."""
    ranks = getattr(model, "tp_size", None) or 1
    if ranks == 1:
        return list(shapes)
    plan = getattr(model, "tp_plan", None) or {}
    styles = {style for name, style in plan.items() if name.rsplit(".", 1)[-1] in _KEY_PROJECTIONS}
    if styles == {"colwise"} and all(shape.num_kv_heads % ranks == 0 for shape in shapes):
        return [replace(shape, num_kv_heads=shape.num_kv_heads // ranks) for shape in shapes]
    logger.warning(
        "The model runs on tp_size=%d ranks and only its states show how KV heads are split: the first forward pass "
        "allocates the cache, for its own batch size.",
        ranks,
    )
    return None


def check_positive(**sizes: int) -> None:
    """Raise a `ValueError` naming the first of `sizes` that is not a positive int."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a positive int, got {size!r}.")


def layer_devices(model: PreTrainedModel, num_layers: int) -> list[torch.device]:
    """The device on which each layer computes, also when accelerate has spread or offloaded the model."""
    refuse_missing_layers(model, num_layers)
    devices: dict[int, torch.device] = {}
    for layer_idx, module in _numbered_modules(model):
        if (device := _compute_device(module)) is not None:
            devices[layer_idx] = device
    return [devices.get(layer_idx, model.device) for layer_idx in range(num_layers)]


def missing_layers(model: PreTrainedModel, num_layers: int) -> list[int]:
    """The layers of a cache of `num_layers` that the model does not have or, by its config, does not run.

    [] where the modules do not tell: none has a `layer_idx`, or several stacks count from 0 (HRM).
    """
    modules = [(layer_idx, type(module)) for layer_idx, module in _numbered_modules(model)]
    numbers = {layer_idx for layer_idx, _ in modules}
    if not numbers or len(set(modules)) < len(modules):
        return []
    stated = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) or num_layers
    return [i for i in range(num_layers) if i not in numbers or i >= stated]


def _numbered_modules(model: PreTrainedModel) -> list[tuple[int, torch.nn.Module]]:
    """The modules of the text decoder that have a `layer_idx`; a vision tower numbers its own layers."""
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    numbered = ((getattr(module, "layer_idx", None), module) for module in decoder.modules())
    return [(layer_idx, module) for layer_idx, module in numbered if isinstance(layer_idx, int)]


def refuse_missing_layers(model: PreTrainedModel, num_layers: int) -> None:
    """Raise a `ValueError` where a cache of `num_layers` has layers that no module of the model writes."""
    missing = missing_layers(model, num_layers)
    if not missing:
        return
    if len(plan_layers(model.config)) == num_layers:
        counts = f"Counting those that store keys, the model has {num_layers - len(missing)} layers and its config says"
        remedy = _edit_for_cut(model.config, num_layers, missing)
    else:
        counts = f"{type(model).__name__} has {num_layers - len(missing)} layers that store keys and the cache has"
        remedy = "Build the cache with the config of the model that runs."
    missing_words = ", ".join(map(str, missing))
    raise ValueError(f"{counts} {num_layers}: no step would be complete without layer {missing_words}. {remedy}")


def _edit_for_cut(config: PreTrainedConfig, num_layers: int, missing: Sequence[int]) -> str:
    """The edit that makes a config agree with a model from which layers were removed."""
    text_config, left = config.get_text_config(decoder=True), num_layers - len(missing)
    if getattr(text_config, "num_kv_shared_layers", None):
        return "Build the model from a config that describes the layers it has."
    place = "model.config" if text_config is config else "model.config.get_text_config()"
    edit = f"Set `{place}.num_hidden_layers = {left}`"
    if getattr(text_config, "layer_types", None):
        edit += " and keep the types of these layers in its `layer_types`"
    if missing[0] < left:  # layers were taken from the middle
        edit = f"Number those that are left from 0 to {left - 1} (`layer_idx` of every module of a layer). {edit}"
    return f"{edit}."


def _layer_configs(config: PreTrainedConfig) -> list[Any]:
    # Configs whose layers differ (Gemma 4) list them; reading such a field from the whole config would raise.
    return list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)


def _layer_types(config: PreTrainedConfig, layer_configs: Sequence[Any]) -> list[str]:
    stated = getattr(config, "layer_types", None)
    return list(stated) if stated is not None else [_implied_type(layer_config) for layer_config in layer_configs]


def _implied_type(layer_config: Any) -> str:
    if getattr(layer_config, "model_type", None) in _IGNORED_WINDOW_TYPES:
        return "full_attention"
    for layer_type, field in WINDOW_FIELDS.items():
        if getattr(layer_config, field, None) is not None:
            return layer_type
    return "full_attention"


def _sliding_window(layer_config: Any, layer_type: str) -> int | None:
    field = WINDOW_FIELDS.get(layer_type)
    return None if field is None else getattr(layer_config, field)


def _layer_shape(layer_config: Any, layer_type: str) -> LayerShape | None:
    if getattr(layer_config, "kv_lora_rank", None):
        # Multi-head latent attention (DeepSeek) caches the latent as keys and the shared rotary part as values.
        return LayerShape(1, layer_config.kv_lora_rank, layer_config.qk_rope_head_dim)
    num_heads = getattr(layer_config, "num_attention_heads", None)
    num_kv_heads = _num_kv_heads(layer_config, layer_type, num_heads)
    head_dim = getattr(layer_config, "head_dim", None)
    if head_dim is None and num_heads:
        head_dim = layer_config.hidden_size // num_heads
    if not num_kv_heads or not head_dim:
        return None
    return LayerShape(num_kv_heads, head_dim, getattr(layer_config, "v_head_dim", None) or head_dim)


def _num_kv_heads(layer_config: Any, layer_type: str, num_heads: int | None) -> int | None:
    if getattr(layer_config, "new_decoder_architecture", False):
        return num_heads  # Falcon caches its KV heads repeated for every query head
    stated: int | None = getattr(layer_config, "num_key_value_heads", None)
    if stated is None:
        return 1 if getattr(layer_config, "multi_query", False) else num_heads
    has_more = getattr(layer_config, "model_type", None) == "mimo_v2_flash" and layer_type == "sliding_attention"
    return 2 * stated if has_more else stated


def _compute_device(module: torch.nn.Module) -> torch.device | None:
    planned = (compat.planned_device(part) for part in module.modules())
    device = next((device for device in planned if device is not None), None)
    parameter = next(module.parameters(), None)
    return device if device is not None or parameter is None else parameter.device
