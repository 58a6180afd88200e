"""Reading planned tensors out of safetensors files, expanded and converted one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moeserve.models.checkpoint import TensorInfo
from moeserve.models.errors import CheckpointError
from moeserve.models.fp8 import dequantise_fp8
from moeserve.models.mxfp4 import dequantise_mxfp4
from moeserve.models.spec import QuantizationSpec
from moeserve.models.weight_plan import StoredTensor

Progress = Callable[[int, int], None]
_MAX_OPEN_FILES = 2  # Neighbouring layers lie in neighbouring shards; an open file counts as resident memory.


class TensorReader:
    """Context manager over the files of one checkpoint.

    progress(done, total) is called after every tensor with bytes read of all to read.
    """

    def __init__(
        self,
        index: Mapping[str, TensorInfo],
        total_bytes: int,
        *,
        quantization: QuantizationSpec | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._index = index
        self._total = total_bytes
        self._quantization = quantization
        self._progress = progress
        self._done = 0
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """The whole tensor in ``dtype``, in memory of its own."""
        raw = self._call(stored.name, lambda file: file.get_tensor(stored.name))
        if stored.scale is None:
            tensor = raw.to(dtype, copy=True)
        else:
            scale_name = stored.scale
            scale = self._call(scale_name, lambda file: file.get_tensor(scale_name))
            tensor = self._expand(raw, scale, dtype)
        self._advance(stored.num_bytes)
        return tensor.view(stored.shape)

    def read_expert(self, stored: StoredTensor, expert: int, dtype: torch.dtype) -> Tensor:
        """Row ``expert`` of a tensor over all experts, without its leading dimension."""
        raw = self._row(stored.name, expert)
        if stored.scale is None:
            tensor = raw.to(dtype, copy=True)
        else:
            tensor = self._expand(raw, self._row(stored.scale, expert), dtype)
        self._advance(stored.num_bytes // stored.shape[0])
        return tensor

    def read_mxfp4_expert(self, blocks: StoredTensor, scales: StoredTensor, expert: int, dtype: torch.dtype) -> Tensor:
        """Expert ``expert`` of an MXFP4 tensor as a matrix [rows, columns]."""
        tensor = dequantise_mxfp4(self._row(blocks.name, expert), self._row(scales.name, expert), dtype)
        self._advance((blocks.num_bytes + scales.num_bytes) // blocks.shape[0])
        return tensor

    def read_rows(self, parts: Sequence[StoredTensor], dtype: torch.dtype) -> Tensor:
        """Matrices or vectors one below the other, as one tensor."""
        out = torch.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), dtype=dtype)
        row = 0
        for part in parts:
            out[row : row + part.shape[0]] = self.read(part, dtype)
            row += part.shape[0]
        return out

    def _expand(self, raw: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        assert self._quantization is not None
        return dequantise_fp8(raw, scale, self._quantization.block, dtype)

    def _row(self, name: str, row: int) -> Tensor:
        return self._call(name, lambda file: file.get_slice(name)[row])

    def _call(self, name: str, read: Callable[[Any], Tensor]) -> Tensor:
        path = self._index[name].file
        try:
            file = self._files.get(path)
            if file is None:
                while len(self._files) >= _MAX_OPEN_FILES:
                    del self._files[next(iter(self._files))]
                file = self._files[path] = safe_open(path, framework="pt")
            return read(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {path.name}: {error}.") from error

    def _advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
