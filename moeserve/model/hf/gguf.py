"""Where each parameter of transformers' modelling code lies in a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from moeserve.model.checkpoint import StoredTensor
from moeserve.model.gguf.config import Fields
from moeserve.model.gguf.folder import gguf_files
from moeserve.model.gguf.header import read_gguf
from moeserve.model.gguf.modules import ModuleParts
from moeserve.model.gguf.parts import GgufPart
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.source import Source, WeightMap
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import TensorInfo


def map_gguf(code: ModellingCode, directory: Path, experts: Sequence[str]) -> WeightMap:
    """Do as `map_weights`, for a GGUF file. Raise CheckpointError."""
    parts = ModuleParts(Fields(read_gguf(gguf_files(directory)[0])))
    shapes = {name: tuple(tensor.shape) for name, tensor in code.outer.state_dict().items()}
    found: dict[str, tuple[GgufPart, tuple[int, ...]]] = {}
    sources: dict[str, Source] = {}
    expert_sources: dict[str, Source] = {}
    for name, shape in shapes.items():
        if name.rpartition(".")[0] in experts:
            projections = parts.projections(name)
            found |= {own: (part, part.shape) for own, part in projections.items()}
            if projections:
                expert_sources[name] = Source(None, {own: [own] for own in projections}, by_projection=True)
                _check_experts(name, shape, list(projections.values()))
        elif (part := parts.parameter(name) or parts.computed_experts(name)) is not None:
            if prod(part.shape) != prod(shape):
                raise CheckpointError(
                    f"{name} has shape {list(part.shape)} in the GGUF file, but the configuration says {list(shape)}."
                )
            found[name] = part, shape
            sources[name] = Source(None, {name: [name]})
    parts.check_all_found()
    tied = {name: other for name, other in code.outer.all_tied_weights_keys.items() if name not in sources}
    index = {
        name: TensorInfo(part.sources[0].file, part.kind, part.shape, part.num_bytes, part)
        for name, (part, _) in found.items()
    }
    tensors = {name: StoredTensor(name, shape, part.num_bytes, part.kind) for name, (part, shape) in found.items()}
    return WeightMap(index, tensors, shapes, sources, expert_sources, tied)


def _check_experts(name: str, shape: tuple[int, ...], parts: list[GgufPart]) -> None:
    sizes = sorted((sum(part.shape[1] for part in parts), parts[0].shape[2]))
    if any(len(part.shape) != 3 or part.shape[0] != shape[0] for part in parts) or sizes != sorted(shape[1:]):
        raise CheckpointError(f"The experts of {name} do not have the shapes of the configuration in the GGUF file.")
