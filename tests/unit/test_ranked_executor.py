"""Rank 0 and another rank over real sockets, without tensors: results come home, and who is at fault is named."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from experts.errors import CollectiveError
from moeserve.plan import Chunk, ChunkResult, SamplingParams, StepPlan, StepResult, TokenLogprobs
from moeserve.ranks.meeting import Meeting
from moeserve.ranks.messages import Forward, Joined, RankBeat, RankError, RankResult, Shutdown, StepRows
from moeserve.ranks.steps import RankedExecutor, RankedLauncher, ranked_executor
from moeserve.ranks.transport import RankHub, RankLink
from moeserve.steps import LaunchedStep
from moeserve.wire import DecodeError, decode_plan, decode_result, encode_result

LOGPROBS = st.builds(
    TokenLogprobs,
    logprob=st.floats(allow_nan=False),
    top=st.lists(st.tuples(st.integers(0, 2**31), st.floats(allow_nan=False)), max_size=3).map(tuple),
)
RESULTS = st.builds(
    StepResult,
    step=st.integers(0, 2**62),
    chunks=st.lists(
        st.builds(
            ChunkResult,
            token_id=st.none() | st.integers(0, 2**31),
            logprobs=st.none() | LOGPROBS,
            prompt_logprobs=st.none() | st.lists(LOGPROBS, max_size=3),
            error=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
        ),
        max_size=4,
    ),
)


@settings(max_examples=60, deadline=None)
@given(RESULTS)
def test_a_result_survives_the_wire(result: StepResult) -> None:
    assert decode_result(encode_result(result)) == result


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\x92\x01\x91\x91\x01", b"\x91" * 5000])
def test_what_is_no_result_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_result(data)


class FirstRank:
    """Computes rank 0's part; fails its collective if told so."""

    def __init__(self) -> None:
        self.fails = False
        self.rows: StepRows | None = None

    def begin_step(self, rows: StepRows) -> None:
        self.rows = rows

    def run(self, plan: StepPlan) -> StepResult:
        if self.fails:
            raise CollectiveError("timed out")
        return StepResult(plan.step, [ChunkResult(1) for _ in plan.chunks])


