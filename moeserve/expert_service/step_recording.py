"""Recording the routing of all ranks: each rank's runner listens, the executor of the engine gathers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, SupportsBytes

from experts.placement.placement import Placement
from experts.routing.step_routing import unpack
from experts.routing.trace_recorder import UNKNOWN_TOKEN, RequestRows
from moeserve.executor import Executor, LaunchingExecutor, Runner
from moeserve.expert_service.recording import ExpertRecording
from moeserve.plan import StepPlan, StepResult

_STEPS_AT_ONCE = 64
_ROWS_AT_ONCE = 1024


class Tap(Protocol):
    """Hears what the gates of this process choose (`experts.routing_tap`)."""

    def begin(self) -> None: ...

    def take(self) -> SupportsBytes: ...


class TappedRunner:
    """A runner whose results carry the routing of its rows."""

    def __init__(self, runner: Runner, tap: Tap) -> None:
        self._runner = runner
        self._tap = tap

    def run(self, plan: StepPlan) -> StepResult:
        self._tap.begin()
        result = self._runner.run(plan)
        result.routing = self._tap.take()
        return result


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a rank's step left. before: the step before, which has drawn the tokens that this one was planned with."""

    rank: int
    plan: StepPlan
    routing: SupportsBytes
    placement: Placement | None
    before: tuple[StepPlan, StepResult] | None


class RecordingExecutor:
    """Takes the routing out of the results of all ranks and records it.

    What a step leaves is kept for a few steps and then unpacked and counted with theirs: code and tables that a step
    has driven out of the processor's caches are fetched once for all of them.
    """

    def __init__(self, executor: Executor, recording: ExpertRecording) -> None:
        self._executor = executor
        self._recording = recording
        self._pending: list[_Heard] = []
        self._before: dict[int, tuple[StepPlan, StepResult]] = {}
        self._num_rows = 0
        self._num_steps = 0
        recording.gather = self._gather

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        results = self._executor.run(plans)
        self._keep(plans, results, self._recording.placement())
        return results

    def _keep(self, plans: Sequence[StepPlan], results: Sequence[StepResult], placement: Placement | None) -> None:
        """Of steps in their order. placement: with which they were computed."""
        for rank, (plan, result) in enumerate(zip(plans, results, strict=True)):
            if plan.chunks and result.routing is not None:
                self._pending.append(_Heard(rank, plan, result.routing, placement, self._before.get(rank)))
                self._num_rows += plan.num_tokens
            self._before[rank] = plan, result
        self._num_steps += 1
        # A trace is told where a request's first tokens are kept, which holds while it runs.
        if self._num_steps >= _STEPS_AT_ONCE or self._num_rows >= _ROWS_AT_ONCE or self._recording.trace is not None:
            self._gather()

    def check(self) -> None:
        self._executor.check()

    def _gather(self) -> None:
        pending, self._pending = self._pending, []
        self._num_rows = self._num_steps = 0
        for heard in pending:
            self._record(heard)

    def _record(self, heard: _Heard) -> None:
        rank, plan = heard.rank, heard.plan
        token_ids: array[int] = array("i")
        logit_rows: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids if chunk.drawn_by is None else _drawn(chunk.drawn_by, heard.before)
            num_rows = len(token_ids)
            logit_rows.extend(range(num_rows - chunk.num_logit_rows, num_rows))
        ids = unpack(bytes(heard.routing), self._recording.shape, len(token_ids), logit_rows)
        self._recording.add(rank, ids, token_ids, heard.placement)
        if self._recording.trace is not None:
            rows = [
                RequestRows(chunk.request_id, len(chunk.token_ids), chunk.start, (rank, chunk.block_table[0]))
                for chunk in plan.chunks
            ]
            self._recording.trace.add(ids, token_ids, rows)


class RecordingLauncher(RecordingExecutor):
    """The same where steps are queued: recorded is what has been read. Results are read in the order of their steps."""

    def __init__(self, executor: LaunchingExecutor, recording: ExpertRecording) -> None:
        super().__init__(executor, recording)
        self._launching = executor

    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]:
        wait = self._launching.launch(plans)
        placement = self._recording.placement()

        def results() -> list[StepResult]:
            found = wait()
            self._keep(plans, found, placement)
            return found

        return results


def recording_executor(executor: Executor, recording: ExpertRecording) -> Executor:
    """Goes on launching if the executor does."""
    if isinstance(executor, LaunchingExecutor):
        return RecordingLauncher(executor, recording)
    return RecordingExecutor(executor, recording)


def _drawn(place: int, before: tuple[StepPlan, StepResult] | None) -> array[int]:
    """The token that the step before drew at a place among its sampled chunks; UNKNOWN_TOKEN where that failed."""
    assert before is not None
    plan, result = before
    sampled = [found for chunk, found in zip(plan.chunks, result.chunks, strict=True) if chunk.sampling is not None]
    token_id = sampled[place].token_id
    return array("i", [UNKNOWN_TOKEN if token_id is None else token_id])
