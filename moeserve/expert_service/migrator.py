"""How a rank reads and puts in place the experts that a migration brings it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from experts.placement.migration import ExpertMigrator, PlacedExperts
from moeserve.model_loading import LoadedModel
from moeserve.models.checkpoint import TensorInfo, read_index
from moeserve.models.errors import CheckpointError
from moeserve.models.expert_weights import ExpertReader
from moeserve.models.spec import DecoderSpec
from moeserve.models.tensor_reader import TensorReader
from moeserve.models.weight_plan import OwnedExperts, plan_experts


def make_migrator(
    directory: Path, model: LoadedModel, placed: PlacedExperts, owned: OwnedExperts
) -> ExpertMigrator[Tensor]:
    """For the rank that has loaded `model` from `directory`, with the experts that it `owned` then."""
    layers = model.spec.moe_layers
    reread = _Rereader(directory, model.spec, model.dtype, owned)

    def install(layer: int, slot: int, packed: Tensor) -> None:
        model.packed_experts[layer].put(slot, packed)

    return ExpertMigrator(placed, lambda layer, expert: reread(layers[layer], expert), install)


class _Rereader:
    """Reads single experts of a checkpoint that has been loaded before, through the same packing."""

    def __init__(self, directory: Path, spec: DecoderSpec, dtype: torch.dtype, owned: OwnedExperts) -> None:
        self._directory = directory
        self._spec = spec
        self._dtype = dtype
        self._owned = owned
        self._index: Mapping[str, TensorInfo] | None = None

    def __call__(self, layer: int, expert: int) -> Tensor:
        """The packed bytes, in memory of their own. Raises CheckpointError."""
        spec, index = self._spec, self._index or read_index(self._directory)
        self._index = index
        with TensorReader(index, 0, quantization=spec.quantization) as reader:
            loaded, one = (
                ExpertReader(spec, plan_experts(spec, index, layer, experts), reader, self._dtype)
                for experts in (self._owned(layer), [expert])
            )
            if one.shape != loaded.shape:
                raise CheckpointError(f"Expert {expert} of layer {layer} is stored otherwise than the others.")
            return one.read(0)
