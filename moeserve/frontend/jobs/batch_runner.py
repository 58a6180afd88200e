"""Runs batches: reads their files into lines, and has each line answered like a request of its route.

A batch belongs to one HTTP process, which answers some of its lines at a time. Each answer is in its place in the
batch's output before the next line begins. If the process dies, another one goes on with the lines that have no answer;
a line that was running begins anew.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import structlog

from moeserve.forever import Forever, cancel
from moeserve.frontend import exchange, limits
from moeserve.frontend.admission import terms_of
from moeserve.frontend.dialects.batch_lines import BatchLine, BatchPart, LinePlace, result_line
from moeserve.frontend.dialects.internal import Formatter
from moeserve.frontend.dialects.responses_answer import ResponsesFormatter
from moeserve.frontend.errors import ApiError, internal_error, invalid
from moeserve.frontend.held import Hold
from moeserve.frontend.keys import Identity
from moeserve.frontend.prepare.text_messages import Ask, Body, Kind, Prepared, expect
from moeserve.frontend.services import Services
from moeserve.frontend.store import batches, files, responses
from moeserve.frontend.store.batches import BatchState, OpenBatch, StoredBatch
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.store import STORE_FULL, Shelf, Store
from moeserve.frontend.usage import UsageBook

log = structlog.get_logger(__name__)

# The kinds of a batch's requests, by the paths of their routes.
KINDS: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
}
_LOOK_APART_S = 0.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_PART_BYTES = 256 * 1024  # of a batch's file that are read at once, unless a line is longer

_T = TypeVar("_T")


class Batches:
    """The batches of this process: one of each key at a time, each on a task of its own."""

    def __init__(
        self,
        services: Services,
        store: Store,
        owner: Owner,
        book: UsageBook,
    ) -> None:
        self._services = services
        self._store = store
        self._owner = owner
        self._book = book
        self._tasks: dict[bytes, asyncio.Task[None]] = {}  # by the callers of their batches, whose ids are their names
        self._looking = Forever("batches", self._look, _LOOK_APART_S)

    def start(self) -> None:
        """Begin to look for batches that nobody works on."""
        self._looking.start()

    async def stop(self) -> None:
        """Leave all batches to the next owner."""
        await self._looking.stop()
        await cancel(*self._tasks.values())

    async def _look(self) -> None:
        with suppress(ApiError):  # of the store, which has logged it
            while await self._store.read(b"", files.has_dropped):
                await self._store.write(b"", files.sweep)
            if self._services.is_draining:
                await cancel(*self._tasks.values())
            elif self._services.engine.ready is not None:
                for found in await self._store.read(b"", batches.open_ones):
                    if found.owner in ("", self._owner.name) or self._owner.is_dead(found.owner):
                        await self._attend(found)

    async def _attend(self, found: OpenBatch) -> None:
        """End a batch that is to end; else work on it, unless another one of its key is worked on."""
        task = self._tasks.get(found.caller)
        try:
            if found.state in ("cancelling", "expired"):
                if task is not None and task.get_name() == found.batch_id:
                    await cancel(task)
                await self._end(found, found.state, [])
            elif task is None:
                batch = await self._change(found, batches.take, before=found.owner, owner=self._owner.name)
                if batch is not None:
                    task = asyncio.create_task(self._run(batch), name=batch.batch_id)
                    self._tasks[batch.caller] = task
                    task.add_done_callback(partial(self._forget, batch.caller))
        except ApiError as error:
            await self._give_up(found, error)

    def _forget(self, caller: bytes, _: asyncio.Task[None]) -> None:
        del self._tasks[caller]

    async def _run(self, batch: StoredBatch) -> None:
        try:
            errors = await self._work(batch)
            await self._end(batch, "failed" if errors else "completed", errors)
        except asyncio.CancelledError:
            await self._change(batch, batches.take, before=self._owner.name, owner="")
            raise
        except Exception as error:
            await self._give_up(batch, error)

    async def _give_up(self, batch: OpenBatch | StoredBatch, error: Exception) -> None:
        """End a batch that cannot go on. If the store does not answer, a later look begins again."""
        if not isinstance(error, ApiError):  # A defect here is its batch's alone.
            log.error("batch_failed", exc_info=error)
            error = internal_error()
        elif error.status == 503:
            log.warning("batch_interrupted", batch=batch.batch_id, reason=error.message)
            return
        with suppress(ApiError):
            await self._end(batch, "failed", [error])

    async def _change(self, batch: OpenBatch | StoredBatch, work: Callable[..., _T], **arguments: Any) -> _T:
        """Return the result of work on a batch, in a transaction of its caller's."""
        return await self._store.write(batch.caller, partial(work, batch_id=batch.batch_id, **arguments))

    async def _end(self, batch: OpenBatch | StoredBatch, state: BatchState, errors: list[ApiError]) -> None:
        while await self._change(batch, batches.close_lines, state=state):
            pass
        data = [{"code": error.code, "message": error.message} for error in errors]
        packed = msgspec.json.encode({"object": "list", "data": data}) if data else None
        await self._change(batch, batches.end, state=state, errors=packed)

    async def _work(self, batch: StoredBatch) -> list[ApiError]:
        """Have all lines answered; return what is wrong with the file. Raise ApiError for a batch that cannot go on."""
        self._holder(batch)
        if batch.state == "validating":
            if batch.tries >= limits.MAX_JOB_TRIES:
                raise _no_progress()
            if problems := await self._expand(batch):
                return [invalid(problem, code="invalid_line") for problem in problems]
        ready = self._services.engine.ready
        at_once = min(limits.BATCH_AT_ONCE, ready.max_num_seqs if ready is not None else 1)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._answer_lines(batch))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return []

    def _holder(self, batch: StoredBatch) -> Identity:
        """Return the holder of a batch's key. Raise ApiError (403) for a key that is not valid any more."""
        identity = self._book.holder(batch.caller)
        if identity is None:
            raise ApiError(403, "The API key of this batch is not valid any more", code="cannot_go_on")
        return identity

    # The lines of a file.

    async def _expand(self, batch: StoredBatch) -> list[str]:
        """Enter a line for each request of a batch's file; return what is wrong with it."""
        # An earlier process may have died amid this.
        while await self._change(batch, batches.close_lines):
            pass
        start = total = 0
        number, problems, part = 1, list[str](), b"\n"
        # The last line has no end, as has the beginning of one that is too long.
        while part.endswith(b"\n") and len(problems) < limits.MAX_BATCH_ERRORS:
            part = await self._part(batch, start)
            places = await _patiently(partial(self._read, batch, BatchPart(number, batch.path), part))
            problems += await self._change(batch, batches.add_lines, start=start, places=places)
            start, number, total = start + len(part), number + part.count(b"\n"), total + len(places)
            if total > limits.MAX_BATCH_LINES:
                return [f"a batch takes at most {limits.MAX_BATCH_LINES} requests"]
        if not total:
            return ["the file holds no request"]
        if not problems:
            await self._change(batch, batches.move, before=("validating",), state="in_progress", total=total)
        return problems[: limits.MAX_BATCH_ERRORS]

    async def _part(self, batch: StoredBatch, start: int) -> bytes:
        """Return whole lines of a batch's file from byte `start` on, or more of one line than a request may have."""
        part = b""
        for size in (_PART_BYTES, self._services.run.config.max_request_bytes + 1):
            part = await self._content(batch, start, size)
            if len(part) == size and (end := part.rfind(b"\n")) >= 0:
                return part[: end + 1]
            if len(part) < size:
                break
        return part

    async def _content(self, batch: StoredBatch, start: int, size: int) -> bytes:
        return await self._store.read(
            batch.caller, partial(files.read, file_id=batch.input_file, start=start, size=size)
        )

    async def _read(self, batch: StoredBatch, part: BatchPart, content: bytes) -> list[LinePlace]:
        services, most = self._services, self._services.run.config.max_request_bytes
        ask = Ask("batch_lines", services.check_serving(), owner=batch.caller, max_bytes=most, part=part)
        found = expect(await services.text.prepare(ask, content), Body)
        return msgspec.json.decode(found.content, type=list[LinePlace])

    # Answers.

    async def _answer_lines(self, batch: StoredBatch) -> None:
        """Answer one line after another as long as there is a free one. Each answer is kept as the next line begins.
        Raise ApiError (403) once the batch's key is not valid any more."""
        keep: Callable[[Shelf], None] | None = None

        def advance(shelf: Shelf) -> LinePlace | None:
            if keep is not None:
                keep(shelf)
            return batches.next_line(shelf, batch.batch_id)

        while (line := await _patiently(partial(self._store.write, batch.caller, advance))) is not None:
            formatter: Formatter | None = None
            identity = self._holder(batch)
            try:
                if line.tries >= limits.MAX_JOB_TRIES:
                    raise _no_progress()
                with self._services.held.hold(batch.caller) as hold:
                    body, formatter = await _patiently(partial(self._ask, batch, line, identity, hold))
                status = 200
            except ApiError as error:
                status, body = error.status, error.body()
            except Exception as error:  # A defect here is its line's alone.
                log.error("batch_line_failed", exc_info=error)
                status, body = 500, internal_error().body()
            keep = partial(_keep, batch=batch, line=line, status=status, body=body, formatter=formatter)

    async def _ask(
        self, batch: StoredBatch, line: LinePlace, identity: Identity, hold: Hold
    ) -> tuple[bytes, Formatter]:
        """Have a line answered like a request of its route; return the answer and its formatter. Raise ApiError."""
        services, kind = self._services, KINDS[batch.path]
        await self._book.enter(batch.caller)
        facts = services.check_serving()
        hold.set(line.size)
        body = await self._content(batch, line.start, line.size)
        lend = partial(responses.lend, self._store, batch.caller)
        prepared = expect(await services.prepare(kind, body, identity, lend=lend), Prepared)
        hold.set(prepared.num_bytes)
        request = prepared.request
        if request.priority:
            raise invalid("A request of a batch has no `priority`", "priority")
        services.metrics.count_ignored(request.ignored)
        answer_id = exchange.new_answer_id(kind)
        terms = terms_of(identity, services.run.secret, patient=True, background=True)
        seed = services.draw_seed() if request.seed is None else request.seed
        generates = exchange.generates_of(
            services, prepared, facts, identity, answer_id=answer_id, seed=seed, terms=terms
        )
        answer = exchange.answer_of(services, prepared, answer_id, hold)
        formatter = exchange.FORMATTERS[kind](
            answer_id, int(time.time()), request, services.tokenizer, services.fingerprint
        )
        progress = exchange.Progress(services.metrics, time.monotonic(), request.num_choices)
        turns: exchange.Turns = services.long_answers if request.shows_prompts else nullcontext()
        try:
            with services.admission.hold(request.num_sequences, services.capacity, terms):
                async with exchange.submitted(services, generates, facts, beams=request.beams) as group:
                    choices = await exchange.Leading(group, answer, progress).whole(turns)
                    return await exchange.completed(formatter, choices, answer, services.long_answers), formatter
        finally:
            if fields := progress.end(answer):
                own = {"key": identity.name} if identity.name else {}
                facts_of_line = {"answer_id": answer_id, "route": batch.path, "batch": batch.batch_id, **own}
                self._book.tell(exchange.spent_of(identity.name, answer), "answer", facts_of_line | fields)


def _keep(
    shelf: Shelf, batch: StoredBatch, line: LinePlace, status: int, body: bytes, formatter: Formatter | None
) -> None:
    """Keep an answer as its line's, and as a response where it is one. Raise NoRoom."""
    if isinstance(formatter, ResponsesFormatter) and formatter.kept is not None:
        body = body if responses.put(shelf, formatter.kept) else formatter.unkept()
    response = {"status_code": status, "request_id": secrets.token_hex(12), "body": msgspec.Raw(body)}
    answer = result_line(BatchLine(line.number, line.custom_id), response, None)
    batches.keep_answer(shelf, batch.batch_id, line.number, answer, failed=not 200 <= status < 300)


def _no_progress() -> ApiError:
    message = f"{limits.MAX_JOB_TRIES} processes ended while they had this"
    return ApiError(500, message, type="server_error", code="cannot_go_on")


async def _patiently(work: Callable[[], Awaitable[_T]]) -> _T:
    """Return the result of work, which is done again, later and later, as long as it is refused for now."""
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            return await work()
        except ApiError as error:
            if error.status not in (429, 503) or error.code == STORE_FULL:
                raise
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
