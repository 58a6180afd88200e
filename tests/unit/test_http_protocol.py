"""Connections: how many, how much waits for a reader, and for how long."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, cast

import pytest
import uvicorn

from moeserve.frontend import limits
from moeserve.frontend.connections import BoundedHttpProtocol, Places
from moeserve.frontend.errors import invalid
from moeserve.frontend.held import HeldBytes, Hold
from moeserve.frontend.http import EventStream, PatientSend, SlowReader, receive_body, send_body, until_disconnect
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.middleware import RequestBoundary
from moeserve.frontend.route import RouteTable

BIG = b"x" * (8 * 2**20)


class Server:
    """The protocol and the outermost layer over `app`, on the loop of the test."""

    def __init__(self, app: Any, most_connections: int) -> None:
        self.metrics = Metrics()
        self.rejections: Counter[str] = self.metrics.rejections
        self.transports: list[asyncio.Transport] = []
        self.lost = asyncio.Event()
        outer = self

        class Noted(BoundedHttpProtocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                outer.transports.append(transport)
                super().connection_made(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                outer.lost.set()

        boundary = RequestBoundary(app, self.metrics, RouteTable(()))
        protocol = partial(Noted, places=Places(most_connections))
        config = uvicorn.Config(boundary, http=cast("type[asyncio.Protocol]", protocol), loop="uvloop", log_config=None)
        config.load()
        self.state = uvicorn.Server(config).server_state
        self._create = partial(protocol, config=config, server_state=self.state, app_state={})

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.get_running_loop().create_server(self._create, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
            for transport in self.transports:
                transport.abort()


async def big(scope: Any, receive: Any, send: Any) -> None:
    await send_body(send, 200, BIG)


async def small(scope: Any, receive: Any, send: Any) -> None:
    await send_body(send, 200, b"{}")


def run(scenario: Any) -> None:
    with asyncio.Runner(loop_factory=uvicorn.Config(None, loop="uvloop").get_loop_factory()) as runner:  # type: ignore[arg-type]
        runner.run(scenario)


async def ask(port: int, path: str = "/", **headers: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"GET {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    return reader, writer


def deaf_client(port: int, *, closes: bool) -> socket.socket:
    """A client that asks and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + (b"Connection: close\r\n" if closes else b"") + b"\r\n")
    return client


@pytest.mark.parametrize("closes", [False, True])
def test_a_plain_body_that_nobody_reads_waits_in_a_small_buffer_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    monkeypatch.setattr(limits, "SEND_TIMEOUT_S", 0.2)
    most = 0

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            nonlocal most
            await send(message)
            most = max(most, server.transports[0].get_write_buffer_size())

        await PatientSend(noting, 60.0)({"type": "http.response.start", "status": 200, "headers": []})
        await PatientSend(noting, 60.0)({"type": "http.response.body", "body": BIG})

    server = Server(watched, 10)

    async def scenario() -> None:
        async with server.listening() as port:
            with deaf_client(port, closes=closes):
                async with asyncio.timeout(20):
                    await server.lost.wait()
        assert 0 < most <= 256 * 1024

    run(scenario())


