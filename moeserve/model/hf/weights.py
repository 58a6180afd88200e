"""Where each parameter of transformers' modelling code lies in a checkpoint, by transformers' own conversion mappings.

The mappings are data: renamings, and converters that say which stored tensors become one parameter, by which
operations. Experts are read one at a time: a converter gets the tensors of a single expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from kernels.moe import expert_layout
from kernels.packed_experts import ExpertLayout, ExpertShape
from moeserve.model.checkpoint import StoredTensor, TensorInfo, read_index
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.spec import CheckpointError
from moeserve.model.tensor_reader import Progress, TensorReader

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(slots=True)
class Source:
    """The stored tensors that one conversion reads, by the pattern that names them, in order."""

    converter: WeightConverter | None
    tensors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [name for names in self.tensors.values() for name in names]


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The parameters of a model and the stored tensors that they come from.

    shapes: of all parameters and buffers that a checkpoint holds, by name. sources: of those outside experts.
    expert_sources: of the parameters of experts, whose first dimension counts them. tied: parameters that are another
    one once more.
    """

    index: Mapping[str, TensorInfo]
    shapes: Mapping[str, tuple[int, ...]]
    sources: Mapping[str, Source]
    expert_sources: Mapping[str, Source]
    tied: Mapping[str, str]

    def is_narrow(self, source: Source) -> bool:
        """Return whether all that is read is stored in bfloat16."""
        return all(self.index[name].dtype == "BF16" for name in source.names)

    def reader(self, progress: Progress | None = None) -> TensorReader:
        names = {name for part in (self.sources, self.expert_sources) for s in part.values() for name in s.names}
        return TensorReader(self.index, sum(self.index[name].num_bytes for name in names), progress=progress)

    def stored(self, name: str) -> StoredTensor:
        info = self.index[name]
        if info.dtype not in _FLOATS and not info.dtype.startswith(("I", "U", "BOOL")):
            raise CheckpointError(f"{name} is stored as {info.dtype}, which cannot be read.")
        return StoredTensor(name, info.shape, info.num_bytes, info.dtype)


