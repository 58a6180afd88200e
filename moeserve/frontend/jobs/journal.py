"""Writes the journals of this process's jobs: all outputs that came while one transaction ran are the next one."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from moeserve.frontend.http import ApiError
from moeserve.frontend.jobs.record import Entry, pack_entries
from moeserve.frontend.store import jobs
from moeserve.frontend.store.store import Store


class JobEnded(Exception):
    """Somebody else has ended the job, or dropped it."""


class Journal:
    """Appends entries, and tells the listeners of this process."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._pending: dict[str, tuple[list[Entry], asyncio.Future[None]]] = {}
        self._bells: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._work = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._writing = asyncio.create_task(self._write())

    async def stop(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def append(self, job_id: str, entries: Sequence[Entry]) -> None:
        """Return once the entries are in the store; before that nobody sees them. Raises JobEnded, ApiError."""
        found = self._pending.get(job_id)
        if found is None:
            found = self._pending[job_id] = ([], asyncio.get_running_loop().create_future())
        found[0].extend(entries)
        self._work.set()
        await asyncio.shield(found[1])

    @contextmanager
    def listen(self, job_id: str) -> Iterator[asyncio.Event]:
        """Give an event that is set whenever the job gets entries here, or ends here."""
        bell = asyncio.Event()
        self._bells[job_id].add(bell)
        try:
            yield bell
        finally:
            self._bells[job_id].discard(bell)
            if not self._bells[job_id]:
                del self._bells[job_id]

    def ring(self, job_id: str) -> None:
        for bell in self._bells.get(job_id, ()):
            bell.set()

    async def _write(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            batch, self._pending = self._pending, {}
            packed = {job_id: pack_entries(entries) for job_id, (entries, _) in batch.items()}
            try:
                gone = await self._store.write(b"", partial(jobs.append, owner=self._owner, entries=packed))
            except ApiError as error:
                self._fail(batch, error)
                continue
            for job_id, (_, done) in batch.items():
                if job_id in gone:
                    _settle(done, JobEnded())
                else:
                    _settle(done, None)
                    self.ring(job_id)

    def _fail(self, batch: dict[str, tuple[list[Entry], asyncio.Future[None]]], error: ApiError) -> None:
        for _, done in batch.values():
            _settle(done, error)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
        done.exception()  # whoever waited for it may be gone
