"""Memory that the ranks of one machine share, through which few rows travel in a fraction of gloo's time."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from torch import Tensor

from experts.errors import CollectiveError
from kernels.cpu.library import NativeKernels

# The most bytes of a rank in a round: the rows of decodes, and of a short prompt.
BOARD_BYTES = 1 << 20
_SEAT_BYTES = 64  # as in board.cpp


class Board:
    """All ranks open the same file, and then call `exchange` in the same order, each with the same number of bytes."""

    def __init__(self, path: Path, rank: int, num_ranks: int, kernels: NativeKernels) -> None:
        """Raise OSError if the file system has no room for the board."""
        self._rank, self._num_ranks, self._kernels, self._round = rank, num_ranks, kernels, 0
        size = num_ranks * (_SEAT_BYTES + 2 * BOARD_BYTES)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # Writing to a page for which there is no room would end the process.
            os.posix_fallocate(descriptor, 0, size)
            self._memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        finally:
            os.close(descriptor)

    def exchange(self, rows: Tensor, first: int, gathered: Tensor, seconds: float) -> None:
        """Write to `gathered` the bytes from `first` on of each rank's `rows`, as many as fill it, in rank order.

        Raise CollectiveError if a rank has ended or does not come within these seconds.
        """
        assert rows.is_contiguous()
        self._round += 1
        late = self._kernels.exchange(
            self._memory.ctypes.data,
            self._rank,
            self._num_ranks,
            BOARD_BYTES,
            self._round,
            rows.data_ptr(),
            rows.nbytes,
            first,
            gathered.nbytes // self._num_ranks,
            gathered.data_ptr(),
            int(1000 * seconds),
        )
        if late >= 0:
            raise CollectiveError(f"rank {late} has ended, or did not come within {seconds:g} s")
