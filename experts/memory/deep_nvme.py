"""Reads through DeepSpeed's DeepNVMe: a piece is cut into blocks that the drive serves at once (libaio, O_DIRECT)."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, RTLD_GLOBAL
from ctypes.util import find_library
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.errors import DeepNvmeError, ExpertStoreError
from experts.memory.file import PAGE_BYTES
from experts.memory.tiers import FileReads, PositionedReads

_BLOCK_BYTES = 128 * 2**10  # bytes of a request to the drive; a read is cut into these
_QUEUE_DEPTH = 16  # requests that the drive gets at once
_NAME = "async_io"  # DeepSpeed's name of the operator.
# DeepSpeed's extension with the locked memory, whose symbols the operator looks for among the global ones.
_LOCKED_MEMORY = "pin_memory"
_TORCH_FOLDER = "TORCH_EXTENSIONS_DIR"


class DeepNvme:
    """The compiled operator."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def open(self, path: Path) -> FileReads:
        """Return reads of a file; `PositionedReads` if the file system refuses DeepNVMe's."""
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
        # Reads are issued by one thread, one after the other, so threads of the handle's own would gain nothing.
        return self._operator.aio_handle(_BLOCK_BYTES, _QUEUE_DEPTH, False, True, 1)


class NvmeReads:
    """Reads of one file through a handle of its own, since a wait covers all reads of its handle."""

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


def deep_nvme(num_locked: int) -> DeepNvme:
    """Load the operator that `compile_deep_nvme` left. Never compiles, which takes minutes. Raises DeepNvmeError.

    num_locked: bytes to be locked. Reads into memory that is not locked copy everything once more, which is slower than
    plain reads.
    """
    _require_libaio()
    if not _may_lock(num_locked):
        raise DeepNvmeError(f"DeepNVMe needs {num_locked} bytes of locked memory, which the limit (ulimit -l) forbids.")
    library = extensions_folder() / _NAME / f"{_NAME}.so"
    if not library.exists():
        raise DeepNvmeError("DeepNVMe is not compiled: `moeserve experts deepnvme` does that once.")
    spec = spec_from_file_location(_NAME, library)
    assert spec is not None
    assert spec.loader is not None
    try:
        CDLL(str(extensions_folder() / _LOCKED_MEMORY / f"{_LOCKED_MEMORY}.so"), mode=RTLD_GLOBAL)
        operator = module_from_spec(spec)
        spec.loader.exec_module(operator)
    except (OSError, ImportError) as error:
        # For example because another process is compiling it.
        raise DeepNvmeError(f"{library} cannot be loaded: `moeserve experts deepnvme` compiles it.") from error
    return DeepNvme(operator)


def compile_deep_nvme() -> Path:
    """Compile the operator, for minutes unless that was done before, and return its library. Raises DeepNvmeError."""
    _require_libaio()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    builder = AsyncIOBuilder()
    if not builder.is_compatible(verbose=False):
        raise DeepNvmeError("DeepNVMe cannot be compiled: libaio-dev or a C++ compiler is missing.")
    try:
        with extensions_kept_in(extensions_folder()) as folder:
            builder.load(verbose=False)
    except (OSError, RuntimeError, ImportError) as error:
        # ImportError if a compilation was aborted earlier in this process: torch takes it for done.
        raise DeepNvmeError(f"DeepNVMe cannot be compiled: {str(error).partition(chr(10))[0]}") from error
    return folder / _NAME / f"{_NAME}.so"


@contextmanager
def extensions_kept_in(folder: Path) -> Iterator[Path]:
    """Make torch find and keep compiled extensions in `folder`, one process at a time. Raises OSError.

    Torch's own lock is a file: a process that is killed leaves it behind, and all later ones wait for it forever. The
    process that holds the lock of this function knows that no other is compiling, and removes such files.
    """
    before = os.environ.get(_TORCH_FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_behind in folder.glob("*/lock"):
            left_behind.unlink()
        os.environ[_TORCH_FOLDER] = str(folder)
        try:
            yield folder
        finally:
            del os.environ[_TORCH_FOLDER]
            if before is not None:
                os.environ[_TORCH_FOLDER] = before


def extensions_folder() -> Path:
    """Return a folder of this environment, beside torch's folders of extensions.

    An extension is compiled against the environment's torch and DeepSpeed. With one folder for all environments,
    another environment would load an extension that does not fit it.
    """
    from torch.utils.cpp_extension import get_default_build_root  # Slow to import, and not needed without libaio.

    root = os.environ.get(_TORCH_FOLDER) or get_default_build_root()
    environment = hashlib.sha256(f"{sys.prefix} {version('deepspeed')}".encode()).hexdigest()[:8]
    build = f"python{sys.version_info.major}{sys.version_info.minor}-torch{torch.__version__}"
    return Path(root) / f"moeserve-{build}-{environment}"


def _require_libaio() -> None:
    # Without libaio this spares imports that take seconds.
    if find_library("aio") is None:
        raise DeepNvmeError("DeepNVMe needs libaio: install libaio-dev and run `moeserve experts deepnvme`.")


def _may_lock(num_bytes: int) -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return limit == resource.RLIM_INFINITY or num_bytes <= limit
