"""Names, limits and revocation of keys over real HTTP from a frontend whose engine follows a script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend.key_file import digest_of
from moeserve.wire import Abort, Generate
from tests.support.fake_engine import say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "tiny", "prompt": "hi"}
KEYS = (
    "admin:root name=root\nuser:a name=alice\nuser:b name=bob tokens=20/day\nuser:c name=carol requests=2/min\nuser:d\n"
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def with_keys(folder: Path, **settings: Any) -> Iterator[tuple[Frontend, Path]]:
    folder.mkdir(exist_ok=True)
    file = folder / "keys"
    file.write_text(KEYS)
    file.chmod(0o600)
    with frontend(folder, api_key_file=str(file), trusted_proxy=("127.0.0.1",), **settings) as running:
        yield running, file


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Frontend, Path]]:
    with with_keys(tmp_path) as running:
        yield running


def log_of(running: Frontend) -> list[dict[str, Any]]:
    return [json.loads(line) for line in running.log_path.read_text().splitlines() if line.startswith("{")]


def lines_of(running: Frontend, status: int) -> list[dict[str, Any]]:
    return [line for line in log_of(running) if line["event"] == "request" and line["status"] == status]


def answer_lines(running: Frontend) -> list[dict[str, Any]]:
    """Return the lines of answers once there are any: one is written when the client has its answer."""
    found = list[dict[str, Any]]()

    def read() -> bool:
        found[:] = [line for line in log_of(running) if line["event"] == "answer"]
        return bool(found)

    wait_until(read)
    return found


def test_log_lines_name_the_key_and_the_client_and_never_the_secret(server: tuple[Frontend, Path]) -> None:
    running, _ = server
    forwarded = {"x-forwarded-for": "203.0.113.9"}
    for key, path in (
        ("a", "/v1/completions"),
        ("d", "/v1/completions"),
        ("sk-wrong", "/v1/models"),
        ("a", "/metrics"),
    ):
        running.http.request(
            "POST" if path == "/v1/completions" else "GET", path, json=BODY, headers=bearer(key) | forwarded
        )
    wait_until(lambda: len(lines_of(running, 200)) >= 2 and lines_of(running, 403) and lines_of(running, 401))
    answered, unnamed = lines_of(running, 200)[-2:]
    assert (answered["key"], unnamed["key"]) == ("alice", f"key-{digest_of('d').hex()[:8]}")
    assert (answered["prompt_tokens"], answered["cached_tokens"], answered["completion_tokens"]) == (2, 3, 5)
    [refused], [unknown] = lines_of(running, 403), lines_of(running, 401)
    assert refused["key"] == "alice"
    assert "key" not in unknown
    assert {line["client"] for line in (answered, unnamed, refused, unknown)} == {"203.0.113.9"}
    assert "sk-wrong" not in running.log_path.read_text()


def test_an_address_that_no_trusted_proxy_names_is_not_believed(tmp_path: Path) -> None:
    with frontend(tmp_path, api_key=("a",)) as running:
        running.http.get("/v1/models", headers={"x-forwarded-for": "203.0.113.9"})
        wait_until(lambda: lines_of(running, 401))
        assert lines_of(running, 401)[0]["client"] == "127.0.0.1"


def test_a_key_sees_its_own_usage_and_an_admin_everybodys(server: tuple[Frontend, Path]) -> None:
    running, _ = server
    for key in "aabb":
        assert running.http.post("/v1/completions", json=BODY, headers=bearer(key)).status_code == 200
    [own] = running.http.get("/v1/usage", headers=bearer("b")).json()["data"]
    counts = {"requests": 2, "prompt_tokens": 4, "cached_tokens": 6, "completion_tokens": 10, "total_tokens": 14}
    assert (own["key"], own["today"], own["total"]) == ("bob", counts, counts)
    limit = own["limits"]["tokens"]
    assert (limit["limit"], limit["per"], limit["used"], limit["left"]) == (20, "day", 14, 6)
    every = running.http.get("/v1/usage", headers=bearer("root")).json()["data"]
    assert [account["key"] for account in every if account["total"]["requests"]] == ["alice", "bob"]
    assert {"carol", "root"} < {account["key"] for account in every}
    scraped = running.http.get("/metrics", headers=bearer("root")).text
    assert 'moeserve_key_generation_tokens_total{key="bob"} 10.0' in scraped
    assert 'moeserve_key_requests_total{key="alice"} 2.0' in scraped


REQUESTS = [
    ("/v1/completions", BODY),
    ("/v1/chat/completions", {"model": "tiny", "messages": MESSAGES}),
    ("/v1/responses", {"model": "tiny", "input": "hi", "background": True}),
    ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}),
    ("/api/chat", {"model": "tiny", "messages": MESSAGES}),
    ("/api/generate", {"model": "tiny", "prompt": "hi"}),
    ("/v1/batches", {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}),
]


def test_every_dialect_refuses_a_key_beyond_its_limits_in_its_own_shape(server: tuple[Frontend, Path]) -> None:
    running, _ = server
    for _ in range(3):
        running.http.post("/v1/completions", json=BODY, headers=bearer("b"))
    for path, body in REQUESTS:
        response = running.http.post(path, json=body, headers=bearer("b"))
        assert response.status_code == 429, path
        assert 1 <= int(response.headers["retry-after"]) <= 86_400
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert "21 of its 20 tokens" in message
        assert isinstance(error, str) == path.startswith("/api"), path
        if path == "/v1/messages":
            assert (response.json()["type"], error["type"]) == ("error", "rate_limit_error")
    wait_until(lambda: len(lines_of(running, 429)) == len(REQUESTS))
    assert {(line["key"], line["error"]) for line in lines_of(running, 429)} == {("bob", "key_tokens_used")}
    assert running.http.post("/v1/completions", json=BODY, headers=bearer("a")).status_code == 200


def test_requests_beyond_a_minutes_limit_are_refused_until_the_next_minute(server: tuple[Frontend, Path]) -> None:
    running, _ = server
    statuses = [running.http.post("/v1/completions", json=BODY, headers=bearer("c")).status_code for _ in range(5)]
    assert statuses.count(200) in (2, 4)  # 4 where a minute began meanwhile
    assert statuses[:2] == [200, 200]


def test_a_batch_waits_while_its_key_is_beyond_its_limit(server: tuple[Frontend, Path]) -> None:
    running, _ = server
    own = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": BODY}
    lines = "\n".join(json.dumps(own | {"custom_id": str(number)}) for number in range(20))
    http, headers = running.http, bearer("b")
    file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in", lines)}, headers=headers).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=asked, headers=headers).json()

    def used() -> int:
        return int(http.get("/v1/usage", headers=headers).json()["data"][0]["limits"]["tokens"]["used"])

    wait_until(lambda: used() >= 20)
    found = http.get(f"/v1/batches/{batch['id']}", headers=headers).json()
    assert (found["status"], found["request_counts"]["failed"]) == ("in_progress", 0)
    counted = [line for line in log_of(running) if line["event"] == "answer"]
    assert {(line["key"], line["batch"]) for line in counted} == {("bob", batch["id"])}


def stream_of(running: Frontend, key: str) -> Any:
    return running.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=bearer(key))


def test_a_key_that_leaves_the_file_ends_its_open_requests_and_no_others(server: tuple[Frontend, Path]) -> None:
    running, file = server
    running.engine.script = trickle("ab")
    with stream_of(running, "a") as revoked, stream_of(running, "d") as kept:
        job = running.http.post(
            "/v1/responses", json={"model": "tiny", "input": "x", "background": True}, headers=bearer("a")
        ).json()
        running.engine.wait_for(Generate, 3)
        file.write_text("admin:root name=root\nuser:d\nuser:new name=eve\n")
        events = [line for line in revoked.iter_lines() if line.startswith("data: ")]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "key_gone"
        running.engine.wait_for(Abort, 2)
        assert running.http.get("/v1/models", headers=bearer("a")).status_code == 401
        assert running.http.get("/v1/models", headers=bearer("new")).status_code == 200
        assert len(running.engine.of(Abort)) == 2
        assert not kept.is_closed
        file.write_text("admin:root name=root\nuser:d\nuser:a name=alice\n")
        wait_until(lambda: running.http.get("/v1/models", headers=bearer("a")).status_code == 200)
        failed = running.http.get(f"/v1/responses/{job['id']}", headers=bearer("a")).json()
        assert failed["status"] == "failed"


def test_a_wrong_file_keeps_the_keys_and_is_told_once(server: tuple[Frontend, Path]) -> None:
    running, file = server
    file.write_text("user:a name=alice tokens=much\n")
    os.kill(running.process.pid, signal.SIGHUP)

    def told(event: str) -> list[dict[str, Any]]:
        return [line for line in log_of(running) if line["event"] == event]

    wait_until(lambda: told("settings_not_reloaded"))
    assert running.http.get("/v1/models", headers=bearer("d")).status_code == 200
    file.write_text("user:a name=alice\n")
    wait_until(lambda: running.http.get("/v1/models", headers=bearer("d")).status_code == 401)
    assert running.http.get("/v1/models", headers=bearer("a")).status_code == 200
    [refused] = told("settings_not_reloaded")
    assert "line 1 of the key file: `tokens=` takes a number per day" in refused["reason"]
    assert told("settings_reloaded")[-1]["revoked"] == 4


def test_limits_that_change_hold_at_once(server: tuple[Frontend, Path]) -> None:
    running, file = server
    for _ in range(3):
        running.http.post("/v1/completions", json=BODY, headers=bearer("b"))
    assert running.http.post("/v1/completions", json=BODY, headers=bearer("b")).status_code == 429
    file.write_text(KEYS.replace("tokens=20/day", "tokens=1k/day"))
    os.kill(running.process.pid, signal.SIGHUP)
    wait_until(lambda: running.http.post("/v1/completions", json=BODY, headers=bearer("b")).status_code == 200)


def test_a_cancelled_response_in_the_background_is_counted(server: tuple[Frontend, Path]) -> None:
    running, _ = server
    running.engine.script = trickle("abcd")
    http, headers = running.http, bearer("a")
    job = http.post("/v1/responses", json={"model": "tiny", "input": "x", "background": True}, headers=headers).json()
    running.engine.wait_for(Generate, 1)
    wait_until(lambda: http.get(f"/v1/responses/{job['id']}", headers=headers).json()["status"] == "in_progress")
    running.engine.script = say("Hello")
    http.post(f"/v1/responses/{job['id']}/cancel", headers=headers)

    def total() -> dict[str, int]:
        found: dict[str, int] = http.get("/v1/usage", headers=headers).json()["data"][0]["total"]
        return found

    wait_until(lambda: total()["requests"] == 1)
    assert total()["completion_tokens"] == 4
    [line] = answer_lines(running)
    assert (line["answer_id"], line["key"], line["complete"]) == (job["id"], "alice", False)


def test_an_answer_with_an_idempotency_key_is_counted_once_in_a_line_of_its_own(server: tuple[Frontend, Path]) -> None:
    running, _ = server
    headers = bearer("a") | {"idempotency-key": "x"}
    answers = [running.http.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    [own] = running.http.get("/v1/usage", headers=bearer("a")).json()["data"]
    assert own["total"]["requests"] == 1
    [line] = answer_lines(running)
    assert (line["key"], line["completion_tokens"]) == ("alice", 5)

    def told() -> list[bool]:
        return ["prompt_tokens" in line for line in lines_of(running, 200) if line["route"] == "/v1/completions"]

    wait_until(lambda: len(told()) == 2)
    assert told() == [False] * 2
