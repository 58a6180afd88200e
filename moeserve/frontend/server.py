"""Runs the application under uvicorn, with its own handling of signals and bounds on headers.

uvicorn closes its listener as soon as it is told to stop, and then no client learns that the server is draining. So
this module handles the signals: the first SIGTERM drains while the listener still answers, another one or SIGINT stops
at once.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moeserve.frontend import limits
from moeserve.frontend.app import create_app
from moeserve.frontend.http import send_error, unavailable
from moeserve.frontend.services import Services

log = structlog.get_logger(__name__)

_LAST_WORDS_S = 1.0
_TICK_S = 0.2
_OTHER_FILES = 128
OPEN_PATHS = ("/health", "/ready", "/metrics")
_KEEP_ALIVE_TIMEOUT_S = 30
_SECONDS_BETWEEN_PROBES = 0.2
_POKES_AT_FIRST = 3
_SECONDS_BETWEEN_FIRST_POKES = 0.5
_TCP_CLOSE = 7  # the first byte of Linux's tcp_info


def serve(services: Services, listener: socket.socket, beat_fd: int | None = None) -> None:
    """Answer on a bound socket until a signal ends the server. beat_fd: a pipe on which the event loop ticks."""
    allow_connections(services.run.config.max_connections)
    ticker = None if beat_fd is None else Ticker(beat_fd, lambda: services.not_ready_reason() is None)
    FrontendServer(services, ticker).run(sockets=[listener])


class Ticker:
    """Writes a byte into a pipe a few times a second, as long as the event loop turns: `+` while `is_ready`, else `.`.

    The supervisor knows them (`launcher.watches`).
    """

    def __init__(self, descriptor: int, is_ready: Callable[[], bool]) -> None:
        self._descriptor = descriptor
        self._is_ready = is_ready
        self._next: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)

    def start(self) -> None:
        """Tick now, and from now on."""
        # A full pipe is no reason to wait, and one without a reader none to fail.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, b"+" if self._is_ready() else b".")
        self._next = asyncio.get_running_loop().call_later(_TICK_S, self.start)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()


class FrontendServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers of its own."""

    def __init__(self, services: Services, ticker: Ticker | None = None) -> None:
        most = services.run.config.max_connections
        protocol = partial(BoundedHttpProtocol, most_connections=most, rejections=services.metrics.rejections)
        super().__init__(
            uvicorn.Config(
                create_app(services),
                http=cast("type[asyncio.Protocol]", protocol),
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                server_header=False,
                log_config=None,
                timeout_keep_alive=_KEEP_ALIVE_TIMEOUT_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._services = services
        self._ticker = ticker
        self._stop_now = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the handlers on the event loop, in place of uvicorn's."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._on_sigint)
        try:
            yield
        finally:
            if self._ticker is not None:
                self._ticker.stop()
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and tick from then on."""
        await super().startup(sockets)
        if self._ticker is not None:
            self._ticker.start()

    def _on_sigterm(self) -> None:
        if self._drain is not None:
            self._stop_now.set()
        self._begin_drain()

    def _on_sigint(self) -> None:
        self._stop_now.set()
        self._begin_drain()

    def _begin_drain(self) -> None:
        self._services.begin_drain()
        if self._drain is None:
            if in_flight := self._services.admission.in_flight:
                log.info("draining", in_flight=in_flight)
            self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        """Wait for the open answers, end the remaining ones with an error event, and let uvicorn exit."""
        admission, engine = self._services.admission, self._services.engine
        stop = asyncio.ensure_future(self._stop_now.wait())
        idle = asyncio.ensure_future(admission.idle.wait())
        try:
            await asyncio.wait(
                {stop, idle},
                timeout=self._services.run.config.shutdown_timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not idle.done():
                log.warning("answers_cut_off", in_flight=admission.in_flight)
                engine.fail_all("the server is shutting down")
                await asyncio.wait({idle}, timeout=_LAST_WORDS_S)
        finally:
            stop.cancel()
            idle.cancel()
            self._services.live.close()
            self.should_exit = True


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol that closes connections whose headers are too large, too many or too slow, that are too
    many themselves, or whose client does not read.

    uvicorn with httptools bounds neither the size of headers nor the time they may take, and an application cannot: it
    is called when they are complete. `scope["extensions"]["moeserve.abort"]` drops the connection and its buffer.

    A client may close its sending half after its request and gets its answer. One that has closed the connection has
    sent the same, but resets the connection when something comes: so something is sent at once, twice more soon (who
    only forwards connections hears of the reset from the first, and ends this one at the second) and then now and then,
    and the reset is looked out for. Until the answer begins it is `100 Continue`; then
    `scope["extensions"]["moeserve.half_closed"]`, which an application may set, is called to have it write.

    most_connections: requests on further connections are refused and counted in `rejections`, but for OPEN_PATHS;
    twice as many are dropped unheard.
    """

    def __init__(self, *args: Any, most_connections: int, rejections: Counter[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_connections = most_connections
        self._rejections = rejections
        self._end: asyncio.TimerHandle | None = None
        self._received_bytes = 0  # since the headers began, as they came
        self._header_bytes = 0  # of complete header fields
        self._in_headers = True
        self._deadline: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._probe_timer: asyncio.TimerHandle | None = None
        self._num_pokes = 0
        self._next_poke = 0.0  # on the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(limits.WRITE_BUFFER_BYTES)
        excess = len(self.connections) - self._most_connections
        if excess > 0:
            self._rejections["too_many_connections"] += 1
            self.app = refuse_unless_open(self.app)
        if excess > self._most_connections:
            transport.abort()
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        for timer in (self._end, self._probe_timer):
            if timer is not None:
                timer.cancel()
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
        if self._is_half_closed and is_last:
            self.transport.close()
        self._end_soon()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._end_soon()

    def timeout_keep_alive_handler(self) -> None:
        """End an idle connection; with a client that has not even read its answer, without a farewell."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers:
            return
        # One packet may hold headers and body, so only data after which the headers still go on counts.
        self._received_bytes += len(data)
        if self._received_bytes > limits.MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("Request headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        if self._deadline is None:
            self._arm()
        cast("dict[str, Any]", self.scope)["extensions"] = {"moeserve.abort": self.transport.abort}

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if len(self.headers) > limits.MAX_HEADERS or self._header_bytes > limits.MAX_HEADER_BYTES:
            raise ValueError("request headers are too large")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._received_bytes = 0
        self._disarm()
        super().on_headers_complete()

    def _end_soon(self) -> None:
        """Drop a connection that is closing, once its client has had time to read the rest."""
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
        """Send what a client passes over, if there is anything now."""
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
        if not self.transport.is_closing():
            self.transport.close()
            self._end_soon()


def has_been_reset(transport: asyncio.Transport) -> bool:
    """Return whether a TCP connection was ended for both directions. Its transport does not say so while it reads
    nothing."""
    state: bytes = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == _TCP_CLOSE


def refuse_unless_open(app: Any) -> Any:
    """Return an application that answers 503, but for the paths by which operators look at the server."""
    error = unavailable("Too many connections are open", "too_many_connections", close=True)

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, send)
        else:
            await send_error(send, error, error.body())

    return refuse


def allow_connections(most: int) -> None:
    """Raise this process's limit of open files so that it allows so many connections, as far as the system lets it."""
    wanted = 2 * most + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < most + _OTHER_FILES:
        log.warning("few_open_files", limit=wanted, max_connections=most)
