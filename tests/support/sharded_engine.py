"""An engine whose model is in shards, all in this process: a thread for each rank, and one runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from benchmarks.token_engine import TokenEngine
from experts.parallel.collectives import Collectives
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.rank import Rank
from moeserve.plan import Computed, StepPlan, StepResult

ResultT = TypeVar("ResultT")


@dataclass
class Table:
    """Where the ranks lay what they gather. turn: held by the rank that computes."""

    num_ranks: int
    turn: threading.Lock = field(default_factory=threading.Lock)
    rows: dict[int, Tensor] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.num_ranks, timeout=60)


@dataclass
class TableCollectives:
    """Stands for the `Collectives` of a rank."""

    rank: int
    num_ranks: int
    table: Table

    def part_of(self, size: int) -> TableCollectives:
        assert size == self.num_ranks
        return self

    def all_gather(self, rows: Tensor) -> Tensor:
        self.table.rows[self.rank] = rows
        self._meet()
        gathered = torch.cat([self.table.rows[rank] for rank in range(self.num_ranks)])
        self._meet()
        return gathered

    def _meet(self) -> None:
        self.table.turn.release()
        self.table.barrier.wait()
        self.table.turn.acquire()

    def be_patient(self, seconds: float) -> None:
        """Wait as the barrier does."""

    def close(self) -> None:
        """Leave nothing."""


class ShardedExecutor:
    """Computes each step on all ranks, and checks that all have the same results."""

    def __init__(self, ranks: Sequence[Rank], pool: ThreadPoolExecutor, table: Table) -> None:
        self._ranks, self._pool, self._table = ranks, pool, table

    def launch(self, plans: Sequence[StepPlan]) -> Computed[list[StepResult]]:
        (plan,) = plans
        futures = [self._pool.submit(self._compute, rank, plan) for rank in self._ranks]
        first, *others = together(futures, self._table)
        for other in others:
            assert other.chunks == first.chunks
        return Computed([first])

    def _compute(self, rank: Rank, plan: StepPlan) -> StepResult:
        with self._table.turn:
            return rank.runner.launch(plan).result()

    def check(self) -> None:
        """Do nothing: no rank can be missing."""


def together(futures: Sequence[Future[ResultT]], table: Table) -> list[ResultT]:
    """Return the results of all; a rank that fails fails all of them."""
    for future in futures:
        future.add_done_callback(lambda done: table.barrier.abort() if done.exception() else None)
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


class ShardedEngine(TokenEngine):
    """A `TokenEngine` over the shards of `config.tensor_parallel_size`."""

    def __init__(self, model_dir: str | Path, config: ServeConfig) -> None:
        directory, num_ranks = Path(model_dir), config.tensor_parallel_size
        config = replace(config, record_experts=False)
        plan, table = plan_model(directory, config), Table(num_ranks)
        self._pool = ThreadPoolExecutor(num_ranks)

        def start(number: int) -> Rank:
            with table.turn:
                collectives = cast("Collectives", TableCollectives(number, num_ranks, table))
                return load_rank(directory, plan, config, lambda _: None, collectives).start()

        self.ranks = together([self._pool.submit(start, number) for number in range(num_ranks)], table)
        executor = ShardedExecutor(self.ranks, self._pool, table)
        self._schedule(directory, config, self.ranks[0], executor)

    def close(self) -> None:
        self.masks.close()
        for rank in self.ranks:
            rank.close()
        self._pool.shutdown()
