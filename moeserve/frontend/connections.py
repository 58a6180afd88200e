"""HTTP connections: their bounds and places, clients that close one direction, and processes that share them evenly.

All processes of a service accept from one queue, so a connection waits for no particular process. But the first process
to wake would take a whole burst, and its death would end all streams of the burst. So each process publishes its number
of busy connections, and a process that is ahead leaves the next ones to the others for some milliseconds.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import Any, cast

import httptools
import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moeserve.frontend import limits
from moeserve.frontend.wills import Connection, WillLink

log = structlog.get_logger(__name__)

_TOO_LARGE = "Request headers are too large."
_FRAMING = (b"content-length", b"transfer-encoding")  # the headers that say where a body ends
_SECONDS_BETWEEN_PROBES = 0.2
_POKES_AT_FIRST = 3
_SECONDS_BETWEEN_FIRST_POKES = 0.5
_TCP_CLOSE = 7  # the first byte of Linux's tcp_info

_ROW = Struct("<dq")  # when the process was last awake, on the system's monotonic clock; its busy connections
_ASLEEP_AFTER_S = 0.5  # seconds; no other process waits for one that has not run for longer
_AHEAD = 2  # a process that has this many connections more than another leaves the next one to it
_PATIENCE_S = 0.02  # seconds that a connection is left to the others at most: a few turns of a busy core
_PAUSE_S = 0.001
_ACCEPTED_AT_ONCE = 64  # connections; each takes 0.1 ms
_HURRY_S = 0.05  # seconds for which a process that has waited in vain waits no more


class _Refused(Exception):
    """A request whose head is refused. The message is a sentence for its client."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which here also closes connections: with too large, too many or too slow headers, beyond
    the most that may be open, or whose client does not read.

    uvicorn with httptools bounds neither the size of headers nor the time they may take, and an application cannot: it
    is called when they are complete. `scope["extensions"]["moeserve.abort"]` drops the connection and its buffer.

    A client may close its sending half after its request and still gets its answer. A client that has closed the whole
    connection looks the same until bytes arrive, to which it answers with a reset. So bytes are sent at once, twice
    more soon (a proxy learns of the reset by the first, and ends this connection at the second) and then now and then,
    while the reset is watched for. Until the answer begins it is `100 Continue`; then
    `scope["extensions"]["moeserve.half_closed"]`, which an application may set, is called to have it write.

    `scope["extensions"]["moeserve.connection"]` returns the `wills.Connection` to leave a last will for.

    A request that offers another protocol (`Upgrade: h2c`, as Java's client does with each first one) is answered in
    this one, its body included, which httptools takes for bytes of the other. Trailers behind a chunked body are no
    headers. A request of HTTP/1.1 that does not name one host gets 400 (RFC 9112, 3.2).

    Where a client sends its next requests before it has its answers, the answers to requests that came whole are sent
    before a bad or a too slow one ends the connection.

    places: of the process. wills: to whom last wills are left, load: where busy connections are counted, if anywhere.
    """

    def __init__(
        self, *args: Any, places: Places, wills: WillLink | None = None, load: Load | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._places = places
        self._wills = wills
        self._load = load
        self._is_busy = False
        self._own: Connection | None = None
        self._end: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # since the headers began, as they came
        self._header_bytes = 0  # of complete header fields
        self._in_headers = True
        self._is_upgrade = False  # the request's head offers another protocol, and its body has not begun
        self._repeats_head = False  # the parser gets a head that it has had
        self._running: RequestResponseCycle | None = None  # the request that is answered; later ones wait in `pipeline`
        self._refusal: str | None = None  # of the bytes behind the requests that are answered first
        self._deadline: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._probe_timer: asyncio.TimerHandle | None = None
        self._num_pokes = 0
        self._next_poke = 0.0  # on the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(limits.WRITE_BUFFER_BYTES)
        self._set_busy(True)
        self._arm()
        self._places.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._set_busy(False)
        self._places.leave(self)
        if self._own is not None:
            self._own.end()
        for timer in (self._end, self._probe_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None:
            # uvicorn informs one request of the end: it must not be the latest, which may wait behind this one.
            self.cycle = self._running
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open: the client sends no more, and has an answer to come."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        self._is_half_closed = True
        self._probe()
        return True

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last:
            self._set_busy(False)
            if self._refusal is not None and not self.transport.is_closing():
                super().send_400_response(self._refusal)
        if self._is_half_closed and is_last:
            self.transport.close()
        self._end_soon()

    def send_400_response(self, msg: str) -> None:
        """Refuse what was read last, once earlier requests are answered, and end the connection."""
        if self.pipeline and self.cycle.more_body:
            # The body of the last request that waits: the one before it is the last to be answered.
            self.pipeline.popleft()
            assert self._running is not None
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        if self.is_idle:
            super().send_400_response(msg)
        elif not self.cycle.more_body:
            self._refusal = msg
        elif self.cycle.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)
        self._end_soon()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; abort it if its client has not even read its answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            log.info("invalid_http")
            reason = error.__context__
            self.send_400_response(str(reason) if isinstance(reason, _Refused) else "Invalid HTTP request received.")
            return
        if not self._in_headers:
            return
        # One packet may hold headers and body, so data counts only while the headers are not complete.
        self._received_bytes += len(data)
        if self._received_bytes > limits.MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        """Have the parser read. Raise HttpParserError."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            # Another parser reads the rest, and sees no offer of another protocol.
            framing = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
            self._is_upgrade, self._repeats_head = False, True
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")

    def on_message_begin(self) -> None:
        if self._repeats_head:
            return
        super().on_message_begin()
        self._set_busy(True)
        self._in_headers = True
        self._header_bytes = 0
        if self._deadline is None:
            self._arm()
        cast("dict[str, Any]", self.scope)["extensions"] = {
            "moeserve.abort": self.transport.abort,
            "moeserve.connection": self._connection,
        }

    def on_url(self, url: bytes) -> None:
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._repeats_head:
            return
        if self._in_headers:
            super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if len(self.headers) > limits.MAX_HEADERS or self._header_bytes > limits.MAX_HEADER_BYTES:
            raise _Refused(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self._repeats_head:
            self._repeats_head = False
            return
        if [name for name, _ in self.headers].count(b"host") != 1 and self.parser.get_http_version() == "1.1":
            raise _Refused("A request of HTTP/1.1 has one header Host.")
        self._in_headers = False
        self._received_bytes = 0
        self._disarm()
        self._is_upgrade = self.parser.should_upgrade()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            super().on_message_complete()

    @property
    def is_idle(self) -> bool:
        """Return whether the connection has no request, or not the whole head of one."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def has_sent(self) -> bool:
        """Return whether the system has taken all that was written."""
        return not self.transport.get_write_buffer_size()

    def drop(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    def _connection(self) -> Connection:
        if self._own is None:
            self._own = Connection(self._wills, self.transport)
        return self._own

    def _set_busy(self, is_busy: bool) -> None:
        if is_busy != self._is_busy and self._load is not None:
            self._load.change(1 if is_busy else -1)
        self._is_busy = is_busy

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0" and cycle is self.cycle:
            cycle = self.cycle = PlainCycle.of(cycle)
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _end_soon(self) -> None:
        """Drop a closing connection once its client has had time to read the rest."""
        if self.transport.is_closing() and self._end is None:
            self._end = self.loop.call_later(limits.SEND_TIMEOUT_S, self.transport.abort)

    def _probe(self) -> None:
        """Drop a half-closed connection whose client has reset it, now or later."""
        if self.transport.is_closing():
            return
        if has_been_reset(self.transport):
            self.transport.abort()
            return
        if self.loop.time() >= self._next_poke:
            self._poke()
            self._num_pokes += 1
            few = self._num_pokes < _POKES_AT_FIRST
            self._next_poke = self.loop.time() + (_SECONDS_BETWEEN_FIRST_POKES if few else limits.KEEP_ALIVE_S)
        self._probe_timer = self.loop.call_later(_SECONDS_BETWEEN_PROBES, self._probe)

    def _poke(self) -> None:
        """Send a comment, which clients skip, if one is due."""
        if self.pipeline:
            return
        if self.cycle.response_started:
            poke = cast("dict[str, Any]", self.cycle.scope)["extensions"].get("moeserve.half_closed")
            if poke is not None:
                poke()
        elif self.cycle.scope["http_version"] == "1.1":
            # Older clients do not know interim answers.
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(limits.RECEIVE_TIMEOUT_S, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        self.shutdown()  # At once, or after the answers to earlier requests.
        self._end_soon()


class Places:
    """The connections of one process, the oldest first.

    One beyond the most drops the oldest that has no request, rather one whose answers have all gone; or itself where
    all have requests.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[BoundedHttpProtocol, None] = {}

    def enter(self, entering: BoundedHttpProtocol) -> None:
        """Count a connection that is open now."""
        self._open[entering] = None
        if len(self._open) > self._most:
            idle = [one for one in self._open if one.is_idle and one is not entering]
            next((one for one in idle if one.has_sent), idle[0] if idle else entering).drop()

    def leave(self, leaving: BoundedHttpProtocol) -> None:
        self._open.pop(leaving, None)


class PlainCycle(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: one of unknown length ends with its connection.

    uvicorn sends either chunks or exactly the announced bytes. So each message is announced with its own length.
    """

    @classmethod
    def of(cls, cycle: RequestResponseCycle) -> PlainCycle:
        """Return a cycle for the same request, which has not begun to be answered."""
        return cls(
            cycle.scope,
            cycle.transport,
            cycle.flow,
            cycle.logger,
            cycle.access_logger,
            cycle.access_log,
            cycle.default_headers,
            cycle.message_event,
            expect_100_continue=False,
            keep_alive=False,
            on_response=cycle.on_response,
        )

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = False
        elif self.expected_content_length == 0:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def has_been_reset(transport: asyncio.Transport) -> bool:
    """Return whether a TCP connection was ended for both directions. Its transport does not say so while it reads
    nothing."""
    state: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_CLOSE


class Load:
    """The busy connections of each HTTP process: those with a request, and new ones. A file maps them into all."""

    def __init__(self, file: Path | None, number: int, num_processes: int) -> None:
        """file: None for a process alone. number: of this process, from 0."""
        self._map = _mapped(file, num_processes * _ROW.size)
        self._number = number
        self._others = [other * _ROW.size for other in range(num_processes) if other != number]
        self.busy = 0
        self.publish()

    def change(self, by: int) -> None:
        """Count a connection that has become busy, or one that is so no more."""
        self.busy += by
        self.publish()

    def publish(self) -> None:
        """Publish the count, and that this process is awake; to be called several times in `_ASLEEP_AFTER_S`."""
        _ROW.pack_into(self._map, self._number * _ROW.size, time.monotonic(), self.busy)

    def is_ahead(self) -> bool:
        """Return whether another process that is awake has clearly fewer busy connections."""
        now = time.monotonic()
        rows = (_ROW.unpack_from(self._map, place) for place in self._others)
        return any(now - awake < _ASLEEP_AFTER_S and self.busy - busy >= _AHEAD for awake, busy in rows)


def _mapped(file: Path | None, size: int) -> mmap.mmap:
    if file is None:
        return mmap.mmap(-1, size)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class EvenListener:
    """Accepts connections from a listener, some in each turn of the event loop: uvloop accepts one, so that a flood of
    connections would keep all later ones waiting. Several processes may have the listener."""

    def __init__(self, listener: socket.socket, load: Load, protocol: Callable[[], asyncio.Protocol]) -> None:
        self._listener = listener
        self._load = load
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._waits_since: float | None = None
        self._hurries_until = 0.0
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._timer is not None:
            self._timer.cancel()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accept some of the waiting connections, unless it is another process's turn."""
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._leaves_next():
                break
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # Another was faster, or the client has left.
                return
            except OSError:
                # The system is short of a resource. The waiting connection would call this function again at once.
                break
            finally:
                self._waits_since = None
            self._load.change(+1)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            return
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(_PAUSE_S, self._listen)

    def _leaves_next(self) -> bool:
        now = time.monotonic()
        if now < self._hurries_until or not self._load.is_ahead():
            return False
        if self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since >= _PATIENCE_S:
            self._hurries_until = now + _HURRY_S
            return False
        return True

    async def _open(self, connection: socket.socket) -> None:
        """Hand a connection to a protocol, which counts it from then on."""
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        finally:
            self._load.change(-1)
