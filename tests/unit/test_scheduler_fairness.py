"""Nobody starves, nobody is stalled for long, and what cannot be served is refused on arrival."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from moeserve.plan import FinishReason, Request, SamplingParams
from moeserve.scheduling.fair_queue import Tenants, WaitingQueue
from moeserve.scheduling.outcomes import NeverFitsError, QueueFullError
from moeserve.scheduling.pacing import UNBOUNDED, Slo
from tests.support.parameters import first
from tests.support.scheduler_simulation import Simulation

SHARED = [(7 * i + 3) % 50 for i in range(40)]


def test_a_stream_of_hits_does_not_starve_a_request_that_hits_nothing() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=64, max_num_seqs=2)
    simulation.add("warm", SHARED, SamplingParams(max_tokens=1))
    simulation.run()
    number = 0

    def add_hit() -> None:
        nonlocal number
        simulation.add(f"hit {number}", [*SHARED, number % 50, number // 50], SamplingParams(max_tokens=2))
        number += 1

    for _ in range(4):
        add_hit()
    stranger = simulation.add("stranger", [49 - token for token in SHARED], SamplingParams(max_tokens=2))
    while stranger.request.lease is None:
        assert number < 100
        while simulation.scheduler.num_waiting < 6:
            add_hit()
        simulation.step()
    num_overtakers = sum(
        r.request.arrival > stranger.request.arrival and r.output != [] for r in simulation.records.values()
    )
    assert 0 < num_overtakers <= 32 + 2
    simulation.run_and_check()


def test_a_long_prompt_does_not_stall_those_who_decode() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, budget=16)
    streams = [simulation.add(f"{i}", [i] * 3, SamplingParams(max_tokens=60, seed=i)) for i in range(4)]
    for _ in range(3):
        simulation.step()
    long = simulation.add("long", SHARED * 5, SamplingParams(max_tokens=2))
    lengths = [len(stream.output) for stream in streams]
    num_steps = 0
    while not long.output:
        simulation.step()
        num_steps += 1
        assert [len(stream.output) for stream in streams] == [length + num_steps for length in lengths]
    assert num_steps == -(-200 // (16 - 4))
    simulation.run_and_check()


def test_a_request_that_does_not_fit_yet_is_not_overtaken_for_ever() -> None:
    simulation = Simulation(num_blocks=20, block_size=4, budget=16)
    simulation.add("small", [1] * 8, SamplingParams(max_tokens=20))
    for _ in range(2):
        simulation.step()
    large = simulation.add("large", SHARED + SHARED[:35], SamplingParams(max_tokens=2))
    for index in range(60):
        simulation.add(f"{index}", [index % 50] * 8, SamplingParams(max_tokens=4, seed=index))
        simulation.step()
    assert large.finish_reason is FinishReason.LENGTH
    simulation.run_and_check()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prompts_are_admitted_only_if_those_that_run_can_be_completed_as_well(depth: int) -> None:
    simulation = Simulation(num_blocks=20, block_size=4, budget=8, depth=depth)
    for index in range(3):
        simulation.add(f"{index}", [index] * 36, SamplingParams(max_tokens=1))
    simulation.run()
    assert simulation.scheduler.counters.preemptions == 0
    simulation.check_all_done()


def test_an_urgent_request_does_not_wait_for_the_prompt_of_a_patient_one() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, budget=8)
    simulation.add("patient", [1] * 200, SamplingParams(max_tokens=2), priority=1)
    simulation.step()
    simulation.add("urgent", [2] * 5, SamplingParams(max_tokens=2))
    simulation.add("equal", [3] * 60, SamplingParams(max_tokens=2), priority=1)
    simulation.step()
    assert [chunk.request_id for chunk in simulation.plans[-1].chunks] == ["urgent", "patient"]
    simulation.run()
    ends = {chunk.request_id: plan.step for plan in simulation.plans for chunk in plan.chunks}
    assert ends["urgent"] < ends["patient"] <= ends["equal"]
    simulation.check_all_done()


def tokens_by_step(simulation: Simulation, first: int) -> list[dict[str, int]]:
    """Return the tokens of each request in the steps from number `first` on."""
    plans = (plan for plan in simulation.plans if plan.step >= first)
    return [{chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks} for plan in plans]


def test_far_shorter_prompts_of_the_same_tenant_get_half_of_each_step_beside_a_long_one() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, budget=8)
    simulation.add("long", [1] * 200, SamplingParams(max_tokens=1))
    simulation.step()
    for number in range(3):
        simulation.add(f"short {number}", [2 + number] * 6, SamplingParams(max_tokens=1))
    simulation.run()
    assert tokens_by_step(simulation, 2)[:6] == [
        {"short 0": 4, "long": 4},
        {"short 0": 2, "short 1": 2, "long": 4},
        {"short 1": 4, "long": 4},
        {"short 2": 4, "long": 4},
        {"short 2": 2, "long": 6},
        {"long": 8},
    ]
    simulation.check_all_done()


def test_the_same_holds_among_the_shorter_ones() -> None:
    simulation = Simulation(num_blocks=200, block_size=4, budget=8)
    simulation.add("long", [1] * 200, SamplingParams(max_tokens=1))
    simulation.step()
    simulation.add("shorter", [2] * 40, SamplingParams(max_tokens=1))
    simulation.step()
    simulation.add("shortest", [3] * 4, SamplingParams(max_tokens=1))
    simulation.run()
    assert tokens_by_step(simulation, 3)[:3] == [
        {"shortest": 2, "shorter": 2, "long": 4},
        {"shortest": 2, "shorter": 2, "long": 4},
        {"shorter": 4, "long": 4},
    ]
    simulation.check_all_done()


@pytest.mark.slow
@pytest.mark.parametrize("half", first(1, [0, 1]))
@pytest.mark.parametrize(
    ("num_ranks", "run_ahead"), first(3, [(2, True), (1, False), (3, False), (2, False), (1, True), (3, True)])
)
def test_prompts_of_all_lengths_pass_each_other_and_all_are_served(num_ranks: int, run_ahead: bool, half: int) -> None:
    for seed in range(half, 8, 2):
        random = Random(seed)
        budget, num_blocks = random.choice([16, 32, 64]), random.choice([300, 3000])
        simulation = Simulation(
            num_blocks=num_blocks,
            block_size=4,
            budget=budget,
            num_ranks=num_ranks,
            max_num_seqs=16,
            run_ahead=run_ahead,
        )
        for number in range(20):
            length, num_tokens = random.choice([3, 10, 60, 250, 1000]), random.choice([1, 20])
            prompt = [random.randrange(50) for _ in range(length)]
            simulation.add(f"{number}", prompt, SamplingParams(num_tokens), priority=random.choice([0, 0, 0, 1]))
            for _ in range(random.randrange(3)):
                simulation.step()
        simulation.run_and_check()


@pytest.mark.parametrize(("length", "priority"), [(50, 0), (4, 1)], ids=["about as long", "less urgent"])
def test_other_prompts_do_not_pass_a_long_one(length: int, priority: int) -> None:
    simulation = Simulation(num_blocks=200, block_size=4, budget=8)
    simulation.add("long", [1] * 200, SamplingParams(max_tokens=1))
    simulation.step()
    simulation.add("other", [2] * length, SamplingParams(max_tokens=1), priority=priority)
    simulation.step()
    assert tokens_by_step(simulation, 2) == [{"long": 8}]
    simulation.run_and_check()


def test_who_runs_out_of_memory_takes_it_from_the_least_urgent() -> None:
    simulation = Simulation(num_blocks=16, block_size=4, budget=16)
    for name, priority in (("low", 2), ("high", 0), ("middle", 1)):
        simulation.add(name, [priority] * 4, SamplingParams(max_tokens=40, seed=priority), priority=priority)
        simulation.step()
    simulation.run()
    high, middle, low = (simulation.records[name].request.num_preemptions for name in ("high", "middle", "low"))
    assert high == 0
    assert low >= middle
    assert low > 0
    simulation.check_all_done()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_urgent_prompt_takes_memory_from_a_stream_that_cannot_grow(depth: int) -> None:
    simulation = Simulation(num_blocks=12, block_size=4, budget=4, max_num_seqs=2, depth=depth)
    stream = simulation.add("stream", [1] * 4, SamplingParams(max_tokens=40), priority=1)
    simulation.step()
    urgent = simulation.add("urgent", [2] * 40, SamplingParams(max_tokens=2))
    while not urgent.output:
        simulation.step()
    assert stream.request.num_preemptions == 1
    simulation.run_and_check()


def test_an_urgent_prompt_takes_memory_from_a_prompt_behind_it() -> None:
    num_preemptions = 0
    for num_prompt_tokens in range(60, 74, 2):
        simulation = Simulation(num_blocks=36, block_size=4, budget=4, max_num_seqs=3)
        stream = simulation.add("stream", [1] * 4, SamplingParams(max_tokens=80))
        patient = simulation.add("patient", [3] * 48, SamplingParams(max_tokens=2), priority=2)
        while patient.request.num_computed_tokens < 42:
            simulation.step()
        urgent = simulation.add("urgent", [2] * num_prompt_tokens, SamplingParams(max_tokens=2), priority=1)
        while not urgent.output:
            simulation.step()
        assert stream.finish_reason is None
        num_preemptions += patient.request.num_preemptions
        simulation.run_and_check()
    assert num_preemptions > 0


def test_preempted_requests_return_when_there_is_room_to_grow() -> None:
    simulation = Simulation(num_blocks=60, block_size=4, budget=32, max_num_seqs=16)
    random = Random(1)
    for index in range(40):
        prompt = [random.randrange(50) for _ in range(random.randrange(2, 20))]
        simulation.add(f"{index}", prompt, SamplingParams(max_tokens=random.randrange(20, 60), seed=index))
    simulation.run()
    assert simulation.scheduler.counters.preemptions <= 40
    simulation.check_all_done()


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(41, 1), (1, 41), (39, 2), (10**5, 10**9)])
def test_what_can_never_fit_is_refused_with_both_counts(num_prompt_tokens: int, max_tokens: int) -> None:
    simulation = Simulation(num_blocks=10, block_size=4)
    text = rf"maximum context length is 40 tokens.*: {num_prompt_tokens} in the prompt and {max_tokens} for"
    with pytest.raises(NeverFitsError, match=text):
        simulation.add("r", [1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens))
    assert simulation.scheduler.is_idle


def test_what_just_fits_is_served() -> None:
    simulation = Simulation(num_blocks=10, block_size=4)
    for index in range(3):
        simulation.add(f"{index}", [index] * 10, SamplingParams(max_tokens=30))
    simulation.run_and_check()


def test_the_queue_is_bounded_beyond_the_free_places() -> None:
    simulation = Simulation(num_blocks=100, block_size=4, max_num_seqs=2, max_num_queued_reqs=3)
    for index in range(5):
        simulation.add(f"{index}", [index], SamplingParams(max_tokens=9))
    with pytest.raises(QueueFullError, match="5 requests wait already"):
        simulation.add("too many", [1], SamplingParams(max_tokens=1))
    simulation.step()
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        simulation.add("too many", [1], SamplingParams(max_tokens=1))
    simulation.abort("4")
    simulation.add("one more", [1], SamplingParams(max_tokens=1))
    simulation.run_and_check()


def test_a_request_id_is_used_by_one_request_at_a_time() -> None:
    simulation = Simulation(num_blocks=10, block_size=4)
    simulation.add("r", [1], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="in use"):
        simulation.add("r", [2], SamplingParams(max_tokens=1))
    simulation.run()
    simulation.add("r", [2], SamplingParams(max_tokens=1))
    simulation.run_and_check()


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0), ([1], -5)])
def test_a_request_without_prompt_or_tokens_to_generate_is_refused(prompt: list[int], max_tokens: int) -> None:
    simulation = Simulation(num_blocks=10, block_size=4)
    with pytest.raises(ValueError, match="at least one"):
        simulation.add("r", prompt, SamplingParams(max_tokens=max_tokens))
    assert simulation.scheduler.is_idle


def test_no_stop_token_comes_before_min_tokens() -> None:
    everything_but_zero = tuple(range(1, 50))
    simulation = Simulation(num_blocks=10, block_size=4)
    sampling = SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=everything_but_zero)
    record = simulation.add("r", [1, 2], sampling)
    simulation.run()
    assert record.output[:4] == [0, 0, 0, 0]
    assert record.finish_reason is FinishReason.STOP
    simulation.check_all_done()


def test_a_request_is_told_as_started_once() -> None:
    simulation = Simulation(num_blocks=10, block_size=4, budget=8)
    for index in range(3):
        simulation.add(f"{index}", [index] * 10, SamplingParams(max_tokens=30))
    started = []
    while not simulation.scheduler.is_idle:
        simulation.step()
        started += [request.request_id for request in simulation.scheduler.take_started()]
    assert simulation.scheduler.counters.preemptions > 0
    assert started == ["0", "1", "2"]


def make_queue(priorities: list[int]) -> tuple[WaitingQueue, list[Request]]:
    """Requests that arrive in this order."""
    tenants = Tenants()
    queue = WaitingQueue(tenants)
    requests = []
    for index, priority in enumerate(priorities):
        request = Request(
            f"{index}", array("i", [1] * (index + 1)), SamplingParams(1), priority=priority, arrival=index
        )
        tenants.enter(request)
        queue.add(request)
        requests.append(request)
    return queue, requests


def names(requests: list[Request]) -> str:
    return "".join(request.request_id for request in requests)


def test_service_is_by_priority_then_arrival() -> None:
    queue, _ = make_queue([1, 0, 1, 0, -1])
    assert names(list(queue.candidates())) == "41302"
    assert len(queue) == 5


def test_a_preempted_request_returns_to_its_place() -> None:
    queue, requests = make_queue([0, 0, 0])
    queue.remove(requests[1])
    assert names(list(queue.candidates())) == "02"
    queue.add(requests[1])
    assert names(list(queue)) == "012"


def test_removing_one_that_does_not_wait_is_an_error() -> None:
    queue, requests = make_queue([0, 0])
    queue.remove(requests[0])
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(requests[0])
    assert names(list(queue)) == "1"


@pytest.mark.parametrize("slo", [UNBOUNDED, Slo(2.0, burst_s=10.0)])
@pytest.mark.parametrize("num_equal", [2, 18, 40])
def test_followers_of_one_prompt_end_nobodys_admission(num_equal: int, slo: Slo) -> None:
    """However many wait for a long prompt that is computed once, a short request starts in the next step."""
    simulation = Simulation(num_blocks=400, block_size=4, budget=64, max_num_seqs=64, slo=slo)
    prompt = [token % 50 for token in range(800)]
    for number in range(num_equal):
        simulation.add(f"equal {number}", prompt, SamplingParams(max_tokens=2))
    simulation.step()
    simulation.scheduler.count_step(0.01)
    simulation.add("short", [7, 8, 9], SamplingParams(max_tokens=2))
    simulation.step()
    assert "short" in {chunk.request_id for chunk in simulation.plans[-1].chunks}
    simulation.run_and_check()
    assert simulation.oracle.num_computed_tokens < 800 + 16 * num_equal


def test_requests_that_await_one_prompt_at_different_places_all_wait_and_none_computes_it_again() -> None:
    simulation = Simulation(num_blocks=400, block_size=4, budget=64, max_num_seqs=64)
    prompt = [token % 50 for token in range(400)]
    for number in range(30):
        simulation.add(f"{number}", prompt[: 400 - 8 * (number % 5)] + [number] * 6, SamplingParams(max_tokens=1))
    simulation.run_and_check()
    assert simulation.oracle.num_computed_tokens < 400 + 40 * 30
