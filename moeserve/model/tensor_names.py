"""Names and shapes of the tensors that a decoder needs.

Names are relative to the decoder, ``layers.0.mlp.gate.weight``; a checkpoint usually puts ``model.`` in front. Where
published checkpoints differ in a name, all forms are candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.model.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    IndexerSpec,
    MambaSpec,
    MlaSpec,
    MoeSpec,
    MtpSpec,
    ShortConvSpec,
)

_MOE_PREFIXES = ("mlp", "block_sparse_moe", "mixer", "feed_forward")
_PROJECTIONS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
# The names of MTP layers in published checkpoints, of DeepSeek-V3 and GLM-4.5, Qwen3-Next and Qwen3.5, and Ernie 4.5.
# {} stands for the number of layers.
MTP_LAYERS = (
    MtpSpec("layers.{}", "layers.{}.enorm", "layers.{}.hnorm", "layers.{}.eh_proj", "layers.{}.shared_head.norm"),
    MtpSpec("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", True),
    MtpSpec("mtp_block.0", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", None),
)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A needed tensor: the names it may have, and its shape. The stored shape may differ by dimensions of 1."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


Tensors = dict[str, TensorRef]


def outer_tensors(spec: DecoderSpec) -> Tensors:
    """Return the tensors outside the layers. A tied output projection is the embedding again."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    embedding = ("embed_tokens.weight", "embeddings.weight")
    tensors = {
        "embedding": TensorRef(embedding, (vocab, hidden)),
        "lm_head": TensorRef(embedding if spec.tie_embeddings else ("lm_head.weight",), (vocab, hidden)),
    }
    if spec.lm_head_bias:
        tensors["lm_head.bias"] = TensorRef(("lm_head.bias",), (vocab,))
    if (inputs := spec.layer_inputs) is not None:
        rows = spec.num_layers * inputs.width
        tensors["layer_embedding"] = TensorRef(("embed_tokens_per_layer.weight",), (inputs.vocab_size, rows))
        tensors |= linear("layer_projection", ("per_layer_model_projection",), rows, hidden, False)
        tensors["layer_norm"] = TensorRef(("per_layer_projection_norm.weight",), (inputs.width,))
    return tensors | norm(spec, "norm", "norm", "norm_f", "embedding_norm")


