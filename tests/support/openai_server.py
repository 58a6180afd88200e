"""An OpenAI-compatible server for tests of clients: answers from a script, and keeps the requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ScriptedServer:
    """Answers each chat request with `tokens_per_event` tokens in each event; remembers which prompts it has seen.

    `failure(request)` may return (status, body), or with headers behind them, to refuse a request. `stalls(number)`:
    whether the request of that number, from 1 on, gets no answer. `broken`: closes the connection in mid-stream.
    `unready`: how often `/ready` answers 503 before 200.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.tokens_per_event = 1
        self.failure: Any = lambda request: None
        self.broken = False
        self.unready = 0
        self.stalls: Any = lambda number: False
        self.error_event = False
        self.gives_usage = True
        self.chunked = True
        self.running = 0
        self.most_running = 0
        self.url = ""
        self._seen: set[str] = set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.headers.append(head)
        length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("Content-Length:")), 0)
        body = await reader.readexactly(length)
        if head.startswith("GET /v1/models"):
            self._send(writer, 200, b'{"data": [{"id": "scripted"}]}')
        elif head.startswith("GET /version"):
            self._send(writer, 200, b'{"version": "1.2.3"}')
        elif head.startswith("GET /ready") and self.unready:
            self.unready -= 1
            self._send(writer, 503, b'{"status": "unavailable", "reason": "the model is loading"}')
        elif head.startswith("POST /v1/chat/completions"):
            await self._chat(json.loads(body), reader, writer)
        else:
            self._send(writer, 404, b'{"error": {"message": "no such route"}}')
        await writer.drain()
        writer.close()

    async def _chat(self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(request)
        refused = self.failure(request)
        if refused is not None:
            self._send(writer, *refused)
            return
        if self.stalls(len(self.requests)):
            # Until the client hangs up.
            await reader.read()
            return
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        encoding = "Transfer-Encoding: chunked" if self.chunked else "Connection: close"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{encoding}\r\n\r\n".encode())
        for event in self._events(request):
            data = event.encode()
            # Each event in two pieces, the border inside of a line.
            for piece in (data[:9], data[9:]):
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self.chunked else piece)
                await writer.drain()
                await asyncio.sleep(0)
        self.running -= 1
        if self.broken:
            writer.transport.abort()
        elif self.chunked:
            writer.write(b"0\r\n\r\n")

    def _events(self, request: dict[str, Any]) -> Iterator[str]:
        system = request["messages"][0]["content"]
        cached = 900 if system in self._seen else 0
        self._seen.add(system)
        num_tokens = request["max_tokens"]
        yield ": keep-alive\n\n"
        yield _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for start in range(0, num_tokens, self.tokens_per_event):
            words = "".join(f" w{index}" for index in range(start, min(start + self.tokens_per_event, num_tokens)))
            yield _event({"choices": [{"index": 0, "delta": {"content": words}, "finish_reason": None}]})
            if self.broken:
                return
        if self.error_event:
            yield _event({"error": {"message": "the engine died", "type": "server_error"}})
            return
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if self.gives_usage:
            usage = {"prompt_tokens": 1000, "completion_tokens": num_tokens}
            yield _event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}})
        yield "data: [DONE]\n\n"

    def _send(self, writer: asyncio.StreamWriter, status: int, body: bytes, headers: bytes = b"") -> None:
        writer.write(b"HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n%s" % (status, headers, len(body), body))


@contextmanager
def serving(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serves on a free port of the loopback interface, from a thread of its own."""
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server.answer, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listener.close()
        loop.close()


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
