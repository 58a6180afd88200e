"""Thousands of requests of every kind, many given up at any time, and the dearest ones that a client can think of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.service import Service, service
from tests.support.soak import SETTINGS, soak
from tests.support.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("service"), *SETTINGS) as started:
        yield started


def test_mixed_requests_of_which_many_are_given_up_get_the_answers_of_an_idle_service(running: Service) -> None:
    run = soak(running, known=68, count=400, clients=16, seed=3)
    assert run.wrong == []
    assert run.given_up > 80
    assert set(run.statuses) == {200, 400, 404}
    assert run.metric("moeserve_preemptions_total") > 0
    run.assert_nothing_is_lost()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_thousand_requests_lose_no_block_and_no_memory(running: Service) -> None:
    run = soak(running, known=340, count=20_000, clients=24, seed=4)
    assert run.wrong == []
    assert run.given_up > 5000
    run.assert_nothing_is_lost()
    slopes = run.memory.slopes(warm_up=5000)
    print(slopes)
    assert max(slopes.values()) < 1.0
