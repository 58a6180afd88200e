"""Last wills: what the supervisor writes to the clients of an HTTP process that has died, over real connections."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest
import uvicorn

from launcher.wills import WillKeeper, wills_within
from moeserve.config import ServeConfig
from moeserve.frontend.connections import BoundedHttpProtocol, Places
from moeserve.frontend.errors import unavailable
from moeserve.frontend.http import EventStream, send_body
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.route import RouteTable
from moeserve.frontend.routes.generate import leave_refusal
from moeserve.frontend.wills import MAX_PACKET_BYTES, Connection, Will, WillLink

LAST = b'data: {"error": "the end"}\n\n'
GONE = unavailable("gone", "http_process_ended", close=True)
Ask = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Server:
    """An HTTP process and the keeper of its wills on one loop. `go` lets its answers go on."""

    def __init__(self, most: int = 8) -> None:
        self.go = asyncio.Event()
        self.answering = asyncio.Event()
        self.keeper = WillKeeper(most)
        # The process's end, which alone is open when it dies.
        self.link = WillLink(os.dup(self.keeper.child_end.fileno()))
        self.keeper.child_end.close()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        will = Will.of(scope)
        leave_refusal(will, scope, GONE)
        if scope["path"] == "/whole":
            self.answering.set()
            await self.go.wait()
            will.revoke()
            await send_body(send, 200, b"whole")
            return
        stream = EventStream(send, will, LAST)
        await stream.start()
        await stream.write(b"data: 1\n\n")
        self.answering.set()
        await self.go.wait()
        await stream.write(b"data: 2\n\n")
        await stream.write(b"data: [DONE]\n\n", last=True)

    def die(self) -> None:
        """Do to the wills what the end of a process does: its sockets are closed, and nothing is written any more."""
        self.link._socket.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Ask]:
        boundary = RequestBoundary(self.app, Metrics(), RouteTable(()))
        config = uvicorn.Config(boundary, loop="uvloop", log_config=None)
        config.load()
        state = uvicorn.Server(config).server_state
        places = Places(100)
        protocol = partial(
            BoundedHttpProtocol, places=places, wills=self.link, config=config, server_state=state, app_state={}
        )
        listener = await asyncio.get_running_loop().create_server(cast("Any", protocol), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]

        async def ask(path: str = "/stream", version: str = "1.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            self.answering.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET {path} HTTP/{version}\r\nhost: x\r\n\r\n".encode())
            await self.answering.wait()
            return reader, writer

        async with listener:
            yield ask
            for connection in list(state.connections):
                connection.transport.abort()
        self.die()


def run(scenario: Any) -> None:
    with asyncio.Runner(loop_factory=uvicorn.Config(None, loop="uvloop").get_loop_factory()) as runner:  # type: ignore[arg-type]
        runner.run(scenario)


def chunks(answer: bytes) -> bytes:
    """The body of a chunked answer. Raise ValueError unless it is whole."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if rest[length : length + 2] != b"\r\n":
            raise ValueError(answer)
        if not length:
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[:length], rest[length + 2 :]


async def kept(server: Server, count: int) -> None:
    while len(server.keeper) != count:
        await asyncio.sleep(0)


def test_a_stream_whose_process_dies_ends_with_one_error_event() -> None:
    async def scenario() -> None:
        server = Server()
        async with server.listening() as ask:
            clients = [await ask() for _ in range(3)]
            old = await ask(version="1.0")
            await kept(server, 4)
            server.die()
            for reader, _ in clients:
                assert chunks(await reader.read()) == b"data: 1\n\n" + LAST
            assert (await old[0].read()).endswith(b"\r\n\r\ndata: 1\n\n" + LAST)

    run(scenario())


def test_a_request_that_has_no_answer_yet_gets_a_whole_503() -> None:
    async def scenario() -> None:
        server = Server()
        async with server.listening() as ask:
            reader, _ = await ask("/whole")
            await kept(server, 1)
            server.die()
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert f"content-length: {len(body)}".encode() in head
            assert b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "http_process_ended"

    run(scenario())


