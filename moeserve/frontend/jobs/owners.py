"""Who runs a job: each HTTP process holds a lock as long as it lives, by whatever it ends."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path


class Owner:
    """This process as an owner of jobs. `name` is told to others through the store."""

    def __init__(self, folder: Path) -> None:
        """folder: the run directory; owners of earlier runs have left nothing in it."""
        self.name = secrets.token_hex(8)
        self._folder = folder
        self._lock: int | None = None

    def hold(self) -> None:
        """Own jobs from now on."""
        self._lock = os.open(self._file(self.name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def is_dead(self, name: str) -> bool:
        """Return whether another owner has ended."""
        if name == self.name:
            return False
        try:
            descriptor = os.open(self._file(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def release(self) -> None:
        """Let others take over."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _file(self, name: str) -> Path:
        return self._folder / f"owner.{name}"
