"""A tiny random model of every mixture-of-experts text decoder that the installed transformers has.

The types are found by enumeration. Sizes go by the names that configurations use; what a type needs beyond them stands
in `MORE`, and a type that is missing there is tried with the sizes alone.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.auto import configuration_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from moeserve.model.hf.modelling import ModellingCode, own_model

VOCAB = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "num_dense_layers": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "sliding_window": 7,
    "attention_chunk_size": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 24,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA = {"num_key_value_heads": 4}
F, S = "full_attention", "sliding_attention"
L = "linear_attention"
# Mamba 2 as Bamba, Falcon H1 and Granite 4 name its sizes.
MAMBA_2: dict[str, int] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}

MORE: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": [S, S, F, S], "num_shared_experts": 1},
    "aria_text": {},
    "axk1": dict(**MLA, mlp_layer_types=["dense", "sparse", "sparse", "sparse"]),
    "axk2": dict(**MLA, mlp_layer_types=["dense", "sparse", "sparse", "sparse"], layer_types=["indexed_attention"] * 4),
    "bailing_hybrid": dict(
        **MLA, layer_types=[L, L, F, L], mlp_layer_types=["dense"] + ["sparse"] * 3, num_nextn_predict_layers=0
    ),
    "bamba": dict(**MAMBA_2, attn_layer_indices=[2]),
    "beam": {"layer_types": [S, S, F, S], "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "cohere2_moe": {"layer_types": [S, S, F, S], "mlp_layer_types": ["sparse"] * 4},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "deepseek_v2": dict(**MLA, num_experts_per_tok=2),
    "deepseek_v3": dict(**MLA),
    "deepseek_v32": dict(**MLA, mlp_layer_types=["dense"] + ["sparse"] * 3, layer_types=["indexed_attention"] * 4),
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "layer_types": [S, "heavily_compressed_attention", "compressed_sparse_attention", S],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "num_nextn_predict_layers": 0,
    },
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 4},
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": [S, F, S, F],
        "first_k_dense_replace": 1,
    },
    "dots3_note_text": dict(
        **MLA,
        head_dim=24,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=40,
        swa_kv_lora_rank=32,
        swa_head_dim=32,
        swa_qk_nope_head_dim=24,
        swa_v_head_dim=16,
        layer_types=["indexed_attention", "indexed_attention", S, S],
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        shared_experts_intermediate_size=32,
    ),
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 3, "num_key_value_heads": 2},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
        "moe_intermediate_size": [32, 16],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "exaone_moe": {"layer_types": [S, S, F, S], "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_shared_experts": 1},
    "flint": {"layer_types": [F, S, S, F], "mlp_only_layers": [0]},
    "falcon_h1": dict(**MAMBA_2, mamba_d_ssm=128, ssm_multipliers=[0.5, 0.7, 1.1, 0.9, 1.3]),
    "gemma4_text": {
        "layer_types": [S, F, S, F, S, F],
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
    },
    "glm4_moe_lite": dict(**MLA, mlp_layer_types=["dense"] + ["sparse"] * 3),
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        }
    },
    "glm5_next_text": dict(
        **MLA,
        qk_rope_head_dim=0,
        layer_types=[L, "indexed_attention", L, "indexed_attention"],
        indexer_types=["full"] * 4,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        index_kpool=2,
        hc_mult=2,
        hc_sinkhorn_iters=3,
    ),
    "glm_moe_dsa": dict(
        **MLA,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        layer_types=["indexed_attention"] * 4,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "gpt_oss": {"layer_types": [S, F, S, F]},
    "granitemoe_swa": {"layer_types": [F, S, S, F], "layer_rope_theta": [10000.0] * 4},
    "granitemoehybrid": {**MAMBA_2, "mamba_n_groups": 1, "layer_types": [L, L, F, L]},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "hy_v3": {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "hy_v4": dict(
        **MLA,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
        layer_types=["indexed_attention"] * 4,
        indexer_types=["full", "shared", "full", "shared"],
        hc_mult=2,
    ),
    "inkling_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 7,
        "d_rel": 8,
        "rel_extent": 32,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "log_scaling_n_floor": 8,
    },
    "inkling2_text": {
        "unpadded_vocab_size": VOCAB,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 7,
        "d_rel": 8,
        "rel_extent": 32,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "log_scaling_n_floor": 8,
        "n_layers_per_attn_res_block": 2,
    },
    "jamba": {
        "num_experts": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "jetmoe": {"kv_channels": 16, "num_key_value_heads": 2},
    "kimi_linear": dict(**MLA, layer_types=[L, L, F, L], mlp_layer_types=["dense"] + ["sparse"] * 3),
    "kolibri1": {"layer_types": [S, S, F, S]},
    "laguna": {
        "layer_types": [F, S, S, F],
        "num_attention_heads_per_layer": [4, 4, 4, 4],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "lfm2_moe": {"layer_types": ["conv", F, "conv", F]},
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention", F, "chunked_attention", F],
        "no_rope_layers": [1, 0, 1, 0],
        "moe_layers": [0, 1, 2, 3],
        "floor_scale": 8192,
    },
    "longcat_flash": dict(
        **MLA,
        num_layers=2,
        num_hidden_layers=4,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        zero_expert_num=4,
        head_dim=8,
    ),
    "mellum": {"layer_types": [F, S, S, F], "mlp_layer_types": ["sparse"] * 4},
    "mimo_v2_flash": {"layer_types": [F, S, S, F], "mlp_layer_types": ["dense"] + ["sparse"] * 3, "v_head_dim": 8},
    "minimax": {"layer_types": [L, F, L, F], "block_size": 8},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "layer_types": [F, "minimax_m3_sparse", "minimax_m3_sparse", F],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "index_local_blocks": 1,
    },
    "mistral4": dict(**MLA, qk_nope_head_dim=24, head_dim=32, first_k_dense_replace=1),
    "mistral_large4_text": dict(**MLA),
    "mixtral": {"sliding_window": 7},
    "muse_spark_text": {
        "layer_types": [S, F, S, F],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "moe_hidden_size": 64,
        "layer_rope_theta": [10000.0, 0, 10000.0, 0],
    },
    "muse_spark": {"audio_config": {"out_hidden_size": 64}},
    # Its code bounds time steps of prompts from below, but not time steps of single tokens.
    "nemotron_h": {
        "time_step_min": 1e-12,
        "layers_block_type": [L, "moe", F, "mlp", L, "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
        "num_nextn_predict_layers": 0,
    },
    "qwen3_5_moe_text": {"layer_types": [L, F, L, F]},
    "qwen3_next": {"layer_types": [L, F, L, F]},
    "qwen4_exp_text": {
        "layer_types": [L, "indexed_attention", L, "indexed_attention"],
        "hc_count": 2,
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {
        "pad_token_id": 0,
        "sliding_window": 7,
        "layer_types": [F, S, S, F],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "share_expert_dim": 32,
        "num_sliding_attention_heads": 4,
        "rope_parameters": {
            F: {"rope_type": "default", "rope_theta": 10000.0},
            S: {"rope_type": "default", "rope_theta": 10000.0},
        },
        "num_nextn_predict_layers": 0,
    },
    "unlimited_ocr_text": {
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "layer_types": ["reference_sliding_attention"] * 4,
    },
    "zaya": {
        "sliding_window": 7,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "router_hidden_size": 16,
        "num_experts_per_tok": 1,
    },
}


@cache
def moe_types() -> tuple[str, ...]:
    """Return every type whose tiny model is a text decoder with experts, by its name in a checkpoint's configuration.

    A type of the text part alone is left out where the whole model's type is there.
    """
    found, texts = [], set()
    for model_type in vars(configuration_auto)["CONFIG_MAPPING_NAMES"]:
        if not _mentions_experts(model_type):
            continue
        try:
            code = own_model(tiny_config(model_type))
        except Exception:  # Encoders, audio models, configurations that cannot be built: transformers raises anything.
            continue
        if any(word in type(m).__name__.lower() for m in code.body.modules() for word in ("expert", "moe", "mixture")):
            found.append(model_type)
            if code.config.model_type != model_type:
                texts.add(code.config.model_type)
    return tuple(sorted(name for name in found if not (name in texts and name.endswith("_text"))))


def _mentions_experts(model_type: str) -> bool:
    """Whether the file of the configuration speaks of experts: to import all configurations takes long."""
    module = f"transformers.models.{model_type_to_module_name(model_type)}"
    folder = importlib.util.find_spec(module)
    if folder is None or folder.origin is None:
        return False
    return any("expert" in path.read_text() for path in Path(folder.origin).parent.glob("configuration_*.py"))


def tiny_config(model_type: str, **further: Any) -> Any:
    """A configuration of a few small layers. The towers of a model with vision keep their sizes: nobody fills them."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config(decoder=True)
    if text is default:
        return _tiny_text(model_type, **further)
    name = next(name for name in default.sub_configs if getattr(default, name, None) is text)
    fields = _tiny_text(text.model_type, **further).to_dict()
    return CONFIG_MAPPING[model_type](**{name: fields, **_tokens_of(default), **MORE.get(model_type, {})})


