"""Loading a checkpoint onto a GPU, layer by layer: host memory holds one layer's tensors at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kernels.gpu.moe_config import WeightStorage
from kernels.gpu.moe_weights import GpuExperts, empty_weights, store_weights
from moeserve.cuda.attention import GpuGqa, GpuMla
from moeserve.cuda.decoder import GpuDecoder, GpuLayer
from moeserve.cuda.parts import GpuDispatch, GpuMlp, GpuMoe, GpuNorm, Projection
from moeserve.model.checkpoint import ExpertsPlan, OwnedExperts, StoredTensor, plan_weights, read_index
from moeserve.model.expert_weights import ExpertReader
from moeserve.model.spec import DecoderSpec, MlaSpec
from moeserve.model.tensor_reader import Progress, TensorReader
from moeserve.model.weights import LayerLoader, Tensors


def load_gpu_decoder(
    directory: Path,
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    dispatch_of: Callable[[int], GpuDispatch],
    storage: WeightStorage,
    owned_experts: OwnedExperts | None = None,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> GpuDecoder:
    """Load the safetensors checkpoint in ``directory`` as ``dtype`` onto ``device``.

    dispatch_of(layer): computes a layer's experts. owned_experts(layer): those to load, all if None.
    storage: how their weights are kept. progress(done_bytes, total_bytes). Raises CheckpointError for what
    is missing or of another shape, before memory is taken.
    """
    index = read_index(directory)
    plan = plan_weights(spec, index, owned_experts)
    with TensorReader(index, plan.num_bytes, quantization=spec.quantization, progress=progress) as reader:
        parts = _GpuParts(spec, reader, dtype, device, dispatch_of, storage)
        loader = LayerLoader[GpuNorm, GpuGqa | GpuMla, GpuMlp | GpuMoe, GpuLayer](
            spec, parts, norm=GpuNorm, gqa=GpuGqa, mla=GpuMla, layer=GpuLayer
        )
        embedding = parts.tensor(plan.outer["embedding"])
        layers = [loader.layer(layer, number) for number, layer in enumerate(plan.layers)]
        return GpuDecoder(
            spec,
            embedding,
            layers,
            loader.norm(plan.outer, "norm"),
            parts.linear(plan.outer, "lm_head"),
            max_model_len=max_model_len or spec.max_position,
        )


class _GpuParts:
    """See `moeserve.model.weights.DecoderParts`."""

    def __init__(
        self,
        spec: DecoderSpec,
        reader: TensorReader,
        dtype: torch.dtype,
        device: torch.device,
        dispatch_of: Callable[[int], GpuDispatch],
        storage: WeightStorage,
    ) -> None:
        self._spec, self._reader, self._storage = spec, reader, storage
        self._dtype, self._device, self._dispatch_of = dtype, device, dispatch_of

    def tensor(self, stored: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._reader.read(stored, dtype or self._dtype).to(self._device)

    def linear(self, tensors: Tensors, *keys: str, dtype: torch.dtype | None = None) -> Projection:
        dtype = dtype or self._dtype
        weight = self._reader.read_rows([tensors[key] for key in keys], dtype).to(self._device)
        biases = self._reader.read_biases(tensors, keys, dtype)
        return Projection(weight, None if biases is None else biases.to(self._device))

    def latent(self, spec: MlaSpec, kv_b: StoredTensor) -> tuple[Tensor, Tensor]:
        up = self.tensor(kv_b).view(spec.num_heads, -1, spec.kv_lora_rank)
        keys, values = torch.split(up, [spec.nope_dim, spec.value_dim], 1)
        return keys.contiguous(), values.transpose(1, 2).contiguous()

    def mlp(self, tensors: Tensors, prefix: str) -> GpuMlp:
        gate_up = self.linear(tensors, f"{prefix}gate", f"{prefix}up")
        return GpuMlp(gate_up, self.linear(tensors, f"{prefix}down"), self._spec.activation)

    def moe(self, tensors: Tensors, experts: ExpertsPlan, number: int) -> GpuMoe:
        moe = self._spec.moe
        assert moe is not None
        return GpuMoe(
            self.linear(tensors, "moe_gate", dtype=torch.float32 if moe.gate_fp32 else self._dtype),
            moe.gate,
            self._experts(experts),
            moe.activation,
            self._dispatch_of(number),
            correction_bias=(
                self.tensor(tensors["correction_bias"], torch.float32) if "correction_bias" in tensors else None
            ),
            shared=None if moe.shared is None else self.mlp(tensors, "shared."),
            shared_gate=self.linear(tensors, "shared_gate") if "shared_gate" in tensors else None,
        )

    def _experts(self, plan: ExpertsPlan) -> GpuExperts:
        """Quantised on the device, one expert at a time."""
        reader = ExpertReader(self._spec, plan, self._reader, self._dtype)
        count, shape = len(reader.owned), reader.shape
        sizes = ((2 * shape.intermediate_size, shape.hidden_size), (shape.hidden_size, shape.intermediate_size))
        probes = [torch.zeros((1, *size), dtype=self._dtype) for size in sizes]
        biases = [torch.zeros((1, size[0]), dtype=self._dtype) if shape.has_bias else None for size in sizes]
        stored = [
            empty_weights(store_weights(probe, self._storage, bias), count, self._device)
            for probe, bias in zip(probes, biases, strict=True)
        ]
        experts = GpuExperts(stored[0], stored[1])
        for place in range(count):
            experts.copy_slot(place, stored_expert(reader, place, self._storage, self._dtype, self._device))
        return experts


def stored_expert(
    reader: ExpertReader, place: int, storage: WeightStorage, dtype: torch.dtype, device: torch.device
) -> GpuExperts:
    """The expert at a place of a checkpoint as the only one of a layer, stored on `device`: the same bits on any."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)[None]

    gate_up, down, *biases = reader.read_matrices(place)
    of_up, of_down = (None if bias is None else moved(bias) for bias in biases)
    return GpuExperts(store_weights(moved(gate_up), storage, of_up), store_weights(moved(down), storage, of_down))
