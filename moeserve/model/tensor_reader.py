"""Reads planned tensors from safetensors or GGUF files, expands compressed ones, and converts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.weight_formats import QuantizedRows, rows_of_mxfp4
from moeserve.model.checkpoint import StoredTensor
from moeserve.model.dummy import draw_into, is_dummy
from moeserve.model.packed.tensors import expand_fp8, read_numbers, read_rows
from moeserve.model.shards import Cut
from moeserve.model.spec import CheckpointError
from moeserve.model.stored import PackedPart, TensorInfo

if TYPE_CHECKING:
    from moeserve.model.gguf.parts import GgufPart

# (bytes read, bytes to read), called after every tensor.
Progress = Callable[[int, int], None]
# Neighbouring layers lie in neighbouring shards, and an open file counts as resident memory.
_MAX_OPEN_FILES = 2
# Tensors behind the reader whose pages may still be mapped: gate, up and down of experts, and one more.
_MOST_BEHIND = 4


class TensorReader:
    """Context manager over the files of one checkpoint, from which several threads may read.

    total_bytes: of all tensors that will be read, for `progress`. forgets: pages of quantised tensors in GGUF files
    leave memory behind the reader, so that the next weights find some: where it is full, the kernel may drop pages that
    are still to be read, and a virtual machine's host takes seconds to give a GiB that was not used before. Raises
    CheckpointError from every read that fails.
    """

    def __init__(
        self,
        index: Mapping[str, TensorInfo],
        total_bytes: int,
        *,
        progress: Progress | None,
        forgets: bool = False,
    ) -> None:
        self._index = index
        self._forgets = forgets
        # The tensors read last, and how many of their bytes.
        self._behind: dict[str, tuple[GgufPart, int]] = {}
        self._total = total_bytes
        self._progress = progress
        self._done = 0
        self._files: dict[Path, Any] = {}
        self._lock = threading.Lock()  # of all that changes while tensors are read

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def read(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Return the whole tensor in ``dtype``, in memory of its own."""
        out = torch.empty(stored.shape, dtype=dtype)
        self.read_into(stored, out)
        return out

    def read_into(self, stored: StoredTensor, out: Tensor) -> None:
        """Fill ``out`` in its own dtype. Its shape may differ from the stored one by dimensions of 1."""
        if stored.cut is None:
            self._fill(stored, out)
        else:
            out.copy_(self._part(stored, stored.cut, out.dtype).view(out.shape))
        self._advance(stored.num_bytes)

    def _fill(self, stored: StoredTensor, out: Tensor) -> None:
        """Fill ``out`` with the whole tensor."""
        info = self._index[stored.name]
        if is_dummy(info):
            draw_into(stored.name, info, out)
        elif not self._read_fp8_into(stored, None, out):
            out.copy_(self._whole(stored.name).view(out.shape))

    def _part(self, stored: StoredTensor, cut: Cut, dtype: torch.dtype) -> Tensor:
        """Return the part of a tensor that is cut, in ``dtype`` or in its own; of plain numbers no more is read."""
        info, shape = self._index[stored.name], cut.whole_shape(stored.shape)
        if info.gguf is None and info.packed is None and info.shape == shape and not is_dummy(info):

            def read(file: Any) -> Tensor:
                whole = file.get_slice(stored.name)
                return torch.cat([whole[_places(cut, part)] for part in cut.ranges], cut.dim)

            return self._call(stored.name, info.file, read)
        whole = torch.empty(shape, dtype=dtype)
        self._fill(stored, whole)
        return torch.cat([whole[_places(cut, part)] for part in cut.ranges], cut.dim)

    def read_expert_into(self, stored: StoredTensor, expert: int, out: Tensor) -> None:
        """Fill ``out`` with row ``expert`` of a tensor of all experts, viewed in the shape of ``out``.

        The file may hold the rows of all experts one below the other.
        """
        info = self._index[stored.name]
        num_rows = info.shape[0] // stored.shape[0]
        if is_dummy(info):
            draw_into(stored.name, info, out, expert)
        elif num_rows > 1:
            rows = slice(expert * num_rows, (expert + 1) * num_rows)
            found = self._call(stored.name, info.file, lambda file: file.get_slice(stored.name)[rows])
            out.copy_(found.view(out.shape))
        elif not self._read_fp8_into(stored, expert, out):
            out.copy_(self._row(stored.name, expert).view(out.shape))
        self._advance(stored.num_bytes // stored.shape[0])

    def read_mxfp4_expert_into(self, blocks: StoredTensor, scales: StoredTensor, expert: int, out: Tensor) -> None:
        """Fill ``out`` with the matrix of ``expert`` from an MXFP4 tensor, viewed in the shape of ``out``."""
        matrix = dequantise_mxfp4(self._row(blocks.name, expert), self._row(scales.name, expert), out.dtype)
        out.copy_(matrix.view(out.shape))
        self._advance((blocks.num_bytes + scales.num_bytes) // blocks.shape[0])

    def read_mxfp4_rows(self, blocks: StoredTensor, scales: StoredTensor, expert: int) -> QuantizedRows:
        """Return the rows of the matrix of ``expert`` in MXFP4, in their blocks."""
        rows = rows_of_mxfp4(self._row(blocks.name, expert), self._row(scales.name, expert))
        self._advance((blocks.num_bytes + scales.num_bytes) // blocks.shape[0])
        return rows

    def read_rows(self, parts: Sequence[StoredTensor], dtype: torch.dtype) -> Tensor:
        """Return matrices or vectors one below the other as one tensor."""
        out = torch.empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), dtype=dtype)
        row = 0
        for part in parts:
            self.read_into(part, out[row : row + part.shape[0]])
            row += part.shape[0]
        return out

    def read_quantised(self, stored: StoredTensor, expert: int | None = None) -> QuantizedRows:
        """Return the rows of a quantised matrix, or of one expert of it, in their blocks. Raise CheckpointError."""
        info = self._index[stored.name]
        if info.packed is not None:
            rows = read_rows(stored.name, info.packed, self._roles(info.packed, expert))
        else:
            from moeserve.model.gguf.tensors import read_packed  # Imported late: others do without its packages.

            assert info.gguf is not None
            rows = read_packed(info.gguf, expert, holds_pages=self._forgets)
            if self._forgets:
                share = 1 if expert is None else (expert + 1) / stored.shape[0]
                self._forget_behind(stored.name, info.gguf, int(info.num_bytes * share))
        self._advance(stored.num_bytes if expert is None else stored.num_bytes // stored.shape[0])
        return rows if stored.cut is None else _cut_rows(stored.name, rows, stored.cut)

    def read_optional(self, tensors: Mapping[str, StoredTensor], key: str, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor of a key, or None if the checkpoint has none."""
        return self.read(tensors[key], dtype) if key in tensors else None

    def read_biases(
        self, tensors: Mapping[str, StoredTensor], keys: Sequence[str], dtype: torch.dtype
    ) -> Tensor | None:
        """Return the biases of projections one after another, zeros for a missing one, or None if all are missing."""
        found = [self.read_optional(tensors, f"{key}.bias", dtype) for key in keys]
        if all(bias is None for bias in found):
            return None
        return torch.cat(
            [
                torch.zeros(tensors[key].shape[0], dtype=dtype) if bias is None else bias
                for key, bias in zip(keys, found, strict=True)
            ]
        )

    def _forget_behind(self, name: str, part: GgufPart, num_bytes: int) -> None:
        """Drop the pages that were read before, and remember that a tensor's first bytes were read now.

        Pages that a mapping still uses stay until a later call.
        """
        from moeserve.model.gguf.tensors import forget_pages  # As above.

        with self._lock:
            for earlier, length in self._behind.values():
                forget_pages(earlier, length)
            self._behind.pop(name, None)
            self._behind[name] = part, num_bytes
            while len(self._behind) > _MOST_BEHIND:
                del self._behind[next(iter(self._behind))]

    def _read_fp8_into(self, stored: StoredTensor, expert: int | None, out: Tensor) -> bool:
        """Fill `out` with the numbers of a matrix in FP8, or of one expert of it. Return False for any other tensor."""
        part = self._index[stored.name].packed
        if part is None or part.layout != "fp8":
            return False
        read = self._roles(part, expert)
        codes = read("codes")
        expanded = out if out.shape == codes.shape else torch.empty(codes.shape, dtype=out.dtype)
        expand_fp8(part, codes, read("scales"), expanded)
        if expanded is not out:
            out.copy_(expanded.view(out.shape))
        return True

    def _roles(self, part: PackedPart, expert: int | None = None) -> Callable[[str], Tensor]:
        """Return a function that reads the tensor of a role of a matrix, or of one expert of it."""

        def read(role: str) -> Tensor:
            name, info = part.tensors[role]
            if expert is not None:
                return self._call(name, info.file, lambda file: file.get_slice(name)[expert])
            return self._call(name, info.file, lambda file: file.get_tensor(name))

        return read

    def _whole(self, name: str) -> Tensor:
        info = self._index[name]
        if info.packed is not None:
            return read_numbers(name, info.packed, self._roles(info.packed))
        part = info.gguf
        if part is None:
            return self._call(name, info.file, lambda file: file.get_tensor(name))
        from moeserve.model.gguf.tensors import read_part  # Imported late: other checkpoints do without its packages.

        return read_part(part)

    def _row(self, name: str, row: int) -> Tensor:
        info = self._index[name]
        if info.gguf is not None:
            from moeserve.model.gguf.tensors import read_row  # As above.

            return read_row(info.gguf, row)
        return self._call(name, info.file, lambda file: file.get_slice(name)[row])

    def _call(self, name: str, path: Path, read: Callable[[Any], Tensor]) -> Tensor:
        try:
            with self._lock:
                file = self._files.get(path)
                if file is None:
                    while len(self._files) >= _MAX_OPEN_FILES:
                        del self._files[next(iter(self._files))]
                    file = self._files[path] = safe_open(path, framework="pt")
            return read(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {path.name}: {error}.") from error

    def _advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _places(cut: Cut, part: range) -> tuple[slice, ...]:
    """Return the index of a range of a cut."""
    return (*[slice(None)] * cut.dim, slice(part.start, part.stop))


def _cut_rows(name: str, rows: QuantizedRows, cut: Cut) -> QuantizedRows:
    """Return a part of a quantised matrix. Raise CheckpointError for columns that are not whole blocks."""
    try:
        if cut.dim == 0:
            return rows.rows(torch.cat([torch.arange(part.start, part.stop) for part in cut.ranges]))
        (part,) = cut.ranges
        return rows.columns(part.start, part.stop)
    except ValueError as error:
        raise CheckpointError(f"{name} cannot be shared by --tensor-parallel-size: {error}.") from None


_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
# Expanding takes some 20 bytes per number for a while.
_BAND_ROWS = 256


def dequantise_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Expand one matrix of MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 four-bit floats with a shared exponent.

    blocks: [R, G, 16] uint8, two values per byte with the earlier in the low half; scales: [R, G] uint8 exponents.
    Returns [R, 32 G] of ``dtype``; exact in bfloat16 and float32. Works a band of rows at a time, in fp32.
    """
    values = torch.tensor(_MAGNITUDES + tuple(-value for value in _MAGNITUDES))
    codes = torch.arange(256)
    pairs = torch.stack([values[codes & 15], values[codes >> 4]], -1)
    num_rows, num_groups, num_bytes = blocks.shape
    out = torch.empty((num_rows, num_groups * 2 * num_bytes), dtype=dtype)
    for first in range(0, num_rows, _BAND_ROWS):
        band = slice(first, first + _BAND_ROWS)
        expanded = pairs[blocks[band].int()].flatten(-2)
        exponents = scales[band].int().sub_(_EXPONENT_BIAS)
        out[band] = torch.ldexp(expanded, exponents.unsqueeze(-1)).flatten(-2)
    return out
