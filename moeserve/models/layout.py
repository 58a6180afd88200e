"""Which tensors a decoder needs, under which names a checkpoint may hold them, and in which shapes.

Names are relative to the decoder (``layers.0.mlp.gate.weight``); a checkpoint usually puts ``model.`` in front.
Where published checkpoints differ in a name, all of its forms are candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.models.spec import AttentionSpec, DecoderSpec, MlaSpec, MoeSpec

_MOE_PREFIXES = ("mlp", "block_sparse_moe")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that is needed: the names it may have and its shape (leading ones may be added or missing)."""

    names: tuple[str, ...]
    shape: tuple[int, ...]


Tensors = dict[str, TensorRef]


def outer_tensors(spec: DecoderSpec) -> Tensors:
    """Everything outside the layers. A tied output projection is the embedding once more."""
    vocab, hidden = spec.vocab_size, spec.hidden_size
    head = "embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    tensors = {
        "embedding": TensorRef(("embed_tokens.weight",), (vocab, hidden)),
        "lm_head": TensorRef((head,), (vocab, hidden)),
    }
    if spec.lm_head_bias:
        tensors["lm_head.bias"] = TensorRef(("lm_head.bias",), (vocab,))
    return tensors | _norm(spec, "norm", "norm")


def layer_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """Everything of one layer but its experts."""
    prefix = f"layers.{layer}"
    tensors = _norm(spec, "input_norm", f"{prefix}.input_layernorm")
    tensors |= _norm(spec, "post_norm", f"{prefix}.post_attention_layernorm")
    attention = spec.attention
    if isinstance(attention, MlaSpec):
        tensors |= _mla(attention, spec.hidden_size, f"{prefix}.self_attn")
    else:
        tensors |= _gqa(attention, spec.hidden_size, f"{prefix}.self_attn")
    if spec.moe is not None and spec.sparse_layers[layer]:
        return tensors | _moe(spec.moe, spec.hidden_size, prefix)
    return tensors | _mlp("", (f"{prefix}.mlp",), spec.hidden_size, spec.intermediate_size, spec.mlp_bias)


def _linear(key: str, names: tuple[str, ...], rows: int, columns: int, bias: bool) -> Tensors:
    tensors = {key: TensorRef(tuple(f"{name}.weight" for name in names), (rows, columns))}
    if bias:
        tensors[f"{key}.bias"] = TensorRef(tuple(f"{name}.bias" for name in names), (rows,))
    return tensors


def _norm(spec: DecoderSpec, key: str, name: str) -> Tensors:
    tensors = {key: TensorRef((f"{name}.weight",), (spec.hidden_size,))}
    if spec.norm == "layer":
        tensors[f"{key}.bias"] = TensorRef((f"{name}.bias",), (spec.hidden_size,))
    return tensors


def _gqa(attention: AttentionSpec, hidden: int, prefix: str) -> Tensors:
    q_size = attention.num_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    tensors: Tensors = {}
    for key, rows in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        tensors |= _linear(key, (f"{prefix}.{key}_proj",), rows, hidden, attention.qkv_bias)
    tensors |= _linear("o", (f"{prefix}.o_proj",), hidden, q_size, attention.out_bias)
    if attention.qk_norm != "none":
        flat = attention.qk_norm == "flat"
        for key, rows in (("q", q_size), ("k", kv_size)):
            shape = (rows if flat else attention.head_dim,)
            tensors[f"{key}_norm"] = TensorRef((f"{prefix}.{key}_norm.weight",), shape)
    if attention.sinks:
        tensors["sinks"] = TensorRef((f"{prefix}.sinks",), (attention.num_heads,))
    return tensors


def _mla(mla: MlaSpec, hidden: int, prefix: str) -> Tensors:
    q_size = mla.num_heads * (mla.nope_dim + mla.rope_dim)
    latent, rank = mla.kv_lora_rank, mla.q_lora_rank
    if rank is None:
        tensors = _linear("q", (f"{prefix}.q_proj",), q_size, hidden, False)
    else:
        tensors = _linear("q_a", (f"{prefix}.q_a_proj",), rank, hidden, mla.bias)
        tensors["q_norm"] = TensorRef((f"{prefix}.q_a_layernorm.weight",), (rank,))
        tensors |= _linear("q_b", (f"{prefix}.q_b_proj",), q_size, rank, False)
    tensors |= _linear("kv_a", (f"{prefix}.kv_a_proj_with_mqa",), latent + mla.rope_dim, hidden, mla.bias)
    tensors["kv_norm"] = TensorRef((f"{prefix}.kv_a_layernorm.weight",), (latent,))
    up_size = mla.num_heads * (mla.nope_dim + mla.value_dim)
    tensors |= _linear("kv_b", (f"{prefix}.kv_b_proj",), up_size, latent, False)
    return tensors | _linear("o", (f"{prefix}.o_proj",), hidden, mla.num_heads * mla.value_dim, mla.bias)


