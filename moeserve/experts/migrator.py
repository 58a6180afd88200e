"""How a rank reads the experts that a migration brings it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic

import torch

from experts.rebalance import Weights
from moeserve.model.checkpoint import OwnedExperts, TensorInfo, plan_experts, read_index
from moeserve.model.expert_weights import ExpertReader
from moeserve.model.spec import CheckpointError, DecoderSpec
from moeserve.model.tensor_reader import TensorReader


class Rereader(Generic[Weights]):
    """Reads single experts of a checkpoint that has been loaded before. Layers are those with experts."""

    def __init__(
        self,
        directory: Path,
        spec: DecoderSpec,
        dtype: torch.dtype,
        owned: OwnedExperts,
        take: Callable[[ExpertReader], Weights],
    ) -> None:
        """owned: what was loaded. take: how it was, from a reader with one expert, into memory of its own."""
        self._directory = directory
        self._spec = spec
        self._dtype = dtype
        self._owned = owned
        self._take = take
        self._index: Mapping[str, TensorInfo] | None = None

    def __call__(self, number: int, expert: int) -> Weights:
        """Raises CheckpointError."""
        spec, index = self._spec, self._index or read_index(self._directory)
        self._index, layer = index, spec.moe_layers[number]
        with TensorReader(index, 0, quantization=spec.quantization) as reader:
            loaded, one = (
                ExpertReader(spec, plan_experts(spec, index, layer, experts), reader, self._dtype)
                for experts in (self._owned(layer), [expert])
            )
            if one.shape != loaded.shape:
                raise CheckpointError(f"Expert {expert} of layer {layer} is stored otherwise than the others.")
            return self._take(one)
