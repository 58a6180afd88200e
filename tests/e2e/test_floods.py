"""Floods of the cache routes by one key beside a stream of another: the stream goes on, nothing is restarted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.service import children_of, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

NUM_REQUESTS = 350


async def ask(port: int, method: str, path: str, key: str) -> tuple[int, str]:
    """Return the status and the error code of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode())
    status = int((await reader.readline()).split()[1])
    while (await reader.readline()).strip():
        continue
    body = json.loads(await reader.read())
    writer.close()
    return status, body.get("error", {}).get("code", "")


async def read_stream(port: int, max_tokens: int, begun: asyncio.Event) -> int:
    """Return the number of tokens of a stream of the key `victim`, which ends as it should."""
    fields = {"model": "m", "prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer victim\r\nconnection: close\r\n"
        b"content-type: application/json\r\n" + f"content-length: {len(body)}\r\n\r\n{body}".encode()
    )
    text = b""
    while data := await reader.read(65536):
        text += data
        if b"data: " in text:
            begun.set()
    writer.close()
    assert b'"error"' not in text
    assert b"[DONE]" in text
    usage = next(line for line in text.splitlines() if b'"usage":{' in line)
    tokens: int = json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"]
    return tokens


@pytest.mark.slow
def test_six_floods_of_one_key_end_no_stream_and_no_engine(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    keys = tmp_path / "keys"
    keys.write_text("admin:root\nuser:victim\nuser:flooder\n")
    settings = ("--max-model-len", "2048", "--api-key-file", str(keys))

    async def run(port: int) -> None:
        begun = asyncio.Event()
        stream = asyncio.create_task(read_stream(port, 1900, begun))
        await begun.wait()
        for method, path in (("GET", "/v1/cache?limit=1000"), ("DELETE", "/v1/cache")) * 3:
            answers = await asyncio.gather(*(ask(port, method, path, "flooder") for _ in range(NUM_REQUESTS)))
            counts = Counter(answers)
            assert set(counts) <= {(200, ""), (429, "key_commands_full")}
            assert counts[200, ""] >= 8
            # A key that does not flood is answered.
            assert (await ask(port, "GET", "/v1/cache", "victim"))[0] == 200
        assert await stream == 1900

    with service(model, tmp_path, *settings) as running:
        for start in range(0, 1024, 64):
            prompts = [[10 + number % 200, 10 + number // 200] * 9 for number in range(start, start + 64)]
            body = {"model": "m", "prompt": prompts, "max_tokens": 1}
            answer = running.http.post("/v1/completions", json=body, headers={"authorization": "Bearer flooder"})
            assert answer.status_code == 200, answer.text
        before = children_of(running.process.pid)
        assert running.http.base_url.port is not None
        asyncio.run(run(running.http.base_url.port))
        assert children_of(running.process.pid) == before
