"""What a model's config and modules say of its layers."""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_static_kv import compat
from hf_static_kv.cache.codes import check_dims, check_kv_dtype
from hf_static_kv.cache.ranks import num_ranks
from hf_static_kv.cache.storage import LayerShape
from hf_static_kv.cache.unserved import EMPTY_LAYER_TYPES, why_unserved
from hf_static_kv.cache.values import Known, Values

logger = logging.getLogger(__name__)
PerLayer = int | Sequence[int]  # one number for all layers, or one for each

# A chunk is a window: its queries see at most `attention_chunk_size` keys.
WINDOW_FIELDS = {
    "sliding_attention": "sliding_window",
    "hybrid_sliding": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
# Tensor parallelism: modules whose output is cached, and styles that give every rank all of it.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "kv_a_proj_with_mqa")
_WHOLE_STYLES = {"colwise_gather_output", "colwise_rep", "mla_kv_a_proj", "replicate"}


@dataclass(frozen=True)
class LayerPlan:
    shape: LayerShape | None  # None: the config does not tell, or there are no keys
    sliding_window: int | None  # keys that a query may see, its own included; None: all
    has_keys: bool = True  # and values
    num_states: int = 0  # recurrent ones
    is_chunked: bool = False  # a query sees its own window of the sequence only
    index_shape: LayerShape | None = None  # of index keys: one head, no values
    compact_window: int | None = None  # `sliding_window` if the layer is compact
    kv_dtype: str | None = None  # of codes in the place of states

    def stored(self, shape: LayerShape) -> LayerShape:
        return replace(shape, window=self.compact_window, kv_dtype=self.kv_dtype)

    def stores_like(self, other: "LayerPlan") -> bool:
        return (self.shape, self.compact_window) == (other.shape, other.compact_window)


_MAX_PLANNED = 16
# Configs with their plans, by the id of the config, the oldest first: reading a config is slow.
_PLANNED: OrderedDict[int, Known] = OrderedDict()


def plan_layers(
    config: PreTrainedConfig, sliding: str = "full", kv_dtype: str | None = None
) -> list[LayerPlan]:
    """One plan for each layer that keeps something; a `ValueError` names what cannot be served.

    Of an encoder-decoder these are the self-attention layers of the decoder.
    """
    if isinstance(config, torch.nn.Module):
        raise TypeError(
            f"{type(config).__name__} is a model: pass `model.config`, or call "
            "`StaticContiguousCache.from_model(model, max_cache_len)`."
        )
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"The config is of type {type(config).__name__}: pass `model.config`.")
    known = _PLANNED.get(id(config))
    if known is None or not known.is_unchanged():
        reader = Values([])
        reader.of_attribute(config)
        known = Known((config, _plan_layers(config)), reader.seen)
        _PLANNED.pop(id(config), None)
        if not reader.num_not_held:
            _PLANNED[id(config)] = known
        if len(_PLANNED) > _MAX_PLANNED:
            _PLANNED.popitem(last=False)
    return with_kv_dtype(with_sliding(known.value[1], sliding), kv_dtype)


def _plan_layers(config: Any) -> list[LayerPlan]:
    if (reason := why_unserved(config)) is not None:
        raise ValueError(reason)
    config = config.get_text_config(decoder=True)
    # Configs whose layers differ (Gemma 4) list them.
    layer_configs = list(getattr(config, "per_layer_config", None) or ())
    if not layer_configs:
        layer_configs = [config] * config.num_hidden_layers
    if num_layers := getattr(config, "num_decoder_layers", None):
        # In T5 the other number is that of the encoder.
        layer_configs = [config] * num_layers
    if (layer_types := getattr(config, "layer_types", None)) is None:
        layer_types = list(map(_implied_type, layer_configs))
    # The last layers of some models (Gemma 3n) read an earlier layer's keys and store none.
    num_stored = len(layer_types) - (getattr(config, "num_kv_shared_layers", None) or 0)
    # Some layers use the selection of an earlier layer's index and store no index keys.
    index_types = getattr(config, "indexer_types", None) or ["full"] * num_stored
    columns = (column[:num_stored] for column in (layer_configs, layer_types, index_types))
    # Few differ, and reading a config is slow.
    planned: dict[Any, LayerPlan] = {}
    plans = []
    for layer_config, layer_type, index_type in zip(*columns, strict=True):
        kind = id(layer_config), layer_type, index_type
        if kind not in planned:
            planned[kind] = _plan_layer(layer_config, layer_type, index_type)
        plans.append(planned[kind])
    return plans


