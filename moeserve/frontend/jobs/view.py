"""A client's view of a job: its events from any place on, its whole answer, or its state."""

from __future__ import annotations

from collections.abc import Callable

from moeserve.frontend.dialects.internal import Formatter
from moeserve.frontend.dialects.responses_answer import KeptResponse, ResponsesFormatter
from moeserve.frontend.http import ApiError, EventStream
from moeserve.frontend.jobs.jobs import Jobs
from moeserve.frontend.jobs.record import unpack_failure, unpack_prepared, unpack_record
from moeserve.frontend.jobs.replay import Replay, formatter_of
from moeserve.frontend.relay.exchange import EventWriter, completed
from moeserve.frontend.services import Services
from moeserve.frontend.store.jobs import Status, StoredJob

# A comment in a stream that goes on in another life of the engine; usage says so too where it is asked for.
RESUMED = b": resumed\n\n"
# Keep-alive intervals for which a stream's status waits for its first token: until then a request that is dropped can
# still be refused.
STATUS_WAITS = 1.5


class JobView:
    """One client's view of one job."""

    def __init__(self, services: Services, jobs: Jobs, job: StoredJob) -> None:
        self.record = unpack_record(job.record)
        self.streams = unpack_prepared(self.record.prepared).request.stream
        self._services = services
        self._jobs = jobs
        self._job = job

    async def stream(self, stream: EventStream, cut: Callable[[ApiError], bytes], after: int = -1) -> None:
        """Write the events behind that of number `after` as they come, up to the last one.

        cut: returns the event that ends a stream whose job goes on where this process cannot see it; it is none of the
        job's. Raises ApiError, with nothing written, for a job that cannot be shown, and for one that fails before its
        status is due.
        """
        replay = self._replay()
        formatter = replay.formatter()
        writer, behind = EventWriter(formatter), _Behind(after)
        begun = False
        if self.record.is_detached:
            assert isinstance(formatter, ResponsesFormatter)
            await stream.start()
            await stream.write(behind.cut(formatter.queued()))
            begun = True
        try:
            async for found in self._jobs.follow(self._job):
                if not begun:
                    if isinstance(found, Status) and found.failure is not None:
                        raise unpack_failure(found.failure)
                    await stream.start()
                    begun = True
                if found is None:
                    await stream.write(formatter.ping())
                elif isinstance(found, Status):
                    await stream.write(behind.cut(_end(found, replay, formatter)), last=True)
                else:
                    for entry in found:
                        events = RESUMED if entry is None else b""
                        deltas = replay.take(entry)
                        events += b"".join(writer.events(delta, replay.answer.usage) for delta in deltas)
                        if events := behind.cut(events):
                            await stream.write(events)
        except ApiError as error:
            if not begun:
                raise
            await stream.write(cut(error), last=True)

    async def body(self) -> bytes:
        """Wait for the end; return the whole answer. Raises ApiError for a job that failed."""
        replay = self._replay()
        async for found in self._jobs.follow(self._job):
            if isinstance(found, Status):
                if found.failure is not None:
                    raise unpack_failure(found.failure)
                replay.end_at(found.ended_at or 0.0)
                formatter = replay.formatter()
                body = await completed(formatter, replay.answer.choices(), replay.answer, self._services.long_answers)
                return _unkept(formatter, found) or body
            for entry in found or ():
                replay.answer.keep(replay.take(entry))
        raise AssertionError("a job was followed to no end")

    async def response(self) -> KeptResponse:
        """Return a response in the background as it stands now."""
        status = await self._jobs.status(self._job)
        failure = None if status.failure is None else unpack_failure(status.failure)
        if status.state == "done":
            # It was not kept: there was no room, or its conversation is gone.
            return KeptResponse(self._job.job_id, await self.body(), b"[]")
        if status.state == "open" or self.record.reader != self._jobs.reader:
            formatter = formatter_of(self._services, self.record, unpack_prepared(self.record.prepared))
            assert isinstance(formatter, ResponsesFormatter)
            shown = ("in_progress" if status.has_begun else "queued") if status.state == "open" else status.state
            return formatter.snapshot(shown, failure)
        replay = self._replay()
        formatter = replay.formatter()
        writer = EventWriter(formatter)
        assert isinstance(formatter, ResponsesFormatter)
        async for found in self._jobs.follow(self._job):
            for entry in found if isinstance(found, list) else ():
                for delta in replay.take(entry):
                    writer.events(delta, replay.answer.usage)
        return formatter.snapshot(status.state, failure)

    def _replay(self) -> Replay:
        if self.record.reader != self._jobs.reader:
            message = (
                "The service was started again with another model, or as another version: it cannot show this answer"
            )
            raise ApiError(409, message, code="cannot_show")
        return Replay(self._services, self.record)


def _end(status: Status, replay: Replay, formatter: Formatter) -> bytes:
    """Return the last events of a job."""
    if status.failure is not None:
        return formatter.error(unpack_failure(status.failure))
    if status.state == "cancelled":
        assert isinstance(formatter, ResponsesFormatter)
        return formatter.cancelled()
    replay.end_at(status.ended_at or 0.0)
    end = formatter.end(replay.answer.usage)
    return _unkept(formatter, status) or end


def _unkept(formatter: Formatter, status: Status) -> bytes | None:
    """Return the end of an answer once more where its response was to be kept and was not."""
    if status.is_kept or not isinstance(formatter, ResponsesFormatter) or formatter.kept is None:
        return None
    return formatter.unkept()


class _Behind:
    """Leaves out the events of a stream up to that of a number. Events are numbered from 0; comments are none."""

    def __init__(self, number: int) -> None:
        self._left = number + 1

    def cut(self, events: bytes) -> bytes:
        """Return the events that the client lacks."""
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