def test_the_rest_of_an_answer_that_nobody_reads_is_dropped_with_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The application is done: its last slices lie in the buffer of a connection that is closing."""
    monkeypatch.setattr(limits, "SEND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(limits, "WRITE_BUFFER_BYTES", 64 * 2**20)

    async def scenario() -> None:
        server = Server(big, 10)
        async with server.listening() as port:
            with deaf_client(port, closes=True):
                async with asyncio.timeout(20):
                    await server.lost.wait()

    run(scenario())


def test_a_big_body_arrives_whole() -> None:
    async def scenario() -> None:
        server = Server(big, 10)
        async with server.listening() as port:
            reader, writer = await ask(port)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % len(BIG) in head
            assert await reader.readexactly(len(BIG)) == BIG
            writer.close()

    run(scenario())


def test_idle_connections_make_room_for_new_ones_the_oldest_first() -> None:
    async def scenario() -> None:
        server = Server(small, 4)
        async with server.listening() as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            asking, writer = await ask(port)
            assert (await asking.readline()).startswith(b"HTTP/1.1 200")
            assert len(server.state.connections) == 4
            for reader, _ in silent[:-3]:
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            for _, open_writer in [*silent, (asking, writer)]:
                open_writer.close()

    run(scenario())


def test_a_connection_whose_answer_was_not_read_is_dropped_after_those_whose_was() -> None:
    async def scenario() -> None:
        server = Server(big, 2)
        async with server.listening() as port:
            unread = await ask(port)
            while not server.transports or not server.transports[0].get_write_buffer_size():
                await asyncio.sleep(0)
            _, idle = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.open_connection("127.0.0.1", port)
            await server.lost.wait()
            assert len(server.state.connections) == 2
            assert not server.transports[0].is_closing()
            for writer in (unread[1], idle):
                writer.close()

    run(scenario())


def test_a_connection_with_a_request_is_not_dropped_for_another() -> None:
    async def scenario() -> None:
        server = Server(slow, 2)
        async with server.listening() as port:
            first = await ask(port)
            second = await ask(port)
            while len(server.state.tasks) < 2:
                await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert len(server.state.connections) == 2
            for open_writer in (first[1], second[1], writer):
                open_writer.close()

    run(scenario())


async def slow(scope: Any, receive: Any, send: Any) -> None:
    """Answers a while after the client has closed its sending half, unless it leaves."""
    waiting = asyncio.sleep(0.3 if scope["path"] == "/" else 60)

    async def answer() -> None:
        await waiting
        await send_body(send, 200, scope["path"].encode())

    await until_disconnect(receive, answer())


async def events(scope: Any, receive: Any, send: Any) -> None:
    """Streams, and waits for ever after the first event unless it is woken."""
    woken = asyncio.Event()
    scope["extensions"]["moeserve.half_closed"] = woken.set
    stream = EventStream(send)

    async def answer() -> None:
        await stream.start()
        await stream.write(b"data: 1\n\n")
        await woken.wait()
        await stream.write(b": keep-alive\n\n")
        if scope["path"] == "/for-ever":
            await asyncio.Event().wait()
        await stream.write(b"data: 2\n\n", last=True)

    await until_disconnect(receive, answer())


def half_closed(port: int, *requests: str, version: str = "1.1") -> socket.socket:
    """A client that sends requests and closes its sending half."""
    client = socket.create_connection(("127.0.0.1", port), timeout=60)
    for path in requests:
        client.sendall(f"GET {path} HTTP/{version}\r\nHost: x\r\n\r\n".encode())
    client.shutdown(socket.SHUT_WR)
    return client


async def all_of(client: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    client.settimeout(None)
    client.setblocking(False)
    loop, received = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(client, 65536):
        received += data
    return received


def test_a_client_that_has_closed_its_sending_half_gets_its_answer() -> None:
    async def scenario() -> None:
        server = Server(slow, 10)
        async with server.listening() as port:
            with half_closed(port, "/") as client:
                interim, _, answer = (await all_of(client)).partition(b"\r\n\r\n")
            assert interim == b"HTTP/1.1 100 Continue"
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert body == b"/"
            with half_closed(port, "/", version="1.0") as client:
                assert (await all_of(client)).startswith(b"HTTP/1.1 200")
            assert not server.state.connections

    run(scenario())


def test_requests_that_wait_for_their_turn_are_answered_as_well() -> None:
    async def scenario() -> None:
        server = Server(slow, 10)
        async with server.listening() as port:
            with half_closed(port, "/", "/?2", "/?3") as client:
                received = await all_of(client)
            assert received.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").count(b"HTTP/1.1 200") == 3

    run(scenario())


def test_a_half_closed_stream_goes_on_and_is_woken_to_write() -> None:
    async def scenario() -> None:
        server = Server(events, 10)
        async with server.listening() as port:
            client = socket.create_connection(("127.0.0.1", port), timeout=60)
            with client:
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                begun = b""
                while b"data: 1" not in begun:
                    begun += await loop.sock_recv(client, 65536)
                client.shutdown(socket.SHUT_WR)
                rest = await all_of(client)
            assert b": keep-alive" in rest
            assert b"data: 2" in rest
            assert b"100 Continue" not in begun + rest
            assert rest.endswith(b"0\r\n\r\n")

    run(scenario())


@pytest.mark.parametrize(("app", "path"), [(slow, "/for-ever"), (events, "/for-ever")], ids=["whole", "stream"])
def test_a_client_that_has_closed_the_connection_is_found_out(app: Any, path: str) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            finally:
                ended.set()

        server = Server(noted, 10)
        async with server.listening() as port:
            client = socket.create_connection(("127.0.0.1", port), timeout=60)
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            if app is events:
                client.setblocking(False)
                received = b""
                while b"data: 1" not in received:
                    received += await asyncio.get_running_loop().sock_recv(client, 65536)
            client.close()
            async with asyncio.timeout(10):
                await ended.wait()
        assert server.metrics.render().count(b"moeserve_client_disconnects_total 1.0") == 1

    run(scenario())


async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter, back: asyncio.StreamWriter) -> None:
    """Forwards one direction of a connection, its end too; ends the other where this one cannot be written."""
    try:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
        target.write_eof()
    except OSError:
        back.close()


@pytest.mark.slow
def test_a_client_behind_something_that_forwards_connections_is_found_out() -> None:
    """The forwarder learns from its first write that the client is gone, and gives up at the second."""

    async def scenario() -> None:
        server = Server(slow, 10)
        async with server.listening() as port:

            async def forward_both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                their_reader, their_writer = await asyncio.open_connection("127.0.0.1", port)
                async with asyncio.TaskGroup() as group:
                    group.create_task(forward(reader, their_writer, writer))
                    group.create_task(forward(their_reader, writer, their_writer))

            async with await asyncio.start_server(forward_both, "127.0.0.1", 0) as forwarder:
                _, writer = await ask(forwarder.sockets[0].getsockname()[1], "/for-ever")
                writer.close()
                async with asyncio.timeout(10):
                    await server.lost.wait()

    run(scenario())


def test_half_a_request_gets_no_answer() -> None:
    async def reading(scope: Any, receive: Any, send: Any) -> None:
        await received(scope, receive, 1000)
        await send_body(send, 200, b"{}")

    async def scenario() -> None:
        server = Server(reading, 10)
        async with server.listening() as port:
            for half in (b"GET / HT", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"):
                with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
                    client.sendall(half)
                    client.shutdown(socket.SHUT_WR)
                    assert b"200" not in await all_of(client)

    run(scenario())


def test_a_slice_that_is_not_taken_ends_the_answer() -> None:
    async def scenario() -> None:
        sent: list[int] = []

        async def send(message: Any) -> None:
            sent.append(len(message["body"]))
            if len(sent) == 3:
                await asyncio.Event().wait()

        with pytest.raises(SlowReader):
            await PatientSend(send, 0.05)({"type": "http.response.body", "body": BIG})
        assert sent == [64 * 1024] * 3

    asyncio.run(scenario())


def test_a_request_that_has_ended_is_held_by_no_timer() -> None:
    async def scenario() -> None:
        async def send(message: Any) -> None:
            """Takes everything."""

        patient = PatientSend(send, 30)
        await patient({"type": "http.response.body", "body": b"x", "more_body": True})
        patient.end()
        held = weakref.ref(patient)
        del patient
        gc.collect()
        assert held() is None

    asyncio.run(scenario())


def test_a_refusal_lets_go_of_the_body_before_garbage_is_collected() -> None:
    class Body:
        """Stands for the bytes of a body, which cannot be referred to weakly."""

    held: list[weakref.ref[Body]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = Body()
        held.append(weakref.ref(body))
        refusal = invalid("no")
        raise refusal

    async def scenario() -> None:
        async with Server(app, 10).listening() as port:
            reader, writer = await ask(port, connection="close")
            assert b" 400 " in await reader.readline()
            await reader.read()
            writer.close()
        assert held[0]() is None

    gc.collect()
    gc.disable()
    try:
        run(scenario())
    finally:
        gc.enable()


def test_http_1_0_gets_a_stream_without_chunks_that_ends_with_its_connection() -> None:
    async def scenario() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/whole":
                await send_body(send, 200, b"whole")
                return
            stream = EventStream(send)
            await stream.start()
            await stream.write(b"data: 1\n\n")
            await stream.write(b"data: [DONE]\n\n", last=True)

        async with Server(app, 4).listening() as port:
            for path, expected in (("/stream", b"data: 1\n\ndata: [DONE]\n\n"), ("/whole", b"whole")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                assert body == expected
                assert b"transfer-encoding" not in head
                assert b"connection: close" in head
                writer.close()

    asyncio.run(scenario())


def test_a_refusal_comes_before_the_body_that_it_refuses() -> None:
    async def scenario() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await received(scope, receive, 1000)

        async with Server(app, 4).listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n")
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 413 ")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                assert json.loads(await reader.readexactly(length))["error"]["code"] == "request_too_large"
                # A client that sends all the same is not reset.
                for _ in range(50):
                    writer.write(b"x" * 100_000)
                    await writer.drain()
                assert await reader.read() == b""
            writer.close()

    asyncio.run(scenario())


async def received(scope: Any, receive: Any, most: int) -> bytes:
    scope["state"]["hold"] = Hold(HeldBytes(), b"")
    return await receive_body(scope, receive, most)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body and the names of the headers."""
    body = await received(scope, receive, 2**20)
    names = [name.decode() for name, _ in scope["headers"]]
    await send_body(send, 200, json.dumps([body.decode(), names]).encode())


