"""Batches over the lives of HTTP processes: what one has left, the next one with the same store goes on with."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import openai
from openai import OpenAI

from moeserve.frontend import limits
from moeserve.wire import Generate
from tests.support.fake_engine import FakeEngine, Script, admit_only, say
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until

ENDED = ("completed", "failed", "cancelled", "expired")


@contextmanager
def life(folder: Path, **settings: Any) -> Iterator[tuple[Frontend, OpenAI]]:
    """An HTTP process that is killed at the end, over the store that those before it had."""
    with (
        frontend(folder, **{"api_key": ("key",), **settings}) as server,
        OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0, timeout=60) as client,
    ):
        yield server, client


def begun(client: OpenAI, num_lines: int, **lengths: int) -> str:
    """Begin a batch; return its id. lengths: `max_tokens` of lines, by `id_NUMBER`."""
    lines = [
        {"custom_id": f"id_{number}", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny"}}
        for number in range(num_lines)
    ]
    for line in lines:
        line["body"] = {"model": "tiny", "prompt": "x", "max_tokens": lengths.get(str(line["custom_id"]), 8)}
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    assert batch.status == "validating"
    return batch.id


def ended(client: OpenAI, batch_id: str) -> Any:
    wait_until(lambda: client.batches.retrieve(batch_id).status in ENDED, timeout=60)
    return client.batches.retrieve(batch_id)


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def text_processes(server: Frontend) -> list[int]:
    """The processes that read text, and the one that forks them."""
    pid = server.process.pid
    nursery = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    return [*map(int, Path(f"/proc/{nursery}/task/{nursery}/children").read_text().split()), nursery]


def test_a_batch_whose_process_dies_while_its_file_is_read_goes_on_in_the_next(tmp_path: Path) -> None:
    with ExitStack() as stack, life(tmp_path) as (server, client):
        for pid in text_processes(server):
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGKILL)  # stopped, it would not see the end of its parent
        batch_id = begun(client, 3)
    with sqlite3.connect(tmp_path / "run" / "responses") as db:
        assert db.execute("SELECT state FROM batches").fetchall() == [("validating",)]
        # It may have read a part of the file.
        db.execute(
            "INSERT INTO batch_lines(batch, number, custom_id, start, size) VALUES (?, 1, 'id_0', 5, 5)", [batch_id]
        )
    with life(tmp_path) as (_, client):
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)


def answer_some(answered: Callable[[Generate], bool]) -> Script:
    def script(engine: FakeEngine, generate: Generate) -> None:
        (say("Hello") if answered(generate) else admit_only)(engine, generate)

    return script


def test_a_line_is_answered_once_whatever_processes_die(tmp_path: Path) -> None:
    waits = {f"id_{number}": 9 for number in (1, 4, 6)}
    with life(tmp_path) as (server, client):
        server.engine.script = answer_some(lambda generate: generate.sampling.max_tokens == 8)
        batch_id = begun(client, 8, **waits)
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed == 5, timeout=60)
        assert client.batches.retrieve(batch_id).output_file_id is None
    with life(tmp_path) as (server, client):
        batch = ended(client, batch_id)
        assert batch.status == "completed"
        assert [line["custom_id"] for line in lines_of(client, batch.output_file_id)] == [f"id_{n}" for n in range(8)]
        # The answers that there were are not computed again.
        assert len(server.engine.of(Generate)) == 3


def test_a_line_that_ends_its_process_fails_and_no_other_does(tmp_path: Path) -> None:
    servers, has_started, killer = list[Frontend](), Event(), 9

    def script(engine: FakeEngine, generate: Generate) -> None:
        if generate.sampling.max_tokens == killer:
            has_started.wait()
            servers[-1].process.kill()
        else:
            say("Hello")(engine, generate)

    batch_id, batch = "", None
    while batch is None:
        with life(tmp_path, engine={"script": script}) as (server, client):
            servers.append(server)
            has_started.set()
            batch_id = batch_id or begun(client, 6, id_2=killer)
            with suppress(openai.APIConnectionError):
                batch = ended(client, batch_id)
                output, errors = (lines_of(client, name) for name in (batch.output_file_id, batch.error_file_id))
        has_started.clear()
    assert len(servers) == limits.MAX_JOB_TRIES + 1
    assert batch.status == "completed"
    assert [line["custom_id"] for line in output] == ["id_0", "id_1", "id_3", "id_4", "id_5"]
    assert [(line["custom_id"], line["response"]["body"]["error"]["code"]) for line in errors] == [
        ("id_2", "cannot_go_on")
    ]


def test_a_batch_whose_time_is_over_keeps_its_answers_and_names_the_rest(tmp_path: Path) -> None:
    with life(tmp_path) as (server, client):
        server.engine.script = answer_some(lambda generate: generate.sampling.max_tokens == 8)
        batch_id = begun(client, 3, id_1=9)
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed == 2, timeout=60)
    with sqlite3.connect(tmp_path / "run" / "responses") as db:
        db.execute("UPDATE batches SET expires = 1")
    with life(tmp_path) as (server, client):
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.failed) == ("expired", 1)
        assert [line["custom_id"] for line in lines_of(client, batch.output_file_id)] == ["id_0", "id_2"]
        (late,) = lines_of(client, batch.error_file_id)
        assert (late["custom_id"], late["response"], late["error"]["code"]) == ("id_1", None, "batch_expired")
        assert server.engine.of(Generate) == []


def test_a_batch_of_a_key_that_is_gone_fails(tmp_path: Path) -> None:
    with life(tmp_path, api_key=("key", "other")) as (server, client):
        server.engine.script = admit_only
        batch_id = begun(client, 1)
        server.engine.wait_for(Generate)
    with life(tmp_path, api_key=("other",)) as (server, _):
        with sqlite3.connect(tmp_path / "run" / "responses") as db:
            query = "SELECT state, errors FROM batches WHERE id = ?"
            wait_until(lambda: db.execute(query, (batch_id,)).fetchone()[0] == "failed", timeout=60)
            assert b"cannot_go_on" in db.execute(query, (batch_id,)).fetchone()[1]
        assert server.engine.of(Generate) == []


def test_a_batch_whose_answers_find_no_room_fails_and_keeps_those_that_did(tmp_path: Path) -> None:
    with life(tmp_path, response_store_size=2**20) as (server, client):
        server.engine.script = say("x" * 400, chunk=400)
        batch_id = begun(client, 1500)
        batch = ended(client, batch_id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "store_full")
        answered = lines_of(client, batch.output_file_id)
        assert len(answered) == batch.request_counts.completed > 100
