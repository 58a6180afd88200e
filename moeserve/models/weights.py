"""Loading a checkpoint into a Decoder, layer by layer, so that no second copy of the model is ever in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
from moeserve.models.layer_loader import LayerLoader, Tensors
from moeserve.models.spec import DecoderSpec, MlaSpec
from moeserve.models.tensor_reader import Progress, TensorReader
from moeserve.models.weight_plan import ExpertsPlan, OwnedExperts, StoredTensor, plan_weights

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
    """See `moeserve.models.layer_loader.DecoderParts`."""

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
