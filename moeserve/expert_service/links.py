"""Counting what ranks send to each other: each says it with its results, the engine keeps the newest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from moeserve.executor import (
    Executor,
    FinishedStep,
    LaunchedStep,
    LaunchingExecutor,
    LaunchingRunner,
    Runner,
)
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


class CountedLauncher(CountedRunner):
    """The same where steps are queued."""

    def __init__(self, runner: LaunchingRunner, sent: Callable[[], list[int]]) -> None:
        super().__init__(runner, sent)
        self._launching = runner

    def launch(self, plan: StepPlan) -> LaunchedStep:
        step = self._launching.launch(plan)
        return FinishedStep(step, partial(replace, sent=self._sent()))


class LinkCounts:
    """An executor that keeps what every rank said last."""

    def __init__(self, executor: Executor, num_ranks: int) -> None:
        self._executor = executor
        self._sent = [[0] * (2 * num_ranks) for _ in range(num_ranks)]

    def run(self, plans: Sequence[StepPlan]) -> list[StepResult]:
        return self._keep(self._executor.run(plans))

    def _keep(self, results: list[StepResult]) -> list[StepResult]:
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


class LaunchedLinkCounts(LinkCounts):
    """The same where steps are queued."""

    def __init__(self, executor: LaunchingExecutor, num_ranks: int) -> None:
        super().__init__(executor, num_ranks)
        self._launching = executor

    def launch(self, plans: Sequence[StepPlan]) -> Callable[[], list[StepResult]]:
        wait = self._launching.launch(plans)
        return lambda: self._keep(wait())


def count_links(executor: Executor, num_ranks: int) -> LinkCounts:
    """Goes on launching if the executor does."""
    if isinstance(executor, LaunchingExecutor):
        return LaunchedLinkCounts(executor, num_ranks)
    return LinkCounts(executor, num_ranks)
