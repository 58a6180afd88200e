"""What the branches for single model types are made of: reading common parts of a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kernels.specs import Activation, ActivationKind, GateSpec
from moeserve.models.errors import ModelError, UnsupportedModel
from moeserve.models.rope import parse_rope, yarn_softmax_multiplier
from moeserve.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MoeSpec, QuantizationSpec, SharedExpertSpec

Config = Mapping[str, Any]

_ACTIVATIONS: dict[str, ActivationKind] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def base(c: Config, *, rotary_dim: int | None = None, interleaved: bool = False, **fields: Any) -> DecoderSpec:
    """The plain llama without biases: what a branch does not change stays like this."""
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
        eos_token_ids=_token_ids(c.get("eos_token_id")),
        bos_token_id=c.get("bos_token_id"),
        quantization=_quantization(c.get("quantization_config")),
    )
    return replace(spec, **fields) if fields else spec


def mla(c: Config, *, interleaved: bool) -> DecoderSpec:
    """What `base` is to others, with the latent attention of DeepSeek-V2."""
    spec = base(c, rotary_dim=c["qk_rope_head_dim"], interleaved=interleaved, mlp_bias=bool(c.get("mlp_bias")))
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


def with_attention(spec: DecoderSpec, **fields: Any) -> DecoderSpec:
    assert isinstance(spec.attention, AttentionSpec)
    return replace(spec, attention=replace(spec.attention, **fields))


def with_attention_bias(spec: DecoderSpec, c: Config) -> DecoderSpec:
    """``attention_bias`` is for all four projections."""
    bias = bool(c.get("attention_bias"))
    return with_attention(spec, qkv_bias=bias, out_bias=bias)


def with_windows(spec: DecoderSpec, c: Config) -> DecoderSpec:
    """``sliding_window`` where ``layer_types`` says so, or on all layers without such a list. A window of 0 is none."""
    window, types = c.get("sliding_window") or None, c.get("layer_types")
    if types is None:
        return replace(spec, windows=(window,) * spec.num_layers)
    if len(types) < spec.num_layers:
        raise ModelError(f"The configuration's layer_types has {len(types)} entries for {spec.num_layers} layers.")
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"Layers of type {min(unknown)!r} are not supported.")
    types = types[: spec.num_layers]
    return replace(spec, windows=tuple(window if kind == "sliding_attention" else None for kind in types))


def with_experts(spec: DecoderSpec, moe: MoeSpec, layers: Callable[[int], bool] = lambda index: True) -> DecoderSpec:
    """Experts on the layers for which ``layers`` is true."""
    return replace(spec, moe=moe, sparse_layers=tuple(layers(index) for index in range(spec.num_layers)))


def after_dense(c: Config) -> Callable[[int], bool]:
    """For `with_experts`: all layers but the first few."""
    first = c.get("first_k_dense_replace") or 0
    return lambda index: index >= first


def noaux_moe(c: Config, activation: Activation) -> MoeSpec:
    """Sigmoid scores with a bias for the choice only, the auxiliary-loss-free gate of DeepSeek-V3."""
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
        num_experts(c),
        c["moe_intermediate_size"],
        gate,
        activation,
        gate_fp32=True,
        correction_bias=True,
        shared=shared_expert(c, "n_shared_experts"),
    )


def partial_rotary_dim(c: Config) -> int:
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return int(head_dim * ((c.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0))


def shared_expert(c: Config, count: str, *, bias: bool = False) -> SharedExpertSpec | None:
    """``count`` names the number of shared experts; they are stored as one wide block."""
    number = c.get(count) or 0
    return SharedExpertSpec(number * c["moe_intermediate_size"], bias=bias) if number else None


def num_experts(c: Config) -> int:
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if c.get(name) is not None:
            return int(c[name])
    raise KeyError("num_experts")


def _activation(c: Config) -> Activation:
    name = c.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"The activation {name!r} is not supported.")
    return Activation(_ACTIVATIONS[name])


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _quantization(config: Config | None) -> QuantizationSpec | None:
    if not config:
        return None
    method = config.get("quant_method")
    if method == "mxfp4":
        return QuantizationSpec("mxfp4", (1, 32))
    block = config.get("weight_block_size")
    if method == "fp8" and block:
        return QuantizationSpec("fp8", (int(block[0]), int(block[1])))
    if method == "fp8":
        raise UnsupportedModel("FP8 weights without block scales are not supported.")
    raise UnsupportedModel(f"Weights quantised with {method!r} are not supported.")
