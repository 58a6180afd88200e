"""Loading a checkpoint into a Decoder, layer by layer, so that no second copy of the model is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from experts.moe_layer import Dispatch, GluMlp, MoeLayer
from kernels.linear import Linear, pack_linear
from kernels.moe import moe_experts
from moeserve.model.checkpoint import ExpertsPlan, LayerPlan, OwnedExperts, StoredTensor, plan_weights, read_index
from moeserve.model.decoder import Decoder, DecoderLayer, GqaAttention, HeadLinear, MlaAttention, Norm
from moeserve.model.expert_weights import ExpertReader, load_experts
from moeserve.model.spec import AttentionSpec, DecoderSpec, MlaSpec
from moeserve.model.tensor_reader import Progress, TensorReader

# From planned tensors to the layers of a decoder: what the loaders of all devices have in common.


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
        """norm(weight, bias, eps); gqa and mla: as `moeserve.model.decoder.GqaAttention` and `MlaAttention`;
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


DispatchOf = Callable[[int], Dispatch]

_NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}


def dispatch_here(_layer: int) -> Dispatch:
    """All experts are in this process."""
    return moe_experts


def load_decoder(
    directory: Path,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    owned_experts: OwnedExperts | None = None,
    dispatch_of: DispatchOf = dispatch_here,
    progress: Progress | None = None,
) -> Decoder:
    """Load the safetensors checkpoint in ``directory`` as ``dtype`` (float32, bfloat16 or float16).

    max_model_len: longest context to serve, the model's own if None. owned_experts(layer): the experts to read,
    all if None; owning fewer takes a ``dispatch_of(layer)`` that reaches the others. progress(done_bytes, total_bytes).
    Every tensor's name and shape is checked before memory is taken: raises CheckpointError. How much memory that
    will be, ``WeightPlan.loaded_num_bytes`` tells beforehand.
    """
    index = read_index(directory)
    plan = plan_weights(spec, index, owned_experts)
    with TensorReader(index, plan.num_bytes, quantization=spec.quantization, progress=progress) as reader:
        parts = _CpuParts(spec, reader, dtype, dispatch_of)
        loader = LayerLoader[Norm, GqaAttention | MlaAttention, GluMlp | MoeLayer, DecoderLayer](
            spec,
            parts,
            norm=Norm,
            gqa=GqaAttention,
            mla=MlaAttention,
            layer=partial(DecoderLayer, residual_multiplier=spec.residual_multiplier),
        )
        embedding = reader.read(plan.outer["embedding"], _embedding_dtype(plan.outer["embedding"], dtype))
        layers = [loader.layer(layer, number) for number, layer in enumerate(plan.layers)]
        return Decoder(
            spec,
            embedding,
            layers,
            loader.norm(plan.outer, "norm"),
            parts.linear(plan.outer, "lm_head"),
            max_model_len=max_model_len or spec.max_position,
            dtype=dtype,
        )


def _embedding_dtype(stored: StoredTensor, dtype: torch.dtype) -> torch.dtype:
    """Rows are widened when looked up, so a table of 16-bit numbers need not take 32."""
    return _NARROW.get(stored.dtype, dtype) if dtype == torch.float32 else dtype


def _kept_dtype(parts: Sequence[StoredTensor], dtype: torch.dtype) -> torch.dtype:
    """float32 products read bfloat16 weights as they are."""
    narrow = dtype == torch.float32 and all(part.dtype == "BF16" for part in parts)
    return torch.bfloat16 if narrow else dtype


class _CpuParts:
    """See `moeserve.model.weights.DecoderParts`."""

    def __init__(self, spec: DecoderSpec, reader: TensorReader, dtype: torch.dtype, dispatch_of: DispatchOf) -> None:
        self._spec = spec
        self._reader = reader
        self._dtype = dtype
        self._dispatch_of = dispatch_of

    def tensor(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._reader.read(stored, dtype or self._dtype)

    def linear(self, tensors: Tensors, *keys: str, dtype: torch.dtype | None = None) -> Linear:
        dtype = dtype or self._dtype
        parts = [tensors[key] for key in keys]
        weight = self._reader.read_rows(parts, _kept_dtype(parts, dtype))
        return pack_linear(weight, self._reader.read_biases(tensors, keys, dtype), dtype)

    def latent(self, spec: MlaSpec, kv_b: StoredTensor) -> tuple[HeadLinear, HeadLinear]:
        up = self._reader.read(kv_b, _kept_dtype([kv_b], self._dtype))
        keys, values = torch.split(up.view(spec.num_heads, -1, spec.kv_lora_rank), [spec.nope_dim, spec.value_dim], 1)
        return (
            HeadLinear([pack_linear(head.T.contiguous(), dtype=self._dtype) for head in keys]),
            HeadLinear([pack_linear(head.contiguous(), dtype=self._dtype) for head in values]),
        )

    def mlp(self, tensors: Tensors, prefix: str) -> GluMlp:
        keys = [f"{prefix}{name}" for name in ("gate", "up", "down")]
        gate, up, down = (tensors[key] for key in keys)
        dtype = _kept_dtype([gate, up, down], self._dtype)
        return GluMlp(
            self._reader.read_rows([gate, up], dtype),
            self._reader.read(down, dtype),
            self._spec.activation,
            biases=self._reader.read_biases(tensors, keys, self._dtype),
            dtype=self._dtype,
        )

    def moe(self, tensors: Tensors, experts: ExpertsPlan, number: int) -> MoeLayer:
        moe = self._spec.moe
        assert moe is not None
        gate_dtype = torch.float32 if moe.gate_fp32 else self._dtype
        return MoeLayer(
            self.linear(tensors, "moe_gate", dtype=gate_dtype),
            moe.gate,
            load_experts(ExpertReader(self._spec, experts, self._reader, self._dtype)),
            moe.activation,
            gate_widens=gate_dtype != self._dtype,
            correction_bias=self._reader.read_optional(tensors, "correction_bias", torch.float32),
            shared=None if moe.shared is None else self.mlp(tensors, "shared."),
            shared_gate=self.linear(tensors, "shared_gate") if "shared_gate" in tensors else None,
            dispatch=self._dispatch_of(number),
        )
