"""Counting what ranks send to each other: each says it with its results, the engine keeps the newest."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeserve.executor import Executor, Runner
from moeserve.plan import StepPlan, StepResult


class CountedRunner:
    """A runner whose results tell what the rank has sent so far."""

    def __init__(self, runner: Runner, sent: Callable[[], list[int]]) -> None:
        self._runner = runner
        self._sent = sent

    def run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        result.sent = self._sent()
        return result


class LinkCounts:
    """An executor that keeps what every rank said last."""

    def __init__(self, executor: Executor, num_ranks: int) -> None:
        self._executor = executor
        self._sent = [[0] * (2 * num_ranks) for _ in range(num_ranks)]

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        results = self._executor.run(plans)
        for rank, result in enumerate(results):
            if result.sent is not None:
                self._sent[rank] = result.sent
        return results

    def check(self) -> None:
        self._executor.check()

    def links(self) -> list[list[int]]:
        """[from, to, rows, bytes] of every pair of ranks."""
        num_ranks = len(self._sent)
        return [
            [source, target, sent[target], sent[num_ranks + target]]
            for source, sent in enumerate(self._sent)
            for target in range(num_ranks)
            if target != source
        ]