def answers(received: bytes) -> list[Any]:
    """The bodies of the answers that came on one connection."""
    return [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in received.split(b"HTTP/1.1 200 OK")[1:]]


FRAMED = {
    "length": (b"content-length: 5\r\n\r\n", b"hello"),
    "chunks": (b"transfer-encoding: chunked\r\n\r\n", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"),
}


@pytest.mark.parametrize("framed", list(FRAMED))
@pytest.mark.parametrize("bytewise", [False, True])
def test_a_request_that_offers_another_protocol_is_answered_in_this_one(framed: str, bytewise: bool) -> None:
    offer = b"host: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAA\r\n"
    head, body = FRAMED[framed]
    requests = b"POST / HTTP/1.1\r\n" + offer + head + body
    requests += b"GET / HTTP/1.1\r\n" + offer + b"\r\nPOST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + head + body

    async def scenario() -> None:
        server = Server(echo, 10)
        async with server.listening() as port:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pieces = [requests[at : at + 1] for at in range(len(requests))] if bytewise else [requests]
                for piece in pieces:
                    client.sendall(piece)
                    await asyncio.sleep(0)
                received = await all_of(client)
        assert [body for body, _ in answers(received)] == ["hello", "", "hello"]

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nHost: y\r\nconnection: close\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost:\r\nconnection: close\r\n\r\n", 200),
        (b"GET / HTTP/1.0\r\n\r\n", 200),
    ],
)
def test_a_request_of_http_1_1_has_one_header_host(request_: bytes, status: int) -> None:
    async def scenario() -> None:
        async with Server(small, 10).listening() as port:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.sendall(request_)
                received = await all_of(client)
        assert received.split()[1] == str(status).encode()
        assert received.endswith(b"{}" if status == 200 else b"\r\n\r\nA request of HTTP/1.1 has one header Host.")

    run(scenario())


