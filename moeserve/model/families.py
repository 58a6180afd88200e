"""From the Hugging Face configuration of a model folder to a DecoderSpec.

To add a model type: write one function here, add one line to ``_BUILDERS`` and one parity test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kernels.specs import Activation, GateSpec
from moeserve.model import family_parts as parts
from moeserve.model.config_bounds import check_numbers, with_special_floats
from moeserve.model.family_parts import Config
from moeserve.model.files import read_json
from moeserve.model.packed.config import described_quantization, quantization_spec
from moeserve.model.rope import parse_rope, rope_frequencies
from moeserve.model.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    LayerInputsSpec,
    MambaSpec,
    MlaSpec,
    ModelError,
    MoeSpec,
    SharedExpertSpec,
    ShortConvSpec,
    UnsupportedModel,
)

# The layers of these types carry a state from token to token in ways that the decoder does not compute.
_RECURRENT = frozenset((
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2",
    "minimax", "recurrent_gemma", "rwkv", "zamba", "zamba2",
))  # fmt: skip

# transformers does not know these types, so it cannot fill in defaults: their configurations must be complete.
OWN_MODEL_TYPES = frozenset(("moeserve_demo",))


def load_config(directory: Path) -> dict[str, Any]:
    """Return the folder's ``config.json`` with every default of its model type filled in.

    Raise UnsupportedModel for a type that is not served, ModelError for a file that is missing or not valid. Only the
    configuration classes of transformers are used. Code in the folder never runs: ``model_type`` chooses among the
    installed classes, and ``auto_map`` is ignored.
    """
    raw = read_config(directory)
    model_type = check_model_type(raw.get("model_type"))
    check_numbers(raw)

    if model_type in OWN_MODEL_TYPES:
        return raw

    # Imported here because it takes most of a second, and only the process that loads the model needs it.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw.pop("auto_map", None)
    quantization = described_quantization(directory, raw)
    quantization_spec(quantization)  # Before transformers' classes fail at one that is none.
    try:
        config = CONFIG_MAPPING[model_type].from_dict(with_special_floats(raw)).to_dict()
    except Exception as error:  # Each configuration class has its own validators with their own exception types.
        file, reason = directory / "config.json", " ".join(str(error).split()).removesuffix(".")
        raise ModelError(f"{file} is not a valid {model_type} configuration: {reason}.") from error
    return {**config, "quantization_config": quantization}


def read_config(directory: Path) -> dict[str, Any]:
    """Return the folder's ``config.json`` as it is. Raise ModelError for a missing or invalid file."""
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"There is no config.json in {directory}.")
    return read_json(path)


def supported_model_types() -> tuple[str, ...]:
    return tuple(sorted(_BUILDERS))


def is_native(config: Config, model_impl: str) -> bool:
    """Return whether a model is computed by our own decoder. config: as its folder has it. model_impl: `--model-impl`.

    Of some types it computes a part of the models.
    """
    if model_impl != "auto":
        return model_impl == "native"
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _BUILDERS:
        return False
    obstacle = _OBSTACLES.get(model_type)
    return obstacle is None or obstacle(config) is None


def check_model_type(model_type: object) -> str:
    """Return the type if it is served. Raise UnsupportedModel, which names the type, for any other."""
    if isinstance(model_type, str) and model_type in _BUILDERS:
        return model_type
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModel("The configuration names no model_type.")
    if model_type in _RECURRENT:
        raise UnsupportedModel(
            f"Models of type {model_type!r} are not supported: their kind of recurrent layers is not computed here."
        )
    raise UnsupportedModel(
        f"Models of type {model_type!r} are not supported; these are: {', '.join(supported_model_types())}."
    )


def build_spec(config: Config) -> DecoderSpec:
    """Return the description of the model. config: complete, with all defaults filled in.

    Raise UnsupportedModel for a type, activation, rope kind or quantisation that is not served, ModelError for a
    configuration that lacks a value or contradicts itself.
    """
    model_type = check_model_type(config.get("model_type"))
    check_numbers(config)
    try:
        spec = _BUILDERS[model_type](config)
        _check_frequencies(spec)
    except KeyError as error:
        raise ModelError(f"The configuration of this {model_type} model lacks {error.args[0]!r}.") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError) as error:
        raise ModelError(f"The configuration of this {model_type} model is not valid: {error}.") from None
    _check(spec)
    return spec


