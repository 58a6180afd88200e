"""The expert file of a checkpoint: built once with one expert in memory at a time, and checked at every start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from experts.expert_file import VERSION, round_to_page, write_expert_file
from kernels.moe import expert_layout
from kernels.packed_experts import ExpertLayout, ExpertPacking
from moeserve.config import cache_root
from moeserve.model.cache import ensure_built
from moeserve.model.checkpoint import TensorInfo, plan_weights, read_index
from moeserve.model.expert_weights import expert_plans, expert_shape, packed_experts
from moeserve.model.spec import DecoderSpec, ModelError, Progress

_FILE_NAME = "experts.bin"


@dataclass(frozen=True, slots=True)
class ExpertStore:
    """A file of all experts of all sparse layers. source: 32 bytes that identify the weights and their layout."""

    path: Path
    source: bytes


def layout_in_store(directory: Path, spec: DecoderSpec, dtype: torch.dtype) -> ExpertLayout:
    """See `common_layout`."""
    return common_layout(read_index(directory), spec, dtype)


def common_layout(index: Mapping[str, TensorInfo], spec: DecoderSpec, dtype: torch.dtype) -> ExpertLayout:
    """Return the layout of experts that compute in `dtype`. Raises ModelError if layers of the checkpoint differ."""
    shapes = {expert_shape(spec, plan, dtype) for plan in expert_plans(plan_weights(spec, index))}
    if len(shapes) > 1:
        raise ModelError("The checkpoint's experts are stored in several precisions: --expert-memory needs one.")
    return expert_layout(shapes.pop())


def ensure_expert_store(
    directory: Path,
    spec: DecoderSpec,
    packing: ExpertPacking,
    dtype: torch.dtype,
    root: Path | None,
    progress: Progress,
) -> ExpertStore:
    """Return the expert file of the checkpoint in `directory`, below `root` (default: the cache). Build it if missing.

    packing: of experts that compute in `dtype`; `layout_in_store` gives that of a CPU. Raises ModelError if the file
    cannot be built or is damaged: a file of many gigabytes that changed under its name is for its owner to look at.
    """
    index = read_index(directory)
    source = _source(directory, index, packing)
    assert spec.moe is not None
    num_layers, num_experts = len(spec.moe_layers), spec.moe.num_experts

    def build(folder: Path, report: Progress) -> None:
        folder.mkdir(parents=True)
        write_expert_file(
            folder / _FILE_NAME,
            source=source,
            num_layers=num_layers,
            num_experts=num_experts,
            expert_bytes=packing.num_bytes,
            experts=(expert.numpy().data for expert in packed_experts(spec, packing, dtype, index, report)),
        )

    folder = ensure_built(
        (root or cache_root() / "experts") / f"{directory.name}-{source.hex()[:16]}",
        builder=f"moeserve expert file {VERSION} {source.hex()}",
        build=build,
        bytes_needed=(num_layers * num_experts + 1) * round_to_page(packing.num_bytes),
        progress=progress,
        refuse_damaged=_FILE_NAME,
        advice="name a folder that can be in --expert-store-dir",
    )
    return ExpertStore(folder / _FILE_NAME, source)


def _source(directory: Path, index: Mapping[str, TensorInfo], packing: ExpertPacking) -> bytes:
    """Hash the configuration, and name, size and time of the weight files: to read them all would take too long."""
    digest = hashlib.sha256(f"{VERSION} {packing.name} {packing.num_bytes}\n".encode())
    digest.update((directory / "config.json").read_bytes())
    for file in sorted({info.file for info in index.values()}):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.digest()
