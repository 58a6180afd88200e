"""Single experts of a checkpoint for transformers' modelling code: a conversion gets the tensors of one expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.moe import expert_layout
from kernels.packed_experts import ExpertLayout, ExpertMatrices, ExpertShape
from kernels.weight_formats import Matrix, QuantizedRows, WeightFormat
from moeserve.model.checkpoint import OwnedExperts
from moeserve.model.hf.expert_form import form_of
from moeserve.model.hf.experts import activation_of
from moeserve.model.hf.matrices import StoredRows, keys_of, whole_rows
from moeserve.model.hf.modelling import ModellingCode, empty_model, read_hf_config
from moeserve.model.hf.source import Source, WeightMap
from moeserve.model.hf.spec import experts_by_layer
from moeserve.model.hf.weights import (
    map_weights,
    mxfp4_parts,
    num_loaded_bytes,
    read_expert,
    read_tensor,
    run_conversion,
)
from moeserve.model.rounding import NO_ROUNDING, Rounding, format_in_file, has_fine_experts, lies_in_blocks
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import TensorInfo
from moeserve.model.tensor_reader import Progress, TensorReader


@dataclass(frozen=True, slots=True)
class MappedModel:
    """An empty model and where its parameters lie.

    experts: by layer, the name in `code.outer` of the module of experts that our kernels compute. modules: these
    modules, by name. keys: see `keys_of`.
    """

    code: ModellingCode
    weights: WeightMap
    experts: Mapping[int, str]
    modules: Mapping[str, Any]
    keys: Mapping[str, str]

    def num_bytes(self, dtype: torch.dtype, owned: OwnedExperts | None, rounding: Rounding, *, narrow: bool) -> int:
        """Return the bytes of the loaded weights to compute in `dtype`; see `num_loaded_bytes`.

        owned: the experts that are loaded, by layer, None for all of them.
        """
        num_owned = {
            name: self.num_experts(name) if owned is None else len(owned(layer)) for layer, name in self.experts.items()
        }
        packed = 0
        if not rounding.is_none and any(num_owned.values()):
            shapes = TransformersExperts(self, dtype, rounding).shapes()
            for shape, name in zip(shapes, self.experts.values(), strict=True):
                if shape.formats is not None:
                    packed += expert_layout(shape).num_bytes * num_owned[name]
                    num_owned[name] = 0
        return packed + num_loaded_bytes(
            self.weights, dtype.itemsize, narrow=narrow, num_owned=num_owned, keys=self.keys, rounding=rounding
        )

    def num_experts(self, name: str) -> int:
        return self.weights.shapes[f"{name}.down_proj"][0]


def map_model(directory: Path) -> MappedModel:
    """Map the checkpoint in `directory` from its headers alone. Raise ModelError."""
    code = empty_model(read_hf_config(directory))
    return mapped_model(code, lambda experts: map_weights(code, directory, experts))


def mapped_model(code: ModellingCode, find_weights: Callable[[Sequence[str]], WeightMap]) -> MappedModel:
    """Return an empty model with the weights that `find_weights` maps, given the names of the modules of experts."""
    layer_of = {module: layer for layer, module in experts_by_layer(code).items()}
    modules = {name: module for name, module in code.outer.named_modules() if module in layer_of}
    experts = {layer_of[module]: name for name, module in modules.items()}
    weights = find_weights(list(modules))
    num_experts = max((weights.shapes[f"{name}.down_proj"][0] for name in modules), default=0)
    return MappedModel(code, weights, dict(sorted(experts.items())), modules, keys_of(code.outer, num_experts))


class TransformersExperts:
    """The experts of a model on transformers' code. See `moeserve.model.expert_weights.StoredExperts`."""

    def __init__(self, model: MappedModel, dtype: torch.dtype, rounding: Rounding = NO_ROUNDING) -> None:
        """dtype: the dtype in which the experts compute."""
        self._model, self._dtype, self._rounding = model, dtype, rounding

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

    def lie_as_packed(self) -> bool:
        weights = self._model.weights
        if not self._rounding.keeps_stored or self._rounding.experts is not None:
            return False
        names = (name for source in weights.expert_sources.values() for name in source.names if "bias" not in name)
        return all(name in weights.index and lies_in_blocks(weights.index[name]) for name in names)

    def reader(self, total_bytes: int, progress: Progress | None = None) -> TensorReader:
        return TensorReader(self.index, total_bytes, progress=progress)

    def layer(self, layer: int, owned: Sequence[int] | None, reader: TensorReader) -> ExpertParameters:
        name, is_fine = self._model.experts[layer], has_fine_experts(layer, self._model.code.config.num_hidden_layers)
        return ExpertParameters(self._model, name, reader, owned, self._dtype, self._rounding, is_fine=is_fine)


