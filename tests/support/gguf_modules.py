"""Tiny models on transformers' code as GGUF files, written by the `gguf` package under the names of its own table.

The tensors of a saved checkpoint go through what llama.cpp's conversion does to them, apart from the reader: experts
are stacked by projection, pairs of rotary channels stand side by side, rates of Mamba are negative numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import load_file
from torch import Tensor

from moeserve.model.hf.modelling import ModellingCode
from tests.support.gguf_export import Quantise, in_float32, write_tensors, write_vocabulary
from tests.support.tiny_transformers import tiny_model

Tensors = Iterator[tuple[str, Tensor]]
_EXPERT = re.compile(r".*layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight")
_PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_LAYER = re.compile(r".*(?:layers|blocks)\.(\d+)\.(.+)")
_MIMO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_MISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_MISTRAL_ROPE |= {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_SIGMOID = gguf.ExpertGatingFuncType.SIGMOID
_STEP_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_BAILING = {"intermediate_size": 32, "shared_intermediate_size": 64, "attention_multiplier": 16**-0.5}
_LLAMA4 = {
    "attention_chunk_size": 8192,
    "no_rope_layers": [1, 1, 1, 0],
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "moe_layers": [1, 3],
    "interleave_moe_layer_step": 2,
}
_MINISTRAL_ROPE = {**_MISTRAL_ROPE, "max_position_embeddings": 512}


@dataclass(frozen=True)
class Architecture:
    """model_type: of the tiny model. fields: writes those beyond the usual ones. change: turns a tensor of a layer, by
    its name in it, into those of a block; None leaves it to the table of names."""

    model_type: str
    write_fields: Callable[[gguf.GGUFWriter, Any], None]
    change: Callable[[Any, str, Tensor], Mapping[str, Tensor] | None] = lambda config, own, values: None
    more: Mapping[str, Any] = field(default_factory=dict)
    adds_to_norms: bool = False


def _granite_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_attention_scale(c.attention_multiplier)
    writer.add_embedding_scale(c.embedding_multiplier)
    writer.add_residual_scale(c.residual_multiplier)
    writer.add_logit_scale(c.logits_scaling)
    writer.add_expert_shared_feed_forward_length(c.shared_intermediate_size)


def _bailing_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_expert_shared_count(c.shared_intermediate_size // c.intermediate_size)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(1.0)


def _deepseek_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_leading_dense_block_count(list(c.mlp_layer_types).count("dense"))
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_weights_scale(c.routed_scaling_factor)


def _ocr_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _deepseek_fields(writer, c)
    writer.add_rope_dimension_count(0)


def _mistral3_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _yarn_fields(writer, c.rope_parameters)
    writer.add_rope_scaling_yarn_log_mul(c.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(c.rope_parameters["llama_4_scaling_beta"])


def _yarn_fields(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _llama4_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_feed_forward_length(c.intermediate_size_mlp)
    writer.add_interleave_moe_layer_step(c.interleave_moe_layer_step)


def _llama4(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    if own == "feed_forward.experts.down_proj":
        return {"ffn_down_exps.weight": values.mT}
    if own != "feed_forward.experts.gate_up_proj":
        return None
    return dict(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), values.mT.chunk(2, 1), strict=True))


def _dbrx_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_feed_forward_length(c.ffn_config.ffn_hidden_size)
    writer.add_head_count_kv(c.attn_config.kv_n_heads)
    writer.add_rope_freq_base(c.attn_config.rope_theta)
    writer.add_clamp_kqv(c.attn_config.clip_qkv)
    writer.add_expert_count(c.ffn_config.moe_num_experts)
    writer.add_expert_used_count(c.ffn_config.moe_top_k)
    writer.add_layer_norm_eps(1e-5)


def _dbrx(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    names = {"w1": "ffn_gate_exps.weight", "v1": "ffn_up_exps.weight", "w2": "ffn_down_exps.weight"}
    part = own.removeprefix("ffn.experts.mlp.")
    if part not in names:
        return None
    experts = values.view(c.ffn_config.moe_num_experts, -1, values.shape[1])
    return {names[part]: experts.mT if part == "w2" else experts}


def _step_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _window_fields(writer, c)
    ropes, layers = c.rope_parameters, range(c.num_hidden_layers)
    writer.add_head_count([c.per_layer_config[layer].num_attention_heads for layer in layers])
    writer.add_head_count_kv([c.num_key_value_heads for _ in layers])
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_expert_shared_feed_forward_length(c.share_expert_dim)
    writer.add_expert_weights_scale(c.moe_router_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_leading_dense_block_count(list(c.mlp_layer_types).count("dense"))
    writer.add_swiglu_clamp_exp([float(limit or 0) for limit in c.swiglu_limits])
    writer.add_swiglu_clamp_shexp([float(limit or 0) for limit in c.swiglu_limits_shared])


def _step(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    if own.endswith("experts.gate_up_proj"):
        return dict(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), values.chunk(2, 1), strict=True))
    if own.endswith("experts.down_proj"):
        return {"ffn_down_exps.weight": values}
    return None


def _granitehybrid_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _granite_fields(writer, c)
    inner = c.mamba_n_heads * c.mamba_d_head
    _mamba_fields(writer, c.mamba_d_conv, inner, c.mamba_d_state, c.mamba_n_heads, c.mamba_n_groups)
    writer.add_head_count_kv([c.num_key_value_heads * (kind == "full_attention") for kind in c.layer_types])
    writer.add_rope_scaling_finetuned(c.position_embedding_type == "rope")


def _mamba_fields(writer: gguf.GGUFWriter, width: int, inner: int, state: int, rank: int, groups: int) -> None:
    writer.add_ssm_conv_kernel(width)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_ssm_group_count(groups)


def _granite(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    if own == "block_sparse_moe.input_linear.weight":
        return dict(zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), values.chunk(2, 1), strict=True))
    if own == "shared_mlp.input_linear.weight":
        names = [f"ffn_{part}{'_shexp' if c.num_local_experts else ''}.weight" for part in ("gate", "up")]
        return dict(zip(names, values.chunk(2, 0), strict=True))
    if own == "shared_mlp.output_linear.weight" and not c.num_local_experts:
        return {"ffn_down.weight": values}
    if own.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        heads = c.num_attention_heads if "q_proj" in own else c.num_key_value_heads
        stem = "attn_q" if "q_proj" in own else "attn_k"
        return {f"{stem}.weight": values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)}
    return _mamba2(getattr(c, "mamba_n_groups", 1), own, values)


def _mamba2(groups: int, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    if own.endswith("dt_bias"):
        return {"ssm_dt.bias": values}
    if own.endswith("A_log"):
        return {"ssm_a": -values.exp()[:, None]}
    if own.endswith(".D"):
        return {"ssm_d": values[:, None]}
    if own.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return {"ssm_norm.weight": values.view(groups, -1)}
    return {"ssm_conv1d.weight": values.squeeze(1)} if own.endswith("conv1d.weight") else None


def _lfm2moe_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_shortconv_l_cache(c.conv_L_cache)
    writer.add_leading_dense_block_count(c.num_dense_layers)
    writer.add_expert_gating_func(_SIGMOID)
    writer.add_head_count_kv([c.num_key_value_heads * (kind == "full_attention") for kind in c.layer_types])


def _lfm2moe(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    return {"shortconv.conv.weight": values.squeeze(1)} if own == "conv.conv.weight" else None


def _afmoe_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_expert_shared_count(c.num_shared_experts)
    writer.add_leading_dense_block_count(c.num_dense_layers)
    writer.add_expert_gating_func(_SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(c.route_scale)
    writer.add_sliding_window(c.sliding_window)


def _hunyuan_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_expert_shared_feed_forward_length(c.intermediate_size)
    writer.add_expert_shared_count(1)


def _nemotron_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    inner = c.mamba_num_heads * c.mamba_head_dim
    _mamba_fields(writer, c.conv_kernel, inner, c.ssm_state_size, c.mamba_num_heads, c.n_groups)
    kinds = c.layer_types
    writer.add_layer_norm_rms_eps(c.layer_norm_epsilon)
    writer.add_layer_norm_eps(c.layer_norm_epsilon)
    writer.add_head_count_kv([c.num_key_value_heads * (kind == "full_attention") for kind in kinds])
    writer.add_feed_forward_length([c.moe_intermediate_size * (kind == "moe") for kind in kinds])
    writer.add_expert_shared_feed_forward_length(c.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_weights_norm(c.norm_topk_prob)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_group_count(c.n_group)
    if c.moe_latent_size is not None:
        writer.add_moe_latent_size(c.moe_latent_size)
    # No layer rotates, and conversion does not look at the width of heads.
    writer.add_rope_dimension_count(c.hidden_size // c.num_attention_heads)


def _nemotron(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    return _mamba2(c.n_groups, own, values)


def _experts_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    """Write how experts are chosen in DeepSeek's way."""
    writer.add_expert_gating_func(_SIGMOID)
    writer.add_expert_weights_norm(bool(c.norm_topk_prob))
    writer.add_expert_weights_scale(c.routed_scaling_factor or 1.0)
    writer.add_leading_dense_block_count(list(c.mlp_layer_types).count("dense"))
    shared = getattr(c, "n_shared_experts", None) or getattr(c, "num_shared_experts", None)
    if shared:
        writer.add_expert_shared_count(shared)
        writer.add_expert_shared_feed_forward_length(shared * c.moe_intermediate_size)


