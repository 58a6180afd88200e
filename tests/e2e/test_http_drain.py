"""SIGTERM and SIGINT: who may finish, who is told that it cannot, and how the process ends."""

import signal
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from moeserve.plan import FinishReason
from moeserve.wire import Abort, Generate, Output, Outputs
from tests.support.fake_engine import trickle
from tests.support.frontend import Frontend, frontend

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class Stream:
    """One streaming request in a thread of its own."""

    def __init__(self, server: Frontend) -> None:
        self.text = ""
        self._server = server
        self._thread = threading.Thread(target=self._run)
        server.engine.script = trickle("a")
        self._thread.start()
        (self.generate,) = server.engine.wait_for(Generate)

    def _run(self) -> None:
        with httpx2.Client(base_url=self._server.url, timeout=60) as client:
            self.text = client.post("/v1/chat/completions", json={**CHAT, "stream": True}).text

    def join(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.text


def end(server: Frontend) -> int:
    return server.process.wait(60)


def test_running_streams_finish_while_others_are_refused(tmp_path: Path) -> None:
    with frontend(tmp_path) as server:
        stream = Stream(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait("/ready", 503).json()["reason"] == "draining"
        assert server.http.get("/health").status_code == 200
        refused = server.http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        last = Output(stream.generate.request_id, [ord("b")], FinishReason.STOP, 0, 2)
        server.engine.send(Outputs([last]))
        text = stream.join()
        assert text.endswith("data: [DONE]\n\n")
        assert '"content":"b"' in text
        assert end(server) == 0
        assert server.engine.of(Abort) == []


def test_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    with frontend(tmp_path, shutdown_timeout=600.0) as server:
        server.process.send_signal(signal.SIGTERM)
        assert end(server) == 0


def assert_cut_off(server: Frontend, stream: Stream) -> None:
    text = stream.join()
    assert text.count('"error"') == 1
    assert "[DONE]" not in text
    assert end(server) == 0
    (abort,) = server.engine.wait_for(Abort)
    assert abort.request_id == stream.generate.request_id


def test_streams_that_outlast_the_grace_period_are_told_so(tmp_path: Path) -> None:
    with frontend(tmp_path, shutdown_timeout=0.2) as server:
        stream = Stream(server)
        server.process.send_signal(signal.SIGTERM)
        assert_cut_off(server, stream)


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,), (signal.SIGTERM, signal.SIGINT)]
)
def test_a_second_signal_or_an_interrupt_stops_at_once(tmp_path: Path, numbers: tuple[Any, ...]) -> None:
    with frontend(tmp_path, shutdown_timeout=600.0) as server:
        stream = Stream(server)
        for number in numbers[:-1]:
            server.process.send_signal(number)
            server.wait("/ready", 503)
        server.process.send_signal(numbers[-1])
        assert_cut_off(server, stream)
