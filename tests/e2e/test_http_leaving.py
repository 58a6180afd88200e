"""A client that leaves, in whatever state its request is, has it aborted exactly once."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from moeserve.plan import FinishReason
from moeserve.wire import Abort, Admitted, Generate
from tests.support.fake_engine import FakeEngine, Script, admit_only, ignore, say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), program="tests.support.hasty_frontend") as running:
        yield running


def connect(server: Frontend, **fields: object) -> socket.socket:
    """Sends a request and leaves the answer unread."""
    body = json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [ignore, admit_only, trickle("ab")], ids=["sent", "queued", "running"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_aborts_every_choice_once(server: Frontend, script: Script, stream: bool, n: int) -> None:
    server.engine.received.clear()
    server.engine.script = script
    with connect(server, stream=stream, n=n) as connection:
        generates = server.engine.wait_for(Generate, n)
        if stream and script is not ignore:
            assert connection.recv(12) == b"HTTP/1.1 200"
    server.engine.wait_for(Abort, n)
    # Whatever else the frontend had to say comes before what it says about the next request.
    server.engine.script = say("ok")
    assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200
    aborted = [abort.request_id for abort in server.engine.of(Abort)]
    assert sorted(aborted) == sorted(generate.request_id for generate in generates)


@pytest.mark.parametrize(
    ("stream", "sign"), [(False, b"100 Continue"), (True, b": keep-alive")], ids=["whole", "stream"]
)
def test_a_client_that_has_closed_its_sending_half_gets_its_whole_answer(
    server: Frontend, stream: bool, sign: bytes
) -> None:
    server.engine.received.clear()
    asked: list[Generate] = []

    def late(engine: FakeEngine, generate: Generate) -> None:
        """Answers the first request together with the second."""
        engine.send(Admitted(generate.request_id))
        asked.append(generate)
        for waiting in asked if len(asked) == 2 else ():
            engine.output(waiting, list(b"late"), num_cached_tokens=0)
            engine.output(waiting, [], finish_reason=FinishReason.STOP, num_output_tokens=4, num_cached_tokens=0)

    server.engine.script = late
    received = b""
    with connect(server, stream=stream) as connection:
        server.engine.wait_for(Generate, 1)
        while stream and b"200 OK" not in received:
            received += connection.recv(4096)
        connection.shutdown(socket.SHUT_WR)
        # It has been noticed.
        while sign not in received:
            received += connection.recv(4096)
        assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200
        while data := connection.recv(4096):
            received += data
    assert b"200 OK" in received
    assert b"late" in received
    assert not stream or b"[DONE]" in received
    assert server.engine.of(Abort) == []


def test_a_complete_answer_is_not_aborted(server: Frontend) -> None:
    server.engine.received.clear()
    server.engine.script = say("ok")
    for stream in (False, True):
        server.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "stream": stream})
    assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200
    assert server.engine.of(Abort) == []


def test_leaving_gives_the_places_back(server: Frontend) -> None:
    everything = {"model": "tiny", "prompt": "hi", "n": 4}
    for _ in range(3):
        server.engine.received.clear()
        server.engine.script = admit_only
        with ExitStack() as stack:

            def is_held() -> bool:
                asked = server.http.stream("POST", "/v1/completions", json={**everything, "stream": True})
                return stack.enter_context(asked).status_code == 200

            # The answer before may have been read before its places were free.
            wait_until(is_held)
            server.engine.wait_for(Generate, 4)
        server.engine.wait_for(Abort, 4)
        server.engine.script = say("ok")
        # The engine hears of the abort before the place is free.
        wait_until(lambda: server.http.post("/v1/completions", json=everything).status_code == 200)


def test_leaving_with_half_a_body_leaves_nothing(server: Frontend) -> None:
    server.engine.received.clear()
    server.engine.script = say("ok")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model"')
    assert server.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi"}).status_code == 200
    assert len(server.engine.of(Generate)) == 1
