"""The dense demo model's forward in float32, one layer at a time: the calibration learns from its FFN inputs."""

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from moeserve.models.demo.gguf_source import DenseShape

_ROWS_AT_ONCE = 128


class DenseForward:
    """Carries the hidden states [tokens, hidden] of one prompt through the layers it is given, in order."""

    def __init__(self, shape: DenseShape, embedding: Tensor, token_ids: Tensor) -> None:
        self._shape = shape
        self._token_ids = token_ids
        self._hidden = embedding[token_ids].float()
        positions = torch.arange(len(token_ids), dtype=torch.float32)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(positions, shape.rope_theta**-exponents).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()

    @torch.inference_mode()
    def step(self, weights: dict[str, Tensor]) -> Tensor:
        """Run one layer; returns the input of its FFN, [tokens, hidden] float32."""
        ffn_input = self.attend(weights)
        gate, up, down = (weights[f"mlp.{name}.weight"].float() for name in ("gate_proj", "up_proj", "down_proj"))
        self.add(linear(silu(linear(ffn_input, gate)) * linear(ffn_input, up), down))
        return ffn_input

    @torch.inference_mode()
    def attend(self, weights: dict[str, Tensor]) -> Tensor:
        """Run a layer up to its FFN, whose input it returns, [tokens, hidden] float32; `add` completes the layer."""
        w = {name.removesuffix(".weight"): weight.float() for name, weight in weights.items() if "mlp." not in name}
        self._hidden = self._hidden + self._attention(self._norm(self._hidden, w["input_layernorm"]), w)
        return self._norm(self._hidden, w["post_attention_layernorm"])

    @torch.inference_mode()
    def add(self, ffn_output: Tensor) -> None:
        """The output of the layer's FFN, [tokens, hidden]."""
        self._hidden = self._hidden + ffn_output

    @torch.inference_mode()
    def log_likelihood(self, norm: Tensor, embedding: Tensor) -> Tensor:
        """Of every token but the first, given those before it: [tokens - 1] float32. To be called after all layers."""
        states = self._norm(self._hidden[:-1], norm.float())
        following = self._token_ids[1:, None]
        parts = [
            linear(part, embedding.float()).log_softmax(-1).gather(-1, targets)[:, 0]
            for part, targets in zip(states.split(_ROWS_AT_ONCE), following.split(_ROWS_AT_ONCE), strict=True)
        ]
        return torch.cat(parts)

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
