"""The engine's loop over steps: depth 1 gives the outputs of depth 0, with one step in flight, never two."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from moeserve.plan import ChunkResult, FinishReason, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import RanksObserver, Steps
from radix_cache import PrefixCache


@dataclass
class Logged:
    """A step on the device's queue."""

    log: list[str]
    computed: StepResult
    done: bool = False

    def result(self) -> list[StepResult]:
        self.log.append(f"wait {self.computed.step}")
        return [self.computed]


class CountingDevice(RanksObserver):
    """Draws the next number after a chunk's last token. A step's token may come from the step before.

    Observes the steps too: its log has all in order.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock: tuple[float | None, float] = (None, 0.0)
        self._drawn: list[int] = []

    def check(self) -> None:
        """Nothing can be missing."""

    def begin(self, plans: Sequence[StepPlan]) -> None:
        self.log.append(f"begin {plans[0].step}")

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        assert plans[0].step == results[0].step
        self.log.append(f"end {plans[0].step}")

    def launch(self, plans: Sequence[StepPlan]) -> Logged:
        (plan,) = plans
        self.log.append(f"launch {plan.step}")
        results, drawn = [], []
        for chunk in plan.chunks:
            last = chunk.token_ids[-1] if chunk.drawn_by is None else self._drawn[chunk.drawn_by]
            result = ChunkResult()
            if chunk.sampling is not None:
                result.token_id = last + 1
                drawn.append(last + 1)
            results.append(result)
        self._drawn = drawn

        seconds, waited_s = self.clock
        return Logged(self.log, StepResult(plan.step, results, seconds=seconds, waited_s=waited_s))


@dataclass
class Service:
    scheduler: Scheduler
    device: CountingDevice
    steps: Steps

    def serve(self) -> dict[str, tuple[list[int], FinishReason | None]]:
        told: dict[str, tuple[list[int], FinishReason | None]] = {}
        while (outputs := self.steps.advance()) is not None:
            for output in outputs:
                tokens, _ = told.setdefault(output.request.request_id, ([], None))
                if output.token_id is not None:
                    tokens.append(output.token_id)
                told[output.request.request_id] = (tokens, output.finish_reason)
        return told


def service(depth: int, *, observed: bool = False) -> Service:
    scheduler = Scheduler(
        [PrefixCache(40, 4)],
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_num_queued_reqs=9,
        max_model_len=100,
        run_ahead=depth > 0,
    )
    device = CountingDevice()
    return Service(scheduler, device, Steps(scheduler, device, depth, [device] if observed else []))


def add(service: Service, name: str, prompt: list[int], **sampling: object) -> None:
    params = SamplingParams(**{"max_tokens": 5, **sampling})  # type: ignore[arg-type]
    service.scheduler.add(Request(name, array("i", prompt), params))


def test_both_depths_tell_the_same() -> None:
    told = []
    for depth in (0, 1):
        served = service(depth)
        add(served, "stops", [1, 2, 3], stop_token_ids=(6,))
        add(served, "long prompt", list(range(100, 120)))
        add(served, "one token", [50], max_tokens=1)
        add(served, "waits for tokens", [70, 71], min_tokens=2)
        told.append(served.serve())
        assert served.scheduler.is_idle
        served.scheduler.check_idle()
    assert told[0] == told[1]
    assert told[0]["stops"] == ([4, 5, 6], FinishReason.STOP)
    assert told[0]["long prompt"][0] == [120, 121, 122, 123, 124]


def test_steps_tell_what_the_slowest_device_took_and_how_long_this_host_has_waited() -> None:
    served = service(depth=0)
    add(served, "a", [1], max_tokens=3)
    found = []
    for seconds, waited_s in ((None, 0.0), (0.25, 0.125), (0.5, 0.125)):
        served.device.clock = seconds, waited_s
        served.steps.advance()
        found.append((served.steps.device_s, served.steps.waited_s))
    assert found == [(None, 0.0), (0.25, 0.125), (0.5, 0.25)]


def test_the_next_step_is_queued_before_the_last_one_is_waited_for() -> None:
    served = service(depth=1)
    add(served, "a", [1], max_tokens=3)
    served.serve()
    assert served.device.log == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]


@pytest.mark.parametrize(
    ("depth", "log"),
    [
        (0, ["begin 1", "launch 1", "wait 1", "end 1", "begin 2", "launch 2", "wait 2", "end 2"]),
        (1, ["begin 1", "launch 1", "begin 2", "launch 2", "wait 1", "end 1", "wait 2", "end 2"]),
    ],
)
def test_observers_hear_of_a_step_before_its_launch_and_when_its_results_are_there(depth: int, log: list[str]) -> None:
    served = service(depth, observed=True)
    add(served, "a", [1], max_tokens=2)
    served.serve()
    assert served.device.log == log


@pytest.mark.parametrize("depth", [0, 1])
def test_an_idle_loop_has_nothing_to_do(depth: int) -> None:
    assert service(depth).steps.advance() is None


def test_the_step_number_is_that_of_the_last_commit() -> None:
    served = service(depth=1)
    add(served, "a", [1], max_tokens=2)
    assert served.steps.advance() == []
    assert served.steps.step == 0
    served.steps.advance()
    assert served.steps.step == 1


class _Failing(CountingDevice):
    """Fails at a launch, or when the result is asked for."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self._fails = fails

    def launch(self, plans: Sequence[StepPlan]) -> Logged:
        if self._fails == "launch":
            raise RuntimeError("no launch")
        step = super().launch(plans)
        return _FailingStep(step.log, step.computed)

    def abandon(self, plans: Sequence[StepPlan]) -> None:
        self.log.append(f"abandon {plans[0].step}")


