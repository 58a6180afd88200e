"""Conversations and random scripts against the KV oracle, whatever the settings; the same plans in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.plan import FinishReason, SamplingParams
from moeserve.scheduling.request_states import StatePolicy
from tests.support.cache_invariants import evict_all
from tests.support.examples import examples
from tests.support.kv_oracle import Record
from tests.support.parameters import pairs
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation

STOP_TOKENS = (3, 4)


@dataclass
class Conversation:
    """Turns of one client: each prompt is all that was said before and a few tokens more."""

    prompt: list[int]
    num_turns: int
    namespace: str
    priority: int
    start: int
    record: Record | None = None


def make_conversations(random: Random) -> list[Conversation]:
    shared = [[random.randrange(VOCAB_SIZE) for _ in range(random.randrange(10, 30))] for _ in range(2)]
    conversations = []
    for index in range(8):
        prompt = shared[random.randrange(2)][: random.choice([100, 17, 9])]
        prompt = prompt + [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 6))]
        namespace, priority = random.choice(["", "", "tenant"]), random.choice([0, 0, 1])
        conversations.append(Conversation(prompt, 2, namespace, priority, random.choice([0, 0, index, 3 * index])))
    conversations[1] = replace(conversations[0], priority=1)
    return conversations


def make_sampling(random: Random, *, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=random.randrange(1, max_tokens + 1),
        seed=random.choice([1, 2]),
        stop_token_ids=random.choice([(), STOP_TOKENS]),
        min_tokens=random.choice([0, 0, 3]),
        presence_penalty=random.choice([0.0, 0.5]),
        logprobs=random.choice([None, 2]),
        prompt_logprobs=random.choice([None, None, None, 0]),
    )


def converse(simulation: Simulation, conversations: list[Conversation], random: Random) -> None:
    step = 0
    while not simulation.scheduler.is_idle or any(c.num_turns for c in conversations):
        for index, talk in enumerate(conversations):
            if talk.num_turns and step >= talk.start and (talk.record is None or talk.record.finish_reason):
                if talk.record is not None:
                    talk.prompt = talk.record.history.tolist() + [random.randrange(VOCAB_SIZE) for _ in range(3)]
                talk.record = simulation.add(
                    f"{index}.{talk.num_turns}",
                    talk.prompt,
                    make_sampling(random, max_tokens=12),
                    namespace=talk.namespace,
                    priority=talk.priority,
                )
                talk.num_turns -= 1
        simulation.step()
        step += 1
        assert step < 2000, "no end in sight"
    simulation.check_all_done()


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "depth"), pairs([1, 3, 4, 16], [0, 1, 2]))
def test_conversations_get_the_tokens_of_an_undisturbed_run(block_size: int, depth: int) -> None:
    longest = 30 + 6 + 12 + 3 + 12
    tiny, roomy = -(-longest // block_size) + 1, 1000 // block_size
    for number, (budget, num_blocks, caching) in enumerate(product([8, 13, 64], [tiny, roomy], [True, False])):
        random = Random(f"{number} {block_size} {depth}")
        simulation = Simulation(
            num_blocks=num_blocks, block_size=block_size, budget=budget, caching=caching, depth=depth
        )
        converse(simulation, make_conversations(random), random)
        counters = simulation.scheduler.counters
        assert (counters.prefix_hit_tokens > 0) == caching or block_size == 16
        assert counters.preemptions == 0 or num_blocks == tiny


@pytest.mark.slow
@pytest.mark.parametrize(("block_size", "depth", "caching"), pairs([1, 3, 4, 16], [0, 1], [True, False]))
def test_preempted_requests_continue_as_if_nothing_had_been(block_size: int, depth: int, caching: bool) -> None:
    num_requests = 0
    num_preemptions = 0
    for seed in range(4):
        random = Random(seed)
        simulation = Simulation(
            num_blocks=-(-66 // block_size), block_size=block_size, budget=9, caching=caching, depth=depth
        )
        for index in range(8):
            prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 7))]
            sampling = SamplingParams(max_tokens=60, seed=index, prompt_logprobs=random.choice([None, 0]))
            simulation.add(f"r{index}", prompt, sampling, priority=random.choice([0, 1]))
        simulation.run_and_check()
        num_requests += 8
        num_preemptions += simulation.scheduler.counters.preemptions
    assert num_preemptions >= num_requests // 2


def test_the_next_turn_finds_the_tokens_that_were_generated() -> None:
    simulation = Simulation(num_blocks=32, block_size=4)
    first = simulation.add("first", list(range(10)), SamplingParams(max_tokens=11))
    simulation.run()
    second = simulation.add("second", [*first.history, 1, 2, 3], SamplingParams(max_tokens=2))
    simulation.run()
    # 10 + 11 tokens; the last one was drawn and not computed.
    assert second.request.num_cached_tokens == 20
    simulation.check_all_done()


def test_namespaces_share_nothing() -> None:
    simulation = Simulation(num_blocks=32, block_size=4)
    for namespace in ("a", "b", ""):
        simulation.add(f"in {namespace}", list(range(20)), SamplingParams(max_tokens=2), namespace=namespace)
        simulation.run()
    assert simulation.scheduler.counters.prefix_hit_tokens == 0
    assert simulation.oracle.num_computed_tokens == 3 * 21
    simulation.check_all_done()


MAX_LEN = 54
SHARED = [(5 * i + 1) % 50 for i in range(24)]

ARRIVAL = st.fixed_dictionaries(
    {
        "shared": st.integers(0, 24),
        "own": st.lists(st.integers(0, 2), max_size=6),
        "max_tokens": st.integers(1, 24),
        "namespace": st.sampled_from(["", "", "tenant"]),
        "priority": st.sampled_from([0, 0, 1]),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "stop_token_ids": st.sampled_from([(), (1, 2, 3)]),
    }
)
ACTION = st.one_of(
    st.tuples(st.just("add"), ARRIVAL),
    st.tuples(st.just("add"), ARRIVAL),
    st.tuples(st.just("turn"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.integers(0, 30)),
    st.tuples(st.just("reset"), st.none()),
)
SETUP = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 3, 4, 16]),
        "num_slots": st.sampled_from([MAX_LEN, MAX_LEN + 16, 400]),
        "budget": st.sampled_from([4, 9, 64]),
        "max_num_seqs": st.sampled_from([3, 4]),
        "caching": st.sampled_from([True, True, False]),
        "depth": st.sampled_from([0, 1, 2]),
        "run_ahead": st.booleans(),
        "in_turns": st.booleans(),
        "states": st.sampled_from([None, StatePolicy(3, 1, 4), StatePolicy(4, 1, 1), StatePolicy(4, 4, 8)]),
        "num_snapshots": st.sampled_from([0, 1, 2, 5, 40]),
    }
)


class Script:
    """Performs actions on a simulation; a number chooses one of the requests so far."""

    def __init__(self, setup: dict[str, object]) -> None:
        arguments: dict[str, object] = dict(setup)
        num_slots, block_size = arguments.pop("num_slots"), arguments["block_size"]
        assert isinstance(num_slots, int)
        assert isinstance(block_size, int)
        self.simulation = Simulation(num_blocks=-(-num_slots // block_size), **arguments)  # type: ignore[arg-type]
        self.num_requests = 0

    def add(self, prompt: list[int], sampling: SamplingParams, namespace: str, priority: int) -> None:
        if len(prompt) + sampling.max_tokens <= MAX_LEN:
            self.simulation.add(f"{self.num_requests}", prompt, sampling, namespace=namespace, priority=priority)
            self.num_requests += 1

    def act(self, name: str, argument: object) -> None:
        if name == "reset":
            evict_all(self.simulation.cache)
        elif isinstance(argument, dict):
            sampling = SamplingParams(
                max_tokens=argument["max_tokens"],
                prompt_logprobs=argument["prompt_logprobs"],
                stop_token_ids=argument["stop_token_ids"],
            )
            prompt = [*SHARED[: argument["shared"]], *argument["own"]] or [1]
            self.add(prompt, sampling, argument["namespace"], argument["priority"])
        elif name == "step":
            assert isinstance(argument, int)
            for _ in range(argument):
                self.simulation.step()
        elif self.num_requests:
            assert isinstance(argument, int)
            self.end_or_go_on(name, f"{argument % self.num_requests}", argument)

    def end_or_go_on(self, name: str, request_id: str, argument: int) -> None:
        record = self.simulation.records[request_id]
        if name == "turn":
            if record.finish_reason is not None:
                self.add([*record.history, 7], record.sampling, record.request.namespace, record.request.priority)
        elif name == "abort":
            self.simulation.abort(request_id)
        elif record.finish_reason is None:
            self.simulation.finish(request_id, argument % (len(record.output) + 1))
            record.finish_reason = FinishReason.ABORT


@pytest.mark.slow
@examples(1.5)
@given(SETUP, st.lists(ACTION, min_size=20, max_size=50), st.sets(st.integers(0, 30), max_size=2))
def test_random_scripts_leave_every_output_and_every_block_right(
    setup: dict[str, object], actions: list[tuple[str, object]], faulty: set[int]
) -> None:
    script = Script(setup)
    script.simulation.oracle.fails = lambda chunk: int(chunk.request_id) in faulty and chunk.start > 10
    for name, argument in actions:
        script.act(name, argument)
    script.simulation.run()
    script.simulation.check_all_done()


ROOT = Path(__file__).parents[2]


def run_script(depth: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.support.plan_script", str(depth)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("depth", [0, 1])
def test_two_processes_make_the_same_plans(depth: int) -> None:
    first, second = (run_script(depth, seed) for seed in ("1", "2"))
    assert first.count("\n") > 100
    assert first == second
