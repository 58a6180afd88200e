"""Reads the headers of GGUF files: metadata, and where each tensor lies. Torch-free.

The package `gguf` reads the same, and is the oracle of the tests, but builds objects for every element of an array
before anything can be bounded. Files are untrusted: everything is checked against the file's size before it is used.
"""

from __future__ import annotations

import mmap
import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from moeserve.model.files import check_weights_file
from moeserve.model.spec import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_TENSORS = 65_536
_MAX_FIELDS = 65_536
_MAX_DIMENSIONS = 4
_MAX_KEY_BYTES = 65_535
# Elements of one array; the largest known vocabularies have some 260,000 tokens.
_MAX_ARRAY = 2**20
# Bytes of all metadata of one file; the largest known have some 20 MB.
_MAX_METADATA_BYTES = 64 * 2**20
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@cache
def _is_readable(kind: GGMLQuantizationType) -> bool:
    """Return whether a kind's numbers are read: some kinds are for ggml's own computations alone, or are integers."""
    _, block_bytes = GGML_QUANT_SIZES[kind]
    try:
        # The `gguf` package unpacks all other kinds that are read.
        return kind is GGMLQuantizationType.F64 or len(dequantize(np.zeros((1, block_bytes), np.uint8), kind)) == 1
    except NotImplementedError:
        return False


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A stored tensor. kind: as ggml names it (``F32``, ``Q4_K``, ...). shape: rows last but one, as numpy has it.
    offset: in the file, in bytes."""

    file: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """metadata: strings, numbers, lists of strings and arrays of numbers. files: all parts of a split model."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    files: tuple[Path, ...]


def read_gguf(path: Path) -> GgufHeader:
    """Return the header of a model: of one file, or of all parts if `path` is one of a split model.

    Raise CheckpointError for a file that is missing, truncated or no GGUF.
    """
    parts = _parts(path)
    metadata, tensors = _read_part(parts[0])
    _check_place(parts[0], metadata, 0, len(parts))
    for place, part in enumerate(parts[1:], 1):
        fields, further = _read_part(part)
        _check_place(part, fields, place, len(parts))
        for name, tensor in further.items():
            if name in tensors:
                raise CheckpointError(f"{part.name} and an earlier part both hold the tensor {name[:80]}.")
            tensors[name] = tensor
    wanted = metadata.get("split.tensors.count")
    if wanted is not None and wanted != len(tensors):
        raise CheckpointError(f"{path.name} promises {str(wanted)[:40]} tensors, but its parts hold {len(tensors)}.")
    return GgufHeader(metadata, tensors, tuple(parts))


def _check_place(path: Path, fields: Mapping[str, Any], place: int, count: int) -> None:
    """Raise CheckpointError for a part of a split model that is called otherwise. place: from 0, by the file's name."""
    found, of = fields.get("split.no", place), fields.get("split.count", count) or 1
    if (found, of) != (place, count) and isinstance(found, int) and isinstance(of, int):
        raise CheckpointError(
            f"{path.name} is part {found + 1} of {of} of a split model: its name must end in "
            f"-{found + 1:05d}-of-{of:05d}.gguf, as those of the other parts do."
        )


def _parts(path: Path) -> list[Path]:
    found = _PART.search(path.name)
    if found is None:
        return [path]
    count = int(found[2])
    if not 1 <= count <= 9999:
        raise CheckpointError(f"{path.name} is a part of {count}, which no model has.")
    stem = path.name[: found.start()]
    parts = [path.with_name(f"{stem}-{number:05d}-of-{found[2]}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path.parent} lacks {len(missing)} of {count} parts, the first is {missing[0]}.")
    return parts


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    size = check_weights_file(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data, size).parse()
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path.name} cannot be read: {error}.") from None


