"""A small random model of every decoder that transformers has."""

import dataclasses
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

from tests import hybrids
from tests.conftest import SIZES as COMMON_SIZES
from tests.fuzz.models import draw_weights

MAX_PARAMETERS = 5_000_000
WINDOW = 8  # shorter than a prompt
_WIDTH, _FEED_FORWARD, _HEADS, _LAYERS = 64, 48, 4, 2


def _each(size: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


# Fields that are a size, in configs of any type and in the configs inside them.
SIZES = {
    **COMMON_SIZES,
    **_each(
        _LAYERS,
        "decoder_layers encoder_layers num_decoder_layers num_encoder_layers num_layers depth "
        "num_blocks",
    ),
    **_each(_LAYERS, "num_hidden_layers n_layer n_layers"),
    **_each(1, "num_lstm_layers num_global_layers conf_num_hidden_layers"),
    **_each(
        _WIDTH,
        "embedding_dim emb_dim d_inner attention_hidden_size lru_width word_embed_proj_dim "
        "embedding_size",
    ),
    **_each(
        _WIDTH,
        "out_hidden_size hidden_size_global output_channels backbone_hidden_size "
        "input_embedding_size",
    ),
    **_each(
        _WIDTH, "projector_input_dim projector_output_dim output_embedding_size conf_hidden_size"
    ),
    **_each(
        _FEED_FORWARD,
        "decoder_ffn_dim encoder_ffn_dim dff dim_ff d_ff feed_forward_size ffn_hidden_size mlp_dim",
    ),
    **_each(_FEED_FORWARD, "dense_intermediate_size expert_ffn_hidden_size intermediate_size_mlp"),
    **_each(
        32,
        "shared_expert_intermediate_size shared_intermediate_size "
        "moe_shared_expert_intermediate_size",
    ),
    **_each(
        _HEADS,
        "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads "
        "attention_heads",
    ),
    **_each(
        _HEADS,
        "num_encoder_attention_heads swa_num_attention_heads linear_num_heads "
        "linear_num_value_heads",
    ),
    **_each(
        2, "num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads index_n_heads"
    ),
    **_each(
        16,
        "attention_head_dim attention_head_size d_head d_kv dim_head swa_head_dim v_head_dim "
        "kv_channels",
    ),
    **_each(
        16,
        "linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim kv_lora_rank "
        "q_lora_rank",
    ),
    **_each(
        16,
        "o_lora_rank adapter_rank laurel_rank codebook_dim hidden_size_per_layer_input "
        "global_head_dim",
    ),
    **_each(
        16,
        "query_pre_attn_scalar router_hidden_size hc_lowrank ple_embed_dim base_channels "
        "num_mel_bins",
    ),
    **_each(
        8, "qk_rope_head_dim qk_nope_head_dim mamba_d_state state_size ssm_state_size mamba_dt_rank"
    ),
    **_each(8, "mamba_chunk_size chunk_size time_step_rank prompt_length prompt_mid_dim"),
    **_each(8, "mamba_n_heads mamba_num_heads"),
    **_each(16, "mamba_d_head mamba_head_dim mamba_headdim"),
    **_each(1, "mamba_n_groups mamba_ngroups n_groups n_group topk_group num_mem_blocks"),
    **_each(4, "moe_num_experts zero_expert_num"),
    **_each(2, "moe_k moe_top_k moe_topk"),
    **_each(1, "first_k_dense_replace num_dense_layers"),
    **_each(
        128,
        "decoder_vocab_size vocab_size_per_layer_input audio_vocab_size codebook_size "
        "num_centroids",
    ),
    **_each(
        128,
        "encoder_hash_byte_group_vocab ngram_vocab_size_base pronunciation_vocab_size "
        "shape_vocab_size",
    ),
    **_each(64, "n_positions n_ctx max_seq_len max_target_positions max_source_positions"),
    **_each(
        WINDOW,
        "sliding_window attention_chunk_size window_size sliding_window_size local_attention "
        "index_topk",
    ),
    **_each(WINDOW, "keep_window_size rel_extent"),
    **_each(2, "index_block_size index_topk_blocks"),
    **_each(16, "image_size"),
    **_each(4, "patch_size"),
}
# None in many configs, which derive them from other fields or leave them to the tokenizer.
_ALWAYS = {"num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "pad_token_id"}

_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}  # every head has a part of the latents
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 16,
}  # fmt: skip
_SHARED = {
    "num_hidden_layers": 5, "layer_types": ["sliding_attention",
    "full_attention"] * 2 + ["sliding_attention"],
    "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 5,
}  # fmt: skip
_NO_INPUTS = {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
# What differs from `SIZES` where a type needs sizes that fit together. Hybrid models are those of
# the tests.
OWN: dict[str, dict[str, Any]] = {
    **hybrids.FAMILIES,
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(["full_attention", "sliding_attention"], _ROPE)},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n": {"text_config": _SHARED},
    "gemma3n_text": _SHARED,
    "gemma4_assistant": _NO_INPUTS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "mamba2": {"num_heads": 8},
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    "minimax_m3_vl_text": {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "xmod": {"default_language": "en_XX"},
    "zamba": {**hybrids.FAMILIES["zamba"], "attention_hidden_size": 128},
}  # fmt: skip
# Fields without which the config of a type does not build.
_DEFAULTS = {"gemma4_assistant": _NO_INPUTS}


def small_config(model_type: str) -> PreTrainedConfig:
    kind = _model_class(model_type).config_class
    return kind(**_small_fields(kind(**_DEFAULTS.get(model_type, {})), OWN.get(model_type, {})))


def _model_class(model_type: str) -> Any:
    return getattr(transformers, DECODERS[model_type])


def _small_fields(config: PreTrainedConfig, own: dict[str, Any]) -> dict[str, Any]:
    """Fields of a small config of the same type, as a decoder; `own` has those that are special to
    the type.
    """
    names = {field.name for field in dataclasses.fields(config)}
    fields: dict[str, Any] = {"is_decoder": True} if "is_decoder" in names else {}
    if config.is_encoder_decoder:
        fields["is_encoder_decoder"] = False
    fields |= {
        name: SIZES[name] for name in names & SIZES.keys() if name in _ALWAYS or _has(config, name)
    }
    if fields.get("kv_lora_rank"):
        fields |= {name: size for name, size in _LATENT.items() if name in names}
    if (types := config.__dict__.get("layer_types")) and "num_hidden_layers" not in own:
        kinds = list(dict.fromkeys(types))  # one layer of each
        fields["layer_types"] = kinds if len(kinds) > 1 else kinds * _LAYERS
        fields["num_hidden_layers"] = len(fields["layer_types"])
    parts = {name: config.__dict__.get(name) for name in names & config.sub_configs.keys()}
    for name, part in parts.items():
        if isinstance(part, PreTrainedConfig):
            kind = {"model_type": part.model_type} if part.model_type else {}
            fields[name] = {**kind, **_small_fields(part, own.get(name, {}))}
    return {**fields, **{name: value for name, value in own.items() if name not in parts}}


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None
    except Exception:  # a field that differs from layer to layer (Gemma 4)
        return True


def small_model(model_type: str) -> PreTrainedModel:
    """A model of at most `MAX_PARAMETERS`; its weights are such that every key moves the logits."""
    model_class, config = _model_class(model_type), small_config(model_type)
    with torch.device("meta"):
        size = model_class(config).num_parameters()
    if size > MAX_PARAMETERS:
        raise ValueError(f"its smallest model has {size:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    draw_weights(model, seed=0)
    if getattr(config, "attn_logit_softcapping", None):
        # Before 5.22 SDPA is the default, and ignores the soft cap.
        model.set_attn_implementation("eager")
    # MusicGen drops every padding token of its output: one that no prompt has.
    model.generation_config.update(
        eos_token_id=None, pad_token_id=126, decoder_start_token_id=0, num_return_sequences=1
    )
    return model
