"""Models and capacities that a cache cannot serve, by their config."""

import logging

from transformers import PreTrainedConfig

from hf_static_kv import compat

logger = logging.getLogger(__name__)
EMPTY_LAYER_TYPES = {"mlp", "moe"}  # keep nothing from token to token

_OWN_CACHE = "Leave `past_key_values` out: `generate` then builds the cache that this model needs."
_NO_CACHE = "Leave `past_key_values` out and pass `use_cache=False`."
# Model types whose config does not tell what they keep.
_NEED_OWN_CACHE = {
    "blt": "keeps the keys of its byte encoder and of its byte decoder in two caches",
    "glm5_next_text": "asks a layer for its length in the middle of a pass",
    "minimax": "takes a cache of its own kind only",
    "mistral_large4_text": "has layers that keep index keys alone and read the keys of others",
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), "keeps a recurrent state"),
    **dict.fromkeys(("reformer", "xlnet"), "keeps hidden states"),
}
_NEED_NO_CACHE = {
    "cpmant": "prepends tokens of its own at every step",
    "prophetnet": "computes other logits with a cache than without one",
    **dict.fromkeys(("flaubert", "openai-gpt", "xlm"), "takes no cache"),
}
# Encoders, unless their config has `is_decoder=True`. By name: decoders may have False too.
_ENCODER_TYPES = {
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
    "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip
# Models with a table of positions or of attention biases, which bounds a sequence.
_POSITION_TABLE_TYPES = _ENCODER_TYPES | {
    "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "codegen", "ctrl", "git",
    "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart", "mpt", "mvp", "opt", "pegasus",
    "plbart", "trocr", "whisper",
}  # fmt: skip


def why_unserved(config: PreTrainedConfig) -> str | None:
    text_config = config.get_text_config(decoder=True)
    name = text_config.model_type
    if name in _NEED_OWN_CACHE:
        return f"{name!r} {_NEED_OWN_CACHE[name]}. {_OWN_CACHE}"
    if name in _NEED_NO_CACHE:
        return f"{name!r} {_NEED_NO_CACHE[name]}. {_NO_CACHE}"
    if name in _ENCODER_TYPES and not getattr(text_config, "is_decoder", False):
        return f"{name!r} is an encoder. {_NO_CACHE} A decoder has `is_decoder=True` in its config."
    if not (num_layers := getattr(text_config, "num_hidden_layers", None)):
        return f"The config of {name!r} does not say how many layers there are. {_OWN_CACHE}"
    if crossed := list(getattr(text_config, "cross_attention_layers", None) or ()):
        return f"Layers {crossed} of {name!r} are cross-attention. {_OWN_CACHE}"
    if getattr(text_config, "indexer_compress_ratio", None) and not compat.index_keeps_positions():
        return f"{name!r} needs transformers 5.21 to keep positions in its layers. {_OWN_CACHE}"
    types = set(getattr(text_config, "layer_types", None) or ("full_attention",))
    types -= EMPTY_LAYER_TYPES
    if unknown := sorted(kind for kind in types if compat.kept_by(kind) == (False, False)):
        return (
            f"{name!r} has layers of type {', '.join(unknown)}, whose state is not keys and values "
            f"by position alone. {_OWN_CACHE}"
        )
    if not any(compat.kept_by(kind)[0] for kind in types):
        return (
            f"{name!r} has no layer with keys and values ({', '.join(sorted(types))}). {_OWN_CACHE}"
        )
    if (getattr(text_config, "num_kv_shared_layers", None) or 0) >= num_layers:
        return (
            f"All {num_layers} layers of {name!r} read the keys and values of another model. Give "
            "the cache to that model."
        )
    return None


def positions_of_table(config: PreTrainedConfig) -> int | None:
    """How many positions a model has that looks them up in a table; None: it computes them."""
    is_table = config.get_text_config(decoder=True).model_type in _POSITION_TABLE_TYPES
    return _positions(config) if is_table else None


def _positions(config: PreTrainedConfig) -> int | None:
    text_config = config.get_text_config(decoder=True)
    fields = ("max_position_embeddings", "max_seq_len", "max_target_positions")
    return next(filter(None, (getattr(text_config, field, None) for field in fields)), None)


def check_positions(config: PreTrainedConfig, max_cache_len: int) -> None:
    """Refuse a capacity beyond a table of positions; warn of one beyond the trained positions."""
    text_config = config.get_text_config(decoder=True)
    name = text_config.model_type
    positions = _positions(config)
    if not positions or max_cache_len <= positions:
        return
    if positions_of_table(config) is not None:
        raise ValueError(
            f"{name!r} has a table of positions 0 to {positions - 1}, too short for "
            f"max_cache_len={max_cache_len}. Use max_cache_len <= {positions}."
        )
    rope = getattr(text_config, "rope_parameters", None)
    if not rope or getattr(text_config, "alibi", False):
        return
    trained = positions
    # One scaling for each type of layer, or one for all.
    for scaling in [part for part in rope.values() if isinstance(part, dict)] or [rope]:
        if scaling.get("rope_type") in ("linear", "dynamic", "yarn"):
            # `max_position_embeddings` may still be the length before the scaling.
            original = scaling.get("original_max_position_embeddings") or positions
            trained = max(trained, int(original * (scaling.get("factor") or 1)))
    if max_cache_len > trained:
        logger.warning(
            f"max_cache_len={max_cache_len} is more than the {trained} positions that {name!r} "
            "was trained for (max_position_embeddings, rope_parameters)."
        )


def warn_use_cache_off(config: PreTrainedConfig, generation_config: object = None) -> None:
    """Warn if the config, or if given the generation config alone, has `use_cache=False`."""
    parts = (config, config.get_text_config(decoder=True))
    is_off = any(getattr(part, "use_cache", None) is False for part in parts)
    if generation_config is not None:
        is_off = not is_off and getattr(generation_config, "use_cache", None) is False
    if is_off:
        logger.warning("The model has use_cache=False: call generate with use_cache=True.")
