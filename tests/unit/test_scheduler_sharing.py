"""Requests that begin alike compute what they share once, and nobody waits for one that has left."""

from __future__ import annotations

import pytest

from moeserve.plan import FinishReason, SamplingParams
from tests.support.scheduler_simulation import Simulation

SHARED = [(7 * i + 3) % 50 for i in range(100)]


def add_agents(simulation: Simulation, num_agents: int = 4) -> None:
    for index in range(num_agents):
        simulation.add(f"agent {index}", [*SHARED, index, 1, 2], SamplingParams(max_tokens=5, seed=index))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [8, 24, 1000])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_agents_that_arrive_together_prefill_their_shared_prompt_once(block_size: int, budget: int, depth: int) -> None:
    simulation = Simulation(num_blocks=1000 // block_size, block_size=block_size, budget=budget, depth=depth)
    add_agents(simulation)
    simulation.run()
    num_shared = 100 // block_size * block_size
    assert simulation.oracle.num_computed_tokens == num_shared + 4 * (103 - num_shared + 4)
    assert [r.request.num_cached_tokens for r in simulation.records.values()] == [0] + [num_shared] * 3
    simulation.check_all_done()


def test_siblings_of_one_prompt_share_all_its_full_blocks() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, budget=16)
    for seed in range(5):
        simulation.add(f"choice {seed}", SHARED[:34], SamplingParams(max_tokens=3, seed=seed))
    simulation.run()
    assert simulation.oracle.num_computed_tokens == 32 + 5 * (2 + 2)
    simulation.check_all_done()


def test_shared_blocks_are_held_once() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=24)
    add_agents(simulation)
    while simulation.scheduler.num_waiting or any(not r.output for r in simulation.records.values()):
        simulation.step()
    assert simulation.cache.counts.num_leased <= 25 + 4 * 2
    simulation.run_and_check()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("how", ["abort", "error"])
def test_when_the_leader_leaves_a_follower_goes_on_from_there(how: str, depth: int) -> None:
    for when in range(1, 14):
        simulation = Simulation(num_blocks=100, block_size=4, budget=8, depth=depth)
        add_agents(simulation)
        if how == "error":
            start = 8 * (when - 1)
            simulation.oracle.fails = lambda chunk, start=start: (  # type: ignore[misc]
                chunk.request_id == "agent 0" and chunk.start == start
            )
        else:
            for _ in range(when):
                simulation.step()
            simulation.abort("agent 0")
        simulation.run()
        leader, *followers = simulation.records.values()
        assert leader.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        assert [r.finish_reason for r in followers] == [FinishReason.LENGTH] * 3
        simulation.check_all_done()
        if how == "abort":
            # The work of one chunk is lost at most, if it was in flight.
            assert simulation.oracle.num_computed_tokens <= 100 + 4 * (3 + 4) + 8


def test_a_follower_does_not_hold_up_those_who_share_nothing() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=110)
    add_agents(simulation, 2)
    simulation.add("other", [1, 2, 3], SamplingParams(max_tokens=3))
    simulation.step()
    assert [chunk.request_id for chunk in simulation.plans[0].chunks] == ["agent 0", "other"]
    simulation.run_and_check()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_does_not_wait_for_a_leader_that_gets_no_budget(depth: int) -> None:
    simulation = Simulation(num_blocks=400, block_size=4, budget=8, depth=depth)
    patient = simulation.add("patient", [*SHARED, 9], SamplingParams(max_tokens=2), priority=5)
    for _ in range(3):
        simulation.step()
    simulation.add("noise", [1] * 80, SamplingParams(max_tokens=1), priority=1)
    simulation.step()
    simulation.add("urgent", [*SHARED, 8], SamplingParams(max_tokens=2), priority=0)
    simulation.run()
    ends = {chunk.request_id: plan.step for plan in simulation.plans for chunk in plan.chunks}
    assert ends["urgent"] < ends["patient"]
    assert ends["noise"] < ends["patient"]
    assert ends["urgent"] < ends["noise"] or depth
    # The patient one has become a follower, and takes over what the urgent one has computed.
    assert patient.request.num_cached_tokens > 0
    assert simulation.oracle.num_computed_tokens == 100 + 2 * (1 + 1) + 80
    simulation.check_all_done()


