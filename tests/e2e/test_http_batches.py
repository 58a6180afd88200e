"""`/v1/files` and `/v1/batches` over real HTTP from a frontend whose engine follows a script, by the openai package."""

from __future__ import annotations

import json
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from moeserve.frontend import limits
from moeserve.plan import BACKGROUND_PRIORITY
from moeserve.wire import Abort, Generate
from tests.support.fake_engine import admit_only, say
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), api_key=("first", "second", "third")) as running:
        yield running


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    server.engine.received.clear()
    server.engine.script = say("Hello")
    with OpenAI(base_url=server.url + "/v1", api_key="first", max_retries=0, timeout=60) as client:
        yield client


def line(name: str, **fields: Any) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": name}], "max_tokens": 8, **fields}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


def begun(client: OpenAI, *lines: str) -> Any:
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )


def ended(client: OpenAI, batch: Any) -> Any:
    wait_until(
        lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled", "expired"), timeout=60
    )
    return client.batches.retrieve(batch.id)


def results(client: OpenAI, file_id: str) -> dict[str, Any]:
    lines = client.files.content(file_id).text.splitlines()
    found = {entry["custom_id"]: entry for entry in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def test_a_batch_has_an_answer_for_each_line(server: Frontend, client: OpenAI) -> None:
    batch = begun(client, line("a"), line("b"), line("bad", temperature=9))
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    batch = ended(client, batch)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    answers = results(client, batch.output_file_id)
    assert answers.keys() == {"a", "b"}
    assert answers["a"]["response"]["status_code"] == 200
    assert answers["a"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    refused = results(client, batch.error_file_id)
    assert refused["bad"]["response"]["status_code"] == 400
    assert refused["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert {generate.priority for generate in server.engine.of(Generate)} == {BACKGROUND_PRIORITY}
    assert batch.id in [one.id for one in client.batches.list()]


def test_a_file_with_lines_that_are_no_requests_fails_as_a_whole(server: Frontend, client: OpenAI) -> None:
    other = line("b").replace("/v1/chat/completions", "/v1/completions")
    batch = ended(client, begun(client, line("a"), "{}", line("a"), other, line("c", stream=True)))
    assert batch.status == "failed"
    assert [error.message[:6] for error in batch.errors.data] == ["line 2", "line 3", "line 4", "line 5"]
    assert server.engine.of(Generate) == []


def test_a_cancelled_batch_asks_no_more(server: Frontend, client: OpenAI) -> None:
    server.engine.script = admit_only
    batch = begun(client, *[line(str(number)) for number in range(30)])
    server.engine.wait_for(Generate)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    server.engine.wait_for(Abort)
    batch = ended(client, batch)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_files_are_kept_listed_and_dropped(client: OpenAI) -> None:
    content = b'{"a": 1}\r\n--x\r\n\r\n\x00\xff'
    made = client.files.create(file=('a "b".jsonl', content), purpose="batch")
    assert (made.bytes, made.purpose, made.status) == (len(content), "batch", "processed")
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == content
    assert made.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


def test_other_keys_find_neither(server: Frontend, client: OpenAI) -> None:
    batch = ended(client, begun(client, line("a")))
    with OpenAI(base_url=server.url + "/v1", api_key="second", max_retries=0) as other:
        for look in (
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.output_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                look()
        assert list(other.files.list()) == list(other.batches.list()) == []


def test_uploads_that_stand_still_hold_up_no_other_key(server: Frontend, client: OpenAI) -> None:
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer first\r\nexpect: 100-continue\r\n"
        "content-type: multipart/form-data; boundary=b\r\ncontent-length: 1000\r\n\r\n"
    )
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(3)]
        for connection in idle:
            connection.sendall(head.encode())
        # Its body is waited for.
        assert any(b"100 Continue" in one.recv(1000) for one in select.select(idle, [], [], 60)[0])
        assert server.http.get("/health").status_code == 200
        other = stack.enter_context(OpenAI(base_url=server.url + "/v1", api_key="third", max_retries=0, timeout=60))
        assert other.files.create(file=("in.jsonl", b"{}"), purpose="batch").status == "processed"


def test_what_cannot_be_done_is_refused(server: Frontend, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="vision")
    file = client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="24h"):
        client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="1h")  # type: ignore[arg-type]
    headers = {"authorization": "Bearer first", "content-type": "multipart/form-data; boundary=b"}
    assert server.http.post("/v1/files", content=b"--b\r\nno end", headers=headers).status_code == 400
    for hostile in (b"\r\n--b" * 100_000, b"--b\r\n" + b"x\r\n" * 100_000 + b"\r\n\r\n--b--\r\n"):
        assert server.http.post("/v1/files", content=hostile, headers=headers).status_code == 400
    assert server.http.post("/v1/files", json={}, headers={"authorization": "Bearer first"}).status_code == 415


