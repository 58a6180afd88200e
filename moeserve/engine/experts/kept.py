"""An expert file that a CPU's service need not wait for: mapped if it is there, and else written while requests run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.mapped import MappedExperts
from kernels.cpu.library import native_kernels
from kernels.packed_experts import ExpertLayout, Experts, LayerPackings, PackedExperts
from moeserve.config import ServeConfig
from moeserve.engine.experts.resident_model import experts_of
from moeserve.model.expert_store import ExpertFile, layouts_of, stored_experts
from moeserve.model.expert_weights import StoredExperts, packed_experts, padded
from moeserve.model.rounding import Rounding
from moeserve.model.spec import DecoderSpec, ModelError, silent
from moeserve.statuses import Report, progress_to

_LOWEST_PRIORITY = 19
_SECONDS_TO_STOP = 2.0  # An ending service waits this long for a thread that hashes the written file.

log = structlog.get_logger(__name__)


class ExpertFileWriter:
    """Writes an expert file on a thread of its own, which computes only when nothing else does.

    A file that cannot be written is one warning: nothing waits for it.
    """

    def __init__(
        self,
        file: ExpertFile,
        experts: Iterable[Tensor],
        then: Callable[[], None] = lambda: None,
        otherwise: str = "the next start packs experts again",
    ) -> None:
        """experts: see `ExpertFile.ensure`. then: called on the thread once the file is there. otherwise: the
        consequence of a file that cannot be written, for the log."""
        self._file, self._experts, self._then, self._otherwise = file, experts, then, otherwise
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write, name="expert-file", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop writing, and remove the incomplete file."""
        self._stopping.set()
        self._thread.join(_SECONDS_TO_STOP)

    def _write(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        if (kernels := native_kernels()) is not None:
            kernels.compute_alone()
        began = time.monotonic()
        try:
            self._file.ensure(self._check_stopped, self._until_stopped())
            self._then()
        except _Stopped:
            return
        except (ModelError, ExpertStoreError, OSError) as error:
            log.warning("expert_file_not_written", reason=str(error), consequence=self._otherwise)
            return
        log.info("expert_file_written", file=str(self._file.path), took=f"{time.monotonic() - began:.0f} s")

    def _until_stopped(self) -> Iterator[Tensor]:
        for expert in self._experts:
            self._check_stopped()
            yield expert

    def _check_stopped(self, *_: object) -> None:
        if self._stopping.is_set():
            raise _Stopped


class _Stopped(Exception):
    """The service ends."""


class KeptExperts:
    """The experts of a model, all in memory, and their file in `--expert-store-dir`.

    layer_of: returns a layer's experts out of the mapped file; None where there is no file yet, which `write` makes.
    """

    def __init__(
        self, file: ExpertFile, stored: StoredExperts, layouts: LayerPackings[ExpertLayout], num_experts: int
    ) -> None:
        """num_experts: of each layer. layouts: of the stored experts."""
        self._file, self._stored, self._layouts, self._num_experts = file, stored, layouts, num_experts
        self.layer_of: Callable[[int], PackedExperts] | None = None

    def map(self, report: Report) -> None:
        """Map the file and read it into memory, if it is there. Raise ModelError or ExpertStoreError."""
        progress = progress_to(report)
        if not self._file.is_built(progress):
            return
        mapped = MappedExperts(self._file.path, self._file.source)
        mapped.read(lambda done, total: progress("reading the expert file", done, total))
        log.info("experts_mapped", file=str(self._file.path))

        def layer_of(number: int) -> PackedExperts:
            layout = self._layouts.layers[number]
            experts = layout.experts(self._num_experts)
            for expert in range(self._num_experts):
                experts.put(expert, mapped.expert(number, expert, layout.num_bytes))
            return experts

        self.layer_of = layer_of

    def write(self, layers: Sequence[Experts]) -> ExpertFileWriter:
        """Begin to write the file. layers: the experts in memory, from which it is written where they have its form."""
        return ExpertFileWriter(self._file, self._packed(layers))

    def _packed(self, layers: Sequence[Experts]) -> Iterator[Tensor]:
        for layer in layers:
            assert isinstance(layer, PackedExperts)
            for expert in range(self._num_experts):
                if (packed := layer.packed(expert)) is None:
                    # No expert is in its packed form in memory: this is the first one.
                    yield from packed_experts(self._stored, self._layouts, silent)
                    return
                yield padded(packed, self._layouts.num_bytes)


def keep_experts(
    directory: Path, spec: DecoderSpec, dtype: torch.dtype, rounding: Rounding, config: ServeConfig, report: Report
) -> KeptExperts | None:
    """Open the expert file in `--expert-store-dir`. A file that cannot be used is one warning, and None."""
    num_experts = experts_of(spec).num_experts
    stored = stored_experts(directory, spec, dtype, rounding)
    layouts = layouts_of(stored)
    file = ExpertFile(directory, stored, num_experts, layouts, store_dir(config))
    kept = KeptExperts(file, stored, layouts, num_experts)
    try:
        kept.map(report)
    except (ModelError, ExpertStoreError) as error:
        log.warning("expert_file_not_used", reason=str(error), consequence="experts are packed anew, and not kept")
        return None
    return kept


def store_dir(config: ServeConfig) -> Path | None:
    """Return the folder of `--expert-store-dir`, None for the cache."""
    return None if config.expert_store_dir is None else Path(config.expert_store_dir).expanduser()
