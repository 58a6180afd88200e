"""Works on batches: asks the routes for each line in the background, and keeps every answer as it comes.

A batch belongs to one HTTP process. If the process dies, another one takes the lines that have no answer yet. Each line
is a job with a name of its own, so the other process joins a line that runs, and does not begin it anew.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import structlog
from starlette.types import ASGIApp, Message, Scope

from moeserve.forever import Forever, cancel
from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, internal_error
from moeserve.frontend.keys import Identity
from moeserve.frontend.services import Services
from moeserve.frontend.store import batches
from moeserve.frontend.store.batches import BatchLine, StoredBatch, read_line, result_line
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.store import STORE_FULL, Store

log = structlog.get_logger(__name__)

_LOOK_APART_S = 0.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_NOT_NOW = (429, 503)


class Batches:
    """The batches of this process, each on a task of its own."""

    def __init__(
        self,
        services: Services,
        store: Store,
        owner: Owner,
        identify: Callable[[bytes], Identity | None],
        routes: Mapping[str, ASGIApp],
    ) -> None:
        """identify: returns the holder of the key with a digest. routes: that answer lines, by their paths."""
        self._services = services
        self._store = store
        self._owner = owner
        self._identify = identify
        self._routes = routes
        self._turns: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places = asyncio.Semaphore(limits.BATCHES_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
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
            await self._look_once()

    async def _look_once(self) -> None:
        if self._services.is_draining:
            await cancel(*self._tasks.values())
            return
        if self._services.engine.ready is None:
            return
        found = await self._store.read(b"", batches.open_ones)
        for batch_id, task in list(self._tasks.items()):
            if found.get(batch_id, ("", "cancelling"))[1] == "cancelling":
                await cancel(task)
        dead = {owner for owner, _ in found.values() if self._owner.is_dead(owner)}
        left = [
            batch_id
            for batch_id, (owner, _) in found.items()
            if owner in dead or (owner == self._owner.name and batch_id not in self._tasks)
        ]
        if left:
            for batch in await self._store.write(b"", partial(batches.adopt, batch_ids=left, owner=self._owner.name)):
                task = asyncio.create_task(self._run(batch))
                self._tasks[batch.batch_id] = task
                task.add_done_callback(partial(self._forget, batch.batch_id))

    def _forget(self, batch_id: str, _: asyncio.Task[None]) -> None:
        self._tasks.pop(batch_id, None)

    async def _run(self, batch: StoredBatch) -> None:
        try:
            if batch.state == "cancelling":
                await self._end(batch, "cancelled")
            else:
                async with self._turns[batch.caller], self._places:
                    await self._work(batch)
        except asyncio.CancelledError:
            if self._services.is_draining and self._services.run.response_store is None:
                # The answers end with the service, which must not wait for the lines that run.
                await self._store.write(batch.caller, partial(batches.drop_lines, batch_id=batch.batch_id))
            raise
        except ApiError as error:
            if error.code == STORE_FULL:
                await self._fail(batch, [{"code": STORE_FULL, "message": error.message}])
                return
            log.warning("batch_interrupted", batch=batch.batch_id, reason=error.message)
        except Exception as error:  # A defect here is its batch's alone.
            log.error("batch_failed", exc_info=error)
            await self._fail(batch, [{"code": "internal_error", "message": internal_error().message}])

    async def _work(self, batch: StoredBatch) -> None:
        identity = self._identify(batch.caller)
        content = await self._store.read(batch.caller, partial(batches.input_of, found=batch))
        if identity is None or content is None:
            reason = "The API key of this batch is not valid any more" if content is not None else "Its file is gone"
            await self._fail(batch, [{"code": "cannot_go_on", "message": reason}])
            return
        lines = await asyncio.to_thread(read_lines, content, batch.path)
        if problems := [line.problem for line in lines if line.problem is not None]:
            errors = [{"code": "invalid_line", "message": problem} for problem in problems[: limits.MAX_BATCH_ERRORS]]
            await self._fail(batch, errors)
            return
        begin = partial(
            batches.move, batch_id=batch.batch_id, before=("validating", "in_progress"), state="in_progress"
        )
        if not await self._store.write(batch.caller, partial(begin, field="in_progress", total=len(lines))):
            return  # it was cancelled meanwhile
        done = await self._store.read(batch.caller, partial(batches.answered, batch_id=batch.batch_id))
        left = iter([line for line in lines if line.number not in done])
        ready = self._services.engine.ready
        at_once = min(limits.BATCH_AT_ONCE, ready.max_num_seqs if ready is not None else 1)
        try:
            async with asyncio.timeout(max(0.0, batch.expires - time.time())), asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._answer_all(batch, left, identity))
        except TimeoutError:
            await self._expire(batch, lines)
            return
        except BaseExceptionGroup as error_group:
            raise error_group.exceptions[0] from None
        await self._end(batch, "completed")

    async def _answer_all(self, batch: StoredBatch, lines: Iterator[BatchLine], identity: Identity) -> None:
        for line in lines:
            wait_s = _FIRST_WAIT_S
            while True:
                request_id = secrets.token_hex(12)
                status, body = await self._ask(batch, line, identity, request_id)
                if status not in _NOT_NOW:
                    break
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
            keep = partial(batches.add_result, batch_id=batch.batch_id, number=line.number)
            answer = result_line(line, response, None)
            await self._store.write(batch.caller, partial(keep, line=answer, failed=not 200 <= status < 300))

    async def _ask(self, batch: StoredBatch, line: BatchLine, identity: Identity, request_id: str) -> tuple[int, bytes]:
        """Return status and body of a route's answer."""
        status, parts = 500, [b""]
        messages: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        try:
            scope = _scope(line, identity, request_id, batches.line_name(batch.batch_id, line.number))
            await self._routes[line.path](scope, receive, send)
        except ApiError as error:
            return error.status, error.body()
        except Exception as error:  # A defect here is its line's alone.
            log.error("batch_line_failed", exc_info=error)
            return 500, internal_error().body()
        return status, b"".join(parts)

    async def _expire(self, batch: StoredBatch, lines: list[BatchLine]) -> None:
        """End a batch whose time is over; lines without an answer get an error."""
        error = {"code": "batch_expired", "message": "The batch's time was over before this request was answered"}
        done = await self._store.read(batch.caller, partial(batches.answered, batch_id=batch.batch_id))
        for line in lines:
            if line.number not in done:
                keep = partial(batches.add_result, batch_id=batch.batch_id, number=line.number)
                await self._store.write(batch.caller, partial(keep, line=result_line(line, None, error), failed=True))
        await self._end(batch, "expired")

    async def _end(self, batch: StoredBatch, state: batches.BatchState) -> None:
        await self._store.write(batch.caller, partial(batches.end, batch_id=batch.batch_id, state=state, field=state))

    async def _fail(self, batch: StoredBatch, errors: list[dict[str, str]]) -> None:
        listed = msgspec.json.encode({"object": "list", "data": errors})
        end = partial(batches.end, batch_id=batch.batch_id, state="failed", field="failed", errors=listed)
        await self._store.write(batch.caller, end)