def _check_frequencies(spec: DecoderSpec) -> None:
    """Raise ValueError or ArithmeticError if the rotation is not finite for short or for long contexts."""
    ropes = [spec.rope] if spec.window_rope is None else [spec.rope, spec.window_rope]
    for rope in ropes:
        for max_model_len in (spec.longest_context(None), spec.max_position):
            frequencies = rope_frequencies(rope, max_model_len)
            if not all(map(math.isfinite, (frequencies.scale, *frequencies.inverse))):
                raise ValueError("its rotary embedding is not finite")


def _check(spec: DecoderSpec) -> None:
    moe = spec.moe
    indexer = spec.attention.indexer if isinstance(spec.attention, MlaSpec) else None
    of_layers = spec.attention, spec.window_attention, indexer, spec.recurrent, spec.layer_inputs
    for part in (spec, *of_layers, moe, moe and moe.gate, moe and moe.shared):
        _check_whole_numbers(spec.model_type, part)
    if spec.rope.rotary_dim % 2:
        raise ModelError(f"The rotary dimension {spec.rope.rotary_dim} is odd.")
    for attention in (spec.attention, spec.window_attention):
        if isinstance(attention, AttentionSpec) and attention.num_heads % attention.num_kv_heads:
            raise ModelError(f"{attention.num_heads} heads cannot share {attention.num_kv_heads} key-value heads.")
    net = spec.recurrent
    if isinstance(net, DeltaNetSpec) and net.num_value_heads % net.num_key_heads:
        raise ModelError(f"{net.num_value_heads} value heads cannot share {net.num_key_heads} key heads.")
    if isinstance(net, DeltaNetSpec) and spec.activation.kind != "silu":
        raise UnsupportedModel(f"Gated delta nets with the activation {spec.activation.kind!r} are not supported.")
    if isinstance(net, MambaSpec) and (net.num_groups < 1 or net.num_heads % net.num_groups):
        raise ModelError(f"{net.num_heads} Mamba heads cannot share {net.num_groups} groups.")
    if moe is None:
        return
    gate, experts = moe.gate, moe.num_experts
    if not 1 <= gate.top_k <= experts:
        raise ModelError(f"{gate.top_k} experts per token cannot be chosen from {experts}.")
    if gate.num_groups < 1 or experts % gate.num_groups:
        raise ModelError(f"{experts} experts cannot be split into {gate.num_groups} equal groups.")
    if gate.top_groups * (experts // gate.num_groups) < gate.top_k:
        raise ModelError(f"The chosen groups hold fewer than {gate.top_k} experts.")


def _check_whole_numbers(model_type: str, part: Any) -> None:
    """Raise ModelError if a field of a spec that must be a whole number is not one; a part may be None."""
    for known in () if part is None else fields(part):
        value = getattr(part, known.name)
        if known.type == "int" and type(value) is not int:
            raise ModelError(f"The configuration gives this {model_type} model no {known.name}, but {value!r:.40}.")


def _llama(c: Config) -> DecoderSpec:
    return parts.with_attention_bias(parts.base(c, mlp_bias=bool(c.get("mlp_bias"))), c)


def _mistral(c: Config) -> DecoderSpec:
    return parts.with_windows(parts.base(c), c)


def _qwen2(c: Config) -> DecoderSpec:
    return parts.with_attention(parts.with_windows(parts.base(c), c), qkv_bias=True)


def _qwen3(c: Config) -> DecoderSpec:
    return parts.with_attention(parts.with_windows(parts.with_attention_bias(parts.base(c), c), c), qk_norm="head")


def _mixtral(c: Config) -> DecoderSpec:
    spec = parts.with_windows(parts.base(c), c)
    gate = GateSpec(c["num_experts_per_tok"], renormalise=True)
    return parts.with_experts(spec, MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation))


def _qwen_layers(c: Config) -> Callable[[int], bool]:
    step, dense = c.get("decoder_sparse_step") or 1, frozenset(c.get("mlp_only_layers") or ())
    return lambda index: (index + 1) % step == 0 and index not in dense


def _qwen_moe(c: Config, activation: Activation, renormalise: bool) -> MoeSpec:
    """Return experts beside a shared expert that a gate of its own scales."""
    return MoeSpec(
        parts.num_experts(c),
        c["moe_intermediate_size"],
        GateSpec(c["num_experts_per_tok"], renormalise=renormalise),
        activation,
        shared=SharedExpertSpec(c["shared_expert_intermediate_size"], gated=True),
    )


