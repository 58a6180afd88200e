"""The configuration of a GGUF model, as the `config.json` that transformers' classes read, where the tensors have the
names of the `gguf` package's table, whichever code computes the model.

A builder per architecture; the other side of each is a row of `moeserve.model.gguf.modules`. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moeserve.model.gguf.config import (
    Config,
    Fields,
    deepseek_rope,
    expert_width,
    frequency_factors,
    head_dim,
    llama_rope,
    norm_eps,
    num_layers,
    rope_by_factors,
    rope_of,
    routed_of,
)
from moeserve.model.gguf.fields import plain
from moeserve.model.spec import UnsupportedModel

# Values of `expert_gating_func`.
_UNNAMED, _SOFTMAX, _SIGMOID = 0, 1, 2
_GLM_5_2_CONTEXT = 2**20  # tokens; that of GLM-5 and 5.1 is shorter


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


def _check_normalised(fields: Fields, *, unnamed: bool = True) -> None:
    """Raise UnsupportedModel unless the weights of chosen experts are divided by their sum. unnamed: llama.cpp divides
    them where a file does not tell."""
    if not fields.flag("expert_weights_norm", unnamed):
        raise _refuse(fields, "whose experts' weights are not divided by their sum")


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
    _check_normalised(fields, unnamed=False)
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


def _exaone_moe(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    _check_groups(fields)
    pattern = plain(fields.get("attention.sliding_window_pattern"))
    layers = range(num_layers(fields))
    slides = pattern[: len(layers)] if isinstance(pattern, list) else [(layer + 1) % 4 != 0 for layer in layers]
    return {
        "model_type": "exaone_moe",
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "num_shared_experts": fields.count("expert_shared_count", 0),
        "mlp_layer_types": _kinds(fields, "ffn_gate_inp.weight", "sparse", "dense"),
        "routed_scaling_factor": _scale(fields),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
    }


def _check_groups(fields: Fields) -> None:
    if fields.count("expert_group_count", 0) > 1:
        raise _refuse(fields, "whose experts are chosen by group")


def _jamba(fields: Fields) -> Config:
    inner, hidden = fields.count("ssm.inner_size"), fields.count("embedding_length")
    if hidden < 1 or inner % hidden:
        raise _refuse(fields, f"with {inner} channels of Mamba beside {hidden}")
    attention, experts = (_every(fields, own) for own in ("attn_q.weight", "ffn_gate_inp.weight"))
    return {
        "model_type": "jamba",
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "attn_layer_offset": attention[0],
        "attn_layer_period": attention[1],
        "expert_layer_offset": experts[0],
        "expert_layer_period": experts[1],
        "mamba_expand": inner // hidden,
        "mamba_d_state": fields.count("ssm.state_size"),
        "mamba_d_conv": fields.count("ssm.conv_kernel"),
        "mamba_dt_rank": fields.count("ssm.time_step_rank"),
        "mamba_conv_bias": bool(_first_width(fields, ".ssm_conv1d.bias")),
        "mamba_proj_bias": bool(_first_width(fields, ".ssm_in.bias")),
        "use_mamba_kernels": False,
    }


def _every(fields: Fields, own: str) -> tuple[int, int]:
    """Return the first of the layers that have a tensor, and their distance. Raise UnsupportedModel if it differs."""
    count = num_layers(fields)
    found = [layer for layer in range(count) if _has(fields, layer, own)]
    period = found[1] - found[0] if len(found) > 1 else count
    if not found or found != list(range(found[0], count, period)) or found[0] >= period:
        raise _refuse(fields, f"whose layers with {own} do not stand in equal distances")
    return found[0], period


def _mimo2(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    _check_groups(fields)
    _check_normalised(fields)
    layers = range(num_layers(fields))
    slides, heads = fields.per_layer("attention.sliding_window_pattern"), fields.per_layer("attention.head_count_kv")
    full = {heads[layer] for layer in layers if not slides[layer]}
    sliding = {heads[layer] for layer in layers if slides[layer]}
    if len(full) != 1 or sliding != {2 * max(full)}:
        raise _refuse(fields, "whose sliding layers have not twice the heads of keys of the others")
    factor = fields.count("rope.dimension_count") / head_dim(fields)
    ropes = {
        kind: {"rope_type": "default", "rope_theta": fields.number(name), "partial_rotary_factor": factor}
        for kind, name in (("full_attention", "rope.freq_base"), ("sliding_attention", "rope.freq_base_swa"))
    }
    return {
        "model_type": "mimo_v2_flash",
        "num_key_value_heads": max(full),
        "n_routed_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "mlp_layer_types": _kinds(fields, "ffn_gate_inp.weight", "sparse", "dense"),
        "routed_scaling_factor": _scale(fields),
        "norm_topk_prob": True,
        "v_head_dim": fields.count("attention.value_length"),
        "attention_value_scale": fields.number("attention.value_scale", 0.0) or None,
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides[layer] else "full_attention" for layer in layers],
        "rope_parameters": ropes,
    }


def _granitemoe(fields: Fields) -> Config:
    if not fields.flag("rope.scaling.finetuned", True):
        raise _refuse(fields, "without rotary embeddings")
    shared = fields.count("expert_shared_feed_forward_length", 0)
    beside = {"shared_intermediate_size": shared} if shared else {"model_type": "granitemoe"}
    return {**_shared_granite(fields), **beside, **granite_scales(fields)}


def _shared_granite(fields: Fields) -> Config:
    return {
        "model_type": "granitemoeshared",
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "intermediate_size": expert_width(fields),
    }


def _bailingmoe(fields: Fields) -> Config:
    """Return a Granite without multipliers: it computes what Ling 1 does."""
    _check_function(fields, _SOFTMAX)
    _check_normalised(fields, unnamed=False)
    _check_widths(fields)
    if _scale(fields) != 1.0:
        raise _refuse(fields, "with a scale of experts")
    return {
        **_shared_granite(fields),
        "shared_intermediate_size": fields.count("expert_shared_count") * expert_width(fields),
        **granite_scales(fields),
    }


def _check_widths(fields: Fields) -> None:
    """Raise UnsupportedModel unless the heads of queries together are as wide as a state."""
    if fields.count("attention.head_count") * head_dim(fields) != fields.count("embedding_length"):
        raise _refuse(fields, "whose heads are not as wide as a state together")


def _deepseek(fields: Fields) -> Config:
    """Return the decoder of DeepSeek-OCR: it is DeepSeek's first mixture."""
    _check_function(fields, _SOFTMAX)
    _check_widths(fields)
    # Files of DeepSeek-OCR count 0 rotary channels, and rotate all of a head.
    if fields.count("rope.dimension_count", 0) not in (0, head_dim(fields)):
        raise _refuse(fields, "that rotate a part of a head")
    if fields.flag("expert_weights_norm", False):
        raise _refuse(fields, "whose experts' weights are divided by their sum")
    return {
        "model_type": "deepseek_ocr2_text",
        **routed_of(fields),
        "topk_method": "greedy",
        "mlp_layer_types": _kinds(fields, "ffn_gate_inp.weight", "sparse", "dense"),
    }


