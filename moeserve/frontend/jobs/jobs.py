"""The jobs of all HTTP processes, as one of them sees them: made, found, cancelled, followed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

from moeserve.frontend import limits
from moeserve.frontend.http import ApiError, unavailable
from moeserve.frontend.jobs.journal import Journal
from moeserve.frontend.jobs.owners import Owner
from moeserve.frontend.jobs.record import Entry, JobRecord, pack_prepared, pack_record, unpack_entries
from moeserve.frontend.jobs.runner import Runner
from moeserve.frontend.keys import Identity
from moeserve.frontend.prepare.messages import Kind, Prepared
from moeserve.frontend.relay.request_group import EngineGone
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.store import jobs
from moeserve.frontend.store.jobs import Name, NameTaken, NoRoom, OpenJob, Status, StoredJob, TooManyJobs
from moeserve.frontend.store.store import Store
from moeserve.plan import Terms

_POLL_S = 0.05  # how often the journal of another process's job is read while somebody follows it


class Jobs:
    """Jobs by id. Nobody finds another caller's."""

    def __init__(
        self, services: Services, store: Store, owner: Owner, identify: Callable[[bytes], Identity | None]
    ) -> None:
        """owner: this process. identify: returns who has the key of that digest."""
        self._services = services
        self._store = store
        self._owner = owner
        self._journal = Journal(store, self._owner.name)
        self._runner = Runner(services, store, self._journal, self._owner, identify)
        self.reader = services.run.reader

    async def start(self) -> None:
        self._journal.start()
        self._runner.start()

    async def stop(self) -> None:
        """Leave the jobs of this process to others."""
        await self._runner.stop()
        await self._journal.stop()

    async def create(
        self,
        caller: bytes,
        kind: Kind,
        prepared: Prepared,
        terms: Terms,
        *,
        answer_id: str,
        seed: int,
        session: str = "",
        needs: str | None = None,
        name: Name | None = None,
    ) -> StoredJob:
        """Begin a job, or return the one that the caller has begun with the same key and content.

        needs: an earlier response. Raises ApiError: 422 for a key of another request, 429, 503.
        """
        detached = prepared.request.detached
        record = JobRecord(
            kind, answer_id, int(time.time()), seed, self.reader, detached, pack_prepared(prepared), session
        )
        packed = pack_record(record)
        make = partial(jobs.create, job_id=answer_id, record=packed, owner=self._owner.name, needs=needs, name=name)
        try:
            await self._store.write(caller, make)
        except NameTaken as taken:
            if taken.job_id is None:
                raise key_of_another() from None
            return await self._get(caller, taken.job_id)
        except TooManyJobs:
            most = limits.MAX_OPEN_JOBS_PER_KEY
            message = f"This key has {most} requests already that outlive their connection and have not ended"
            raise ApiError(429, message, type="rate_limit_error", code="too_many_jobs", retry_after_s=5.0) from None
        except NoRoom:
            raise unavailable("The response store is full of requests that have not ended", "store_full", 5.0) from None
        job = StoredJob(answer_id, caller, packed)
        if not self._runner.has(answer_id):
            self._runner.begin(OpenJob(answer_id, caller), terms, is_patient=terms.patient)
        return job

    async def named(self, caller: bytes, name: Name) -> StoredJob | None:
        """Return the job of an earlier request with that key, None without one. Raises ApiError (422)."""
        try:
            job_id = await self._store.read(caller, partial(jobs.named, name=name))
        except NameTaken:
            raise key_of_another() from None
        return None if job_id is None else await self._get(caller, job_id)

    async def find(self, caller: bytes, job_id: str) -> StoredJob | None:
        return await self._store.read(caller, partial(jobs.find, job_id=job_id))

    async def _get(self, caller: bytes, job_id: str) -> StoredJob:
        found = await self.find(caller, job_id)
        if found is None:
            raise gone()
        return found

    async def cancel(self, job: StoredJob) -> None:
        """End a job unless it has ended."""
        await self._store.write(job.caller, partial(jobs.end, job_id=job.job_id, state="cancelled"))
        self._runner.withdraw(job.job_id)
        self._journal.ring(job.job_id)

    async def status(self, job: StoredJob) -> Status:
        """Return how far a job is. Raises ApiError (404) for one that is gone."""
        found = await self._store.read(job.caller, partial(jobs.status, job_id=job.job_id))
        if found is None:
            raise gone()
        return found

    async def follow(self, job: StoredJob) -> AsyncIterator[list[Entry] | Status | None]:
        """Yield all entries of a job as they come, None where none has come for a while, and its status at the end.

        Raises ApiError where this process cannot see the end.
        """
        number, loop = -1, asyncio.get_running_loop()
        with self._journal.listen(job.job_id) as bell:
            latest = loop.time()
            while True:
                bell.clear()
                found = await self._store.read(job.caller, partial(jobs.news, job_id=job.job_id, number=number))
                if found is None:
                    raise gone()
                number = found.number
                if found.rows:
                    yield [entry for row in found.rows for entry in unpack_entries(row)]
                    latest = loop.time()
                if not found.is_whole:
                    continue
                if found.status.state != "open":
                    yield found.status
                    return
                if not found.rows:
                    self._check_goes_on(job)
                    if loop.time() - latest >= limits.KEEP_ALIVE_S:
                        yield None
                        latest = loop.time()
                await self._wait(job, bell, latest + limits.KEEP_ALIVE_S - loop.time())

    async def _wait(self, job: StoredJob, bell: asyncio.Event, most_s: float) -> None:
        is_own = self._runner.has(job.job_id)
        try:
            async with asyncio.timeout(max(0.0, most_s if is_own else min(most_s, _POLL_S))):
                await bell.wait()
        except TimeoutError:
            return

    def _check_goes_on(self, job: StoredJob) -> None:
        engine = self._services.engine
        if engine.dead_reason is not None:
            raise engine_unavailable(EngineGone(engine.dead_reason))
        if self._services.is_draining and not self._runner.has(job.job_id):
            raise unavailable("The server is shutting down", "draining", 5.0, close=True)


def gone() -> ApiError:
    """404: the job was dropped while somebody looked at it."""
    return ApiError(404, "This answer was deleted, or had to make room", code="response_not_found")


def key_of_another() -> ApiError:
    """422: the key of a request names another one."""
    message = "This `Idempotency-Key` was sent before with another request: choose another key for this one"
    return ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")
