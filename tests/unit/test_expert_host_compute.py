"""Sharing absent experts between the host and the link, replayed: no slower than the better of either alone."""

from dataclasses import replace

import pytest

from benchmarks.experts.host_compute import LOADS, MACHINES, Load, Machine, rates

# Which experts move in, and when, depends on the last digits of times; in longer runs it evens out.
CHANCE = 0.005


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_sharing_serves_no_fewer_tokens_than_copying_alone_and_than_computing_alone(machine: Machine, load: Load):
    found = rates(machine, replace(load, num_steps=max(load.num_steps // 4, 8)), seed=0)
    assert found["auto"] >= (1 - CHANCE) * max(found["copy"], found["host"]), found