class Peak:
    """The growth of the largest of a frontend's processes within a block, in MiB."""

    def __init__(self, server: Frontend) -> None:
        pid = server.process.pid
        self._pids = [pid, *_children(pid), *(pid for nursery in _children(pid) for pid in _children(nursery))]

    def __enter__(self) -> Peak:
        for pid in self._pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")
        self._before = {pid: _resident(pid, "VmRSS") for pid in self._pids}
        return self

    def __exit__(self, *_: object) -> None:
        self.mebibytes = max(_resident(pid, "VmHWM") - before for pid, before in self._before.items()) / 1024


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _resident(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


FULL = limits.MAX_FILE_BYTES - 1000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"0\n" * 2**22, "line 1: Expected `object`, got `int`"),
        (b"\n" * FULL, "the file holds no request"),
        (
            b'{"body": [' + b"{}," * (FULL // 3 - 20) + b"{}]}",
            "line 1: it is longer than 4194304 bytes",
        ),
        (b'{"custom_id": "a", "body": [' + b"{}," * 2**20 + b"{}]}\n", "line 1: it has more than 524288 commas"),
        (line("a").encode() + b"\n" + b" " * 2**23 + b"\n", "line 2: it is longer than 4194304 bytes"),
    ],
    ids=["no objects", "no lines", "one line", "many values", "spaces"],
)
def test_a_file_of_no_requests_fails_in_little_memory(
    server: Frontend, client: OpenAI, content: bytes, problem: str
) -> None:
    with Peak(server) as peak:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        batch = ended(client, batch)
    assert (batch.status, batch.errors.data[0].message) == ("failed", problem)
    assert len(batch.errors.data) <= limits.MAX_BATCH_ERRORS
    assert peak.mebibytes < 32


def test_a_batch_has_so_many_requests(client: OpenAI) -> None:
    lines = [line(str(number)) for number in range(limits.MAX_BATCH_LINES + 1)]
    batch = ended(client, begun(client, *lines))
    assert (batch.status, batch.errors.data[0].message) == ("failed", "a batch takes at most 50000 requests")


def test_slow_downloads_hold_little_of_their_file(server: Frontend, client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", bytes(FULL)), purpose="batch")
    head = f"GET /v1/files/{file.id}/content HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\n\r\n"
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with ExitStack() as stack, Peak(server) as peak:
        slow = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(40)]
        for connection in slow:
            connection.sendall(head.encode())
        for connection in slow:
            assert b"200 OK" in connection.recv(1000)
    assert peak.mebibytes < 32
    assert client.files.content(file.id).read() == bytes(FULL)
    client.files.delete(file.id)


def test_lines_hold_up_no_shutdown_where_the_store_goes_with_the_service(tmp_path: Path) -> None:
    with frontend(tmp_path, shutdown_timeout=600.0) as server:
        server.engine.script = admit_only
        with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            begun(client, line("a"), line("b"))
            server.engine.wait_for(Generate, 2)
            server.process.send_signal(signal.SIGTERM)
            server.engine.wait_for(Abort, 2)
            assert server.process.wait(60) == 0
