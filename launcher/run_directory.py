"""The private directory of one running service: sockets and the run context, gone when the service is.

A supervisor holds an exclusive lock on the file `lock` in its directory for as long as it lives, whatever ends it.
So a directory whose lock can be taken belongs to nobody, and the next supervisor removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import LaunchError

_PREFIX = "moeserve-"
# sockaddr_un holds 108 bytes with the final NUL; the longest socket name is heartbeat.<incarnation>.
_LONGEST_PATH = 107 - len("/heartbeat.4294967295")


@contextmanager
def run_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """A new directory with mode 0700, locked by this process and removed at the end. Raises LaunchError."""
    base = _base(environment)
    remove_stale(base)
    path, lock = _create(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_stale(base: Path) -> None:
    """Removes this user's run directories in `base` whose supervisors are dead."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            # Not a run directory, or removed meanwhile.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _base(environment: Mapping[str, str]) -> Path:
    for candidate in (environment.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        usable = os.path.isabs(candidate) and os.access(candidate, os.W_OK | os.X_OK)
        if usable and len(os.fsencode(candidate)) + len(f"/{_PREFIX}12345678") <= _LONGEST_PATH:
            return Path(candidate)
    raise LaunchError("No directory for sockets is writable and short enough: set XDG_RUNTIME_DIR to one that is.")


def _create(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another supervisor may have taken the lock, and removed the directory, before this one had it.
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)
