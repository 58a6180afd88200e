"""Parts of a DecoderSpec that several families of models share, read from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kernels.specs import Activation, ActivationKind, GateSpec
from moeserve.model.generation import token_ids
from moeserve.model.packed.config import quantization_spec
from moeserve.model.rope import parse_rope, yarn_softmax_multiplier
from moeserve.model.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    IndexerSpec,
    MambaSpec,
    MlaSpec,
    ModelError,
    MoeSpec,
    SharedExpertSpec,
    ShortConvSpec,
    UnsupportedModel,
)

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


def mla(c: Config, *, interleaved: bool) -> DecoderSpec:
    """Return `base` with the latent attention of DeepSeek-V2."""
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


def with_indexer(spec: DecoderSpec, c: Config, *, interleaved: bool) -> DecoderSpec:
    """Have the tokens of a latent attention attend to the positions that an indexer chooses."""
    assert isinstance(spec.attention, MlaSpec)
    if set(c["layer_types"]) != {"indexed_attention"} or spec.attention.q_lora_rank is None:
        raise UnsupportedModel(f"Models of type {c['model_type']!r} with layers without an indexer are not supported.")
    indexer = IndexerSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"], interleaved)
    if indexer.head_dim < spec.attention.rope_dim:
        raise ModelError(f"An indexer's heads of {indexer.head_dim} cannot rotate {spec.attention.rope_dim} channels.")
    return replace(spec, attention=replace(spec.attention, indexer=indexer))


def hybrid(c: Config, *, by_key_head: bool) -> DecoderSpec:
    """Return a dense model of gated delta nets, with gated attention in some layers."""
    spec = base(c, rotary_dim=partial_rotary_dim(c), zero_centred_norms=True)
    spec = with_attention(with_attention_bias(spec, c), qk_norm="head", gated=True)
    net = DeltaNetSpec(
        num_key_heads=c["linear_num_key_heads"],
        num_value_heads=c["linear_num_value_heads"],
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        conv_width=c["linear_conv_kernel_dim"],
        by_key_head=by_key_head,
    )
    return with_recurrent(spec, c["layer_types"], "linear_attention", net)


def with_recurrent(
    spec: DecoderSpec, types: Sequence[str], special: str, recurrent: DeltaNetSpec | MambaSpec | ShortConvSpec
) -> DecoderSpec:
    """Replace attention in the layers whose type is ``special``."""
    types = layer_types(types, spec, special)
    if "full_attention" not in types:
        raise UnsupportedModel("Models without a layer of attention are not supported.")
    layers = tuple(kind == special for kind in types)
    return replace(spec, recurrent_layers=layers, recurrent=recurrent if any(layers) else None)


def with_attention(spec: DecoderSpec, **fields: Any) -> DecoderSpec:
    assert isinstance(spec.attention, AttentionSpec)
    return replace(spec, attention=replace(spec.attention, **fields))


def with_attention_bias(spec: DecoderSpec, c: Config) -> DecoderSpec:
    """Put the bias of ``attention_bias`` on all four projections."""
    bias = bool(c.get("attention_bias"))
    return with_attention(spec, qkv_bias=bias, out_bias=bias)


def with_windows(spec: DecoderSpec, c: Config) -> DecoderSpec:
    """Set ``sliding_window`` on the layers that ``layer_types`` names, or on all without that list. 0 is no window."""
    window, types = c.get("sliding_window") or None, c.get("layer_types")
    if types is None:
        return replace(spec, windows=(window,) * spec.num_layers)
    types = layer_types(types, spec, "sliding_attention")
    return replace(spec, windows=tuple(window if kind == "sliding_attention" else None for kind in types))


def layer_types(types: Sequence[str], spec: DecoderSpec, special: str) -> Sequence[str]:
    """Return the ``layer_types`` of the spec's layers, each ``full_attention`` or the special one."""
    if len(types) < spec.num_layers:
        raise ModelError(f"The configuration's layer_types has {len(types)} entries for {spec.num_layers} layers.")
    types = types[: spec.num_layers]
    unknown = set(types) - {"full_attention", special}
    if unknown:
        raise UnsupportedModel(f"Layers of type {min(unknown)!r} are not supported.")
    return types


def with_experts(spec: DecoderSpec, moe: MoeSpec, layers: Callable[[int], bool] = lambda index: True) -> DecoderSpec:
    """Put experts on the layers for which ``layers(index)`` is true."""
    return replace(spec, moe=moe, sparse_layers=tuple(layers(index) for index in range(spec.num_layers)))


def after_dense(c: Config) -> Callable[[int], bool]:
    """Return the ``layers`` of `with_experts` that leaves out the first ``first_k_dense_replace``."""
    first = c.get("first_k_dense_replace") or 0
    return lambda index: index >= first


def noaux_moe(c: Config, activation: Activation) -> MoeSpec:
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
    """Return the shared experts as one wide block, as they are stored. count: the key that gives their number."""
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
