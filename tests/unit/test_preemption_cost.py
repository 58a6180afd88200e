"""What preemption costs: tokens computed again and time on a scripted clock, in pools that do not hold all requests."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from moeserve.plan import ChunkResult, Request, SamplingParams, StepResult
from moeserve.scheduler import Scheduler
from radix_cache import PrefixCache
from tests.support.overload_simulation import step_seconds

SEATS = 16
STOP = 7


@dataclass
class Cost:
    seconds: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    num_preemptions: int = 0


def requests() -> list[tuple[int, int]]:
    """Return (tokens of the prompt, tokens until it stops): nobody knows the latter before."""
    random = Random(1)
    return [(random.randrange(20, 200), random.randrange(50, 250)) for _ in range(48)]


def num_held() -> int:
    """Return the blocks that requests hold, summed over their steps."""
    return sum(-(-(prompt + done) // 16) for prompt, count in requests() for done in range(count))


def mean_need() -> int:
    """Return the blocks that the requests in all seats hold on average."""
    return SEATS * num_held() // sum(count for _, count in requests())


@cache
def cost(num_blocks: int) -> Cost:
    scheduler = Scheduler(
        [PrefixCache(num_blocks, 16)],
        max_num_seqs=SEATS,
        max_num_batched_tokens=256,
        max_num_queued_reqs=100,
        max_model_len=800,
    )
    lengths, num_tokens, random, found = {}, dict[str, int](), Random(2), Cost()
    for number, (prompt, count) in enumerate(requests()):
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
    room, tight = cost(4 * mean_need()), cost(int(part * mean_need()))
    assert room.num_preemptions == 0
    assert tight.num_preemptions > 0
    assert tight.seconds <= most * room.seconds


@pytest.mark.parametrize(("part", "most"), [(0.9, 1.08), (0.7, 1.12), (0.5, 1.18)])
def test_few_tokens_are_computed_again_and_memory_is_used(part: float, most: float) -> None:
    room, tight = cost(4 * mean_need()), cost(int(part * mean_need()))
    assert tight.num_preemptions <= len(requests()) // 2
    assert tight.num_rows <= most * room.num_rows
    # No scheduler takes fewer steps: a pool has only so many blocks in each.
    least = max(room.num_steps, num_held() / int(part * mean_need()))
    assert tight.num_steps <= 1.2 * least
