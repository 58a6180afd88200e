"""Single experts of a checkpoint for transformers' modelling code: a conversion gets the tensors of one expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.moe import expert_layout
from kernels.packed_experts import ExpertLayout, ExpertMatrices, ExpertShape
from moeserve.model.checkpoint import OwnedExperts
from moeserve.model.hf.modelling import ModellingCode, empty_model, read_hf_config
from moeserve.model.hf.spec import experts_by_layer, quantization_of
from moeserve.model.hf.weights import (
    Source,
    WeightMap,
    map_weights,
    num_loaded_bytes,
    read_expert,
    read_tensor,
    run_conversion,
)
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import TensorInfo
from moeserve.model.tensor_reader import Progress, TensorReader


@dataclass(frozen=True, slots=True)
class MappedModel:
    """An empty model and where its parameters lie.

    experts: by layer, the name in `code.outer` of the module of experts that our kernels compute. modules: these
    modules, by name.
    """

    code: ModellingCode
    weights: WeightMap
    experts: Mapping[int, str]
    modules: Mapping[str, Any]

    def num_bytes(self, item_size: int, owned: OwnedExperts | None, *, narrow: bool) -> int:
        """Return the bytes of the loaded weights; see `num_loaded_bytes`. owned: the experts that are loaded, by layer,
        None for all of them."""
        num_owned = {
            name: self.num_experts(name) if owned is None else len(owned(layer)) for layer, name in self.experts.items()
        }
        return num_loaded_bytes(self.weights, item_size, narrow=narrow, num_owned=num_owned)

    def num_experts(self, name: str) -> int:
        return self.weights.shapes[f"{name}.down_proj"][0]


def map_model(directory: Path) -> MappedModel:
    """Map the checkpoint in `directory` from its headers alone. Raise ModelError."""
    config = read_hf_config(directory)
    quantization_of(config)  # It refuses what cannot be read.
    code = empty_model(config)
    layer_of = {module: layer for layer, module in experts_by_layer(code).items()}
    modules = {name: module for name, module in code.outer.named_modules() if module in layer_of}
    experts = {layer_of[module]: name for name, module in modules.items()}
    weights = map_weights(code, directory, list(modules))
    return MappedModel(code, weights, dict(sorted(experts.items())), modules)


class TransformersExperts:
    """The experts of a model on transformers' code. See `moeserve.model.expert_weights.StoredExperts`."""

    def __init__(self, model: MappedModel, dtype: torch.dtype) -> None:
        """dtype: the dtype in which the experts compute."""
        self._model, self._dtype = model, dtype

    @property
    def index(self) -> Mapping[str, TensorInfo]:
        return self._model.weights.index

    @property
    def layers(self) -> Sequence[int]:
        return tuple(self._model.experts)

    def shapes(self) -> tuple[ExpertShape, ...]:
        with self.reader(0) as reader:
            return tuple(self.layer(layer, (), reader).shape for layer in self.layers)

    def num_bytes(self, owned: OwnedExperts | None) -> int:
        weights, total = self._model.weights, 0
        for layer, name in self._model.experts.items():
            sources = (source for key, source in weights.expert_sources.items() if key.startswith(f"{name}."))
            stored = sum(weights.num_stored_bytes(source) for source in sources)
            count = self._model.num_experts(name)
            total += stored // count * (count if owned is None else len(owned(layer)))
        return total

    def reader(self, total_bytes: int, progress: Progress | None = None) -> TensorReader:
        return TensorReader(self.index, total_bytes, progress=progress)

    def layer(self, layer: int, owned: Sequence[int] | None, reader: TensorReader) -> ExpertParameters:
        return ExpertParameters(self._model, self._model.experts[layer], reader, owned, self._dtype)


def open_experts(directory: Path, dtype: torch.dtype) -> TransformersExperts:
    """Return the experts of the checkpoint in `directory`, to compute in `dtype`. Raise ModelError."""
    return TransformersExperts(map_model(directory), dtype)


