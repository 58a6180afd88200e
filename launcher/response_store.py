"""Chooses the file of the response store and joins its services.

Services of one model share a file: each goes on with the requests of another one that has ended. Another model could
not, so its service is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.preflight import LaunchError
from moeserve.config import ConfigError, ServeConfig, state_root
from moeserve.frontend.store.file import Locks, StoreError, network_of, prepare
from moeserve.run_context import RunContext

FORGETFUL = "memory"


@contextmanager
def response_store(run: RunContext, notice: Callable[[str], None]) -> Iterator[str | None]:
    """Give the path of a store that outlives the service, held until the end; None where it goes with the service.

    Raise LaunchError for a file of the settings that cannot be used. The default one is done without then, as
    `notice` is told.
    """
    config = run.config
    if config.response_store == FORGETFUL or (config.response_store is None and config.port == 0):
        yield None
        return
    try:
        path = _path(config)
        held = _join(path, run.reader)
    except (StoreError, ConfigError) as error:
        if config.response_store is not None:
            raise LaunchError(str(error)) from None
        notice(f"{error} Responses are forgotten when the service ends.")
        yield None
        return
    try:
        yield str(path)
    finally:
        held.close()


def _path(config: ServeConfig) -> Path:
    if config.response_store is not None:
        return Path(config.response_store).expanduser().absolute()
    return state_root() / f"responses-{config.port}.sqlite3"


def _join(path: Path, reader: str) -> Locks:
    """Make the file ready and join the services that use it; return the locks that say so. Raise StoreError."""
    if kind := network_of(path.resolve(), Path("/proc/self/mountinfo").read_text()):
        raise StoreError(
            f"The response store {path} is on a network file system ({kind}): it takes a disk of this machine."
        )
    prepare(path)
    try:
        locks = Locks(path)
    except OSError as error:
        raise StoreError(f"The response store {path} cannot be shared ({error.strerror}).") from None
    if not locks.join(int(reader, 16)):
        locks.close()
        raise StoreError(
            f"Another service uses the response store {path} with another model, parser or version of moeserve."
        )
    return locks
