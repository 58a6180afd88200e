"""From the Hugging Face configuration of a model folder to a DecoderSpec.

To add a model type: write one function here, add one line to ``_BUILDERS`` and one parity test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from kernels.specs import Activation, ActivationKind, GateSpec
from moeserve.model.config_bounds import check_numbers, with_special_floats
from moeserve.model.files import read_json
from moeserve.model.generation import token_ids
from moeserve.model.packed.config import described_quantization, quantization_spec
from moeserve.model.rope import parse_rope, rope_frequencies, yarn_softmax_multiplier
from moeserve.model.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    IndexerSpec,
    LayerInputsSpec,
    MambaSpec,
    MlaSpec,
    ModelError,
    MoeSpec,
    SharedExpertSpec,
    ShortConvSpec,
    UnsupportedModel,
)

Config = Mapping[str, Any]

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
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"There is no config.json in {directory}.")
    raw = read_json(path)
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
        reason = " ".join(str(error).split())
        raise ModelError(f"{path} is not a valid {model_type} configuration: {reason.removesuffix('.')}.") from error
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
    return _with_attention_bias(_base(c, mlp_bias=bool(c.get("mlp_bias"))), c)


def _mistral(c: Config) -> DecoderSpec:
    return _with_windows(_base(c), c)


def _qwen2(c: Config) -> DecoderSpec:
    return _with_attention(_with_windows(_base(c), c), qkv_bias=True)


def _qwen3(c: Config) -> DecoderSpec:
    return _with_attention(_with_windows(_with_attention_bias(_base(c), c), c), qk_norm="head")


def _mixtral(c: Config) -> DecoderSpec:
    spec = _with_windows(_base(c), c)
    gate = GateSpec(c["num_experts_per_tok"], renormalise=True)
    return _with_experts(spec, MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation))


def _qwen_layers(c: Config) -> Callable[[int], bool]:
    step, dense = c.get("decoder_sparse_step") or 1, frozenset(c.get("mlp_only_layers") or ())
    return lambda index: (index + 1) % step == 0 and index not in dense


def _qwen_moe(c: Config, activation: Activation, renormalise: bool) -> MoeSpec:
    """Return experts beside a shared expert that a gate of its own scales."""
    return MoeSpec(
        _num_experts(c),
        c["moe_intermediate_size"],
        GateSpec(c["num_experts_per_tok"], renormalise=renormalise),
        activation,
        shared=SharedExpertSpec(c["shared_expert_intermediate_size"], gated=True),
    )


def _qwen2_moe(c: Config) -> DecoderSpec:
    spec = _with_attention(_with_windows(_base(c), c), qkv_bias=bool(c.get("qkv_bias", True)))
    return _with_experts(spec, _qwen_moe(c, spec.activation, bool(c.get("norm_topk_prob"))), _qwen_layers(c))


def _qwen3_moe(c: Config) -> DecoderSpec:
    spec = _with_attention(_with_windows(_with_attention_bias(_base(c), c), c), qk_norm="head")
    gate = GateSpec(c["num_experts_per_tok"], renormalise=bool(c.get("norm_topk_prob")))
    moe = MoeSpec(_num_experts(c), c["moe_intermediate_size"], gate, spec.activation)
    return _with_experts(spec, moe, _qwen_layers(c))


def _olmoe(c: Config) -> DecoderSpec:
    spec = _with_attention(_with_attention_bias(_base(c), c), qk_norm="flat", clip_qkv=c.get("clip_qkv"))
    gate = GateSpec(c["num_experts_per_tok"], renormalise=bool(c.get("norm_topk_prob")))
    return _with_experts(spec, MoeSpec(_num_experts(c), c["intermediate_size"], gate, spec.activation))


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
    return _with_experts(spec, moe)


def _granite(c: Config, *, rotary_dim: int | None = None) -> DecoderSpec:
    spec = _base(
        c,
        rotary_dim=rotary_dim,
        embedding_multiplier=float(c["embedding_multiplier"]),
        residual_multiplier=float(c["residual_multiplier"]),
        logit_divisor=float(c["logits_scaling"]),
        fused_mlps=True,
    )
    return _with_attention(_with_attention_bias(spec, c), scale=float(c["attention_multiplier"]))


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
    spec = _with_recurrent(spec, c["layer_types"], "linear_attention", mamba)
    return _with_granite_experts(spec, c) if c["num_local_experts"] else spec


def _lfm2_moe(c: Config) -> DecoderSpec:
    """Short convolutions and attention, each with a dense block or experts."""
    spec = _with_attention(_base({**c, "hidden_act": "silu", "rms_norm_eps": c["norm_eps"]}), qk_norm="head")
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
    spec = _with_recurrent(spec, c["layer_types"], "conv", conv)
    return _with_experts(spec, moe, lambda index: index >= first)


def _phimoe(c: Config) -> DecoderSpec:
    spec = _base(c, norm="layer", lm_head_bias=bool(c.get("lm_head_bias")))
    spec = _with_windows(_with_attention_bias(spec, c), c)
    # transformers' phimoe rotates by the short factors at any length; only the magnitude changes.
    spec = replace(spec, rope=replace(spec.rope, long_factor=spec.rope.short_factor))
    gate = GateSpec(c["num_experts_per_tok"], score="sparsemixer", jitter=float(c["router_jitter_noise"]))
    return _with_experts(spec, MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation))


def _gpt_oss(c: Config) -> DecoderSpec:
    spec = _with_attention(_with_windows(_with_attention_bias(_base(c), c), c), sinks=True)
    moe = MoeSpec(
        c["num_local_experts"],
        c["intermediate_size"],
        GateSpec(c["num_experts_per_tok"], softmax_after_top_k=True),
        Activation("swigluoai", alpha=float(c["swiglu_alpha"]), limit=float(c["swiglu_limit"])),
        gate_bias=True,
        expert_bias=True,
        transposed_experts=True,
    )
    return _with_experts(spec, moe)


def _glm4_moe(c: Config) -> DecoderSpec:
    spec = _base(c, rotary_dim=_partial_rotary_dim(c))
    spec = _with_attention(
        spec, qkv_bias=bool(c.get("attention_bias")), qk_norm="head" if c.get("use_qk_norm") else "none"
    )
    return _with_experts(spec, _noaux_moe(c, spec.activation), _after_dense(c))


def _dots1(c: Config) -> DecoderSpec:
    spec = _with_attention(_with_windows(_with_attention_bias(_base(c), c), c), qk_norm="head")
    return _with_experts(spec, _noaux_moe(c, spec.activation), _after_dense(c))


def _minimax_m2(c: Config) -> DecoderSpec:
    spec = _with_attention(_base(c, rotary_dim=_partial_rotary_dim(c)), qk_norm="flat")
    gate = GateSpec(c["num_experts_per_tok"], score="sigmoid", renormalise=True)
    moe = MoeSpec(c["num_local_experts"], c["intermediate_size"], gate, spec.activation, correction_bias=True)
    return _with_experts(spec, moe)


def _ernie4_5_moe(c: Config) -> DecoderSpec:
    bias = bool(c.get("use_bias"))
    spec = _base(c, interleaved=True, mlp_bias=bias, lm_head_bias=bias)
    spec = replace(_with_attention(spec, qkv_bias=bias, out_bias=bias), rope=replace(spec.rope, keep_fp32=True))
    moe = MoeSpec(
        c["moe_num_experts"],
        c["moe_intermediate_size"],
        GateSpec(c["moe_k"], renormalise=True, norm_min=float(c["moe_norm_min"])),
        spec.activation,
        gate_fp32=True,
        correction_bias=True,
        shared=_shared_expert(c, "moe_num_shared_experts", bias=bias),
    )
    first, last = c["moe_layer_start_index"], c["moe_layer_end_index"]
    last = spec.num_layers - 1 if last < 0 else last
    step = c.get("moe_layer_interval") or 1
    return _with_experts(spec, moe, lambda index: first <= index <= last and (index + 1) % step == 0)


def _deepseek_v2(c: Config) -> DecoderSpec:
    spec = _mla(c, interleaved=True)
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
    shared = _shared_expert(c, "n_shared_experts", bias=spec.mlp_bias)
    moe = MoeSpec(_num_experts(c), c["moe_intermediate_size"], gate, spec.activation, gate_fp32=True, shared=shared)
    return _with_experts(spec, moe, _after_dense(c))


def _deepseek_v3(c: Config) -> DecoderSpec:
    spec = _mla(c, interleaved=bool(c.get("rope_interleave", True)))
    spec = replace(spec, mlp_bias=False)
    return _with_experts(spec, _noaux_moe(c, spec.activation), _after_dense(c))


def _glm4_moe_lite(c: Config) -> DecoderSpec:
    """DeepSeek-V3 with a list of the layers that have experts."""
    types = c["mlp_layer_types"]
    return replace(_deepseek_v3(c), sparse_layers=tuple(types[n] == "sparse" for n in range(c["num_hidden_layers"])))


def _deepseek_v32(c: Config) -> DecoderSpec:
    return _with_indexer(_glm4_moe_lite(c), c, interleaved=False)


def _glm_moe_dsa(c: Config) -> DecoderSpec:
    spec, types = _with_indexer(_glm4_moe_lite(c), c, interleaved=True), c["indexer_types"]
    if len(types) < spec.num_layers or set(types) - {"full", "shared"} or types[0] == "shared":
        raise ModelError(
            "The configuration's indexer_types do not say how each layer of attention finds its positions."
        )
    return replace(spec, shared_choices=tuple(kind == "shared" for kind in types[: spec.num_layers]))


def _qwen3_next(c: Config) -> DecoderSpec:
    spec = _hybrid(c, by_key_head=True)
    return _with_experts(spec, _qwen_moe(c, spec.activation, bool(c.get("norm_topk_prob"))), _qwen_layers(c))


def _qwen3_5_text(c: Config) -> DecoderSpec:
    return _hybrid(c, by_key_head=False)


def _qwen3_5_moe_text(c: Config) -> DecoderSpec:
    # No layer is without experts.
    spec = _hybrid({**c, "intermediate_size": c["moe_intermediate_size"]}, by_key_head=False)
    return _with_experts(spec, _qwen_moe(c, spec.activation, True))


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
    spec = _base(
        {**base, "rope_parameters": c["rope_parameters"]["sliding_attention"]},
        added_norms=True,
        layer_scales=True,
        embedding_multiplier=c["hidden_size"] ** 0.5,
        logit_softcap=None if c.get("final_logit_softcapping") is None else float(c["final_logit_softcapping"]),
    )
    spec = _with_attention(_with_attention_bias(spec, c), scale=1.0, qk_norm="head", value_norm=True)
    narrow, types = spec.attention, _layer_types(c["layer_types"], spec, "sliding_attention")
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
    return _with_experts(spec, moe)


def _gemma4_wide_layers(c: Config, types: Sequence[str]) -> Config:
    """Return what layers without a window have of their own; transformers' classes list it by layer."""
    by_layer = c.get("per_layer_config") or {}
    wide = [number for number, kind in enumerate(types) if kind == "full_attention"]
    found: list[Config] = [by_layer.get(number) or by_layer.get(str(number)) or {} for number in wide]
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
    spec = _base(
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
        _noaux_moe({**c, "n_shared_experts": 0}, activation), shared=shared, hidden_size=c.get("moe_latent_size")
    )
    return _with_experts(spec, moe, lambda index: types[index] == "moe")


