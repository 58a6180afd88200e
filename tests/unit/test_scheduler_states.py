"""Recurrent states in the schedule: ends of chunks, resumed states, waits, and unchanged tokens."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from moeserve.plan import Asked, CacheWish, FinishReason, Request, SamplingParams
from moeserve.scheduling.request_states import StatePolicy, wanted_positions
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache
from tests.support.kv_oracle import Record
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation

SHARED = [(7 * i + 3) % 50 for i in range(100)]
LOOPS = [(0, False), (1, False), (1, True), (2, True)]


def simulate(num_snapshots: int = 20, **changes: object) -> Simulation:
    settings: dict[str, object] = {"num_blocks": 300, "block_size": 4, "states": StatePolicy(8, 4, 16)}
    return Simulation(num_snapshots=num_snapshots, **settings | changes)  # type: ignore[arg-type]


def ask(simulation: Simulation, name: str, prompt: list[int], max_tokens: int = 3, seed: int = 0) -> Record:
    record = simulation.add(name, prompt, SamplingParams(max_tokens=max_tokens, seed=seed))
    simulation.run()
    return record


def test_positions_are_the_branching_point_the_marks_and_the_last_boundary() -> None:
    assert wanted_positions(0, 0, (), 96, 32) == [96]
    assert wanted_positions(0, 48, (), 96, 32) == [48, 96]
    assert wanted_positions(48, 48, (80,), 160, 32) == [80, 160]
    assert wanted_positions(0, 0, (400,), 96, 32) == [96]


def test_of_two_positions_close_to_each_other_the_first_stays() -> None:
    assert wanted_positions(0, 80, (), 96, 32) == [80]
    assert wanted_positions(0, 0, (32, 48, 64), 96, 32) == [32, 64, 96]
    assert wanted_positions(80, 96, (), 96, 32) == []


def test_chunks_end_where_a_snapshot_is_wanted() -> None:
    simulation = simulate(budget=64)
    ask(simulation, "first", SHARED[:50])
    ask(simulation, "other", [*SHARED[:30], *[1] * 20])
    chunks = [(c.start, len(c.token_ids), c.state.save is not None) for p in simulation.plans for c in p.chunks]
    assert chunks[:2] == [(0, 48, True), (48, 2, False)]
    # The second prompt finds KV up to 28 and no state there, so it leaves one.
    assert chunks[4:7] == [(0, 28, True), (28, 20, True), (48, 2, False)]
    simulation.check_all_done()


@pytest.mark.parametrize(("depth", "run_ahead"), LOOPS)
@pytest.mark.parametrize("budget", [8, 24, 1000])
def test_agents_that_arrive_together_compute_their_shared_prompt_once(budget: int, depth: int, run_ahead: bool) -> None:
    simulation = simulate(budget=budget, depth=depth, run_ahead=run_ahead)
    for agent in range(4):
        simulation.add(f"{agent}", [*SHARED, *[agent] * 30], SamplingParams(max_tokens=5, seed=agent))
    simulation.run()
    assert [record.request.num_cached_tokens for record in simulation.records.values()] == [0, 100, 100, 100]
    if not run_ahead:
        assert simulation.oracle.num_computed_tokens == 100 + 4 * (30 + 4)
    simulation.check_all_done()


def test_several_answers_to_one_prompt_go_on_from_one_snapshot() -> None:
    simulation = simulate(budget=16)
    for seed in range(5):
        simulation.add(f"choice {seed}", SHARED[:34], SamplingParams(max_tokens=3, seed=seed))
    simulation.run()
    assert simulation.oracle.num_computed_tokens == 32 + 5 * (2 + 2)
    assert simulation.cache.states.table.num_used == 4
    simulation.check_all_done()


@pytest.mark.parametrize(("depth", "run_ahead"), LOOPS)
def test_the_next_turn_goes_on_from_the_answer(depth: int, run_ahead: bool) -> None:
    simulation = simulate(depth=depth, run_ahead=run_ahead)
    first = ask(simulation, "first", SHARED[:20], max_tokens=30)
    second = ask(simulation, "second", [*first.history, 1, 2, 3])
    # The last multiple of 16 tokens that were computed.
    assert second.request.num_cached_tokens == 48
    # One at the end of each prompt, one of the answer: the rolling one before it was given up.
    assert simulation.cache.states.table.num_cached == 3
    simulation.check_all_done()


def test_a_request_gives_up_its_own_snapshots_alone() -> None:
    simulation = simulate()
    first = ask(simulation, "first", SHARED[:20], max_tokens=40)
    ask(simulation, "prompt that ends within the answer", first.history[:33].tolist(), max_tokens=1)
    again = ask(simulation, "first again", SHARED[:20], max_tokens=40)
    assert again.history == first.history
    assert ask(simulation, "last", first.history[:33].tolist(), max_tokens=1).request.num_cached_tokens == 32
    simulation.check_all_done()


def test_a_long_prompt_leaves_snapshots_on_its_way() -> None:
    simulation = simulate(states=StatePolicy(8, 4, 16, 32), budget=20)
    ask(simulation, "long", SHARED)
    saved = [c.start + len(c.token_ids) for p in simulation.plans for c in p.chunks if c.state.save is not None]
    assert saved == [32, 64, 96]
    assert ask(simulation, "other", [*SHARED[:70], *[1] * 9]).request.num_cached_tokens == 64
    simulation.check_all_done()


@pytest.mark.parametrize("wish", [CacheWish(retentions=((30, 60.0),)), CacheWish(borders=(30, 10**9, -8))])
def test_a_marked_position_serves_a_prompt_that_goes_on_otherwise(wish: CacheWish) -> None:
    simulation = simulate()
    request = Request("a", array("i", SHARED[:60]), SamplingParams(max_tokens=2))
    request.asked = Asked(cache=wish)
    simulation.scheduler.add(request)
    simulation.records["a"] = Record(request, SHARED[:60], request.sampling, array("i", SHARED[:60]))
    simulation.run()
    assert ask(simulation, "b", [*SHARED[:32], *[9] * 20]).request.num_cached_tokens == 28
    simulation.check_all_done()


def test_a_request_that_was_preempted_goes_on_from_its_last_snapshot() -> None:
    simulation = simulate(num_blocks=54, budget=64, max_model_len=120)
    for seed in range(2):
        simulation.add(f"{seed}", [seed] * 20, SamplingParams(max_tokens=90, seed=seed))
    simulation.run()
    assert simulation.scheduler.counters.preemptions > 0
    resumed = [c for p in simulation.plans for c in p.chunks if c.state is not None and c.state.load is not None]
    assert [chunk.start for chunk in resumed] == [96]
    simulation.check_all_done()


@pytest.mark.parametrize(("depth", "run_ahead"), LOOPS)
@pytest.mark.parametrize("how", ["abort", "error"])
def test_when_the_leader_leaves_a_follower_goes_on(how: str, depth: int, run_ahead: bool) -> None:
    for when in range(1, 14):
        simulation = simulate(budget=8, depth=depth, run_ahead=run_ahead)
        for agent in range(4):
            simulation.add(f"{agent}", [*SHARED, *[agent] * 9], SamplingParams(max_tokens=5, seed=agent))
        if how == "error":
            simulation.oracle.fails = lambda chunk, first=8 * when: (  # type: ignore[misc]
                chunk.request_id == "0" and chunk.start >= first
            )
        else:
            for _ in range(when):
                simulation.step()
            simulation.abort("0")
        simulation.run()
        leader, *followers = simulation.records.values()
        assert leader.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        assert [record.finish_reason for record in followers] == [FinishReason.LENGTH] * 3
        simulation.check_all_done()


def test_fewer_slots_than_places_let_fewer_requests_run() -> None:
    simulation = simulate(states=StatePolicy(2, 4, 16))
    for number in range(5):
        simulation.add(f"{number}", [number] * 10, SamplingParams(max_tokens=8))
    seen = set()
    while not simulation.scheduler.is_idle:
        simulation.step()
        seen.add(simulation.scheduler.num_running)
    assert max(seen) == 2
    simulation.check_all_done()


def test_a_slot_that_is_not_given_back_is_seen_when_nothing_runs() -> None:
    cache = PrefixCache(16, 4, snapshot_rows=range(1, 3))
    scheduler = Scheduler(
        [cache],
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_num_queued_reqs=1,
        max_model_len=32,
        states=StatePolicy(1, 4, 4),
    )
    scheduler.check_idle()
    scheduler.add(Request("a", array("i", [1, 2, 3, 4, 5]), SamplingParams(max_tokens=2)))
    scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.check_idle()


@pytest.mark.parametrize("num_snapshots", [0, 1, 3, 12])
@pytest.mark.parametrize(("depth", "run_ahead"), LOOPS)
def test_conversations_get_the_same_tokens_with_any_budget_for_states(
    num_snapshots: int, depth: int, run_ahead: bool
) -> None:
    random = Random(f"{num_snapshots} {depth}")
    for block_size, num_slots, budget in ((1, 70, 9), (4, 90, 30), (4, 400, 64)):
        simulation = simulate(
            num_snapshots,
            num_blocks=-(-num_slots // block_size),
            block_size=block_size,
            budget=budget,
            depth=depth,
            run_ahead=run_ahead,
            states=StatePolicy(random.choice([2, 8]), random.choice([1, 8]), random.choice([1, 16])),
        )
        talks = [SHARED[: random.randrange(1, 25)] for _ in range(6)]
        for turn in range(3):
            records = [
                simulation.add(f"{turn}.{number}", [*talk, number], SamplingParams(max_tokens=random.randrange(1, 10)))
                for number, talk in enumerate(talks)
            ]
            simulation.run()
            talks = [[*record.history.tolist(), random.randrange(VOCAB_SIZE)] for record in records]
        simulation.check_all_done()
