"""The configuration of a GGUF model, as the `config.json` that transformers' classes read, where `parts` names the
tensors. Torch-free.

A builder per architecture, as llama.cpp writes it; the other side of each choice is a branch of
`moeserve.model.families`. Builders of architectures that came later: `further`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from moeserve.model.gguf.fields import VOCABULARY, TypedFields, plain
from moeserve.model.gguf.header import GgufHeader
from moeserve.model.spec import CheckpointError, UnsupportedModel

Config = dict[str, Any]

# Values of `expert_gating_func`.
_UNNAMED, _SOFTMAX, _SIGMOID = 0, 1, 2
_TOKEN_IDS = {"eos_token_id": "eos_token_id", "bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
# Tokens that end a turn, beside the end of the text.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# The texts of tokens that end a turn or the text in the `generation_config.json` of published models. Files name one.
_ENDING_TEXTS = frozenset(("<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"))
_ENDING_TEXTS |= frozenset(("<turn|>",))
# In the Harmony format, which has both of these, `<|end|>` ends a message, after which there may be others.
_HARMONY_ENDS = frozenset(("<|return|>", "<|call|>"))
# Kinds of tokens in `tokenizer.ggml.token_type`: control and user-defined.
_NO_TEXT = (3, 4)


class Fields(TypedFields):
    """The fields of one architecture: `fields["attention.head_count"]`."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        name = header.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError("The GGUF file names no architecture.")
        self.architecture = name
        super().__init__(header.metadata, f"{name}.")


def generation_config_of(header: GgufHeader) -> Config:
    """Return `generation_config.json`: the tokens that end an answer."""
    fields = TypedFields(header.metadata, VOCABULARY)
    # SentencePiece's usual id where a file names none.
    usual = {"eos_token_id": 2} if fields.get("model") == "llama" else {}
    ids = [fields.whole(name, usual.get(name)) for name in _ENDS]
    ends = list(dict.fromkeys([*(token for token in ids if token is not None), *_ending_tokens(fields)]))
    return {"eos_token_id": ends} if ends else {}


def _ending_tokens(fields: TypedFields) -> list[int]:
    tokens, types = fields.texts("tokens") or [], fields.numbers("token_type") or ()
    found = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind in _NO_TEXT}
    is_harmony = found.keys() >= _HARMONY_ENDS
    ending = _ENDING_TEXTS - {"<|end|>"} | _HARMONY_ENDS if is_harmony else _ENDING_TEXTS
    return sorted(token_id for token, token_id in found.items() if token in ending)


def token_ids_of(header: GgufHeader) -> Config:
    fields = TypedFields(header.metadata, VOCABULARY)
    found = {name: fields.whole(key) for name, key in _TOKEN_IDS.items()}
    return {name: token for name, token in found.items() if token is not None}


def num_layers(fields: Fields) -> int:
    """Return the number of layers, without the last ones that only predict further tokens.

    Raise CheckpointError unless each may have a tensor in the file: a hostile number would take memory without bound.
    """
    count = fields.count("block_count") - fields.count("nextn_predict_layers", 0)
    if not 0 < count <= len(fields.header.tensors):
        raise CheckpointError(f"A GGUF file of {len(fields.header.tensors)} tensors does not have {count} layers.")
    return count


def head_dim(fields: Fields) -> int:
    if fields.get("attention.key_length") is None:
        width = fields.count("embedding_length") // max(fields.count("attention.head_count"), 1)
    else:
        width = fields.count("attention.key_length")
    if width < 1:
        raise CheckpointError("The heads of a GGUF file's attention have no width.")
    return width