def _qwen2_moe(c: Config) -> DecoderSpec:
    spec = parts.with_attention(parts.with_windows(parts.base(c), c), qkv_bias=bool(c.get("qkv_bias", True)))
    return parts.with_experts(spec, _qwen_moe(c, spec.activation, bool(c.get("norm_topk_prob"))), _qwen_layers(c))


def _qwen3_moe(c: Config) -> DecoderSpec:
    spec = parts.with_attention(parts.with_windows(parts.with_attention_bias(parts.base(c), c), c), qk_norm="head")
    gate = GateSpec(c["num_experts_per_tok"], renormalise=bool(c.get("norm_topk_prob")))
    moe = MoeSpec(parts.num_experts(c), c["moe_intermediate_size"], gate, spec.activation)
    return parts.with_experts(spec, moe, _qwen_layers(c))


def _olmoe(c: Config) -> DecoderSpec:
    spec = parts.with_attention(parts.with_attention_bias(parts.base(c), c), qk_norm="flat", clip_qkv=c.get("clip_qkv"))
    gate = GateSpec(c["num_experts_per_tok"], renormalise=bool(c.get("norm_topk_prob")))
    return parts.with_experts(spec, MoeSpec(parts.num_experts(c), c["intermediate_size"], gate, spec.activation))


def _granitemoe(c: Config) -> DecoderSpec:
    return _with_granite_experts(_granite(c), c)


def _with_granite_experts(spec: DecoderSpec, c: Config) -> DecoderSpec:
    """Put experts on all layers, with a shared one beside them if the type has it."""
    width = c.get("shared_intermediate_size")
    moe = MoeSpec(
        c["num_local_experts"],
        c["intermediate_size"],
        GateSpec(c["num_experts_per_tok"], softmax_after_top_k=True),
        spec.activation,
        shared=SharedExpertSpec(width) if width else None,
    )
    return parts.with_experts(spec, moe)


def _granite(c: Config, *, rotary_dim: int | None = None) -> DecoderSpec:
    spec = parts.base(
        c,
        rotary_dim=rotary_dim,
        embedding_multiplier=float(c["embedding_multiplier"]),
        residual_multiplier=float(c["residual_multiplier"]),
        logit_divisor=float(c["logits_scaling"]),
        fused_mlps=True,
    )
    return parts.with_attention(parts.with_attention_bias(spec, c), scale=float(c["attention_multiplier"]))


def _granitemoehybrid(c: Config) -> DecoderSpec:
    """Mamba-2 layers and attention, rotated or not; each with a dense block, or with experts and a shared one."""
    spec = _granite(
        {**c, "intermediate_size": c["shared_intermediate_size"]},
        rotary_dim=None if c["position_embedding_type"] == "rope" else 0,
    )
    least_step, most_step = c["time_step_limit"]
    if spec.activation.kind != "silu" or most_step != math.inf:
        raise UnsupportedModel(
            "Models of type 'granitemoehybrid' without SiLU or with bounded steps are not supported."
        )
    mamba = MambaSpec(
        num_heads=c["mamba_n_heads"],
        num_groups=c["mamba_n_groups"],
        head_dim=c["mamba_d_head"],
        state_dim=c["mamba_d_state"],
        conv_width=c["mamba_d_conv"],
        least_step=float(least_step),
        conv_bias=bool(c["mamba_conv_bias"]),
        bias=bool(c["mamba_proj_bias"]),
    )
    spec = parts.with_recurrent(spec, c["layer_types"], "linear_attention", mamba)
    return _with_granite_experts(spec, c) if c["num_local_experts"] else spec


def _lfm2_moe(c: Config) -> DecoderSpec:
    """Short convolutions and attention, each with a dense block or experts."""
    spec = parts.with_attention(parts.base({**c, "hidden_act": "silu", "rms_norm_eps": c["norm_eps"]}), qk_norm="head")
    gate = GateSpec(
        c["num_experts_per_tok"],
        score="sigmoid",
        renormalise=bool(c["norm_topk_prob"]),
        norm_min=1e-6,
        scale=float(c["routed_scaling_factor"]),
    )
    bias, first = bool(c["use_expert_bias"]), c["num_dense_layers"]
    moe = MoeSpec(c["num_experts"], c["moe_intermediate_size"], gate, spec.activation, correction_bias=bias)
    conv = ShortConvSpec(c["hidden_size"], c["conv_L_cache"], bool(c["conv_bias"]))
    spec = parts.with_recurrent(spec, c["layer_types"], "conv", conv)
    return parts.with_experts(spec, moe, lambda index: index >= first)


