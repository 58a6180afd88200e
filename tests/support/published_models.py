"""Configurations of published mixtures as far as sizes depend on them, with the numbers that their makers name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """total, active: parameters in billions. gigabytes: of GGUF files by kind, as they are on the hub."""

    name: str
    total: float
    active: float
    gigabytes: dict[str, float]
    config: dict[str, Any]


_LFM2_ATTENTION = (2, 6, 10, 14, 18, 21)
_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_GRANITE_ATTENTION = (5, 15, 25, 35)

PUBLISHED = (
    Published(
        "LFM2-8B-A1B",
        8.3,
        1.5,
        {"Q4_K_M": 5.05, "Q8_0": 8.87, "F16": 16.7},
        {
            "model_type": "lfm2_moe",
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_hidden_layers": 24,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 65536,
            "max_position_embeddings": 128000,
            "layer_types": ["full_attention" if layer in _LFM2_ATTENTION else "conv" for layer in range(24)],
        },
    ),
    Published(
        "Granite-4.0-H-Small",
        32.2,
        9.0,
        {"Q4_K_M": 19.5, "Q8_0": 34.3},
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 4096,
            "intermediate_size": 768,
            "shared_intermediate_size": 1536,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 72,
            "num_experts_per_tok": 10,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "vocab_size": 100352,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "layer_types": ["attention" if layer in _GRANITE_ATTENTION else "mamba" for layer in range(40)],
        },
    ),
    Published(
        "Nemotron-3-Nano-30B-A3B",
        31.6,
        3.6,
        {"Q4_K_M": 24.5, "Q8_0": 33.6},
        {
            "model_type": "nemotron_h",
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "num_hidden_layers": len(_NEMOTRON),
            "hybrid_override_pattern": _NEMOTRON,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "vocab_size": 131072,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        },
    ),
    Published(
        "Hunyuan-A13B",
        80.4,
        13.0,
        {"Q4_K_M": 48.6, "Q8_0": 85.5},
        {
            "model_type": "hunyuan_v1_moe",
            "hidden_size": 4096,
            "intermediate_size": 3072,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 64,
            "moe_topk": 8,
            "vocab_size": 128167,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    Published(
        "gpt-oss-20b",
        20.9,
        3.6,
        {"MXFP4": 12.1, "F16": 13.8},
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
        },
    ),
)

_SLIDING = [*5 * ["sliding_attention"], "full_attention"]
_GEMMA_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
# Configurations with fields and numbers that the hub has in them.
AS_ON_THE_HUB = (
    Published(
        "Gemma-4-26B-A4B",
        25.2,
        3.8,
        {},
        {
            "model_type": "gemma4",
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text",
                "attention_k_eq_v": True,
                "enable_moe_block": True,
                "final_logit_softcapping": 30.0,
                "global_head_dim": 512,
                "head_dim": 256,
                "hidden_size": 2816,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 2112,
                "layer_types": 5 * _SLIDING,
                "max_position_embeddings": 262144,
                "moe_intermediate_size": 704,
                "num_attention_heads": 16,
                "num_experts": 128,
                "num_global_key_value_heads": 2,
                "num_hidden_layers": 30,
                "num_key_value_heads": 8,
                "num_kv_shared_layers": 0,
                "rope_parameters": _GEMMA_ROPES,
                "sliding_window": 1024,
                "top_k_experts": 8,
                "use_bidirectional_attention": "vision",
                "vocab_size": 262144,
            },
            "vision_config": {"model_type": "gemma4_vision"},
        },
    ),
    Published(
        "Nemotron-3-Nano-30B-A3B",
        31.6,
        3.6,
        {},
        {**PUBLISHED[2].config, "time_step_limit": [0.0, float("inf")], "time_step_min": 0.001},
    ),
    Published(
        "GLM-5.2",
        743.4,
        41.3,
        {},
        {
            "model_type": "glm_moe_dsa",
            "eos_token_id": [154820, 154827, 154829],
            "first_k_dense_replace": 3,
            "hidden_size": 6144,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_topk": 2048,
            "index_topk_freq": 4,
            "indexer_rope_interleave": True,
            "indexer_types": ["full" if layer < 3 or layer % 4 == 2 else "shared" for layer in range(78)],
            "intermediate_size": 12288,
            "kv_lora_rank": 512,
            "max_position_embeddings": 1048576,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 78,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "topk_group": 1,
            "v_head_dim": 256,
            "vocab_size": 154880,
        },
    ),
)
# Models on transformers' code. Their files are of any kind, so no sizes stand here.
_STEP_KINDS = ["full_attention", *3 * ["sliding_attention"]] * 12
_STEP_MOE = ",".join(map(str, range(3, 45)))
OF_ANY_KIND = (
    Published(
        "Step-3.5-Flash",
        196.8,
        11.0,
        {},
        {
            "model_type": "step3p5",
            "architectures": ["Step3p5ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1280,
            "share_expert_dim": 1280,
            "num_hidden_layers": 45,
            "num_nextn_predict_layers": 3,
            "num_attention_heads": 64,
            "num_attention_groups": 8,
            "head_dim": 128,
            "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
            "moe_num_experts": 288,
            "moe_top_k": 8,
            "moe_layers_enum": _STEP_MOE,
            "moe_router_scaling_factor": 3.0,
            "swiglu_limits": [*43 * [0.0], 7.0, 7.0, *3 * [0.0]],
            "swiglu_limits_shared": [*44 * [0.0], 16.0, *3 * [0.0]],
            "sliding_window": 512,
            "layer_types": _STEP_KINDS,
            "rope_theta": [5e6 if kind == "full_attention" else 1e4 for kind in _STEP_KINDS],
            "partial_rotary_factors": [0.5 if kind == "full_attention" else 1.0 for kind in _STEP_KINDS],
            "eos_token_id": [1, 2, 128007],
            "vocab_size": 128896,
            "max_position_embeddings": 262144,
        },
    ),
    Published(
        "DBRX",
        132.0,
        36.0,
        {},
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "max_seq_len": 32768,
            "vocab_size": 100352,
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
    ),
)
