"""Single experts of a GGUF file, packed when they are wanted."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from experts.errors import ExpertStoreError
from kernels.cpu.library import native_kernels
from kernels.packed_experts import ExpertLayout, LayerPackings
from moeserve.model.expert_weights import LayerExperts, StoredExperts
from moeserve.model.spec import CheckpointError


class ExpertPacker:
    """Packs one expert at a time, on the one thread that calls it. Layers are counted among those with experts."""

    def __init__(self, stored: StoredExperts, layouts: LayerPackings[ExpertLayout]) -> None:
        self._stored, self._layouts = stored, layouts
        self._files = {file: _state_of(file) for file in {info.file for info in stored.index.values()}}
        self._reader = stored.reader(0)
        self._layers: dict[int, LayerExperts] = {}

    def __call__(self, layer: int, expert: int, out: Tensor) -> None:
        """Write an expert to `out`, uint8 [layouts.num_bytes]. Raise ExpertStoreError for a file that has changed."""
        for file, state in self._files.items():
            if _state_of(file) != state:
                raise ExpertStoreError(f"{file} was changed while it was in use.")
        if (kernels := native_kernels()) is not None:
            kernels.compute_alone()  # The others compute a step meanwhile.
        try:
            experts = self._layers.get(layer)
            if experts is None:
                experts = self._layers[layer] = self._stored.layer(self._stored.layers[layer], None, self._reader)
            layout = self._layouts.layers[layer]
            layout.pack_into(out[: layout.num_bytes], experts.read_matrices(expert))
        except CheckpointError as error:
            raise ExpertStoreError(str(error)) from error


def _state_of(file: Path) -> tuple[int, int, int] | None:
    """Return what changes with the contents of a file, None if it is gone."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