def test_prompt_logprobs_see_every_target_once_and_take_nothing_from_the_cache() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=8)
    simulation.add("before", SHARED[:30], SamplingParams(max_tokens=2))
    simulation.run()
    scored = simulation.add("scored", SHARED[:30], SamplingParams(max_tokens=2, prompt_logprobs=1))
    simulation.run()
    assert scored.request.num_cached_tokens == 0
    assert len(scored.prompt_logprobs) == 29
    after = simulation.add("after", SHARED[:30], SamplingParams(max_tokens=2))
    simulation.run()
    assert after.request.num_cached_tokens == 28
    simulation.check_all_done()


def test_prompt_logprobs_that_were_told_are_not_computed_again_after_a_preemption() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, budget=8)
    simulation.add("first", SHARED[:4], SamplingParams(max_tokens=50))
    scored = simulation.add("scored", SHARED[10:30], SamplingParams(max_tokens=30, prompt_logprobs=0))
    simulation.run()
    assert scored.request.num_preemptions > 0
    assert len(scored.prompt_logprobs) == 19
    targets = [c.extras.prompt_targets for p in simulation.plans for c in p.chunks if c.extras is not None]
    assert sum(len(t) for t in targets if t is not None) == 19
    simulation.check_all_done()


def test_prompt_logprobs_that_were_told_are_told_once_when_a_prompt_is_preempted_midway() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, budget=3, max_num_seqs=2)
    simulation.add("first", SHARED[:4], SamplingParams(max_tokens=50))
    scored = simulation.add("scored", SHARED[10:58], SamplingParams(max_tokens=3, prompt_logprobs=0))
    while not scored.request.num_preemptions:
        simulation.step()
    num_told = len(scored.prompt_logprobs)
    assert 0 < num_told < 47
    num_plans = len(simulation.plans)
    simulation.run()
    again = [c for p in simulation.plans[num_plans:] for c in p.chunks if c.request_id == "scored" and c.start < 47]
    with_targets = [c for c in again if c.extras is not None and c.extras.prompt_targets is not None]
    assert min(c.start + len(c.token_ids) for c in with_targets) > num_told
    assert max(c.start + len(c.token_ids) for c in again if c not in with_targets) <= num_told
    simulation.check_all_done()


def planned_together(simulation: Simulation) -> list[str]:
    simulation.step()
    return [chunk.request_id for chunk in simulation.plans[-1].chunks]


def test_nobody_waits_for_another_namespace() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=1000)
    for namespace in ("a", "b"):
        simulation.add(namespace, SHARED, SamplingParams(max_tokens=1), namespace=namespace)
    assert planned_together(simulation) == ["a", "b"]


def test_nobody_waits_for_equal_tokens_behind_another_prefix() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=1000)
    simulation.add("warm", [1, 2, 3, 4, 5], SamplingParams(max_tokens=1))
    simulation.run()
    simulation.add("other", [5, 6, 7, 8, *SHARED], SamplingParams(max_tokens=1))
    simulation.add("known", [1, 2, 3, 4, *SHARED], SamplingParams(max_tokens=1))
    assert planned_together(simulation) == ["other", "known"]


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_nobody_waits_for_what_may_not_be_shared(prompt_logprobs: int | None) -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=1000, caching=prompt_logprobs is not None)
    for name in ("a", "b"):
        simulation.add(name, SHARED, SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs))
    assert planned_together(simulation) == ["a", "b"]


def test_nobody_waits_for_one_that_is_far_behind() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=8)
    simulation.add("warm", SHARED[:41], SamplingParams(max_tokens=1))
    simulation.run()
    simulation.add("scored", SHARED, SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert planned_together(simulation) == ["scored"]
    simulation.add("known", SHARED, SamplingParams(max_tokens=1), priority=-1)
    assert planned_together(simulation) == ["known"]
