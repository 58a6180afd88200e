"""Jobs as bytes: their records, and the journals of their outputs, written and read.

A job's outputs go into the journal before anybody sees them, so an output that was seen is never computed again. A
journal makes the same deltas, events and body whenever and wherever it is read.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from moeserve import wire
from moeserve.frontend.dialects.internal import Delta, Formatter
from moeserve.frontend.dialects.responses_answer import ResponsesFormatter
from moeserve.frontend.errors import ApiError
from moeserve.frontend.exchange import FORMATTERS, answer_of
from moeserve.frontend.prepare.messages import Kind, Prepared, expect, unpack_reply
from moeserve.frontend.relay.request_group import Past
from moeserve.frontend.services import Services
from moeserve.frontend.store import jobs
from moeserve.frontend.store.store import Store
from moeserve.wire import Output

# The output of a choice; None where another engine, or HTTP process, has gone on with the job.
Entry = tuple[int, Output] | None


class JobRecord(msgspec.Struct, frozen=True, array_like=True):
    """A generation that another process can begin, go on with, and show.

    created: UNIX time. reader: of the service that made it (`RunContext.reader`). is_detached: its client fetches the
    answer later. prepared: of `pack_reply`. session: see `Generate`.
    """

    kind: Kind
    answer_id: str
    created: int
    seed: int
    reader: str
    is_detached: bool
    prepared: bytes
    session: str = ""


def unpack_record(data: bytes) -> JobRecord:
    return msgspec.msgpack.decode(data, type=JobRecord)


def unpack_prepared(data: bytes) -> Prepared:
    return expect(unpack_reply(data), Prepared)


def pack_entries(entries: Sequence[Entry]) -> bytes:
    return wire.pack(list(entries))


def unpack_entries(data: bytes) -> list[Entry]:
    """Return the entries of a row. Raises wire.DecodeError."""
    return wire.unpack(data, list[Entry], wire.MAX_STEP_BYTES)


def unpack_failure(data: bytes) -> ApiError:
    error = unpack_reply(data)
    assert isinstance(error, ApiError)
    return error


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


def formatter_of(
    services: Services, record: JobRecord, prepared: Prepared, clock: Callable[[], float] = time.time
) -> Formatter:
    """Return a formatter of a job's answer. clock: gives the UNIX time at which a response is complete."""
    facts = (record.answer_id, record.created, prepared.request, services.tokenizer, services.fingerprint)
    if record.kind == "responses":
        return ResponsesFormatter(*facts, clock=clock)
    return FORMATTERS[record.kind](*facts)


class Replay:
    """Takes the entries of one journal in their order."""

    def __init__(self, services: Services, record: JobRecord) -> None:
        self.record = record
        self.prepared = unpack_prepared(record.prepared)
        self.answer = answer_of(services, self.prepared, record.answer_id)
        self._services = services
        self._ended_at = 0.0

    def formatter(self) -> Formatter:
        """Return a new formatter of the answer. A response is complete when `end_at` says."""
        return formatter_of(self._services, self.record, self.prepared, lambda: self._ended_at)

    def end_at(self, ended_at: float) -> None:
        """Note when the job was done, UNIX time."""
        self._ended_at = ended_at

    def take(self, entry: Entry) -> list[Delta]:
        """Return the deltas of an entry. Stop strings that it completes are left in `answer.finishes`."""
        if entry is None:
            self.answer.resume()
            return []
        return self.answer.take(*entry)

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