def test_trailers_are_no_headers() -> None:
    request = (
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        b"5\r\nhello\r\n0\r\nauthorization: Bearer x\r\nexpect: 100-continue\r\n\r\n"
    )

    async def scenario() -> None:
        server = Server(echo, 10)
        async with server.listening() as port:
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.sendall(request)
                received = await all_of(client)
        assert answers(received) == [["hello", ["host", "transfer-encoding", "connection"]]]

    run(scenario())


def test_a_client_that_leaves_is_found_out_by_each_of_its_requests() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()
        begun = asyncio.Event()

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            begun.set()
            try:
                await slow(scope, receive, send)
            finally:
                ended.set()

        server = Server(noted, 10)
        async with server.listening() as port:
            client = socket.create_connection(("127.0.0.1", port), timeout=20)
            client.sendall(b"GET /for-ever HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
            await begun.wait()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes((1, 0, 0, 0, 0, 0, 0, 0)))
            client.close()
            await asyncio.wait_for(ended.wait(), 20)

    run(scenario())


def stream_until(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, asyncio.Event]:
    """An application that streams until the protocol has called a method of its own, and an event for that call."""
    called = asyncio.Event()
    method = getattr(BoundedHttpProtocol, name)

    def noted(protocol: BoundedHttpProtocol, *arguments: Any) -> None:
        method(protocol, *arguments)
        called.set()

    async def streamed(scope: Any, receive: Any, send: Any) -> None:
        stream = EventStream(send)
        await stream.start()
        await stream.write(b"data: 1\n\n")
        await called.wait()
        await stream.write(b"data: 2\n\n", last=True)

    monkeypatch.setattr(BoundedHttpProtocol, name, noted)
    return streamed, called


