"""HTTP for all handlers: errors as a client sees them, bodies, forms and lists, clients that leave, event streams.

Errors come from a fixed set of kinds and never show a traceback or other internals. Their shape is OpenAI's but where
the routes of another API have an `ErrorBody` of their own.
"""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moeserve.frontend import limits
from moeserve.frontend.wills import NO_WILL, Will

# The code of refusals for the time that a request would wait.
OVERLOADED = "overloaded"
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_SLICE_BYTES = 64 * 1024

_T = TypeVar("_T")

# By the name of a content coding (RFC 9110, 8.4.1): the windowBits by which zlib expects its header.
_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}

_BOUNDARY = re.compile(rb'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_NAME, _FILE_NAME = (re.compile(rb';\s*%b="((?:[^"\\]|\\.)*)"' % field) for field in (b"name", b"filename"))
_MAX_PARTS = 16
_MAX_PART_HEADER_BYTES = 4096

_DEFAULT_PAGE, _MAX_PAGE = 20, 100


class ApiError(Exception):
    """A request that is refused or failed. `param` names the field, `code` is for programs, `message` for people.

    may_retry: False tells clients of OpenAI and Anthropic, which retry after 5xx by themselves, not to.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        may_retry: bool = True,
        close: bool = False,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.may_retry = may_retry
        self.close = close
        self.allow = allow

    def body(self) -> bytes:
        """`{"error": {...}}`: the body of a response and the data of an error event."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The error as an event of OpenAI's streams."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that belong to the status: when to retry, how to ask, and whether the connection ends here."""
        headers = []
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        if not self.may_retry:
            headers.append((b"x-should-retry", b"false"))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.close:
            headers.append((b"connection", b"close"))
        return headers


# Returns the body of an error's response, in the shape of one API, from the error and the request's id.
ErrorBody = Callable[[ApiError, str], bytes]


def openai_error_body(error: ApiError, _: str) -> bytes:
    """Return the body that OpenAI's API has; the id is in a header alone."""
    return error.body()


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request cannot be served as it is."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, value: str | None = None) -> ApiError:
    """400: a field, or a value of it, that would change the answer and that this server does not support."""
    what = param if value is None else f"{param}={value}"
    return ApiError(400, f"`{what}` is not supported by this server", param=param, code="unsupported_parameter")


def context_length_exceeded(
    limit: int, prompt_tokens: int, output_tokens: int, *, at_least: bool = False, param: str | None = None
) -> ApiError:
    """400: prompt and output do not fit; the message gives the limit and both counts. param: the prompt's field."""
    about = "at least " if at_least else ""
    message = (
        f"This model's maximum context length is {limit} tokens, but {about}{prompt_tokens + output_tokens} were "
        f"requested ({about}{prompt_tokens} in the prompt and {output_tokens} for the output). "
        "Shorten the prompt or ask for fewer tokens."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def longest_output(num_prompt_tokens: int, max_model_len: int, param: str | None = None) -> int:
    """Return how many tokens the context leaves for the output. Raises ApiError where it leaves none."""
    if num_prompt_tokens >= max_model_len:
        raise context_length_exceeded(max_model_len, num_prompt_tokens, 1, param=param)
    return max_model_len - num_prompt_tokens


def check_choices(num_choices: int, most: int) -> None:
    """Raise ApiError for a request of more choices than one may have."""
    if num_choices > most:
        raise invalid(f"The request asks for {num_choices} choices; this server takes {most} in one request", "n")


def unknown_model(name: str, names: Sequence[str]) -> ApiError:
    """404: no model of that name is served. names: of the served one."""
    served = " or ".join(f"`{one}`" for one in names[:3])
    message = f"The model `{name[:200]}` does not exist: this server has {served}"
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, code: str, retry_after_s: float = 1.0, *, close: bool = False) -> ApiError:
    """503: not now."""
    return ApiError(503, message, type="server_unavailable", code=code, retry_after_s=retry_after_s, close=close)


def internal_error(message: str = "The request failed inside the server") -> ApiError:
    """500: the server failed."""
    return ApiError(500, message, type="server_error", code="internal_error")


class ClientDisconnected(Exception):
    """The client left before its answer was complete."""


async def receive_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body of a request. Raises ClientDisconnected, and ApiError: 413 as soon as it is too large, 408
    when it takes too long."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit():
        _check_body(int(declared), max_bytes)
    chunks: list[bytes] = []
    size, seconds = 0, limits.RECEIVE_TIMEOUT_S
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                _check_body(size, max_bytes)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        text = f"The body did not arrive within {seconds:g} s"
        raise ApiError(408, text, code="request_timeout", close=True) from None


