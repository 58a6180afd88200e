"""Files of KV blocks: one per block, written whole or not at all, and checked whenever they are read.

    DIR/secret                         32 random bytes that key all names
    DIR/weights.json                   hashes of files of weights (`moeserve.model.file_hashes`)
    DIR/FINGERPRINT/about.json         the facts behind a fingerprint, for people
    DIR/FINGERPRINT/ACCOUNT.NAMESPACE/NAME    one KV block; NAME01: its window block, NAME02: the state after it
    DIR/FINGERPRINT/ACCOUNT.NAMESPACE/NAME.1  the part of rank 1 where ranks share layers, and NAME that of rank 0

A block is there if NAME is, and served if all of its parts are. A file is a header, the block's tokens (int32), its
bytes, and the CRC-32 of all that. It is written under another name and then renamed, so a process that is killed leaves
a file that nobody reads. It is not forced onto the disk: after a power failure a file may be torn, which its checksum
shows. Several services may use one folder: equal names have equal content, and a file that is gone is a miss.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from moeserve.config import cache_root
from radix_cache import NAME_BYTES, BlockCopy, Kind, StoredBlock, border_name, used_at

# Magic, fingerprint, name of the KV block, tokens, kind, part, last part, bytes.
_HEADER = struct.Struct("<8s32s16sIBBBxQ")
_LAST_PART = 6  # its place
_MAGIC = b"moeKV\0\0\2"
_CHECKSUM = struct.Struct("<I")  # of all that is before it
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_FOLDER = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{32}")
_NAME = re.compile(r"([0-9a-f]{32}(?:0[12])?)(\.[1-9][0-9]{0,2})?")  # of a block, and its part
_SUFFIX = ".new"
AUTO = "auto"  # --kv-disk-path: a folder of this user's cache
_SECRET = "secret"
ABOUT = "about.json"
# Files of an unfinished write that are older, or newer than now by as much, belong to a process that is gone.
_UNFINISHED_SECONDS = 60.0
# Tries to write a file whose folder another service removes, which has found it empty.
_FOLDER_TRIES = 3
# Only files are opened: a pipe, which waits for a writer, would block a thread for ever.
_OPEN_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def disk_root(path: str) -> Path:
    """Return the folder that `--kv-disk-path` names. Raise ConfigError if this account has no folder for a cache."""
    return cache_root() / "kv" if path == AUTO else Path(path).expanduser().absolute()


class BlockError(Exception):
    """A file is not the block that it is named after; the message gives the reason."""


def open_root(root: Path) -> bytes:
    """Make the folder of a cache, private to this user, unless it is there; return its secret.

    Raise OSError, also for a folder in which another user could put blocks.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (why := _why_untrusted(root)) is not None:
        raise PermissionError(errno.EPERM, why)
    path = root / _SECRET
    with suppress(FileNotFoundError):
        return _read_secret(path)
    scratch = root / f".{_SECRET}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}"
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))
        file.flush()
        os.fsync(file.fileno())
    # If two services start together the first one's secret stays.
    with suppress(FileExistsError):
        os.link(scratch, path)
    scratch.unlink()
    return _read_secret(path)


def why_unusable(root: Path) -> str | None:
    """Return why `open_root` could not make a folder or write to it, None for no known reason. Change nothing."""
    existing = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if existing == root and (why := _why_untrusted(root)) is not None:
        return why
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not for this user to write to"


def _why_untrusted(root: Path) -> str | None:
    found = root.stat()
    if found.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    return "all users may write to it" if found.st_mode & stat.S_IWOTH else None


def is_root(folder: Path) -> bool:
    """Return whether a folder is one of `open_root`."""
    return (folder / _SECRET).is_file()


def _read_secret(path: Path) -> bytes:
    secret = path.read_bytes()
    if len(secret) != 32:
        raise OSError(f"{path} is damaged: remove the folder {path.parent}, whose blocks are lost with it")
    return secret


