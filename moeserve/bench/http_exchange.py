"""One HTTP/1.1 request and its response, every piece of the body with the time it was read from the socket.

The client shares its machine with the server it measures, so it does as little as it can while a response arrives:
a protocol on the bare transport, the C parser, one append per piece. The pieces are understood after the end.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser


class ExchangeError(Exception):
    """No whole response: the server was not reached, closed the connection early or spoke something else than HTTP."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens; `base_path` is what precedes `/v1` and the like, without a slash at its end."""

    host: str
    port: int
    tls: bool
    base_path: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raises ValueError if `url` is not http(s)://host[:port][/path]; a trailing `/v1` is taken off."""
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
    """Sends one request on a connection of its own and reads the response to its end.

    The clock starts when the connection stands. Raises ExchangeError.
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
        raise ExchangeError(f"cannot connect to {endpoint.authority}: {error.strerror or error}") from error
    finally:
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
