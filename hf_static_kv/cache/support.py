"""Which models one KV cache can serve, and what a user has to know of a model before its first step."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

# For a cache a chunk is a window: its queries see at most `attention_chunk_size` keys. The mask says where it begins.
WINDOW_FIELDS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_SERVED_LAYER_TYPES = {"full_attention", *WINDOW_FIELDS}
_STATELESS_LAYER_TYPES = {"mlp", "moe"}  # layers that are not attention and keep nothing from token to token

# Model types whose config does not tell what they keep: the end of a sentence that begins with the type's name.
_STATEFUL_TYPES = {
    "blt": "keeps the keys of its byte encoder and of its byte decoder in two caches",
    "recurrent_gemma": "keeps a recurrent state, which a KV cache cannot hold",
    "reformer": "keeps hash buckets and hidden states, which a KV cache cannot hold",
    "rwkv": "keeps a recurrent state, which a KV cache cannot hold",
    "xlnet": "keeps hidden states, which a KV cache cannot hold",
    "xlstm": "keeps a recurrent state, which a KV cache cannot hold",
}
_UNCACHED_TYPES = {
    "cpmant": "prepends tokens of its own at every step, so a cache does not hold the sequence alone",
    "flaubert": "takes no cache",
    "openai-gpt": "takes no cache",
    "prophetnet": "computes other logits with a cache than without one",
    "xlm": "takes no cache",
}

# Encoders, unless their config has `is_decoder=True`. By name: configs of decoders have `is_decoder=False` too.
_ENCODER_TYPES = {
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip

# Models with a table of positions, or of attention biases by position: its length is the longest sequence.
_POSITION_TABLE_TYPES = _ENCODER_TYPES | {
    "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "codegen", "ctrl", "git", "gpt2",
    "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart", "mpt", "mvp", "opt", "pegasus", "plbart", "trocr",
}  # fmt: skip
# Rotary scalings whose `max_position_embeddings` may still be the length before the scaling.
_SCALED_ROPE_TYPES = {"linear", "dynamic", "yarn"}

_OWN_CACHE = "Leave `past_key_values` out: `generate` then builds the cache that this model needs."
_NO_CACHE = "Leave `past_key_values` out and pass `use_cache=False`."


def require_config(config: object) -> None:
    """Raise a `TypeError` for anything but a config, with a remedy for a model."""
    if isinstance(config, torch.nn.Module):
        raise TypeError(
            f"{type(config).__name__} is a model: pass `model.config`, or use "
            "`StaticContiguousCache.from_model(model, max_cache_len)`."
        )
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"The config is of type {type(config).__name__}: pass `model.config`, a PreTrainedConfig.")


def refuse_unserved(config: PreTrainedConfig) -> None:
    """Raise a `ValueError` that names the part of the model that one KV cache cannot hold, and the remedy."""
    require_config(config)
    text_config = config.get_text_config(decoder=True)
    name = text_config.model_type
    reason: str | None
    if config.is_encoder_decoder:
        reason = f"{config.model_type!r} is an encoder-decoder: it needs a cross-attention cache too. {_OWN_CACHE}"
    elif name in _STATEFUL_TYPES:
        reason = f"{name!r} {_STATEFUL_TYPES[name]}. {_OWN_CACHE}"
    elif name in _UNCACHED_TYPES:
        reason = f"{name!r} {_UNCACHED_TYPES[name]}. {_NO_CACHE}"
    elif name in _ENCODER_TYPES and not getattr(text_config, "is_decoder", False):
        reason = (
            f"{name!r} is an encoder, whose tokens attend to later ones: a new token changes the keys of all. "
            f"{_NO_CACHE} As a decoder it needs `is_decoder=True` in its config."
        )
    elif not getattr(text_config, "num_hidden_layers", None):
        reason = f"The config of {name!r} does not say how many layers there are. {_OWN_CACHE}"
    else:
        reason = _unserved_layers(text_config, name)
    if reason is not None:
        raise ValueError(reason)


def _unserved_layers(text_config: PreTrainedConfig, name: str) -> str | None:
    """Why the cache cannot hold some or all of the layers, and the remedy; None where it can hold them all."""
    if getattr(text_config, "cross_attention_layers", None):
        layers = list(text_config.cross_attention_layers)
        return f"Layers {layers} of {name!r} are cross-attention, which is not cached by position. {_OWN_CACHE}"
    unserved = set(getattr(text_config, "layer_types", None) or ()) - _SERVED_LAYER_TYPES
    if stateful := sorted(unserved - _STATELESS_LAYER_TYPES):
        return (
            f"{name!r} has layers of type {', '.join(stateful)}, whose state is not keys and values by position, or "
            f"not these alone ({', '.join(sorted(_SERVED_LAYER_TYPES))} can be cached). {_OWN_CACHE}"
        )
    if unserved:
        types = ", ".join(sorted(unserved))
        return f"{name!r} has layers of type {types}, which have no keys and values to cache. {_OWN_CACHE}"
    num_layers, num_shared = text_config.num_hidden_layers, getattr(text_config, "num_kv_shared_layers", None) or 0
    if num_shared >= num_layers:
        return (
            f"All {num_layers} layers of {name!r} read the keys and values of another model and store none "
            f"(num_kv_shared_layers={num_shared}): there is nothing to cache. Give the cache to that model."
        )
    return None


def check_positions(config: PreTrainedConfig, max_cache_len: int) -> None:
    """Refuse a capacity beyond a table of positions; log a warning for one beyond the trained positions."""
    text_config = config.get_text_config(decoder=True)
    name, positions = text_config.model_type, getattr(text_config, "max_position_embeddings", None)
    positions = positions or getattr(text_config, "max_seq_len", None)  # MPT's name for it
    if not positions or max_cache_len <= positions:
        return
    if name in _POSITION_TABLE_TYPES:
        raise ValueError(
            f"{name!r} has a table of positions 0 to {positions - 1}, too short for max_cache_len={max_cache_len}. "
            f"Use max_cache_len <= {positions}."
        )
    trained = _trained_positions(text_config, positions)
    if trained is not None and max_cache_len > trained:
        logger.warning(
            "max_cache_len=%d is more than the %d positions that %r was trained for (max_position_embeddings, "
            "rope_parameters): longer sequences run, untrained.",
            max_cache_len,
            trained,
            name,
        )


def _trained_positions(text_config: PreTrainedConfig, positions: int) -> int | None:
    """The trained length of rotary positions, after scaling; None for positions of another kind."""
    rope = getattr(text_config, "rope_parameters", None)
    if not rope or getattr(text_config, "alibi", False):
        return None
    # One set of parameters for all layers, or one for each type of layer.
    scalings = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    reached = [
        (scaling.get("original_max_position_embeddings") or positions) * (scaling.get("factor") or 1)
        for scaling in scalings
        if scaling.get("rope_type") in _SCALED_ROPE_TYPES
    ]
    return int(max([positions, *reached]))


def warn_use_cache_off(config: PreTrainedConfig, generation_config: object = None) -> None:
    """Log a warning where the config says `use_cache=False`, or, if it is given, the generation config alone does."""
    parts = (config, config.get_text_config(decoder=True))
    in_config = any(getattr(part, "use_cache", None) is False for part in parts)
    in_generation_config = getattr(generation_config, "use_cache", None) is False
    if in_config if generation_config is None else in_generation_config and not in_config:
        where = "config" if in_config else "generation config"
        logger.warning("This model's %s has use_cache=False: call generate with use_cache=True.", where)
