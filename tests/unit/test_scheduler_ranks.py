"""A scheduler over several ranks: where requests go, and that each gets the tokens of an undisturbed run."""

from __future__ import annotations

from random import Random

import pytest

from moeserve.plan import SamplingParams
from radix_cache import PUBLIC
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation
from tests.unit.test_scheduler_oracle import converse, make_conversations

ONE = SamplingParams(max_tokens=1)


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("num_blocks", "budget"), [(17, 8), (17, 40), (250, 13)])
def test_conversations_on_several_ranks_get_the_tokens_of_an_undisturbed_run(
    num_ranks: int, depth: int, num_blocks: int, budget: int
) -> None:
    random = Random(f"{num_ranks} {depth} {num_blocks} {budget}")
    simulation = Simulation(num_blocks=num_blocks, block_size=4, budget=budget, depth=depth, num_ranks=num_ranks)
    converse(simulation, make_conversations(random), random)
    assert simulation.scheduler.counters.prefix_hit_tokens > 0
    assert all(oracle.num_computed_tokens > 0 for oracle in simulation.oracles)


def test_requests_that_come_together_are_shared_out() -> None:
    simulation = Simulation(num_blocks=64, block_size=4, budget=200, num_ranks=2)
    records = [simulation.add(f"r{n}", prompt_of(n, 20), SamplingParams(max_tokens=4)) for n in range(6)]
    simulation.step()
    assert [record.request.rank for record in records] == [0, 1, 0, 1, 0, 1]
    simulation.run_and_check()


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    simulation = Simulation(num_blocks=64, block_size=4, budget=200, num_ranks=2)
    prompts = [prompt_of(n, 80) for n in range(2)]
    for n, prompt in enumerate(prompts):
        simulation.add(f"first {n}", prompt, ONE)
    simulation.run()
    follow_up = [simulation.add(f"second {n}", [*prompts[n], 1, 2], ONE) for n in (1, 0)]
    simulation.run()
    assert [record.request.rank for record in follow_up] == [1, 0]
    assert all(record.request.num_cached_tokens == 80 for record in follow_up)
    simulation.check_all_done()


def test_public_prefixes_go_to_a_rank_that_lacks_them() -> None:
    simulation = Simulation(num_blocks=64, block_size=4, budget=200, num_ranks=2)
    for n in range(2):
        record = simulation.add(f"public {n}", prompt_of(1, 40), ONE, namespace=PUBLIC)
        simulation.run()
        assert (record.request.rank, record.request.num_cached_tokens) == (n, 0)
    simulation.check_all_done()


def test_a_short_cached_prefix_does_not_outweigh_much_work() -> None:
    simulation = Simulation(num_blocks=64, block_size=4, budget=20, num_ranks=2)
    simulation.add("cached", prompt_of(1, 8), ONE)
    simulation.run()
    simulation.add("work", prompt_of(2, 150), ONE)
    simulation.step()
    late = simulation.add("late", [*prompt_of(1, 8), 1], ONE)
    simulation.step()
    assert late.request.rank == 1
    simulation.run_and_check()


def test_a_rank_without_room_leaves_a_request_to_another() -> None:
    simulation = Simulation(num_blocks=10, block_size=4, budget=100, num_ranks=2)
    prompt = prompt_of(1, 30)
    holder = simulation.add("holder", prompt, SamplingParams(max_tokens=8))
    simulation.step()
    late = simulation.add("late", [*prompt[:28], *prompt_of(2, 10)], SamplingParams(max_tokens=2))
    simulation.step()
    assert (holder.request.rank, late.request.rank) == (0, 1)
    simulation.run_and_check()


def test_the_token_budget_holds_for_each_rank_and_the_number_of_requests_for_all() -> None:
    simulation = Simulation(num_blocks=64, block_size=4, budget=10, max_num_seqs=3, num_ranks=2)
    for n in range(5):
        simulation.add(f"r{n}", prompt_of(n, 40), ONE)
    simulation.step()
    assert [plan.num_tokens for plan in simulation.plans] == [10, 10]
    assert simulation.scheduler.num_running <= 3
    simulation.run_and_check()


def test_a_long_prompt_that_several_send_at_once_is_computed_on_one_rank_only() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, budget=100, num_ranks=2)
    shared = prompt_of(1, 240)
    records = [simulation.add(f"r{n}", [*shared, n, 1], SamplingParams(max_tokens=3)) for n in range(3)]
    simulation.run()
    assert [record.request.rank for record in records] == [0, 0, 0]
    assert [record.request.num_cached_tokens for record in records] == [0, 240, 240]
    simulation.check_all_done()


def test_who_comes_while_a_prompt_is_computed_waits_for_it_or_takes_an_idle_rank_if_it_is_short() -> None:
    for length, ranks in ((200, [0, 0]), (40, [0, 1])):
        simulation = Simulation(num_blocks=200, block_size=4, budget=30, num_ranks=2)
        prompt = prompt_of(1, length)
        first = simulation.add("first", prompt, ONE)
        simulation.step()
        second = simulation.add("second", [*prompt, 1], ONE)
        simulation.run()
        assert [first.request.rank, second.request.rank] == ranks
        simulation.check_all_done()


def test_a_prompt_that_a_busy_rank_computes_is_computed_again_by_an_idle_one() -> None:
    simulation = Simulation(num_blocks=400, block_size=4, budget=20, num_ranks=2)
    cached, shared = prompt_of(1, 300), prompt_of(2, 100)
    simulation.add("cached", cached, ONE)
    simulation.run()
    leader = simulation.add("leader", shared, ONE)
    simulation.step()
    work = simulation.add("work", [*cached, *prompt_of(3, 300)], ONE)
    follower = simulation.add("follower", [*shared, 1], ONE)
    simulation.run()
    assert [record.request.rank for record in (leader, work, follower)] == [0, 0, 1]
    simulation.check_all_done()


def test_a_prompt_of_another_namespace_or_without_cache_is_not_waited_for() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, budget=500, num_ranks=2)
    prompt = prompt_of(1, 200)
    simulation.add("first", prompt, ONE, namespace="a")
    second = simulation.add("second", prompt, ONE, namespace="b")
    simulation.run()
    assert second.request.rank == 1
    simulation.check_all_done()