class ExpertParameters:
    """Reads the experts of one layer. See `moeserve.model.expert_weights.LayerExperts`."""

    def __init__(
        self, model: MappedModel, name: str, reader: TensorReader, owned: Sequence[int] | None, dtype: torch.dtype
    ) -> None:
        """name: of the module of experts. owned: None for all experts. dtype: the dtype in which they compute."""
        self._name, self._weights, self._reader, self._code = name, model.weights, reader, model.code
        self._module = model.modules[name]
        self._num_experts = model.num_experts(name)
        self.owned = tuple(range(self._num_experts)) if owned is None else tuple(owned)
        _, rows, columns = self._weights.shapes[f"{name}.down_proj"]
        hidden, width = (columns, rows) if self._module.is_transposed else (rows, columns)
        self._first = "gate_up_proj" if self._module.has_gate else "up_proj"
        matrices = (self._source(parameter) for parameter in (self._first, "down_proj"))
        narrow = dtype == torch.float32 and all(map(self._weights.is_narrow, matrices))
        kept = torch.bfloat16 if narrow else dtype
        self.shape = ExpertShape(hidden, width, dtype, kept, self._module.has_bias, self._module.has_gate)

    @property
    def layout(self) -> ExpertLayout:
        return expert_layout(self.shape)

    def read(self, place: int) -> Tensor:
        return self.layout.pack(self.read_matrices(place))

    def read_matrices(self, place: int) -> ExpertMatrices:
        expert, module = self.owned[place], self._module
        gate_up, down = self._parameter(self._first, expert), self._parameter("down_proj", expert)
        if module.is_transposed:
            gate_up, down = gate_up.T, down.T
        biases: list[Tensor | None] = [None, None]
        if module.has_bias:
            biases = [self._parameter(f"{self._first}_bias", expert), self._parameter("down_proj_bias", expert)]
        if module.has_gate and not module.is_concatenated:  # Gate and up channels alternate.
            gate_up = torch.cat([gate_up[0::2], gate_up[1::2]])
            if biases[0] is not None:
                biases[0] = torch.cat([biases[0][0::2], biases[0][1::2]])
        dtype = self.shape.weight_dtype
        wide = [None if bias is None else bias.to(self.shape.dtype) for bias in biases]
        return gate_up.to(dtype).contiguous(), down.to(dtype).contiguous(), wide[0], wide[1]

    def _parameter(self, parameter: str, expert: int) -> Tensor:
        """Read an expert's part of a parameter alone."""
        target, source = f"{self._name}.{parameter}", self._source(parameter)
        parts = {pattern: [self._part(names, expert)] for pattern, names in source.tensors.items()}
        if source.converter is None:
            return next(iter(parts.values()))[0][0]
        converted = run_conversion(source.converter, target, parts, self._code, _OneExpert(self._weights))
        found = [tensor for name, tensor in converted.items() if name.endswith(parameter)]
        return (found or list(converted.values()))[0][0]

    def _source(self, parameter: str) -> Source:
        target = f"{self._name}.{parameter}"
        if target not in self._weights.expert_sources:
            raise CheckpointError(f"The checkpoint lacks the tensors of {target}.")
        return self._weights.expert_sources[target]

    def _part(self, names: list[str], expert: int) -> Tensor:
        if len(names) == self._num_experts:
            return read_tensor(self._weights, self._reader, names[expert])
        if len(names) > 1:
            raise CheckpointError(f"{len(names)} tensors such as {names[0]} hold {self._num_experts} experts.")
        return read_expert(self._weights, self._reader, names[0], expert)


class _OneExpert:
    """Stands for the model in a conversion of one expert's tensors: parameters of experts hold a single expert."""

    def __init__(self, weights: WeightMap) -> None:
        self._weights = weights

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty((1, *self._weights.shapes[name][1:]), device="meta")
