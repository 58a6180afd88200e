"""The generic decoder: every supported model is this one, assembled from parts as its DecoderSpec says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experts.glu_mlp import GluMlp
from experts.moe_layer import MoeLayer
from kernels.attention_plan import AttentionPlan
from kernels.linear import Linear
from kernels.norm import layer_norm, rms_norm
from kernels.packed_experts import PackedExperts
from moeserve.models.attention import GqaAttention, MlaAttention, StepInputs
from moeserve.models.rope import RopeSpec, rope_frequencies
from moeserve.models.spec import DecoderSpec


@dataclass(slots=True)
class ForwardBatch:
    """The rows of one step, one request's chunk after another.

    token_ids, positions, slots: [T] int64. logit_rows: [S] int64, the rows whose logits are wanted; None for all.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionPlan
    logit_rows: Tensor | None = None


# Per layer: keys [KV, num_slots, Dk] and values [KV, num_slots, Dv], or None where values are a prefix of the keys.
KvPools = Sequence[tuple[Tensor, Tensor | None]]


class Norm:
    """RMS norm, or layer norm where there is a bias. [T, D] -> [T, D]."""

    __slots__ = ("_bias", "_eps", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return rms_norm(x, self.weight, self._eps)
        return layer_norm(x, self.weight, self._bias, self._eps)


class RopeTable:
    """Cosines and sines of all positions up to ``max_model_len``, made once: looking an angle up gives the same bits
    in every batch, computing it might not."""

    __slots__ = ("_cos", "_sin")

    def __init__(self, rope: RopeSpec, max_model_len: int, dtype: torch.dtype) -> None:
        frequencies = rope_frequencies(rope, max_model_len)
        inverse = torch.tensor(frequencies.inverse, dtype=torch.float32)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inverse
        dtype = torch.float32 if rope.keep_fp32 else dtype
        self._cos = (angles.cos() * frequencies.scale).to(dtype)
        self._sin = (angles.sin() * frequencies.scale).to(dtype)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin [T, rotary_dim / 2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


class DecoderLayer:
    """Attention and feed-forward block, each behind a norm and added to the residual stream [T, hidden] in place."""

    __slots__ = ("_attention", "_input_norm", "_mlp", "_post_norm", "_residual_multiplier")

    def __init__(
        self,
        input_norm: Norm,
        attention: GqaAttention | MlaAttention,
        post_norm: Norm,
        mlp: GluMlp | MoeLayer,
        residual_multiplier: float = 1.0,
    ) -> None:
        self._input_norm, self._attention = input_norm, attention
        self._post_norm, self._mlp = post_norm, mlp
        self._residual_multiplier = residual_multiplier

    def attend(self, x: Tensor, step: StepInputs, keys: Tensor, values: Tensor | None) -> Tensor:
        """Mutates and returns x; writes the step's keys and values into the pools."""
        out = self._attention(self._input_norm(x), step, keys, values)
        if self._residual_multiplier != 1.0:
            out.mul_(self._residual_multiplier)
        return x.add_(out)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Mutates and returns x."""
        out = self._mlp(self._post_norm(x))
        if self._residual_multiplier != 1.0:
            out.mul_(self._residual_multiplier)
        return x.add_(out)

    @property
    def experts(self) -> PackedExperts | None:
        """Those that are here, None for a layer without any."""
        return self._mlp.experts if isinstance(self._mlp, MoeLayer) else None

    def gated_block(self) -> tuple[MoeLayer, Tensor] | None:
        """The block of experts, if the layer has one, and the weights [hidden] of the norm in front of it."""
        return (self._mlp, self._post_norm.weight) if isinstance(self._mlp, MoeLayer) else None

    def serve_others(self, no_rows: Tensor) -> None:
        """What `feed_forward` does for other ranks, without rows of this one: no_rows is [0, hidden]."""
        if isinstance(self._mlp, MoeLayer):
            self._mlp.serve_others(no_rows)


class Decoder:
    """A loaded model. Holds weights and tables only; whatever belongs to requests comes with each call.

    embedding: [vocab, hidden], possibly of a lower precision than ``dtype``, the dtype of all computation.
    after_layer: told of each layer with experts but the last one, when it is computed: its number among those, and the
    residual stream [T, hidden], which goes on to change in place.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        lm_head: Linear,
        *,
        max_model_len: int,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.max_model_len = max_model_len
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._lm_head = lm_head
        self._rope = RopeTable(spec.rope, max_model_len, dtype)
        self._sparse = {layer: place for place, layer in enumerate(spec.moe_layers)}
        self.after_layer: Callable[[int, Tensor], None] | None = None

    def gated_blocks(self) -> list[tuple[MoeLayer, Tensor]]:
        """What `DecoderLayer.gated_block` gives for the layers that have experts."""
        return [block for layer in self._layers if (block := layer.gated_block()) is not None]

    def forward(self, batch: ForwardBatch, kv_pools: KvPools) -> Tensor:
        """Run one step and return logits [S, vocab] of the wanted rows, in the model's dtype.

        Call it under ``torch.inference_mode``. Mutates ``kv_pools``: the rows' keys and values are stored at their
        slots. Positions must lie below ``max_model_len``. The last layer's feed-forward block runs on the wanted rows
        only.
        """
        spec = self.spec
        x = F.embedding(batch.token_ids, self._embedding).to(self.dtype)
        if spec.embedding_multiplier != 1.0:
            x.mul_(spec.embedding_multiplier)
        step = StepInputs(*self._rope(batch.positions), batch.slots, batch.attention)
        rows = batch.logit_rows
        last = self._layers[-1]
        for number, (layer, (keys, values)) in enumerate(zip(self._layers, kv_pools, strict=True)):
            x = layer.attend(x, step, keys, values)
            if layer is last and rows is not None:
                x = x.index_select(0, rows)  # From here on a row meets no other row.
                if not rows.shape[0]:
                    layer.serve_others(x)
                    return x.new_empty(0, spec.vocab_size)
            x = layer.feed_forward(x)
            if self.after_layer is not None and number in self._sparse and layer is not last:
                self.after_layer(self._sparse[number], x)
        logits = self._lm_head(self._norm(x))
        return logits if spec.logit_divisor == 1.0 else logits.div_(spec.logit_divisor)

    @property
    def experts(self) -> list[PackedExperts]:
        """The experts that are here of each layer that has some."""
        return [layer.experts for layer in self._layers if layer.experts is not None]

    def serve_others(self) -> None:
        """A step in which this rank has no rows: its experts compute those of other ranks."""
        no_rows = torch.empty((0, self.spec.hidden_size), dtype=self.dtype)
        for layer in self._layers:
            layer.serve_others(no_rows)