def layer_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the tensors of one layer except its experts."""
    prefix = f"layers.{layer}"
    tensors = norm(spec, "input_norm", f"{prefix}.input_layernorm", f"{prefix}.norm", f"{prefix}.operator_norm")
    if spec.has("mixer", layer):
        tensors |= _mixer(spec, layer, prefix)
    if not spec.has("block", layer):
        return tensors
    if spec.added_norms:
        tensors |= norm(spec, "after_mixer", f"{prefix}.post_attention_layernorm")
        tensors |= norm(spec, "post_norm", f"{prefix}.pre_feedforward_layernorm")
        tensors |= norm(spec, "after_block", f"{prefix}.post_feedforward_layernorm")
    elif not spec.single_parts:
        tensors |= norm(spec, "post_norm", f"{prefix}.post_attention_layernorm", f"{prefix}.ffn_norm")
    if (inputs := spec.layer_inputs) is not None:
        tensors |= linear("input_gate", (f"{prefix}.per_layer_input_gate",), inputs.width, spec.hidden_size, False)
        tensors |= linear("input_out", (f"{prefix}.per_layer_projection",), spec.hidden_size, inputs.width, False)
        tensors |= norm(spec, "after_input", f"{prefix}.post_per_layer_input_norm")
    if spec.layer_scales:
        tensors["scale"] = TensorRef((f"{prefix}.layer_scalar",), (1,))
    if spec.moe is not None and spec.sparse_layers[layer]:
        return tensors | _moe(spec, spec.moe, prefix) | _moe_norms(spec, spec.moe, prefix)
    if spec.fused_mlps:
        return tensors | _fused_mlp("", prefix, spec.hidden_size, spec.dense_width(layer))
    names = tuple(f"{prefix}.{block}" for block in ("mlp", "mixer", "feed_forward"))
    return tensors | _mlp("", names, spec.hidden_size, spec.dense_width(layer), spec.mlp_bias, spec.activation.is_gated)


def _mixer(spec: DecoderSpec, layer: int, prefix: str) -> Tensors:
    attention, recurrent, hidden = spec.attention_of(layer), spec.recurrent, spec.hidden_size
    if recurrent is not None and spec.is_recurrent(layer):
        if isinstance(recurrent, MambaSpec):
            return _mamba(recurrent, hidden, (f"{prefix}.mixer", f"{prefix}.mamba"))
        if isinstance(recurrent, ShortConvSpec):
            return _short_conv(recurrent, hidden, f"{prefix}.conv")
        return _delta_net(recurrent, hidden, f"{prefix}.linear_attn")
    if isinstance(attention, MlaSpec):
        return _mla(attention, hidden, f"{prefix}.self_attn")
    tensors = _gqa(attention, hidden, (f"{prefix}.self_attn", f"{prefix}.mixer"))
    if spec.kv_source(layer) == layer:
        return tensors
    return {key: ref for key, ref in tensors.items() if key.partition(".")[0] in ("q", "o", "q_norm")}


def linear(key: str, names: tuple[str, ...], rows: int, columns: int, bias: bool) -> Tensors:
    tensors = {key: TensorRef(tuple(f"{name}.weight" for name in names), (rows, columns))}
    if bias:
        tensors[f"{key}.bias"] = TensorRef(tuple(f"{name}.bias" for name in names), (rows,))
    return tensors


def norm(spec: DecoderSpec, key: str, *names: str) -> Tensors:
    tensors = {key: TensorRef(tuple(f"{name}.weight" for name in names), (spec.hidden_size,))}
    if spec.norm == "layer":
        tensors[f"{key}.bias"] = TensorRef(tuple(f"{name}.bias" for name in names), (spec.hidden_size,))
    return tensors


def _gqa(attention: AttentionSpec, hidden: int, prefixes: tuple[str, ...]) -> Tensors:
    def named(name: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for prefix in prefixes)

    q_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    tensors: Tensors = {}
    of_values = "k_proj" if attention.keys_are_values else "v_proj"
    parts = (("q", "q_proj", q_size * (1 + attention.gated)), ("k", "k_proj", kv_size), ("v", of_values, kv_size))
    for key, name, rows in parts:
        tensors |= linear(key, named(name), rows, hidden, attention.qkv_bias)
    tensors |= linear("o", named("o_proj") + named("out_proj"), hidden, q_size, attention.out_bias)
    if attention.qk_norm != "none":
        flat = attention.qk_norm == "flat"
        for key, rows in (("q", q_size), ("k", kv_size)):
            shape = (rows if flat else attention.head_dim,)
            names = named(f"{key}_norm.weight") + named(f"{key}_layernorm.weight")
            tensors[f"{key}_norm"] = TensorRef(names, shape)
    if attention.sinks:
        tensors["sinks"] = TensorRef(named("sinks"), (attention.num_heads,))
    return tensors


def _mla(mla: MlaSpec, hidden: int, prefix: str) -> Tensors:
    q_size = mla.num_heads * (mla.nope_dim + mla.rope_dim)
    latent, rank = mla.kv_lora_rank, mla.q_lora_rank
    if rank is None:
        tensors = linear("q", (f"{prefix}.q_proj",), q_size, hidden, False)
    else:
        tensors = linear("q_a", (f"{prefix}.q_a_proj",), rank, hidden, mla.bias)
        tensors["q_norm"] = TensorRef((f"{prefix}.q_a_layernorm.weight",), (rank,))
        tensors |= linear("q_b", (f"{prefix}.q_b_proj",), q_size, rank, False)
    tensors |= linear("kv_a", (f"{prefix}.kv_a_proj_with_mqa",), latent + mla.rope_dim, hidden, mla.bias)
    tensors["kv_norm"] = TensorRef((f"{prefix}.kv_a_layernorm.weight",), (latent,))
    up_size = mla.num_heads * (mla.nope_dim + mla.value_dim)
    tensors |= linear("kv_b", (f"{prefix}.kv_b_proj",), up_size, latent, False)
    if mla.indexer is not None and rank is not None and not mla.indexer.is_shared:
        tensors |= _indexer(mla.indexer, hidden, rank, f"{prefix}.indexer")
    return tensors | linear("o", (f"{prefix}.o_proj",), hidden, mla.num_heads * mla.value_dim, mla.bias)


def _indexer(indexer: IndexerSpec, hidden: int, rank: int, prefix: str) -> Tensors:
    heads, dim = indexer.num_heads, indexer.head_dim
    tensors = linear("index_q", (f"{prefix}.wq_b",), heads * dim, rank, False)
    tensors |= linear("index_k", (f"{prefix}.wk",), dim, hidden, False)
    tensors |= linear("index_weights", (f"{prefix}.weights_proj",), heads, hidden, False)
    for end in ("weight", "bias"):
        key = "index_norm" if end == "weight" else "index_norm.bias"
        tensors[key] = TensorRef((f"{prefix}.k_norm.{end}",), (dim,))
    return tensors


def _delta_net(net: DeltaNetSpec, hidden: int, prefix: str) -> Tensors:
    parts = {"qkvz": net.conv_channels + net.value_channels, "ba": 2 * net.num_value_heads}
    if not net.by_key_head:
        heads = net.num_value_heads
        parts = {"qkv": net.conv_channels, "z": net.value_channels, "b": heads, "a": heads}
    tensors: Tensors = {}
    for name, rows in parts.items():
        tensors |= linear(name, (f"{prefix}.in_proj_{name}",), rows, hidden, False)
    tensors |= linear("out", (f"{prefix}.out_proj",), hidden, net.value_channels, False)
    tensors["conv"] = TensorRef((f"{prefix}.conv1d.weight",), (net.conv_channels, net.conv_width))
    for key, name in (("decay", "A_log"), ("step_bias", "dt_bias")):
        tensors[key] = TensorRef((f"{prefix}.{name}",), (net.num_value_heads,))
    tensors["delta_norm"] = TensorRef((f"{prefix}.norm.weight",), (net.value_dim,))
    return tensors


def _mamba(mamba: MambaSpec, hidden: int, prefixes: tuple[str, ...]) -> Tensors:
    def named(name: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for prefix in prefixes)

    rows, heads = mamba.channels + mamba.conv_channels + mamba.num_heads, mamba.num_heads
    tensors = linear("projections", named("in_proj"), rows, hidden, mamba.bias)
    tensors |= linear("out", named("out_proj"), hidden, mamba.channels, mamba.bias)
    tensors["conv"] = TensorRef(named("conv1d.weight"), (mamba.conv_channels, mamba.conv_width))
    if mamba.conv_bias:
        tensors["conv.bias"] = TensorRef(named("conv1d.bias"), (mamba.conv_channels,))
    for key, name in (("decay", "A_log"), ("step_bias", "dt_bias"), ("skip", "D")):
        tensors[key] = TensorRef(named(name), (heads,))
    tensors["gated_norm"] = TensorRef(named("norm.weight"), (mamba.channels,))
    return tensors


def _short_conv(conv: ShortConvSpec, hidden: int, prefix: str) -> Tensors:
    tensors = linear("projections", (f"{prefix}.in_proj",), 3 * conv.channels, hidden, conv.bias)
    tensors |= linear("out", (f"{prefix}.out_proj",), hidden, conv.channels, conv.bias)
    tensors["conv"] = TensorRef((f"{prefix}.conv.weight",), (conv.channels, conv.width))
    if conv.bias:
        tensors["conv.bias"] = TensorRef((f"{prefix}.conv.bias",), (conv.channels,))
    return tensors


def _mlp(key: str, prefixes: tuple[str, ...], hidden: int, width: int, bias: bool, is_gated: bool = True) -> Tensors:
    tensors: Tensors = {}
    parts = (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width))
    for part, rows, columns in parts if is_gated else parts[1:]:
        names = tuple(f"{prefix}.{form}" for prefix in prefixes for form in _PROJECTIONS[part])
        tensors |= linear(f"{key}{part}", names, rows, columns, bias)
    return tensors


def _fused_mlp(key: str, prefix: str, hidden: int, width: int) -> Tensors:
    tensors = linear(f"{key}gate_up", (f"{prefix}.shared_mlp.input_linear",), 2 * width, hidden, False)
    return tensors | linear(f"{key}down", (f"{prefix}.shared_mlp.output_linear",), hidden, width, False)


def _moe(spec: DecoderSpec, moe: MoeSpec, prefix: str) -> Tensors:
    blocks, hidden = _moe_blocks(prefix), spec.hidden_size

    def under(*suffixes: str) -> tuple[str, ...]:
        return tuple(f"{block}.{suffix}" for block in blocks for suffix in suffixes)

    tensors = linear(
        "moe_gate", under("gate", "router", "router.layer", "router.proj"), moe.num_experts, hidden, moe.gate_bias
    )
    if moe.correction_bias:
        places = ("gate.", "", "moe_statics.", "gate.moe_statics.")
        names = under(*(f"{place}e_score_correction_bias" for place in places), "expert_bias")
        tensors["correction_bias"] = TensorRef(names, (moe.num_experts,))
    if moe.hidden_size is not None:
        sizes = moe.hidden_size, hidden
        tensors |= linear("latent_down", under("fc1_latent_proj"), *sizes, spec.mlp_bias)
        tensors |= linear("latent_up", under("fc2_latent_proj"), *sizes[::-1], spec.mlp_bias)
    if moe.expert_scales:
        tensors["expert_scales"] = TensorRef((f"{prefix}.router.per_expert_scale",), (moe.num_experts,))
    if moe.shared is not None and spec.fused_mlps:
        tensors |= _fused_mlp("shared.", prefix, hidden, moe.shared.intermediate_size)
    elif moe.shared is not None:
        names = (f"{prefix}.mlp",) if moe.own_norms else under("shared_experts", "shared_expert")
        sizes = hidden, moe.shared.intermediate_size
        tensors |= _mlp("shared.", names, *sizes, moe.shared.bias, moe.activation.is_gated)
        if moe.shared.gated:
            tensors |= linear("shared_gate", under("shared_expert_gate"), 1, hidden, False)
    return tensors


def _moe_norms(spec: DecoderSpec, moe: MoeSpec, prefix: str) -> Tensors:
    """Return the norms inside a block of experts."""
    if not moe.own_norms:
        return {}
    return {
        "gate_scales": TensorRef((f"{prefix}.router.scale",), (spec.hidden_size,)),
        **norm(spec, "experts_norm", f"{prefix}.pre_feedforward_layernorm_2"),
        **norm(spec, "after_experts", f"{prefix}.post_feedforward_layernorm_2"),
        **norm(spec, "after_shared", f"{prefix}.post_feedforward_layernorm_1"),
    }


def _moe_blocks(prefix: str) -> tuple[str, ...]:
    """Return the names that a block of experts may have in a layer; its parts may also lie in the layer itself."""
    return (*(f"{prefix}.{block}" for block in _MOE_PREFIXES), prefix)


def split_expert_tensors(spec: DecoderSpec, layer: int, expert: int) -> Tensors:
    """Return one expert that is stored by itself: ``gate`` and ``up`` [I, H], ``down`` [H, I]."""
    assert spec.moe is not None
    blocks = tuple(f"{block}.experts.{expert}" for block in _moe_blocks(f"layers.{layer}"))
    shapes = _projection_shapes(spec.moe, spec.expert_hidden_size)
    return {
        key: TensorRef(tuple(f"{block}.{form}.weight" for block in blocks for form in _PROJECTIONS[key]), shape)
        for key, shape in shapes.items()
    }


def _projection_shapes(moe: MoeSpec, hidden: int) -> dict[str, tuple[int, int]]:
    """Return the shape of each projection of an expert."""
    width = moe.intermediate_size
    first = ("gate", "up") if moe.activation.is_gated else ("up",)
    return {**dict.fromkeys(first, (width, hidden)), "down": (hidden, width)}


def fused_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the tensors that hold all experts of a layer: ``gate_up`` [E, 2I, H], without a gate [E, I, H], and
    ``down`` [E, H, I].

    If the spec says so, they are transposed with alternating gate and up channels: [E, H, 2I] and [E, I, H].
    """
    moe = spec.moe
    assert moe is not None
    count, hidden, width = moe.num_experts, spec.expert_hidden_size, moe.intermediate_size
    blocks = _moe_blocks(f"layers.{layer}")

    def names(*suffixes: str) -> tuple[str, ...]:
        return tuple(f"{block}.{suffix}" for block in blocks for suffix in suffixes)

    flip = -1 if moe.transposed_experts else 1
    tensors = {
        "gate_up": TensorRef(
            names("experts.gate_up_proj", "experts.gate_up_proj.weight", "input_linear.weight")
            if moe.activation.is_gated
            else names("experts.up_proj", "experts.up_proj.weight"),
            (count, *((1 + moe.activation.is_gated) * width, hidden)[::flip]),
        ),
        "down": TensorRef(
            names("experts.down_proj", "experts.down_proj.weight", "output_linear.weight"),
            (count, *(hidden, width)[::flip]),
        ),
    }
    if moe.expert_bias:
        tensors["gate_up.bias"] = TensorRef(names("experts.gate_up_proj_bias"), (count, 2 * width))
        tensors["down.bias"] = TensorRef(names("experts.down_proj_bias"), (count, hidden))
    return tensors


