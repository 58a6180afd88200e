"""A frontend that nobody tells of another engine: its engine dies or talks nonsense, every open request hears of it
once, with a status unless its stream has begun, and readiness ends."""

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from moeserve import wire
from moeserve.wire import EngineReady, Generate, Hello, Refused
from tests.support.fake_engine import admit_only, say, trickle
from tests.support.frontend import Frontend, frontend

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process to be taken for the engine's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def open_requests(server: Frontend) -> tuple[list[Any], list[threading.Thread]]:
    """A stream that runs, one that is queued, and an answer in one piece, each in a thread of its own."""
    results: list[Any] = [None] * 3

    def post(index: int, stream: bool) -> None:
        with httpx2.Client(base_url=server.url, timeout=60) as client:
            results[index] = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})

    threads = [threading.Thread(target=post, args=(index, index < 2)) for index in range(3)]
    for index, script in enumerate((trickle("a"), admit_only, trickle("b"))):
        server.engine.script = script
        threads[index].start()
        server.engine.wait_for(Generate, index + 1)
    return results, threads


def assert_all_ended(results: list[Any], threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
    begun, *others = results
    assert begun.status_code == 200
    events = begun.text.strip().split("\n\n")
    assert sum('"error"' in event for event in events) == 1
    assert json.loads(events[-1][6:])["error"]["code"] == "engine_dead"
    for response in others:
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"


def test_death_is_seen_at_once(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    with frontend(tmp_path, engine={"pid": victim.pid}, engine_timeout=600.0) as server:
        results, threads = open_requests(server)
        victim.kill()
        assert_all_ended(results, threads)
        reason = server.wait("/ready", 503).json()["reason"]
        assert reason == "the engine process ended"
        assert server.http.get("/health").status_code == 200
        refused = server.http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert "retry-after" in refused.headers


def test_an_unreadable_message_fails_what_is_open_and_nothing_later(tmp_path: Path) -> None:
    with frontend(tmp_path) as server:
        results, threads = open_requests(server)
        server.engine.send(b"\xc1 no message")
        assert_all_ended(results, threads)
        server.engine.script = say("ok")
        assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_until_the_model_is_loaded_the_server_lives_and_is_not_ready(tmp_path: Path) -> None:
    with frontend(tmp_path, wait_ready=False, engine={"introduces": False}) as server:
        assert server.http.get("/ready").json()["reason"] == "the model is loading"
        response = server.http.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] is None
        server.engine.wait_for(Hello)
        server.engine.send(server.engine.ready_message())
        server.wait("/ready", 200)
        assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_an_engine_that_refuses_the_frontend_is_no_engine(tmp_path: Path) -> None:
    with frontend(tmp_path, wait_ready=False, engine={"introduces": False}) as server:
        server.engine.wait_for(Hello)
        server.engine.send(Refused("another model"))
        assert "another model" in server.wait("/ready", 503, reason="another model").json()["reason"]


def test_messages_of_another_life_are_dropped(tmp_path: Path) -> None:
    with frontend(tmp_path, wait_ready=False, engine={"introduces": False}) as server:
        server.engine.wait_for(Hello)
        ready: EngineReady = server.engine.ready_message()
        server.engine.send(wire.encode(ready, 6))
        server.engine.send(ready)
        server.wait("/ready", 200)
