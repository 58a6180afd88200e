"""The jobs of all HTTP processes, as one of them makes, finds, cancels and follows them, and shows them to clients."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from moeserve.forever import Forever
from moeserve.frontend import limits
from moeserve.frontend.dialects.responses import previous_id_of
from moeserve.frontend.dialects.responses_answer import KeptResponse, ResponsesFormatter
from moeserve.frontend.errors import ApiError, unavailable
from moeserve.frontend.exchange import DeltaWriter, Entry
from moeserve.frontend.held import Hold
from moeserve.frontend.http import RESUMED, STREAM_HEADERS, Piece
from moeserve.frontend.jobs.idempotency import gone
from moeserve.frontend.jobs.journal import (
    JobRecord,
    Journal,
    Replay,
    formatter_of,
    unpack_entries,
    unpack_failure,
    unpack_record,
)
from moeserve.frontend.jobs.runner import Runner
from moeserve.frontend.prepare.text_messages import Prepared, pack_reply
from moeserve.frontend.relay.request_group import EngineGone
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.store import jobs, responses
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.idempotency import Name
from moeserve.frontend.store.jobs import OpenJob, Status, StoredJob
from moeserve.frontend.store.store import Store
from moeserve.frontend.usage import UsageBook
from moeserve.plan import Terms

_LOOK_APART_S = 0.05  # between two looks whether the store has changed, while jobs of other processes are followed

# A stream's status waits for the first token at most this many keep-alive intervals: until then the request can still
# be refused.
STATUS_WAITS = 1.5


class Jobs:
    """Jobs by id. Nobody finds another caller's."""

    def __init__(
        self,
        services: Services,
        store: Store,
        owner: Owner,
        book: UsageBook,
    ) -> None:
        """owner: this process."""
        self._services = services
        self._store = store
        self._owner = owner
        self._journal = Journal(store, self._owner.name)
        self._runner = Runner(services, store, self._journal, self._owner, book)
        self._awaited = asyncio.Event()  # set while a follower may wait for another process's job
        self._watching = Forever("jobs of others", self._watch)
        self._showing: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.reader = services.run.reader

    async def start(self) -> None:
        self._journal.start()
        self._runner.start()
        self._watching.start()

    async def stop(self) -> None:
        """Leave the jobs of this process to others."""
        await self._watching.stop()
        await self._runner.stop()
        await self._journal.stop()

    async def create(
        self,
        caller: bytes,
        prepared: Prepared,
        terms: Terms,
        *,
        answer_id: str,
        seed: int,
        name: Name | None = None,
    ) -> StoredJob:
        """Begin a job, or return the one that the caller has begun with the same key and content.

        Raise ApiError: 422 for a key of another request, 429, 503.
        """
        request = prepared.request
        lasting = msgspec.structs.replace(prepared, request=replace(request, own_items=b"[]"))
        record = JobRecord(answer_id, int(time.time()), seed, self.reader, pack_reply(lasting))
        create = partial(jobs.create, job_id=answer_id, record=msgspec.msgpack.encode(record), owner=self._owner.name)
        make = partial(create, needs=previous_id_of(request), own_items=request.own_items, name=name)
        job_id = await self._store.write(caller, make)
        if job_id == answer_id and not self._runner.has(job_id):
            self._runner.begin(OpenJob(job_id, caller), terms)
        return await self.get(caller, job_id)

    async def find(self, caller: bytes, job_id: str) -> StoredJob | None:
        return await self._store.read(caller, partial(jobs.find, job_id=job_id))

    async def get(self, caller: bytes, job_id: str) -> StoredJob:
        """Raise ApiError (404) for a job that is gone."""
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
        """Return how far a job is. Raise ApiError (404) for one that is gone."""
        found = await self._store.read(job.caller, partial(jobs.status, job_id=job.job_id))
        if found is None:
            raise gone()
        return found

    async def response(self, job: StoredJob, make: Callable[[], Awaitable[KeptResponse]]) -> KeptResponse:
        """Return the response of a job that has ended. make: makes it from the journal, once: then it is kept."""
        async with self._showing[job.caller]:
            kept = await self._store.read(job.caller, partial(responses.find, response_id=job.job_id))
            if kept is None:
                kept = await make()
                with suppress(ApiError):
                    await self._store.write(job.caller, partial(responses.put_shown, ended=kept))
            return kept

    async def follow(self, job: StoredJob) -> AsyncIterator[list[Entry] | Status | None]:
        """Yield the entries of a job as they come, None when none has come for a while, and its status at the end.

        Raise ApiError if this process cannot see the end.
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
                self._awaited.set()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(latest + limits.KEEP_ALIVE_S):
                        await bell.wait()

    async def _watch(self) -> None:
        """Wake the followers of other processes' jobs when the store has changed, or when they cannot see the end."""
        await self._awaited.wait()
        await asyncio.sleep(_LOOK_APART_S)
        if all(map(self._runner.has, self._journal.followed)):
            self._awaited.clear()
            return
        is_ending = self._services.is_draining or self._services.engine.dead_reason is not None
        if await self._store.has_changed() or is_ending:
            for job_id in self._journal.followed:
                self._journal.ring(job_id)

    def _check_goes_on(self, job: StoredJob) -> None:
        engine = self._services.engine
        if engine.dead_reason is not None:
            raise engine_unavailable(EngineGone(engine.dead_reason))
        if self._services.is_draining and not self._runner.has(job.job_id):
            raise unavailable("The server is shutting down", "draining", 5.0, close=True)