def _moeserve_demo(c: Config) -> DecoderSpec:
    """Return a dense model whose neurons are split: the shared expert always runs, chosen experts add unweighted."""
    spec = _base(c)
    moe = MoeSpec(
        c["num_local_experts"],
        c["moe_intermediate_size"],
        GateSpec(c["num_experts_per_tok"], score="ones"),
        spec.activation,
        gate_fp32=True,
        gate_bias=True,
        shared=SharedExpertSpec(c["shared_expert_intermediate_size"]) if c["shared_expert_intermediate_size"] else None,
    )
    return _with_experts(spec, moe)


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


# Parts that several model types share.

_ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _base(c: Config, *, rotary_dim: int | None = None, interleaved: bool = False, **fields: Any) -> DecoderSpec:
    """Return a plain llama without biases, with ``fields`` of the spec replaced."""
    heads, num_layers = c["num_attention_heads"], c["num_hidden_layers"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    attention = AttentionSpec(heads, c.get("num_key_value_heads") or heads, head_dim, head_dim**-0.5)
    rope = parse_rope(
        c.get("rope_parameters") or {},
        rotary_dim=head_dim if rotary_dim is None else rotary_dim,
        max_position=c["max_position_embeddings"],
        interleaved=interleaved,
    )
    spec = DecoderSpec(
        model_type=c["model_type"],
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        max_position=c["max_position_embeddings"],
        attention=attention,
        rope=rope,
        sparse_layers=(False,) * num_layers,
        windows=(None,) * num_layers,
        activation=_activation(c),
        norm_eps=c["rms_norm_eps"],
        tie_embeddings=bool(c.get("tie_word_embeddings")),
        eos_token_ids=token_ids(c.get("eos_token_id")),
        bos_token_id=c.get("bos_token_id"),
        quantization=quantization_spec(c.get("quantization_config")),
    )
    return replace(spec, **fields) if fields else spec


def _mla(c: Config, *, interleaved: bool) -> DecoderSpec:
    """Return `_base` with the latent attention of DeepSeek-V2."""
    spec = _base(c, rotary_dim=c["qk_rope_head_dim"], interleaved=interleaved, mlp_bias=bool(c.get("mlp_bias")))
    nope, rope = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    return replace(
        spec,
        attention=MlaSpec(
            num_heads=c["num_attention_heads"],
            q_lora_rank=c.get("q_lora_rank"),
            kv_lora_rank=c["kv_lora_rank"],
            nope_dim=nope,
            rope_dim=rope,
            value_dim=c["v_head_dim"],
            scale=(nope + rope) ** -0.5 * yarn_softmax_multiplier(spec.rope),
            bias=bool(c.get("attention_bias")),
        ),
    )


def _with_indexer(spec: DecoderSpec, c: Config, *, interleaved: bool) -> DecoderSpec:
    """Have the tokens of a latent attention attend to the positions that an indexer chooses."""
    assert isinstance(spec.attention, MlaSpec)
    if set(c["layer_types"]) != {"indexed_attention"} or spec.attention.q_lora_rank is None:
        raise UnsupportedModel(f"Models of type {c['model_type']!r} with layers without an indexer are not supported.")
    indexer = IndexerSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"], interleaved)
    if indexer.head_dim < spec.attention.rope_dim:
        raise ModelError(f"An indexer's heads of {indexer.head_dim} cannot rotate {spec.attention.rope_dim} channels.")
    return replace(spec, attention=replace(spec.attention, indexer=indexer))


def _hybrid(c: Config, *, by_key_head: bool) -> DecoderSpec:
    """Return a dense model of gated delta nets, with gated attention in some layers."""
    spec = _base(c, rotary_dim=_partial_rotary_dim(c), zero_centred_norms=True)
    spec = _with_attention(_with_attention_bias(spec, c), qk_norm="head", gated=True)
    net = DeltaNetSpec(
        num_key_heads=c["linear_num_key_heads"],
        num_value_heads=c["linear_num_value_heads"],
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        conv_width=c["linear_conv_kernel_dim"],
        by_key_head=by_key_head,
    )
    return _with_recurrent(spec, c["layer_types"], "linear_attention", net)


def _with_recurrent(
    spec: DecoderSpec, types: Sequence[str], special: str, recurrent: DeltaNetSpec | MambaSpec | ShortConvSpec
) -> DecoderSpec:
    """Replace attention in the layers whose type is ``special``."""
    types = _layer_types(types, spec, special)
    if "full_attention" not in types:
        raise UnsupportedModel("Models without a layer of attention are not supported.")
    layers = tuple(kind == special for kind in types)
    return replace(spec, recurrent_layers=layers, recurrent=recurrent if any(layers) else None)


def _with_attention(spec: DecoderSpec, **fields: Any) -> DecoderSpec:
    assert isinstance(spec.attention, AttentionSpec)
    return replace(spec, attention=replace(spec.attention, **fields))


def _with_attention_bias(spec: DecoderSpec, c: Config) -> DecoderSpec:
    """Put the bias of ``attention_bias`` on all four projections."""
    bias = bool(c.get("attention_bias"))
    return _with_attention(spec, qkv_bias=bias, out_bias=bias)


def _with_windows(spec: DecoderSpec, c: Config) -> DecoderSpec:
    """Set ``sliding_window`` on the layers that ``layer_types`` names, or on all without that list. 0 is no window."""
    window, types = c.get("sliding_window") or None, c.get("layer_types")
    if types is None:
        return replace(spec, windows=(window,) * spec.num_layers)
    types = _layer_types(types, spec, "sliding_attention")
    return replace(spec, windows=tuple(window if kind == "sliding_attention" else None for kind in types))


def _layer_types(types: Sequence[str], spec: DecoderSpec, special: str) -> Sequence[str]:
    """Return the ``layer_types`` of the spec's layers, each ``full_attention`` or the special one."""
    if len(types) < spec.num_layers:
        raise ModelError(f"The configuration's layer_types has {len(types)} entries for {spec.num_layers} layers.")
    types = types[: spec.num_layers]
    unknown = set(types) - {"full_attention", special}
    if unknown:
        raise UnsupportedModel(f"Layers of type {min(unknown)!r} are not supported.")
    return types


def _with_experts(spec: DecoderSpec, moe: MoeSpec, layers: Callable[[int], bool] = lambda index: True) -> DecoderSpec:
    """Put experts on the layers for which ``layers(index)`` is true."""
    return replace(spec, moe=moe, sparse_layers=tuple(layers(index) for index in range(spec.num_layers)))


def _after_dense(c: Config) -> Callable[[int], bool]:
    """Return the ``layers`` of `_with_experts` that leaves out the first ``first_k_dense_replace``."""
    first = c.get("first_k_dense_replace") or 0
    return lambda index: index >= first


def _noaux_moe(c: Config, activation: Activation) -> MoeSpec:
    """Return the auxiliary-loss-free gate of DeepSeek-V3: sigmoid scores, and a bias that affects the choice only."""
    gate = GateSpec(
        c["num_experts_per_tok"],
        score="sigmoid",
        renormalise=bool(c.get("norm_topk_prob", True)),
        norm_min=1e-20,
        scale=float(c.get("routed_scaling_factor") or 1.0),
        num_groups=c.get("n_group") or 1,
        top_groups=c.get("topk_group") or 1,
    )
    return MoeSpec(
        _num_experts(c),
        c["moe_intermediate_size"],
        gate,
        activation,
        gate_fp32=True,
        correction_bias=True,
        shared=_shared_expert(c, "n_shared_experts"),
    )


def _partial_rotary_dim(c: Config) -> int:
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return int(head_dim * ((c.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0))


def _shared_expert(c: Config, count: str, *, bias: bool = False) -> SharedExpertSpec | None:
    """Return the shared experts as one wide block, as they are stored. count: the key that gives their number."""
    number = c.get(count) or 0
    return SharedExpertSpec(number * c["moe_intermediate_size"], bias=bias) if number else None


def _num_experts(c: Config) -> int:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if c.get(name) is not None:
            return int(c[name])
    raise KeyError("num_experts")


def _activation(c: Config) -> Activation:
    name = c.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"The activation {name!r} is not supported.")
    return Activation(_ACTIVATIONS[name])
