"""Loading a checkpoint onto a GPU, layer by layer: host memory holds one layer's tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kernels.gpu.moe_weights import GpuExperts, StoredMatrix
from moeserve.cuda.attention import GpuGqa, GpuMla
from moeserve.cuda.decoder import GpuDecoder, GpuLayer
from moeserve.cuda.parts import GpuDispatch, GpuMlp, GpuMoe, GpuNorm, Projection
from moeserve.models.checkpoint import read_index
from moeserve.models.expert_weights import ExpertReader
from moeserve.models.spec import DecoderSpec, MlaSpec
from moeserve.models.tensor_reader import Progress, TensorReader
from moeserve.models.weight_plan import ExpertsPlan, LayerPlan, OwnedExperts, StoredTensor, plan_weights


def load_gpu_decoder(
    directory: Path,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    dispatch_of: Callable[[int], GpuDispatch],
    owned_experts: OwnedExperts | None = None,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> GpuDecoder:
    """Load the safetensors checkpoint in ``directory`` as ``dtype`` onto ``device``.

    dispatch_of(layer): computes a layer's experts. owned_experts(layer): those to load, all if None.
    progress(done_bytes, total_bytes). Raises CheckpointError for what is missing or of another shape, before memory is
    taken.
    """
    index = read_index(directory)
    plan = plan_weights(spec, index, owned_experts)
    with TensorReader(index, plan.num_bytes, quantization=spec.quantization, progress=progress) as reader:
        loader = _Loader(spec, reader, dtype, device, dispatch_of)
        embedding = loader.tensor(plan.outer["embedding"])
        layers = [loader.layer(layer, number) for number, layer in enumerate(plan.layers)]
        return GpuDecoder(
            spec,
            embedding,
            layers,
            loader.norm(plan.outer, "norm"),
            loader.projection(plan.outer, "lm_head"),
            max_model_len=max_model_len or spec.max_position,
        )


class _Loader:
    """Builds the parts of a decoder out of planned tensors."""

    def __init__(
        self,
        spec: DecoderSpec,
        reader: TensorReader,
        dtype: torch.dtype,
        device: torch.device,
        dispatch_of: Callable[[int], GpuDispatch],
    ) -> None:
        self._spec, self._reader = spec, reader
        self._dtype, self._device, self._dispatch_of = dtype, device, dispatch_of

    def tensor(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._reader.read(stored, dtype or self._dtype).to(self._device)

    def layer(self, plan: LayerPlan, number: int) -> GpuLayer:
        spec, tensors = self._spec, plan.tensors
        attention: GpuGqa | GpuMla
        if isinstance(spec.attention, MlaSpec):
            attention = self._mla(tensors, spec.attention)
        else:
            attention = self._gqa(tensors, number)
        mlp = self._mlp(tensors, "") if plan.experts is None else self._moe(tensors, plan.experts, number)
        return GpuLayer(self.norm(tensors, "input_norm"), attention, self.norm(tensors, "post_norm"), mlp)

    def norm(self, tensors: Mapping[str, StoredTensor], key: str) -> GpuNorm:
        return GpuNorm(self.tensor(tensors[key]), self._optional(tensors, f"{key}.bias"), self._spec.norm_eps)

    def projection(
        self, tensors: Mapping[str, StoredTensor], *keys: str, dtype: torch.dtype | None = None
    ) -> Projection:
        """One projection out of those of ``keys``, their rows one below the other."""
        dtype = dtype or self._dtype
        weight = self._reader.read_rows([tensors[key] for key in keys], dtype).to(self._device)
        biases = self._reader.read_biases(tensors, keys, dtype)
        return Projection(weight, None if biases is None else biases.to(self._device))

    def _optional(
        self, tensors: Mapping[str, StoredTensor], key: str, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        return self.tensor(tensors[key], dtype) if key in tensors else None

    def _gqa(self, tensors: Mapping[str, StoredTensor], number: int) -> GpuGqa:
        spec = self._spec
        assert not isinstance(spec.attention, MlaSpec)
        return GpuGqa(
            spec.attention,
            self.projection(tensors, "q", "k", "v"),
            self.projection(tensors, "o"),
            window=spec.windows[number],
            interleaved=spec.rope.interleaved,
            eps=spec.norm_eps,
            q_norm=self._optional(tensors, "q_norm"),
            k_norm=self._optional(tensors, "k_norm"),
            sinks=self._optional(tensors, "sinks"),
        )

    def _mla(self, tensors: Mapping[str, StoredTensor], mla: MlaSpec) -> GpuMla:
        low_rank = mla.q_lora_rank is not None
        up = self.tensor(tensors["kv_b"]).view(mla.num_heads, -1, mla.kv_lora_rank)
        keys, values = torch.split(up, [mla.nope_dim, mla.value_dim], 1)
        return GpuMla(
            mla,
            self.projection(tensors, "q_a" if low_rank else "q", "kv_a"),
            self.projection(tensors, "o"),
            kv_norm=self.tensor(tensors["kv_norm"]),
            to_latent=keys.contiguous(),
            from_latent=values.transpose(1, 2).contiguous(),
            interleaved=self._spec.rope.interleaved,
            q_b=self.projection(tensors, "q_b") if low_rank else None,
            q_norm=self._optional(tensors, "q_norm"),
        )

    def _mlp(self, tensors: Mapping[str, StoredTensor], prefix: str) -> GpuMlp:
        gate_up = self.projection(tensors, f"{prefix}gate", f"{prefix}up")
        return GpuMlp(gate_up, self.projection(tensors, f"{prefix}down"), self._spec.activation)

    def _moe(self, tensors: Mapping[str, StoredTensor], experts: ExpertsPlan, number: int) -> GpuMoe:
        moe = self._spec.moe
        assert moe is not None
        return GpuMoe(
            self.projection(tensors, "moe_gate", dtype=torch.float32 if moe.gate_fp32 else self._dtype),
            moe.gate,
            self._experts(experts),
            moe.activation,
            self._dispatch_of(number),
            correction_bias=self._optional(tensors, "correction_bias", torch.float32),
            shared=None if moe.shared is None else self._mlp(tensors, "shared."),
            shared_gate=self.projection(tensors, "shared_gate") if "shared_gate" in tensors else None,
        )

    def _experts(self, plan: ExpertsPlan) -> GpuExperts:
        reader = ExpertReader(self._spec, plan, self._reader, self._dtype)
        shape, count = reader.shape, len(reader.owned)

        def empty(*sizes: int) -> Tensor:
            return torch.empty((count, *sizes), dtype=self._dtype, device=self._device)

        gate_up = empty(2 * shape.intermediate_size, shape.hidden_size)
        down = empty(shape.hidden_size, shape.intermediate_size)
        biases = (empty(gate_up.shape[1]), empty(down.shape[1])) if shape.has_bias else (None, None)
        for place in range(count):
            for target, source in zip((gate_up, down, *biases), reader.read_matrices(place), strict=True):
                if target is not None and source is not None:
                    target[place].copy_(source)
        return GpuExperts(StoredMatrix(gate_up, bias=biases[0]), StoredMatrix(down, bias=biases[1]))
