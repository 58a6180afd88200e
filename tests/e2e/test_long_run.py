"""Thousands of requests of every kind, many given up at any time, and the dearest ones that a client can think of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from benchmarks.poison import Memory, ask
from benchmarks.poison_corpus import SIZE, poisons
from tests.support.service import Service, children_of, service, wait_until
from tests.support.soak import SETTINGS, soak
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("service"), *SETTINGS) as started:
        yield started


def test_mixed_requests_of_which_many_are_given_up_get_the_answers_of_an_idle_service(running: Service) -> None:
    run = soak(running, known=68, count=250, clients=16, seed=3)
    assert run.wrong == []
    assert run.given_up > 50
    assert set(run.statuses) == {200, 400, 404}
    run.assert_nothing_is_lost()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_thousand_requests_lose_no_block_and_no_memory(running: Service) -> None:
    run = soak(running, known=340, count=20_000, clients=24, seed=4)
    assert run.wrong == []
    assert run.given_up > 5000
    # A machine with other work computes fewer requests at once for clients that leave, so a short run may have none.
    assert run.metric("moeserve_preemptions_total") > 0
    run.assert_nothing_is_lost()
    slopes = run.memory.slopes(warm_up=5000)
    print(slopes)
    assert max(slopes.values()) < 1.0


def send_poisons(running: Service, size: int, copies: int) -> Counter[int]:
    """Send every poison several times at once. Return how often each status was answered."""
    port = httpx2.URL(str(running.http.base_url)).port
    assert port is not None
    statuses: Counter[int] = Counter()
    with ThreadPoolExecutor(copies) as pool:
        for poison in poisons(size):
            asked = [pool.submit(ask, port, b"POST", poison.path, poison.body) for _ in range(copies)]
            found = Counter(answer.result() for answer in asked)
            assert set(found) <= {200, 400, 404, 409, 413, 503}, (poison.name, found)
            statuses += found
    return statuses


def assert_harmless(running: Service, size: int, copies: int) -> None:
    """Poisons get one answer each, which is no failure; the process keeps within its memory, and no block is lost."""
    memory = Memory(running.pids["frontend"])
    memory.forget_peaks()
    before = running.http.post("/v1/completions", json=QUESTION).json()["choices"]
    statuses = send_poisons(running, size, copies)
    assert statuses[400] > statuses[503] if copies == 1 else statuses[400]
    peak, of_helpers = memory.peaks()
    print(f"{sum(statuses.values())} poisons: {dict(statuses)}, {peak:.0f} MiB, helpers {of_helpers:.0f} MiB")
    assert peak <= 300
    assert running.http.post("/v1/completions", json=QUESTION).json()["choices"] == before
    wait_until(lambda: 'moeserve_kv_blocks{state="leased"} 0.0' in running.http.get("/metrics").text)
    assert children_of(running.process.pid) == running.pids


QUESTION = {"model": "m", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_the_dearest_requests_are_answered_and_leave_nothing(running: Service) -> None:
    assert_harmless(running, 250_000, 1)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("copies", [1, 16])
def test_the_dearest_requests_of_four_megabytes_keep_to_the_memory(running: Service, copies: int) -> None:
    assert_harmless(running, SIZE, copies)
