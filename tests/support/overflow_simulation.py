"""Requests that come together to too little KV memory, on a scripted clock.

The scheduler, the tree and the decisions are the service's; steps and copies take as long as a script says.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from random import Random

from moeserve.plan import ChunkResult, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import CopyJob, LowerTier
from moeserve.scheduling.overflow import Overflow
from moeserve.scheduling.pacing import UNBOUNDED, Pace
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache, StoredBlocks

_BUDGET = 256
# Rows and milliseconds of a step, roughly as the demo takes them on two cores.
_COSTS = ((0, 0), (1, 43), (4, 81), (16, 97), (64, 158), (512, 716))
_ATTENDED_S = 2e-7  # seconds per row and attended position


@dataclass(frozen=True, slots=True)
class Study:
    """Requests of `prompt` + `output` tokens in KV memory for a `share` of what all of them need at their ends.

    token_s: seconds that reading, or writing, a token's KV takes.
    """

    share: float
    token_s: float
    block_size: int = 16
    requests: int = 16
    seats: int = 16
    prompt: int = 120
    output: int = 96


def step_seconds(plan: StepPlan) -> float:
    """Return the seconds of a step."""
    rows = plan.num_tokens
    place = max(1, bisect_left([knot for knot, _ in _COSTS], rows))
    (low, from_ms), (high, to_ms) = _COSTS[place - 1], _COSTS[min(place, len(_COSTS) - 1)]
    attended = sum(len(chunk.token_ids) * (chunk.start + 0.5 * len(chunk.token_ids)) for chunk in plan.chunks)
    return (from_ms + (to_ms - from_ms) * (rows - low) / max(1, high - low)) / 1000 + _ATTENDED_S * attended


class ScriptedCopies:
    """Copies that take `block_s` per block; reads, and writes, come one after another."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self._free_at = {False: 0.0, True: 0.0}
        self._open: dict[bool, deque[tuple[float, float, CopyJob]]] = {False: deque(), True: deque()}

    def start(self, job: CopyJob, now: float) -> None:
        seconds = self._block_s * len(job.copies)
        self._free_at[job.is_write] = end = max(now, self._free_at[job.is_write]) + seconds
        self._open[job.is_write].append((end, seconds, job))

    def take(self, now: float) -> list[Result[CopyJob]]:
        """Return the results of jobs that have ended."""
        results = []
        for jobs in self._open.values():
            while jobs and jobs[0][0] <= now:
                _, seconds, job = jobs.popleft()
                results.append(Result(job, [1] * len(job.copies), seconds))
        return results

    @property
    def is_busy(self) -> bool:
        return any(self._open.values())

    def next_end(self) -> float:
        return min(jobs[0][0] for jobs in self._open.values() if jobs)


def seconds_of(study: Study, policy: Overflow) -> float:
    """Return the seconds until all requests have ended."""
    size = study.block_size
    longest = study.prompt + study.output
    least = -(-longest // size)
    num_blocks = max(least, round(study.share * study.requests * least))
    cache = PrefixCache(num_blocks, size, stored=StoredBlocks(bytes(32), "0" * 32, 10**12))
    pace = Pace(UNBOUNDED, _BUDGET, study.seats)
    tier = LowerTier([cache], pace, policy)
    scheduler = Scheduler(
        [cache],
        max_num_seqs=study.seats,
        max_num_batched_tokens=_BUDGET,
        max_num_queued_reqs=study.requests,
        max_model_len=longest,
        pace=pace,
        parts=[tier],
    )
    draw, copies = Random(1), ScriptedCopies(size * study.token_s)
    for number in range(study.requests):
        prompt = array("i", (draw.randrange(10**6) for _ in range(study.prompt)))
        scheduler.add(Request(f"{number}", prompt, SamplingParams(study.output)))
    now = 0.0
    while not scheduler.is_idle:
        scheduler.set_time(now)
        for result in copies.take(now):
            scheduler.waiting.end_job(tier, result, now)
        for job in scheduler.waiting.take_jobs(tier, now):
            copies.start(job, now)
        plans = scheduler.schedule()
        if plans is None:
            now = max(now, copies.next_end())
            continue
        seconds = step_seconds(plans[0])
        now += seconds
        scheduler.commit(plans, [results_of(plans[0])])
        scheduler.count_step(seconds)
    return now


def results_of(plan: StepPlan) -> StepResult:
    """Return the results of a plan in which each request samples one token."""
    return StepResult(plan.step, [ChunkResult(None if chunk.sampling is None else 5) for chunk in plan.chunks])
