"""Clients whose streams may break anywhere: they ask again, elsewhere, until their answers are whole."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx2

NUM_TOKENS = 800  # of each answer


def body_of(number: int, **fields: Any) -> dict[str, Any]:
    """Return a request whose prompt no other one shares a block with."""
    body = {"model": "m", "temperature": 1.1, "seed": number, "ignore_eos": True}
    return body | fields


def prompt_of(number: int) -> list[int]:
    return [3 + number, *(3 + (number + i * 7) % 50 for i in range(100))]


class Underway:
    """Counts pieces of streams. `event` is set once all have begun, or one has come far: on a busy machine some begin
    when others would have ended."""

    def __init__(self, num_streams: int) -> None:
        self.event = threading.Event()
        self._num_streams = num_streams
        self._lock = threading.Lock()
        self._pieces: Counter[int] = Counter()

    def note(self, number: int) -> None:
        """Count a piece of a stream."""
        with self._lock:
            self._pieces[number] += 1
            if len(self._pieces) == self._num_streams or self._pieces[number] == NUM_TOKENS // 8:
                self.event.set()


class Repeated:
    """One stream with an `Idempotency-Key`, asked for at the next address, from its beginning, wherever it broke.

    pieces: the text of the last answer. broken: the text when the stream broke. ids: of all answers, of which the last
    alone is whole.
    """

    def __init__(self, addresses: Sequence[str], number: int, on_piece: Callable[[int], None]) -> None:
        self._addresses = addresses
        self._number = number
        self._on_piece = on_piece
        self.pieces: list[str] = []
        self.broken: list[str] = []
        self.ids: set[str] = set()
        self.tokens = 0

    def run(self) -> None:
        until, at = time.monotonic() + 120, self._number % len(self._addresses)
        while True:
            try:
                if self._read(self._addresses[at]):
                    return
            except httpx2.HTTPStatusError as error:
                if error.response.status_code == 409:
                    time.sleep(0.05)  # another service's state can only be polled
            except httpx2.HTTPError:
                pass
            assert time.monotonic() < until
            self.broken = max(self.broken, self.pieces, key=len)
            at = (at + 1) % len(self._addresses)

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


class TakenUp:
    """A response in the background, taken up again behind the last event that was seen."""

    def __init__(self, addresses: Sequence[str], number: int, on_piece: Callable[[int], None]) -> None:
        self._addresses = addresses
        self._number = number
        self._on_piece = on_piece
        self.seen: list[dict[str, Any]] = []

    def run(self) -> None:
        until, at = time.monotonic() + 120, self._number % len(self._addresses)
        while not self.seen or self.seen[-1]["type"] != "response.incomplete":
            assert time.monotonic() < until
            with suppress(httpx2.HTTPError):
                self._read(self._addresses[at])
            at = (at + 1) % len(self._addresses)

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
    """Yield the events of a stream. Raise httpx2.HTTPError for one that breaks off, or is refused."""
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
