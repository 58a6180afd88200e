"""The sum of what keys are told they have used is the sum of the log lines, whatever process is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.service import Service, children_of, service, wait_until

NUM_KEYS = 30
NAMES = [f"person-{number}" for number in range(NUM_KEYS)]
FLOODING = NAMES[0]
COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    keys = tmp_path / "keys"
    lines = [f"user:key-of-{name} name={name}" for name in NAMES] + ["user:key-of-limited name=limited requests=5/min"]
    keys.write_text("\n".join(["admin:root name=root", *lines]))
    keys.chmod(0o600)
    store = ["--response-store", str(tmp_path / "responses.sqlite3")]
    return ["--api-key-file", str(keys), "--num-frontends", "2", "--max-restarts", "1000", *store]


class Traffic:
    """Clients of all keys, of which one floods: streams, whole answers, background responses and Ollama's chats."""

    def __init__(self, running: Service) -> None:
        self.num_answers = 0
        self._url = str(running.http.base_url)
        self._stop = threading.Event()
        clients = [(name, number) for number, name in enumerate([*NAMES, *[FLOODING] * 4])]
        self._threads = [threading.Thread(target=self._ask, args=client) for client in clients]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, name: str, number: int) -> None:
        draw = random.Random(number)
        limits = httpx2.Limits(max_keepalive_connections=0)
        with httpx2.Client(base_url=self._url, headers=bearer(f"key-of-{name}"), limits=limits, timeout=60) as http:
            while not self._stop.is_set():
                path, body = draw.choice(self._requests(draw))
                with suppress(httpx2.HTTPError):
                    if http.post(path, json=body).status_code == 200:
                        self.num_answers += 1
                self._stop.wait(0 if name == FLOODING else draw.uniform(0.1, 0.5))

    def _requests(self, draw: random.Random) -> list[tuple[str, dict[str, Any]]]:
        prompt = "once upon a time " * draw.randrange(1, 9)
        own = {"model": "m", "prompt": prompt, "max_tokens": draw.randrange(1, 40), "ignore_eos": True}
        message = [{"role": "user", "content": prompt}]
        return [
            ("/v1/completions", own),
            ("/v1/completions", {**own, "stream": True, "n": 2}),
            ("/v1/responses", {"model": "m", "input": prompt, "max_output_tokens": 20, "background": True}),
            ("/api/chat", {"model": "m", "messages": message, "options": {"num_predict": 10}}),
        ]


def test_an_admin_sees_every_request_under_way_and_cancels_one(
    model: Path, tmp_path: Path, settings: list[str]
) -> None:
    body = {
        "model": "m",
        "prompt": "once upon a time",
        "max_tokens": 100_000,
        "ignore_eos": True,
        "stream": True,
        "n": 2,
    }
    root = bearer("root")
    with service(model, tmp_path / "s", *settings) as running:
        with ExitStack() as stack:
            ask = partial(running.http.stream, "POST", "/v1/completions", json=body)
            first, second = (
                stack.enter_context(ask(headers=bearer(f"key-of-{name}"))).iter_lines() for name in NAMES[:2]
            )
            next(first)
            next(second)
            listed = running.http.get("/v1/requests", headers=root).json()
            found = {one["key"]: one for one in listed["data"]}
            assert (listed["total_choices"], found.keys()) == (4, set(NAMES[:2]))
            mine = found[NAMES[0]]
            assert (mine["choices"], mine["running"], mine["route"]) == (2, True, "/v1/completions")
            assert mine["computed_tokens"] == mine["prompt_tokens"] > 0
            assert mine["completion_tokens"] > 0
            assert (
                running.http.post(f"/v1/requests/{mine['id']}/cancel", headers=bearer("key-of-person-1")).status_code
                == 403
            )
            assert running.http.post(f"/v1/requests/{mine['id']}/cancel", headers=root).status_code == 200
            events = [line for line in first if line.startswith("data: ")]
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "cancelled_by_operator"
            assert next(second) is not None
            [left] = running.http.get("/v1/requests", headers=root).json()["data"]
            assert left["key"] == NAMES[1]
            assert running.http.post(f"/v1/requests/{mine['id']}/cancel", headers=root).status_code == 404
        wait_until(lambda: running.http.get("/v1/requests", headers=root).json()["data"] == [])


def test_a_limit_holds_for_all_http_processes_together(model: Path, tmp_path: Path, settings: list[str]) -> None:
    def ask(_: int) -> int:
        limits = httpx2.Limits(max_keepalive_connections=0)
        with httpx2.Client(base_url=running.http.base_url, headers=bearer("key-of-limited"), limits=limits) as http:
            return http.post(
                "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 1}, timeout=60
            ).status_code

    with service(model, tmp_path / "s", *settings) as running, ThreadPoolExecutor(8) as pool:
        statuses = Counter(pool.map(ask, range(40)))
        assert statuses.keys() == {200, 429}
        assert statuses[200] in (5, 10)  # 10 where a minute began meanwhile
        lines = [json.loads(line) for line in running.errors.read_text().splitlines() if '"key": "limited"' in line]
        assert {line["frontend"] for line in lines} == {0, 1}


def lines_of(running: Service) -> Iterator[dict[str, Any]]:
    for line in running.errors.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict) and "answer_id" in found:
                yield found


def logged(*services: Service) -> dict[str, Counter[str]]:
    """Return the sums of the log lines by key; a line that came twice counts once."""
    answers = {line["answer_id"]: line for running in services for line in lines_of(running)}
    sums: dict[str, Counter[str]] = {}
    for line in answers.values():
        sums.setdefault(line["key"], Counter()).update({"requests": 1, **{name: line[name] for name in COUNTS}})
    return sums


def told(running: Service) -> dict[str, Counter[str]]:
    accounts = running.http.get("/v1/usage", headers=bearer("root")).json()["data"]
    counts = ("requests", *COUNTS)
    return {
        account["key"]: Counter({name: account["total"][name] for name in counts})
        for account in accounts
        if account["total"]["requests"]
    }


def num_open_jobs(running: Service) -> int:
    import sqlite3

    path = running.run_root.parent.parent / "responses.sqlite3"
    with sqlite3.connect(path) as db:
        return int(db.execute("SELECT count(*) FROM jobs WHERE state = 'open'").fetchone()[0])


def strike(running: Service, target: str) -> None:
    if (pid := children_of(running.process.pid).get(target)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_usage_is_the_sum_of_the_log_across_kills_and_restarts(
    model: Path, tmp_path: Path, settings: list[str]
) -> None:
    draw = random.Random(5)
    with service(model, tmp_path / "first", *settings) as first, Traffic(first) as traffic:
        for target in ("frontend", "worker", "frontend 1", "worker", "frontend"):
            enough = traffic.num_answers + draw.randrange(20, 60)
            wait_until(lambda enough=enough: traffic.num_answers >= enough)
            strike(first, target)
        wait_until(lambda: traffic.num_answers >= enough + 60)
        first.process.kill()
        first.process.wait()
    with service(model, tmp_path / "second", *settings) as second:
        with Traffic(second) as traffic:
            wait_until(lambda: traffic.num_answers >= 100)
        wait_until(lambda: num_open_jobs(second) == 0)
        wait_until(lambda: told(second) == logged(first, second))
        sums = told(second)
        assert sums.keys() == set(NAMES)
        assert sums[FLOODING]["requests"] > max(sums[name]["requests"] for name in NAMES[1:])
        second.process.send_signal(signal.SIGTERM)
        assert second.end() == 0
    with service(model, tmp_path / "third", *settings) as third:
        assert told(third) == sums == logged(first, second)
        assert list(lines_of(third)) == []
