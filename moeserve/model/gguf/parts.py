"""The tensors of a GGUF model under the names that checkpoints give them. Torch-free.

llama.cpp puts all experts of a layer into one tensor per projection, and stores the rows of queries and keys of some
architectures in another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from moeserve.model.gguf.config import Fields
from moeserve.model.gguf.header import GgufHeader, GgufTensor
from moeserve.model.spec import CheckpointError

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
_LAYER |= {
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# Names that do not end alike.
_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_WITH_VALUE_HEADS = (
    "attn_qkv.",
    "attn_gate.",
    "ssm_conv1d.",
    "ssm_out.",
    "ssm_alpha.",
    "ssm_beta.",
    "ssm_a",
    "ssm_dt.",
)
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
# Files of Mixtral from before 2024-04 hold each expert by itself.
_EXPERT = re.compile(r"ffn_(gate|up|down)\.(\d+)\.weight")
# Tables of rotary embeddings in old files, and layers that predict further tokens.
_IGNORED = re.compile(r"blk\.\d+\.(nextn\.|attn_rot_embd)")
# Architectures whose files hold the rotary pairs of queries and keys side by side, where checkpoints hold halves.
_PAIRED = frozenset(("llama", "mistral3"))
_NORMS_PLUS_ONE = frozenset(("qwen3next", "qwen35", "qwen35moe"))
# Architectures whose queries, keys and values are one matrix, where checkpoints have three.
_FUSED = frozenset(("bailingmoe2",))
# Architectures whose value heads stand in turns, the first of each key head before the second ones, where checkpoints
# have all of a key head side by side.
_IN_TURNS = frozenset(("qwen35", "qwen35moe"))

# plain: as stored. pairs: rows of rotary pairs, to be ordered as halves. latent: the key and the value part of a
# matrix, by head. by_key_head: rows of queries, keys and values, and rows of gates, to be ordered by key head.
# less_one: norms that are stored with one added. logarithm: of the negated numbers. turns, columns_in_turns: the last
# rows, or the columns, are of value heads in turns; `logarithm` may have such rows too. flat: a vector in several rows.
# stacked: projections of all experts, the rows of an expert one below the other; stacked_turned: its matrix turned.
Arrangement = Literal[
    "plain",
    "pairs",
    "latent",
    "by_key_head",
    "less_one",
    "logarithm",
    "turns",
    "columns_in_turns",
    "flat",
    "stacked",
    "stacked_turned",
]
# Arrangements whose numbers are computed, or put together within a row of blocks.
_COMPUTED = frozenset(("latent", "less_one", "logarithm", "stacked", "stacked_turned"))


# Two tensors that are one in a checkpoint.
_JOINED: dict[tuple[str, str], tuple[str, Arrangement]] = {
    ("attn_k_b.weight", "attn_v_b.weight"): ("self_attn.kv_b_proj.weight", "latent"),
    ("attn_qkv.weight", "attn_gate.weight"): ("linear_attn.in_proj_qkvz.weight", "by_key_head"),
}


# Gate and up of all experts, of one expert, of a shared expert and of a dense block: each pair is one matrix.
_GATE_OR_UP = re.compile(r"(blk\.\d+\.ffn_)(gate|up)((?:_exps|_shexp|\.\d+)?\.weight)")
FLOATS = frozenset(("F64", "F32", "F16", "BF16"))


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query or key heads that an arrangement orders rows by. values: value heads per key head.
    key_dim, value_dim: the width of each, of value heads in turns the rows or columns of one; 0 where the arrangement
    needs none."""

    number: int = 1
    values: int = 0
    key_dim: int = 0
    value_dim: int = 0


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One tensor of a checkpoint. sources: one, or several that lie one below the other, such as the two parts of a
    `latent` or `by_key_head`. partner: the kind of the tensor that is one matrix with it, if that is another one."""

    sources: tuple[GgufTensor, ...]
    arrangement: Arrangement = "plain"
    heads: Heads = Heads()
    partner: str = ""

    @property
    def kind(self) -> str:
        """The kind of its numbers; float32 where they are computed, or where parts in blocks lie beside floats.

        Of parts, or a partner, in blocks of other kinds all kinds, which no format has.
        """
        kinds = self.kinds
        if self.arrangement in _COMPUTED or (len(kinds) > 1 and not FLOATS.isdisjoint(kinds)):
            return "F32"
        return "+".join(sorted(kinds))

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all tensors of the file that are one matrix."""
        return frozenset(source.kind for source in self.sources) | ({self.partner} if self.partner else set())

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].shape
        if self.arrangement == "latent":
            heads, rank, width = first
            return heads * (width + self.sources[1].shape[1]), rank
        if self.arrangement == "flat":
            return (prod(first),)
        if self.arrangement.startswith("stacked"):
            matrix = (sum(source.shape[1] for source in self.sources), first[2])
            return (first[0], *(matrix if self.arrangement == "stacked" else matrix[::-1]))
        return (sum(source.shape[0] for source in self.sources), *first[1:])

    @property
    def num_bytes(self) -> int:
        return sum(source.num_bytes for source in self.sources)