class _FailingStep(Logged):
    def result(self) -> list[StepResult]:
        raise RuntimeError("no result")


@pytest.mark.parametrize("fails", ["launch", "result"])
def test_observers_hear_that_a_step_has_failed_in_place_of_its_end(fails: str) -> None:
    device = _Failing(fails)
    scheduler = Scheduler(
        [PrefixCache(8, 4)], max_num_seqs=1, max_num_batched_tokens=8, max_num_queued_reqs=1, max_model_len=16
    )
    steps = Steps(scheduler, device, 0, [device])
    scheduler.add(Request("r", array("i", [1, 2]), SamplingParams(max_tokens=2)))
    with pytest.raises(RuntimeError):
        steps.advance()
    assert [line.split()[0] for line in device.log if not line.startswith("launch")] == ["begin", "abandon"]


class _Faulty(RanksObserver):
    """Fails as it observes a beginning, or an end."""

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def begin(self, plans: Sequence[StepPlan]) -> None:
        if self._fails == "begin":
            raise RuntimeError("no begin")

    def end(self, plans: Sequence[StepPlan], results: Sequence[StepResult]) -> None:
        if self._fails == "end":
            raise RuntimeError("no end")


@pytest.mark.parametrize(
    ("fails", "first_heard", "last_heard"),
    [("begin", ["begin", "abandon"], []), ("end", ["begin", "end"], ["begin", "abandon"])],
)
def test_a_step_that_an_observer_fails_is_abandoned_by_those_that_have_begun_and_not_ended_it(
    fails: str, first_heard: list[str], last_heard: list[str]
) -> None:
    first, last = _Failing("never"), _Failing("never")
    scheduler = Scheduler(
        [PrefixCache(8, 4)], max_num_seqs=1, max_num_batched_tokens=8, max_num_queued_reqs=1, max_model_len=16
    )
    steps = Steps(scheduler, CountingDevice(), 0, [first, _Faulty(fails), last])
    scheduler.add(Request("r", array("i", [1, 2]), SamplingParams(max_tokens=2)))
    with pytest.raises(RuntimeError):
        steps.advance()
    assert [line.split()[0] for line in first.log] == first_heard
    assert [line.split()[0] for line in last.log] == last_heard
