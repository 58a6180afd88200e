"""What preemption costs: tokens computed again and time on a scripted clock, in pools that do not hold all requests."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from moeserve.plan import ChunkResult, Request, SamplingParams, StepResult
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache
from tests.support.overload_simulation import seconds_of, step_seconds

SEATS = 16
STOP = 7


@dataclass
class Cost:
    seconds: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    num_preemptions: int = 0


# (tokens of the prompt, tokens until it stops): nobody knows the latter before.
Load = tuple[tuple[int, int], ...]
_lengths = Random(1)
MIXED: Load = tuple((_lengths.randrange(20, 200), _lengths.randrange(50, 250)) for _ in range(48))
# An attack on 0.1.0: requests that begin together, in memory for a third of what they need on average.
TOGETHER: Load = ((20, 350),) * SEATS
NUM_BLOCKS_OF_ATTACK = 68


def num_held(load: Load) -> int:
    """Return the blocks that requests hold, summed over their steps."""
    return sum(-(-(prompt + done) // 16) for prompt, count in load for done in range(count))


def mean_need(load: Load) -> int:
    """Return the blocks that the requests in all seats hold on average."""
    return SEATS * num_held(load) // sum(count for _, count in load)


def least_steps(load: Load, num_blocks: int) -> float:
    """Return how many steps any scheduler takes at least: a pool has a fixed number of blocks in each."""
    return max(cost(load, 4 * mean_need(load)).num_steps, num_held(load) / num_blocks)


@cache
def cost(load: Load, num_blocks: int) -> Cost:
    scheduler = Scheduler(
        [PrefixCache(num_blocks, 16)],
        max_num_seqs=SEATS,
        max_num_batched_tokens=256,
        max_num_queued_reqs=100,
        max_model_len=800,
    )
    lengths, num_tokens, random, found = {}, dict[str, int](), Random(2), Cost()
    for number, (prompt, count) in enumerate(load):
        lengths[f"{number}"] = count
        tokens = array("i", (random.randrange(1000) for _ in range(prompt)))
        scheduler.add(Request(f"{number}", tokens, SamplingParams(500, stop_token_ids=(STOP,))))
    while not scheduler.is_idle:
        plans = scheduler.schedule()
        assert plans is not None
        found.seconds += step_seconds(plans[0])
        found.num_steps += 1
        found.num_rows += plans[0].num_tokens
        results = []
        for chunk in plans[0].chunks:
            name = chunk.request_id
            num_tokens[name] = num_tokens.get(name, 0) + (chunk.sampling is not None)
            token = STOP if num_tokens[name] == lengths[name] else 5
            results.append(ChunkResult(None if chunk.sampling is None else token))
        scheduler.commit(plans, [StepResult(plans[0].step, results)])
    found.num_preemptions = scheduler.counters.preemptions
    assert num_tokens == lengths
    return found


@pytest.mark.parametrize(("part", "most"), [(1.0, 1.1), (0.8, 1.25), (0.7, 1.3)])
def test_pressure_costs_less_than_a_third_of_the_time_with_room(part: float, most: float) -> None:
    room, tight = cost(MIXED, 4 * mean_need(MIXED)), cost(MIXED, int(part * mean_need(MIXED)))
    assert room.num_preemptions == 0
    assert tight.num_preemptions > 0
    assert tight.seconds <= most * room.seconds


@pytest.mark.parametrize(
    ("load", "num_blocks"),
    [
        *((MIXED, int(part * mean_need(MIXED))) for part in (1.0, 0.8, 0.7, 0.5, 0.35)),
        (TOGETHER, NUM_BLOCKS_OF_ATTACK),
    ],
)
def test_pressure_costs_less_than_a_third_of_the_least_time(load: Load, num_blocks: int) -> None:
    """The least: as many steps as the pool enforces, in which every token is computed once."""
    room, tight = cost(load, 4 * mean_need(load)), cost(load, num_blocks)
    steps = least_steps(load, num_blocks)
    assert tight.seconds <= 1.25 * steps * seconds_of(room.num_rows / steps)


@pytest.mark.parametrize(("part", "most"), [(0.9, 1.08), (0.7, 1.12), (0.5, 1.18)])
def test_few_tokens_are_computed_again_and_memory_is_used(part: float, most: float) -> None:
    num_blocks = int(part * mean_need(MIXED))
    room, tight = cost(MIXED, 4 * mean_need(MIXED)), cost(MIXED, num_blocks)
    assert tight.num_preemptions <= len(MIXED) // 2
    assert tight.num_rows <= most * room.num_rows
    assert tight.num_steps <= 1.2 * least_steps(MIXED, num_blocks)
