"""The tensors of a GGUF model under the names that checkpoints give them. Torch-free.

llama.cpp puts all experts of a layer into one tensor per projection, and stores the rows of queries and keys of some
architectures in another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from moeserve.model.gguf.header import GgufHeader, GgufTensor
from moeserve.model.spec import CheckpointError

# Kinds of ggml whose numbers are read one by one, and the kinds that the kernels compute from as they are. All others
# are rounded to Q8_0.
PLAIN_KINDS = frozenset(("F64", "F32", "F16", "BF16"))
PACKED_KINDS = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k"}
PACKED_KINDS |= {"MXFP4": "mxfp4"}

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}
_SINKS, _CORRECTION = "attn_sinks.weight", "exp_probs_b.bias"
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
# Tables of rotary embeddings, and layers that predict further tokens.
_IGNORED = re.compile(r"rope_freqs\.|rope_factors_|.*\.(nextn\.|attn_rot_embd)")
# Architectures whose files hold the rotary pairs of queries and keys side by side, where checkpoints hold halves.
_PAIRED = frozenset(("llama", "granitemoe"))

# pairs: rows of rotary pairs, to be ordered as halves. latent: a key and a value part that are one matrix by head.
Arrangement = Literal["plain", "pairs", "latent"]


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One tensor of a checkpoint. sources: one, or the two parts of a `latent`. heads: of queries or keys."""

    sources: tuple[GgufTensor, ...]
    arrangement: Arrangement = "plain"
    heads: int = 1

    @property
    def kind(self) -> str:
        """The kind of its numbers; a `latent` is put together from float32."""
        return "F32" if self.arrangement == "latent" else self.sources[0].kind

    @property
    def shape(self) -> tuple[int, ...]:
        if self.arrangement != "latent":
            return self.sources[0].shape
        keys, values = self.sources
        heads, rank, width = keys.shape
        return heads * (width + values.shape[1]), rank

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)


def parts_of(header: GgufHeader, num_heads: int, num_kv_heads: int, num_layers: int) -> Iterator[tuple[str, GgufPart]]:
    """Yield every tensor of the model by its name in a checkpoint. Raise CheckpointError for an unknown name."""
    architecture = header.metadata.get("general.architecture")
    latents: dict[int, dict[str, GgufTensor]] = {}
    for name, tensor in header.tensors.items():
        if name in _OUTER:
            yield _OUTER[name], GgufPart((tensor,))
            continue
        block = _BLOCK.fullmatch(name)
        if _IGNORED.match(name) or (block and int(block[1]) >= num_layers):
            continue
        if block is None:
            raise CheckpointError(f"The GGUF file holds {name[:80]}, which models of this architecture do not have.")
        layer, own = int(block[1]), block[2]
        if own in ("attn_k_b.weight", "attn_v_b.weight"):
            latents.setdefault(layer, {})[own] = tensor
            continue
        pairs = architecture in _PAIRED and own.startswith(("attn_q.", "attn_k."))
        heads = num_heads if own.startswith("attn_q.") else num_kv_heads
        part = GgufPart((tensor,), "pairs", heads) if pairs else GgufPart((tensor,))
        yield f"model.layers.{layer}.{_own_name(name, own)}", part
    for layer, parts in latents.items():
        if len(parts) == 1:
            raise CheckpointError(f"The GGUF file holds {next(iter(parts))} of layer {layer} without its other half.")
        both = (parts["attn_k_b.weight"], parts["attn_v_b.weight"])
        if any(len(part.shape) != 3 for part in both):
            raise CheckpointError(f"The latent attention of layer {layer} has no shape by head.")
        yield f"model.layers.{layer}.self_attn.kv_b_proj.weight", GgufPart(both, "latent")


def _own_name(name: str, own: str) -> str:
    if own == _SINKS:
        return "self_attn.sinks"
    if own == _CORRECTION:
        return "mlp.gate.e_score_correction_bias"
    stem, _, kind = own.rpartition(".")
    if stem not in _LAYER or kind not in ("weight", "bias"):
        raise CheckpointError(f"The GGUF file holds {name[:80]}, which models of this architecture do not have.")
    return f"{_LAYER[stem]}.{kind}"