class _Parser:
    """A cursor over one mapped file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._take(4) != _MAGIC:
            raise CheckpointError(f"{self._path.name} is not a GGUF file.")
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise CheckpointError(f"{self._path.name} is big-endian: take a little-endian file.")
            raise CheckpointError(
                f"{self._path.name} is of GGUF version {version}, and versions 2 and 3 are read: take a newer file."
            )
        num_tensors, num_fields = self._unpack("QQ")
        self._bound(num_tensors, _MAX_TENSORS, "tensors")
        self._bound(num_fields, _MAX_FIELDS, "fields of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._text(_MAX_KEY_BYTES)
            if key in metadata:
                self._damaged("two fields of its metadata have one name")
            metadata[key] = self._value(self._kind())
        places = [self._tensor_info() for _ in range(num_tensors)]
        if len({name for name, *_ in places}) < len(places):
            self._damaged("two tensors have one name")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            self._damaged("its alignment is no power of two")
        begin = -(-self._at // alignment) * alignment
        return metadata, {name: self._tensor(begin, name, kind, shape, at) for name, kind, shape, at in places}

    def _tensor_info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._text(_MAX_KEY_BYTES)
        if not name.isprintable():  # It is shown in messages and in the log.
            self._damaged("a tensor's name has characters that cannot be printed")
        (num_dimensions,) = self._unpack("I")
        self._bound(num_dimensions, _MAX_DIMENSIONS, "dimensions of a tensor")
        shape = self._unpack("Q" * num_dimensions)[::-1]
        kind, offset = self._unpack("IQ")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            self._unreadable(name, f"type {kind} of ggml")
        if not _is_readable(known):
            self._unreadable(name, known.name)
        return name, known, shape, offset

    def _tensor(
        self, begin: int, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], offset: int
    ) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        count = prod(shape)
        if not shape or shape[-1] % block or count > 2**48:
            self._damaged(f"{name[:80]} has shape {list(shape)}, which {kind.name} cannot have")
        num_bytes = count // block * block_bytes
        if begin + offset + num_bytes > self._size:
            raise CheckpointError(
                f"{self._path.name} is truncated, {self._size} of {begin + offset + num_bytes} bytes are there: "
                "download it again."
            )
        return GgufTensor(self._path, kind.name, shape, begin + offset, num_bytes)

    def _value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self._text(_MAX_METADATA_BYTES)
        if kind is not GGUFValueType.ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        inner = self._kind()
        (count,) = self._unpack("Q")
        self._bound(count, _MAX_ARRAY, "elements of an array")
        if inner is GGUFValueType.ARRAY:
            self._damaged("an array of its metadata holds arrays")
        if inner is GGUFValueType.STRING:
            return self._texts(count)
        values = array(_SCALARS[inner].replace("?", "B"))
        values.frombytes(self._take(count * values.itemsize))
        return values

    def _kind(self) -> GGUFValueType:
        (number,) = self._unpack("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            self._damaged(f"a field has the unknown type {number}")

    def _text(self, most: int) -> str:
        (length,) = self._unpack("Q")
        self._bound(length, most, "bytes of a string")
        return self._take(length).decode("utf-8", "replace")

    def _texts(self, count: int) -> list[str]:
        """Read `count` strings: a vocabulary and its merges have some hundred thousand."""
        data, at, last = self._data, self._at, min(self._size, _MAX_METADATA_BYTES)
        texts = []
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(data[at:begin], "little")
            if at > last:
                self._damaged("its header does not end")
            texts.append(data[begin:at].decode("utf-8", "replace"))
        self._at = at
        return texts

    def _unpack(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > min(self._size, _MAX_METADATA_BYTES):
            self._damaged("its header does not end")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _bound(self, count: int, most: int, name: str) -> None:
        if count > most:
            self._damaged(f"it counts {count} {name}; at most {most} are read")

    def _unreadable(self, name: str, kind: str) -> NoReturn:
        raise CheckpointError(
            f"{self._path.name} holds {name[:80]} as {kind}, which cannot be read: take a file of another kind, "
            "such as Q4_K_M."
        ) from None

    def _damaged(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._path.name} is damaged, {reason}: download it again.") from None
