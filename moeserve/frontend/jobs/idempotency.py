"""Answers to requests with an `Idempotency-Key`: computed once, and given to whoever sends such a request again.

The HTTP process that computes an answer records it, so repeated requests attach to it there, and it goes on when its
clients leave. A whole answer is in the store, for all processes, before any client has all of it. An answer is lost
with its process, and the next request with the key begins anew.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial

import msgspec
import structlog
from starlette.types import Send

from moeserve.forever import cancel
from moeserve.frontend.errors import ApiError, internal_error, unavailable
from moeserve.frontend.held import HeldBytes, Hold
from moeserve.frontend.http import Headers, Piece
from moeserve.frontend.jobs.recording import PIECE_BYTES, Recording
from moeserve.frontend.store import idempotency
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.idempotency import Name, Named, in_use, key_of_another
from moeserve.frontend.store.store import Store

log = structlog.get_logger(__name__)

# Computes an answer, which it sends; returns whether the answer is whole.
Work = Callable[[Send], Awaitable[bool]]


class KeyedAnswers:
    """The answers of this process, and those in the store. Nobody finds another caller's."""

    def __init__(self, store: Store, owner: Owner, held: HeldBytes) -> None:
        """owner: this process."""
        self._store = store
        self._owner = owner
        self._held = held
        self._running: dict[tuple[bytes, bytes], Recording] = {}  # by caller and key
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Give up the answers that are computed."""
        await cancel(*self._tasks)

    async def find(self, caller: bytes, name: Name) -> AsyncGenerator[Piece] | str | None:
        """Return the answer to an earlier request with the key, or the id of its job; None without one.

        Raise ApiError: 422 for a key of another request, 409 for one that another process answers.
        """
        if (running := self._find_running(caller, name)) is not None:
            return running.read()
        named = await self._store.read(caller, partial(idempotency.find, name=name))
        if named is None or (named.owner is not None and self._is_over(named.owner)):
            return None
        if named.owner is not None:
            raise in_use()
        return named.kept_id if named.headers is None else self._read(caller, named, named.headers)

    def begin(self, caller: bytes, name: Name, work: Work, places: ExitStack) -> AsyncGenerator[Piece]:
        """Begin an answer and return it, or the one that is computed for the key. Raise ApiError (422).

        places: of admission and memory, closed at the end of the work, or here.
        """
        with places:
            running = self._find_running(caller, name)
            if running is None:
                running = self._running[caller, name.key] = Recording(name.content, Hold(self._held, caller))
                task = asyncio.create_task(self._run(caller, name, running, work, places.pop_all()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return running.read()

    def _find_running(self, caller: bytes, name: Name) -> Recording | None:
        running = self._running.get((caller, name.key))
        if running is not None and running.content != name.content:
            raise key_of_another()
        return running

    def _is_over(self, owner: str) -> bool:
        """Return whether an owner computes an answer no more. This process has none that is not running."""
        return owner == self._owner.name or self._owner.is_dead(owner)

    async def _run(self, caller: bytes, name: Name, recording: Recording, work: Work, places: ExitStack) -> None:
        """Compute an answer, and end its recording."""
        error: ApiError | None = unavailable("The server is shutting down", "draining", 5.0, close=True)
        answer_id = f"key_{secrets.token_hex(12)}"
        begin = partial(idempotency.begin, name=name, answer_id=answer_id, owner=self._owner.name)
        try:
            with places:
                await self._store.write(caller, partial(begin, is_over=self._is_over))
                is_whole = False
                try:
                    is_whole = await work(recording.send)
                finally:
                    await self._leave(caller, answer_id, recording if is_whole and recording.is_kept else None)
            error = None
        except ApiError as failure:
            error = failure
        except Exception as defect:
            log.error("request_failed", exc_info=defect)
            error = internal_error()
        finally:
            del self._running[caller, name.key]
            recording.end(error)

    async def _leave(self, caller: bytes, answer_id: str, recording: Recording | None) -> None:
        """Keep an answer, if there is room for it; else give its key back."""
        if recording is not None:
            headers = msgspec.msgpack.encode(recording.headers)
            finish = partial(idempotency.finish, answer_id=answer_id, headers=headers, body=recording.body)
            with suppress(ApiError):
                await self._store.write(caller, finish)
                return
        # Where the store does not answer, the key is free nevertheless: see `_is_over`.
        with suppress(ApiError):
            await self._store.write(caller, lambda shelf: shelf.drop(answer_id))

    async def _read(self, caller: bytes, named: Named, headers: bytes) -> AsyncGenerator[Piece]:
        """Yield a whole answer from the store."""
        sent = msgspec.msgpack.decode(headers, type=Headers)
        start = 0
        while start < named.num_bytes:
            read = partial(idempotency.read, answer_id=named.kept_id, start=start, size=PIECE_BYTES)
            piece = await self._store.read(caller, read)
            if not piece:
                raise gone()
            events, end, _ = piece.rpartition(b"\n\n")
            piece = events + end or piece
            start += len(piece)
            yield sent, piece, start == named.num_bytes


def gone() -> ApiError:
    """404: an answer was dropped while somebody looked at it."""
    return ApiError(404, "This answer was deleted, or had to make room", code="response_not_found")