def _latent(fields: Fields, suffix: str) -> Config:
    """Return the sizes of latent attention. suffix: of the fields that count the widths of a head."""
    rope_dim = fields.count("rope.dimension_count")
    return {
        "num_key_value_heads": fields.count("attention.head_count"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": fields.count(f"attention.key_length{suffix}") - rope_dim,
        "v_head_dim": fields.count(f"attention.value_length{suffix}"),
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "q_lora_rank": fields.count("attention.q_lora_rank", 0) or None,
        "head_dim": rope_dim,
    }


def _glm_dsa(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    return {
        "model_type": "glm_moe_dsa",
        **routed_of(fields),
        **_latent(fields, "_mla"),
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
        "mlp_layer_types": _kinds(fields, "ffn_gate_inp.weight", "sparse", "dense"),
        "indexer_types": _indexer_types(fields),
        "index_n_heads": fields.count("attention.indexer.head_count"),
        "index_head_dim": fields.count("attention.indexer.key_length"),
        "index_topk": fields.count("attention.indexer.top_k"),
    }


def _indexer_types(fields: Fields) -> list[str]:
    """Return `full` for layers that choose positions themselves, `shared` for those that take the choice before them.

    A file that does not tell has an indexer in the former alone, but for some of GLM-5.2, known by their long context:
    they repeat indexers in all layers, and llama.cpp takes the layers of the published model.
    """
    layers = range(num_layers(fields))
    if fields.get("attention.indexer.types") is not None:
        is_full = fields.per_layer("attention.indexer.types", len(layers))
    else:
        is_full = [int(_has(fields, layer, "indexer.proj.weight")) for layer in layers]
        if all(is_full) and fields.count("context_length") >= _GLM_5_2_CONTEXT:
            is_full = [int(layer < 3 or layer % 4 == 2) for layer in layers]
    return ["full" if is_full[layer] else "shared" for layer in layers]


def _mistral4(fields: Fields) -> Config:
    _check_function(fields, _SOFTMAX)
    rope = deepseek_rope(fields)
    if rope["rope_type"] != "yarn":
        raise _refuse(fields, "without YaRN")
    # Queries grow by this factor for each stretch of the original length.
    beta = fields.number("attention.temperature_scale", 0.0)
    _check_growth(fields, rope)
    return {
        "model_type": "mistral4",
        **routed_of(fields),
        **_latent(fields, "_mla"),
        "head_dim": fields.count("attention.key_length_mla"),
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
        "rope_parameters": {**rope, "llama_4_scaling_beta": beta},
    }


def _mistral3(fields: Fields) -> Config:
    """Return a dense Mistral with YaRN, whose queries grow with their position."""
    if fields.count("expert_count", 0):
        raise _refuse(fields, "with experts and YaRN")
    rope = rope_of(fields)
    mscale = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    equal = {"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}
    beta = fields.number("attention.temperature_scale", 0.0)
    _check_growth(fields, rope)
    return {"model_type": "ministral3", "rope_parameters": {**rope, **equal, "llama_4_scaling_beta": beta}}


def _check_growth(fields: Fields, rope: Config) -> None:
    """Raise UnsupportedModel unless queries grow for each stretch of the original length of YaRN."""
    length = fields.count("attention.temperature_length", 0)
    if length not in (0, rope["original_max_position_embeddings"]):
        raise _refuse(fields, f"whose queries grow every {length} tokens")


def _llama4(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    # llama.cpp takes these numbers for all files: layers with windows of 8192 tokens but for each fourth one, which
    # rotates nothing.
    if fields.count("attention.sliding_window", 8192) == 0:
        raise _refuse(fields, "without chunks of attention")
    layers, experts = range(num_layers(fields)), fields.count("expert_count")
    return {
        "model_type": "llama4_text",
        "num_local_experts": experts,
        "num_experts_per_tok": fields.count("expert_used_count"),
        "intermediate_size": expert_width(fields),
        "intermediate_size_mlp": fields.count("feed_forward_length"),
        "moe_layers": [layer for layer in layers if _has(fields, layer, "ffn_gate_inp.weight")],
        "interleave_moe_layer_step": fields.count("interleave_moe_layer_step", 1),
        "use_qk_norm": experts != 128,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in layers],
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_parameters": llama_rope(fields),
    }


def _dbrx(fields: Fields) -> Config:
    _check_function(fields, _SOFTMAX)
    _check_normalised(fields)
    _check_widths(fields)
    if norm_eps(fields) != 1e-5:
        raise _refuse(fields, f"whose norms add {norm_eps(fields):g}")
    theta = fields.number("rope.freq_base", 10000.0)
    attention = {"kv_n_heads": fields.count("attention.head_count_kv"), "rope_theta": theta}
    return {
        "model_type": "dbrx",
        "d_model": fields.count("embedding_length"),
        "n_heads": fields.count("attention.head_count"),
        "n_layers": num_layers(fields),
        "max_seq_len": fields.count("context_length"),
        "tie_word_embeddings": False,
        "attn_config": {**attention, "clip_qkv": fields.number("attention.clamp_kqv", 0.0) or None},
        "ffn_config": {
            "ffn_hidden_size": fields.count("feed_forward_length"),
            "moe_num_experts": fields.count("expert_count"),
            "moe_top_k": fields.count("expert_used_count"),
        },
    }


def _step35(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    _check_normalised(fields, unnamed=False)
    layers = range(num_layers(fields))
    slides, heads = fields.per_layer("attention.sliding_window_pattern"), fields.per_layer("attention.head_count")
    of_kind = [{heads[layer] for layer in layers if bool(slides[layer]) is kind} for kind in (False, True)]
    if any(len(found) != 1 for found in of_kind):
        raise _refuse(fields, "whose layers of a kind differ in their heads")
    full, sliding = (max(found) for found in of_kind)
    return {
        "model_type": "step3p5",
        "num_attention_heads": full,
        "num_sliding_attention_heads": sliding,
        "num_key_value_heads": fields.count("attention.head_count_kv"),
        "n_routed_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "share_expert_dim": fields.count("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": _scale(fields),
        "mlp_layer_types": _kinds(fields, "ffn_gate_inp.weight", "sparse", "dense"),
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides[layer] else "full_attention" for layer in layers],
        "swiglu_limits": _limits(fields, "swiglu_clamp_exp"),
        "swiglu_limits_shared": _limits(fields, "swiglu_clamp_shexp"),
        "rope_parameters": _step_ropes(fields),
    }


def _limits(fields: Fields, name: str) -> list[float] | None:
    """Return the limit of each layer's activation, 0 for none."""
    limits = fields.numbers(name)
    if limits is not None and len(limits) < num_layers(fields):
        raise _refuse(fields, f"with {len(limits)} numbers of {name}")
    return None if limits is None else [float(limit) for limit in limits][: num_layers(fields)]


def _step_ropes(fields: Fields) -> Config:
    """Return both rotary embeddings: layers without a window rotate the first half of the channels that others do."""
    rotated, width = fields.count("rope.dimension_count", head_dim(fields)), head_dim(fields)
    full = {"rope_type": "default", "partial_rotary_factor": rotated // 2 / width}
    if "rope_freqs.weight" in fields.header.tensors:
        full |= rope_by_factors(fields, frequency_factors(fields, rotated // 2)[: rotated // 4])
    theta = fields.number("rope.freq_base", 10000.0)
    of_sliding = fields.number("rope.freq_base_swa", theta)
    return {
        "full_attention": {**full, "rope_theta": theta},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": of_sliding,
            "partial_rotary_factor": fields.count("rope.dimension_count_swa", rotated) / width,
        },
    }


def _kimi_linear(fields: Fields) -> Config:
    _check_function(fields, _SIGMOID)
    _check_groups(fields)
    return {
        "model_type": "kimi_linear",
        "pad_token_id": None,
        **_latent(fields, "_mla"),
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "n_shared_experts": fields.count("expert_shared_count", 0),
        "routed_scaling_factor": _scale(fields),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "mlp_layer_types": _kinds(fields, "ffn_gate_inp.weight", "sparse", "dense"),
        "layer_types": _kinds(fields, "ssm_f_a.weight", "linear_attention", "full_attention"),
        "linear_head_dim": fields.count("kda.head_dim"),
        "linear_num_heads": fields.count("attention.head_count"),
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
    }


def _gemma4(fields: Fields) -> Config:
    layers = range(num_layers(fields))
    slides = fields.per_layer("attention.sliding_window_pattern")
    heads, widths = fields.per_layer("attention.head_count_kv"), fields.per_layer("feed_forward_length")
    of_kind = [{heads[layer] for layer in layers if bool(slides[layer]) is kind} for kind in (True, False)]
    num_shared = fields.count("attention.shared_kv_layers", 0)
    if any(len(found) != 1 for found in of_kind) or slides[layers[-1]]:
        raise _refuse(fields, "whose layers of a kind differ in their heads, or whose last layer has a window")
    first = widths[0]
    doubled = [first * (2 if layer >= len(layers) - num_shared else 1) for layer in layers]
    if widths[: len(layers)] not in ([first] * len(layers), doubled):
        raise _refuse(fields, "whose dense blocks differ in their widths")
    is_sparse = _has(fields, 0, "ffn_gate_inp.weight")
    without_values = [layer for layer in layers if _has(fields, layer, "attn_k.weight")]
    return {
        "model_type": "gemma4_text",
        "intermediate_size": first,
        "use_double_wide_mlp": widths[: len(layers)] == doubled and num_shared > 0,
        "head_dim": fields.count("attention.key_length_swa"),
        "global_head_dim": fields.count("attention.key_length"),
        "num_key_value_heads": max(of_kind[0]),
        "num_global_key_value_heads": max(of_kind[1]),
        "attention_k_eq_v": any(not _has(fields, layer, "attn_v.weight") for layer in without_values),
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": fields.count("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": _first_width(fields, "token_embd.weight"),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides[layer] else "full_attention" for layer in layers],
        "rope_parameters": _gemma_ropes(fields),
        "enable_moe_block": is_sparse,
        "num_experts": fields.count("expert_count", 0) or None,
        "top_k_experts": fields.count("expert_used_count", 0) or None,
        "moe_intermediate_size": expert_width(fields) if is_sparse else None,
    }


def _gemma_ropes(fields: Fields) -> Config:
    """Return both rotary embeddings. Layers without a window rotate the first pairs of a head alone: the file has a
    factor of 1 for their frequencies, and one that stops any other pair."""
    factors = frequency_factors(fields, fields.count("attention.key_length") // 2)
    num_rotated = sum(factor == 1.0 for factor in factors)
    if any(factor != 1.0 for factor in factors[:num_rotated]) or any(f < 1e20 for f in factors[num_rotated:]):
        raise _refuse(fields, "whose factors of rotary frequencies are not those of its first pairs")
    full = {"rope_type": "proportional", "partial_rotary_factor": num_rotated / len(factors)}
    return {
        "full_attention": {**full, "rope_theta": fields.number("rope.freq_base")},
        "sliding_attention": {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)},
    }


FURTHER: Mapping[str, Callable[[Fields], Config]] = {
    "granitehybrid": _granitehybrid,
    "granitemoe": _granitemoe,
    "lfm2moe": _lfm2moe,
    "afmoe": _afmoe,
    "hunyuan-moe": _hunyuan_moe,
    "nemotron_h_moe": _nemotron_h_moe,
    "exaone-moe": _exaone_moe,
    "jamba": _jamba,
    "mimo2": _mimo2,
    "glm-dsa": _glm_dsa,
    "mistral4": _mistral4,
    "kimi-linear": _kimi_linear,
    "gemma4": _gemma4,
    "bailingmoe": _bailingmoe,
    "deepseek": _deepseek,
    "deepseek2-ocr": _deepseek,
    "llama4": _llama4,
    "dbrx": _dbrx,
    "step35": _step35,
}


def further_builder(fields: Fields) -> Callable[[Fields], Config] | None:
    """Return the builder of a model whose tensors `modules` finds, None for one of `config.BUILDERS`."""
    if fields.architecture == "mistral3" and fields.text("rope.scaling.type") == "yarn":
        return _mistral3
    return FURTHER.get(fields.architecture)