def _phimoe(c: Config) -> DecoderSpec:
    spec = parts.base(c, norm="layer", lm_head_bias=bool(c.get("lm_head_bias")))
    spec = parts.with_windows(parts.with_attention_bias(spec, c), c)
    # transformers' phimoe rotates by the short factors at any length; only the magnitude changes.
    spec = replace(spec, rope=replace(spec.rope, long_factor=spec.rope.short_factor))
    gate = GateSpec(c["num_experts_per_tok"], score="sparsemixer", jitter=float(c["router_jitter_noise"]))
    return parts.with_experts(spec, MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation))


def _gpt_oss(c: Config) -> DecoderSpec:
    spec = parts.with_attention(parts.with_windows(parts.with_attention_bias(parts.base(c), c), c), sinks=True)
    moe = MoeSpec(
        c["num_local_experts"],
        c["intermediate_size"],
        GateSpec(c["num_experts_per_tok"], softmax_after_top_k=True),
        Activation("swigluoai", alpha=float(c["swiglu_alpha"]), limit=float(c["swiglu_limit"])),
        gate_bias=True,
        expert_bias=True,
        transposed_experts=True,
    )
    return parts.with_experts(spec, moe)


def _glm4_moe(c: Config) -> DecoderSpec:
    spec = parts.base(c, rotary_dim=parts.partial_rotary_dim(c))
    spec = parts.with_attention(
        spec, qkv_bias=bool(c.get("attention_bias")), qk_norm="head" if c.get("use_qk_norm") else "none"
    )
    return parts.with_experts(spec, parts.noaux_moe(c, spec.activation), parts.after_dense(c))


def _dots1(c: Config) -> DecoderSpec:
    spec = parts.with_attention(parts.with_windows(parts.with_attention_bias(parts.base(c), c), c), qk_norm="head")
    return parts.with_experts(spec, parts.noaux_moe(c, spec.activation), parts.after_dense(c))


def _minimax_m2(c: Config) -> DecoderSpec:
    spec = parts.with_attention(parts.base(c, rotary_dim=parts.partial_rotary_dim(c)), qk_norm="flat")
    gate = GateSpec(c["num_experts_per_tok"], score="sigmoid", renormalise=True)
    moe = MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation, correction_bias=True)
    return parts.with_experts(spec, moe)


def _ernie4_5_moe(c: Config) -> DecoderSpec:
    bias = bool(c.get("use_bias"))
    spec = parts.base(c, interleaved=True, mlp_bias=bias, lm_head_bias=bias)
    spec = replace(parts.with_attention(spec, qkv_bias=bias, out_bias=bias), rope=replace(spec.rope, keep_fp32=True))
    moe = MoeSpec(
        c["moe_num_experts"],
        c["moe_intermediate_size"],
        GateSpec(c["moe_k"], renormalise=True, norm_min=float(c["moe_norm_min"])),
        spec.activation,
        gate_fp32=True,
        correction_bias=True,
        shared=parts.shared_expert(c, "moe_num_shared_experts", bias=bias),
    )
    first, last = c["moe_layer_start_index"], c["moe_layer_end_index"]
    last = spec.num_layers - 1 if last < 0 else last
    step = c.get("moe_layer_interval") or 1
    return parts.with_experts(spec, moe, lambda index: first <= index <= last and (index + 1) % step == 0)


def _deepseek_v2(c: Config) -> DecoderSpec:
    spec = parts.mla(c, interleaved=True)
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
    shared = parts.shared_expert(c, "n_shared_experts", bias=spec.mlp_bias)
    moe = MoeSpec(
        parts.num_experts(c), c["moe_intermediate_size"], gate, spec.activation, gate_fp32=True, shared=shared
    )
    return parts.with_experts(spec, moe, parts.after_dense(c))


def _deepseek_v3(c: Config) -> DecoderSpec:
    spec = parts.mla(c, interleaved=bool(c.get("rope_interleave", True)))
    spec = replace(spec, mlp_bias=False)
    return parts.with_experts(spec, parts.noaux_moe(c, spec.activation), parts.after_dense(c))


def _glm4_moe_lite(c: Config) -> DecoderSpec:
    """DeepSeek-V3 with a list of the layers that have experts."""
    types = c["mlp_layer_types"]
    return replace(_deepseek_v3(c), sparse_layers=tuple(types[n] == "sparse" for n in range(c["num_hidden_layers"])))


def _deepseek_v32(c: Config) -> DecoderSpec:
    return parts.with_indexer(_glm4_moe_lite(c), c, interleaved=False)