def open_experts(directory: Path, dtype: torch.dtype, rounding: Rounding = NO_ROUNDING) -> TransformersExperts:
    """Return the experts of the checkpoint in `directory`, to compute in `dtype`. Raise ModelError."""
    return TransformersExperts(map_model(directory), dtype, rounding)


class ExpertParameters:
    """Reads the experts of one layer. See `moeserve.model.expert_weights.LayerExperts`."""

    def __init__(
        self,
        model: MappedModel,
        name: str,
        reader: TensorReader,
        owned: Sequence[int] | None,
        dtype: torch.dtype,
        rounding: Rounding,
        *,
        is_fine: bool,
    ) -> None:
        """name: of the module of experts. owned: None for all experts. dtype: the dtype in which they compute.
        is_fine: see `ExpertShape`."""
        self._name, self._weights, self._reader, self._code = name, model.weights, reader, model.code
        form = form_of(model.modules[name])
        assert form is not None
        activation = activation_of(model.modules[name], form)
        assert activation is not None
        self.form, self.activation = form, activation
        self._num_experts = model.num_experts(name)
        self.owned = tuple(range(self._num_experts)) if owned is None else tuple(owned)
        _, rows, columns = self._weights.shapes[f"{name}.down_proj"]
        hidden, width = (columns, rows) if self.form.is_transposed else (rows, columns)
        self._first = "gate_up_proj" if self.form.has_gate else "up_proj"
        self._rows: dict[str, StoredRows] = {}
        matrices = [self._source(parameter) for parameter in (self._first, "down_proj")]
        narrow = dtype == torch.float32 and all(map(self._weights.is_narrow, matrices))
        formats = rounding.expert_formats(hidden, width)
        if formats is None and rounding.keeps_stored:
            formats = self._stored_formats(matrices)
        has_order = any(self._weights.tensors[n].has_order for source in matrices for n in source.names)
        self.shape = ExpertShape(
            hidden,
            width,
            dtype,
            torch.bfloat16 if narrow else dtype,
            self.form.has_bias,
            self.form.has_gate,
            formats=formats,
            arithmetic=rounding.arithmetic,
            has_order=bool(self._rows) and has_order,
            is_fine=is_fine,
        )

    def _stored_formats(self, sources: Sequence[Source]) -> tuple[WeightFormat, WeightFormat] | None:
        """Return the formats of both matrices in the checkpoint; None if they are not kept in their own bits."""
        formats = []
        for parameter, source in zip((self._first, "down_proj"), sources, strict=True):
            found = {format_in_file(self._weights.tensors[name].dtype) for name in source.names}
            rows = self._stored_rows(parameter, source)
            form = found.pop()
            if found or form is None or rows is None:
                self._rows.clear()
                return None
            self._rows[parameter] = rows
            formats.append(form)
        return formats[0], formats[1]

    def _stored_rows(self, parameter: str, source: Source) -> StoredRows | None:
        """Return the stored rows of an expert's matrix by the patterns of its source; None unless they are whole."""
        if source.by_projection:
            return StoredRows(tuple(source.tensors), None)
        shapes, turned = {}, set()
        for pattern, names in source.tensors.items():
            stored = self._weights.tensors[names[0]]
            one = stored.shape if len(names) == self._num_experts else (1, *stored.shape[1:])
            if (
                stored.name not in self._weights.index
            ):  # MXFP4: its blocks are rows of our order, and its matrices columns of it.
                one = (*one[:-2], one[-1], one[-2])
                turned.add(pattern)
            shapes[pattern] = one

        def turn(places: dict[str, Tensor]) -> dict[str, Tensor]:
            parts = {name: [place.mT if name in turned else place] for name, place in places.items()}
            return {parameter: self._in_our_order(parameter, self._convert(parameter, source, parts))}

        return whole_rows(shapes, turn).get(parameter)

    @property
    def layout(self) -> ExpertLayout:
        return expert_layout(self.shape)

    def read(self, place: int) -> Tensor:
        return self.layout.pack(self.read_matrices(place))

    def read_matrices(self, place: int) -> ExpertMatrices:
        expert = self.owned[place]
        gate_up, down = (self._matrix(parameter, expert) for parameter in (self._first, "down_proj"))
        biases: list[Tensor | None] = [None, None]
        if self.form.has_bias:
            names = (f"{self._first}_bias", "down_proj_bias")
            biases = [self._parameter(name, expert).to(self.shape.dtype).contiguous() for name in names]
        return gate_up, down, biases[0], biases[1]

    def _matrix(self, parameter: str, expert: int) -> Matrix:
        if parameter not in self._rows:
            return self._parameter(parameter, expert).to(self.shape.weight_dtype).contiguous()
        tensors = self._source(parameter).tensors
        rows = self._rows[parameter].of(lambda pattern: self._packed_part(tensors[pattern], expert))
        if rows is None:
            raise CheckpointError(f"The parts of {self._name}.{parameter} order their columns in several ways.")
        return rows

    def _parameter(self, parameter: str, expert: int) -> Tensor:
        """Read an expert's part of a parameter alone, in our order of rows."""
        source = self._source(parameter)
        if source.by_projection:
            return torch.cat([self._part(names, expert)[0] for names in source.tensors.values()])
        parts = {pattern: [self._part(names, expert)] for pattern, names in source.tensors.items()}
        return self._in_our_order(parameter, self._convert(parameter, source, parts))

    def _convert(self, parameter: str, source: Source, parts: dict[str, list[Tensor]]) -> Tensor:
        """Return one expert's part of a parameter. parts: of its stored tensors."""
        if source.converter is None:
            return next(iter(parts.values()))[0][0]
        target = f"{self._name}.{parameter}"
        converted = run_conversion(source.converter, target, parts, self._code, _OneExpert(self._weights))
        found = [tensor for name, tensor in converted.items() if name.endswith(parameter)]
        return (found or list(converted.values()))[0][0]

    def _in_our_order(self, parameter: str, tensor: Tensor) -> Tensor:
        """Return a matrix or a bias with gate rows first, then up rows."""
        if self.form.is_transposed and tensor.dim() == 2:
            tensor = tensor.T
        if parameter.startswith("gate_up") and not self.form.is_concatenated:  # Gate and up channels alternate.
            tensor = torch.cat([tensor[0::2], tensor[1::2]])
        return tensor

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

    def _packed_part(self, names: list[str], expert: int) -> QuantizedRows:
        """Return the rows of one expert of a stored matrix, or of its own one, in their blocks."""
        tensors = self._weights.tensors
        if len(names) == self._num_experts:
            return self._reader.read_quantised(tensors[names[expert]])
        stored = tensors[names[0]]
        if stored.name not in self._weights.index:
            return self._reader.read_mxfp4_rows(*mxfp4_parts(self._weights, stored.name), expert)
        return self._reader.read_quantised(stored, expert)


class _OneExpert:
    """Stands for the model in a conversion of one expert's tensors: parameters of experts hold a single expert."""

    def __init__(self, weights: WeightMap) -> None:
        self._weights = weights

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty((1, *self._weights.shapes[name][1:]), device="meta")
