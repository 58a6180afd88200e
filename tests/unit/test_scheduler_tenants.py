"""Tenants in one scheduler: who gives way, who never does, and that nobody loses a token by it."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from moeserve.plan import BACKGROUND_PRIORITY, FinishReason, SamplingParams, Terms
from moeserve.scheduling.outcomes import QueueFullError
from moeserve.scheduling.pacing import Slo
from tests.support.kv_oracle import Record
from tests.support.parameters import first
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation

A, B = Terms("a"), Terms("b")
BACKGROUND = Terms("b", patient=True, background=True)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "run_ahead"), [(0, False), (1, False), (1, True), (2, True)])
@pytest.mark.parametrize("seed", first(2, range(5)))
def test_random_tenants_get_the_tokens_of_an_undisturbed_run(seed: int, depth: int, run_ahead: bool) -> None:
    random = Random(seed)
    simulation = Simulation(
        num_blocks=random.choice([24, 40]),
        block_size=4,
        budget=11,
        max_num_seqs=random.choice([2, 5]),
        depth=depth,
        run_ahead=run_ahead,
        num_ranks=random.choice([1, 1, 2]),
    )
    shared = [random.randrange(VOCAB_SIZE) for _ in range(30)]
    tenants = [A, B, BACKGROUND, Terms("c", weight=3.0), Terms("d", weight=0.5, running=0.3)]
    for number in range(120):
        if random.random() < 0.4:
            terms = random.choice(tenants)
            prompt = [*shared[: random.randrange(1, 30)], *(random.randrange(4) for _ in range(4))]
            sampling = SamplingParams(max_tokens=random.randrange(1, 30), seed=number)
            priority = BACKGROUND_PRIORITY if terms.background else random.choice([0, 0, 1])
            simulation.add(f"{number}", prompt, sampling, namespace=terms.tenant, priority=priority, terms=terms)
        if number % 10 == 9:
            simulation.abort(random.choice(list(simulation.records)))
        simulation.step()
    simulation.run_and_check()


@pytest.mark.parametrize(("depth", "run_ahead"), [(0, False), (1, True)])
def test_a_place_is_taken_from_who_has_more_than_its_share(depth: int, run_ahead: bool) -> None:
    simulation = Simulation(num_blocks=200, block_size=4, max_num_seqs=4, depth=depth, run_ahead=run_ahead)
    theirs = [simulation.add(f"a{i}", [i] * 4, SamplingParams(max_tokens=100), terms=A) for i in range(4)]
    for _ in range(8):
        simulation.step()
    ours = [simulation.add(f"b{i}", [9 + i] * 4, SamplingParams(max_tokens=10), terms=B) for i in range(3)]
    while not all(record.output for record in ours):
        simulation.step()
        assert simulation.scheduler.num_running <= 4
    # The newest of the other tenant give way, never more than its share.
    assert [record.request.num_preemptions > 0 for record in theirs[:2]] == [False, False]
    assert sum(record.request.num_preemptions for record in theirs) >= 2
    assert all(record.finish_reason is None for record in theirs)
    simulation.run_and_check()


def test_memory_is_taken_from_who_has_more_than_its_share() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, budget=32, max_num_seqs=8)
    giant = simulation.add("giant", list(range(50)) * 3, SamplingParams(max_tokens=8), terms=A)
    for _ in range(6):
        simulation.step()
    ours = simulation.add("ours", [7] * 30, SamplingParams(max_tokens=4), terms=B)
    while not ours.output:
        simulation.step()
    assert giant.request.num_preemptions == 1
    simulation.run_and_check()


def test_a_tenant_keeps_to_its_part_of_the_running_places() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, max_num_seqs=8, budget=64)
    few = Terms("a", running=0.25)
    for index in range(6):
        simulation.add(f"{index}", [index] * 4, SamplingParams(max_tokens=20), terms=few)
    for _ in range(5):
        simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (2, 4)
    simulation.run_and_check()


def test_a_tenant_finds_its_share_of_the_queue_and_no_more() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, max_num_seqs=1, max_num_queued_reqs=6)
    for index in range(7):
        simulation.add(f"a{index}", [index] * 4, SamplingParams(max_tokens=4), terms=A)
    with pytest.raises(QueueFullError):
        simulation.add("a more", [1], SamplingParams(max_tokens=1), terms=A)
    for index in range(4):
        simulation.add(f"b{index}", [index] * 4, SamplingParams(max_tokens=4), terms=B)
    with pytest.raises(QueueFullError):
        simulation.add("b more", [1], SamplingParams(max_tokens=1), terms=B)
    with pytest.raises(QueueFullError):
        simulation.add("c", [1], SamplingParams(max_tokens=1), terms=Terms("c", queue=0.0))
    simulation.run_and_check()


def test_background_requests_fill_a_queue_of_their_own() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, max_num_seqs=1, max_num_queued_reqs=6)
    background = Terms("a", patient=True, background=True)
    for index in range(7):
        fields = {"priority": BACKGROUND_PRIORITY, "terms": background}
        simulation.add(f"back {index}", [index] * 4, SamplingParams(max_tokens=4), **fields)  # type: ignore[arg-type]
    with pytest.raises(QueueFullError):
        simulation.add("one more", [1], SamplingParams(max_tokens=1), priority=BACKGROUND_PRIORITY, terms=background)
    for index in range(7):
        simulation.add(f"a{index}", [index] * 4, SamplingParams(max_tokens=4), terms=A)
    simulation.run_and_check()


def test_a_giant_prompt_of_another_tenant_is_worked_on_in_turns() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, budget=16)
    giant = simulation.add("giant", list(range(50)) * 8, SamplingParams(max_tokens=2), terms=A)
    for _ in range(3):
        simulation.step()
    ours = [simulation.add(f"b{i}", [i] * 12, SamplingParams(max_tokens=1), terms=B) for i in range(3)]
    for _ in range(4):
        simulation.step()
    assert all(record.finish_reason is FinishReason.LENGTH for record in ours)
    assert not giant.output
    simulation.run_and_check()


def test_who_waits_too_long_is_dropped_but_not_before_a_step_that_might_take_it() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, max_num_seqs=1, slo=Slo(2.0))
    scheduler = simulation.scheduler
    scheduler.set_time(0.0)
    simulation.add("runs", [1] * 4, SamplingParams(max_tokens=2))
    simulation.step()
    # A step of a minute, during which two more come.
    for name in ("next", "after it"):
        simulation.add(name, [2] * 4, SamplingParams(max_tokens=50))
    scheduler.set_time(60.0)
    assert scheduler.drop_late() == []
    while simulation.records["next"].request.lease is None and simulation.records["after it"].request.lease is None:
        simulation.step()
    (late,) = scheduler.drop_late()
    assert (late.finish_reason, late.request.lease) == (FinishReason.LATE, None)
    simulation.records[late.request.request_id].finish_reason = late.finish_reason
    simulation.run_and_check()


def test_prompts_leave_running_streams_the_pace_that_they_were_promised() -> None:
    simulation = Simulation(num_blocks=400, block_size=4, budget=256, slo=Slo(2.0, 0.5))
    scheduler = simulation.scheduler

    def step() -> int:
        """A step takes 10 ms for each of its rows."""
        simulation.step()
        rows = simulation.plans[-1].num_tokens
        scheduler.count_step(0.01 * rows)
        return rows

    simulation.add("teacher", list(range(50)) * 6, SamplingParams(max_tokens=1))
    while not scheduler.is_idle:
        step()
    stream = simulation.add("stream", [1, 2], SamplingParams(max_tokens=60))
    for _ in range(30):
        step()
    simulation.add("long", [49 - token for token in range(50)] * 6, SamplingParams(max_tokens=1))
    before = len(stream.output)
    rows = [step() for _ in range(5)]
    assert len(stream.output) == before + 5, "the stream is in every step"
    assert all(rows[0] < 256 and 17 <= count <= 60 for count in rows), rows
    simulation.run_and_check()


@pytest.mark.slow
# Many running requests that fill the memory, and such as grow until it is full.
@pytest.mark.parametrize(("num_prompt_tokens", "num_output_tokens"), [(200, 10), (8, 120)])
@pytest.mark.parametrize(("flooder", "is_kept"), [("a", True), ("b/other", False)])
def test_prompts_that_fill_the_cache_leave_the_prefixes_of_another_tenant_there(
    flooder: str, is_kept: bool, num_prompt_tokens: int, num_output_tokens: int
) -> None:
    simulation = Simulation(num_blocks=160, block_size=4, budget=64, max_num_seqs=8)
    random = Random(1)
    prefix = [random.randrange(VOCAB_SIZE) for _ in range(80)]

    def ask(number: int) -> Record:
        """The other tenant's question, which may come whenever it likes."""
        return simulation.add(f"b{number}", [*prefix, number], SamplingParams(max_tokens=2), namespace="b", terms=B)

    ask(0)
    simulation.run()
    terms = Terms(flooder.partition("/")[0])
    found = []
    for number in range(1, 5):
        for index in range(8):
            prompt = [random.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)]
            sampling = SamplingParams(max_tokens=num_output_tokens)
            simulation.add(f"a{number} {index}", prompt, sampling, namespace=flooder, terms=terms)
        for _ in range(15 if num_output_tokens < 100 else 130):
            simulation.step()
        record = ask(number)
        while record.finish_reason is None:
            simulation.step()
        found.append(record.request.num_cached_tokens)
    assert (found == [80] * 4) == is_kept
    simulation.run_and_check()


