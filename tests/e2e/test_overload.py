"""A whole service with more to do than it has places: what other keys, late requests and greedy ones get."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.service import Service, children_of, descendants, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

SEATS = 4
PLACES = SEATS + 8
ENDLESS = 30_000


# Each test has a service of its own: one whose clients have left early runs fewer requests at once.
@pytest.fixture
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text("user:alice\nuser:bob weight=2\nadmin:root\n")
    settings = ["--api-key-file", str(folder / "keys"), "--max-num-seqs", str(SEATS)]
    settings += ["--max-num-queued-reqs", str(PLACES - SEATS), "--slo", "ttft:100s"]
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("service"), *settings) as started:
        yield started


def headers(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def ask(running: Service, key: str, max_tokens: int = 4, slo: str | None = None, **fields: Any) -> httpx2.Response:
    body = {"model": "m", "prompt": "It was the best of times", "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"temperature": 0, **fields}
    more = {} if slo is None else {"x-moeserve-slo": slo}
    return running.http.post("/v1/completions", json=body, headers=headers(key, **more))


def metric(running: Service, name: str) -> float:
    return metrics(running, name)[0]


def metrics(running: Service, *names: str) -> list[float]:
    """Return metrics of one scrape, 0 where one is not there yet."""
    lines = running.http.get("/metrics", headers=headers("root")).text.splitlines()
    return [next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)), 0.0) for name in names]


def hold_seats(running: Service, stack: ExitStack, key: str, count: int) -> None:
    """Begin streams that do not end before the stack does."""
    body = {"model": "m", "prompt": "hello", "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    for _ in range(count):
        client = stack.enter_context(httpx2.Client(base_url=running.http.base_url, timeout=60))
        response = stack.enter_context(client.stream("POST", "/v1/completions", json=body, headers=headers(key)))
        assert response.status_code == 200, response.read()


def wait_until_idle(running: Service) -> None:
    names = ("moeserve_requests_running", "moeserve_requests_waiting", 'moeserve_kv_blocks{state="leased"}')
    # All of one answer: the first ones may be of before the streams, and the last one of amid them.
    wait_until(lambda: metrics(running, *names) == [0, 0, 0])


def test_a_key_is_served_while_another_one_holds_every_seat_with_streams_without_end(running: Service) -> None:
    alone = ask(running, "bob", 16).json()["choices"][0]["text"]
    with ExitStack() as stack:
        hold_seats(running, stack, "alice", SEATS)
        for _ in range(5):
            answer = ask(running, "bob", 16)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == alone
        # The engine tells its counters twice a second.
        wait_until(lambda: metric(running, "moeserve_preemptions_total") > 0)
    wait_until_idle(running)


def test_a_request_that_cannot_begin_in_time_is_refused_with_a_time_to_come_back(running: Service) -> None:
    with ExitStack() as stack:
        hold_seats(running, stack, "alice", SEATS)
        late = ask(running, "alice", slo="ttft:300ms")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "overloaded")
        assert 1 <= int(late.headers["retry-after"]) <= 60
    wait_until_idle(running)
    assert ask(running, "alice", slo="ttft:90s").status_code == 200


def test_background_requests_give_their_seats_to_others_and_are_answered_in_the_end(running: Service) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(base_url=running.http.base_url, timeout=60))
        body = {"model": "m", "prompt": "hello", "max_tokens": 600, "ignore_eos": True, "background": True, "n": SEATS}
        body |= {"stream": True}
        response = stack.enter_context(client.stream("POST", "/v1/completions", json=body, headers=headers("alice")))
        lines = response.iter_lines()
        next(lines)
        assert ask(running, "alice").status_code == 200
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    wait_until_idle(running)


def test_what_a_key_may_not_ask_is_refused_by_name(running: Service) -> None:
    hurried = ask(running, "alice", priority=-1)
    assert (hurried.status_code, hurried.json()["error"]["param"]) == (403, "priority")
    assert ask(running, "root", priority=-1).status_code == 200
    greedy = ask(running, "alice", n=PLACES)
    assert (greedy.status_code, greedy.json()["error"]["param"]) == (400, "n")
    for slo in ("ttft:600s", "tpot:1ms", "soon"):
        assert ask(running, "alice", slo=slo).status_code == 400


def test_prompts_that_fill_all_memory_leave_the_cached_prefix_of_another_key_there(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("small")
    (folder / "keys").write_text("user:alice\nuser:bob\nadmin:root\n")
    # 426 blocks of 16 tokens.
    settings = ["--api-key-file", str(folder / "keys"), "--kv-cache-memory", "1704KiB", "--slo", "ttft:60s"]
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, folder, *settings) as small, ThreadPoolExecutor(16) as pool:
        prompt = "".join(f"Rule {number}: be kind. " for number in range(16))

        def num_cached() -> int:
            usage = ask(small, "bob", prompt=prompt).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert num_cached() == 0
        kept = num_cached()
        assert kept > 250
        for turn in range(2):
            prompts = [f"{turn} {number} " * 170 for number in range(16)]
            flood = [pool.submit(ask, small, "alice", 8, prompt=prompt) for prompt in prompts]
            assert [answer.result().status_code for answer in flood] == [200] * 16
            assert num_cached() == kept
        wait_until_idle(small)


@pytest.mark.slow
def test_health_answers_however_many_connections_and_few_files_there_are(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "m")
    with service(model, tmp_path, forked=False, most_files=64) as started, ExitStack() as stack:
        assert "--max-connections is lowered from 1024 to 4" in started.errors.read_text()
        stream = started.stream(400)
        first = next(stream)
        address = (started.http.base_url.host, started.http.base_url.port)
        for _ in range(128):
            stack.enter_context(socket.create_connection(address, timeout=60))
        for path in ("/health", "/ready", "/metrics", "/health"):
            assert httpx2.get(started.http.base_url.join(path), timeout=60).status_code == 200
        [engine] = descendants(children_of(started.process.pid)["worker"])
        os.kill(engine, signal.SIGKILL)
        assert len([first, *stream]) > 100
        assert httpx2.get(started.http.base_url.join("/health"), timeout=60).status_code == 200
