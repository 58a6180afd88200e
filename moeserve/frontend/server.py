"""Runs the application under uvicorn, with its own handling of signals and bounds on headers.

uvicorn closes its listener as soon as it begins to stop, and then no client learns that the server is draining. So
this module handles the signals: the first SIGTERM drains while the listener still answers, another one or SIGINT stops
at once. SIGHUP has the keys and the public prefixes read again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import cast

import structlog
import uvicorn

from moeserve.frontend.app import create_app
from moeserve.frontend.connections import BoundedHttpProtocol, EvenListener, Load, Places
from moeserve.frontend.limits import allow_connections
from moeserve.frontend.services import Services
from moeserve.frontend.wills import WillLink
from moeserve.wire import Tick

log = structlog.get_logger(__name__)

_CONNECTIONS_PER_REQUEST = 2  # that may be open: refusals, and operators who look, need some beyond the requests
_LAST_WORDS_S = 1.0
_TICK_S = 0.2
_KEEP_ALIVE_TIMEOUT_S = 30


def serve(services: Services, listener: socket.socket, beat_fd: int | None = None, wills_fd: int | None = None) -> None:
    """Answer on a bound socket until a signal ends the server. beat_fd: a pipe on which the event loop ticks. wills_fd:
    a socket to the supervisor, which takes last wills."""
    load = Load(services.run.load_file, services.number, services.run.config.num_frontends)
    ticker = None if beat_fd is None else Ticker(beat_fd, services.tick)
    wills = None if wills_fd is None else WillLink(wills_fd)
    FrontendServer(services, ticker, wills, load).run(sockets=[listener])


class Ticker:
    """Writes a byte into a pipe a few times a second, as long as the event loop turns.

    `state` returns the byte. The supervisor listens (`launcher.watches`).
    """

    def __init__(self, descriptor: int, state: Callable[[], Tick]) -> None:
        self._descriptor = descriptor
        self._state = state
        self._next: asyncio.TimerHandle | None = None
        os.set_blocking(descriptor, False)
        os.set_inheritable(descriptor, False)

    def start(self) -> None:
        """Tick now, and from now on."""
        # Neither wait for a full pipe nor fail without a reader.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, bytes([self._state()]))
        self._next = asyncio.get_running_loop().call_later(_TICK_S, self.start)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()


class FrontendServer(uvicorn.Server):
    """A uvicorn server that installs no signal handlers of its own."""

    def __init__(self, services: Services, ticker: Ticker | None, wills: WillLink | None, load: Load) -> None:
        """wills: takes last wills. load: shared with the other HTTP processes of the service."""
        most = allow_connections(services.run.config.max_connections)
        protocol = partial(BoundedHttpProtocol, places=Places(_CONNECTIONS_PER_REQUEST * most), wills=wills, load=load)
        super().__init__(
            uvicorn.Config(
                create_app(services, most),
                http=cast("type[asyncio.Protocol]", protocol),
                loop="uvloop",
                ws="none",
                lifespan="on",
                access_log=False,
                server_header=False,
                log_config=None,
                timeout_keep_alive=_KEEP_ALIVE_TIMEOUT_S,
                proxy_headers=bool(services.run.config.trusted_proxy),
                forwarded_allow_ips=list(services.run.config.trusted_proxy),
                timeout_graceful_shutdown=1,
            )
        )
        self._services = services
        self._ticker = ticker
        self._load = load
        self._accepting: EvenListener | None = None
        self._stop_now = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the handlers on the event loop, in place of uvicorn's."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._on_sigint)
        loop.add_signal_handler(signal.SIGHUP, self._services.asked_to_reload.set)
        try:
            yield
        finally:
            if self._ticker is not None:
                self._ticker.stop()
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and start to tick."""
        await super().startup([])
        if sockets:
            self._accepting = EvenListener(sockets[0], self._load, self._create_protocol)
            self._show_load()
        if self._ticker is not None:
            self._ticker.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and let uvicorn end the open ones."""
        if self._accepting is not None:
            self._accepting.close()
        await super().shutdown(sockets)

    def _create_protocol(self) -> asyncio.Protocol:
        """Return a protocol as uvicorn makes them."""
        protocol = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _show_load(self) -> None:
        """Publish now and then that this process is awake."""
        self._load.publish()
        asyncio.get_running_loop().call_later(_TICK_S, self._show_load)

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
                {stop, idle}, timeout=self._services.run.config.shutdown_timeout, return_when=asyncio.FIRST_COMPLETED
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