def _tokens_of(config: Any) -> dict[str, int]:
    """Ids of images and the like, which must lie within the vocabulary."""
    ids = (name for name, value in config.to_dict().items() if name.endswith("_token_id") and isinstance(value, int))
    return dict.fromkeys(ids, 0)


def _tiny_text(model_type: str, **further: Any) -> Any:
    default = CONFIG_MAPPING[model_type]()
    sizes = {name: value for name, value in _SIZES.items() if _has(default, name)}
    fields = default.to_dict()
    if not fields.get("sliding_window"):
        sizes.pop("sliding_window", None)  # A window that no layer of this type has.
    if model_type != "mimo_v2_flash" and not _has(default, "kv_lora_rank"):
        sizes.pop("v_head_dim", None)
    if fields.get("qk_rope_head_dim") and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        sizes["head_dim"] = _SIZES["qk_rope_head_dim"]
    return CONFIG_MAPPING[model_type](**{**sizes, **MORE.get(model_type, {}), **further})


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # A per-layer attribute says that it is one by raising.
        return True


def tiny_model(model_type: str, **further: Any) -> ModellingCode:
    """A model of a type with random weights, wide enough that every part matters in the logits. further: fields of its
    configuration."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    code = own_model(tiny_config(model_type, **further))
    code.outer.to_empty(device="cpu")
    code.outer.initialize_weights()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in (*code.outer.named_parameters(), *_persistent_buffers(code.outer)):
            _fill(name, tensor, draw)
    code.outer.tie_weights()
    return code


def _persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    kept = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


def _fill(name: str, tensor: torch.Tensor, draw: torch.Generator) -> None:
    if not tensor.is_floating_point():
        return
    if tensor.dim() >= 2 and isinstance(tensor, nn.Parameter):
        tensor.copy_(torch.randn(tensor.shape, generator=draw) / tensor.shape[-1] ** 0.5)
    elif "norm" in name and "A_log" not in name and "dt_bias" not in name:
        tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.1)
    elif not torch.isfinite(tensor).all() or "sink" in name or ("bias" in name and "dt" not in name):
        tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.1)


def save_tiny(model_type: str, directory: Path) -> ModellingCode:
    """Save a tiny model the way transformers saves it; returns it."""
    code = tiny_model(model_type)
    code.outer.save_pretrained(directory)
    return code
