"""The KV of preempted requests: the decision alone, and requests that come back in a pool that is too small."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.scheduling.overflow import Fate, Overflow, OverflowCosts, Victim, fate_of
from tests.support.examples import examples
from tests.support.kv_life import Disk, Life, ask
from tests.support.overflow_simulation import Study, seconds_of

COSTS = OverflowCosts(compute_s=1.0, read_s=0.01, write_s=0.02, num_running=0, num_blocks=1010)


@pytest.mark.parametrize(
    ("victim", "costs", "policy", "fate"),
    [
        (Victim(40, 0, 40), COSTS, Overflow.AUTO, Fate.KEEP),
        (Victim(40, 0, 39), COSTS, Overflow.AUTO, Fate.SWAP),
        (Victim(101, 0, 0), COSTS, Overflow.AUTO, Fate.RECOMPUTE),
        (Victim(40, 25, 0), COSTS, Overflow.AUTO, Fate.SWAP),
        (Victim(40, 26, 0), COSTS, Overflow.AUTO, Fate.RECOMPUTE),
        # With 9 others 10 s are lost by computing; by reading 1.01 s, and 0.909 s more for the tenth of memory.
        (Victim(101, 0, 0), OverflowCosts(1.0, 0.01, 0.02, 9, 1010), Overflow.AUTO, Fate.SWAP),
        (Victim(101, 0, 0), OverflowCosts(1.0, 0.047, 0.02, 9, 1010), Overflow.AUTO, Fate.SWAP),
        (Victim(101, 0, 0), OverflowCosts(1.0, 0.048, 0.02, 9, 1010), Overflow.AUTO, Fate.RECOMPUTE),
        (Victim(101, 0, 0), COSTS, Overflow.SWAP, Fate.SWAP),
        (Victim(40, 0, 0), COSTS, Overflow.RECOMPUTE, Fate.RECOMPUTE),
        (Victim(40, 0, 0), OverflowCosts(1.0, None, None, 0, 1010), Overflow.AUTO, Fate.SWAP),
        (Victim(40, 0, 0), OverflowCosts(0.0, 0.01, 0.01, 0, 1010), Overflow.AUTO, Fate.SWAP),
        (Victim(0, 0, 0), COSTS, Overflow.SWAP, Fate.KEEP),
    ],
)
def test_the_cheaper_way_is_taken_unless_nothing_is_lost_or_the_setting_says(
    victim: Victim, costs: OverflowCosts, policy: Overflow, fate: Fate
) -> None:
    assert fate_of(victim, costs, policy) is fate


OPTIONS: dict[str, Any] = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 6}


def run(policy: Overflow, seed: int = 1) -> Life:
    life = Life(Disk(), random.Random(seed), **OPTIONS, overflow=policy)
    for number in range(6):
        ask(life, f"{number}", [number, *range(20)], max_tokens=30)
    life.settle()
    life.check_all_done()
    return life


@pytest.mark.parametrize("policy", list(Overflow))
def test_preempted_requests_come_back_as_the_setting_says(policy: Overflow) -> None:
    life = run(policy)
    disk = life.tier
    assert disk is not None
    assert life.scheduler.counters.preemptions > 0
    assert sum(disk.counters.fates.values()) == life.scheduler.counters.preemptions
    assert (disk.counters.read_bytes > 0) is (policy is not Overflow.RECOMPUTE)


@examples(0.3)
@given(st.integers(0, 2**32), st.sampled_from(Overflow))
def test_swapped_or_computed_again_tokens_are_the_same(seed: int, policy: Overflow) -> None:
    # `check_all_done` compares every token with an undisturbed run.
    run(policy, seed)


@pytest.mark.parametrize("token_ms", [0.05, 1.5, 5.0])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_auto_takes_no_longer_than_the_better_fixed_policy(share: float, token_ms: float) -> None:
    # On a scripted clock: every run is the same.
    study = Study(share, token_ms / 1000)
    found = {policy: seconds_of(study, policy) for policy in Overflow}
    assert found[Overflow.AUTO] <= 1.03 * min(found.values())
