"""Runs the jobs that this process owns, and takes over jobs whose owner has died.

A job is a response in the background. It goes to the engine like any request. Where the engine, or the process, dies,
the next one goes on from there.

A job's outputs go into its journal before anybody sees them, so an output that was seen is never computed again. A
journal makes the same deltas, events and body whenever and wherever it is read.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import structlog

from moeserve import wire
from moeserve.forever import Forever, cancel
from moeserve.frontend import limits
from moeserve.frontend.admission import terms_of
from moeserve.frontend.dialects.internal import Delta
from moeserve.frontend.dialects.responses_answer import ResponsesFormatter
from moeserve.frontend.errors import ApiError, internal_error
from moeserve.frontend.exchange import (
    Entry,
    Group,
    Leading,
    Progress,
    answer_of,
    completed,
    generates_of,
    spent_of,
    submitted,
    take_entry,
    token_fields,
)
from moeserve.frontend.held import Hold
from moeserve.frontend.prepare.text_messages import Prepared, expect, pack_reply, unpack_reply
from moeserve.frontend.relay.answer import Answer
from moeserve.frontend.relay.request_group import Past
from moeserve.frontend.services import Services
from moeserve.frontend.store import jobs, responses
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.jobs import OpenJob
from moeserve.frontend.store.store import Shelf, Store, store_full, store_unavailable
from moeserve.frontend.usage import UsageBook
from moeserve.plan import Terms
from moeserve.wire import Output


class JobRecord(msgspec.Struct, frozen=True, array_like=True):
    """A response that another process can begin, go on with, and show.

    created: UNIX time. reader: of the service that made it (`RunContext.reader`). prepared: of `pack_reply`.
    """

    answer_id: str
    created: int
    seed: int
    reader: str
    prepared: bytes


def unpack_record(data: bytes) -> tuple[JobRecord, Prepared]:
    """Return a record, and what it has prepared, which the record itself then lacks."""
    record = msgspec.msgpack.decode(data, type=JobRecord)
    return msgspec.structs.replace(record, prepared=b""), expect(unpack_reply(record.prepared), Prepared)


def pack_entries(entries: Sequence[Entry]) -> bytes:
    return wire.pack(list(entries))


def unpack_entries(data: bytes) -> list[Entry]:
    """Return the entries of a row. Raise wire.DecodeError."""
    return wire.unpack(data, list[Entry], wire.MAX_STEP_BYTES)


def unpack_failure(data: bytes) -> ApiError:
    error = unpack_reply(data)
    assert isinstance(error, ApiError)
    return error


class JobEnded(Exception):
    """Another process or client has ended or dropped the job."""


class Journal:
    """Appends entries, and wakes the listeners of this process."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._pending: dict[str, tuple[list[Entry], asyncio.Future[None]]] = {}
        self._bells: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._work = asyncio.Event()
        self._writing = Forever("journal", self._write)

    def start(self) -> None:
        self._writing.start()

    async def stop(self) -> None:
        await self._writing.stop()

    async def append(self, job_id: str, entries: Sequence[Entry]) -> None:
        """Return once the entries are in the store; before that nobody sees them. Raise JobEnded, ApiError."""
        found = self._pending.get(job_id)
        if found is None:
            found = self._pending[job_id] = ([], asyncio.get_running_loop().create_future())
        found[0].extend(entries)
        self._work.set()
        await asyncio.shield(found[1])

    @contextmanager
    def listen(self, job_id: str) -> Iterator[asyncio.Event]:
        """Yield an event that is set whenever the job gets entries here, or ends here."""
        bell = asyncio.Event()
        self._bells[job_id].add(bell)
        try:
            yield bell
        finally:
            self._bells[job_id].discard(bell)
            if not self._bells[job_id]:
                del self._bells[job_id]

    @property
    def followed(self) -> list[str]:
        """The jobs that somebody listens to."""
        return list(self._bells)

    def ring(self, job_id: str) -> None:
        for bell in self._bells.get(job_id, ()):
            bell.set()

    async def _write(self) -> None:
        """Write what has come since the last turn."""
        await self._work.wait()
        self._work.clear()
        batch, self._pending = self._pending, {}
        try:
            packed = {job_id: pack_entries(entries) for job_id, (entries, _) in batch.items()}
            refused = await self._store.write(b"", partial(jobs.append, owner=self._owner, entries=packed))
        except BaseException as error:
            for _, done in batch.values():
                _settle(done, error if isinstance(error, Exception) else store_unavailable())
            if isinstance(error, ApiError):
                return
            raise
        for job_id, (_, done) in batch.items():
            if job_id in refused:
                lack = refused[job_id]
                _settle(done, JobEnded() if lack is None else store_full(lack))
            else:
                _settle(done, None)
                self.ring(job_id)


def _settle(done: asyncio.Future[None], error: Exception | None) -> None:
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
        done.exception()  # its waiter may be gone


def formatter_of(
    services: Services, record: JobRecord, prepared: Prepared, clock: Callable[[], float] = time.time
) -> ResponsesFormatter:
    """Return a formatter of a job's answer. clock: gives the UNIX time at which it is complete."""
    facts = (record.answer_id, record.created, prepared.request, services.tokenizer, services.fingerprint)
    return ResponsesFormatter(*facts, clock=clock)


class Replay:
    """Takes the entries of one journal in their order."""

    def __init__(self, services: Services, record: JobRecord, prepared: Prepared, hold: Hold) -> None:
        """hold: counts what is held for the answer."""
        self.record = record
        self.prepared = prepared
        self.answer = answer_of(services, prepared, record.answer_id, hold)
        self._services = services
        self._ended_at = 0.0

    def formatter(self) -> ResponsesFormatter:
        """Return a new formatter of the answer, which is complete when `end_at` says."""
        return formatter_of(self._services, self.record, self.prepared, lambda: self._ended_at)

    def end_at(self, ended_at: float) -> None:
        """Set the UNIX time at which the job was done."""
        self._ended_at = ended_at

    def take(self, entry: Entry) -> list[Delta]:
        """Return the deltas of an entry. Stop strings that it completes are left in `answer.finishes`."""
        return take_entry(self.answer, entry)

    def take_past(self, entries: Iterable[Entry]) -> Past:
        """Take entries; return the past from which their requests go on."""
        outputs: list[tuple[int, Output]] = []
        kept_tokens: dict[int, int] = {}
        for entry in entries:
            self.answer.keep(self.take(entry))
            if entry is not None:
                outputs.append(entry)
            kept_tokens.update(self.answer.finishes)
            self.answer.finishes.clear()
            self.answer.turns.clear()
        return Past(outputs, kept_tokens)


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
        entries = [entry async for row in self.rows(job.job_id) for entry in unpack_entries(row)]
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

    async def rows(self, job_id: str) -> AsyncIterator[bytes]:
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
