"""Tiny random models of every supported type, saved the way transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.3,
}
# Three value heads per key head, heads with a part of their channels rotated, and attention in two layers.
_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
# Layers with and without a window differ in heads and rotation.
_GEMMA = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 5,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
# Layers of one part each.
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "head_dim": 16,
    "time_step_min": 1e-12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 1.7,
}
_GRANITE = {
    "num_local_experts": 8,
    "shared_intermediate_size": 48,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_GRANITE_HYBRID = {
    **_GRANITE,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.7,
}
# Many heads: with few of them several positions have the score 0.
_INDEXER = {
    **_MLA,
    "q_lora_rank": 24,
    "index_topk": 6,
    "index_n_heads": 24,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_NOAUX = {"n_routed_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}

# Case name -> (class prefix, what differs from the base). With `vision_config` the model reads images as well.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": None}),
    "llama-biases-llama3": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 8}),
    # As many KV heads as query heads, of a size that the compiled attention does not take.
    "mixtral-mha-odd": (
        "Mixtral",
        {"num_local_experts": 8, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24},
    ),
    "mixtral-window": ("Mixtral", {"num_local_experts": 8, "sliding_window": 4, "hidden_act": "gelu"}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "head_dim": 32,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.5}),
    "olmoe-mha": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "granitemoe": ("GraniteMoe", {name: value for name, value in _GRANITE.items() if "shared" not in name}),
    "granitemoeshared": ("GraniteMoeShared", _GRANITE),
    "granitemoehybrid": ("GraniteMoeHybrid", _GRANITE_HYBRID),
    "granitemoehybrid-dense-rope": (
        "GraniteMoeHybrid",
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_n_groups": 1,
        },
    ),
    "lfm2_moe": ("Lfm2Moe", _LFM2),
    "lfm2_moe-biases": (
        "Lfm2Moe",
        {
            **_LFM2,
            "layer_types": ["full_attention", "conv", "full_attention"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "use_expert_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True}),
    "phimoe-longrope": (
        "Phimoe",
        {
            "num_local_experts": 8,
            "router_jitter_noise": 0.2,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "sliding_window": 4,
            "swiglu_limit": 1.0,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_NOAUX,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {**_MLA, "q_lora_rank": 24, "norm_topk_prob": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "use_bias": True, "moe_layer_end_index": 2},
    ),
    "dots1": (
        "Dots1",
        {
            **_NOAUX,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_next": ("Qwen3Next", {**_HYBRID, "mlp_only_layers": [1], "attention_bias": True}),
    "qwen3_next-recurrent-end": (
        "Qwen3Next",
        {
            **_HYBRID,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_5_text": ("Qwen3_5", _HYBRID),
    "qwen3_5": ("Qwen3_5", {**_HYBRID, "vision_config": _VISION}),
    "qwen3_5_moe_text": ("Qwen3_5Moe", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_HYBRID, "vision_config": _VISION}),
    "gemma4_text": ("Gemma4", _GEMMA),
    "gemma4_text-one-kv-head": (
        "Gemma4",
        {
            **_GEMMA,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma4_text-dense": ("Gemma4", {**_GEMMA, "enable_moe_block": False, "attention_bias": True}),
    "gemma4_text-layer-inputs": (
        "Gemma4",
        {
            **_GEMMA,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **_GEMMA,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
        },
    ),
    "nemotron_h": ("NemotronH", _NEMOTRON),
    "nemotron_h-biases": (
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "moe_latent_size": 40,
            "n_groups": 1,
            "n_group": 4,
            "topk_group": 2,
            "mamba_head_dim": 20,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**_MLA, "q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    "deepseek_v2-greedy-low-rank": ("DeepseekV2", {**_MLA, "q_lora_rank": 24, "topk_method": "greedy"}),
    "deepseek_v3-yarn": (
        "DeepseekV3",
        {
            **_MLA,
            "q_lora_rank": 24,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
        },
    ),
    "deepseek_v32-yarn": (
        "DeepseekV32",
        {
            **_INDEXER,
            "qk_rope_head_dim": 16,
            "index_head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
        },
    ),
    # Attention over latents and angles of a width that the compiled kernels do not take.
    "glm_moe_dsa": ("GlmMoeDsa", {**_INDEXER, "index_head_dim": 16, "indexer_types": ["full", "shared", "full"]}),
}


def config_of(case: str, **further: Any) -> Any:
    """The transformers configuration of a case. further: its fields."""
    prefix, changes = CASES[case]
    values = {**_BASE, **changes, **further}
    vision = values.pop("vision_config", None)
    if vision is not None:
        text = getattr(transformers, f"{prefix}TextConfig")(**values)
        return getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision)
    return (getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config"))(**values)


def build(case: str, **further: Any) -> Any:
    """The transformers model of a case: random weights, norms and biases included, so that every field matters.

    further: fields of the configuration.
    """
    prefix, config = CASES[case][0], config_of(case, **further)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    task = "ConditionalGeneration" if hasattr(config, "text_config") else "CausalLM"
    model = getattr(transformers, f"{prefix}For{task}")(config).eval()
    with torch.no_grad():
        tensors = list(model.named_parameters())
        tensors += [pair for pair in model.named_buffers() if pair[0].endswith(("_bias", "layer_scalar"))]
        for name, tensor in tensors:
            is_norm = "norm" in name and tensor.dim() == 1 and "bias" not in name
            if is_norm or name.endswith(("scale", "layer_scalar")):
                # Return weights of about one, or of about zero where the norm adds one to it.
                tensor += torch.empty_like(tensor).uniform_(-0.5, 0.5)
            else:
                tensor.normal_(0, 0.15)
    return model


def save(case: str, directory: Path, **options: Any) -> Any:
    """Build a case and save it into ``directory``; returns the model."""
    model = build(case)
    model.save_pretrained(directory, **options)
    return model
