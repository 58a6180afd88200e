"""Attention layers on a GPU: one kernel for norms, rotation and the KV write between projection and paged attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.gpu.attention import ExtendRun, PagedContext, Partials, Scoring, paged_attention
from kernels.gpu.attention_config import PrefillConfig
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.norm import rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv
from moeserve.cuda.parts import Projection
from moeserve.model.spec import AttentionSpec, MlaSpec


@dataclass(slots=True)
class Sequences:
    """The sequences of a step, those with one new token first, and scratch for them.

    slots: [T] int64, -1 for rows that pad the batch. block_table: [S, N] int32. seq_lens: [S] int32 with the new
    tokens, 0 for padding. query_starts: [S + 1] int32. works: a work list per window, of the first `num_decodes`.
    prefill: how prompts of up to `max_query_len` tokens are computed; None where there are none. extends: short ones
    among the prompts that are computed otherwise, by window; empty where there are none.
    """

    slots: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    num_decodes: int
    max_query_len: int
    block_size: int
    works: Mapping[int | None, SplitWork]
    partials: Partials
    prefill: PrefillConfig | None = None
    extends: Mapping[int | None, ExtendRun] = field(default_factory=dict)


@dataclass(slots=True)
class GpuStep:
    """What every layer's attention needs of one step; angles cos, sin are [T, R/2] fp32."""

    cos: Tensor
    sin: Tensor
    sequences: Sequences

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, H, Dk] over pools [KV, num_slots, D] -> [T, H, Dv]."""
        sequences = self.sequences
        return paged_attention(
            q,
            PagedContext(keys, values, sequences.block_table, sequences.seq_lens, sequences.block_size),
            sequences.query_starts,
            sequences.works[window],
            sequences.partials,
            Scoring(scale, sinks=sinks),
            num_decodes=sequences.num_decodes,
            max_query_len=sequences.max_query_len,
            config=sequences.prefill,
            extends=sequences.extends.get(window),
        )


class GpuGqa:
    """Multi-head attention with shared key-value heads. See `moeserve.model.decoder.GqaAttention`."""

    __slots__ = (
        "_eps",
        "_flat_norms",
        "_head_norms",
        "_interleaved",
        "_o",
        "_qkv",
        "_sinks",
        "_spec",
        "_window",
    )

    def __init__(
        self,
        spec: AttentionSpec,
        qkv: Projection,
        o: Projection,
        *,
        window: int | None,
        interleaved: bool,
        eps: float,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._spec, self._qkv, self._o = spec, qkv, o
        self._window, self._interleaved, self._eps, self._sinks = window, interleaved, eps, sinks
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        self._flat_norms = norms if spec.qk_norm == "flat" else None
        self._head_norms = norms if spec.qk_norm == "head" else None

    def __call__(self, x: Tensor, step: GpuStep, keys: Tensor, values: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Writes the new keys and values into the pools [KV, num_slots, D]."""
        assert values is not None
        spec = self._spec
        qkv = self._qkv(x)
        if self._flat_norms is not None:
            first = 0
            for weight in self._flat_norms:
                part = qkv[:, first : first + weight.shape[0]]
                rms_norm(part, weight, self._eps, out=part)
                first += weight.shape[0]
        heads = qkv.view(x.shape[0], spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q_weight, k_weight = self._head_norms or (None, None)
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        q = norm_rope_write_kv(
            q,
            k,
            v,
            step.cos,
            step.sin,
            step.sequences.slots,
            keys,
            values,
            interleaved=self._interleaved,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=self._eps,
            clip=spec.clip_qkv,
        )
        out = step.attend(q, keys, values, scale=spec.scale, window=self._window, sinks=self._sinks)
        return self._o(out.view(x.shape[0], -1))


class GpuMla:
    """Multi-head latent attention, absorbed. See `moeserve.model.decoder.MlaAttention`.

    to_latent: [H, nope_dim, kv_lora_rank]. from_latent: [H, kv_lora_rank, value_dim].
    """

    __slots__ = ("_down", "_from_latent", "_interleaved", "_kv_norm", "_o", "_q_b", "_q_norm", "_spec", "_to_latent")

    def __init__(
        self,
        spec: MlaSpec,
        down: Projection,
        o: Projection,
        *,
        kv_norm: Tensor,
        to_latent: Tensor,
        from_latent: Tensor,
        interleaved: bool,
        q_b: Projection | None = None,
        q_norm: Tensor | None = None,
    ) -> None:
        self._spec, self._down, self._o, self._q_b = spec, down, o, q_b
        self._kv_norm, self._q_norm, self._interleaved = kv_norm, q_norm, interleaved
        self._to_latent, self._from_latent = to_latent, from_latent

    def __call__(self, x: Tensor, step: GpuStep, keys: Tensor, values: Tensor | None) -> Tensor:
        """x [T, hidden] -> [T, hidden]. Writes the new latents into ``keys`` [1, num_slots, D]; values are None."""
        spec, num_tokens, width = self._spec, x.shape[0], self._spec.kv_lora_rank
        down = self._down(x)
        low, latent, k_rope = torch.split(down, [down.shape[1] - width - spec.rope_dim, width, spec.rope_dim], 1)
        if self._q_b is not None and self._q_norm is not None:
            low = self._q_b(rms_norm(low, self._q_norm, spec.latent_norm_eps))
        q = low.unflatten(1, (spec.num_heads, -1))
        heads = q.new_empty((num_tokens, spec.num_heads, width + spec.rope_dim))
        in_latent = torch.bmm(q[..., : spec.nope_dim].transpose(0, 1), self._to_latent)
        heads[..., :width].copy_(in_latent.transpose(0, 1))
        # The latent is both the first part of the key and the value, so it is written as a value would be.
        norm_rope_write_kv(
            q[..., spec.nope_dim :],
            k_rope.unsqueeze(1),
            rms_norm(latent, self._kv_norm, spec.latent_norm_eps).unsqueeze(1),
            step.cos,
            step.sin,
            step.sequences.slots,
            keys[..., width:],
            keys[..., :width],
            interleaved=self._interleaved,
            out=heads[..., width:],
        )
        out = step.attend(heads, keys, keys[..., :width], scale=spec.scale, window=None)
        values_out = torch.bmm(out.transpose(0, 1), self._from_latent)
        return self._o(values_out.transpose(0, 1).reshape(num_tokens, -1))
