"""Reads the dense demo model, SmolLM2-135M-Instruct, out of its GGUF: sizes, vocabulary, weights."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize

from moeserve.models.demo.package import REQUIREMENT
from moeserve.models.errors import ModelError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class DenseShape:
    """Sizes and constants of a llama-type dense model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary: tokens in id order, merges in rank order, ids of control tokens."""

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    control_ids: tuple[int, ...]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    chat_template: str


class GgufSource:
    """The dense model in a GGUF file: shape, vocabulary, and tensors dequantised one at a time."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path} holds a model of type {architecture!r}, but the demo is built from a llama type.")

    @cached_property
    def shape(self) -> DenseShape:
        return DenseShape(
            vocab_size=self._field("llama.vocab_size"),
            hidden_size=self._field("llama.embedding_length"),
            intermediate_size=self._field("llama.feed_forward_length"),
            num_layers=self._field("llama.block_count"),
            num_heads=self._field("llama.attention.head_count"),
            num_kv_heads=self._field("llama.attention.head_count_kv"),
            head_dim=self._field("llama.rope.dimension_count"),
            max_positions=self._field("llama.context_length"),
            # Stored as float32: the decimal that was meant is the shortest one.
            rms_norm_eps=float(f"{self._field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            rope_theta=float(self._field("llama.rope.freq_base")),
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        control = 3  # GGUF token type CONTROL
        types = self._field("tokenizer.ggml.token_type")
        pairs = (merge.split(" ") for merge in self._field("tokenizer.ggml.merges"))
        return Vocabulary(
            tokens=tuple(self._field("tokenizer.ggml.tokens")),
            merges=tuple((left, right) for left, right in pairs),
            control_ids=tuple(i for i, kind in enumerate(types) if kind == control),
            bos_id=self._field("tokenizer.ggml.bos_token_id"),
            eos_id=self._field("tokenizer.ggml.eos_token_id"),
            unk_id=self._field("tokenizer.ggml.unknown_token_id"),
            pad_id=self._field("tokenizer.ggml.padding_token_id"),
            chat_template=self._field("tokenizer.chat_template"),
        )

    def embedding(self) -> torch.Tensor:
        """Token embedding, also the output head (tied): [vocab, hidden] bfloat16."""
        return self._read("token_embd.weight")

    def final_norm(self) -> torch.Tensor:
        """[hidden] bfloat16."""
        return self._read("output_norm.weight")

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Weights of one layer in bfloat16 under their transformers names (`self_attn.q_proj.weight`, ...)."""
        weights = {}
        for gguf_name, name in _LAYER_NAMES.items():
            weight = self._read(f"blk.{index}.{gguf_name}.weight")
            if gguf_name == "attn_q":
                weight = _halves_from_pairs(weight, self.shape.num_heads)
            elif gguf_name == "attn_k":
                weight = _halves_from_pairs(weight, self.shape.num_kv_heads)
            weights[f"{name}.weight"] = weight
        return weights

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        return torch.from_numpy(values).to(torch.bfloat16)

    def _field(self, name: str) -> Any:
        field = self._reader.fields.get(name)
        if field is None:
            raise ModelError(f"The GGUF of the demo model lacks the field {name!r}: reinstall {REQUIREMENT}.")
        return field.contents()


def _halves_from_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder q or k rows [heads * dim, hidden] from GGUF's rotary pairs (2i, 2i+1) to halves (i, i + dim/2)."""
    rows, hidden = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden).contiguous()