def with_sliding(plans: Sequence[LayerPlan], sliding: str) -> list[LayerPlan]:
    if sliding not in ("full", "compact"):
        raise ValueError(
            f'sliding={sliding!r}: choose "full" (layers with a window store every position) or '
            '"compact" (about two windows of them).'
        )
    return list(plans) if sliding == "full" else list(map(_compact, plans))


def with_kv_dtype(plans: list[LayerPlan], kv_dtype: str | None) -> list[LayerPlan]:
    check_kv_dtype(kv_dtype)
    if kv_dtype is None:
        return plans
    coded = [replace(plan, kv_dtype=kv_dtype) for plan in plans]
    for shape in filter(None, (plan.shape for plan in coded)):
        check_dims(shape.key_head_dim, shape.value_head_dim)
    return [replace(plan, shape=plan.shape and plan.stored(plan.shape)) for plan in coded]


def _compact(plan: LayerPlan) -> LayerPlan:
    if plan.sliding_window is None or plan.index_shape is not None:
        return plan  # a layer with an index stays full
    plan = replace(plan, compact_window=plan.sliding_window)
    return replace(plan, shape=plan.shape and plan.stored(plan.shape))


def _plan_layer(layer_config: Any, layer_type: str, index_type: str) -> LayerPlan:
    field = WINDOW_FIELDS.get(layer_type)
    window = None if field is None else getattr(layer_config, field)
    has_keys, has_state = compat.kept_by(layer_type)
    shape = _layer_shape(layer_config, layer_type) if has_keys else None
    num_states = 0
    if has_state and layer_type not in EMPTY_LAYER_TYPES:
        num_states = getattr(layer_config, "number_of_conv_states", 1)
    index_shape = None
    if index_type != "shared" and compat.has_index(layer_type):
        # The names of DeepSeek and of Qwen.
        dim = getattr(layer_config, "index_head_dim", None)
        index_shape = LayerShape(1, dim or layer_config.indexer_head_dim, 0)
    is_chunked = layer_type == "chunked_attention"
    return LayerPlan(shape, window, has_keys, num_states, is_chunked, index_shape)


def cache_bytes(
    config: PreTrainedConfig,
    max_cache_len: int,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
    *,
    sliding: str = "full",
    kv_dtype: str | None = None,
    tp: int = 1,
    tp_plan: Mapping[str, str] | None = None,
) -> int:
    """Bytes that a `StaticContiguousCache` for this config will take.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=16, num_key_value_heads=8, head_dim=64)
    >>> cache_bytes(config, 1024, dtype=torch.bfloat16)
    33554432
    >>> cache_bytes(config, 1024, dtype=torch.bfloat16, tp=2)
    16777216
    >>> cache_bytes(config, 1024, dtype=torch.bfloat16, kv_dtype="int8")
    17825792

    Args:
        dtype: The config's own by default.
        tp: Ranks; the bytes are those of one.
        tp_plan: How ranks share the heads; the config's own by default.
    """
    plans = plan_layers(config, sliding, kv_dtype)
    shapes = known_shapes(plans, config)
    check_positive(max_cache_len=max_cache_len, batch_size=batch_size, tp=tp)
    text_config = config.get_text_config(decoder=True)
    if tp_plan is None:
        tp_plan = getattr(text_config, "base_model_tp_plan", None)
    if (local := split_heads(shapes, tp_plan or {}, tp)) is None:
        raise ValueError(
            f"The plan of {config.model_type!r} does not tell how tp={tp} ranks share the KV "
            "heads: read `memory_bytes` of a cache after its first forward pass."
        )
    own: Any = dtype or text_config.dtype or config.dtype or torch.get_default_dtype()
    if isinstance(own, str):
        own = getattr(torch, own)
    indexes = [plan.index_shape for plan in plans if plan.index_shape is not None]
    shapes = [*local, *indexes]
    return sum([shape.num_bytes(max_cache_len, batch_size, (own, own)) for shape in shapes])


