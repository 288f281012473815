"""Small hybrid models: attention beside layers with a recurrent state, of every family that
transformers builds.
"""

from transformers import PreTrainedModel

from tests.conftest import tiny_model

_PAIRS = ["linear_attention", "full_attention"] * 2
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 4, "layer_types": _PAIRS, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_MAMBA = {
    "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}  # fmt: skip
_LATENT = {
    "num_hidden_layers": 4, "layer_types": _PAIRS, "num_key_value_heads": 4, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "linear_head_dim": 16,
    "linear_num_heads": 4, "first_k_dense_replace": 1,
}  # fmt: skip

# model_type: what differs from the common fields
FAMILIES = {
    "qwen3_next": {**_DELTA, **_EXPERTS},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS},
    "olmo_hybrid": _DELTA,
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
    "num_dense_layers": 1, **_EXPERTS},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, "layer_types": _PAIRS, **_EXPERTS},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "nemotron_h": {
        "layer_types": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "num_hidden_layers": 5, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 8, "moe_shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1, **_EXPERTS,
    },
    "zamba": {
        "num_hidden_layers": 6, "layer_types": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "attn_layer_period": 3, "attn_layer_offset": 2, "n_mamba_heads": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 8,
        "num_mem_blocks": 1, "use_mamba_kernels": False,
    },
    "kimi_linear": {**_LATENT, "q_lora_rank": None, **_EXPERTS},
    "bailing_hybrid": {**_LATENT, "q_lora_rank": 16, **_EXPERTS},
    "zaya": {"num_hidden_layers": 3, **_EXPERTS, "num_experts_per_tok": 1},
    # Windows shorter than every prompt.
    "inkling_text": {
        "num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window_size": 8,
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, **_EXPERTS,
    },
}  # fmt: skip


def hybrid_model(family: str) -> PreTrainedModel:
    model = tiny_model(family, **FAMILIES[family])
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model
