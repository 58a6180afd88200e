"""The store of one HTTP process: transactions on threads, so that the event loop waits for no disk and no lock.

All HTTP processes of a service open one file. Each writes on one thread, a transaction at a time, and reads on others.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import structlog

from moeserve.frontend.http import ApiError, unavailable
from moeserve.frontend.store.jobs import drop_old_names
from moeserve.frontend.store.schema import connect, prepare
from moeserve.frontend.store.shelves import Bounds, Shelf, drop_old

log = structlog.get_logger(__name__)

_NUM_READERS = 2
_SECONDS_BETWEEN_CLEANINGS = 600.0

_T = TypeVar("_T")


class Store:
    """Runs synchronous work on the shelf of a caller, each call in one transaction."""

    def __init__(self, path: Path, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        """clock: UNIX time."""
        self._path = path
        self._bounds = bounds
        self._clock = clock
        self._writer = _Threads(path, 1)
        self._readers = _Threads(path, _NUM_READERS)
        self._cleaning: asyncio.Task[None] | None = None

    def now(self) -> float:
        """Return the UNIX time that is written into the store."""
        return self._clock()

    async def start(self) -> None:
        """Make the file if it is not there. Raises StoreError."""
        await asyncio.to_thread(prepare, self._path)
        self._cleaning = asyncio.create_task(self._clean())

    async def stop(self) -> None:
        if self._cleaning is not None:
            self._cleaning.cancel()
            await asyncio.gather(self._cleaning, return_exceptions=True)
        await self._writer.stop()
        await self._readers.stop()

    async def read(self, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        """Return the result of work that only reads. Raises what that raises, and ApiError (503) for a bad file."""
        return await self._run(self._readers, "BEGIN", caller, work)

    async def write(self, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        """Return the result of work, which other processes see as a whole when this returns, or not at all.

        It is done even if its caller is cancelled. Raises what it raises, and ApiError (503) for the
        file's faults; then nothing of it is done.
        """
        return await self._run(self._writer, "BEGIN IMMEDIATE", caller, work)

    async def _run(self, threads: _Threads, begin: str, caller: bytes, work: Callable[[Shelf], _T]) -> _T:
        def transact(db: sqlite3.Connection) -> _T:
            db.execute(begin)
            try:
                result = work(Shelf(db, caller, self._clock(), self._bounds))
                db.execute("COMMIT")
                return result
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

        try:
            return await threads.run(transact)
        except sqlite3.Error as error:
            log.error("response_store_failed", error=str(error))
            raise store_unavailable() from error

    async def _clean(self) -> None:
        while True:
            with suppress(ApiError):
                await self.write(b"", drop_old)
                await self.write(b"", drop_old_names)
            await asyncio.sleep(_SECONDS_BETWEEN_CLEANINGS)


class _Threads:
    """Threads that have a connection each while they work."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self._path = path
        self._idle: list[sqlite3.Connection] = []
        self._pool = ThreadPoolExecutor(num_threads, "store")

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._work, work)

    async def stop(self) -> None:
        """Wait for the transactions that have begun, and close the file."""
        await asyncio.to_thread(self._pool.shutdown)
        for connection in self._idle:
            connection.close()

    def _work(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        connection = self._idle.pop() if self._idle else connect(self._path)
        try:
            return work(connection)
        finally:
            self._idle.append(connection)


def store_unavailable() -> ApiError:
    """503: the file is full, damaged, or held by another process for too long."""
    return unavailable("The response store cannot be used now", "store_unavailable", 5.0)