def test_the_terms_of_a_tenant_hold_for_its_cached_prefixes() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, budget=64)

    def ask(name: str, terms: Terms) -> list[int]:
        prompt = [len(simulation.records)] * 40
        simulation.add(name, prompt, SamplingParams(max_tokens=1), namespace=terms.tenant, terms=terms)
        simulation.run()
        return prompt

    few, heavy = Terms("few", cached=0.1), Terms("heavy", weight=9.0)
    prompts = {"few": ask("few", few), "heavy": ask("heavy", heavy)}
    for number in range(3):
        ask(f"{number}", A)
    kept = {name: simulation.cache.peek(array("i", [*prompt, 0]), name) for name, prompt in prompts.items()}
    assert kept == {"few": 16, "heavy": 40}


def test_one_request_finds_memory_whatever_others_have_cached() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, budget=64)
    for name in "bcd":
        prompt = [ord(name) % VOCAB_SIZE] * 40
        simulation.add(name, prompt, SamplingParams(max_tokens=1), namespace=name, terms=Terms(name))
        simulation.run()
    # All but one block, and the last ones as it grows.
    giant = simulation.add("giant", [1] * 100, SamplingParams(max_tokens=56), namespace="a", terms=A)
    simulation.run()
    assert len(giant.output) == 56
    assert simulation.scheduler.counters.preemptions == 0
    simulation.check_all_done()


