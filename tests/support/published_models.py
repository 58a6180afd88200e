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
