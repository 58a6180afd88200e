"""Where each parameter of transformers' modelling code lies in a checkpoint, by transformers' own conversion mappings.

The mappings are data: renamings, and converters that say which stored tensors become one parameter, by which
operations.
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

from moeserve.model.checkpoint import KEPT_IN_BFLOAT16, StoredTensor, check_scaled, read_index
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import TensorInfo
from moeserve.model.tensor_reader import TensorReader

# Compressed matrices are expanded into 16 bits.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOATS |= {"F8_E4M3": torch.bfloat16, "MXFP4": torch.bfloat16}
_NARROW = KEPT_IN_BFLOAT16 | {"F8_E4M3", "MXFP4"}
_WHOLE_NUMBERS = ("I", "U", "BOOL")
# Endings of the names of the parts of compressed tensors.
_BLOCKS, _SCALES = "_blocks", "_scales"


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

    index: of the checkpoint. tensors: its tensors by name; a tensor stored as blocks and scales has the
    name and the shape without compression. shapes: by name, of all parameters and buffers that a checkpoint holds.
    sources: of the parameters and buffers outside experts. expert_sources: of the parameters of experts, whose first
    dimension counts experts. tied: parameters that share the tensor of another parameter.
    """

    index: Mapping[str, TensorInfo]
    tensors: Mapping[str, StoredTensor]
    shapes: Mapping[str, tuple[int, ...]]
    sources: Mapping[str, Source]
    expert_sources: Mapping[str, Source]
    tied: Mapping[str, str]

    def is_narrow(self, source: Source) -> bool:
        """Return whether all tensors of `source` are stored in bfloat16 or in fewer bits."""
        return all(self.tensors[name].dtype in _NARROW for name in source.names)

    def num_stored_bytes(self, source: Source) -> int:
        """Return the stored bytes of all tensors that a conversion reads."""
        return sum(self.tensors[name].num_bytes for name in source.names)


def map_weights(code: ModellingCode, directory: Path, experts: Sequence[str]) -> WeightMap:
    """Map the parameters from the headers alone. experts: the modules of experts in `code.outer`, which is empty.

    Raise CheckpointError for a parameter without stored tensors.
    """
    index, state = read_index(directory), code.outer.state_dict()
    tensors = _stored_tensors(index)
    mapping = get_model_conversion_mapping(code.outer)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, Source] = {}
    expert_sources: dict[str, Source] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, code.outer.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state and pattern is None:
            continue  # It belongs to a tower that texts do not pass, or to layers that predict further tokens.
        part = expert_sources if target.rpartition(".")[0] in experts else sources
        source = part.setdefault(target, Source(of_pattern[pattern] if pattern else None))
        source.tensors.setdefault(pattern or name, []).append(name)
    tied = {name: other for name, other in code.outer.all_tied_weights_keys.items() if name not in sources}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return WeightMap(index, tensors, shapes, sources, expert_sources, tied)


def _stored_tensors(index: Mapping[str, TensorInfo]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for name, info in index.items():
        blocks, scales = name.removesuffix(_SCALES) + _BLOCKS, name.removesuffix(_BLOCKS) + _SCALES
        if name.endswith(_BLOCKS) and scales in index and len(info.shape) == 4:
            # Blocks [E, N, G, 16] of two numbers per byte; matrices are [K, N] once they are expanded.
            num_experts, rows, groups, size = info.shape
            shape = (num_experts, 2 * groups * size, rows)
            num_bytes = info.num_bytes + index[scales].num_bytes
            found[name.removesuffix(_BLOCKS)] = StoredTensor(name.removesuffix(_BLOCKS), shape, num_bytes, "MXFP4")
        elif info.packed is not None:
            found[name] = StoredTensor(name, info.shape, info.num_bytes, "F8_E4M3")
        elif not (name.endswith(_SCALES) and blocks in index):
            check_scaled(name, info)
            found[name] = StoredTensor(name, info.shape, info.num_bytes, info.dtype)
    return found


def convert(weights: WeightMap, target: str, reader: TensorReader, code: ModellingCode) -> dict[str, Tensor]:
    """Read the parameters that one conversion gives, by name, as they are stored. target: a key of `sources`."""
    source = weights.sources[target]
    parts = {
        pattern: [read_tensor(weights, reader, name) for name in names] for pattern, names in source.tensors.items()
    }
    if source.converter is None:
        return {target: next(iter(parts.values()))[0]}
    return run_conversion(source.converter, target, parts, code)


def num_loaded_bytes(weights: WeightMap, item_size: int, *, narrow: bool, num_owned: Mapping[str, int]) -> int:
    """Return the bytes of the loaded weights at `item_size` bytes per number.

    narrow: matrices stored in bfloat16 stay so. num_owned: by module name, the number of its experts that are loaded.
    """
    total = 0
    for name, shape in weights.shapes.items():
        module = name.rpartition(".")[0]
        source = weights.sources.get(name) or weights.expert_sources.get(name)
        if source is None and name in weights.tied:
            source = weights.sources.get(weights.tied[name])
        # The first dimension of expert tensors counts experts. Biases are never narrow.
        matrix = len(shape) > (2 if name in weights.expert_sources else 1)
        stays = narrow and matrix and source is not None and weights.is_narrow(source)
        count = prod(shape)
        if module in num_owned:
            count = count // shape[0] * num_owned[module]
        total += count * (2 if stays else item_size)
    return total


def read_tensor(weights: WeightMap, reader: TensorReader, name: str) -> Tensor:
    """Read a whole tensor as it is stored, or expanded into 16 bits."""
    stored = weights.tensors[name]
    if stored.dtype == "MXFP4":
        return torch.cat([read_expert(weights, reader, name, expert) for expert in range(stored.shape[0])])
    return reader.read(stored, _read_as(stored))


def read_expert(weights: WeightMap, reader: TensorReader, name: str, expert: int) -> Tensor:
    """Read one expert's part of a tensor of all experts, [1, ...]; see `read_tensor`."""
    stored = weights.tensors[name]
    out = torch.empty((1, *stored.shape[1:]), dtype=_read_as(stored))
    if stored.dtype == "MXFP4":
        parts = (weights.index[name + suffix] for suffix in (_BLOCKS, _SCALES))
        blocks, scales = (
            StoredTensor(name + suffix, part.shape, part.num_bytes, part.dtype)
            for suffix, part in zip((_BLOCKS, _SCALES), parts, strict=True)
        )
        reader.read_mxfp4_expert_into(blocks, scales, expert, out[0].T)
    else:
        reader.read_expert_into(stored, expert, out)
    return out


def _read_as(stored: StoredTensor) -> torch.dtype:
    if stored.dtype not in _FLOATS and not stored.dtype.startswith(_WHOLE_NUMBERS):
        raise CheckpointError(f"{stored.name} is stored as {stored.dtype}, which cannot be read.")
    return _FLOATS.get(stored.dtype, torch.int64)


def run_conversion(
    converter: WeightConverter, target: str, parts: dict[str, list[Tensor]], code: ModellingCode, model: Any = None
) -> dict[str, Tensor]:
    own: Any = deepcopy(converter)
    own.collected_tensors = parts
    try:
        converted = own.convert(target, model=model or code.outer, config=code.outer.config)
    except Exception as error:  # Conversions check their input with any exception type.
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{target} cannot be made of the checkpoint's tensors: {reason}") from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}
