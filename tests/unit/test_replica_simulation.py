"""The simulation of routing among replicas: every request is answered once, and each run is the same."""

from __future__ import annotations

import pytest

from benchmarks.replicas import Routing, Simulation, agents, paced

NAMES = tuple(Routing().policies)


@pytest.mark.parametrize("name", NAMES)
def test_every_request_gets_a_first_token_and_a_second_run_is_the_same(name: str) -> None:
    asks = paced(agents(20), 3)
    first, second = (Simulation(3, Routing().policies[name]).run(asks) for _ in range(2))
    assert first == second
    assert len(first.ttft_s) == len(asks)
    assert min(first.ttft_s) > 0
    assert 0 < first.hit_rate < 1


def test_with_one_replica_all_routings_are_the_same() -> None:
    asks = paced(agents(20), 1)
    outcomes = [Simulation(1, Routing().policies[name]).run(asks) for name in NAMES]
    assert all(outcome == outcomes[0] for outcome in outcomes)
