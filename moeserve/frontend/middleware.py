"""The outermost layer: request ids, turns, errors as responses, one log line and one count per request."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import deque
from contextlib import suppress
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.frontend import limits
from moeserve.frontend.account import Ledger, RequestLine
from moeserve.frontend.errors import ApiError, internal_error
from moeserve.frontend.http import ClientDisconnected, PatientSend, SlowReader, send_error
from moeserve.frontend.keys import sent_key
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.route import RouteTable

log = structlog.get_logger(__name__)

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# The first name in the path to a value; further names may be the client's own.
_FIELD = re.compile(r"[A-Za-z_-]+")
# Of errors that end the connection at once, whatever its client still sends.
_UNREAD = ("request_timeout", "too_many_connections", "key_connections_full")
_CLIENT_CLOSED = 499

# At most this number of requests begin in one turn; each takes up to a millisecond until it first waits.
_AT_ONCE = 8


class RequestBoundary:
    """ASGI middleware. `scope["state"]["request_id"]` is the client's `x-request-id` where it is safe to repeat.

    Handlers add fields to the log line in `scope["state"]["log"]`: counts and times, never text. An answer's tokens go
    to `scope["state"]["line"]`.
    `scope["state"]["error_body"]` writes an error as this request's client would get it. Requests begin a few in each
    turn of the event loop, and go on with their bodies likewise, except the requests by which operators look at the
    server.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: RouteTable, ledger: Ledger | None = None) -> None:
        """ledger: counts the tokens of answers with their log lines."""
        self._app = app
        self._ledger = ledger
        self._metrics = metrics
        self._routes = routes
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        write = self._routes.error_body(scope["path"])
        line = RequestLine(self._ledger)
        state |= {"request_id": request_id, "line": line, "log": line.fields, "arrival": started}
        state["error_body"] = lambda error: write(error, request_id)
        patient = PatientSend(send, limits.SEND_TIMEOUT_S)
        found = self._routes.find(scope["path"])
        is_watch = found is not None and found.is_watch
        turnstile, flow = None if is_watch else self._turnstile, sent_key(scope) or b""
        if turnstile is not None:
            await turnstile.enter(flow)
        body, response = _Body(scope, receive, turnstile, flow), _Response(patient, request_id)
        try:
            await self._app(scope, body, response)
        except ClientDisconnected:
            response.abandon()
            self._metrics.count_disconnect()
        except SlowReader:
            response.abandon()
            self._metrics.count_disconnect()
            state["log"]["slow_reader"] = True
            if abort := scope.get("extensions", {}).get("moeserve.abort"):
                abort()
        except Exception as error:
            await self._fail(error, scope["path"], body, response, request_id, state["log"])
        finally:
            patient.end()
            # Paths with a parameter are too many for labels.
            route = found.path if found is not None and found.path == scope["path"] else "other"
            self._metrics.count_response(route, response.status)
            facts = {"request_id": request_id, "route": route, "status": response.status, **_client(scope)}
            line.end({**facts, "ms": round(1000 * (time.monotonic() - started), 1)}, is_watch=is_watch)

    async def _fail(
        self,
        error: Exception,
        path: str,
        body: _Body,
        response: _Response,
        request_id: str,
        log_fields: dict[str, Any],
    ) -> None:
        """Answer with the error. The log line tells its code and the field of the request, but no text."""
        if not isinstance(error, ApiError | HTTPException):
            log.error("request_failed", request_id=request_id, exc_info=error)
        if response.started:
            raise error
        # A frame of the traceback that names the error would keep the frames above, and the body in them, until garbage
        # is collected, which is seldom (`launcher.child.collect_seldom`).
        error.with_traceback(None)
        shown = as_api_error(error)
        log_fields["error"] = shown.code
        if shown.param and (field := _FIELD.match(shown.param)):
            log_fields["field"] = field[0]
        content = self._routes.error_body(path)(shown, request_id)
        await send_error(response, shown, content, is_last=False)
        if shown.code not in _UNREAD:
            await body.discard()
        await response({"type": "http.response.body", "body": b""})


def as_api_error(error: Exception) -> ApiError:
    """Return the error that the client gets for a handler's exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), code="invalid_request")
    return internal_error()


class _Body:
    """A `receive` that remembers whether the whole body has come. When a body comes late, the request enters the
    turnstile again."""

    def __init__(self, scope: Scope, receive: Receive, turnstile: Turnstile | None, flow: bytes) -> None:
        self._receive = receive
        self._flow = flow
        self._turnstile = turnstile
        self._began = 0 if turnstile is None else turnstile.turn
        self._is_read = False
        # A client that waits for `100 Continue` sends no body after an answer.
        self._waits = any(name == b"expect" for name, _ in scope["headers"])

    async def __call__(self) -> Message:
        self._waits = False
        message = await self._receive()
        was_read, self._is_read = self._is_read, not message.get("more_body", False)
        turnstile = self._turnstile
        if self._is_read and not was_read and turnstile is not None and turnstile.turn != self._began:
            await turnstile.enter(self._flow)
        return message

    async def discard(self) -> None:
        """Read the rest of the body, within bounds, after the answer was sent and before its connection is closed.

        A connection that is closed with data in it is reset, and a client that still sends would not see its answer.
        """
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.RECEIVE_TIMEOUT_S):
                while not self._is_read and not self._waits and size < limits.MAX_DISCARDED_BYTES:
                    size += len((await self()).get("body", b""))


class _Response:
    """A `send` that adds the request id, under OpenAI's name and Anthropic's, and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = [(b"x-request-id", request_id.encode()), (b"request-id", request_id.encode())]
        self.started = False
        self.status = 500

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)

    def abandon(self) -> None:
        self.status = _CLIENT_CLOSED


def _client(scope: Scope) -> dict[str, str]:
    """Return the client's address for the log line; of one behind a trusted proxy, the address that the proxy names."""
    client = scope.get("client")
    return {"client": client[0]} if client else {}


def _request_id(scope: Scope) -> str:
    sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return sent.decode() if _SAFE_ID.fullmatch(sent) else secrets.token_hex(12)


class Turnstile:
    """Bounds the work of a flood in each turn of the event loop. Requests pass in the order of their arrival, those of
    several keys in turns.

    `turn` counts the turns in which the turnstile has work; it is larger in a later turn than it was when a request
    passed.
    """

    def __init__(self) -> None:
        self.turn = 0
        self._num_passed = 0
        # By the key that a request names, whose turn it is first.
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}

    async def enter(self, key: bytes) -> None:
        """Return at once, or in a later turn if others have passed in this one or wait."""
        loop = asyncio.get_running_loop()
        if not self._num_passed:
            loop.call_soon(self._begin_turn, loop)
        if self._num_passed < _AT_ONCE:
            self._num_passed += 1
            return
        waiter = loop.create_future()
        self._waiting.setdefault(key, deque()).append(waiter)
        await waiter

    def _begin_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self.turn += 1
        self._num_passed = 0
        while self._waiting and self._num_passed < _AT_ONCE:
            key = next(iter(self._waiting))
            waiters = self._waiting.pop(key)
            waiter = waiters.popleft()
            if waiters:
                self._waiting[key] = waiters
            if not waiter.done():  # its client may have left
                waiter.set_result(None)
                self._num_passed += 1
        if self._num_passed:
            loop.call_soon(self._begin_turn, loop)
