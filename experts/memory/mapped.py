"""All experts of an expert file in memory, without a copy of their own: the page cache is their memory."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.memory.file import read_header

_POPULATE_READ = 22  # MADV_POPULATE_READ, which Linux has since 5.14 and `mmap` does not name.
_PIECE_BYTES = 2**26  # Bytes that are read between two reports of progress.


class MappedExperts:
    """An expert file (`experts.memory.file`), mapped in huge pages where its file system has them.

    Pages are private: writing over an expert changes neither the file nor other processes' mappings of it.
    """

    def __init__(self, path: Path, source: bytes) -> None:
        """Raise ExpertStoreError as `read_header` does."""
        self._path, self._header = path, read_header(path, source)
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), self._header.file_bytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ExpertStoreError(f"{path} cannot be mapped ({error}).") from error
        with suppress(OSError):  # A kernel without huge pages.
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def read(self, progress: Callable[[int, int], None]) -> None:
        """Have everything read into memory. progress(done, total): in bytes. Raise ExpertStoreError."""
        total = self._header.file_bytes
        for begin in range(0, total, _PIECE_BYTES):
            length = min(_PIECE_BYTES, total - begin)
            try:
                self._mapping.madvise(_POPULATE_READ, begin, length)
            except OSError as error:
                if error.errno == errno.EINVAL:  # An older kernel: pages are read as they are used.
                    return
                raise ExpertStoreError(f"{self._path} cannot be read ({error.strerror}).") from error
            progress(begin + length, total)

    def expert(self, layer: int, expert: int, num_bytes: int) -> Tensor:
        """Return the first bytes of an expert, uint8 [num_bytes], where they lie."""
        start = self._header.offset(layer, expert)
        return self._bytes[start : start + num_bytes]
