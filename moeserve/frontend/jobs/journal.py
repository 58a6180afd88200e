"""The journal of a job: its outputs, in order, and the deltas, events and body that come of them.

An output goes into the journal before anybody sees it, so an output that was seen is never computed again. A journal
makes the same deltas whenever and wherever it is read.
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
from moeserve.forever import Forever
from moeserve.frontend.dialects.internal import Delta
from moeserve.frontend.dialects.responses_answer import ResponsesFormatter
from moeserve.frontend.errors import ApiError
from moeserve.frontend.exchange import Entry, answer_of, take_entry
from moeserve.frontend.held import Hold
from moeserve.frontend.prepare.text_messages import Prepared, expect, unpack_reply
from moeserve.frontend.relay.request_group import Past
from moeserve.frontend.services import Services
from moeserve.frontend.store import jobs
from moeserve.frontend.store.store import Store, store_full, store_unavailable
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
