"""Chooses the file of the response store and holds it for one service: two on one file would run each other's work."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.preflight import LaunchError
from moeserve.config import ConfigError, ServeConfig, state_root
from moeserve.frontend.store.schema import StoreError, prepare

FORGETFUL = "memory"


@contextmanager
def response_store(config: ServeConfig, notice: Callable[[str], None]) -> Iterator[str | None]:
    """Give the path of a store that outlives the service, held until the end; None where it goes with the service.

    Raises LaunchError for a file of the settings that cannot be used. The default one is done without then, as
    `notice` is told.
    """
    if config.response_store == FORGETFUL or (config.response_store is None and config.port == 0):
        yield None
        return
    try:
        path = _path(config)
        held = _hold(path)
    except (StoreError, ConfigError) as error:
        if config.response_store is not None:
            raise LaunchError(str(error)) from None
        notice(f"{error} Responses are forgotten when the service ends.")
        yield None
        return
    try:
        yield str(path)
    finally:
        os.close(held)


def _path(config: ServeConfig) -> Path:
    if config.response_store is not None:
        return Path(config.response_store).expanduser().absolute()
    return state_root() / f"responses-{config.port}.sqlite3"


def _hold(path: Path) -> int:
    """Make the file ready and lock it; return the descriptor that holds the lock. Raises StoreError."""
    prepare(path)
    # SQLite's own locks are of another kind, and on other descriptors.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise StoreError(f"Another service uses the response store {path}.") from None
    return descriptor