@contextmanager
def if_it_can_be_written() -> Iterator[None]:
    """Ignore that a write in the block finds the disk full or read-only, as after a fault of the drive: nothing depends
    on it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise


def replace_file(path: str | Path, parts: Sequence[bytes | memoryview], seconds: float) -> int:
    """Write a file whole, or leave none. seconds: its time, since the epoch. Return its size."""
    folder, name = os.path.split(path)
    scratch = f"{folder}/.{name}.{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}"
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            size = _write_all(descriptor, parts)
            os.utime(descriptor, (seconds, seconds))
        finally:
            os.close(descriptor)
        os.rename(scratch, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise
    return size


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> int:
    rest, size = list(parts), 0
    while rest:
        written = os.writev(descriptor, rest)
        size += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = memoryview(rest[0])[written:]
    return size


def _part_of(path: str | Path, part: int) -> str:
    """Return the file of a part of the block at `path`."""
    return f"{path}.{part}" if part else os.fspath(path)


class BlockFiles:
    """The files of one folder. Any thread may call the methods."""

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        crc32: Callable[[memoryview, int], int] = zlib.crc32,
        part: int = 0,
        num_parts: int = 1,
    ) -> None:
        """fingerprint: of this process's blocks, 32 hex digits. crc32: zlib's, or one that is faster. part: of each
        block in `num_parts`, is written and read here."""
        self.root = root
        self.fingerprint = fingerprint
        self._folder, self._crc32 = os.fspath(root), crc32
        self._part, self._num_parts = part, num_parts

    def describe(self, about: bytes) -> None:
        """Make the folder of this process's blocks, with a file for people, if it can be written. Raise OSError."""
        folder = self.root / self.fingerprint
        if folder.is_symlink():
            # Its blocks would count twice, or not at all.
            raise OSError(errno.ELOOP, f"{self.fingerprint} in it is a symbolic link")
        with if_it_can_be_written():
            folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(folder / ABOUT, [about], time.time())

    def write(self, copy: BlockCopy, content: memoryview) -> int:
        """Write a block's file and return its size. Raise OSError, with nothing left behind."""
        head = self._head(copy, content)
        path, seconds = self._own_part(copy), used_at(time.time(), copy.depth)
        parts: list[bytes | memoryview] = [head, content, _CHECKSUM.pack(self._crc32(content, zlib.crc32(head)))]
        for _ in range(_FOLDER_TRIES):
            with suppress(FileNotFoundError):
                return replace_file(path, parts, seconds)
            # One by one: `parents` would make folders that others may read. The folder of the cache came with a secret.
            folder = (self.root / copy.path).parent
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        return replace_file(path, parts, seconds)

    def read(self, copy: BlockCopy, content: memoryview) -> int:
        """Fill `content` with a block and return the size of its file. Raise BlockError or OSError.

        The content of `content` is anything after an error.
        """
        head = self._head(copy, content)
        found, checksum = bytearray(len(head)), bytearray(_CHECKSUM.size)
        size = len(head) + len(content) + _CHECKSUM.size
        descriptor = os.open(self._own_part(copy), _OPEN_TO_READ)
        try:
            if os.fstat(descriptor).st_size != size:
                raise BlockError("its size is wrong")
            if os.readv(descriptor, [found, content, checksum]) != size:
                raise BlockError("it ends early")
        finally:
            os.close(descriptor)
        if found != head:
            raise BlockError("it is of other tokens or of another model")
        if _CHECKSUM.pack(self._crc32(content, zlib.crc32(head))) != checksum:
            raise BlockError("its checksum is wrong")
        return size

    def status(self, block: StoredBlock) -> StoredBlock:
        """Return a block with the size and the time of last use of its files. Raise OSError if one is missing."""
        parts = [os.stat(_part_of(self.root / block.path, n), follow_symlinks=False) for n in range(self._num_parts)]
        if not all(stat.S_ISREG(part.st_mode) for part in parts):
            raise FileNotFoundError(errno.ENOENT, "it is no file", block.path)
        size = sum(part.st_size for part in parts)
        return StoredBlock(block.name, block.folder, size, min(parts[0].st_mtime, time.time()))

    def remove(self, path: str) -> None:
        """Remove a block, if it is there, and its folder with the last one. `path` is relative. Raise OSError."""
        _remove_parts(self.root / path)
        _remove_if_empty((self.root / path).parent)

    def stamp(self, path: str, seconds: float) -> None:
        """Set the time of a block's last use, in seconds since the epoch. `path` is relative. Raise OSError."""
        with suppress(FileNotFoundError):
            os.utime(self.root / path, (seconds, seconds))

    def _head(self, copy: BlockCopy, content: memoryview) -> bytes:
        name, num_tokens, num_bytes = copy.name[:NAME_BYTES], len(copy.tokens) // 4, len(content)
        fields = self.fingerprint.encode(), name, num_tokens, copy.kind, self._part, self._num_parts - 1, num_bytes
        return _HEADER.pack(_MAGIC, *fields) + copy.tokens

    def _own_part(self, copy: BlockCopy) -> str:
        return _part_of(f"{self._folder}/{copy.path}", self._part)


def _remove_parts(path: Path) -> bool:
    """Remove the files of a block. Return whether there was one."""
    for part in count():
        try:
            os.unlink(_part_of(path, part))
        except FileNotFoundError:
            break
    return part > 0


