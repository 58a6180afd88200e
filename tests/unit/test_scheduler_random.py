"""Random scripts of arrivals, departures, faults and steps against the KV oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.plan import FinishReason, SamplingParams
from tests.support.scheduler_simulation import Simulation

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
        "policy": st.sampled_from(["fcfs", "lpm"]),
        "depth": st.sampled_from([0, 1, 2]),
        "run_ahead": st.booleans(),
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
            self.simulation.cache.reset()
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


@settings(max_examples=150, deadline=None)
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