@pytest.mark.parametrize(("path", "last"), [("/stream", b"[DONE]\n\n\r\n0\r\n\r\n"), ("/whole", b"whole")])
def test_an_answer_that_ends_leaves_nothing_behind(path: str, last: bytes) -> None:
    async def scenario() -> None:
        server = Server()
        async with server.listening() as ask:
            reader, writer = await ask(path)
            await kept(server, 1)
            server.go.set()
            assert (await reader.readuntil(last)).startswith(b"HTTP/1.1 200")
            await kept(server, 0)
            # The next request of this connection has a will of its own.
            server.go.clear()
            server.answering.clear()
            writer.write(b"GET /whole HTTP/1.1\r\nhost: x\r\n\r\n")
            await server.answering.wait()
            await kept(server, 1)
            server.die()
            assert (await reader.read()).startswith(b"HTTP/1.1 503")

    run(scenario())


def test_a_client_sees_the_end_of_its_connection_while_the_supervisor_is_stopped() -> None:
    async def scenario() -> None:
        server = Server()
        asyncio.get_running_loop().remove_reader(server.keeper._socket)
        async with server.listening() as ask:
            old, _ = await ask(version="1.0")
            server.go.set()
            assert (await old.read()).endswith(b"data: [DONE]\n\n")

    run(scenario())


def test_wills_beyond_the_bounds_are_not_left() -> None:
    async def scenario() -> None:
        server = Server(most=1)
        async with server.listening() as ask:
            clients = [await ask(), await ask()]
            await kept(server, 1)
            server.die()
            assert chunks(await clients[0][0].read()) == b"data: 1\n\n" + LAST
            # The other's connection lives, as its process does here.
            server.go.set()
            assert chunks(await clients[1][0].readuntil(b"\r\n0\r\n\r\n")).endswith(b"data: [DONE]\n\n")

    run(scenario())


class _Transport:
    """A transport of a connected socket, with a number of bytes in its buffer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.num_waiting = 0

    def get_extra_info(self, _: str) -> socket.socket:
        return self.connection

    def get_write_buffer_size(self) -> int:
        return self.num_waiting


def test_a_client_that_does_not_read_gets_no_event_amid_another() -> None:
    async def scenario() -> None:
        server = Server()
        ours, theirs = socket.socketpair()
        transport = _Transport(ours)
        connection = Connection(server.link, cast("asyncio.Transport", transport))
        connection.leave(LAST)
        connection.record_write()
        transport.num_waiting = 5
        # Bytes that were written in this turn of the loop wait for its end.
        connection.record_write()
        await kept(server, 1)
        await asyncio.sleep(0.002)
        connection.record_write()
        await kept(server, 0)
        for one in (ours, theirs):
            one.close()
        server.die()

    run(scenario())


def test_what_replaces_a_will_waits_for_room_and_what_is_too_large_is_not_left() -> None:
    async def scenario() -> None:
        server = Server()
        ours, theirs = socket.socketpair()
        link, loop = server.link, asyncio.get_running_loop()
        loop.remove_reader(server.keeper._socket)
        number = link.leave(ours.fileno(), b"first")
        assert number is not None
        for count in range(5000):
            link.replace(number, str(count).encode())
        assert link._waiting
        assert link.leave(ours.fileno(), b"another") is None
        loop.add_reader(server.keeper._socket, server.keeper._read)
        while link._waiting:
            await asyncio.sleep(0)
        connection = Connection(link, cast("asyncio.Transport", _Transport(ours)))
        connection.leave(b"x" * MAX_PACKET_BYTES)
        ours.close()
        server.die()
        server.keeper.finish()
        assert theirs.recv(100) == b"4999"
        assert theirs.recv(100) == b""
        theirs.close()

    run(scenario())


def test_wills_are_as_many_as_the_limit_of_files_allows() -> None:
    config = ServeConfig(num_frontends=2, max_connections=1024)
    assert wills_within(100_000, config) == 1024
    assert wills_within(64, config) == 8
    assert wills_within(20, config) == 0