def base_of(fields: Fields) -> Config:
    tensors = fields.header.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("The GGUF file lacks the tensor token_embd.weight.")
    return {
        "dtype": "bfloat16",
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.count("embedding_length"),
        "num_hidden_layers": num_layers(fields),
        **_heads_and_width(fields),
        "head_dim": head_dim(fields),
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": norm_eps(fields),
        "rope_parameters": rope_of(fields),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


# Architectures whose layers may differ in these; their builders read them.
_BY_LAYER = frozenset(("gemma4", "mimo2", "step35"))


def _heads_and_width(fields: Fields) -> Config:
    if fields.architecture in _BY_LAYER:
        heads, widths = fields.per_layer("attention.head_count"), fields.per_layer("feed_forward_length")
        return {"num_attention_heads": max(heads), "intermediate_size": max(widths)}
    return {
        "num_attention_heads": fields.count("attention.head_count"),
        "num_key_value_heads": fields.count("attention.head_count_kv", fields.count("attention.head_count")),
        "intermediate_size": fields.count("feed_forward_length", 0) or fields.count("expert_feed_forward_length"),
    }


def norm_eps(fields: Fields) -> float:
    """Return the epsilon of the norms, under whichever of its two names."""
    of_layer = fields.number("attention.layer_norm_epsilon", 0.0)
    return fields.number("attention.layer_norm_rms_epsilon", of_layer or None)


def rope_of(fields: Fields) -> Config:
    if not fields.header.tensors.keys().isdisjoint(("rope_factors_long.weight", "rope_factors_short.weight")):
        raise UnsupportedModel("GGUF models with long-context factors of rotary embeddings (Phi) are not supported.")
    theta = {"rope_theta": fields.number("rope.freq_base", 10000.0)}
    kind = fields.text("rope.scaling.type", "linear") or ""
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    _check_extrapolation(fields, is_yarn=kind == "yarn")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", **theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"Rotary embeddings of type {kind[:40]!r} in a GGUF file are not supported.")
    scaling = {"rope_type": kind, "factor": factor, **theta}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.count(
            "rope.scaling.original_context_length", fields.count("context_length")
        )
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if fields.get(f"rope.scaling.{key}") is not None:
                scaling[name] = fields.number(f"rope.scaling.{key}")
    return scaling


def _check_extrapolation(fields: Fields, *, is_yarn: bool) -> None:
    """Raise UnsupportedModel for a mix of rotary frequencies other than that of YaRN, or of no scaling: 1 and 0."""
    mix = fields.number("rope.scaling.yarn_ext_factor", -1.0)  # A negative one leaves it to the type.
    if mix >= 0 and mix != float(is_yarn):
        raise UnsupportedModel(
            f"The GGUF file sets {fields.architecture}.rope.scaling.yarn_ext_factor to {mix:g}, which is not supported."
        )


def experts_of(fields: Fields) -> Config:
    return {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
    }


def expert_width(fields: Fields) -> int:
    """Return the width of an expert: of files that do not tell it, by the shape of the experts."""
    width = fields.get("expert_feed_forward_length")
    if type(width) is int and width:
        return width
    for name, tensor in fields.header.tensors.items():
        if name.endswith((".ffn_down_exps.weight", ".ffn_down.0.weight")):
            return tensor.shape[-1]
    raise CheckpointError("The GGUF file holds no experts.")


def _llama(fields: Fields) -> Config:
    rope = {"rope_parameters": llama_rope(fields)}
    if not fields.count("expert_count", 0):
        return {"model_type": "llama", **rope}
    experts = {"num_local_experts": fields.count("expert_count"), "sliding_window": None}
    width = {"intermediate_size": expert_width(fields), "num_experts_per_tok": fields.count("expert_used_count")}
    return {"model_type": "mixtral", **experts, **width, **rope}


def llama_rope(fields: Fields) -> Config:
    """Return the rotary embedding, with a factor for each frequency where the file holds them (Llama 3.1 and models
    that were made of it)."""
    rope, tensor = rope_of(fields), fields.header.tensors.get("rope_freqs.weight")
    if tensor is None:
        return rope
    if rope["rope_type"] != "default":
        raise CheckpointError("The GGUF file's factors of rotary frequencies do not fit its configuration.")
    return {**rope, **rope_by_factors(fields, frequency_factors(fields, head_dim(fields) // 2))}


def rope_by_factors(fields: Fields, factors: tuple[float, ...]) -> Config:
    same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {"rope_type": "longrope", **same, "original_max_position_embeddings": fields.count("context_length")}


def frequency_factors(fields: Fields, number: int) -> tuple[float, ...]:
    """Return the factors of rotary frequencies that a file holds. Raise CheckpointError."""
    tensor = fields.header.tensors.get("rope_freqs.weight")
    if tensor is None or tensor.kind != "F32" or tensor.shape != (number,):
        raise CheckpointError("The GGUF file's factors of rotary frequencies do not fit its configuration.")
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            factors = struct.unpack(f"<{number}f", file.read(tensor.num_bytes))
    except (OSError, struct.error) as error:
        raise CheckpointError(f"{tensor.file.name} cannot be read: {error}.") from None
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise CheckpointError("The GGUF file's factors of rotary frequencies are not all positive numbers.")
    return factors


def _qwen2(fields: Fields) -> Config:
    return {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(fields: Fields) -> Config:
    return {"model_type": "qwen3", "use_sliding_window": False}


def _qwen2moe(fields: Fields) -> Config:
    shared = next((t.shape[0] for n, t in fields.header.tensors.items() if n.endswith(".ffn_gate_shexp.weight")), 0)
    return {
        "model_type": "qwen2_moe",
        **experts_of(fields),
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "qkv_bias": "blk.0.attn_q.bias" in fields.header.tensors,
    }


def _qwen3moe(fields: Fields) -> Config:
    return {"model_type": "qwen3_moe", **experts_of(fields), "norm_topk_prob": True, "use_sliding_window": False}


def _olmoe(fields: Fields) -> Config:
    experts = {**experts_of(fields), "intermediate_size": expert_width(fields)}
    clip = fields.number("attention.clamp_kqv", 0.0) or None
    return {"model_type": "olmoe", **experts, "norm_topk_prob": False, "clip_qkv": clip}


def _gpt_oss(fields: Fields) -> Config:
    layers = num_layers(fields)
    slides = [layer % 2 == 0 for layer in range(layers)]
    pattern = plain(fields.get("attention.sliding_window_pattern", 2))
    if pattern != 2 and pattern != slides:
        raise UnsupportedModel(
            "GGUF models of gpt-oss whose windows are not those of every other layer are not supported."
        )
    if fields.number("rope.freq_base_swa", base := fields.number("rope.freq_base", 10000.0)) != base:
        raise UnsupportedModel("GGUF models of gpt-oss with two bases of rotary embeddings are not supported.")
    return {
        "model_type": "gpt_oss",
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "intermediate_size": expert_width(fields),
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if is_sliding else "full_attention" for is_sliding in slides],
        # The file does not tell these; all models of the architecture have them.
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **rope_of(fields)},
    }


def _deepseek2(fields: Fields) -> Config:
    rope_dim = fields.count("rope.dimension_count")
    suffix = "_mla" if fields.count("attention.key_length_mla", 0) else ""
    is_v3 = is_sigmoid(fields)
    if not is_v3 and fields.flag("expert_weights_norm", False):
        raise UnsupportedModel(
            "GGUF models of DeepSeek V2 whose experts' weights are divided by their sum are refused."
        )
    groups = {
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
    }
    heads = fields.count("attention.head_count")
    return {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        **routed_of(fields),
        **groups,
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if groups["n_group"] > 1 else "greedy",
        "num_key_value_heads": heads,
        "head_dim": rope_dim,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": fields.count(f"attention.key_length{suffix}") - rope_dim,
        "v_head_dim": fields.count(f"attention.value_length{suffix}"),
        "kv_lora_rank": fields.count("attention.kv_lora_rank"),
        "q_lora_rank": fields.count("attention.q_lora_rank", 0) or None,
        "attention_bias": False,
        "rope_parameters": deepseek_rope(fields),
    }


def is_sigmoid(fields: Fields) -> bool:
    """Return whether experts are chosen by sigmoids; of files that do not tell, those with biases of the choice are."""
    function = fields.count("expert_gating_func", _UNNAMED)
    if function not in (_UNNAMED, _SOFTMAX, _SIGMOID):
        raise UnsupportedModel(f"The function {function} by which the GGUF file chooses experts is not supported.")
    is_biased = any(name.endswith(".exp_probs_b.bias") for name in fields.header.tensors)
    return function == _SIGMOID or (function == _UNNAMED and is_biased)


def deepseek_rope(fields: Fields) -> Config:
    rope = rope_of(fields)
    name = "rope.scaling.yarn_log_multiplier"
    if rope["rope_type"] == "yarn" and fields.get(name) is not None:
        # The file holds a tenth of both of the configuration's numbers, which are equal in all published models.
        mscale = float(f"{10 * fields.number(name):.6g}")
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    return rope


def routed_of(fields: Fields) -> Config:
    """Return the experts of DeepSeek and its relatives."""
    return {
        "n_routed_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "n_shared_experts": fields.count("expert_shared_count", 0),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
    }


def _glm4moe(fields: Fields) -> Config:
    return {
        "model_type": "glm4_moe",
        **routed_of(fields),
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in fields.header.tensors,
        "rope_parameters": partial_rope_of(fields),
    }


def _bailingmoe2(fields: Fields) -> Config:
    """Return a GLM-4.5: it computes what Ling 2 does."""
    width, shared = expert_width(fields), fields.count("expert_shared_feed_forward_length", 0)
    if not is_sigmoid(fields) or shared not in (0, width):
        raise UnsupportedModel(
            "GGUF models of bailingmoe2 that choose experts without sigmoids, or whose shared experts have a width of "
            "their own, are not supported."
        )
    return _glm4moe(fields)


def partial_rope_of(fields: Fields) -> Config:
    factor = fields.count("rope.dimension_count", head_dim(fields)) / head_dim(fields)
    return {**rope_of(fields), "partial_rotary_factor": factor}


def _phimoe(fields: Fields) -> Config:
    return {
        "model_type": "phimoe",
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "intermediate_size": expert_width(fields),
        "lm_head_bias": "output.bias" in fields.header.tensors,
        "sliding_window": fields.count("attention.sliding_window", 0) or None,
        "router_jitter_noise": 0.01,
    }


def _ernie4_5_moe(fields: Fields) -> Config:
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": fields.count("expert_count"),
        "moe_k": fields.count("expert_used_count"),
        "moe_intermediate_size": expert_width(fields),
        "moe_num_shared_experts": fields.count("expert_shared_count", 0),
        "moe_layer_start_index": fields.count("leading_dense_block_count", 0),
        "moe_layer_end_index": num_layers(fields) - 1,
        "moe_layer_interval": fields.count("interleave_moe_layer_step", 1) or 1,
        "use_bias": "blk.0.attn_q.bias" in fields.header.tensors,
    }


def _dots1(fields: Fields) -> Config:
    groups = {
        "n_group": fields.count("expert_group_count", 1),
        "topk_group": fields.count("expert_group_used_count", 1),
    }
    return {"model_type": "dots1", **routed_of(fields), **groups, "sliding_window": None}


def _minimax_m2(fields: Fields) -> Config:
    return {
        "model_type": "minimax_m2",
        "num_local_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "intermediate_size": expert_width(fields),
        "rope_parameters": partial_rope_of(fields),
    }


def _qwen3next(fields: Fields) -> Config:
    tensors = fields.header.tensors
    dense = [layer for layer in range(num_layers(fields)) if f"blk.{layer}.ffn_gate_inp.weight" not in tensors]
    return {
        **_qwen2moe(fields),
        **_delta_net(fields),
        "model_type": "qwen3_next",
        "norm_topk_prob": True,
        "mlp_only_layers": dense,
    }


def _qwen35(fields: Fields) -> Config:
    return {**_delta_net(fields), "model_type": "qwen3_5_text"}


def _qwen35moe(fields: Fields) -> Config:
    return {**_qwen2moe(fields), **_delta_net(fields), "model_type": "qwen3_5_moe_text"}


def _delta_net(fields: Fields) -> Config:
    values, tensors = fields.count("ssm.time_step_rank"), fields.header.tensors
    recurrent = [f"blk.{layer}.ssm_out.weight" in tensors for layer in range(num_layers(fields))]
    return {
        "layer_types": ["linear_attention" if is_recurrent else "full_attention" for is_recurrent in recurrent],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel"),
        "linear_key_head_dim": fields.count("ssm.state_size"),
        "linear_num_key_heads": fields.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": fields.count("ssm.inner_size") // max(values, 1),
        "rope_parameters": partial_rope_of(fields),
    }


BUILDERS: Mapping[str, Callable[[Fields], Config]] = {
    "llama": _llama,
    # Without YaRN it is a Llama.
    "mistral3": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    # Without images the positions of all parts of a head are the same, as in other models.
    "qwen3vlmoe": _qwen3moe,
    "qwen3vl": _qwen3,
    "qwen3next": _qwen3next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
    "olmoe": _olmoe,
    "gpt-oss": _gpt_oss,
    "gptoss": _gpt_oss,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4moe,
    "bailingmoe2": _bailingmoe2,
    "phimoe": _phimoe,
    "ernie4_5-moe": _ernie4_5_moe,
    "dots1": _dots1,
    "minimax-m2": _minimax_m2,
}
