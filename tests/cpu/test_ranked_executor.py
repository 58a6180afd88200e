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
from hypothesis import given
from hypothesis import strategies as st

from experts.errors import CollectiveError
from moeserve.engine.ranks.meeting import Meeting
from moeserve.engine.ranks.messages import (
    Forward,
    FromRank,
    Joined,
    LayerLoaded,
    RankBeat,
    RankError,
    RankResult,
    Shutdown,
)
from moeserve.engine.ranks.plan_link import PlanReceiver
from moeserve.engine.ranks.steps import RankedExecutor
from moeserve.engine.ranks.together import StepRows
from moeserve.engine.ranks.transport import RankHub, RankLink
from moeserve.plan import Chunk, ChunkExtras, ChunkResult, SamplingParams, StepPlan, StepResult, TokenLogprobs
from moeserve.wire import MAX_FRAME_BYTES, DecodeError, decode, encode
from tests.support.examples import examples

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


@examples(0.6)
@given(RESULTS)
def test_a_result_survives_the_wire(result: StepResult) -> None:
    assert decode(encode(RankResult(1, result), 4), FromRank) == (4, RankResult(1, result))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"\x92\x01\x91\x91\x01", b"\x91" * 5000])
def test_what_is_no_result_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data, FromRank)


class FirstRank:
    """Launches rank 0's part and keeps a log; fails its collective if told so, when the step is waited for."""

    def __init__(self) -> None:
        self.fails = False
        self.rows: StepRows | None = None
        self.log: list[str] = []

    def begin_step(self, rows: StepRows) -> None:
        self.rows = rows

    def launch(self, plan: StepPlan) -> LoggedStep:
        self.log.append(f"launch {plan.step}")
        return LoggedStep(self, plan)


@dataclass
class LoggedStep:
    _rank: FirstRank
    _plan: StepPlan
    done: bool = True

    def result(self) -> StepResult:
        self._rank.log.append(f"wait {self._plan.step}")
        if self._rank.fails:
            raise CollectiveError("timed out")
        return StepResult(self._plan.step, [ChunkResult(1) for _ in self._plan.chunks])


@dataclass
class Group:
    first: FirstRank
    hub: RankHub
    executor: RankedExecutor
    link: RankLink
    process: subprocess.Popen[bytes]
    received: list[object]


# Where a rank is late; elsewhere one that a busy machine holds up is not to be.
IMPATIENT = pytest.mark.parametrize("group", [0.3], indirect=True)


@pytest.fixture
def group(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Group]:
    """Two ranks, of which one waits for the other for a minute, or as many seconds as the parameter says."""
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
    assert hub.gather(Joined, within=60, patience=60)
    hub.watch("here")
    first, received = FirstRank(), list[object]()
    executor = RankedExecutor(
        first,
        first.begin_step,
        hub,
        timeout=getattr(request, "param", 60.0),
        num_entered=lambda: 5,
        placement_version=lambda: 4,
        listeners=[received.append],
    )
    yield Group(first, hub, executor, link, process, received)
    process.kill()
    process.wait()
    hub.close()
    link.close()
    context.destroy(0)


def wait_for_message(group: Group) -> None:
    """Wait until something has come to rank 0."""
    assert group.hub._results.poll(60_000)


def make_plans(step: int = 9) -> list[StepPlan]:
    decode = Chunk("a", array("i", [5]), 3, array("i", [0]), SamplingParams(max_tokens=2))
    prompt = Chunk("b", array("i", [5, 6, 7]), 0, array("i", [1]), None)
    return [StepPlan(step, [decode]), StepPlan(step, [prompt, decode])]


def test_a_step_is_announced_before_the_results_of_the_one_before_have_come(group: Group) -> None:
    pending = [group.executor.launch(make_plans(step)) for step in (1, 2)]
    steps = [group.link.receive() for _ in range(2)]
    plans = PlanReceiver()
    assert [plans.decode(step.plan).step for step in steps] == [1, 2]
    # One of several ranks may be a step ahead of another's message.
    for step, token in ((2, 8), (1, 7)):
        group.link.send(RankResult(1, StepResult(step, [ChunkResult(), ChunkResult(token)])))
    assert [pending[step].result()[1].chunks[1].token_id for step in range(2)] == [7, 8]
    assert group.first.log == ["launch 1", "launch 2", "wait 1", "wait 2"]