@pytest.mark.parametrize(
    ("rest", "num_answers"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 1),
        (b"\x00", 1),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * limits.MAX_HEADER_BYTES + b"\r\n\r\n", 1),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n", 1),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\x00", 2),
    ],
    ids=["no host", "no method", "too large", "in a body", "behind a request that waits"],
)
def test_a_refusal_follows_the_answers_to_earlier_requests(
    monkeypatch: pytest.MonkeyPatch, rest: bytes, num_answers: int
) -> None:
    streamed, refused = stream_until(monkeypatch, "send_400_response")

    async def scenario() -> None:
        async with Server(streamed, 10).listening() as port:
            reader, writer = await ask(port)
            begun = await reader.readuntil(b"data: 1\n\n")
            writer.write(rest)
            received = begun + await asyncio.wait_for(reader.read(), 20)
            writer.close()
        assert refused.is_set()
        *answered, refusal = re.split(rb"HTTP/1\.1 (?=\d)", received)[1:]
        assert len(answered) == num_answers
        for answer in answered:
            assert answer.startswith(b"200")
            assert answer.endswith(b"data: 2\n\n\r\n0\r\n\r\n")
        assert refusal.startswith(b"400")

    run(scenario())


def test_a_head_that_does_not_come_ends_the_connection_after_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed, given_up = stream_until(monkeypatch, "_too_slow")

    async def scenario() -> None:
        async with Server(streamed, 10).listening() as port:
            reader, writer = await ask(port)
            begun = await reader.readuntil(b"data: 1\n\n")
            monkeypatch.setattr(limits, "RECEIVE_TIMEOUT_S", 0.01)
            writer.write(b"GET / HT")
            received = begun + await asyncio.wait_for(reader.read(), 20)
            writer.close()
        assert given_up.is_set()
        assert received.count(b"HTTP/1.1") == 1
        assert received.endswith(b"data: 2\n\n\r\n0\r\n\r\n")

    run(scenario())
