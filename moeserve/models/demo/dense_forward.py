"""The dense demo model's forward in float32, one layer at a time: the calibration learns from its FFN inputs."""

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from moeserve.models.demo.gguf_source import DenseShape


class DenseForward:
    """Carries the hidden states [tokens, hidden] of one prompt through the layers it is given, in order."""

    def __init__(self, shape: DenseShape, embedding: Tensor, token_ids: Tensor) -> None:
        self._shape = shape
        self._hidden = embedding[token_ids].float()
        positions = torch.arange(len(token_ids), dtype=torch.float32)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(positions, shape.rope_theta**-exponents).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()

    @torch.inference_mode()
    def step(self, weights: dict[str, Tensor]) -> Tensor:
        """Run one layer; returns the input of its FFN, [tokens, hidden] float32."""
        w = {name.removesuffix(".weight"): weight.float() for name, weight in weights.items()}
        hidden = self._hidden + self._attention(self._norm(self._hidden, w["input_layernorm"]), w)
        ffn_input = self._norm(hidden, w["post_attention_layernorm"])
        inner = silu(linear(ffn_input, w["mlp.gate_proj"])) * linear(ffn_input, w["mlp.up_proj"])
        self._hidden = hidden + linear(inner, w["mlp.down_proj"])
        return ffn_input

    def _attention(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        q = self._rotate(self._heads(x, w["self_attn.q_proj"]))
        k = self._rotate(self._heads(x, w["self_attn.k_proj"]))
        v = self._heads(x, w["self_attn.v_proj"])
        mixed = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        return linear(mixed.transpose(0, 1).flatten(1), w["self_attn.o_proj"])

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight).view(len(x), -1, self._shape.head_dim).transpose(0, 1)

    def _rotate(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._shape.rms_norm_eps) * weight