def known_shapes(plans: Sequence[LayerPlan], config: PreTrainedConfig) -> list[LayerShape]:
    """The shapes of layers that have keys; a `ValueError` if the config does not tell them."""
    shapes = [plan.shape for plan in plans if plan.shape is not None]
    if len(shapes) < sum(plan.has_keys for plan in plans):
        raise ValueError(
            f"The config of {config.model_type!r} does not tell the number of KV heads or their "
            "dim. `StaticContiguousCache(config, max_cache_len)` learns them from the first pass."
        )
    return shapes


def local_shapes(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> list[LayerShape] | None:
    """The shapes on this rank; None, and a warning, if they are not known."""
    ranks = num_ranks(model)
    if (local := split_heads(shapes, getattr(model, "tp_plan", None) or {}, ranks)) is None:
        logger.warning(
            f"The plan of tp_size={ranks} ranks does not tell how KV heads are split: the first "
            "forward pass allocates the cache, for its own batch size."
        )
    return local


def split_heads(
    shapes: Sequence[LayerShape], plan: Mapping[str, str], ranks: int
) -> list[LayerShape] | None:
    """The shapes on one of `ranks` ranks; None if the plan does not tell them."""
    styles = {style for name, style in plan.items() if name.rsplit(".", 1)[-1] in _KEY_PROJECTIONS}
    if ranks == 1 or not plan or (styles and styles <= _WHOLE_STYLES):
        return list(shapes)
    if styles != {"colwise"}:
        return None
    if uneven := [shape.num_kv_heads for shape in shapes if shape.num_kv_heads % ranks]:
        raise ValueError(
            f"{uneven[0]} KV heads cannot be split over tp_size={ranks} ranks. Use a number of "
            "ranks that divides them, or a plan that gives every rank all (docs/several-gpus.md)."
        )
    return [replace(shape, num_kv_heads=shape.num_kv_heads // ranks) for shape in shapes]


def for_each_layer(name: str, number: PerLayer, num_layers: int) -> list[int]:
    if isinstance(number, int):
        check_positive(**{name: number})
        return [number] * num_layers
    if len(number) != num_layers:
        raise ValueError(
            f"{name} has {len(number)} entries for {num_layers} layers: give one for each."
        )
    check_positive(**{f"{name}[{i}]": n for i, n in enumerate(number)})
    return list(number)


def check_positive(**sizes: int) -> None:
    """Raise a `ValueError` naming the first size that is not a positive int."""
    for name, size in sizes.items():
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a positive int, got {size!r}.")


def compute_device(model: PreTrainedModel) -> torch.device:
    """The device on which the model computes, also if its weights are offloaded."""
    if (device := model.device).type != "meta":
        return device
    planned = filter(None, map(compat.planned_device, compat.all_modules(model)))
    return next(planned, torch.device("cpu"))


def layer_devices(model: PreTrainedModel, num_layers: int) -> list[torch.device]:
    refuse_missing_layers(model, num_layers)
    devices: dict[int, torch.device] = {}
    for layer_idx, module in _numbered_modules(model):
        planned = filter(None, map(compat.planned_device, module.modules()))
        parameters = (parameter.device for parameter in module.parameters())
        if device := next(planned, None) or next(parameters, None):
            devices[layer_idx] = device
    return [devices.get(layer_idx) or compute_device(model) for layer_idx in range(num_layers)]


def missing_layers(model: PreTrainedModel, num_layers: int) -> list[int]:
    """The layers of a cache that the model lacks or, by its config, does not run."""
    modules = [(layer_idx, type(module)) for layer_idx, module in _numbered_modules(model)]
    if not modules or len(set(modules)) < len(modules):
        # They do not tell: none has a `layer_idx`, or several stacks count from 0 (HRM).
        return []
    numbers = {layer_idx for layer_idx, _ in modules}
    config = model.config.get_text_config(decoder=True)
    stated = getattr(config, "num_hidden_layers", None) or num_layers
    return [i for i in range(num_layers) if i not in numbers or i >= stated]


def _numbered_modules(model: PreTrainedModel) -> list[tuple[int, torch.nn.Module]]:
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    modules = compat.all_modules(decoder)
    numbered = [(own["layer_idx"], m) for m in modules if "layer_idx" in (own := m.__dict__)]
    return [(layer_idx, module) for layer_idx, module in numbered if isinstance(layer_idx, int)]


def refuse_missing_layers(model: PreTrainedModel, num_layers: int) -> None:
    if not (missing := missing_layers(model, num_layers)):
        return
    config = model.config.get_text_config(decoder=True)
    left = num_layers - len(missing)
    says = "its config says"
    if len(plan_layers(model.config)) != num_layers:
        says = "the cache has"
        remedy = "Build the cache with the config of the model that runs."
    elif getattr(config, "num_kv_shared_layers", None):
        remedy = "Build the model from a config that describes the layers it has."
    else:
        place = "model.config" if config is model.config else "model.config.get_text_config()"
        remedy = f"Set `{place}.num_hidden_layers = {left}`"
        if getattr(config, "layer_types", None):
            remedy += " and keep the types of these layers in its `layer_types`"
        if missing[0] < left:  # layers were taken from the middle
            remedy = f"Number the rest from 0 to {left - 1} (`layer_idx` of every module). {remedy}"
        remedy += "."
    raise ValueError(
        f"Of those that store keys, the model has {left} layers and {says} {num_layers}: no step "
        f"would be complete without layer {', '.join(map(str, missing))}. {remedy}"
    )


def _implied_type(layer_config: Any) -> str:
    # The config of Moshi has a window that its attention mask ignores.
    if getattr(layer_config, "model_type", None) != "moshi":
        for name, field in WINDOW_FIELDS.items():
            if getattr(layer_config, field, None) is not None:
                return name
    return "full_attention"


def _layer_shape(layer_config: Any, layer_type: str) -> LayerShape | None:
    def read(name: str) -> Any:
        return getattr(layer_config, name, None)

    if latent_dim := read("kv_lora_rank"):
        # DeepSeek caches the latent as keys, and the shared rotary part as values.
        if compat.keeps_latents(layer_type):
            return LayerShape(1, latent_dim, layer_config.qk_rope_head_dim)
        key_dim = layer_config.qk_nope_head_dim + layer_config.qk_rope_head_dim
        return LayerShape(layer_config.num_attention_heads, key_dim, layer_config.v_head_dim)
    # Inkling has the sizes of both types of layer in one config.
    has_own = "sliding" in layer_type and hasattr(layer_config, "swa_head_dim")
    prefix = "swa_" if has_own else ""
    num_heads = read(f"{prefix}num_attention_heads")
    num_kv_heads = read(f"{prefix}num_key_value_heads")
    head_dim = read(f"{prefix}head_dim") or read("d_kv")  # T5's name for it
    if read("new_decoder_architecture"):
        # Falcon caches its KV heads repeated for every query head.
        num_kv_heads = num_heads
    elif num_kv_heads is None:
        num_kv_heads = 1 if read("multi_query") else num_heads
    elif read("model_type") == "mimo_v2_flash" and layer_type == "sliding_attention":
        num_kv_heads *= 2
    if head_dim is None and num_heads:
        head_dim = layer_config.hidden_size // num_heads
    if not num_kv_heads or not head_dim:
        return None
    return LayerShape(num_kv_heads, head_dim, read("v_head_dim") or head_dim)
