"""Lives of an engine over one disk: the scheduler, the tree and the tiers against shadow content, without files."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Collection
from typing import Any

from moeserve.plan import SamplingParams
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import GONE, CopyJob, TierCounters
from radix_cache import Kind, StoredBlock, StoredBlocks, Tier
from tests.support.kv_oracle import Cell, Record
from tests.support.scheduler_simulation import Simulation

SECRET = b"s" * 32


def stored(
    max_bytes: int = 10**9,
    max_age: float = 1000.0,
    *,
    secret: bytes = SECRET,
    model: str = "a",
    tier: Tier = Tier.DISK,
) -> StoredBlocks:
    return StoredBlocks(secret, model * 32, max_bytes, max_age, tier)


class Disk:
    """Files by name, for several lives of an engine; each has a block's slots, or the tokens of a state."""

    def __init__(self) -> None:
        self.files: dict[bytes, tuple[StoredBlock, list[Cell | None] | array[int]]] = {}


class Life(Simulation):
    """An engine over a disk, or a host's memory. Copies end when `random` says, in any order; `full` and damaged files
    fail."""

    def __init__(
        self,
        disk: Disk,
        choices: random.Random,
        *,
        max_bytes: int = 10**9,
        tier: Tier = Tier.DISK,
        hosted: Collection[bytes] = (),
        **options: Any,
    ) -> None:
        """hosted: the names of blocks that are in the host's memory above the disk."""
        self.blocks = stored(max_bytes, tier=tier)
        for block, _ in disk.files.values():
            self.blocks.put(block)
        super().__init__(**options, stored=self.blocks)
        self.disk, self.random, self.is_full, self.hosted = disk, choices, False, hosted
        self.jobs: deque[CopyJob] = deque()

    @property
    def counters(self) -> TierCounters:
        """Of the tier below memory."""
        assert self.tier is not None
        return self.tier.counters

    def step(self) -> Any:
        while self.jobs and self.random.random() < 0.5:
            self.end(self.jobs.popleft() if self.random.random() < 0.7 else self.jobs.pop())
        self.jobs += self.take_copies()
        outputs = super().step()
        self.blocks.check()
        return outputs

    def take_copies(self, now: float = 0.0) -> list[CopyJob]:
        """Return the copies that are to begin."""
        assert self.tier is not None
        return self.scheduler.waiting.take_jobs(self.tier, now)

    def end(self, job: CopyJob) -> None:
        oracle = self.oracles[job.rank]
        memories: dict[Kind, Any] = {Kind.KV: oracle.kv, Kind.WINDOW: oracle.window_kv, Kind.STATE: oracle.rows}
        if job.chores is not None:
            for path in job.chores.removals:
                self.disk.files.pop(bytes.fromhex(path.rsplit("/", 1)[1]), None)
        sizes: list[int] = []
        error = None
        for copy in job.copies:
            if job.is_write:
                if self.is_full:
                    error = "No space left on device"
                    break
                content = memories[copy.kind][copy.block][:]
                tokens = array("i", copy.tokens).tolist()
                held = (
                    content.tolist()[-len(tokens) :]
                    if copy.kind is Kind.STATE
                    else [cell and cell[0] for cell in content]
                )
                assert held == tokens, "a block was given away while it was copied"
                self.disk.files[copy.name] = StoredBlock(copy.name, copy.folder, 100, 0.0), content
            elif copy.name not in self.disk.files:
                error = GONE
                break
            else:
                memories[copy.kind][copy.block] = self.disk.files[copy.name][1][:]
            sizes.append(100)
        hosted = [copy.name in self.hosted for copy in job.copies[: len(sizes)]]
        assert self.tier is not None
        self.scheduler.waiting.end_job(self.tier, Result(job, sizes, 0.01, error, hosted=hosted), 0.0)

    def settle(self) -> None:
        """Run to the end, copies included."""
        for _ in range(3000):
            if (
                self.scheduler.is_idle
                and not self.jobs
                and not any(cache.lower is not None and cache.lower.num_wanted for cache in self.caches)
            ):
                return
            self.step()
        raise AssertionError("no end in sight")


def ask(life: Life, name: str, prompt: list[int], max_tokens: int = 4, namespace: str = "") -> Record:
    return life.add(name, prompt, SamplingParams(max_tokens=max_tokens), namespace=namespace)
