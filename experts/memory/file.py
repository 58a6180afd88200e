"""The file of an expert store: every expert of every layer in the layout in which it is computed, one record each.

A record starts on a page, so that it can be read past the page cache straight into a slot. The first pages are a
header: the source of the weights, the sizes, and a CRC-32 of each record. The header is written last, so a file whose
writer died has none.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

from experts.errors import ExpertStoreError

PAGE_BYTES = 4096
# The advice about a damaged file: everything in it follows from the checkpoint.
REMEDY = "delete it, and the next start builds it anew"
VERSION = 1
_MAGIC = b"MOEXPERT"
# Bytes that are written before they must be on the disk: a long file fills memory with its pages no further.
_WINDOW_BYTES = 2**28
# magic, version, layers, experts per layer, reserved, bytes of an expert, source
_FIXED = struct.Struct("<8sIIIIQ32s")
_CRC = struct.Struct("<I")


def round_to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ExpertFileHeader:
    """source: 32 bytes that name the weights and their layout. checksums: CRC-32 of each expert, layer by layer."""

    source: bytes
    num_layers: int
    num_experts: int
    expert_bytes: int
    checksums: array[int]

    @property
    def num_bytes(self) -> int:
        return _header_bytes(self.num_layers * self.num_experts)

    @property
    def record_bytes(self) -> int:
        """The size of a record: an expert in whole pages."""
        return round_to_page(self.expert_bytes)

    @property
    def file_bytes(self) -> int:
        return self.num_bytes + self.num_layers * self.num_experts * self.record_bytes

    def offset(self, layer: int, expert: int) -> int:
        return self.num_bytes + (layer * self.num_experts + expert) * self.record_bytes

    def checksum(self, layer: int, expert: int) -> int:
        return self.checksums[layer * self.num_experts + expert]


def write_expert_file(
    path: Path, *, source: bytes, num_layers: int, num_experts: int, expert_bytes: int, experts: Iterable[memoryview]
) -> None:
    """Write `experts`, layer by layer, each of `expert_bytes`, one at a time.

    The file is on disk on return, and hardly any of it in the page cache.
    """
    checksums = array("I")
    header = ExpertFileHeader(source, num_layers, num_experts, expert_bytes, checksums)
    padding = bytes(round_to_page(expert_bytes) - expert_bytes)
    count, synced = num_layers * num_experts, 0
    with path.open("wb") as file:
        file.seek(_header_bytes(count))
        for expert in experts:
            if expert.nbytes != expert_bytes:
                raise ValueError(f"an expert of {expert.nbytes} bytes, not {expert_bytes}")
            checksums.append(zlib.crc32(expert))
            file.write(expert)
            file.write(padding)
            if len(checksums) * (expert_bytes + len(padding)) // _WINDOW_BYTES > synced:
                synced += 1
                _move_to_disk(file)
        if len(checksums) != count:
            raise ValueError(f"{len(checksums)} experts, not {count}")
        _move_to_disk(file)
        file.seek(0)
        file.write(_encode(header))
        _move_to_disk(file)


def _move_to_disk(file: BufferedWriter) -> None:
    """Wait until the written bytes are on the disk, and drop them from the page cache."""
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_header(path: Path, source: bytes) -> ExpertFileHeader:
    """Read the header. ExpertStoreError, one sentence, for a file that is torn, damaged, foreign or not of `source`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            fixed = file.read(_FIXED.size)
            if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
                raise ExpertStoreError(f"{path} is not an expert file, or was never finished: {REMEDY}.")
            _, version, num_layers, num_experts, _, expert_bytes, found = _FIXED.unpack(fixed)
            if version != VERSION:
                raise ExpertStoreError(f"{path} is an expert file of version {version}; this is version {VERSION}.")
            rest = file.read(_header_bytes(num_layers * num_experts) - _FIXED.size)
    except OSError as error:
        raise ExpertStoreError(f"{path} cannot be read ({error.strerror}).") from error
    length = num_layers * num_experts * 4
    if len(rest) < length + _CRC.size or _CRC.unpack_from(rest, length)[0] != zlib.crc32(fixed + rest[:length]):
        raise ExpertStoreError(f"{path} is damaged, its header does not have its checksum: {REMEDY}.")
    checksums = array("I")
    checksums.frombytes(rest[:length])
    header = ExpertFileHeader(found, num_layers, num_experts, expert_bytes, checksums)
    if size != header.file_bytes:
        raise ExpertStoreError(f"{path} is torn, {size} of {header.file_bytes} bytes are there: {REMEDY}.")
    if found != source:
        raise ExpertStoreError(f"{path} was made of other weights, or for other kernels.")
    return header


def _encode(header: ExpertFileHeader) -> bytes:
    fixed = _FIXED.pack(_MAGIC, VERSION, header.num_layers, header.num_experts, 0, header.expert_bytes, header.source)
    content = fixed + header.checksums.tobytes()
    return content + _CRC.pack(zlib.crc32(content))


def _header_bytes(count: int) -> int:
    return round_to_page(_FIXED.size + 4 * count + _CRC.size)