def stacked_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the tensors that hold one projection of all experts: ``gate``, ``up`` [E, I, H] and ``down`` [E, H, I]."""
    moe = spec.moe
    assert moe is not None
    tensors, count = {}, moe.num_experts
    for key, shape in _projection_shapes(moe, spec.expert_hidden_size).items():
        names = tuple(f"{block}.experts.{key}_proj" for block in _moe_blocks(f"layers.{layer}"))
        tensors[key] = TensorRef(tuple(f"{name}.weight" for name in names), (count, *shape))
        if moe.expert_bias:
            tensors[f"{key}.bias"] = TensorRef(tuple(f"{name}.bias" for name in names), (count, shape[0]))
    return tensors


def mxfp4_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Return the fused layout in MXFP4: blocks of 32 four-bit values (16 bytes), with one exponent byte per block.

    ``gate_up.blocks`` [E, 2I, H/32, 16], ``gate_up.scales`` [E, 2I, H/32], and the same for ``down``.
    """
    moe = spec.moe
    assert moe is not None
    fused = fused_expert_tensors(spec, layer)
    tensors = {key: ref for key, ref in fused.items() if key.endswith(".bias")}
    shapes = {
        "gate_up": (2 * moe.intermediate_size, spec.expert_hidden_size),
        "down": (spec.expert_hidden_size, moe.intermediate_size),
    }
    for key, (rows, columns) in shapes.items():
        scales = (moe.num_experts, rows, columns // 32)
        tensors[f"{key}.blocks"] = TensorRef(tuple(f"{name}_blocks" for name in fused[key].names), (*scales, 16))
        tensors[f"{key}.scales"] = TensorRef(tuple(f"{name}_scales" for name in fused[key].names), scales)
    return tensors
