"""The generic decoder: every supported model is this one, assembled from parts as its DecoderSpec says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experts.moe_layer import GluMlp, MoeLayer
from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan
from kernels.linear import Linear
from kernels.norm import layer_norm, rms_norm
from kernels.packed_experts import PackedExperts
from kernels.rope_kv import apply_rotary, rotate_and_store, write_kv
from moeserve.model.rope import rope_frequencies
from moeserve.model.spec import AttentionSpec, DecoderSpec, MlaSpec, RopeSpec

# The attention blocks of the generic decoder, over paged keys and values.


@dataclass(slots=True)
class StepInputs:
    """What every layer's attention needs of one step: angles [T, R/2], slots [T] int64 and the attention plan."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    plan: AttentionPlan


class GqaAttention:
    """Multi-head attention with shared key-value heads; queries, keys and values come from one packed projection.

    qkv: rows of all query heads, then key heads, then value heads. q_norm, k_norm: weights of ``head`` ([D]) or
    ``flat`` norms. sinks: [H].
    """

    __slots__ = (
        "_clip",
        "_eps",
        "_flat_norms",
        "_head_norms",
        "_interleaved",
        "_num_heads",
        "_num_kv_heads",
        "_o",
        "_qkv",
        "_scale",
        "_sinks",
        "_window",
    )

    def __init__(
        self,
        spec: AttentionSpec,
        qkv: Linear,
        o: Linear,
        *,
        window: int | None,
        interleaved: bool,
        eps: float,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._scale, self._clip = spec.scale, spec.clip_qkv
        self._qkv, self._o = qkv, o
        self._window, self._interleaved, self._eps, self._sinks = window, interleaved, eps, sinks
        self._flat_norms: tuple[Tensor, Tensor] | None = None
        self._head_norms: tuple[Tensor, Tensor] | None = None
        if q_norm is not None and k_norm is not None:
            if spec.qk_norm == "flat":
                self._flat_norms = (q_norm, k_norm)
            else:
                self._head_norms = (q_norm, k_norm)

    def __call__(self, x: Tensor, step: StepInputs, keys: Tensor, values: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Writes the new keys and values into the pools [KV, num_slots, D]."""
        num_tokens = x.shape[0]
        qkv = self._qkv(x)
        if self._flat_norms is not None:
            self._normalise_flat(qkv)
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        assert values is not None
        q = rotate_and_store(
            qkv.view(num_tokens, self._num_heads + 2 * self._num_kv_heads, -1),
            step.cos,
            step.sin,
            step.slots,
            keys,
            values,
            interleaved=self._interleaved,
            head_norms=self._head_norms,
            eps=self._eps,
        )
        out = paged_attention(q, keys, values, step.plan, scale=self._scale, window=self._window, sinks=self._sinks)
        return self._o(out.view(num_tokens, -1))

    def _normalise_flat(self, qkv: Tensor) -> None:
        assert self._flat_norms is not None
        first = 0
        for weight in self._flat_norms:
            part = qkv[:, first : first + weight.shape[0]]
            part.copy_(rms_norm(part, weight, self._eps))
            first += weight.shape[0]


class HeadLinear:
    """A projection of its own for every head: [T, H, K] -> [T, H, N], from weights [H, N, K].

    One packed product per head, because a batched product's rows would depend on how many there are.
    """

    __slots__ = ("_linears",)

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = tuple(linears)

    def __call__(self, x: Tensor) -> Tensor:
        heads = x.transpose(0, 1).contiguous()
        return torch.stack([linear(head) for linear, head in zip(self._linears, heads, strict=True)], 1)


class MlaAttention:
    """Multi-head latent attention, absorbed: queries are taken into the latent's space, where all heads share one
    key of ``kv_lora_rank + rope_dim`` channels whose first ``kv_lora_rank`` are the value as well.

    down: packed projection of the hidden state to [queries or their low-rank form; latent; rotated key]. q_b: from the
    low-rank form to the queries. to_latent: per head, nope_dim -> kv_lora_rank. from_latent: kv_lora_rank -> value_dim.
    """

    __slots__ = (
        "_down",
        "_from_latent",
        "_interleaved",
        "_kv_norm",
        "_o",
        "_q_b",
        "_q_norm",
        "_q_width",
        "_spec",
        "_to_latent",
    )

    def __init__(
        self,
        spec: MlaSpec,
        down: Linear,
        o: Linear,
        *,
        kv_norm: Tensor,
        to_latent: HeadLinear,
        from_latent: HeadLinear,
        interleaved: bool,
        q_b: Linear | None = None,
        q_norm: Tensor | None = None,
    ) -> None:
        self._spec = spec
        self._down, self._o, self._q_b = down, o, q_b
        self._kv_norm, self._q_norm = kv_norm, q_norm
        self._to_latent, self._from_latent = to_latent, from_latent
        self._interleaved = interleaved
        self._q_width = down.out_features - spec.kv_lora_rank - spec.rope_dim

    def __call__(self, x: Tensor, step: StepInputs, keys: Tensor, values: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Writes the new latents into ``keys`` [1, num_slots, D]; values are None."""
        spec = self._spec
        num_tokens, latent_dim = x.shape[0], spec.kv_lora_rank
        low, latent, k_rope = torch.split(self._down(x), [self._q_width, latent_dim, spec.rope_dim], -1)
        if self._q_b is not None and self._q_norm is not None:
            low = self._q_b(rms_norm(low, self._q_norm, spec.latent_norm_eps))
        q = low.reshape(num_tokens, spec.num_heads, -1)
        rotated = torch.cat([q[..., spec.nope_dim :], k_rope.unsqueeze(1)], 1)
        rotated = apply_rotary(rotated, step.cos, step.sin, interleaved=self._interleaved)
        normed = rms_norm(latent, self._kv_norm, spec.latent_norm_eps)
        # The key is one more head beside the queries: both are [latent space, rotated].
        spaces = torch.cat([self._to_latent(q[..., : spec.nope_dim]), normed.unsqueeze(1)], 1)
        heads = torch.cat([spaces, rotated], -1)
        write_kv(keys, None, step.slots, heads[:, spec.num_heads :], None)
        out = paged_attention(heads[:, : spec.num_heads], keys, keys, step.plan, scale=spec.scale)
        return self._o(self._from_latent(out[..., :latent_dim]).flatten(1))


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
