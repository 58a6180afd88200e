"""The configuration of a GGUF model on transformers' code, as the `config.json` that transformers' classes read.

A builder per architecture; the other side of each is a row of `moeserve.model.gguf.modules`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moeserve.model.gguf.config import Config, Fields, expert_width, head_dim, norm_eps, num_layers
from moeserve.model.spec import UnsupportedModel

# Values of `expert_gating_func`.
_UNNAMED, _SOFTMAX, _SIGMOID = 0, 1, 2


def _has(fields: Fields, layer: int, own: str) -> bool:
    return f"blk.{layer}.{own}" in fields.header.tensors


def _kinds(fields: Fields, own: str, there: str, missing: str) -> list[str]:
    """Return a kind for each layer: `there` if it has the tensor, else `missing`."""
    return [there if _has(fields, layer, own) else missing for layer in range(num_layers(fields))]


def _first_width(fields: Fields, end: str) -> int:
    """Return the number of rows of the first tensor with this end of its name, 0 without one."""
    return next((t.shape[0] for name, t in fields.header.tensors.items() if name.endswith(end)), 0)


def _refuse(fields: Fields, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"GGUF models of {fields.architecture} {what} are not supported.")


def _check_function(fields: Fields, *wanted: int) -> None:
    """Raise UnsupportedModel unless the experts are chosen by one of these functions, or the file names none."""
    function = fields.count("expert_gating_func", _UNNAMED)
    if function not in (_UNNAMED, *wanted):
        raise _refuse(fields, f"whose experts are chosen by the function {function}")


def _check_normalised(fields: Fields, *, wanted: bool = True) -> None:
    if fields.flag("expert_weights_norm", wanted) != wanted:
        raise _refuse(fields, f"whose experts' weights are {'not ' if wanted else ''}divided by their sum")


def _scale(fields: Fields) -> float:
    return fields.number("expert_weights_scale", 1.0) or 1.0


def _granitehybrid(fields: Fields) -> Config:
    heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    hidden, is_sparse = fields.count("embedding_length"), bool(fields.count("expert_count", 0))
    if heads < 1 or hidden < 1 or inner % hidden or inner % heads:
        raise _refuse(fields, f"with {heads} Mamba heads of {inner} channels together")
    has_rope = fields.flag("rope.scaling.finetuned", True)
    shared = fields.count("expert_shared_feed_forward_length", 0) if is_sparse else fields.count("feed_forward_length")
    return {
        "model_type": "granitemoehybrid",
        "num_local_experts": fields.count("expert_count", 0),
        "num_experts_per_tok": fields.count("expert_used_count", 0),
        "intermediate_size": expert_width(fields) if is_sparse else fields.count("feed_forward_length"),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if has_rope else None,
        "layer_types": _kinds(fields, "ssm_in.weight", "linear_attention", "full_attention"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": fields.count("ssm.group_count"),
        "mamba_d_state": fields.count("ssm.state_size"),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_conv_bias": bool(_first_width(fields, ".ssm_conv1d.bias")),
        "mamba_proj_bias": bool(_first_width(fields, ".ssm_in.bias")),
        **granite_scales(fields),
    }


def granite_scales(fields: Fields) -> Config:
    """Return the multipliers of Granite."""
    return {
        "attention_multiplier": fields.number("attention.scale", 0.0) or head_dim(fields) ** -0.5,
        "embedding_multiplier": fields.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": fields.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": fields.number("logit_scale", 0.0) or 1.0,
    }


def _lfm2moe(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    _check_normalised(fields)
    return {
        "model_type": "lfm2_moe",
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "num_dense_layers": fields.count("leading_dense_block_count", 0),
        "routed_scaling_factor": _scale(fields),
        "use_expert_bias": bool(_first_width(fields, ".exp_probs_b.bias")),
        "norm_eps": norm_eps(fields),
        "conv_L_cache": fields.count("shortconv.l_cache"),
        "conv_bias": bool(_first_width(fields, ".shortconv.conv.bias")),
        "layer_types": _kinds(fields, "shortconv.conv.weight", "conv", "full_attention"),
    }


def _afmoe(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    _check_normalised(fields)
    # llama.cpp rotates in all layers but each fourth one.
    slides = [(layer + 1) % 4 != 0 for layer in range(num_layers(fields))]
    return {
        "model_type": "afmoe",
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "num_shared_experts": fields.count("expert_shared_count", 0),
        "num_dense_layers": fields.count("leading_dense_block_count", 0),
        "route_scale": _scale(fields),
        "mup_enabled": True,
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
    }


def _hunyuan_moe(fields: Fields) -> Config:
    _check_function(fields, _SOFTMAX)
    _check_normalised(fields)
    width, shared = expert_width(fields), _first_width(fields, ".ffn_gate_shexp.weight")
    if width != shared:
        raise _refuse(fields, f"whose experts have {width} channels and shared ones {shared}")
    return {
        "model_type": "hunyuan_v1_moe",
        "num_experts": fields.count("expert_count"),
        "moe_topk": fields.count("expert_used_count"),
        "intermediate_size": width,
    }


def _nemotron_h_moe(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    heads, inner = fields.count("ssm.time_step_rank"), fields.count("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise _refuse(fields, f"with {heads} Mamba heads of {inner} channels together")
    return {
        "model_type": "nemotron_h",
        "layers_block_type": [_nemotron_kind(fields, layer) for layer in range(num_layers(fields))],
        "intermediate_size": expert_width(fields),
        "layer_norm_epsilon": norm_eps(fields),
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": fields.count("ssm.group_count"),
        "ssm_state_size": fields.count("ssm.state_size"),
        "conv_kernel": fields.count("ssm.conv_kernel"),
        "use_conv_bias": bool(_first_width(fields, ".ssm_conv1d.bias")),
        "mamba_proj_bias": bool(_first_width(fields, ".ssm_in.bias")),
        # llama.cpp bounds no time steps.
        "time_step_min": 1e-12,
        "n_routed_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "moe_latent_size": fields.count("moe_latent_size", 0) or None,
        "n_shared_experts": fields.count("expert_shared_count", 0),
        "moe_shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length", 0),
        "routed_scaling_factor": _scale(fields),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "n_group": fields.count("expert_group_count", 1) or 1,
        "topk_group": fields.count("expert_group_used_count", 1) or 1,
    }


def _nemotron_kind(fields: Fields, layer: int) -> str:
    kinds = {"ssm_in.weight": "linear_attention", "attn_q.weight": "full_attention", "ffn_gate_inp.weight": "moe"}
    kind = next((kind for own, kind in kinds.items() if _has(fields, layer, own)), None)
    if kind is None:
        raise _refuse(fields, "with layers of another kind than Mamba, attention and experts")
    return kind


FURTHER: Mapping[str, Callable[[Fields], Config]] = {
    "granitehybrid": _granitehybrid,
    "lfm2moe": _lfm2moe,
    "afmoe": _afmoe,
    "hunyuan-moe": _hunyuan_moe,
    "nemotron_h_moe": _nemotron_h_moe,
}
