"""An engine whose model is in stages, all in this process: rows go from stage to stage through queues."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.token_engine import TokenEngine
from experts.parallel.collectives import Collectives
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.rank import Rank
from moeserve.engine.ranks.pipeline import joined
from moeserve.plan import StepPlan, StepResult
from moeserve.scheduling.turns import Turns


@dataclass
class QueuedRows:
    """Stands for the `Collectives` of a rank; borders[r] are the rows on their way from rank r to the next one."""

    rank: int
    num_ranks: int
    borders: list[deque[Tensor]]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def send(self, rows: Tensor, to_rank: int) -> None:
        assert to_rank == self.rank + 1
        self.borders[self.rank].append(rows)

    def receive(self, rows: Tensor, from_rank: int) -> None:
        assert from_rank == self.rank - 1
        rows.copy_(self.borders[from_rank].popleft())

    def all_gather(self, rows: Tensor) -> Tensor:
        return rows.repeat(self.num_ranks)

    def close(self) -> None:
        """Leave nothing."""


class StagedExecutor:
    """Computes the first stage of a step when it is launched, and the others when its result is taken.

    most_in_flight: the largest number of steps that were in flight at once. most_of_request: of these, in which one
    request was.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._in_flight: list[StagedStep] = []
        self.most_in_flight = self.most_of_request = 0

    def launch(self, plans: Sequence[StepPlan]) -> StagedStep:
        (plan,) = plans
        step = StagedStep(plan, self._ranks[0].runner.launch(plan).result(), self._ranks[1:], self._in_flight)
        self._in_flight.append(step)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        named = Counter(chunk.request_id for step in self._in_flight for chunk in step.plan.chunks)
        self.most_of_request = max(self.most_of_request, *named.values())
        return step

    def check(self) -> None:
        """Do nothing: no rank can be missing."""


@dataclass
class StagedStep:
    plan: StepPlan
    first: StepResult
    others: Sequence[Rank]
    in_flight: list[StagedStep]
    done: bool = True

    def result(self) -> list[StepResult]:
        assert self.in_flight.pop(0) is self, "a result is taken out of turn"
        return [joined([self.first, *(rank.runner.launch(self.plan).result() for rank in self.others)])]


class StagedEngine(TokenEngine):
    """A `TokenEngine` over the stages of `config.pipeline_parallel_size`."""

    def __init__(self, model_dir: str | Path, config: ServeConfig) -> None:
        directory, num_ranks = Path(model_dir), config.pipeline_parallel_size
        plan, borders = plan_model(directory, config), [deque[Tensor]() for _ in range(num_ranks - 1)]
        self.ranks = [
            load_rank(
                directory,
                replace(plan, weights_bytes=0),
                config,
                lambda _: None,
                cast("Collectives", QueuedRows(rank, num_ranks, borders)),
            ).start()
            for rank in range(num_ranks)
        ]
        self.executor = StagedExecutor(self.ranks)
        self._schedule(directory, config, self.ranks[0], self.executor, [Turns(num_ranks)])

    def close(self) -> None:
        self.masks.close()
        for rank in self.ranks:
            rank.close()
