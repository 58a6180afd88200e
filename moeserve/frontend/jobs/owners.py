"""Owners of jobs: each HTTP process of the services that share a store holds a lock as long as it lives."""

from __future__ import annotations

import secrets
from pathlib import Path

from moeserve.frontend.store.shared import Locks


class Owner:
    """This process as an owner of jobs. `name` is told to others through the store."""

    def __init__(self, store: Path) -> None:
        """store: the store's file."""
        self.name = secrets.token_hex(8)
        self._store = store
        self._locks: Locks | None = None

    def hold(self) -> None:
        """Own jobs from now on."""
        self._locks = Locks(self._store)
        self._locks.own(int(self.name, 16))

    def is_dead(self, name: str) -> bool:
        """Return whether another owner has ended. This one must own jobs."""
        assert self._locks is not None
        return name != self.name and not self._locks.is_owned(int(name, 16))

    def release(self) -> None:
        """Let others take over."""
        if self._locks is not None:
            self._locks.close()
            self._locks = None