def read_lines(content: bytes, path: str) -> list[BatchLine]:
    """Return every line that is not blank as a request; all must be for one route."""
    seen: set[str] = set()
    numbered = enumerate(content.split(b"\n"), start=1)
    lines = [_checked(read_line(number, written, seen), path) for number, written in numbered if written.strip()]
    if not lines:
        return [BatchLine(0, problem="the file holds no request")]
    if len(lines) > limits.MAX_BATCH_LINES:
        return [BatchLine(0, problem=f"a batch takes at most {limits.MAX_BATCH_LINES} requests")]
    return lines


def _checked(line: BatchLine, path: str) -> BatchLine:
    if line.problem is None and line.path != path:
        return BatchLine(line.number, problem=f"line {line.number}: `url` must be the batch's `endpoint`, {path}")
    if line.problem is None and path == "/v1/responses" and msgspec.json.decode(line.body).get("background"):
        return BatchLine(line.number, problem=f"line {line.number}: `background` is for one answer, not for a batch")
    return line


def _scope(line: BatchLine, identity: Identity, request_id: str, name: bytes) -> Scope:
    """Return the scope of a request as the layers around the routes would have made it. name: of its job."""
    state: dict[str, Any] = {
        "identity": identity,
        "request_id": request_id,
        "log": {},
        "arrival": time.monotonic(),
        "error_body": lambda error: error.body(),
        "batch_line": name,
    }
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": line.path,
        "headers": [(b"content-type", b"application/json")],
        "extensions": {},
        "state": state,
    }