class _Namer:
    """Names the tensors of a model, and says how each is arranged."""

    def __init__(self, fields: Fields) -> None:
        self._architecture = fields.architecture
        heads = fields.count("attention.head_count")
        self._query_heads, self._key_heads = heads, fields.count("attention.head_count_kv", heads)
        self._fields = fields
        # By layer and name, the first of two tensors that are one.
        self._halves: dict[tuple[int, str], GgufTensor] = {}

    def name(self, layer: int, own: str, tensor: GgufTensor) -> tuple[str, GgufPart] | None:
        """Return name and part of a tensor of a layer; None for the first half of one. Raise CheckpointError."""
        for pair, (target, arrangement) in _JOINED.items():
            if own in pair and not (arrangement == "by_key_head" and self._architecture in _IN_TURNS):
                return self._joined(layer, own, tensor, pair, target, arrangement)
        arrangement, heads = self._arrangement(own)
        partner = partner_of(f"blk.{layer}.{own}", self._fields.header.tensors)
        return _own_name(own), GgufPart((tensor,), arrangement, heads, partner)

    def check_whole(self) -> None:
        """Raise CheckpointError if half of a tensor is missing."""
        for layer, own in self._halves:
            raise CheckpointError(f"The GGUF file holds {own} of layer {layer} without its other half.")

    def _joined(
        self, layer: int, own: str, tensor: GgufTensor, pair: tuple[str, str], target: str, arrangement: Arrangement
    ) -> tuple[str, GgufPart] | None:
        other = pair[1 - pair.index(own)]
        half = self._halves.pop((layer, other), None)
        if half is None:
            self._halves[layer, own] = tensor
            return None
        both = (tensor, half) if own == pair[0] else (half, tensor)
        if len(tensor.shape) != (3 if arrangement == "latent" else 2) or len(half.shape) != len(tensor.shape):
            raise CheckpointError(f"{own} of layer {layer} has shape {list(tensor.shape)}, which it cannot have.")
        return target, GgufPart(both, arrangement, self._delta_heads() if arrangement == "by_key_head" else Heads())

    def _delta_heads(self) -> Heads:
        fields = self._fields
        keys, values = fields.count("ssm.group_count"), fields.count("ssm.time_step_rank")
        if keys < 1 or values < 1:
            raise CheckpointError("The recurrent layers of a GGUF file have no heads.")
        return Heads(keys, values // keys, fields.count("ssm.state_size"), fields.count("ssm.inner_size") // values)

    def _in_turns(self, own: str) -> tuple[Arrangement, Heads] | None:
        """Return how a tensor with value heads in turns is arranged, None for one without."""
        if self._architecture not in _IN_TURNS or not own.startswith(_WITH_VALUE_HEADS):
            return None
        heads = self._delta_heads()
        if own.startswith(("ssm_a", "ssm_beta", "ssm_dt")):  # A number or a row of each head.
            heads = replace(heads, value_dim=1)
        kind: Arrangement = "columns_in_turns" if own == "ssm_out.weight" else "turns"
        return "logarithm" if own == "ssm_a" else kind, heads

    def _arrangement(self, own: str) -> tuple[Arrangement, Heads]:
        in_turns = self._in_turns(own)
        if in_turns is not None:
            return in_turns
        if self._architecture in _PAIRED and own.startswith(("attn_q.", "attn_k.")):
            return "pairs", Heads(self._query_heads if own.startswith("attn_q.") else self._key_heads)
        if self._architecture in _NORMS_PLUS_ONE and own.endswith("norm.weight") and own != "ssm_norm.weight":
            return "less_one", Heads()
        return ("logarithm" if own == "ssm_a" else "plain"), Heads()


def partner_of(name: str, tensors: Mapping[str, GgufTensor]) -> str:
    """Return the kind of the other one of gate and up where both are in blocks of other kinds, else an empty text.

    name: of a tensor of the file.
    """
    found = _GATE_OR_UP.fullmatch(name)
    if found is None:
        return ""
    other = tensors.get(found[1] + ("up" if found[2] == "gate" else "gate") + found[3])
    kinds = {tensors[name].kind, tensors[name].kind if other is None else other.kind}
    return "" if other is None or len(kinds) == 1 or not FLOATS.isdisjoint(kinds) else other.kind


def parts_of(header: GgufHeader, fields: Fields, num_layers: int) -> Iterator[tuple[str, GgufPart]]:
    """Yield every tensor of the model by its name in a checkpoint. Raise CheckpointError for an unknown name, and for
    two tensors of one name."""
    namer, block_count = _Namer(fields), fields.count("block_count")
    found: dict[str, str] = {}
    for name, tensor in _by_projection(header, fields):
        block = _BLOCK.fullmatch(name)
        if _is_left_out(name, fields.architecture) or (block and num_layers <= int(block[1]) < block_count):
            continue
        part = _outer(name, tensor, fields) if block is None else namer.name(int(block[1]), block[2], tensor)
        if (block is None and part is None) or (block and int(block[1]) >= block_count):
            raise CheckpointError(f"The GGUF file holds {name[:80]}, which models of this architecture do not have.")
        if part is None:
            continue
        target = f"model.layers.{block[1]}.{part[0]}" if block else part[0]
        if target in found:
            raise CheckpointError(f"The GGUF file holds {found[target]} and {name[:80]}, which are the same tensor.")
        found[target] = name[:80]
        yield target, part[1]
    namer.check_whole()


def _by_projection(header: GgufHeader, fields: Fields) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the tensors, and three in the place of one of queries, keys and values. Raise CheckpointError."""
    for name, tensor in header.tensors.items():
        if fields.architecture not in _FUSED or ".attn_qkv." not in name:
            yield name, tensor
            continue
        heads = fields.count("attention.head_count")
        numbers = (heads, *2 * [fields.count("attention.head_count_kv", heads)])
        if not name.endswith(".weight") or min(numbers) < 1 or tensor.shape[0] % sum(numbers):
            raise CheckpointError(f"The GGUF file holds {name[:80]} for which this architecture has no place.")
        width, row_bytes, offset = tensor.shape[0] // sum(numbers), tensor.num_bytes // tensor.shape[0], tensor.offset
        for own, number in zip("qkv", numbers, strict=True):
            shape = (number * width, *tensor.shape[1:])
            part = GgufTensor(tensor.file, tensor.kind, shape, offset, shape[0] * row_bytes)
            yield name.replace("attn_qkv", f"attn_{own}"), part
            offset += part.num_bytes


def _is_left_out(name: str, architecture: str) -> bool:
    # The configuration of a llama holds its factors of rotary frequencies.
    return bool(_IGNORED.match(name)) or (name == "rope_freqs.weight" and architecture in ("llama", "mistral3"))


def _outer(name: str, tensor: GgufTensor, fields: Fields) -> tuple[str, GgufPart] | None:
    if name not in _OUTER:
        return None
    less_one = fields.architecture in _NORMS_PLUS_ONE and name == "output_norm.weight"
    return _OUTER[name], GgufPart((tensor,), "less_one" if less_one else "plain")


def _own_name(own: str) -> str:
    if own in _WHOLE:
        return _WHOLE[own]
    expert = _EXPERT.fullmatch(own)
    if expert is not None:
        return f"mlp.experts.{expert[2]}.{expert[1]}_proj.weight"
    stem, _, kind = own.rpartition(".")
    if stem not in _LAYER or kind not in ("weight", "bias"):
        raise CheckpointError(f"The GGUF file holds {own[:80]}, which models of this architecture do not have.")
    return f"{_LAYER[stem]}.{kind}"
