"""Recording the routing of all ranks: each rank's runner listens, the executor of the engine gathers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, SupportsBytes

from experts.placement.placement import Placement
from experts.routing.step_routing import unpack
from experts.routing.trace_recorder import RequestRows
from moeserve.executor import Executor, Runner
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


class RecordingExecutor:
    """Takes the routing out of the results of all ranks and records it.

    What a step leaves is kept for a few steps and then unpacked and counted with theirs: code and tables that a step
    has driven out of the processor's caches are fetched once for all of them.
    """

    def __init__(self, executor: Executor, recording: ExpertRecording) -> None:
        self._executor = executor
        self._recording = recording
        self._pending: list[tuple[int, StepPlan, SupportsBytes, Placement | None]] = []
        self._num_rows = 0
        self._num_steps = 0
        recording.gather = self._gather

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        results = self._executor.run(plans)
        placement = self._recording.placement()
        for rank, (plan, result) in enumerate(zip(plans, results, strict=True)):
            if plan.chunks and result.routing is not None:
                self._pending.append((rank, plan, result.routing, placement))
                self._num_rows += plan.num_tokens
        self._num_steps += 1
        # A trace is told where a request's first tokens are kept, which holds while it runs.
        if self._num_steps >= _STEPS_AT_ONCE or self._num_rows >= _ROWS_AT_ONCE or self._recording.trace is not None:
            self._gather()
        return results

    def check(self) -> None:
        self._executor.check()

    def _gather(self) -> None:
        pending, self._pending = self._pending, []
        self._num_rows = self._num_steps = 0
        for rank, plan, routing, placement in pending:
            self._record(rank, plan, routing, placement)

    def _record(self, rank: int, plan: StepPlan, routing: SupportsBytes, placement: Placement | None) -> None:
        token_ids: array[int] = array("i")
        logit_rows: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.token_ids
            num_rows = len(token_ids)
            logit_rows.extend(range(num_rows - chunk.num_logit_rows, num_rows))
        ids = unpack(bytes(routing), self._recording.shape, len(token_ids), logit_rows)
        self._recording.add(rank, ids, token_ids, placement)
        if self._recording.trace is not None:
            rows = [
                RequestRows(chunk.request_id, len(chunk.token_ids), chunk.start, (rank, chunk.block_table[0]))
                for chunk in plan.chunks
            ]
            self._recording.trace.add(ids, token_ids, rows)
