"""Where each parameter of transformers' modelling code lies in a checkpoint, by transformers' own conversion mappings.

The mappings are data: renamings, and converters that say which stored tensors become one parameter, by which
operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from moeserve.model.checkpoint import StoredTensor, check_scaled, read_index
from moeserve.model.files import is_gguf_folder
from moeserve.model.hf.common_experts import StackedExperts
from moeserve.model.hf.matrices import StoredRows, whole_rows
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.source import EXPANDED, Source, WeightMap
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import TensorInfo, is_in_blocks
from moeserve.model.tensor_reader import TensorReader

# Floats of 8 and 4 bits are expanded into 16 bits, where they do not stay as they are; other blocks into 32.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WHOLE_NUMBERS = ("I", "U", "BOOL")
# Endings of the names of the parts of compressed tensors.
_BLOCKS, _SCALES = "_blocks", "_scales"


def map_weights(code: ModellingCode, directory: Path, experts: Sequence[str]) -> WeightMap:
    """Map the parameters from the headers alone. experts: the modules of experts in `code.outer`, which is empty.

    Raise CheckpointError for a parameter without stored tensors.
    """
    if is_gguf_folder(directory):
        from moeserve.model.hf.gguf import map_gguf  # Imported late: other checkpoints do without its packages.

        return map_gguf(code, directory, experts)
    index, state = read_index(directory), code.outer.state_dict()
    tensors = _stored_tensors(index)
    mapping = [*code.conversions, *get_model_conversion_mapping(code.outer)]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in reversed(converters) for pattern in converter.source_patterns}
    sources: dict[str, Source] = {}
    expert_sources: dict[str, Source] = {}
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, code.outer.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state and pattern is None:
            continue  # It belongs to a tower that texts do not pass, or to layers that predict further tokens.
        part = expert_sources if target.rpartition(".")[0] in experts else sources
        converter = of_pattern[pattern] if pattern else None
        if isinstance(converter, StackedExperts):
            tensors[name] = _by_expert(tensors[name], state[target].shape[0])
        source = part.setdefault(target, Source(converter))
        source.tensors.setdefault(pattern or name, []).append(name)
    tied = {name: other for name, other in code.outer.all_tied_weights_keys.items() if name not in sources}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return WeightMap(index, tensors, shapes, sources, expert_sources, tied)


def _by_expert(stored: StoredTensor, num_experts: int) -> StoredTensor:
    """Return [E * rows, columns] as [E, rows, columns]."""
    if len(stored.shape) != 2 or stored.shape[0] % num_experts or stored.dtype not in _FLOATS:
        raise CheckpointError(
            f"{stored.name} has shape {list(stored.shape)} of {stored.dtype}, which cannot hold {num_experts} experts."
        )
    return replace(stored, shape=(num_experts, stored.shape[0] // num_experts, stored.shape[1]))


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
        elif not (name.endswith(_SCALES) and blocks in index):
            check_scaled(name, info)
            has_order = info.packed is not None and info.packed.has_order
            found[name] = StoredTensor(name, info.shape, info.num_bytes, info.dtype, has_order=has_order)
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


def stored_rows(weights: WeightMap, target: str, code: ModellingCode) -> dict[str, StoredRows]:
    """Return the parameters of one conversion that consist of whole rows of stored matrices, by name."""
    source = weights.sources[target]
    if source.converter is None:
        return {target: StoredRows(tuple(source.names), None)} if len(source.names) == 1 else {}
    converter, shapes = source.converter, {name: weights.tensors[name].shape for name in source.names}
    if any(len(shape) != 2 for shape in shapes.values()):
        return {}

    def turn(places: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = {pattern: [places[name] for name in names] for pattern, names in source.tensors.items()}
        return run_conversion(converter, target, parts, code)

    return whole_rows(shapes, turn)


def num_loaded_bytes(
    weights: WeightMap,
    item_size: int,
    *,
    narrow: bool,
    num_owned: Mapping[str, int],
    keys: Mapping[str, str],
    rounding: Rounding = NO_ROUNDING,
) -> int:
    """Return the bytes of the loaded weights at `item_size` bytes per number.

    narrow: matrices stored in bfloat16 stay so, but for those that modules other than projections, tables and our
    experts compute with. num_owned: by module name, the number of its experts that are loaded. keys: of the modules
    whose matrices `rounding` may quantise; see `keys_of`.
    """
    total = 0
    for name, shape in weights.shapes.items():
        module = name.rpartition(".")[0]
        quantised = _quantised_bytes(weights, name, keys.get(module), rounding)
        if quantised is not None:
            total += quantised
            continue
        source = weights.sources.get(name) or weights.expert_sources.get(name)
        if source is None and name in weights.tied:
            source = weights.sources.get(weights.tied[name])
        # The first dimension of expert tensors counts experts. Biases are never narrow.
        matrix = len(shape) > (2 if name in weights.expert_sources else 1) and (module in keys or module in num_owned)
        stays = narrow and matrix and source is not None and weights.is_narrow(source)
        count = prod(shape)
        if module in num_owned:
            count = count // shape[0] * num_owned[module]
        total += count * (2 if stays else item_size)
    return total


def _quantised_bytes(weights: WeightMap, name: str, key: str | None, rounding: Rounding) -> int | None:
    """Return the bytes of a matrix outside experts that stays or becomes quantised, None for any other parameter."""
    source = weights.sources.get(weights.tied.get(name, name))
    if key is None or source is None or not name.endswith(".weight"):
        return None
    dtype = weights.tensors[source.names[0]].dtype
    return rounding.num_bytes(key, StoredTensor(name, weights.shapes[name], 0, dtype))


def read_tensor(weights: WeightMap, reader: TensorReader, name: str) -> Tensor:
    """Read a whole tensor as it is stored, or expanded into 16 bits."""
    stored = weights.tensors[name]
    if name not in weights.index:
        return torch.cat([read_expert(weights, reader, name, expert) for expert in range(stored.shape[0])])
    return reader.read(stored, _read_as(stored))


def read_expert(weights: WeightMap, reader: TensorReader, name: str, expert: int) -> Tensor:
    """Read one expert's part of a tensor of all experts, [1, ...]; see `read_tensor`."""
    stored = weights.tensors[name]
    out = torch.empty((1, *stored.shape[1:]), dtype=_read_as(stored))
    if name not in weights.index:
        reader.read_mxfp4_expert_into(*mxfp4_parts(weights, name), expert, out[0].T)
    else:
        reader.read_expert_into(stored, expert, out)
    return out


def mxfp4_parts(weights: WeightMap, name: str) -> tuple[StoredTensor, StoredTensor]:
    """Return the blocks and the scales of a tensor of all experts, whose name is in no file."""
    names = (name + _BLOCKS, name + _SCALES)
    parts = ((own, weights.index[own]) for own in names)
    blocks, scales = (StoredTensor(own, part.shape, part.num_bytes, part.dtype) for own, part in parts)
    return blocks, scales


def _read_as(stored: StoredTensor) -> torch.dtype:
    if stored.dtype in EXPANDED:
        return torch.bfloat16
    if is_in_blocks(stored.dtype):
        return torch.float32
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