def _check_body(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise ApiError(413, f"The body is larger than {max_bytes} bytes", code="request_too_large", close=True)


def content_coding(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the name of the coding of a request's body, None for a plain one. Raises ApiError (415)."""
    named = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    codings = [coding for value in named for coding in value.split(b",") if coding.strip() not in (b"", b"identity")]
    if not codings:
        return None
    coding = codings[0].strip()
    if len(codings) > 1 or coding not in _WINDOW_BITS:
        shown = b",".join(codings).decode("ascii", "replace")[:40]
        message = f"A body with `content-encoding: {shown}` is not read here: send it as gzip, deflate or plain"
        raise ApiError(415, message, code="unsupported_content_encoding")
    return coding


def inflate(body: bytes, coding: bytes, max_bytes: int) -> bytes:
    """Return a body as it was before its coding. Raises ApiError: 413 above `max_bytes`, 400 if it is damaged, or has
    several members: with thousands of them it would take seconds."""
    stream = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        inflated = stream.decompress(body, max_bytes + 1)
    except zlib.error:
        inflated = b""
    if len(inflated) > max_bytes:
        text = f"The body is larger than {max_bytes} bytes when it is inflated"
        raise ApiError(413, text, code="request_too_large", close=True)
    if not stream.eof or stream.unused_data:
        raise invalid(f"The body is not one whole {coding.decode()} stream", code="invalid_content_encoding")
    return inflated


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form. file_name: of an uploaded file, else None."""

    content: bytes
    file_name: str | None


def boundary_of(scope: Scope) -> bytes:
    """Return the boundary that the content type names. Raises ApiError (415)."""
    sent = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    found = _BOUNDARY.match(sent)
    if found is None:
        message = "Send a form: `content-type: multipart/form-data` with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    return found[1]


def read_form(boundary: bytes, body: bytes) -> dict[str, Part]:
    """Return the fields of a form. Raises ApiError."""
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, _MAX_PARTS)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--") or len(pieces) > _MAX_PARTS:
        raise invalid(f"The body is no form that ends in its boundary and has at most {_MAX_PARTS - 2} fields")
    form = {}
    for piece in pieces[1:-1]:
        head, _, content = piece.partition(b"\r\n\r\n")
        if len(head) > _MAX_PART_HEADER_BYTES:
            raise invalid(f"A field of the form has more than {_MAX_PART_HEADER_BYTES} bytes of headers")
        disposition = next(
            (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b""
        )
        name, file_name = _NAME.search(disposition), _FILE_NAME.search(disposition)
        if name is None:
            raise invalid("A field of the form has no name")
        shown = None if file_name is None else file_name[1].decode("utf-8", "replace")
        form[name[1].decode("utf-8", "replace")] = Part(content, shown)
    return form


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. Cancel it and raise ClientDisconnected if the client leaves.

    The body must have been read: the next message of `receive` is the disconnect.
    """
    job = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnected
        return job.result()
    finally:
        for task in (job, watch):
            task.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


class SlowReader(Exception):
    """The client does not read: its connection's buffer stayed full."""


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    media: bytes | None = None,
    *,
    is_last: bool = True,
) -> None:
    """Send a complete response, JSON unless `media` says otherwise. is_last: False where an empty message follows, with
    which the connection may be closed."""
    head = [(b"content-type", media or b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*head, *(headers or ())]})
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


def with_headers(send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
    """Return a `send` that adds headers to the response."""

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return adding


async def send_error(send: Send, error: ApiError, body: bytes, *, is_last: bool = True) -> None:
    """Send an error as a response with that body. is_last: see `send_body`."""
    await send_body(send, error.status, body, error.headers(), is_last=is_last)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def json_bytes(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def page_of(listed: Sequence[tuple[str, bytes]], query: QueryParams, *, most: int = _MAX_PAGE) -> Response:
    """Return a page of a list of ids and JSON, which is in ascending order; the latest comes first unless `order` is
    `asc`. Raises ApiError for a query that is none."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_DEFAULT_PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("`order` must be asc or desc", "order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= most:
        raise invalid(f"`limit` must be 1 to {most}", "limit")
    items = list(listed) if order == "asc" else list(reversed(listed))
    if after is not None:
        ids = [name for name, _ in items]
        if after not in ids:
            raise invalid(f"`after` is {after[:80]!r}, which is not in this list", "after")
        items = items[ids.index(after) + 1 :]
    return list_of(items[: int(limit)], has_more=len(items) > int(limit))


def list_of(page: Sequence[tuple[str, bytes]], *, has_more: bool = False) -> Response:
    content = {
        "object": "list",
        "data": [msgspec.Raw(item) for _, item in page],
        "first_id": page[0][0] if page else None,
        "last_id": page[-1][0] if page else None,
        "has_more": has_more,
    }
    return json_bytes(msgspec.json.encode(content))


class PatientSend:
    """A `send` that hands bodies over in slices, each only when the connection's buffer has room.

    Raises SlowReader if there is no room for `timeout_s`. One timer outlasts many messages: a timer for each would cost
    a tenth of the CPU of a streamed token.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._due = math.inf  # when the message that waits is too late, on the loop's clock
        self._is_late = False
        self._sender: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= _SLICE_BYTES:
            await self._give(message)
            return
        for start in range(0, len(body), _SLICE_BYTES):
            end = start + _SLICE_BYTES
            more = end < len(body) or message.get("more_body", False)
            await self._give({"type": message["type"], "body": body[start:end], "more_body": more})

    async def _give(self, message: Message) -> None:
        loop, sender = asyncio.get_running_loop(), asyncio.current_task()
        assert sender is not None
        self._sender, self._due = sender, loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._check, loop)
        try:
            await self._send(message)
        except asyncio.CancelledError:
            if self._is_late and sender.uncancel() == 0:
                raise SlowReader from None
            raise
        finally:
            self._due = math.inf

    def end(self) -> None:
        """Let go of the request: its timer would hold all of it for as long as a client may take to read."""
        self._sender = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the message that waits if it is too late, else look again when it will be."""
        self._timer = None
        if loop.time() >= self._due and self._sender is not None:
            self._is_late = True
            self._sender.cancel()
        elif self._due < math.inf:
            self._timer = loop.call_at(self._due, self._check, loop)


class EventStream:
    """Server-sent events. Every call of `write` carries whole events and is one write to the connection."""

    def __init__(self, send: Send, will: Will = NO_WILL, last_words: bytes = b"") -> None:
        """last_words: the events that end the stream, left in the `will` until it ends."""
        self._send = send
        self._will = will
        self._last_words = last_words

    async def start(self) -> None:
        """Send status 200 and the headers."""
        self._will.end_stream(self._last_words)
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, events: bytes, *, last: bool = False) -> None:
        if last:
            self._will.revoke()
        else:
            self._will.note_write()
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})
