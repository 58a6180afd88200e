"""Loading a checkpoint into a Decoder, layer by layer, so that no second copy of the model is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from experts.glu_mlp import GluMlp
from experts.moe_layer import Dispatch, MoeLayer
from kernels.linear import Linear, pack_linear
from kernels.moe_gemm import moe_experts
from moeserve.models.attention import GqaAttention, HeadLinear, MlaAttention
from moeserve.models.checkpoint import read_index
from moeserve.models.decoder import Decoder, DecoderLayer, Norm
from moeserve.models.expert_weights import ExpertReader, load_experts
from moeserve.models.spec import DecoderSpec, MlaSpec
from moeserve.models.tensor_reader import Progress, TensorReader
from moeserve.models.weight_plan import ExpertsPlan, LayerPlan, OwnedExperts, StoredTensor, plan_weights

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
        loader = _Loader(spec, reader, dtype, dispatch_of)
        embedding = reader.read(plan.outer["embedding"], _embedding_dtype(plan.outer["embedding"], dtype))
        layers = [loader.layer(layer, number) for number, layer in enumerate(plan.layers)]
        return Decoder(
            spec,
            embedding,
            layers,
            loader.norm(plan.outer, "norm"),
            loader.linear(plan.outer, "lm_head"),
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


class _Loader:
    """Builds the parts of a decoder out of planned tensors."""

    def __init__(self, spec: DecoderSpec, reader: TensorReader, dtype: torch.dtype, dispatch_of: DispatchOf) -> None:
        self._spec = spec
        self._reader = reader
        self._dtype = dtype
        self._dispatch_of = dispatch_of

    def layer(self, plan: LayerPlan, number: int) -> DecoderLayer:
        spec, tensors = self._spec, plan.tensors
        attention: GqaAttention | MlaAttention
        if isinstance(spec.attention, MlaSpec):
            attention = self._mla(tensors, spec.attention)
        else:
            attention = self._gqa(tensors, number)
        mlp = self._mlp(tensors, "") if plan.experts is None else self._moe(tensors, plan.experts, number)
        return DecoderLayer(
            self.norm(tensors, "input_norm"),
            attention,
            self.norm(tensors, "post_norm"),
            mlp,
            spec.residual_multiplier,
        )

    def norm(self, tensors: Mapping[str, StoredTensor], key: str) -> Norm:
        weight = self._reader.read(tensors[key], self._dtype)
        return Norm(weight, self._optional(tensors, f"{key}.bias"), self._spec.norm_eps)

    def linear(self, tensors: Mapping[str, StoredTensor], *keys: str, dtype: torch.dtype | None = None) -> Linear:
        """One packed projection out of those of ``keys``, their rows one below the other."""
        dtype = dtype or self._dtype
        parts = [tensors[key] for key in keys]
        weight = self._reader.read_rows(parts, _kept_dtype(parts, dtype))
        return pack_linear(weight, self._reader.read_biases(tensors, keys, dtype), dtype)

    def _optional(
        self, tensors: Mapping[str, StoredTensor], key: str, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        return self._reader.read_optional(tensors, key, dtype or self._dtype)

    def _gqa(self, tensors: Mapping[str, StoredTensor], number: int) -> GqaAttention:
        spec = self._spec
        assert not isinstance(spec.attention, MlaSpec)
        return GqaAttention(
            spec.attention,
            self.linear(tensors, "q", "k", "v"),
            self.linear(tensors, "o"),
            window=spec.windows[number],
            interleaved=spec.rope.interleaved,
            eps=spec.norm_eps,
            q_norm=self._optional(tensors, "q_norm"),
            k_norm=self._optional(tensors, "k_norm"),
            sinks=self._optional(tensors, "sinks"),
        )

    def _mla(self, tensors: Mapping[str, StoredTensor], mla: MlaSpec) -> MlaAttention:
        low_rank = mla.q_lora_rank is not None
        up = self._reader.read(tensors["kv_b"], _kept_dtype([tensors["kv_b"]], self._dtype))
        keys, values = torch.split(up.view(mla.num_heads, -1, mla.kv_lora_rank), [mla.nope_dim, mla.value_dim], 1)
        return MlaAttention(
            mla,
            self.linear(tensors, "q_a" if low_rank else "q", "kv_a"),
            self.linear(tensors, "o"),
            kv_norm=self._reader.read(tensors["kv_norm"], self._dtype),
            to_latent=HeadLinear([pack_linear(head.T.contiguous(), dtype=self._dtype) for head in keys]),
            from_latent=HeadLinear([pack_linear(head.contiguous(), dtype=self._dtype) for head in values]),
            interleaved=self._spec.rope.interleaved,
            q_b=self.linear(tensors, "q_b") if low_rank else None,
            q_norm=self._optional(tensors, "q_norm"),
        )

    def _mlp(self, tensors: Mapping[str, StoredTensor], prefix: str) -> GluMlp:
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

    def _moe(self, tensors: Mapping[str, StoredTensor], experts: ExpertsPlan, number: int) -> MoeLayer:
        moe = self._spec.moe
        assert moe is not None
        gate_dtype = torch.float32 if moe.gate_fp32 else self._dtype
        return MoeLayer(
            self.linear(tensors, "moe_gate", dtype=gate_dtype),
            moe.gate,
            load_experts(ExpertReader(self._spec, experts, self._reader, self._dtype)),
            moe.activation,
            gate_widens=gate_dtype != self._dtype,
            correction_bias=self._optional(tensors, "correction_bias", torch.float32),
            shared=None if moe.shared is None else self._mlp(tensors, "shared."),
            shared_gate=self.linear(tensors, "shared_gate") if "shared_gate" in tensors else None,
            dispatch=self._dispatch_of(number),
        )