def test_what_is_in_flight_is_computed_before_the_others_are_let_go(group: Group) -> None:
    group.executor.launch(make_plans(1))
    group.link.send(RankResult(1, StepResult(1, [ChunkResult(), ChunkResult(7)])))
    group.executor.close()
    assert group.first.log == ["launch 1", "wait 1"]
    assert [type(group.link.receive()) for _ in range(2)] == [Forward, Shutdown]


@IMPATIENT
def test_who_is_late_in_a_step_in_flight_is_named(group: Group) -> None:
    first, second = (group.executor.launch(make_plans(step)) for step in (1, 2))
    group.link.send(RankResult(1, StepResult(1, [ChunkResult(), ChunkResult(7)])))
    wait_for_message(group)
    first.result()
    with pytest.raises(RankError, match=r"Rank 1 \(process \d+\) hung: .*step 2"):
        second.result()


@IMPATIENT
def test_a_collective_that_fails_in_flight_is_laid_to_a_rank(group: Group) -> None:
    pending = group.executor.launch(make_plans())
    group.first.fails = True
    with pytest.raises(RankError, match=r"Rank 1 .* gives no sign of life"):
        pending.result()


def test_a_step_goes_out_to_the_ranks_and_its_results_come_home(group: Group) -> None:
    plans = make_plans()
    group.link.send(LayerLoaded(1, 2, None))
    group.link.send(RankResult(1, StepResult(9, [ChunkResult(), ChunkResult(7)])))
    results = group.executor.launch(plans).result()
    assert [[chunk.token_id for chunk in result.chunks] for result in results] == [[1], [None, 7]]
    assert group.received == [LayerLoaded(1, 2, None)]
    step = group.link.receive()
    assert isinstance(step, Forward)
    assert PlanReceiver().decode(step.plan) == plans[1]
    assert step.placement_version == 4
    assert StepRows([*step.num_rows], [*step.num_logit_rows], step.only_decodes) == group.first.rows
    assert group.first.rows == StepRows([1, 4], [1, 1], only_decodes=False)
    group.executor.close()
    assert isinstance(group.link.receive(), Shutdown)


def test_a_plan_and_a_result_larger_than_a_frame_arrive(group: Group) -> None:
    sampling = SamplingParams(max_tokens=2, presence_penalty=0.5)
    extras = ChunkExtras(array("i", bytes(MAX_FRAME_BYTES + 4)), 5)
    plan = StepPlan(9, [Chunk("a", array("i", [5]), 3, array("i", [0]), sampling, extras)])
    group.link.send(RankResult(1, StepResult(9, [ChunkResult(7)], bytes(MAX_FRAME_BYTES + 1))))
    pending = group.executor.launch([StepPlan(9, []), plan])
    assert PlanReceiver().decode(group.link.receive().plan) == plan
    assert pending.result()[1].chunks == [ChunkResult(7)]


@IMPATIENT
def test_a_missing_result_is_laid_to_its_rank(group: Group) -> None:
    with pytest.raises(RankError, match=r"Rank 1 \(process \d+\) hung: .*step 9"):
        group.executor.launch(make_plans()).result()


@IMPATIENT
def test_a_rank_that_gives_no_sign_of_life_is_named(group: Group) -> None:
    group.first.fails = True
    with pytest.raises(RankError, match=r"Rank 1 .* gives no sign of life"):
        group.executor.launch(make_plans()).result()


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
        group.executor.launch(make_plans()).result()
    stop.set()
    beats.join()


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_dead_rank_is_named(group: Group, is_busy: bool) -> None:
    group.process.kill()
    group.process.wait()
    with pytest.raises(RankError, match=r"Rank 1 .* died"):
        group.executor.launch(make_plans()).result() if is_busy else group.executor.check()


@IMPATIENT
def test_a_rank_that_falls_silent_while_nothing_is_to_be_done_is_named(group: Group) -> None:
    deadline = time.monotonic() + 0.6
    while time.monotonic() < deadline:
        group.link.send(RankBeat(1, 0))
        wait_for_message(group)
        group.executor.check()
    with pytest.raises(RankError, match=r"Rank 1 .* gives no sign of life"):
        check_until(group.executor, deadline + 5)


def check_until(executor: RankedExecutor, deadline: float) -> None:
    while time.monotonic() < deadline:
        executor.check()
