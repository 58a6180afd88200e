"""What a scheduler does with the requests of an engine that died: they go first, and suspects are tried one by one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from moeserve.plan import FinishReason, SamplingParams, StepPlan, Terms
from tests.support.kv_oracle import Record
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation

DEPTHS = pytest.mark.parametrize(("depth", "run_ahead"), [(0, False), (1, False), (1, True)])
SAMPLING = SamplingParams(max_tokens=12)


def simulation(*, depth: int = 0, run_ahead: bool = False, **settings: int) -> Simulation:
    return Simulation(**{"num_blocks": 200, "block_size": 4, **settings}, depth=depth, run_ahead=run_ahead)  # type: ignore[arg-type]


def prompt(number: int, length: int = 6) -> list[int]:
    return [random.Random(number).randrange(VOCAB_SIZE) for _ in range(length)]


def suspects(played: Simulation, count: int, place: int = 8, **settings: object) -> list[Record]:
    return [
        played.add(f"s{n}", prompt(n), SAMPLING, resumed_from=float(n), suspect_until=place, **settings)  # type: ignore[arg-type]
        for n in range(count)
    ]


def named(plan: StepPlan) -> set[str]:
    return {chunk.request_id for chunk in plan.chunks}


def ends(played: Simulation) -> dict[str, list[tuple[int, int]]]:
    """For each request its steps, each with the number of tokens that are computed after it."""
    found: dict[str, list[tuple[int, int]]] = {}
    for plan in played.plans:
        for chunk in plan.chunks:
            found.setdefault(chunk.request_id, []).append((plan.step, chunk.start + len(chunk.token_ids)))
    return found


def assert_tried_one_by_one(played: Simulation, place: int, ahead: int = 0) -> None:
    """While a suspect is not known to be beyond its place, no step in flight names another one.

    ahead: the steps that are planned while one is computed.
    """
    trials = {
        name: (steps[0][0], next(step for step, end in steps if end >= place))
        for name, steps in ends(played).items()
        if name.startswith("s")
    }
    spans = sorted(trials.values())
    for (_, passed), (begun, _) in pairwise(spans):
        assert begun > passed + ahead


@DEPTHS
def test_suspects_are_tried_one_after_the_other_and_all_end_as_ever(depth: int, run_ahead: bool) -> None:
    played = simulation(depth=depth, run_ahead=run_ahead, max_num_seqs=16)
    suspects(played, 9)
    played.add("innocent", prompt(50), SAMPLING, resumed_from=20.0)
    played.run()
    assert_tried_one_by_one(played, 8, ahead=int(run_ahead))
    played.check_all_done()


def test_sixteen_suspects_take_three_short_steps_each_and_the_others_go_on_at_once() -> None:
    played = simulation(max_num_seqs=32, budget=64)
    suspects(played, 16)
    for n in range(4):
        played.add(f"innocent{n}", prompt(50 + n), SAMPLING, resumed_from=20.0 + n)
    assert named_first(played) == {"s0", "innocent0", "innocent1", "innocent2", "innocent3"}
    played.run()
    first = [steps[0][0] for name, steps in ends(played).items() if name.startswith("s")]
    assert max(first) <= 3 * 16
    played.check_all_done()


def named_first(played: Simulation) -> set[str]:
    played.step()
    return named(played.plans[0])


def test_a_suspect_that_has_passed_decodes_beside_the_next() -> None:
    played = simulation()
    suspects(played, 2)
    played.run()
    both = [plan.step for plan in played.plans if named(plan) == {"s0", "s1"}]
    assert len(both) > 5


@pytest.mark.parametrize("place", [3, 8, 30])
def test_a_suspect_ends_its_trial_at_its_place_or_with_its_answer(place: int) -> None:
    played = simulation()
    suspects(played, 3, place)
    played.run()
    begun = sorted(steps[0][0] for steps in ends(played).values())
    # A prompt of six tokens is one step, each further token another one, and the answer ends at 18.
    assert begun[1] - begun[0] == {3: 1, 8: 3, 30: 12}[place]
    played.check_all_done()


@DEPTHS
def test_a_suspect_that_leaves_in_its_trial_makes_room_for_the_next(depth: int, run_ahead: bool) -> None:
    played = simulation(depth=depth, run_ahead=run_ahead)
    suspects(played, 2)
    played.step()
    played.abort("s0")
    played.run()
    assert played.records["s1"].finish_reason is FinishReason.LENGTH
    first = ends(played)
    assert first["s1"][0][0] == first["s0"][-1][0] + 1
    played.check_all_done()


def test_suspects_of_low_priority_or_of_a_key_with_one_place_hold_up_nobody() -> None:
    played = simulation(max_num_seqs=4)
    narrow = Terms(tenant="narrow", running=0.01)
    for n in range(2):
        played.add(f"low{n}", prompt(n), SAMPLING, priority=5, resumed_from=0.0, suspect_until=8)
        played.add(f"narrow{n}", prompt(10 + n), SAMPLING, terms=narrow, resumed_from=0.0, suspect_until=8)
    suspects(played, 3, terms=Terms(tenant="other"))
    for n in range(8):
        played.add(f"new{n}", prompt(30 + n), SAMPLING, terms=Terms(tenant="other"))
    played.run()
    begun = {name: steps[0][0] for name, steps in ends(played).items()}
    assert max(begun[f"s{n}"] for n in range(3)) < begun["low0"]
    assert begun["narrow1"] > ends(played)["narrow0"][-1][0]
    played.check_all_done()


def test_choices_of_one_prompt_are_tried_one_by_one_too() -> None:
    played = simulation(max_num_seqs=16)
    for n in range(8):
        played.add(f"s{n}", prompt(1), SAMPLING, resumed_from=1.0, suspect_until=8)
    played.run()
    assert_tried_one_by_one(played, 8)
    played.check_all_done()


def test_far_shorter_suspects_do_not_wait_for_the_trial_of_a_long_one() -> None:
    played = simulation(budget=16, max_num_seqs=8, num_blocks=400)
    played.add("s0", prompt(0, 400), SAMPLING, resumed_from=0.0, suspect_until=402)
    for n in range(1, 5):
        played.add(f"s{n}", prompt(n), SAMPLING, resumed_from=float(n), suspect_until=8)
    played.run()
    begun = {name: steps[0][0] for name, steps in ends(played).items()}
    assert max(begun[f"s{n}"] for n in range(1, 5)) < 20
    played.check_all_done()


def test_requests_of_an_earlier_engine_come_before_all_that_are_new_in_the_order_of_their_arrival() -> None:
    played = simulation(max_num_seqs=1)
    played.add("new", prompt(1), SAMPLING)
    # Two HTTP processes hand theirs over, one after the other.
    for arrived_at in (3.0, 5.0, 2.0, 4.0):
        played.add(f"from {arrived_at:.0f}", prompt(2), SAMPLING, resumed_from=arrived_at)
    played.run()
    begun = sorted((steps[0][0], name) for name, steps in ends(played).items())
    assert [name for _, name in begun] == ["from 2", "from 3", "from 4", "from 5", "new"]


def test_another_key_does_not_wait_for_all_that_one_key_resumes() -> None:
    played = simulation(max_num_seqs=2, budget=16)
    for n in range(12):
        played.add(f"s{n}", prompt(n, 30), SAMPLING, terms=Terms(tenant="a"), resumed_from=float(n), suspect_until=32)
    played.add("b", prompt(50, 30), SAMPLING, terms=Terms(tenant="b"))
    played.run()
    begun = {name: steps[0][0] for name, steps in ends(played).items()}
    assert begun["b"] < begun["s2"]
    played.check_all_done()


def test_new_requests_take_no_place_that_a_suspect_waits_for() -> None:
    played = simulation(max_num_seqs=4, budget=64)
    suspects(played, 4)
    for n in range(20):
        played.add(f"new{n}", prompt(50 + n), SAMPLING)
    played.run()
    begun = {name: steps[0][0] for name, steps in ends(played).items()}
    assert max(begun[f"s{n}"] for n in range(4)) < min(begun[f"new{n}"] for n in range(20))
    played.check_all_done()


def test_the_place_of_a_suspect_is_kept_from_other_keys_too() -> None:
    played = simulation(max_num_seqs=4, budget=64)
    suspects(played, 2, terms=Terms(tenant="a"))
    for n in range(4):
        played.add(f"new{n}", prompt(50 + n), SAMPLING, terms=Terms(tenant="b"))
    assert named_first(played) == {"s0", "new0", "new1"}
    played.run_and_check()


def test_a_full_queue_refuses_no_request_of_an_earlier_engine() -> None:
    played = simulation(max_num_seqs=1, max_num_queued_reqs=1)
    for n in range(5):
        played.add(f"r{n}", prompt(n), SAMPLING, resumed_from=float(n))
    played.run_and_check()


@pytest.mark.parametrize("seed", range(30))
def test_random_suspects_end_as_ever(seed: int) -> None:
    rng = random.Random(seed)
    depth, run_ahead = rng.choice([(0, False), (1, False), (1, True)])
    played = simulation(
        depth=depth,
        run_ahead=run_ahead,
        num_blocks=rng.randrange(14, 40),
        max_num_seqs=rng.randrange(1, 6),
        budget=rng.randrange(6, 20),
        max_model_len=50,
    )
    for n in range(12):
        length = rng.randrange(1, 30)
        resumed_from = rng.choice([None, float(rng.randrange(5))])
        place = rng.randrange(length + 6) if resumed_from is not None and rng.random() < 0.7 else 0
        played.add(
            f"r{n}",
            prompt(n, length),
            SAMPLING,
            priority=rng.randrange(2),
            terms=Terms(tenant=rng.choice("ab"), running=rng.choice([0.01, 1.0])),
            resumed_from=resumed_from,
            suspect_until=place,
        )
    for _ in range(rng.randrange(4)):
        played.step()
        played.abort(f"r{rng.randrange(12)}")
    played.run_and_check()