def _window_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_sliding_window(c.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])


def _exaone_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _experts_fields(writer, c)
    _window_fields(writer, c)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _jamba_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    inner = c.mamba_expand * c.hidden_size
    writer.add_ssm_conv_kernel(c.mamba_d_conv)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(c.mamba_d_state)
    writer.add_ssm_time_step_rank(c.mamba_dt_rank)
    writer.add_head_count_kv([c.num_key_value_heads * (kind == "full_attention") for kind in c.layer_types])


def _jamba(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    if own.endswith("A_log"):
        return {"ssm_a": -values.exp()}
    return {"ssm_conv1d.weight": values.squeeze(1)} if own.endswith("conv1d.weight") else None


def _mimo_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _experts_fields(writer, c)
    _window_fields(writer, c)
    ropes = c.rope_parameters
    is_sliding = [kind == "sliding_attention" for kind in c.layer_types]
    writer.add_head_count_kv([c.num_key_value_heads * (2 if sliding else 1) for sliding in is_sliding])
    writer.add_value_length(c.v_head_dim)
    writer.add_rope_dimension_count(int(c.head_dim * ropes["full_attention"]["partial_rotary_factor"]))
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_float32("mimo2.attention.value_scale", c.attention_value_scale)


def _mimo(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    return {"attn_sinks.weight": values} if "sink" in own else None


def _latent_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    writer.add_kv_lora_rank(c.kv_lora_rank)
    if c.q_lora_rank is not None:
        writer.add_q_lora_rank(c.q_lora_rank)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(c.kv_lora_rank)
    writer.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    writer.add_value_length_mla(c.v_head_dim)


def _latent(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    if not own.endswith("kv_b_proj.weight"):
        return None
    parts = values.view(c.num_attention_heads, -1, c.kv_lora_rank).split([c.qk_nope_head_dim, c.v_head_dim], 1)
    return {"attn_k_b.weight": parts[0].mT, "attn_v_b.weight": parts[1]}


def _glm_dsa_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _experts_fields(writer, c)
    _latent_fields(writer, c)
    writer.add_head_count_kv(1)
    writer.add_indexer_head_count(c.index_n_heads)
    writer.add_indexer_key_length(c.index_head_dim)
    writer.add_indexer_top_k(c.index_topk)
    writer.add_array("glm-dsa.attention.indexer.types", [kind == "full" for kind in c.indexer_types])


def _mistral4_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    rope = c.rope_parameters
    _latent_fields(writer, c)
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    _yarn_fields(writer, rope)
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    writer.add_attn_temperature_length(rope["original_max_position_embeddings"])


def _mistral4(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    names = {"mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight", "mlp.experts.down_proj": "ffn_down_exps.weight"}
    return {names[own]: values} if own in names else _latent(c, own, values)


def _kimi_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _experts_fields(writer, c)
    _latent_fields(writer, c)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in c.layer_types])
    writer.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    writer.add_kda_head_dim(c.linear_head_dim)


def _kimi(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    if own.endswith("A_log"):
        return {"ssm_a": -values.exp().view(-1, 1)}
    if own.endswith("dt_bias"):
        return {"ssm_dt.bias": values}
    if own.startswith("block_sparse_moe.") and own.count(".") == 2 and "_proj" in own:  # A dense block.
        return {f"ffn_{_PROJECTIONS[own.split('.')[1]]}.weight": values}
    for part in "qkv":
        if own.endswith(f"{part}_conv1d.weight"):
            return {f"ssm_conv1d_{part}.weight": values.view(1, len(values), 1, -1)}
    return _latent(c, own, values)


def _gemma_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    _window_fields(writer, c)
    is_sliding = [kind == "sliding_attention" for kind in c.layer_types]
    of_kind = c.per_layer_config
    wide, narrow, full = of_kind["full_attention"], of_kind["sliding_attention"], c.rope_parameters["full_attention"]
    writer.add_head_count_kv([(narrow if sliding else wide).num_key_value_heads for sliding in is_sliding])
    writer.add_key_length(wide.head_dim)
    writer.add_value_length(wide.head_dim)
    writer.add_key_length_swa(narrow.head_dim)
    writer.add_value_length_swa(narrow.head_dim)
    writer.add_rope_dimension_count(wide.head_dim)
    writer.add_rope_dimension_count_swa(narrow.head_dim)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(c.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input)
    writer.add_expert_used_count(c.top_k_experts)
    if c.final_logit_softcapping:
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    rotated = int(wide.head_dim * full["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (wide.head_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def _gemma(c: Any, own: str, values: Tensor) -> Mapping[str, Tensor] | None:
    names = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }
    return {names[own]: values} if own in names else None


ARCHITECTURES: Mapping[str, Architecture] = {
    "granitehybrid": Architecture("granitemoehybrid", _granitehybrid_fields, _granite),
    "lfm2moe": Architecture("lfm2_moe", _lfm2moe_fields, _lfm2moe),
    "afmoe": Architecture(
        "afmoe",
        _afmoe_fields,
        more={"mup_enabled": True, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", _hunyuan_fields),
    "nemotron_h_moe": Architecture(
        "nemotron_h",
        _nemotron_fields,
        _nemotron,
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"]},
    ),
    "exaone-moe": Architecture("exaone_moe", _exaone_fields),
    "jamba": Architecture("jamba", _jamba_fields, _jamba),
    "mimo2": Architecture("mimo_v2_flash", _mimo_fields, _mimo, {"rope_parameters": _MIMO_ROPES}),
    "granitemoe": Architecture("granitemoeshared", _granite_fields, _granite),
    "glm-dsa": Architecture("glm_moe_dsa", _glm_dsa_fields, _latent, {"indexer_types": ["full"] * 4}),
    "mistral4": Architecture("mistral4", _mistral4_fields, _mistral4, {"rope_parameters": _MISTRAL_ROPE}),
    "kimi-linear": Architecture("kimi_linear", _kimi_fields, _kimi, {"q_lora_rank": None}),
    "gemma4": Architecture(
        "gemma4_text", _gemma_fields, _gemma, {"num_global_key_value_heads": 2, "rope_parameters": _GEMMA_ROPES}
    ),
    "bailingmoe": Architecture("granitemoeshared", _bailing_fields, _granite, _BAILING),
    "deepseek": Architecture("deepseek_ocr2", _deepseek_fields, _granite),
    "deepseek2-ocr": Architecture("deepseek_ocr2", _ocr_fields),
    "mistral3": Architecture("ministral3", _mistral3_fields, _granite, {"rope_parameters": _MINISTRAL_ROPE}),
    "llama4": Architecture("llama4_text", _llama4_fields, _llama4, _LLAMA4),
    "dbrx": Architecture("dbrx", _dbrx_fields, _dbrx),
    "step35": Architecture(
        "step3p7",
        _step_fields,
        _step,
        {
            "num_sliding_attention_heads": 8,
            "rope_parameters": _STEP_ROPES,
            "swiglu_limits": [0.0, 0.0, 0.0, 0.5],
            "swiglu_limits_shared": [0.0, 0.0, 0.4, 0.0],
        },
        adds_to_norms=True,
    ),
}


def tiny(architecture: str, **further: Any) -> ModellingCode:
    """Return a tiny model whose file is of an architecture."""
    arch = ARCHITECTURES[architecture]
    return tiny_model(arch.model_type, **{**arch.more, **further})


def write_module_gguf(
    path: Path, architecture: str, code: ModellingCode, checkpoint: Path, quantise: Quantise = in_float32
) -> None:
    """Write a model. checkpoint: the folder in which transformers has saved it."""
    writer, config = gguf.GGUFWriter(path, architecture), code.config
    _write_usual_fields(writer, config)
    ARCHITECTURES[architecture].write_fields(writer, config)
    write_vocabulary(writer, config.vocab_size)
    tensors = load_file(checkpoint / "model.safetensors")
    write_tensors(writer, _named(architecture, config, tensors), quantise)


def _write_usual_fields(writer: gguf.GGUFWriter, c: Any) -> None:
    def first(*names: str) -> Any:
        return next((value for name in names if (value := _value(c, name)) is not None), None)

    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    heads = first("num_attention_heads")
    if (keys := first("num_key_value_heads") or heads) is not None:
        writer.add_head_count_kv(keys)
    for add, value in (
        (writer.add_head_count, heads),
        (writer.add_feed_forward_length, first("intermediate_size")),
        (writer.add_layer_norm_rms_eps, first("rms_norm_eps")),
        (writer.add_expert_count, first("num_local_experts", "n_routed_experts", "num_experts")),
        (writer.add_expert_used_count, first("num_experts_per_tok", "moe_topk")),
        (writer.add_expert_feed_forward_length, first("moe_intermediate_size", "intermediate_size")),
    ):
        if value is not None:
            add(value)
    rope = first("rope_parameters") or {}
    if "rope_theta" in rope:  # One for all layers.
        writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = first("head_dim") or c.hidden_size // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)


def _value(config: Any, name: str) -> Any:
    """Return a value of a configuration; None if it has none, or if layers differ in it."""
    try:
        return getattr(config, name)
    except Exception:
        return None


def _named(architecture: str, config: Any, tensors: Mapping[str, Tensor]) -> Tensors:
    arch = next(arch for arch, own in MODEL_ARCH_NAMES.items() if own == architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    change, of_experts = ARCHITECTURES[architecture].change, dict[tuple[str, str], dict[int, Tensor]]()
    for name, values in tensors.items():
        if name.endswith("view_seperator"):  # Of images.
            continue
        if (expert := _EXPERT.fullmatch(name)) is not None:
            of_experts.setdefault((expert[1], _PROJECTIONS[expert[3]]), {})[int(expert[2])] = values
            continue
        if ARCHITECTURES[architecture].adds_to_norms and name.endswith("norm.weight"):
            values = values + 1
        layer = _LAYER.fullmatch(name)
        changed = None if layer is None else change(config, layer[2], values)
        if changed is not None and layer is not None:
            yield from ((f"blk.{layer[1]}.{own}", part) for own, part in changed.items())
            continue
        # Biases of the choice of experts have a name of their own.
        known = re.sub(r"(expert_bias|e_score_correction|router_bias)(_bias)?$", r"\1.bias", name)
        found = table.get_name(known, (".weight", ".bias"))
        assert found is not None, name
        yield found, values
    for (layer_number, part), experts in of_experts.items():
        yield f"blk.{layer_number}.ffn_{part}_exps.weight", torch.stack([experts[e] for e in range(len(experts))])