def scan(root: Path, now: float) -> Iterator[StoredBlock]:
    """Yield the blocks of all fingerprints, in no order. Remove what killed processes have left. Raise OSError.

    Symbolic links, and everything else that is neither file nor folder, are skipped. now: in seconds since the epoch. A
    file that was used later than now, before the clock was set back, counts as used now.
    """
    list(_whole_files(root, now))
    for fingerprint in _folders(root, _FINGERPRINT):
        list(_whole_files(fingerprint, now))
        for namespace in _folders(fingerprint, _FOLDER):
            yield from _scan_namespace(namespace, now)
            _remove_if_empty(namespace)


def _scan_namespace(folder: Path, now: float) -> Iterator[StoredBlock]:
    firsts: list[os.DirEntry[str]] = []
    others: defaultdict[str, list[os.DirEntry[str]]] = defaultdict(list)
    for file in _whole_files(folder, now):
        if found := _NAME.fullmatch(file.name):
            (firsts if found[2] is None else others[found[1]]).append(file)
    for file in firsts:
        with suppress(FileNotFoundError):
            first, rest = file.stat(follow_symlinks=False), others.pop(file.name, ())
            if first.st_mtime > now:
                with if_it_can_be_written():
                    os.utime(file.path, (now, now), follow_symlinks=False)
            size = first.st_size + sum(part.stat(follow_symlinks=False).st_size for part in rest)
            where = f"{folder.parent.name}/{folder.name}"
            yield StoredBlock(bytes.fromhex(file.name), where, size, min(first.st_mtime, now))
    for rest in others.values():
        for part in rest:
            # Its block was removed, or is being written at this moment.
            _remove_if_old(part, now)


def _whole_files(folder: Path, now: float) -> Iterator[os.DirEntry[str]]:
    """Yield the files of a folder. Remove unfinished ones of processes that are gone."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                continue
            if not entry.name.endswith(_SUFFIX):
                yield entry
                continue
            _remove_if_old(entry, now)


def _remove_if_old(entry: os.DirEntry[str], now: float) -> None:
    with suppress(FileNotFoundError), if_it_can_be_written():
        if abs(now - entry.stat(follow_symlinks=False).st_mtime) > _UNFINISHED_SECONDS:
            os.unlink(entry.path)


def _folders(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    with os.scandir(folder) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def why_damaged(root: Path, block: StoredBlock) -> str | None:
    """Return why a block's files are not the whole block, None if they are. Raise OSError if there is none."""
    for part in count():
        try:
            with os.fdopen(os.open(_part_of(root / block.path, part), _OPEN_TO_READ), "rb") as file:
                data = file.read()
        except FileNotFoundError:
            if part:
                return f"its part of rank {part} is missing"
            raise
        if (why := _why_damaged(data, block, part)) is not None:
            return why
        if part == _HEADER.unpack_from(data)[_LAST_PART]:
            break
    return None


def _why_damaged(data: bytes, block: StoredBlock, part: int) -> str | None:
    if len(data) < _HEADER.size + _CHECKSUM.size:
        return "it is too short"
    magic, fingerprint, name, num_tokens, kind, found_part, _, num_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        return "it is no block, or of another version"
    if len(data) != _HEADER.size + 4 * num_tokens + num_bytes + _CHECKSUM.size:
        return "its size is wrong"
    full_name = border_name(name, Kind(kind)) if kind in (Kind.WINDOW, Kind.STATE) else name
    if (fingerprint.decode("ascii", "replace"), full_name, found_part) != (
        block.folder.split("/")[0],
        block.name,
        part,
    ):
        return "it is another block than its name says"
    end = len(data) - _CHECKSUM.size
    if _CHECKSUM.pack(zlib.crc32(memoryview(data)[:end])) != data[end:]:
        return "its checksum is wrong"
    return None


def seconds_to_read(root: Path, blocks: Sequence[StoredBlock], seconds: float) -> tuple[float, float] | None:
    """Read and check files of blocks for about `seconds`.

    Return the seconds per byte, of the clock and of processor time; None without a byte.
    """
    begun, used, num_bytes = time.monotonic(), time.thread_time(), 0
    for block in blocks:
        with suppress(OSError):
            why_damaged(root, block)
            num_bytes += block.num_bytes
        if time.monotonic() - begun > seconds:
            break
    if not num_bytes:
        return None
    return (time.monotonic() - begun) / num_bytes, (time.thread_time() - used) / num_bytes


def clear(root: Path) -> int:
    """Remove all blocks, and the folders that are empty then. Return the number of blocks. Raise OSError."""
    num_removed = 0
    for block in list(scan(root, time.time())):
        num_removed += _remove_parts(root / block.path) and block.is_kv
    for fingerprint in _folders(root, _FINGERPRINT):
        for namespace in _folders(fingerprint, _FOLDER):
            _remove_if_empty(namespace)
        with suppress(OSError):
            os.unlink(fingerprint / ABOUT)
        _remove_if_empty(fingerprint)
    return num_removed
