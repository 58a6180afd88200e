"""Reads through DeepSpeed's DeepNVMe: a piece is cut into blocks that the drive serves at once (libaio, O_DIRECT)."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.errors import ExpertStoreError
from experts.expert_file import PAGE_BYTES
from experts.tiers import FileReads, PositionedReads

_BLOCK_BYTES = 128 * 2**10
_QUEUE_DEPTH = 16
_TORCH_FOLDER = "TORCH_EXTENSIONS_DIR"


class DeepNvme:
    """The compiled operator. It needs libaio with its headers and a compiler, and is built on first use."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def open(self, path: Path) -> FileReads:
        """Reads of a file; `PositionedReads` where the file system refuses DeepNVMe's."""
        reads = NvmeReads(path, self._handle())
        try:
            reads.read(0, memoryview(mmap.mmap(-1, PAGE_BYTES)))
        except ExpertStoreError:
            return PositionedReads(path)
        return reads

    def locked_memory(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] that the drive writes to directly. It stays locked until the process ends."""
        memory: Tensor = self._handle().new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
        return memory

    def _handle(self) -> Any:
        # Reads are issued by one thread, one after the other, so nothing is gained from threads of the handle's own.
        return self._operator.aio_handle(_BLOCK_BYTES, _QUEUE_DEPTH, False, True, 1)


class NvmeReads:
    """Reads of one file through a handle of its own: waiting waits for all reads of a handle."""

    description = "DeepNVMe"

    def __init__(self, path: Path, handle: Any) -> None:
        self._path = path
        self._handle = handle

    def read(self, offset: int, out: memoryview) -> None:
        buffer = torch.frombuffer(out, dtype=torch.uint8)
        try:
            size = self._path.stat().st_size
        except OSError as error:
            raise ExpertStoreError(f"{self._path} cannot be read ({error.strerror}).") from error
        if size < offset + len(out):
            raise ExpertStoreError(f"{self._path} was cut off while it was in use.")
        if self._handle.async_pread(buffer, str(self._path), offset) != 0 or self._handle.wait() != 1:
            raise ExpertStoreError(f"{self._path} cannot be read with DeepNVMe.")

    def close(self) -> None:
        self._handle = None


def deep_nvme(num_locked: int, compiling: Callable[[], None]) -> DeepNvme | None:
    """The operator; None where it cannot be built, or `num_locked` bytes may not be locked in memory.

    Into memory that is not locked everything would be copied once more, which is slower than plain reads. compiling:
    called before the operator is compiled, which takes minutes, or loaded if it was compiled before.
    """
    # Where libaio is missing, this spares the import, which takes a second.
    if find_library("aio") is None or not _may_lock(num_locked):
        return None
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        return None
    compiling()
    try:
        with extensions_kept_in(extensions_folder()):
            return DeepNvme(builder.load(verbose=False))
    except (OSError, RuntimeError, ImportError):
        # ImportError where a compilation was broken off earlier in this process: torch takes it for done.
        return None


@contextmanager
def extensions_kept_in(folder: Path) -> Iterator[None]:
    """Have torch find and keep compiled extensions in `folder`, for one process after the other. Raises OSError.

    Torch's own lock is a file: a process that is killed leaves it behind, and all later ones wait for it without end.
    The process that holds the lock here knows that no other is at work.
    """
    before = os.environ.get(_TORCH_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_behind in folder.glob("*/lock"):
            left_behind.unlink()
        os.environ[_TORCH_FOLDER] = str(folder)
        try:
            yield
        finally:
            del os.environ[_TORCH_FOLDER]
            if before is not None:
                os.environ[_TORCH_FOLDER] = before


def extensions_folder() -> Path:
    """A folder of this environment, beside torch's folders of extensions.

    The compiler is given the folders of torch and DeepSpeed, which differ between environments: with one folder for all
    environments, each start in another one than the last would compile for minutes again.
    """
    from torch.utils.cpp_extension import get_default_build_root  # Slow to import, and not needed without libaio.

    root = os.environ.get(_TORCH_FOLDER) or get_default_build_root()
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    version = f"python{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}"
    return Path(root) / f"moeserve-{version}-{environment}"


def _may_lock(num_bytes: int) -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return limit == resource.RLIM_INFINITY or num_bytes <= limit
