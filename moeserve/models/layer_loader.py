"""From planned tensors to the layers of a decoder: what the loaders of all devices have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from moeserve.models.spec import AttentionSpec, DecoderSpec, MlaSpec
from moeserve.models.weight_plan import ExpertsPlan, LayerPlan, StoredTensor

NormT = TypeVar("NormT")
AttentionT = TypeVar("AttentionT")
BlockT = TypeVar("BlockT")
BlockT_co = TypeVar("BlockT_co", covariant=True)
LayerT = TypeVar("LayerT")

Tensors = Mapping[str, StoredTensor]


class DecoderParts(Protocol[BlockT_co]):
    """Reads tensors, and makes the parts of a decoder for one kind of device."""

    def tensor(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
        """On the device; dtype: None for the model's."""

    def linear(self, tensors: Tensors, *keys: str, dtype: torch.dtype | None = None) -> object:
        """One projection out of those of ``keys``, their rows one below the other."""

    def latent(self, spec: MlaSpec, kv_b: StoredTensor) -> tuple[object, object]:
        """The projections of queries into the latent space of keys, and of what attention gives out of it."""

    def mlp(self, tensors: Tensors, prefix: str) -> BlockT_co:
        """A dense block of the tensors whose names begin with ``prefix``."""

    def moe(self, tensors: Tensors, experts: ExpertsPlan, number: int) -> BlockT_co:
        """The block of experts of layer ``number``."""


class LayerLoader(Generic[NormT, AttentionT, BlockT, LayerT]):
    """Knows which tensors a part is made of."""

    def __init__(
        self,
        spec: DecoderSpec,
        parts: DecoderParts[BlockT],
        *,
        norm: Callable[[Tensor, Tensor | None, float], NormT],
        gqa: Callable[..., AttentionT],
        mla: Callable[..., AttentionT],
        layer: Callable[[NormT, AttentionT, NormT, BlockT], LayerT],
    ) -> None:
        """norm(weight, bias, eps); gqa and mla: as `moeserve.models.attention.GqaAttention` and `MlaAttention`;
        layer(input norm, attention, norm, block)."""
        self._spec, self._parts = spec, parts
        self._norm, self._gqa, self._mla, self._layer = norm, gqa, mla, layer

    def layer(self, plan: LayerPlan, number: int) -> LayerT:
        attention, tensors, parts = self._spec.attention, plan.tensors, self._parts
        return self._layer(
            self.norm(tensors, "input_norm"),
            self._make_mla(tensors, attention)
            if isinstance(attention, MlaSpec)
            else self._make_gqa(tensors, attention, self._spec.windows[number]),
            self.norm(tensors, "post_norm"),
            parts.mlp(tensors, "") if plan.experts is None else parts.moe(tensors, plan.experts, number),
        )

    def norm(self, tensors: Tensors, key: str) -> NormT:
        weight, bias = self._parts.tensor(tensors[key]), self._optional(tensors, f"{key}.bias")
        return self._norm(weight, bias, self._spec.norm_eps)

    def _optional(self, tensors: Tensors, key: str) -> Tensor | None:
        return self._parts.tensor(tensors[key]) if key in tensors else None

    def _make_gqa(self, tensors: Tensors, spec: AttentionSpec, window: int | None) -> AttentionT:
        return self._gqa(
            spec,
            self._parts.linear(tensors, "q", "k", "v"),
            self._parts.linear(tensors, "o"),
            window=window,
            interleaved=self._spec.rope.interleaved,
            eps=self._spec.norm_eps,
            q_norm=self._optional(tensors, "q_norm"),
            k_norm=self._optional(tensors, "k_norm"),
            sinks=self._optional(tensors, "sinks"),
        )

    def _make_mla(self, tensors: Tensors, spec: MlaSpec) -> AttentionT:
        low_rank = spec.q_lora_rank is not None
        to_latent, from_latent = self._parts.latent(spec, tensors["kv_b"])
        return self._mla(
            spec,
            self._parts.linear(tensors, "q_a" if low_rank else "q", "kv_a"),
            self._parts.linear(tensors, "o"),
            kv_norm=self._parts.tensor(tensors["kv_norm"]),
            to_latent=to_latent,
            from_latent=from_latent,
            interleaved=self._spec.rope.interleaved,
            q_b=self._parts.linear(tensors, "q_b") if low_rank else None,
            q_norm=self._optional(tensors, "q_norm"),
        )