class LaunchingFirstRank(FirstRank):
    """The same, on a device with a queue; keeps a log."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.log.append(f"launch {plan.step}")
        return LoggedStep(self, plan)


@dataclass
class LoggedStep:
    _runner: LaunchingFirstRank
    _plan: StepPlan

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        self._runner.log.append(f"wait {self._plan.step}")
        return self._runner.run(self._plan)


@dataclass
class Group:
    first: FirstRank
    hub: RankHub
    executor: RankedExecutor
    link: RankLink
    process: subprocess.Popen[bytes]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    meeting = Meeting(
        incarnation=3,
        results=f"ipc://{tmp_path}/results",
        steps=(f"ipc://{tmp_path}/steps",),
        collectives=tmp_path / "collectives",
        interface="lo",
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hub, link = RankHub(context, meeting), RankLink(context, meeting, 1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    link.send(Joined(1, process.pid, "name", "here", "software", "model"))
    assert hub.gather(Joined, threading.Event())
    hub.watch("here")
    first = FirstRank()
    yield Group(first, hub, ranked_executor(first, first, hub, timeout=0.3, num_entered=lambda: 5), link, process)
    process.kill()
    process.wait()
    hub.close()
    link.close()
    context.destroy(0)


def make_plans(step: int = 9) -> list[StepPlan]:
    decode = Chunk("a", array("i", [5]), 3, array("i", [0]), SamplingParams(max_tokens=2))
    prompt = Chunk("b", array("i", [5, 6, 7]), 0, array("i", [1]), None)
    return [StepPlan(step, [decode]), StepPlan(step, [prompt, decode])]


def launcher_of(group: Group) -> tuple[LaunchingFirstRank, RankedLauncher]:
    first = LaunchingFirstRank()
    executor = ranked_executor(first, first, group.hub, timeout=0.3, num_entered=lambda: 5)
    assert isinstance(executor, RankedLauncher)
    return first, executor


def test_a_step_is_announced_before_the_results_of_the_one_before_have_come(group: Group) -> None:
    first, executor = launcher_of(group)
    results = [executor.launch(make_plans(step)) for step in (1, 2)]
    steps = [group.link.receive() for _ in range(2)]
    assert [decode_plan(step.plan).step for step in steps] == [1, 2]
    # Of several ranks one may be a step ahead of another's message.
    for step, token in ((2, 8), (1, 7)):
        group.link.send(RankResult(1, encode_result(StepResult(step, [ChunkResult(), ChunkResult(token)]))))
    assert [results[step]()[1].chunks[1].token_id for step in range(2)] == [7, 8]
    assert first.log == ["launch 1", "launch 2", "wait 1", "wait 2"]


def test_what_is_in_flight_is_computed_before_the_others_are_let_go(group: Group) -> None:
    first, executor = launcher_of(group)
    executor.launch(make_plans(1))
    group.link.send(RankResult(1, encode_result(StepResult(1, [ChunkResult(), ChunkResult(7)]))))
    executor.close()
    assert first.log == ["launch 1", "wait 1"]
    assert [type(group.link.receive()) for _ in range(2)] == [Forward, Shutdown]


def test_who_is_late_in_a_step_in_flight_is_named(group: Group) -> None:
    _, executor = launcher_of(group)
    first, second = (executor.launch(make_plans(step)) for step in (1, 2))
    group.link.send(RankResult(1, encode_result(StepResult(1, [ChunkResult(), ChunkResult(7)]))))
    first()
    with pytest.raises(RankError, match=r"Rank 1 \(process \d+\) hung: it did not finish step 2"):
        second()


def test_a_collective_that_fails_in_flight_is_laid_to_a_rank(group: Group) -> None:
    first, executor = launcher_of(group)
    results = executor.launch(make_plans())
    first.fails = True
    with pytest.raises(RankError, match=r"Rank 1 .* gives no sign of life"):
        results()


def test_a_step_goes_out_to_the_ranks_and_its_results_come_home(group: Group) -> None:
    plans = make_plans()
    group.link.send(RankResult(1, encode_result(StepResult(9, [ChunkResult(), ChunkResult(7)]))))
    results = group.executor.run(plans)
    assert [[chunk.token_id for chunk in result.chunks] for result in results] == [[1], [None, 7]]
    step = group.link.receive()
    assert isinstance(step, Forward)
    assert decode_plan(step.plan) == plans[1]
    assert StepRows(step.num_rows, step.num_logit_rows, step.only_decodes) == group.first.rows
    assert group.first.rows == StepRows([1, 4], [1, 1], only_decodes=False)
    group.executor.close()
    assert isinstance(group.link.receive(), Shutdown)


def test_a_missing_result_is_laid_to_its_rank(group: Group) -> None:
    with pytest.raises(RankError, match=r"Rank 1 \(process \d+\) hung: it did not finish step 9"):
        group.executor.run(make_plans())


def test_a_rank_that_gives_no_sign_of_life_is_named(group: Group) -> None:
    group.first.fails = True
    with pytest.raises(RankError, match=r"Rank 1 .* gives no sign of life"):
        group.executor.run(make_plans())


@pytest.mark.parametrize(("entered", "sentence"), [(4, "Rank 1 .* hung: the others waited"), (5, "cannot reach")])
def test_the_rank_that_is_behind_is_named(group: Group, entered: int, sentence: str) -> None:
    group.first.fails = True
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.05):
            group.link.send(RankBeat(1, entered))

    beats = threading.Thread(target=beat)
    beats.start()
    with pytest.raises(RankError, match=sentence):
        group.executor.run(make_plans())
    stop.set()
    beats.join()


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_dead_rank_is_named(group: Group, is_busy: bool) -> None:
    group.process.kill()
    group.process.wait()
    with pytest.raises(RankError, match=r"Rank 1 .* died"):
        group.executor.run(make_plans()) if is_busy else group.executor.check()


def test_a_rank_that_falls_silent_while_nothing_is_to_be_done_is_named(group: Group) -> None:
    deadline = time.monotonic() + 0.6
    while time.monotonic() < deadline:
        group.link.send(RankBeat(1, 0))
        group.executor.check()
    with pytest.raises(RankError, match=r"Rank 1 .* gives no sign of life"):
        check_until(group.executor, deadline + 5)


def check_until(executor: RankedExecutor, deadline: float) -> None:
    while time.monotonic() < deadline:
        executor.check()
