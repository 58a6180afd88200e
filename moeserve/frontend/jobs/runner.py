"""Runs the jobs that this process owns, and takes over jobs whose owner has died.

A job is a response in the background. It goes to the engine like any request. Where the engine, or the process, dies,
the next one goes on from the job's journal.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import structlog

from moeserve.forever import Forever, cancel
from moeserve.frontend import limits
from moeserve.frontend.admission import terms_of
from moeserve.frontend.errors import ApiError, internal_error
from moeserve.frontend.exchange import (
    Entry,
    Group,
    Leading,
    Progress,
    completed,
    generates_of,
    spent_of,
    submitted,
    token_fields,
)
from moeserve.frontend.held import Hold
from moeserve.frontend.jobs.journal import JobEnded, Journal, Replay, unpack_entries, unpack_record
from moeserve.frontend.prepare.text_messages import pack_reply
from moeserve.frontend.relay.answer import Answer
from moeserve.frontend.relay.request_group import Past
from moeserve.frontend.services import Services
from moeserve.frontend.store import jobs, responses
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.jobs import OpenJob
from moeserve.frontend.store.store import Shelf, Store
from moeserve.frontend.usage import UsageBook
from moeserve.plan import Terms

log = structlog.get_logger(__name__)

_LOOK_APART_S = 0.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 5.0
_OTHER_SERVICE = ApiError(
    500,
    "The service was started again with another model, or as another version, and cannot go on with this request",
    type="server_error",
    code="cannot_go_on",
    may_retry=False,
)
_KEY_GONE = ApiError(403, "The API key of this request is not valid any more", type="permission_error", code="key_gone")
_NO_PROGRESS = ApiError(
    500,
    f"{limits.MAX_JOB_TRIES} processes that had this request ended before it came any further",
    type="server_error",
    code="cannot_go_on",
    may_retry=False,
)


class Runner:
    """The jobs of this process, each on a task of its own."""

    def __init__(
        self,
        services: Services,
        store: Store,
        journal: Journal,
        owner: Owner,
        book: UsageBook,
    ) -> None:
        self._services = services
        self._store = store
        self._journal = journal
        self._owner = owner
        self._book = book
        # The name of the key, and the answer so far, of jobs that an engine has begun here. A job's tokens are counted
        # once, at its end: whoever goes on with it has them in its journal.
        self._answers: dict[str, tuple[str, Answer]] = {}
        self._withdrawn: set[str] = set()
        self._reader = services.run.reader
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._places: defaultdict[bytes, asyncio.Semaphore] = defaultdict(self._make_places)
        self._looking = Forever("jobs", self._look, _LOOK_APART_S)

    def start(self) -> None:
        """Begin to look for jobs whose owner has died."""
        self._looking.start()

    async def stop(self) -> None:
        """Leave all jobs to the next owner."""
        await self._looking.stop()
        await cancel(*self._tasks.values())

    def has(self, job_id: str) -> bool:
        return job_id in self._tasks

    def begin(self, job: OpenJob, terms: Terms | None) -> None:
        """Run a job. terms: of its client's request, None for one that somebody has run before."""
        task = self._tasks[job.job_id] = asyncio.create_task(self._run(job, terms))
        task.add_done_callback(partial(self._forget, job.job_id))

    def withdraw(self, job_id: str) -> None:
        """Stop computing a job that has ended."""
        if job_id in self._tasks:
            self._withdrawn.add(job_id)
            self._tasks[job_id].cancel()

    def _forget(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(job_id, None)
        self._withdrawn.discard(job_id)
        self._answers.pop(job_id, None)
        self._journal.ring(job_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("job_failed", job=job_id, exc_info=error)

    def _make_places(self) -> asyncio.Semaphore:
        ready = self._services.engine.ready
        return asyncio.Semaphore(max(1, ready.max_num_seqs if ready is not None else 1))

    # Taking over.

    async def _look(self) -> None:
        with suppress(ApiError):  # of the store, which has logged it
            await self._look_once()

    async def _look_once(self) -> None:
        owned, owners = await self._store.read(
            b"", lambda shelf: (jobs.open_of(shelf, self._owner.name), jobs.owners(shelf))
        )
        running = set(self._tasks)
        for job_id in running - owned:
            # The job was cancelled or dropped, or it is newer than the look at the store. The journal finds out.
            if not await self._store.read(b"", partial(jobs.is_open, job_id=job_id)):
                self.withdraw(job_id)
        if self._services.is_draining:
            if self._services.run.response_store is not None:
                for task in list(self._tasks.values()):
                    task.cancel()
            return
        dead = [name for name in owners if self._owner.is_dead(name)]
        left = owned - running - set(self._tasks)
        if (dead or left) and self._services.engine.ready is not None:
            adopt = partial(jobs.adopt, dead=dead, left=left, owner=self._owner.name)
            for job in await self._store.write(b"", adopt):
                if not self.has(job.job_id):
                    self.begin(job, None)

    # Running.

    async def _run(self, job: OpenJob, terms: Terms | None) -> None:
        """Work until the job has ended, and count its tokens, or until this process is to leave it to another one."""
        has_ended = False
        try:
            has_ended = await self._work(job, terms)
        except asyncio.CancelledError:
            has_ended = job.job_id in self._withdrawn
            raise
        finally:
            if has_ended and job.job_id in self._answers:
                self._tell(job.job_id, *self._answers[job.job_id])

    def _tell(self, job_id: str, name: str, answer: Answer) -> None:
        own = {"key": name} if name else {}
        fields = {"answer_id": job_id, "route": "/v1/responses", "background": True, **own, **token_fields(answer)}
        self._book.tell(spent_of(name, answer), "answer", fields | {"complete": not answer.num_open})

    async def _work(self, job: OpenJob, terms: Terms | None) -> bool:
        """Return True once the job has ended, False if it is left to another process, or to a later look."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                async with self._places[job.caller]:
                    with self._services.held.hold(job.caller) as hold:
                        await self._attempt(job, terms, hold)
                return True
            except JobEnded:
                return True
            except ApiError as error:
                if self._services.is_draining or self._services.engine.dead_reason is not None:
                    return False
                if error.status != 503:
                    return await self._fail(job, error)
            except Exception as error:  # A defect here is its request's alone.
                log.error("job_failed", job=job.job_id, exc_info=error)
                return await self._fail(job, internal_error())
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _attempt(self, job: OpenJob, terms: Terms | None, hold: Hold) -> None:
        """Go on with a job to its end. Raise ApiError, JobEnded."""
        services = self._services
        stored = await self._store.read(job.caller, partial(jobs.find, job_id=job.job_id))
        if stored is None:
            raise JobEnded
        hold.set(2 * len(stored.record))  # its prompt is held as it is, and as it is sent
        record, prepared = unpack_record(stored.record)
        del stored
        identity = self._book.holder(job.caller)
        if record.reader != self._reader:
            raise _OTHER_SERVICE
        if identity is None:
            raise _KEY_GONE
        if job.tries > limits.MAX_JOB_TRIES:
            raise _NO_PROGRESS
        facts = services.check_serving()
        replay = Replay(services, record, prepared, hold)
        entries = [entry async for row in self._rows(job.job_id) for entry in unpack_entries(row)]
        past = replay.take_past(entries) if entries or terms is None else None
        request = replay.prepared.request
        if terms is None:
            terms = terms_of(identity, services.run.secret, patient=True, background=request.background)
        generates = generates_of(
            services,
            replay.prepared,
            facts,
            identity,
            # An engine may still have the requests of an earlier owner.
            answer_id=f"{record.answer_id}.{job.tries}" if job.tries else record.answer_id,
            seed=record.seed,
            terms=terms,
        )
        with services.admission.hold(request.num_sequences, services.capacity, terms):
            async with submitted(services, generates, facts, past) as group:
                self._answers[job.job_id] = identity.name, replay.answer
                await self._follow(job, replay, group, past)
        await self._complete(job, replay)

    async def _follow(self, job: OpenJob, replay: Replay, group: Group, past: Past | None) -> None:
        """Take the group's outputs into the journal, to the end of every choice."""
        progress = Progress(
            self._services.metrics, asyncio.get_running_loop().time(), replay.prepared.request.num_choices
        )
        leading = Leading(group, replay.answer, progress)
        if past is not None and past.outputs:
            await self._journal.append(job.job_id, [None])
            replay.take(None)
        try:
            while replay.answer.num_open:
                entries, taken = await leading.next(), list[Entry]()
                try:
                    for entry in entries:
                        replay.answer.keep(leading.take(entry))
                        taken.append(entry)
                finally:  # The journal has no output that tells of a failure.
                    await self._journal.append(job.job_id, taken)
        finally:
            progress.end(replay.answer)

    async def _rows(self, job_id: str) -> AsyncIterator[bytes]:
        number = -1
        while True:
            found = await self._store.read(b"", partial(jobs.news, job_id=job_id, number=number))
            if found is None:
                raise JobEnded
            for row in found.rows:
                yield row
            if found.is_whole:
                return
            number = found.number

    async def _complete(self, job: OpenJob, replay: Replay) -> None:
        """Record that a job is done, and keep its response, in one transaction."""
        ended_at = time.time()
        replay.end_at(ended_at)
        formatter = replay.formatter()
        await completed(formatter, replay.answer.choices(), replay.answer, self._services.long_answers)

        def end(shelf: Shelf) -> bool:
            if not jobs.end(shelf, job.job_id, "done", at=ended_at):
                return False
            if formatter.kept is not None and responses.put(shelf, formatter.kept):
                jobs.note_kept(shelf, job.job_id)
            return True

        await self._store.write(job.caller, end)

    async def _fail(self, job: OpenJob, error: ApiError) -> bool:
        """End a job with an error; return False if the store could not be written."""
        fail = partial(jobs.end, job_id=job.job_id, state="failed", failure=pack_reply(error))
        try:
            await self._store.write(job.caller, fail)
        except ApiError:
            return False
        return True
