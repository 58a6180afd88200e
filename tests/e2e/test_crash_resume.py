"""The model process dies, hangs or is told to end while requests are open: they go on in its next life as if nothing
had happened. Every answer is compared with that of a run which nobody disturbed, event by event."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice, takewhile
from typing import Any

import httpx2
import pytest

from tests.support.crash_traffic import KINDS, UNSEEDED, Answered, Traffic
from tests.support.service import Service, children_of, descendants, is_alive, is_ready, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

COMPARED = {name: kind for name, kind in KINDS.items() if name not in UNSEEDED}
# One that is open for long after all have begun, however fast the machine is.
_PATH, _BODY = KINDS["sampled stream"]
COMPARED["long stream"] = _PATH, _BODY | {"max_tokens": 1500}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("m"))
    # Without drafts: a stream that is sent a second time would be whole before anybody can kill the engine under it.
    settings = ("--engine-timeout", "5", "--max-restarts", "1000", "--max-model-len", "4096")
    settings += ("--speculative-config", "none")
    with service(model, tmp_path_factory.mktemp("s"), *settings) as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(running: Service) -> dict[str, Answered]:
    answers = Traffic(str(running.http.base_url), COMPARED).start().wait()
    assert {name: answer.status for name, answer in answers.items()} == dict.fromkeys(COMPARED, 200)
    return answers


def engine_of(running: Service) -> int | None:
    """Return the pid of the process that computes: a copy of the one that has loaded the model. None between two."""
    return next(iter(descendants(children_of(running.process.pid)["worker"])), None)


def hit(running: Service, number: signal.Signals) -> int:
    """Signal the model process and return its pid."""
    engine = engine_of(running)
    assert engine is not None
    os.kill(engine, number)
    return engine


def hit_and_wait(running: Service, number: signal.Signals) -> None:
    """Signal the model process and wait until another one has its requests."""
    before = num_restarts(running)
    worker = hit(running, number)
    # Until the HTTP process has heard of the end it still says that it is ready.
    wait_until(lambda: num_restarts(running) > before and is_ready(running) and not is_alive(worker))


def num_restarts(running: Service) -> float:
    return running.figure("moeserve_engine_restarts_total")


def assert_nothing_is_left(running: Service) -> None:
    """No block is leased, and of the engines that are gone there is neither a process nor a socket."""
    # The process that holds the model may not be started again yet.
    wait_until(lambda: len(children_of(running.process.pid)) == 2)
    wait_until(lambda: is_ready(running))
    wait_until(lambda: 'moeserve_kv_blocks{state="leased"} 0.0' in running.http.get("/metrics").text)
    [run_dir] = running.run_root.iterdir()
    assert len(list(run_dir.glob("engine.*"))) == len(list(run_dir.glob("heartbeat.*"))) == 1


def assert_same(answers: dict[str, Answered], undisturbed: dict[str, Answered]) -> None:
    for name, answer in answers.items():
        assert answer == undisturbed[name], name


def test_open_requests_of_every_kind_go_on_after_a_crash(running: Service, undisturbed: dict[str, Answered]) -> None:
    before = num_restarts(running)
    traffic = Traffic(str(running.http.base_url), COMPARED).start()
    assert traffic.admitted.wait(60)
    worker = hit(running, signal.SIGKILL)
    answers = traffic.wait()
    assert_same(answers, undisturbed)
    # Answers that were open then say so; short ones may have ended before.
    assert answers["long stream"].resumed
    assert not any(answer.resumed for answer in undisturbed.values())
    assert not is_alive(worker)
    assert_nothing_is_left(running)
    assert num_restarts(running) == before + 1
    assert '"engine_deaths": 1' in running.errors.read_text()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_hang_and_an_orderly_end_are_pauses_too(
    running: Service, undisturbed: dict[str, Answered], number: signal.Signals
) -> None:
    some = {name: COMPARED[name] for name in ("sampled stream", "tool call")}
    traffic = Traffic(str(running.http.base_url), some).start()
    assert traffic.started.wait(60)
    hit(running, number)
    assert_same(traffic.wait(), {name: undisturbed[name] for name in some})
    assert_nothing_is_left(running)


def test_without_the_process_that_holds_the_model_it_is_loaded_again(
    running: Service, undisturbed: dict[str, Answered]
) -> None:
    some = {name: COMPARED[name] for name in ("penalties", "schema")}
    traffic = Traffic(str(running.http.base_url), some).start()
    assert traffic.started.wait(60)
    holder, engine = children_of(running.process.pid)["worker"], engine_of(running)
    os.kill(holder, signal.SIGKILL)
    assert_same(traffic.wait(), {name: undisturbed[name] for name in some})
    assert engine is not None
    # The answers may have been whole before.
    wait_until(lambda: not is_alive(engine))
    assert_nothing_is_left(running)


def test_an_engine_whose_end_nobody_tells_is_loaded_again(running: Service, undisturbed: dict[str, Answered]) -> None:
    some = {"sampled stream": COMPARED["sampled stream"]}
    traffic = Traffic(str(running.http.base_url), some).start()
    assert traffic.started.wait(60)
    holder = children_of(running.process.pid)["worker"]
    os.kill(holder, signal.SIGSTOP)
    hit(running, signal.SIGKILL)
    assert_same(traffic.wait(), {name: undisturbed[name] for name in some})
    # The answer may have been whole before.
    wait_until(lambda: not is_alive(holder))
    assert_nothing_is_left(running)


def test_requests_that_come_in_the_pause_wait_for_its_end(running: Service, undisturbed: dict[str, Answered]) -> None:
    worker = hit(running, signal.SIGSEGV)
    wait_until(lambda: not is_alive(worker))
    assert running.http.get("/health").status_code == 200
    some = {name: COMPARED[name] for name in ("greedy", "chat")}
    assert_same(Traffic(str(running.http.base_url), some).start().wait(), {name: undisturbed[name] for name in some})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_no_number_of_unrelated_ends_ends_a_stream(running: Service, number: signal.Signals) -> None:
    # So many that the last signal comes before their end.
    asked: dict[str, Any] = {"prompt": f"once upon {number.name}", "max_tokens": 4000, "temperature": 0}
    events, pieces = running.stream(tells_resumed=True, **asked), list[str]()
    for _ in range(3):
        # Beyond where it was, so that it is no suspect of the last end any more.
        pieces += texts_of(islice(events, 20))
        hit_and_wait(running, number)
        pieces += texts_of(takewhile(lambda event: "resumed" not in event, events))
    pieces += texts_of(islice(events, 20))
    events.close()  # type: ignore[attr-defined]
    found = "".join(pieces)
    again = running.stream(**asked)
    undisturbed = next(text for text in accumulate(texts_of(again)) if len(text) >= len(found))
    again.close()  # type: ignore[attr-defined]
    assert undisturbed.startswith(found)
    assert_nothing_is_left(running)


def test_an_answer_with_a_long_echoed_prompt_says_that_it_went_on(running: Service) -> None:
    def num_drawn() -> float:
        return running.figure("moeserve_generation_tokens_total")

    url = f"{running.http.base_url}/v1/completions"
    # On a busy machine a signal may come when the answer is whole.
    for attempt in range(10):
        body = {"model": "m", "prompt": [attempt, *[7] * 2000], "echo": True, "logprobs": 1, "max_tokens": 1500}
        before = num_drawn()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx2.post, url, json={**body, "ignore_eos": True}, timeout=90)
            wait_until(lambda before=before: num_drawn() > before)
            hit(running, signal.SIGKILL)
            answer = asked.result().json()
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == 2001 + 1500
        if answer["usage"].get("resumed"):
            return
    pytest.fail("no answer says that another engine went on with it")


def texts_of(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    return (event["choices"][0]["text"] for event in events)


def test_an_abort_in_the_pause_leaves_nothing_behind(running: Service) -> None:
    events = running.stream(max_tokens=4000)
    next(events)
    before = num_restarts(running)
    hit(running, signal.SIGKILL)
    events.close()
    wait_until(lambda: num_restarts(running) > before)
    assert_nothing_is_left(running)


def test_a_killed_frontend_is_started_again_and_the_engine_gives_its_requests_up(running: Service) -> None:
    events = running.stream(max_tokens=4000)
    next(events)
    worker = children_of(running.process.pid)["worker"]
    os.kill(children_of(running.process.pid)["frontend"], signal.SIGKILL)
    assert list(events)[-1]["error"]["type"] == "server_unavailable"
    wait_until(lambda: is_ready(running))
    assert children_of(running.process.pid)["worker"] == worker
    assert_nothing_is_left(running)
