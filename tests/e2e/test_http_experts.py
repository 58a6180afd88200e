"""`/v1/experts` over HTTP: of a real service, and of one whose model has no experts."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experts.routing.files import load_statistics, load_trace
from moeserve.engine.experts.settings import statistics_key
from tests.support.frontend import frontend
from tests.support.service import Service, descendants, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Service]:
    model = write_tiny_checkpoint(folder / "model")
    with service(model, folder / "run", "--expert-statistics", str(folder / "statistics")) as started:
        yield started


def complete(running: Service, prompt: str) -> int:
    """The number of tokens that were computed."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    usage = running.http.post("/v1/completions", json=body).json()["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] + 7)


def experts(running: Service) -> dict[str, Any]:
    answer = running.http.get("/v1/experts")
    assert answer.status_code == 200, answer.text
    described: dict[str, Any] = answer.json()
    return described


def test_load_is_what_was_computed(running: Service) -> None:
    before = experts(running)
    computed = complete(running, "where do the tokens go?")
    after = experts(running)
    assert after["recording"]["tokens"] == before["recording"]["tokens"] + computed
    gained = sum(after["load"][0]) - sum(before["load"][0])
    assert gained == pytest.approx(computed * after["top_k"], rel=0.01)
    assert len(after["load"]) == len(after["layers"]) == len(after["balancedness"]["experts"])
    assert "placement" not in after


def test_metrics_tell_of_experts(running: Service) -> None:
    complete(running, "count me")
    wait_until(lambda: "moeserve_expert_recorded_tokens_total" in running.http.get("/metrics").text)
    text = running.http.get("/metrics").text
    assert 'moeserve_expert_balancedness{layer="0",of="experts"}' in text
    assert "moeserve_expert_remote_rows" not in text


def test_statistics_are_saved_on_demand(running: Service, folder: Path) -> None:
    complete(running, "remember this")
    assert running.http.post("/v1/experts/statistics").json()["status"] == "ok"
    assert load_statistics(folder / "statistics", statistics_key(folder / "model")).load().sum() > 0


def test_a_disk_that_hangs_holds_up_no_generation(folder: Path) -> None:
    (folder / "hangs").mkdir()
    model = write_tiny_checkpoint(folder / "same")
    settings = ("--expert-statistics", str(folder / "hangs" / "s"), "--engine-timeout", "4")
    with service(model, folder / "hangs", *settings) as running:
        (engine,) = descendants(running.pids["worker"])
        # Opening a FIFO that nobody reads waits, as writing to a disk that does not answer does.
        os.mkfifo(folder / "hangs" / f".s.{engine}.partial")
        saving = running.http.post("/v1/experts/statistics")
        assert (saving.status_code, saving.json()["error"]["code"]) == (503, "engine_silent")
        assert complete(running, "still here") > 0
        again = running.http.post("/v1/experts/statistics")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "not_possible_now")
        assert running.http.get("/ready").status_code == 200


def test_a_trace_is_recorded_and_handed_over(running: Service, folder: Path) -> None:
    post = running.http.post
    assert post("/v1/experts/trace", json={"action": "stop"}).status_code == 409
    for wrong in (0, 2**31, 2**64, 2**70):
        assert post("/v1/experts/trace", json={"action": "start", "max_tokens": wrong}).status_code == 400
    assert post("/v1/experts/trace", json={"action": "record"}).status_code == 400
    assert post("/v1/experts/trace", json={"action": "start", "token_ids": True}).json()["status"] == "recording"
    computed = [complete(running, prompt) for prompt in ("one text", "another text")]
    answer = post("/v1/experts/trace", json={"action": "stop"})
    assert answer.status_code == 200, answer.text
    (folder / "trace").write_bytes(answer.content)
    trace = load_trace(folder / "trace")
    assert [int((trace.requests == number).sum()) for number in (0, 1)] == computed
    assert bytes(trace.token_ids[:8].tolist()).decode() == "one text"


def test_a_model_without_experts_has_none_to_show(tmp_path: Path) -> None:
    with frontend(tmp_path) as dense:
        for answer in (
            dense.http.get("/v1/experts"),
            dense.http.post("/v1/experts/statistics"),
            dense.http.post("/v1/experts/trace", json={"action": "start"}),
        ):
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "no_experts"
