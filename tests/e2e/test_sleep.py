"""Sleep: the model leaves memory when nobody needs it, and a request brings it back and loses nothing."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.service import Service, children_of, descendants, read_of_process, service, wait_until

SAMPLED = {"model": "m", "prompt": "once upon a time", "temperature": 1.1, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(model, tmp_path_factory.mktemp("s"), "--num-frontends", "2", "--max-model-len", "4096") as started:
        yield started


def ask(running: Service, **fields: Any) -> dict[str, Any]:
    answer = running.http.post("/v1/completions", json={**SAMPLED, "max_tokens": 20, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def is_sleeping(running: Service) -> bool:
    return bool(running.http.get("/is_sleeping").json()["is_sleeping"])


def sleep_state(running: Service) -> str:
    text = running.http.get("/metrics").text
    return ",".join(re.findall(r'moeserve_engine_sleep_state{sleep_state="(\w+)"} 1.0', text))


def resident_bytes(running: Service) -> int:
    """The resident memory of all processes of the service."""
    pages = (read_of_process(pid, "statm").split() for pid in descendants(running.process.pid))
    return sum(int(fields[1]) for fields in pages if fields) * os.sysconf("SC_PAGE_SIZE")


def test_sleep_frees_the_memory_of_the_model_and_a_request_brings_it_back(running: Service) -> None:
    before, bytes_before = ask(running), resident_bytes(running)
    restarts = running.figure("moeserve_engine_restarts_total")
    assert running.http.post("/sleep").json() == {"status": "ok", "is_sleeping": True}
    assert "worker" not in children_of(running.process.pid)
    assert resident_bytes(running) < bytes_before
    assert is_sleeping(running)
    assert sleep_state(running) == "discard_all"
    asleep = running.http.get("/metrics").text
    assert "moeserve_kv_blocks{" not in asleep
    assert "moeserve_generation_tokens_total" in asleep
    # Load balancers leave it in: it takes requests.
    assert running.http.get("/health").status_code == 200
    assert running.http.get("/ready").json() == {"status": "asleep"}
    after = ask(running)
    assert after["choices"] == before["choices"]
    assert "resumed" not in after["usage"]
    assert not is_sleeping(running)
    assert sleep_state(running) == "awake"
    assert running.figure("moeserve_engine_restarts_total") == restarts


def test_each_http_process_wakes_the_service_and_keeps_what_waits(running: Service) -> None:
    expected = ask(running)["choices"]
    running.http.post("/sleep")
    with ThreadPoolExecutor(8) as pool:
        # Connections of their own, which the two processes share.
        answers = list(
            pool.map(
                lambda _: httpx2.post(
                    f"{running.http.base_url}/v1/completions", json={**SAMPLED, "max_tokens": 20}, timeout=60
                ),
                range(8),
            )
        )
    assert [answer.json()["choices"] for answer in answers] == [expected] * 8


def test_wake_up_loads_the_model_and_does_nothing_to_one_that_is_loaded(running: Service) -> None:
    running.http.post("/sleep?level=2")
    assert running.http.post("/wake_up?tags=weights&tags=kv_cache").json() == {"status": "ok", "is_sleeping": False}
    engine = children_of(running.process.pid)["worker"]
    running.http.post("/wake_up")
    assert children_of(running.process.pid)["worker"] == engine


def test_ollamas_clients_load_and_unload_the_model_by_keep_alive(running: Service) -> None:
    def keep(path: str, keep_alive: int) -> str:
        answer = running.http.post(f"/api/{path}", json={"model": "m", "keep_alive": keep_alive}).json()
        return str(answer["done_reason"])

    for path in ("chat", "generate"):
        assert keep(path, 0) == "unload"
        assert is_sleeping(running)
        assert running.http.get("/api/ps").json() == {"models": []}
        assert keep(path, -1) == "load"
        assert not is_sleeping(running)
        assert [model["name"] for model in running.http.get("/api/ps").json()["models"]] == ["m"]


def test_commands_do_not_wake_it_and_say_that_it_sleeps(running: Service) -> None:
    running.http.post("/sleep")
    for method, path in (("GET", "/v1/cache"), ("POST", "/reset_prefix_cache")):
        answer = running.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "asleep")
    assert running.http.post("/tokenize", json={"model": "m", "prompt": "a"}).status_code == 200
    assert is_sleeping(running)


@pytest.mark.parametrize("query", ["sleep?level=0", "sleep?level=x", "sleep?mode=abort", "wake_up?tags=optimizer"])
def test_what_it_cannot_do_is_refused(running: Service, query: str) -> None:
    assert running.http.post(f"/{query}").status_code == 400


def test_sleep_waits_for_the_end_of_open_answers(running: Service) -> None:
    ask(running)
    stream = running.stream(300, prompt="once upon a time")
    events = [next(stream)]
    asleep: list[httpx2.Response] = []
    thread = threading.Thread(target=lambda: asleep.append(httpx2.post(f"{running.http.base_url}/sleep", timeout=60)))
    thread.start()
    events += stream
    thread.join(60)
    assert asleep[0].json()["is_sleeping"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("error" in event for event in events)


def test_whoever_leaves_before_it_sleeps_has_asked_for_nothing(running: Service) -> None:
    ask(running)
    engine = children_of(running.process.pid)["worker"]
    left = running.figure("moeserve_client_disconnects_total")
    stream = running.stream(4000, prompt="once upon a time")
    next(stream)
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{running.http.base_url}/sleep", timeout=httpx2.Timeout(60, read=0.3))
    wait_until(lambda: running.figure("moeserve_client_disconnects_total") > left)
    stream.close()  # type: ignore[attr-defined]
    ask(running)
    assert children_of(running.process.pid)["worker"] == engine


def test_a_crash_while_it_wakes_costs_no_request(running: Service) -> None:
    expected = ask(running)["choices"]
    running.http.post("/sleep")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, running)
        wait_until(lambda: "worker" in children_of(running.process.pid))
        os.kill(children_of(running.process.pid)["worker"], signal.SIGKILL)
        assert answer.result()["choices"] == expected


def test_http_processes_that_die_asleep_take_requests_again_and_these_wake_the_service(running: Service) -> None:
    expected = ask(running)["choices"]
    running.http.post("/sleep")
    running.http.close()
    dead = children_of(running.process.pid)
    for pid in dead.values():
        os.kill(pid, signal.SIGKILL)
    running.http = httpx2.Client(base_url=running.http.base_url, timeout=60)

    def are_others() -> bool:
        children = children_of(running.process.pid)
        return children.keys() == dead.keys() and not set(children.values()) & set(dead.values())

    wait_until(are_others)
    assert is_sleeping(running)
    assert "worker" not in children_of(running.process.pid)
    assert ask(running)["choices"] == expected


def test_sigterm_ends_a_service_that_sleeps(model: Path, tmp_path: Path) -> None:
    with service(model, tmp_path) as running:
        running.http.post("/sleep")
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0
        assert running.leaves_nothing()


def test_it_sleeps_by_itself_and_finds_its_prefixes_on_disk(model: Path, tmp_path: Path) -> None:
    settings = ("--sleep-after", "1s", "--kv-disk-path", str(tmp_path / "kv"))
    with service(model, tmp_path, *settings) as running:
        prompt = [3 + i * 7 % 50 for i in range(200)]
        first = ask(running, prompt=prompt, temperature=0)
        wait_until(lambda: is_sleeping(running))
        again = ask(running, prompt=prompt, temperature=0)
        assert again["choices"][0]["text"] == first["choices"][0]["text"]
        assert again["usage"]["cached_tokens_details"]["disk"] > 0


@pytest.mark.parametrize(
    "way", ["expert", *(pytest.param(way, marks=pytest.mark.long) for way in ("pipeline", "tensor"))]
)
def test_two_ranks_sleep_and_wake(model: Path, tmp_path: Path, way: str) -> None:
    with service(model, tmp_path, f"--{way}-parallel-size", "2") as running:
        expected = ask(running)["choices"]
        running.http.post("/sleep")
        assert "worker" not in children_of(running.process.pid)
        assert ask(running)["choices"] == expected


def test_no_request_is_lost_however_it_meets_sleep_and_wake(running: Service) -> None:
    """Requests, sleeps and wakes come at once; in one round the HTTP process's engine is killed, too."""
    expected = ask(running)["choices"]
    url = str(running.http.base_url)

    def post(path: str) -> httpx2.Response:
        body = {**SAMPLED, "max_tokens": 20} if path == "v1/completions" else None
        return httpx2.post(f"{url}/{path}", json=body, timeout=60)

    with ThreadPoolExecutor(12) as pool:
        for number in range(6):
            asked = [pool.submit(post, path) for path in ("sleep", *["v1/completions"] * 4, "sleep", "wake_up")]
            if number == 3 and (engine := children_of(running.process.pid).get("worker")) is not None:
                os.kill(engine, signal.SIGKILL)
            answers = [answer.result() for answer in asked]
            assert [answer.status_code for answer in answers] == [200] * len(answers), [a.text for a in answers]
            assert [answer.json()["choices"] for answer in answers[1:5]] == [expected] * 4


def test_sigterm_while_it_wakes_ends_the_service_with_its_answer(model: Path, tmp_path: Path) -> None:
    with service(model, tmp_path) as running, ThreadPoolExecutor(1) as pool:
        running.http.post("/sleep")
        answer = pool.submit(ask, running)
        wait_until(lambda: "worker" in children_of(running.process.pid))
        running.process.send_signal(signal.SIGTERM)
        assert answer.result()["choices"][0]["finish_reason"] == "length"
        assert running.end() == 0
        assert running.leaves_nothing()
