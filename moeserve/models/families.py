"""From a Hugging Face configuration to a DecoderSpec: one small branch per model type.

A type is added with one function here, one line in ``_BUILDERS`` and one parity test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kernels.specs import Activation, GateSpec
from moeserve.models.errors import ModelError, UnsupportedModel
from moeserve.models.family_parts import (
    Config,
    after_dense,
    base,
    mla,
    noaux_moe,
    num_experts,
    partial_rotary_dim,
    shared_expert,
    with_attention,
    with_attention_bias,
    with_experts,
    with_windows,
)
from moeserve.models.spec import AttentionSpec, DecoderSpec, MoeSpec, SharedExpertSpec

# Their layers carry a state of their own from token to token, which prefix caching cannot share.
_RECURRENT = frozenset((
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2",
))  # fmt: skip


# Types that no other library knows: their configurations must be complete.
OWN_MODEL_TYPES = frozenset(("moeserve_demo",))


def supported_model_types() -> tuple[str, ...]:
    return tuple(sorted(_BUILDERS))


def check_model_type(model_type: object) -> str:
    """Return the type if it is served; raise UnsupportedModel with a sentence that names it if not."""
    if isinstance(model_type, str) and model_type in _BUILDERS:
        return model_type
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModel("The configuration names no model_type.")
    if model_type in _RECURRENT:
        raise UnsupportedModel(
            f"Models of type {model_type!r} are not supported: their recurrent layers keep a state per request."
        )
    raise UnsupportedModel(
        f"Models of type {model_type!r} are not supported; these are: {', '.join(supported_model_types())}."
    )


def build_spec(config: Config) -> DecoderSpec:
    """Describe the model of a complete configuration (all defaults filled in).

    Raises UnsupportedModel for types, activations, rope kinds and quantisations that are not served, ModelError for
    configurations that lack a value or contradict themselves.
    """
    model_type = check_model_type(config.get("model_type"))
    try:
        spec = _BUILDERS[model_type](config)
    except KeyError as error:
        raise ModelError(f"The configuration of this {model_type} model lacks {error.args[0]!r}.") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"The configuration of this {model_type} model is not valid: {error}.") from None
    _check(spec)
    return spec


def _check(spec: DecoderSpec) -> None:
    if spec.rope.rotary_dim % 2:
        raise ModelError(f"The rotary dimension {spec.rope.rotary_dim} is odd.")
    attention = spec.attention
    if isinstance(attention, AttentionSpec) and attention.num_heads % attention.num_kv_heads:
        raise ModelError(f"{attention.num_heads} heads cannot share {attention.num_kv_heads} key-value heads.")
    if spec.moe is None:
        return
    gate, experts = spec.moe.gate, spec.moe.num_experts
    if not 1 <= gate.top_k <= experts:
        raise ModelError(f"{gate.top_k} experts per token cannot be chosen from {experts}.")
    if experts % gate.num_groups:
        raise ModelError(f"{experts} experts cannot be split into {gate.num_groups} equal groups.")
    if gate.top_groups * (experts // gate.num_groups) < gate.top_k:
        raise ModelError(f"The chosen groups hold fewer than {gate.top_k} experts.")


def _llama(c: Config) -> DecoderSpec:
    return with_attention_bias(base(c, mlp_bias=bool(c.get("mlp_bias"))), c)


def _mistral(c: Config) -> DecoderSpec:
    return with_windows(base(c), c)


def _qwen2(c: Config) -> DecoderSpec:
    return with_attention(with_windows(base(c), c), qkv_bias=True)


def _qwen3(c: Config) -> DecoderSpec:
    return with_attention(with_windows(with_attention_bias(base(c), c), c), qk_norm="head")


def _mixtral(c: Config) -> DecoderSpec:
    spec = with_windows(base(c), c)
    gate = GateSpec(c["num_experts_per_tok"], renormalise=True)
    return with_experts(spec, MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation))


def _qwen_layers(c: Config) -> Callable[[int], bool]:
    step, dense = c.get("decoder_sparse_step") or 1, frozenset(c.get("mlp_only_layers") or ())
    return lambda index: (index + 1) % step == 0 and index not in dense


def _qwen2_moe(c: Config) -> DecoderSpec:
    spec = with_attention(with_windows(base(c), c), qkv_bias=bool(c.get("qkv_bias", True)))
    moe = MoeSpec(
        num_experts(c),
        c["moe_intermediate_size"],
        GateSpec(c["num_experts_per_tok"], renormalise=bool(c.get("norm_topk_prob"))),
        spec.activation,
        shared=SharedExpertSpec(c["shared_expert_intermediate_size"], gated=True),
    )
    return with_experts(spec, moe, _qwen_layers(c))


def _qwen3_moe(c: Config) -> DecoderSpec:
    spec = with_attention(with_windows(with_attention_bias(base(c), c), c), qk_norm="head")
    gate = GateSpec(c["num_experts_per_tok"], renormalise=bool(c.get("norm_topk_prob")))
    moe = MoeSpec(num_experts(c), c["moe_intermediate_size"], gate, spec.activation)
    return with_experts(spec, moe, _qwen_layers(c))


def _olmoe(c: Config) -> DecoderSpec:
    spec = with_attention(with_attention_bias(base(c), c), qk_norm="flat", clip_qkv=c.get("clip_qkv"))
    gate = GateSpec(c["num_experts_per_tok"], renormalise=bool(c.get("norm_topk_prob")))
    return with_experts(spec, MoeSpec(num_experts(c), c["intermediate_size"], gate, spec.activation))


def _granitemoe(c: Config) -> DecoderSpec:
    spec = base(
        c,
        embedding_multiplier=float(c["embedding_multiplier"]),
        residual_multiplier=float(c["residual_multiplier"]),
        logit_divisor=float(c["logits_scaling"]),
    )
    spec = with_attention(with_attention_bias(spec, c), scale=float(c["attention_multiplier"]))
    gate = GateSpec(c["num_experts_per_tok"], softmax_after_top_k=True)
    return with_experts(spec, MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation))


def _phimoe(c: Config) -> DecoderSpec:
    spec = base(c, norm="layer", lm_head_bias=bool(c.get("lm_head_bias")))
    spec = with_windows(with_attention_bias(spec, c), c)
    gate = GateSpec(c["num_experts_per_tok"], score="sparsemixer", jitter=float(c["router_jitter_noise"]))
    return with_experts(spec, MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation))


def _gpt_oss(c: Config) -> DecoderSpec:
    spec = with_attention(with_windows(with_attention_bias(base(c), c), c), sinks=True)
    moe = MoeSpec(
        c["num_local_experts"],
        c["intermediate_size"],
        GateSpec(c["num_experts_per_tok"], softmax_after_top_k=True),
        Activation("swigluoai", alpha=float(c["swiglu_alpha"]), limit=float(c["swiglu_limit"])),
        gate_bias=True,
        expert_bias=True,
        transposed_experts=True,
    )
    return with_experts(spec, moe)


def _glm4_moe(c: Config) -> DecoderSpec:
    spec = base(c, rotary_dim=partial_rotary_dim(c))
    spec = with_attention(
        spec, qkv_bias=bool(c.get("attention_bias")), qk_norm="head" if c.get("use_qk_norm") else "none"
    )
    return with_experts(spec, noaux_moe(c, spec.activation), after_dense(c))


def _dots1(c: Config) -> DecoderSpec:
    spec = with_attention(with_windows(with_attention_bias(base(c), c), c), qk_norm="head")
    return with_experts(spec, noaux_moe(c, spec.activation), after_dense(c))


def _minimax_m2(c: Config) -> DecoderSpec:
    spec = with_attention(base(c, rotary_dim=partial_rotary_dim(c)), qk_norm="flat")
    gate = GateSpec(c["num_experts_per_tok"], score="sigmoid", renormalise=True)
    moe = MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation, correction_bias=True)
    return with_experts(spec, moe)


def _ernie4_5_moe(c: Config) -> DecoderSpec:
    bias = bool(c.get("use_bias"))
    spec = base(c, interleaved=True, mlp_bias=bias, lm_head_bias=bias)
    spec = replace(with_attention(spec, qkv_bias=bias, out_bias=bias), rope=replace(spec.rope, keep_fp32=True))
    moe = MoeSpec(
        c["moe_num_experts"],
        c["moe_intermediate_size"],
        GateSpec(c["moe_k"], renormalise=True, norm_min=float(c["moe_norm_min"])),
        spec.activation,
        gate_fp32=True,
        correction_bias=True,
        shared=shared_expert(c, "moe_num_shared_experts", bias=bias),
    )
    first, last = c["moe_layer_start_index"], c["moe_layer_end_index"]
    last = spec.num_layers - 1 if last < 0 else last
    step = c.get("moe_layer_interval") or 1
    return with_experts(spec, moe, lambda index: first <= index <= last and (index + 1) % step == 0)


def _deepseek_v2(c: Config) -> DecoderSpec:
    spec = mla(c, interleaved=True)
    grouped = c.get("topk_method") == "group_limited_greedy"
    if not grouped and c.get("topk_method", "greedy") != "greedy":
        raise UnsupportedModel(f"The topk_method {c['topk_method']!r} is not supported for deepseek_v2.")
    gate = GateSpec(
        c["num_experts_per_tok"],
        scale=float(c.get("routed_scaling_factor") or 1.0),
        num_groups=c["n_group"] if grouped else 1,
        top_groups=c["topk_group"] if grouped else 1,
        group_score="max",
    )
    shared = shared_expert(c, "n_shared_experts", bias=spec.mlp_bias)
    moe = MoeSpec(num_experts(c), c["moe_intermediate_size"], gate, spec.activation, gate_fp32=True, shared=shared)
    return with_experts(spec, moe, after_dense(c))


def _deepseek_v3(c: Config) -> DecoderSpec:
    spec = mla(c, interleaved=bool(c.get("rope_interleave", True)))
    spec = replace(spec, mlp_bias=False)
    return with_experts(spec, noaux_moe(c, spec.activation), after_dense(c))


def _moeserve_demo(c: Config) -> DecoderSpec:
    """A dense model whose neurons were split: some always run, the others as experts that are summed as they are."""
    spec = base(c)
    moe = MoeSpec(
        c["num_local_experts"],
        c["moe_intermediate_size"],
        GateSpec(c["num_experts_per_tok"], score="ones"),
        spec.activation,
        gate_fp32=True,
        gate_bias=True,
        shared=SharedExpertSpec(c["shared_expert_intermediate_size"]) if c["shared_expert_intermediate_size"] else None,
    )
    return with_experts(spec, moe)


_BUILDERS: dict[str, Callable[[Config], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "phimoe": _phimoe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "ernie4_5_moe": _ernie4_5_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "moeserve_demo": _moeserve_demo,
}
