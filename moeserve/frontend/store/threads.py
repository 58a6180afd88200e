"""Threads that work on the store's file, fair by caller."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from moeserve.frontend.store.file import connect

_T = TypeVar("_T")


class Turns:
    """Lets a number of callers' works go on at once. The caller with the fewest of them is next; several take turns.
    Used by one event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._running: Counter[bytes] = Counter()
        # By caller, in the order in which they are next.
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}

    async def enter(self, caller: bytes) -> None:
        """Return when it is a caller's turn. `leave` ends it."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(caller)
            raise

    def leave(self, caller: bytes) -> None:
        self._num_free += 1
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        self._begin()

    def _begin(self) -> None:
        while self._num_free and self._waiting:
            caller = min(self._waiting, key=self._running.__getitem__)
            turns = self._waiting.pop(caller)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.cancelled():
                self._num_free -= 1
                self._running[caller] += 1
                turn.set_result(None)


class Threads:
    """Threads that have a connection each while they work."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self._path = path
        self._idle: deque[sqlite3.Connection] = deque()
        self._turns = Turns(num_threads)
        self._pool = ThreadPoolExecutor(num_threads, "store")

    async def run(self, caller: bytes, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Return the result of work, which is done whole once its turn has come, also if this call is cancelled."""
        await self._turns.enter(caller)
        working = asyncio.get_running_loop().run_in_executor(self._pool, self._work, work)
        working.add_done_callback(lambda _: self._turns.leave(caller))
        return await asyncio.shield(working)

    async def stop(self) -> None:
        """Wait for the transactions that have begun, and close the file."""
        await asyncio.to_thread(self._pool.shutdown)
        for connection in self._idle:
            connection.close()

    def _work(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = connect(self._path)
        try:
            return work(connection)
        finally:
            if connection.in_transaction:  # it could not be rolled back
                connection.close()
            else:
                self._idle.append(connection)
