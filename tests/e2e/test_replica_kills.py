"""Two services that share a response store and KV on disk: streams go on in one when the other one is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.service import Service, children_of, descendants, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

NUM_STREAMS = 16
NUM_TOKENS = 800
SETTINGS = ("--engine-timeout", "20", "--max-model-len", "4096", "--max-num-seqs", "32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("m"))


@pytest.fixture
def replicas(model: Path, tmp_path: Path) -> Iterator[list[Service]]:
    shared = ("--response-store", str(tmp_path / "store"), "--kv-disk-path", str(tmp_path / "kv"))
    with ExitStack() as stack:
        found = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            found.append(stack.enter_context(service(model, tmp_path / name, *SETTINGS, *shared)))
        yield found


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    """Return a request whose prompt no other one shares a block with."""
    body = {"model": "m", "temperature": 1.1, "seed": number, "ignore_eos": True}
    return body | fields


def prompt_of(number: int) -> list[int]:
    return [3 + number, *(3 + (number + i * 7) % 50 for i in range(100))]


class Client:
    """One stream of a client that reconnects to the other replica, wherever the stream broke.

    pieces: the text of the answer as it was seen at last. broken: what was seen when it broke. ids: of all answers.
    """

    def __init__(self, replicas: list[Service], number: int, on_piece: Callable[[int], None]) -> None:
        self._addresses = [str(replica.http.base_url) for replica in replicas]
        self._number = number
        self._on_piece = on_piece
        self.pieces: list[str] = []
        self.broken: list[str] = []
        self.ids: set[str] = set()
        self.tokens = 0

    def run(self) -> None:
        until, at = time.monotonic() + 120, self._number % 2
        while True:
            try:
                if self._read(self._addresses[at]):
                    return
            except httpx2.HTTPError:
                pass
            assert time.monotonic() < until
            self.broken = max(self.broken, self.pieces, key=len)
            at = 1 - at

    def _read(self, address: str) -> bool:
        """Read the stream from its beginning; return whether it came to its end."""
        self.pieces = []
        body = body_of(self._number, prompt=prompt_of(self._number), max_tokens=NUM_TOKENS, stream=True)
        body["stream_options"] = {"include_usage": True}
        for event in events_of(address, "/v1/completions", body, {"Idempotency-Key": f"stream {self._number}"}):
            if "error" in event:
                return False
            self.ids.add(event["id"])
            if event["choices"]:
                self.pieces.append(event["choices"][0]["text"])
                self._on_piece(self._number)
            else:
                self.tokens = event["usage"]["completion_tokens"]
        return self.tokens > 0


class Background:
    """A response in the background, taken up again behind the last event that was seen."""

    def __init__(self, replicas: list[Service], number: int, on_piece: Callable[[int], None]) -> None:
        self._addresses = [str(replica.http.base_url) for replica in replicas]
        self._number = number
        self._on_piece = on_piece
        self.seen: list[dict[str, Any]] = []

    def run(self) -> None:
        until, at = time.monotonic() + 120, self._number % 2
        while not self.seen or self.seen[-1]["type"] != "response.incomplete":
            assert time.monotonic() < until
            with suppress(httpx2.HTTPError):
                self._read(self._addresses[at])
            at = 1 - at

    def _read(self, address: str) -> None:
        if self.seen:
            answer = self.seen[0]["response"]["id"]
            path = f"/v1/responses/{answer}?stream=true&starting_after={self.seen[-1]['sequence_number']}"
            events = events_of(address, path, None, {})
        else:
            text = " ".join(str(self._number + i) for i in range(30))
            body = body_of(self._number, input=text, max_output_tokens=NUM_TOKENS, stream=True, background=True)
            events = events_of(address, "/v1/responses", body, {"Idempotency-Key": f"response {self._number}"})
        for event in events:
            if event["type"] == "error":
                return
            self.seen.append(event)
            self._on_piece(self._number)


def events_of(address: str, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Iterator[Any]:
    """Yield the events of a stream. Raises httpx2.HTTPError for one that breaks off, or is refused."""
    with (
        httpx2.Client(base_url=address, timeout=60) as http,
        http.stream("GET" if body is None else "POST", path, json=body, headers=headers) as answer,
    ):
        answer.raise_for_status()
        begun = b""
        for data in answer.iter_bytes():
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))


def kill_all(running: Service) -> None:
    """End every process of a service at once, as the loss of a container does."""
    found = [running.process.pid, *descendants(running.process.pid)]
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def kill_supervisor(running: Service) -> None:
    os.kill(running.process.pid, signal.SIGKILL)


def figure(running: Service, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)", running.http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("kill", [kill_all, kill_supervisor])
def test_streams_of_a_killed_replica_go_on_in_the_other_one(
    replicas: list[Service], kill: Callable[[Service], None]
) -> None:
    victim, survivor = replicas
    begun: set[tuple[str, int]] = set()
    all_begun, lock = threading.Event(), threading.Lock()

    def note(kind: str) -> Callable[[int], None]:
        def on_piece(number: int) -> None:
            with lock:
                begun.add((kind, number))
                if len(begun) == NUM_STREAMS:
                    all_begun.set()

        return on_piece

    half = range(NUM_STREAMS // 2)
    clients = [Client(replicas, number, note("stream")) for number in half]
    backgrounds = [Background(replicas, number, note("response")) for number in half]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        running = [pool.submit(one.run) for one in (*clients, *backgrounds)]
        assert all_begun.wait(60)
        kill(victim)
        for each in running:
            each.result(130)
    assert any(client.broken for client in clients)
    assert figure(survivor, 'moeserve_kv_tier_hit_tokens_total{tier="disk"}') > 0
    for number, client in enumerate(clients):
        text = "".join(client.pieces)
        assert (len(client.ids), client.tokens) == (1, NUM_TOKENS)
        assert text.startswith("".join(client.broken))
        body = body_of(number, prompt=prompt_of(number), max_tokens=NUM_TOKENS)
        assert survivor.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    for background in backgrounds:
        seen = background.seen
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        text = "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta")
        whole = seen[-1]["response"]
        assert (whole["output"][0]["content"][0]["text"], whole["usage"]["output_tokens"]) == (text, NUM_TOKENS)
        assert survivor.http.get(f"/v1/responses/{whole['id']}").json() == whole


def test_a_request_repeated_at_another_replica_joins_the_one_that_runs(replicas: list[Service]) -> None:
    key = {"Idempotency-Key": "one"}
    body = body_of(0, prompt=prompt_of(0), max_tokens=NUM_TOKENS, stream=True)
    ids, texts = set(), []
    for replica in replicas:
        events = list(events_of(str(replica.http.base_url), "/v1/completions", body, key))
        ids |= {event["id"] for event in events}
        texts.append("".join(event["choices"][0]["text"] for event in events))
    assert len(ids) == 1
    assert texts[0] == texts[1]
    other = replicas[1].http.post("/v1/completions", json=body | {"seed": 1}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


def test_a_service_of_another_kind_may_not_share_the_store(
    replicas: list[Service], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "c").mkdir()
    settings = ("--response-store", str(tmp_path / "store"), "--tool-call-parser", "none")
    with service(model, tmp_path / "c", *settings, ready=False) as refused:
        assert refused.end() == 1
        assert "Another service uses the response store" in refused.errors.read_text()
    wait_until(lambda: len(children_of(replicas[0].process.pid)) == 2)