class JobView:
    """One client's view of one job."""

    def __init__(self, services: Services, jobs: Jobs, job: StoredJob, hold: Hold) -> None:
        """hold: counts the bytes that showing the job takes. Raise ApiError (503) where these are too many."""
        hold.grow(len(job.record))
        self._hold = hold
        self._record, self._prepared = unpack_record(job.record)
        self._services = services
        self._jobs = jobs
        self._job = replace(job, record=b"")  # it is long, and unpacked

    @property
    def streams(self) -> bool:
        """Return whether the client that made the job asked for events."""
        return self._prepared.request.stream

    async def events(self, after: int = -1) -> AsyncGenerator[Piece]:
        """Yield the events behind that of number `after` as they come, up to the last one.

        Raise ApiError: at first for a job that cannot be shown, and for one that has ended and had no event of that
        number; later where the job goes on and this process cannot see it.
        """
        replay = self._replay()
        formatter = replay.formatter()
        writer, behind = DeltaWriter(formatter), _Behind(after)
        events = behind.cut(formatter.queued())
        # A stream whose events may all be known to its client begins only once that is clear.
        if events or (await self._jobs.status(self._job)).state == "open":
            yield STREAM_HEADERS, events, False
        async for found in self._jobs.follow(self._job):
            if found is None:
                events = formatter.ping()
            elif isinstance(found, Status):
                events = behind.cut(_end(found, replay, formatter)) or behind.end()
            else:
                events = b"".join(behind.cut(_events(entry, replay, writer)) for entry in found)
            if events:
                yield STREAM_HEADERS, events, isinstance(found, Status)

    async def response(self) -> KeptResponse:
        """Return the response as it stands now."""
        status = await self._jobs.status(self._job)
        if status.state != "open" and (status.state == "done" or self._record.reader == self._jobs.reader):
            return await self._jobs.response(self._job, partial(self._ended, status))
        formatter = formatter_of(self._services, self._record, self._prepared)
        shown = ("in_progress" if status.has_begun else "queued") if status.state == "open" else status.state
        return formatter.snapshot(shown, _failure(status))

    async def _ended(self, status: Status) -> KeptResponse:
        """Make the response of a job that has ended from its journal."""
        replay = self._replay()
        formatter = replay.formatter()
        writer = DeltaWriter(formatter)
        async for found in self._jobs.follow(self._job):
            for entry in found if isinstance(found, list) else ():
                _events(entry, replay, writer)
        if status.state == "done":
            # The response was not kept: there was no room, or its conversation is gone.
            _end(status, replay, formatter)
            return formatter.unkept_response()
        return formatter.snapshot(status.state, _failure(status))

    def _replay(self) -> Replay:
        if self._record.reader != self._jobs.reader:
            message = (
                "The service was started again with another model, or as another version: it cannot show this answer"
            )
            raise ApiError(409, message, code="cannot_show")
        return Replay(self._services, self._record, self._prepared, self._hold)


def _failure(status: Status) -> ApiError | None:
    return None if status.failure is None else unpack_failure(status.failure)


def _events(entry: Entry, replay: Replay, writer: DeltaWriter) -> bytes:
    deltas = replay.take(entry)
    for delta in deltas:
        replay.answer.hold(delta)
    events = b"".join(writer.events(delta, replay.answer.usage) for delta in deltas)
    return RESUMED + events if entry is None else events


def _end(status: Status, replay: Replay, formatter: ResponsesFormatter) -> bytes:
    """Return the last events of a job."""
    if (error := _failure(status)) is not None:
        return formatter.error(error)
    if status.state == "cancelled":
        return formatter.cancelled()
    replay.end_at(status.ended_at or 0.0)
    end = formatter.end(replay.answer.usage)
    return end if status.is_kept or formatter.kept is None else formatter.unkept()


class _Behind:
    """Leaves out the events of a stream up to that of a number. Events are numbered from 0; comments are none."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._left = number + 1

    def end(self) -> bytes:
        """Return the words at the end of a stream that lacks no event. Raise ApiError where it has ended before."""
        if self._left:
            last = self._number - self._left
            message = f"The response has ended with event {last}: there is none of number {self._number}"
            raise ApiError(400, message, param="starting_after", code="no_such_event")
        return b": the response has ended with event %d\n\n" % self._number

    def cut(self, events: bytes) -> bytes:
        if not self._left:
            return events
        parts = events.split(b"\n\n")[:-1]
        kept = []
        for part in parts:
            if part.startswith(b":"):
                continue
            if self._left:
                self._left -= 1
            else:
                kept.append(part + b"\n\n")
        return b"".join(kept)