def _mlp(key: str, prefixes: tuple[str, ...], hidden: int, width: int, bias: bool) -> Tensors:
    tensors: Tensors = {}
    for part, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        names = tuple(f"{prefix}.{part}_proj" for prefix in prefixes)
        tensors |= _linear(f"{key}{part}", names, rows, columns, bias)
    return tensors


def _moe(moe: MoeSpec, hidden: int, prefix: str) -> Tensors:
    blocks = tuple(f"{prefix}.{block}" for block in _MOE_PREFIXES)

    def under(*suffixes: str) -> tuple[str, ...]:
        return tuple(f"{block}.{suffix}" for block in blocks for suffix in suffixes)

    tensors = _linear("moe_gate", under("gate", "router", "router.layer"), moe.num_experts, hidden, moe.gate_bias)
    if moe.correction_bias:
        places = ("gate.", "", "moe_statics.", "gate.moe_statics.")
        names = under(*(f"{place}e_score_correction_bias" for place in places))
        tensors["correction_bias"] = TensorRef(names, (moe.num_experts,))
    if moe.shared is not None:
        names = under("shared_experts", "shared_expert")
        tensors |= _mlp("shared.", names, hidden, moe.shared.intermediate_size, moe.shared.bias)
        if moe.shared.gated:
            tensors |= _linear("shared_gate", under("shared_expert_gate"), 1, hidden, False)
    return tensors


def split_expert_tensors(spec: DecoderSpec, layer: int, expert: int) -> Tensors:
    """One expert stored by itself: ``gate`` and ``up`` [I, H], ``down`` [H, I]."""
    assert spec.moe is not None
    hidden, width = spec.hidden_size, spec.moe.intermediate_size
    blocks = tuple(f"layers.{layer}.{block}.experts.{expert}" for block in _MOE_PREFIXES)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    forms = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
    return {
        key: TensorRef(tuple(f"{block}.{form}.weight" for block in blocks for form in forms[key]), shape)
        for key, shape in shapes.items()
    }


def fused_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """All experts of a layer in one tensor: ``gate_up`` [E, 2I, H] and ``down`` [E, H, I], or, where the spec says
    so, transposed with alternating gate and up channels: [E, H, 2I] and [E, I, H]."""
    moe = spec.moe
    assert moe is not None
    count, hidden, width = moe.num_experts, spec.hidden_size, moe.intermediate_size
    blocks = tuple(f"layers.{layer}.{block}" for block in _MOE_PREFIXES)

    def names(*suffixes: str) -> tuple[str, ...]:
        return tuple(f"{block}.{suffix}" for block in blocks for suffix in suffixes)

    flip = -1 if moe.transposed_experts else 1
    tensors = {
        "gate_up": TensorRef(
            names("experts.gate_up_proj", "input_linear.weight"), (count, *(2 * width, hidden)[::flip])
        ),
        "down": TensorRef(names("experts.down_proj", "output_linear.weight"), (count, *(hidden, width)[::flip])),
    }
    if moe.expert_bias:
        tensors["gate_up.bias"] = TensorRef(names("experts.gate_up_proj_bias"), (count, 2 * width))
        tensors["down.bias"] = TensorRef(names("experts.down_proj_bias"), (count, hidden))
    return tensors


def mxfp4_expert_tensors(spec: DecoderSpec, layer: int) -> Tensors:
    """The fused layout with weights as blocks of 32 four-bit values (16 bytes) and one exponent byte per block:
    ``gate_up.blocks`` [E, 2I, H/32, 16], ``gate_up.scales`` [E, 2I, H/32], and the same for ``down``."""
    moe = spec.moe
    assert moe is not None
    fused = fused_expert_tensors(spec, layer)
    tensors = {key: ref for key, ref in fused.items() if key.endswith(".bias")}
    shapes = {
        "gate_up": (2 * moe.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, moe.intermediate_size),
    }
    for key, (rows, columns) in shapes.items():
        scales = (moe.num_experts, rows, columns // 32)
        tensors[f"{key}.blocks"] = TensorRef(tuple(f"{name}_blocks" for name in fused[key].names), (*scales, 16))
        tensors[f"{key}.scales"] = TensorRef(tuple(f"{name}_scales" for name in fused[key].names), scales)
    return tensors
