"""Floods of one key beside a stream of another: the stream goes on between their answers, nothing is restarted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from tests.support.service import Service, children_of, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

AT_ONCE = 350
# The number of times that an answer of the flood and a token of the stream follow each other.
TURNS = 6
PREFIXES = 1024
REFUSED = {(429, "key_commands_full"), (503, "overloaded"), (503, "queue_full")}
ANSWERED = {(200, ""), (404, "not_pinned"), (409, "over_budget"), (409, "not_cached")}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose cache holds prefixes of one block of the key `flooder`."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("admin:root\nuser:victim\nuser:flooder\n")
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
    # Without drafts a stream has as many tokens as steps. On a busy machine too the victim's streams are taken.
    settings = ("--api-key-file", str(folder / "keys"), "--speculative-config", "none", "--slo", "ttft:20s")
    settings += ("--max-restarts", "0")
    with service(model, tmp_path_factory.mktemp("s"), *settings) as started:
        for start in range(0, PREFIXES, 64):
            body = {"model": "m", "prompt": [prefix(number) for number in range(start, start + 64)], "max_tokens": 1}
            answer = started.http.post("/v1/completions", json=body, headers={"authorization": "Bearer flooder"})
            assert answer.status_code == 200, answer.text
        yield started


def prefix(number: int) -> list[int]:
    return [10 + number % 200, 10 + number // 200] * 9


@asynccontextmanager
async def asked(
    port: int, key: str, method: str, path: str, body: dict[str, Any] | None = None
) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """The status of an answer, and its body to be read."""
    data = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    try:
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            continue
        yield status, reader
    finally:
        writer.close()


async def ask(port: int, key: str, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Return the status of an answer, and the code of its error or ""."""
    async with asked(port, key, method, path, body) as (status, reader):
        answer = json.loads(await reader.read())
        return status, answer.get("error", {}).get("code", "")


@dataclass
class Beside:
    """What came in which order: answers of a flood, and tokens of streams that follow each other meanwhile."""

    port: int
    turns: int = 0
    answers: Counter[tuple[int, str]] = field(default_factory=Counter)
    num_streams: int = 0
    _owes_a_token: bool = False
    _enough: asyncio.Event = field(default_factory=asyncio.Event)
    _next_token: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, calls: Iterator[tuple[str, str, dict[str, Any] | None]]) -> None:
        """Flood until `TURNS` times an answer was followed by a token.

        Each answer is followed by another request at once, each refusal by another one after a token.
        """
        stream = asyncio.create_task(self._stream())
        flood = [asyncio.create_task(self._flood(calls)) for _ in range(AT_ONCE)]
        try:
            await asyncio.wait([stream, *flood], return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._enough.set()
            self._next_token.set()
        await asyncio.gather(stream, *flood)

    async def _flood(self, calls: Iterator[tuple[str, str, dict[str, Any] | None]]) -> None:
        while not self._enough.is_set():
            answer = await ask(self.port, "flooder", *next(calls))
            self.answers[answer] += 1
            if answer in REFUSED and not self._enough.is_set():
                # By the HTTP process: that says nothing about the engine's turns.
                await self._next_token.wait()
            else:
                self._owes_a_token = True

    async def _stream(self) -> None:
        body = {"model": "m", "prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        while not self._enough.is_set():
            async with asked(self.port, "victim", "POST", "/v1/completions", body) as (status, reader):
                assert status == 200, await reader.read()
                text = b""
                while data := await reader.read(65536):
                    text += data
                    self._note(data)
            assert b"data: [DONE]" in text[-40:]
            assert b'"error"' not in text
            self.num_streams += 1

    def _note(self, data: bytes) -> None:
        if b'"text":' not in data:
            return
        self.turns += self._owes_a_token
        self._owes_a_token = False
        self._next_token.set()
        self._next_token = asyncio.Event()
        if self.turns >= TURNS:
            self._enough.set()


def listings(number: int) -> tuple[str, str, dict[str, Any] | None]:
    return "GET", "/v1/cache?limit=1000", None


def listings_and_drops(number: int) -> tuple[str, str, dict[str, Any] | None]:
    return ("GET", "/v1/cache?limit=1000", None) if number % 3 else ("DELETE", "/v1/cache", None)


def new_prefixes(number: int) -> tuple[str, str, dict[str, Any] | None]:
    return "POST", "/v1/cache/warm", {"prompt": [11 + number % 200, 11 + number // 200 % 200] * 20}


def pins(number: int) -> tuple[str, str, dict[str, Any] | None]:
    return "POST", "/v1/cache/pin" if number % 2 else "/v1/cache/unpin", {"prompt": prefix(number % PREFIXES)}


def reports(number: int) -> tuple[str, str, dict[str, Any] | None]:
    body = {"model": "m", "prompt": prefix(number)[::-1], "max_tokens": 1, "cache_report": True}
    return "POST", "/v1/completions", body


@pytest.mark.parametrize("call", [listings, new_prefixes, pins, reports, listings_and_drops])
def test_a_stream_goes_on_between_the_answers_of_an_endless_flood(running: Service, call: Any) -> None:
    before = children_of(running.process.pid)
    port = running.http.base_url.port
    assert port is not None
    beside = Beside(port)
    asyncio.run(beside.run(map(call, count())))
    assert beside.turns >= TURNS
    assert beside.num_streams >= 1
    assert set(beside.answers) <= ANSWERED | REFUSED
    # A key that does not flood is answered.
    assert asyncio.run(ask(port, "victim", "GET", "/v1/cache"))[0] == 200
    assert children_of(running.process.pid) == before
