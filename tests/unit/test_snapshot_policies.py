"""Where snapshots of recurrent states are kept decides how much of their prompts agents find cached."""

from __future__ import annotations

from collections.abc import Iterable

from moeserve.bench.workloads import Shape
from moeserve.scheduling.request_states import (
    DECODE_INTERVAL_TOKENS,
    MIN_GAIN_TOKENS,
    PROMPT_INTERVAL_TOKENS,
    ChoosePositions,
    StatePolicy,
    wanted_positions,
)
from tests.support.agents_load import NUM_SLOTS, agents_load, with_snapshots

# 4 GiB of KV and a quarter of that for the states of Qwen3.5-35B-A3B.
MEMORY, NUM_SNAPSHOTS = 209_715, 16


def at_the_last(start: int, known: int, marks: Iterable[int], last: int, min_gain: int) -> list[int]:
    return [last] if last - start >= min_gain else []


def at_every_block(start: int, known: int, marks: Iterable[int], last: int, min_gain: int) -> list[int]:
    return sorted({position for position in (*range(0, last, 16), last) if position > start})


def num_cached(policy: StatePolicy | None) -> int:
    load = agents_load(Shape())
    service = with_snapshots(MEMORY if policy else MEMORY * 5 // 4, NUM_SNAPSHOTS, load, policy)
    service.serve(load)
    assert service.num_prompt > 24_000
    return service.num_cached


def keep(choose: ChoosePositions, *, foresees: bool = False, prompt_interval: int = 2**30) -> StatePolicy:
    return StatePolicy(NUM_SLOTS, MIN_GAIN_TOKENS, DECODE_INTERVAL_TOKENS, prompt_interval, choose, foresees)


def test_agents_reuse_nearly_all_with_states_in_a_quarter_of_the_memory_for_kv() -> None:
    ours = num_cached(keep(wanted_positions, foresees=True, prompt_interval=PROMPT_INTERVAL_TOKENS))
    every_block = num_cached(keep(at_every_block))
    assert ours >= 0.95 * num_cached(None)
    assert ours >= every_block > num_cached(keep(at_the_last))
