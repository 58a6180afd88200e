"""The attention blocks of the generic decoder, over paged keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan
from kernels.kv_write import write_kv
from kernels.linear import Linear
from kernels.norm import rms_norm
from kernels.rope_kv import rotate_and_store
from kernels.rotary import apply_rotary
from moeserve.models.spec import AttentionSpec, MlaSpec


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
