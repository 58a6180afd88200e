"""Requests of a model with sliding windows: a second, smaller pool of blocks changes no token and loses no block."""

from __future__ import annotations

from random import Random

import pytest

from moeserve.bench.workloads import Shape
from moeserve.plan import SamplingParams
from moeserve.scheduling.request_states import StatePolicy
from radix_cache.window_blocks import least_window_blocks
from tests.support.agents_load import Layers, agents_load, caches, reused
from tests.support.parameters import first
from tests.support.scheduler_simulation import Simulation
from tests.unit.test_scheduler_oracle import converse, make_conversations

GREEDY = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(("block_size", "window"), first(4, [(1, 7), (4, 5), (4, 9), (16, 10), (1, 1), (3, 5), (4, 4)]))
def test_conversations_with_windows_get_the_tokens_of_an_undisturbed_run(block_size: int, window: int) -> None:
    longest = 30 + 6 + 12 + 3 + 12
    tiny, roomy = -(-longest // block_size) + 1, 1000 // block_size
    least = least_window_blocks(window, block_size)
    num_hits = 0
    for number in range(8):
        random = Random(f"{number} {block_size} {window}")
        simulation = Simulation(
            num_blocks=random.choice([tiny, roomy]),
            block_size=block_size,
            budget=random.choice([8, 13, 64]),
            caching=random.random() < 0.8,
            depth=number % 3,
            run_ahead=random.random() < 0.5,
            num_ranks=random.choice([1, 1, 2]),
            num_window_blocks=random.choice([least, 2 * least, 6 * least]),
            window=window,
            states=random.choice([None, None, StatePolicy(4, 1, 4)]),
            num_snapshots=8,
        )
        converse(simulation, make_conversations(random), random)
        num_hits += simulation.scheduler.counters.prefix_hit_tokens
    assert num_hits > 0


@pytest.mark.parametrize("caching", [True, False])
def test_requests_that_find_no_window_blocks_are_preempted_and_go_on(caching: bool) -> None:
    # Three requests fit by their KV blocks, one and a half by their window blocks.
    simulation = Simulation(num_blocks=64, block_size=4, window=9, num_window_blocks=6, budget=8, caching=caching)
    for index in range(3):
        simulation.add(f"{index}", [index + 1], SamplingParams(max_tokens=40, seed=index), priority=0)
    simulation.run_and_check()
    assert simulation.scheduler.counters.preemptions > 0


def test_a_request_holds_the_blocks_of_its_window_alone() -> None:
    simulation = Simulation(num_blocks=64, block_size=4, window=8, num_window_blocks=16, budget=8)
    windows = simulation.cache.windows
    record = simulation.add("long", list(range(49)), SamplingParams(max_tokens=30))
    while record.finish_reason is None:
        simulation.step()
        assert windows.num_held <= least_window_blocks(8, 4)
    simulation.check_all_done()


def test_the_next_turn_finds_what_was_generated_though_many_others_came_between() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, window=8, num_window_blocks=20, budget=16)
    first = simulation.add("first", list(range(40)), SamplingParams(max_tokens=9))
    simulation.run()
    for index in range(6):
        simulation.add(f"{index}", [index, *range(40)], SamplingParams(max_tokens=1))
        simulation.run()
    second = simulation.add("second", [*first.history, 1, 2, 3], SamplingParams(max_tokens=2))
    simulation.run()
    # The blocks inside the others' runs gave way, and not the ends.
    assert second.request.num_cached_tokens == 48
    simulation.check_all_done()


def test_requests_that_arrive_together_compute_their_common_beginning_once() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, window=8, num_window_blocks=14, budget=32)
    for index in range(4):
        simulation.add(f"{index}", [*range(48), 50 + index, *range(20)], SamplingParams(max_tokens=2))
    simulation.run()
    assert simulation.oracle.num_computed_tokens == 48 + 4 * (21 + 1)
    simulation.check_all_done()


def test_agents_find_more_of_their_prompts_in_the_same_memory() -> None:
    load = agents_load(Shape(num_agents=24, num_turns=6))
    every_second = Layers(num_full=1, num_windowed=1, window=128)
    together, apart = caches(every_second, 12_000, load.block_size)
    assert apart.num_blocks > 1.4 * together.num_blocks
    assert reused(apart, load) > 0.9 > reused(together, load)
