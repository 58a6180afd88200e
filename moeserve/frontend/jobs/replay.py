"""The answer of a job as its journal makes it: the same deltas, events and body whenever and wherever it is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from moeserve.frontend.dialects.internal import Delta, Formatter
from moeserve.frontend.dialects.responses_answer import ResponsesFormatter
from moeserve.frontend.jobs.record import Entry, JobRecord, unpack_prepared
from moeserve.frontend.prepare.messages import Prepared
from moeserve.frontend.relay.exchange import FORMATTERS, answer_of
from moeserve.frontend.relay.request_group import Past
from moeserve.frontend.services import Services
from moeserve.wire import Output


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
        """Take entries; return what requests need that go on from there."""
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