def map_weights(code: ModellingCode, directory: Path, experts: Sequence[str]) -> WeightMap:
    """Plan from the headers alone. experts: the names of the modules of experts in `code.outer`, which is empty.

    Raises CheckpointError for a parameter without stored tensors.
    """
    index, state = read_index(directory), code.outer.state_dict()
    mapping = get_model_conversion_mapping(code.outer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, Source] = {}
    expert_sources: dict[str, Source] = {}
    for name in sorted(index, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, code.outer.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state and pattern is None:
            continue  # Of a tower that texts do not pass, or of layers that predict further tokens.
        part = expert_sources if target.rpartition(".")[0] in experts else sources
        source = part.setdefault(target, Source(of_pattern[pattern] if pattern else None))
        source.tensors.setdefault(pattern or name, []).append(name)
    tied = {name: other for name, other in code.outer.all_tied_weights_keys.items() if name not in sources}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return WeightMap(index, shapes, sources, expert_sources, tied)


def convert(weights: WeightMap, target: str, reader: TensorReader, code: ModellingCode) -> dict[str, Tensor]:
    """Read the parameters that one conversion gives, by name, as they are stored. target: a key of `sources`."""
    source = weights.sources[target]
    parts = {pattern: [_read(weights, reader, name) for name in names] for pattern, names in source.tensors.items()}
    if source.converter is None:
        return {target: next(iter(parts.values()))[0]}
    return _run(source.converter, target, parts, code)


class ExpertParameters:
    """Reads the experts of one layer one by one, in the form in which our kernels take them.

    owned: the experts in the order of their places. shape, layout: of one packed expert.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        weights: WeightMap,
        reader: TensorReader,
        code: ModellingCode,
        owned: Sequence[int] | None,
        dtype: torch.dtype,
    ) -> None:
        """name: of the module of experts in `code.outer`. owned: None for all. dtype: in which they compute."""
        self._name, self._module, self._weights, self._reader, self._code = name, module, weights, reader, code
        self._num_experts = weights.shapes[f"{name}.down_proj"][0]
        self.owned = tuple(range(self._num_experts)) if owned is None else tuple(owned)
        _, rows, columns = weights.shapes[f"{name}.down_proj"]
        hidden, width = (columns, rows) if module.is_transposed else (rows, columns)
        narrow = dtype == torch.float32 and all(
            weights.is_narrow(source)
            for parameter, source in weights.expert_sources.items()
            if parameter.startswith(f"{name}.") and "bias" not in parameter
        )
        kept = torch.bfloat16 if narrow else dtype
        self.shape = ExpertShape(hidden, width, dtype, kept, module.has_bias, module.has_gate)
        self._first = "gate_up_proj" if module.has_gate else "up_proj"

    @property
    def layout(self) -> ExpertLayout:
        return expert_layout(self.shape)

    def read(self, place: int) -> Tensor:
        """Return the packed bytes of the expert at a place, uint8 [layout.num_bytes]."""
        return self.layout.pack(*self.read_matrices(place))

    def read_matrices(self, place: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return gate_up [2I, H] (gate rows first), down [H, I] and their biases [2I] and [H], or None.

        Without a gate the first is up [I, H].
        """
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
        target = f"{self._name}.{parameter}"
        source = self._weights.expert_sources[target]
        parts = {pattern: [self._part(names, expert)] for pattern, names in source.tensors.items()}
        if source.converter is None:
            return next(iter(parts.values()))[0][0]
        converted = _run(source.converter, target, parts, self._code, _OneExpert(self._weights))
        found = [tensor for name, tensor in converted.items() if name.endswith(parameter)]
        return (found or list(converted.values()))[0][0]

    def _part(self, names: list[str], expert: int) -> Tensor:
        if len(names) == self._num_experts:
            return _read(self._weights, self._reader, names[expert])
        if len(names) > 1:
            raise CheckpointError(f"{len(names)} tensors such as {names[0]} hold {self._num_experts} experts.")
        stored = self._weights.stored(names[0])
        out = torch.empty((1, *stored.shape[1:]), dtype=_FLOATS[stored.dtype])
        self._reader.read_expert_into(stored, expert, out)
        return out


def num_loaded_bytes(weights: WeightMap, item_size: int, *, narrow: bool, num_owned: Mapping[str, int]) -> int:
    """Return the bytes of the loaded weights at `item_size` bytes per number.

    narrow: matrices stored in bfloat16 stay so. num_owned: how many experts of a module, by its name, are loaded.
    """
    total = 0
    for name, shape in weights.shapes.items():
        module = name.rpartition(".")[0]
        source = weights.sources.get(name) or weights.expert_sources.get(name)
        if source is None and name in weights.tied:
            source = weights.sources.get(weights.tied[name])
        stays = narrow and len(shape) > 1 and source is not None and weights.is_narrow(source)
        count = prod(shape)
        if module in num_owned:
            count = count // shape[0] * num_owned[module]
        total += count * (2 if stays else item_size)
    return total


def _read(weights: WeightMap, reader: TensorReader, name: str) -> Tensor:
    """Read a whole tensor as it is stored."""
    stored = weights.stored(name)
    return reader.read(stored, _FLOATS.get(stored.dtype, torch.int64))


class _OneExpert:
    """The model of a conversion that gets the tensors of one expert: parameters of experts have a single one."""

    def __init__(self, weights: WeightMap) -> None:
        self._weights = weights

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty((1, *self._weights.shapes[name][1:]), device="meta")


def _run(
    converter: WeightConverter,
    target: str,
    parts: dict[str, list[Tensor]],
    code: ModellingCode,
    model: _OneExpert | None = None,
) -> dict[str, Tensor]:
    own: Any = deepcopy(converter)
    own.collected_tensors = parts
    try:
        converted = own.convert(target, model=model or code.outer, config=code.outer.config)
    except Exception as error:  # Conversions check their input with any exception type.
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{target} cannot be made of the checkpoint's tensors: {reason}") from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}
