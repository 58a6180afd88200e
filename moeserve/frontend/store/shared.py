"""Users of a response store: services and HTTP processes hold locks in a file beside it for as long as they live.

The kernel takes a lock away when its process ends, by whatever it ends, and never before: no clock says who is dead,
and a process that stands still has not ended. So the file must be on a disk of this machine, as SQLite's must.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

# `struct flock` of 64-bit Linux: type, whence, first byte, number of bytes, process.
_LOCK = struct.Struct("@hhqqi4x")
_NUM_PLACES = 2**61  # bytes of the file that HTTP processes lock, and as many behind them for services
_NETWORK = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
)


class Locks:
    """The file's locks, as one process sees and holds them. It has one byte for each number; none is ever written."""

    def __init__(self, store: Path) -> None:
        """store: the store's file."""
        # An open file description of its own: SQLite's locks are on the store itself, and of another kind.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(store.with_name(f"{store.name}-owners"), flags, 0o600)

    def close(self) -> None:
        """Let all locks go."""
        os.close(self._file)

    def own(self, number: int) -> None:
        """Hold the place of an HTTP process alone. Raises BlockingIOError where another one has that number."""
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number % _NUM_PLACES, 1, 0))

    def is_owned(self, number: int) -> bool:
        """Return whether another process holds the place of an HTTP process."""
        return self._is_locked(number % _NUM_PLACES, 1)

    def join(self, kind: int) -> bool:
        """Hold the place of services of a kind, with others of this kind; return False where one of another kind is."""
        place = kind % _NUM_PLACES
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _NUM_PLACES + place, 1, 0))
        behind = _NUM_PLACES - place - 1
        return not (
            (place and self._is_locked(_NUM_PLACES, place))
            or (behind and self._is_locked(_NUM_PLACES + place + 1, behind))
        )

    def _is_locked(self, first: int, number: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, number, 0)
        found: bytes = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        return bool(_LOCK.unpack(found)[0] != fcntl.F_UNLCK)


def network_of(path: Path, mounts: str) -> str | None:
    """Return the type of the network file system that a path is on, None for another one.

    mounts: of /proc/self/mountinfo.
    """
    best, found = -1, None
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        mounted = Path(fields.split(" ")[4].encode().decode("unicode_escape"))
        if len(mounted.parts) >= best and path.is_relative_to(mounted):
            best, found = len(mounted.parts), source.split(" ")[0]
    return found if found in _NETWORK else None
