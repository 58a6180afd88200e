"""Where experts lie that are not in memory: an expert file, built with one expert in memory at a time and checked at
every start, or the checkpoint itself, whose experts are packed one by one when they are wanted."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.file import VERSION, round_to_page, write_expert_file
from kernels.cpu.library import native_kernels
from kernels.moe import expert_layout
from kernels.packed_experts import ExpertLayout, ExpertPacking, LayerPackings
from moeserve.config import cache_root
from moeserve.model.cache import ensure_built, find_built
from moeserve.model.checkpoint import read_index
from moeserve.model.contents import HashFiles, model_digest
from moeserve.model.expert_folders import BUILDER, EXPERT_FILE, find_folder
from moeserve.model.expert_weights import LayerExperts, NativeExperts, StoredExperts, packed_experts
from moeserve.model.file_hashes import WEIGHTS_MEMORY, sampled_hashes, whole_hashes
from moeserve.model.rounding import NO_ROUNDING, Rounding
from moeserve.model.spec import CheckpointError, DecoderSpec, ModelError, ModelSpec, Progress, silent
from moeserve.model.stored import TensorInfo


def stored_experts(
    directory: Path, spec: ModelSpec, dtype: torch.dtype, rounding: Rounding = NO_ROUNDING
) -> StoredExperts:
    """Return the experts of the checkpoint in `directory`, to compute in `dtype`. Raise ModelError."""
    if isinstance(spec, DecoderSpec):
        return NativeExperts(read_index(directory), spec, dtype, rounding)
    from moeserve.model.hf.expert_weights import open_experts  # Imported late: it loads modelling code.

    return open_experts(directory, dtype, rounding)


def layouts_in_store(
    directory: Path, spec: ModelSpec, dtype: torch.dtype, rounding: Rounding = NO_ROUNDING
) -> LayerPackings[ExpertLayout]:
    """See `layouts_of`."""
    return layouts_of(stored_experts(directory, spec, dtype, rounding))


def native_layouts(
    index: Mapping[str, TensorInfo], spec: DecoderSpec, dtype: torch.dtype, rounding: Rounding
) -> LayerPackings[ExpertLayout]:
    """See `layouts_of`; for a model on our own code."""
    return layouts_of(NativeExperts(index, spec, dtype, rounding))


def layouts_of(stored: StoredExperts) -> LayerPackings[ExpertLayout]:
    """Return the layouts of the experts on a CPU, by layer. Raise ModelError for experts that have none."""
    try:
        return LayerPackings(tuple(map(expert_layout, stored.shapes())))
    except ValueError as error:
        raise ModelError(f"The experts cannot be quantised: {error}.") from None


class ExpertFile:
    """The file of all experts of all sparse layers of a checkpoint, whether it is built yet or not.

    The folder is named after a sample of the weights, so that a start without a file need not hash them.
    """

    def __init__(
        self,
        directory: Path,
        stored: StoredExperts,
        num_experts: int,
        packings: LayerPackings[ExpertPacking],
        root: Path | None,
    ) -> None:
        """root: the folder above (default: the cache). num_experts: of each layer. packings: of the stored experts;
        `layouts_in_store` gives a CPU's packings."""
        self._directory, self._stored, self._num_experts, self._packings = directory, stored, num_experts, packings
        root = root or cache_root() / "experts"
        self._memory = root / WEIGHTS_MEMORY
        self._folder = find_folder(root, directory.name, self._digest(sampled_hashes))
        self._source: bytes | None = None
        self.path = self._folder / EXPERT_FILE

    @property
    def source(self) -> bytes:
        """32 bytes that identify the weights and their layout."""
        return self._identify(silent)

    def is_built(self, progress: Progress) -> bool:
        """Raise ModelError if the file is damaged: one of many gigabytes that changed is for its owner to inspect."""
        if not self._folder.exists():
            return False
        builder = self._builder(progress)
        return find_built(self._folder, builder=builder, refuse_damaged=EXPERT_FILE, progress=progress)

    def ensure(self, progress: Progress, experts: Iterable[Tensor] | None = None) -> None:
        """Build the file if it is missing. Raise ModelError if it cannot be built or is damaged.

        experts: packed, layer by layer, each with the bytes of the largest layer's; by default read out of the
        checkpoint, one in memory at a time.
        """
        packings, num_layers = self._packings, len(self._stored.layers)

        def build(folder: Path, report: Progress) -> None:
            folder.mkdir(parents=True)
            packed = packed_experts(self._stored, packings, report) if experts is None else experts
            write_expert_file(
                folder / EXPERT_FILE,
                source=self._identify(report),
                num_layers=num_layers,
                num_experts=self._num_experts,
                expert_bytes=packings.num_bytes,
                experts=(expert.numpy().data for expert in packed),
            )

        ensure_built(
            self._folder,
            builder=self._builder(progress),
            build=build,
            bytes_needed=(num_layers * self._num_experts + 1) * round_to_page(packings.num_bytes),
            progress=progress,
            refuse_damaged=EXPERT_FILE,
            advice="name a folder that can be in --expert-store-dir",
        )

    def _builder(self, progress: Progress) -> str:
        return f"{BUILDER} {VERSION} {self._identify(progress).hex()}"

    def _identify(self, progress: Progress) -> bytes:
        if self._source is None:
            self._source = self._digest(lambda files: whole_hashes(files, self._memory, progress))
        return self._source

    def _digest(self, hash_weights: HashFiles) -> bytes:
        layout = f"{VERSION} {self._packings.name} {self._packings.num_bytes}\n".encode()
        return hashlib.sha256(layout + model_digest(self._directory, hash_weights, with_texts=False)).digest()


class ExpertPacker:
    """Packs experts, each on the thread that calls it. Layers are counted among those with experts."""

    def __init__(self, stored: StoredExperts, layouts: LayerPackings[ExpertLayout]) -> None:
        self._layouts = layouts
        self._files = {file: _state_of(file) for file in {info.file for info in stored.index.values()}}
        self._own = _ThreadLayers(stored)

    def __call__(self, layer: int, expert: int, out: Tensor) -> None:
        """Write an expert to `out`, uint8 [layouts.num_bytes]. Raise ExpertStoreError for a file that has changed."""
        for file, state in self._files.items():
            if _state_of(file) != state:
                raise ExpertStoreError(f"{file} was changed while it was in use.")
        if (kernels := native_kernels()) is not None:
            kernels.compute_alone()  # The others compute a step meanwhile.
        try:
            layout = self._layouts.layers[layer]
            layout.pack_into(out[: layout.num_bytes], self._own.layer(layer).read_matrices(expert))
        except CheckpointError as error:
            raise ExpertStoreError(str(error)) from error

    def all(self, num_experts: int) -> Iterator[Tensor]:
        """Yield the experts of all layers: see `ExpertFile.ensure`. num_experts: of each layer."""
        for layer, expert in product(range(len(self._layouts.layers)), range(num_experts)):
            out = torch.zeros(self._layouts.num_bytes, dtype=torch.uint8)
            self(layer, expert, out)
            yield out


class _ThreadLayers(threading.local):
    """A reader of the checkpoint, and the layers that were read with it: each thread has its own."""

    def __init__(self, stored: StoredExperts) -> None:
        self._stored, self._reader = stored, stored.reader(0)
        self._layers: dict[int, LayerExperts] = {}

    def layer(self, number: int) -> LayerExperts:
        if number not in self._layers:
            self._layers[number] = self._stored.layer(self._stored.layers[number], None, self._reader)
        return self._layers[number]


def _state_of(file: Path) -> tuple[int, int, int] | None:
    """Return what changes with the contents of a file, None if it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