def _glm_moe_dsa(c: Config) -> DecoderSpec:
    spec, types = parts.with_indexer(_glm4_moe_lite(c), c, interleaved=True), c["indexer_types"]
    if len(types) < spec.num_layers or set(types) - {"full", "shared"} or types[0] == "shared":
        raise ModelError(
            "The configuration's indexer_types do not say how each layer of attention finds its positions."
        )
    return replace(spec, shared_choices=tuple(kind == "shared" for kind in types[: spec.num_layers]))


def _qwen3_next(c: Config) -> DecoderSpec:
    spec = parts.hybrid(c, by_key_head=True)
    return parts.with_experts(spec, _qwen_moe(c, spec.activation, bool(c.get("norm_topk_prob"))), _qwen_layers(c))


def _qwen3_5_text(c: Config) -> DecoderSpec:
    return parts.hybrid(c, by_key_head=False)


def _qwen3_5_moe_text(c: Config) -> DecoderSpec:
    # No layer is without experts.
    spec = parts.hybrid({**c, "intermediate_size": c["moe_intermediate_size"]}, by_key_head=False)
    return parts.with_experts(spec, _qwen_moe(c, spec.activation, True))


def _inside(build: Callable[[Config], DecoderSpec]) -> Callable[[Config], DecoderSpec]:
    """Return a function that builds the language model inside a vision-language model."""

    def build_inner(c: Config) -> DecoderSpec:
        outer = {name: c.get(name) for name in ("tie_word_embeddings", "quantization_config")}
        return replace(build({**c["text_config"], **outer}), model_type=c["model_type"])

    return build_inner


def _gemma4_text(c: Config) -> DecoderSpec:
    if (obstacle := _gemma4_obstacle(c)) is not None:
        raise UnsupportedModel(f"Models of type {c['model_type']!r} with {obstacle} are not computed by our own code.")
    base = {**c, "hidden_act": c["hidden_activation"]}
    spec = parts.base(
        {**base, "rope_parameters": c["rope_parameters"]["sliding_attention"]},
        added_norms=True,
        layer_scales=True,
        embedding_multiplier=c["hidden_size"] ** 0.5,
        logit_softcap=None if c.get("final_logit_softcapping") is None else float(c["final_logit_softcapping"]),
    )
    spec = parts.with_attention(parts.with_attention_bias(spec, c), scale=1.0, qk_norm="head", value_norm=True)
    narrow, types = spec.attention, parts.layer_types(c["layer_types"], spec, "sliding_attention")
    assert isinstance(narrow, AttentionSpec)
    wide = _gemma4_wide_layers(c, types)
    head_dim = wide.get("head_dim", narrow.head_dim)
    spec = replace(
        spec,
        attention=replace(
            narrow,
            head_dim=head_dim,
            num_kv_heads=wide.get("num_key_value_heads", narrow.num_kv_heads),
            keys_are_values=bool(c.get("attention_k_eq_v")),
        ),
        rope=parse_rope(
            c["rope_parameters"]["full_attention"], rotary_dim=head_dim, max_position=c["max_position_embeddings"]
        ),
        windows=tuple(c["sliding_window"] if kind == "sliding_attention" else None for kind in types),
        window_attention=narrow,
        window_rope=spec.rope,
        num_shared_kv=c.get("num_kv_shared_layers") or 0,
        wide_shared_kv=bool(c.get("use_double_wide_mlp")),
    )
    if width := c.get("hidden_size_per_layer_input"):
        spec = replace(spec, layer_inputs=LayerInputsSpec(width, c["vocab_size_per_layer_input"]))
    if any(spec.kv_source(n) == n for n in range(spec.num_layers - spec.num_shared_kv, spec.num_layers)):
        raise ModelError("No earlier layer of this gemma4 model has the keys that the last ones attend over.")
    if not c.get("enable_moe_block"):
        return spec
    moe = MoeSpec(
        c["num_experts"],
        c["moe_intermediate_size"],
        GateSpec(c["top_k_experts"], renormalise=True),
        spec.activation,
        own_norms=True,
        expert_scales=True,
        shared=SharedExpertSpec(c["intermediate_size"]),
    )
    return parts.with_experts(spec, moe)


def _gemma4_wide_layers(c: Config, types: Sequence[str]) -> Config:
    """Return what layers without a window have of their own; transformers' classes list it by layer, as numbers or as
    texts of equal length (`05`)."""
    by_layer = {int(number): own for number, own in (c.get("per_layer_config") or {}).items()}
    wide = [number for number, kind in enumerate(types) if kind == "full_attention"]
    found: list[Config] = [by_layer.get(number) or {} for number in wide]
    if any(own != found[0] for own in found):
        raise ModelError("The layers without a window of this gemma4 model differ from each other.")
    return found[0] if found else {}