def test_further_requests_wait_rather_than_take_what_others_have_cached() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, budget=200)
    prefix = [9] * 36
    simulation.add("b", prefix, SamplingParams(max_tokens=1), namespace="b", terms=B)
    simulation.run()
    for number in range(4):
        simulation.add(f"a{number}", [number] * 40, SamplingParams(max_tokens=20), namespace="a", terms=A)
    simulation.step()
    assert (simulation.scheduler.num_running, simulation.scheduler.num_waiting) == (2, 2)
    simulation.run()
    assert simulation.cache.peek(array("i", [*prefix, 0]), "b") == 36
    simulation.check_all_done()


def test_who_waits_for_its_turn_alone_takes_memory_from_nobody() -> None:
    """Two that do not fit beside each other would otherwise give way for a third, in turn, and never end."""
    simulation = Simulation(num_blocks=30, block_size=4, budget=7, max_num_seqs=7)
    lengths = {"a": (40, 33), "b": (60, 20), "c": (20, 20)}
    for number, (tenant, (num_prompt, num_tokens)) in enumerate(lengths.items()):
        priority = int(tenant == "c")
        prompt = [(number + 3 * place) % VOCAB_SIZE for place in range(num_prompt)]
        sampling = SamplingParams(max_tokens=num_tokens)
        simulation.add(tenant, prompt, sampling, namespace=tenant, priority=priority, terms=Terms(tenant))
    simulation.run_and_check()
    assert simulation.scheduler.counters.preemptions < 6


def test_memory_is_given_for_who_lacks_it_while_prompts_fill_every_step() -> None:
    simulation = Simulation(num_blocks=40, block_size=4, budget=8)
    giant = simulation.add("giant", [place % 7 for place in range(140)], SamplingParams(max_tokens=4), terms=A)
    for _ in range(3):
        simulation.step()
    modest = simulation.add("modest", [9] * 40, SamplingParams(max_tokens=4), terms=B)
    while not modest.output:
        simulation.step()
    assert not giant.output
    assert giant.request.num_preemptions == 1
    simulation.run_and_check()
