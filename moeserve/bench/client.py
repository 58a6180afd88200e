"""A client for the few routes of an OpenAI-compatible server that a measurement needs.

It shares its machine with the server that it measures, so it does as little as it can while a response arrives: a
protocol on the bare transport, the C parser, one append per piece. The pieces are parsed after the end.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import msgspec
from httptools import HttpParserError, HttpResponseParser

Message = dict[str, str]


class RequestFailed(Exception):
    """The server refused the request or did not answer it to its end.

    `status` is 0 without a response; `retry_after_s` is when the server said to come back, if it did.
    """

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Sends streamed chat completions, greedy ones unless `temperature` says otherwise.

    `ignore_eos` asks for all `max_tokens` tokens, so that every server does the same work.
    """

    endpoint: Endpoint
    model: str
    api_key: str | None
    ignore_eos: bool
    timeout_s: float
    temperature: float = 0.0

    async def chat(self, messages: list[Message], max_tokens: int) -> tuple[Response, Answer]:
        """Return the response and its answer. Raise RequestFailed."""
        request: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            request["ignore_eos"] = True
        response = await self._exchange("POST", "/v1/chat/completions", msgspec.json.encode(request))
        try:
            return response, read_answer(response.reads)
        except StreamError as error:
            raise RequestFailed(str(error), response.status) from error

    async def get(self, path: str) -> Any:
        """Return the decoded JSON of a GET. Raise RequestFailed."""
        response = await self._exchange("GET", path, b"")
        try:
            return msgspec.json.decode(response.body)
        except msgspec.DecodeError as error:
            raise RequestFailed(f"{path} does not answer in JSON", response.status) from error

    async def first_model(self) -> str:
        """Return the first model that the server lists. Raise RequestFailed."""
        listed = await self.get("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed("/v1/models lists no model; name one with --model") from error

    async def version(self) -> str | None:
        """Return the answer of `GET /version`, None if there is no such route."""
        try:
            answer = await self.get("/version")
        except RequestFailed:
            return None
        return str(answer.get("version", answer)) if isinstance(answer, dict) else str(answer)

    async def _exchange(self, method: str, path: str, body: bytes) -> Response:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            response = await exchange(self.endpoint, method, path, body, headers, self.timeout_s)
        except ExchangeError as error:
            raise RequestFailed(str(error)) from error
        if response.status != 200:
            told = response.headers.get("retry-after", "")
            retry_after_s = float(told) if told.isdecimal() else None
            raise RequestFailed(
                f"HTTP {response.status}: {error_message(response.body)}", response.status, retry_after_s
            )
        return response


class StreamError(Exception):
    """The stream is malformed, carries an error event or ends before its finish reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `event_times` has one entry per event with text in it, seconds on the clock of the pieces.

    An event may hold several tokens. The counts are from the server's `usage`, None without one.
    """

    text: str
    event_times: tuple[float, ...]
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def timed_data(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the `data` of each server-sent event with the time at which its last byte was read."""
    rest, data = b"", []
    for read_at, piece in reads:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield read_at, b"\n".join(data)
                data = []


def read_answer(reads: Iterable[tuple[float, bytes]]) -> Answer:
    """Return the answer of a stream. Raise StreamError."""
    texts: list[str] = []
    event_times: list[float] = []
    usage = _Usage()
    finished = False
    for read_at, data in timed_data(reads):
        if data == b"[DONE]":
            break
        chunk = _decode_event(data)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content = choice.delta.content or ""
            if content or choice.delta.reasoning_content or choice.delta.reasoning:
                texts.append(content)
                event_times.append(read_at)
            finished = finished or choice.finish_reason is not None
    if not finished:
        raise StreamError("the stream ended without a finish reason")
    details = usage.prompt_tokens_details
    cached_tokens = details.cached_tokens if details else None
    return Answer("".join(texts), tuple(event_times), usage.prompt_tokens, usage.completion_tokens, cached_tokens)


def _decode_event(data: bytes) -> _Chunk:
    try:
        chunk = _decode_chunk(data)
    except msgspec.MsgspecError as error:
        raise StreamError(f"an event is not a chat completion chunk: {error}") from error
    if bytes(chunk.error) != b"null":
        raise StreamError(error_message(data))
    return chunk


def error_message(body: bytes) -> str:
    """Return OpenAI's `error.message`, FastAPI's `detail`, the `reason` of `/ready`, or the beginning of the body."""
    try:
        decoded = msgspec.json.decode(body)
        found = next((decoded[name] for name in ("error", "detail", "reason") if name in decoded), None)
        return str(found.get("message", found) if isinstance(found, dict) else found or decoded)
    except (msgspec.MsgspecError, AttributeError):
        return body[:200].decode("utf-8", "replace")


class ExchangeError(Exception):
    """No whole response: the server was not reached, closed the connection early or does not speak HTTP."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address; `base_path` precedes `/v1`, without a slash at its end."""

    host: str
    port: int
    tls: bool
    base_path: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raise ValueError if `url` is not http(s)://host[:port][/path]; a trailing `/v1` is taken off."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(slots=True)
class Response:
    """Times are `perf_counter` seconds; `sent_at` is when the request was handed to the socket."""

    sent_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.reads)


async def exchange(
    endpoint: Endpoint, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
) -> Response:
    """Send one request on a connection of its own and read the response to its end.

    The clock starts when the connection is established. Raise ExchangeError.
    """
    loop = asyncio.get_running_loop()
    protocol = _ResponseReader(loop.create_future())
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            transport, _ = await loop.create_connection(
                lambda: protocol,
                endpoint.host,
                endpoint.port,
                ssl=ssl.create_default_context() if endpoint.tls else None,
            )
            protocol.response.sent_at = perf_counter()
            transport.write(_request_bytes(endpoint, method, path, body, headers))
            return await protocol.done
    except TimeoutError:
        raise ExchangeError(f"no whole answer within {timeout_s:g} s") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
        raise ExchangeError(f"cannot connect to {endpoint.authority}: {reason}") from error
    finally:
        protocol.done.cancel()  # If the caller has stopped waiting, it never reads the error that follows.
        if transport is not None:
            transport.abort()


def _request_bytes(endpoint: Endpoint, method: str, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {endpoint.base_path}{path} HTTP/1.1", f"Host: {endpoint.authority}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class _ResponseReader(asyncio.Protocol):
    """Resolves `done` with the response or an ExchangeError. httptools calls the `on_…` methods."""

    def __init__(self, done: asyncio.Future[Response]) -> None:
        self.response = Response()
        self.done = done
        self._parser = HttpResponseParser(self)
        self._read_at = 0.0
        self._headers_complete = False

    def data_received(self, data: bytes) -> None:
        self._read_at = perf_counter()
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(f"the server does not answer in HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        headers = self.response.headers
        ends_with_connection = "content-length" not in headers and "transfer-encoding" not in headers
        if exc is None and self._headers_complete and ends_with_connection:
            self._read_at = perf_counter()
            self.on_message_complete()
        else:
            self._fail("the server closed the connection before the end of its answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._headers_complete = True
        self.response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.response.reads.append((self._read_at, body))

    def on_message_complete(self) -> None:
        self.response.ended_at = self._read_at
        if not self.done.done():
            self.done.set_result(self.response)

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(ExchangeError(message))