def _gemma4_obstacle(c: Config) -> str | None:
    """Return the part of a Gemma 4 that our own code does not compute, None if it computes all.

    c: complete, or as a folder has it.
    """
    if c.get("use_bidirectional_attention") == "all":
        return "attention in both directions"
    has_two_widths = c.get("use_double_wide_mlp") and c.get("num_kv_shared_layers")
    return "experts beside dense blocks of two widths" if has_two_widths and c.get("enable_moe_block") else None


def _nemotron_h(c: Config) -> DecoderSpec:
    """Layers of one part each: a Mamba-2 layer, attention without rotation, a dense block or experts."""
    if c["mlp_hidden_act"] != "relu2" or c["mamba_hidden_act"] != "silu":
        activations = f"{c['mlp_hidden_act']!r} and {c['mamba_hidden_act']!r}"
        raise UnsupportedModel(f"Models of type 'nemotron_h' with the activations {activations} are not supported.")
    types, activation = c["layers_block_type"], Activation("relu2")
    unknown = set(types) - {"linear_attention", "full_attention", "mlp", "moe"}
    if unknown or "full_attention" not in types:
        reason = f"layers of type {min(unknown)!r}" if unknown else "no layer of attention"
        raise UnsupportedModel(f"Models of type 'nemotron_h' with {reason} are not supported.")
    recurrent = tuple(kind == "linear_attention" for kind in types)
    mamba = MambaSpec(
        num_heads=c["mamba_num_heads"],
        num_groups=c["n_groups"],
        head_dim=c["mamba_head_dim"],
        state_dim=c["ssm_state_size"],
        conv_width=c["conv_kernel"],
        least_step=float(c["time_step_min"]),
        conv_bias=bool(c.get("use_conv_bias")),
        bias=bool(c.get("use_bias")),
    )
    spec = parts.base(
        {**c, "num_hidden_layers": len(types), "rms_norm_eps": c["layer_norm_epsilon"]},
        rotary_dim=0,
        activation=activation,
        mlp_bias=bool(c.get("mlp_bias")),
        recurrent_layers=recurrent,
        recurrent=mamba if any(recurrent) else None,
        single_parts=tuple("block" if kind in ("mlp", "moe") else "mixer" for kind in types),
    )
    if "moe" not in types:
        return spec
    shared = SharedExpertSpec(c["moe_shared_expert_intermediate_size"], bias=bool(c.get("mlp_bias")))
    moe = replace(
        parts.noaux_moe({**c, "n_shared_experts": 0}, activation), shared=shared, hidden_size=c.get("moe_latent_size")
    )
    return parts.with_experts(spec, moe, lambda index: types[index] == "moe")


def _moeserve_demo(c: Config) -> DecoderSpec:
    """Return a dense model whose neurons are split: the shared expert always runs, chosen experts add unweighted."""
    spec = parts.base(c)
    moe = MoeSpec(
        c["num_local_experts"],
        c["moe_intermediate_size"],
        GateSpec(c["num_experts_per_tok"], score="ones"),
        spec.activation,
        gate_fp32=True,
        gate_bias=True,
        shared=SharedExpertSpec(c["shared_expert_intermediate_size"]) if c["shared_expert_intermediate_size"] else None,
    )
    return parts.with_experts(spec, moe)


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
    "granitemoeshared": _granitemoe,
    "granitemoehybrid": _granitemoehybrid,
    "lfm2_moe": _lfm2_moe,
    "phimoe": _phimoe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "ernie4_5_moe": _ernie4_5_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _inside(_qwen3_5_text),
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_5_moe": _inside(_qwen3_5_moe_text),
    "qwen3_5_moe_text": _qwen3_5_moe_text,
    "gemma4": _inside(_gemma4_text),
    "gemma4_text": _gemma4_text,
    "nemotron_h": _nemotron_h,
    "moeserve_demo": _moeserve_demo,
}
# Types of which our own code computes some models alone; see `is_native`.
_OBSTACLES: dict[str, Callable[[Config], str | None]] = {
    "gemma4": lambda c: _gemma4_obstacle(text if isinstance(text := c.get("text_config"), Mapping) else {}),
    "gemma4_text": _gemma4_obstacle,
}
