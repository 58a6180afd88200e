"""Requests that found no room are looked up again once something has changed, and then as if in every step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from moeserve.plan import SamplingParams
from moeserve.scheduling import arrivals, request_memory
from moeserve.scheduling.overflow import Overflow
from radix_cache import PrefixCache, fills
from radix_cache.tree import RadixTree
from tests.support.kv_life import Disk, Life, ask
from tests.support.parameters import first
from tests.support.scheduler_simulation import Simulation

LOOKERS = (arrivals, request_memory)


class AtOnce(random.Random):
    """All copies end with the next step, in their order."""

    def random(self) -> float:
        return 0.0


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count look-ups in the tree, and attempts to find room for blocks from the disk."""
    counts = Counter[str]()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(PrefixCache, "match")
    count(fills, "_extend_beside")
    return counts


def run_until_one_waits(life: Simulation) -> None:
    """Compute until a request is preempted, and one step more, in which it finds no room."""
    for _ in range(200):
        if life.scheduler.counters.preemptions:
            life.step()
            return
        life.step()
    raise AssertionError("nobody was preempted")


def test_while_nothing_changes_a_preempted_request_is_not_looked_up(looked: Counter[str]) -> None:
    life = Life(Disk(), AtOnce(), num_blocks=24, block_size=4, max_num_seqs=6, overflow=Overflow.SWAP)
    for number in range(2):
        ask(life, f"{number}", [number, *range(30)], max_tokens=56)
    run_until_one_waits(life)
    looked.clear()
    num_steps = 0
    while life.scheduler.num_running == 1 and life.scheduler.num_waiting:
        life.step()
        num_steps += 1
    # It tries to have its blocks read once they begin to leave memory, and once more when a write has ended.
    assert num_steps > 20
    assert looked.total() < 10
    life.settle()
    life.check_all_done()


def test_in_memory_alone_it_is_looked_up_once_for_each_change(looked: Counter[str]) -> None:
    simulation = Simulation(num_blocks=24, block_size=4, max_num_seqs=6)
    for number in range(2):
        simulation.add(f"{number}", [number, *range(30)], SamplingParams(max_tokens=56))
    run_until_one_waits(simulation)
    looked.clear()
    num_steps = 0
    while simulation.scheduler.num_running == 1 and simulation.scheduler.num_waiting:
        simulation.step()
        num_steps += 1
    assert num_steps > 10
    assert looked["match"] == 0
    simulation.run_and_check()
    assert looked["match"] == 1


def workload(seed: int, **options: Any) -> tuple[list[Any], int]:
    """Return the plans of random requests in memory that is too small, and the number of look-ups in the tree."""
    draw = random.Random(seed)
    life = Life(Disk(), AtOnce(), num_blocks=24, block_size=4, max_num_seqs=6, **options)
    for number in range(10):
        prompt = [draw.randrange(2), *(draw.randrange(2) for _ in range(draw.randint(1, 40)))]
        ask(life, f"{number}", prompt, max_tokens=draw.randint(1, 40))
        for _ in range(draw.randrange(6)):
            life.step()
    life.settle()
    life.check_all_done()
    return life.plans, life.scheduler.counters.preemptions


@pytest.mark.parametrize("overflow", list(Overflow))
@pytest.mark.parametrize("seed", first(6, range(100)))
def test_plans_are_as_if_every_request_was_looked_up_in_every_step(
    seed: int, overflow: Overflow, looked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look-up makes a prefix the most recently used, so that with one in every step others would leave memory first.
    monkeypatch.setattr(RadixTree, "_clock", property(lambda tree: 0, lambda tree, value: None), raising=False)
    found = workload(seed, overflow=overflow)
    num_looked = looked.total()
    for module in LOOKERS:
        monkeypatch.setattr(module, "is_still_full", lambda room, before: False)
    assert workload(seed, overflow=overflow) == found
    assert num_looked <= looked.total() - num_looked
