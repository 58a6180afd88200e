"""Requests that clients lead token by token, and their forks: each reads its own text, and none waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from moeserve.plan import SamplingParams
from moeserve.scheduling.request_states import StatePolicy
from tests.support.kv_oracle import Record
from tests.support.scheduler_simulation import Simulation

PROMPT = list(range(1, 11))
SAMPLING = SamplingParams(6)
VOCAB_SIZE = 3  # of random requests: texts that have parted are soon alike again


def simulation(**changes: Any) -> Simulation:
    return Simulation(**{"num_blocks": 40, "block_size": 4, **changes})


def fork(run: Simulation, request_id: str, forked: str, *, last: int = 0) -> Record:
    """Add a fork of a led request that has `last` in the place of its last token."""
    record = run.records[forked]
    output = [*record.history[len(record.prompt) : -1], last]
    return run.add(
        request_id, record.prompt, record.sampling, earlier_output=output, resumed_from=0.0, led=True, forks=forked
    )


def until_all_wait(run: Simulation) -> None:
    before = None
    while before != (now := [len(record.history) for record in run.records.values()]):
        before = now
        for _ in range(4):
            run.step()


def lead_to_the_end(run: Simulation) -> None:
    """Let all open requests go on until they have ended."""
    while not run.scheduler.is_idle:
        run.let_go_on(*[name for name, record in run.records.items() if record.finish_reason is None])
        until_all_wait(run)


@pytest.mark.parametrize("changes", [{}, {"depth": 1}, {"depth": 1, "run_ahead": True}])
def test_a_led_request_computes_one_token_whenever_its_client_lets_it_go_on(changes: dict[str, Any]) -> None:
    run = simulation(**changes)
    led, free = run.add("led", PROMPT, SAMPLING, led=True), run.add("free", PROMPT[::-1], SAMPLING)
    until_all_wait(run)
    assert (len(led.output), len(free.output)) == (1, 6)
    run.let_go_on("led", "of another life")
    until_all_wait(run)
    assert len(led.output) == 2
    lead_to_the_end(run)
    run.check_all_done()


def test_a_fork_and_the_request_that_it_forks_go_on_in_one_step() -> None:
    run = simulation()
    run.add("a", PROMPT, SAMPLING, led=True)
    until_all_wait(run)
    forks = [fork(run, name, "a", last=last) for last, name in enumerate("bc")]
    until_all_wait(run)
    assert [record.request.lease for record in forks] == [None, None]
    run.let_go_on("a")
    run.step()
    assert [chunk.request_id for chunk in run.plans[-1].chunks] == ["a", "b", "c"]
    lead_to_the_end(run)
    run.check_all_done()


def test_a_fork_computes_its_last_token_alone() -> None:
    run = simulation()
    run.add("a", PROMPT, SAMPLING, led=True)
    until_all_wait(run)
    fork(run, "b", "a")
    run.let_go_on("a")
    run.step()
    plan = run.plans[-1]
    assert {chunk.request_id: (chunk.start, len(chunk.token_ids)) for chunk in plan.chunks} == {
        "a": (10, 1),
        "b": (10, 1),
    }
    source, target = plan.copied_blocks
    a, b = plan.chunks
    assert (a.block_table[:2], a.block_table[2], b.block_table[2]) == (b.block_table[:2], source, target)
    lead_to_the_end(run)
    run.check_all_done()


def test_a_fork_of_a_request_that_has_left_computes_the_tokens_behind_the_last_full_block() -> None:
    run = simulation()
    run.add("a", PROMPT, SAMPLING, led=True)
    until_all_wait(run)
    fork(run, "b", "a")
    run.abort("a")
    run.step()
    (chunk,) = run.plans[-1].chunks
    assert (chunk.start, len(chunk.token_ids), list(run.plans[-1].copied_blocks)) == (8, 3, [])
    lead_to_the_end(run)
    run.check_all_done()


def test_a_fork_that_has_grown_away_from_the_request_that_it_forked_computes_its_own_tokens() -> None:
    # As in the next life of an engine: both have output behind the token by which they differ.
    run = simulation()
    run.add("alike", [*PROMPT, 21, 1, 0, 0], SamplingParams(1))
    run.run()
    run.add("a", PROMPT, SamplingParams(9), earlier_output=[20, 1, 2, 3, 4], resumed_from=0.0, led=True)
    until_all_wait(run)
    output = [21, 1, 2, 3, 4, 5]
    run.add("b", PROMPT, SamplingParams(9), earlier_output=output, resumed_from=0.0, led=True, forks="a")
    run.let_go_on("a")
    run.step()
    plan = run.plans[-1]
    chunks = [(chunk.request_id, chunk.start, len(chunk.token_ids)) for chunk in plan.chunks]
    assert (chunks, [*plan.copied_blocks]) == ([("a", 15, 1), ("b", 12, 4)], [])
    lead_to_the_end(run)
    run.check_all_done()


def test_a_fork_of_a_fork_that_begins_in_the_same_step_copies_nothing() -> None:
    run = simulation()
    run.add("a", PROMPT, SAMPLING, led=True)
    until_all_wait(run)
    fork(run, "b", "a")
    fork(run, "c", "b", last=1)
    run.let_go_on("a")
    run.step()
    starts = {chunk.request_id: chunk.start for chunk in run.plans[-1].chunks}
    assert starts == {"a": 10, "b": 10, "c": 8}
    lead_to_the_end(run)
    run.check_all_done()


@pytest.mark.parametrize("changes", [{"max_num_seqs": 1}, {"num_blocks": 5, "max_model_len": 16}])
def test_led_requests_do_not_wait_for_their_clients_while_one_that_has_begun_finds_no_room(
    changes: dict[str, Any],
) -> None:
    run = simulation(**changes)
    run.add("a", PROMPT, SAMPLING, led=True)
    until_all_wait(run)
    forks = [fork(run, f"fork {last}", "a", last=last) for last in range(4)]
    run.let_go_on("a")
    until_all_wait(run)
    assert all(len(record.output) > 1 for record in forks)
    lead_to_the_end(run)
    run.check_all_done()


class Leader:
    """Forks, leads and leaves requests at random, over several lives of an engine. `run`: the present life."""

    def __init__(self, random: Random, changes: dict[str, Any]) -> None:
        self._random, self._changes, self._num_made = random, changes, 0
        self.run = self._begin_life()

    def act(self) -> None:
        run, random = self.run, self._random
        waiting = self._open()
        self._num_made += 1
        name = f"r{self._num_made}"
        match random.randrange(20):
            case 0:
                self._die()
            case 1 | 2 | 3:
                prompt = random.choices(range(3), k=random.randint(1, 20))
                run.add(name, prompt, SamplingParams(random.randint(1, 18)), led=random.random() < 0.7)
            case 4 | 5 | 6 | 7 | 8 | 9 if waiting:
                forked = random.choice(waiting)
                fork(run, name, forked, last=random.randrange(VOCAB_SIZE))
                if random.random() < 0.8:
                    run.let_go_on(forked)
            case 10 | 11 if waiting:
                run.abort(random.choice(waiting))
            case _:
                run.let_go_on(*waiting)
        self.run.step()

    def _begin_life(self) -> Simulation:
        return simulation(vocab_size=VOCAB_SIZE, **self._changes)

    def _die(self) -> None:
        """Have the next life go on with the open requests, some of which are suspects. They come in several turns."""
        before, self.run = self.run, self._begin_life()
        for name, record in before.records.items():
            if record.finish_reason is not None:
                continue
            asked = record.request.asked
            self.run.add(
                name,
                record.prompt,
                record.sampling,
                earlier_output=record.output,
                resumed_from=0.0,
                suspect_until=self._random.choice([0, len(record.history) + 1]),
                led=asked.led,
                forks=asked.forks,
            )
            if self._random.random() < 0.3:
                self.run.step()

    def _open(self) -> Sequence[str]:
        records = self.run.records.items()
        return [
            name for name, record in records if record.request.asked.led and record.output and not record.finish_reason
        ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_seqs": 3, "num_blocks": 12, "max_model_len": 40},
        {"caching": False},
        {"depth": 1, "run_ahead": True},
        {"num_ranks": 2},
        {"num_window_blocks": 40, "window": 6},
        {"states": StatePolicy(8), "num_snapshots": 8},
        {"in_turns": True, "depth": 1},
    ],
)
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 60))])
def test_random_forks_read_their_own_texts_over_crashes_and_none_waits_for_ever(
    seed: int, changes: dict[str, Any]
) -> None:
    leader = Leader(Random(seed), changes)
    for _ in range(60):
        leader.act()
    lead_to_the_end(leader.run)
    leader.run.check_all_done()
