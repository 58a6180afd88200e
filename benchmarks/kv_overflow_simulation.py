"""`python -m benchmarks.kv_overflow_simulation`: swapping against computing again, on a scripted clock.

The scheduler, the tree and the decisions are the service's; steps and copies take as long as a script says, so any
drive and any length can be tried, and every run of a point is the same.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

import click

from moeserve.plan import ChunkResult, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.lower_tier import CopyJob, CopyResult
from moeserve.scheduling.overflow import Fate, Overflow
from moeserve.scheduling.scheduler import Scheduler
from radix_cache import PrefixCache, StoredBlocks

BUDGET = 256
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
    requests: int = 32
    seats: int = 32
    prompt: int = 375
    output: int = 256


@dataclass(frozen=True, slots=True)
class Outcome:
    """seconds: until all requests have ended. num_rows: computed in all steps."""

    seconds: float
    num_rows: int
    num_preemptions: int
    num_swaps: int


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

    def take(self, now: float) -> list[CopyResult]:
        """Return the results of jobs that have ended."""
        results = []
        for jobs in self._open.values():
            while jobs and jobs[0][0] <= now:
                _, seconds, job = jobs.popleft()
                results.append(CopyResult(job, [1] * len(job.copies), seconds))
        return results

    @property
    def is_busy(self) -> bool:
        return any(self._open.values())

    def next_end(self) -> float:
        return min(jobs[0][0] for jobs in self._open.values() if jobs)


def simulate(study: Study, policy: Overflow) -> Outcome:
    """Run all requests of a study, which come together."""
    size = study.block_size
    longest = study.prompt + study.output
    least = -(-longest // size)
    num_blocks = max(least, round(study.share * study.requests * least))
    cache = PrefixCache(num_blocks, size, stored=StoredBlocks(bytes(32), "0" * 32, 10**12))
    scheduler = Scheduler(
        [cache],
        max_num_seqs=study.seats,
        max_num_batched_tokens=BUDGET,
        max_num_queued_reqs=study.requests,
        max_model_len=longest,
        overflow=policy,
    )
    draw, copies = Random(1), ScriptedCopies(size * study.token_s)
    for number in range(study.requests):
        prompt = array("i", (draw.randrange(10**6) for _ in range(study.prompt)))
        scheduler.add(Request(f"{number}", prompt, SamplingParams(study.output)))
    now, num_rows = 0.0, 0
    while not scheduler.is_idle:
        scheduler.set_time(now)
        for result in copies.take(now):
            scheduler.waiting.end_copy(result, now)
        for job in scheduler.waiting.take_copies(now):
            copies.start(job, now)
        plans = scheduler.schedule()
        if plans is None:
            now = max(now, copies.next_end())
            continue
        seconds = step_seconds(plans[0])
        now, num_rows = now + seconds, num_rows + plans[0].num_tokens
        scheduler.commit(plans, [results_of(plans[0])])
        scheduler.count_step(seconds)
    assert scheduler.lower is not None
    fates = scheduler.lower.counters.fates
    return Outcome(now, num_rows, scheduler.counters.preemptions, fates[Fate.SWAP])


def results_of(plan: StepPlan) -> StepResult:
    """Return the results of a plan in which each request samples one token."""
    return StepResult(plan.step, [ChunkResult(None if chunk.sampling is None else 5) for chunk in plan.chunks])


def row(study: Study, found: Mapping[Overflow, Outcome]) -> str:
    """Return the row of a table."""
    auto = found[Overflow.AUTO]
    better = min(found[Overflow.SWAP].seconds, found[Overflow.RECOMPUTE].seconds)
    figures = [f"{study.block_size}", f"{study.prompt} + {study.output}", f"{study.share:.0%}"]
    figures += [f"{1000 * study.token_s:g}"]
    figures += [f"{found[policy].seconds:.0f}" for policy in (Overflow.RECOMPUTE, Overflow.SWAP, Overflow.AUTO)]
    figures += [f"{auto.seconds / better:.3f}", f"{auto.num_preemptions}", f"{auto.num_swaps}"]
    return f"| {' | '.join(figures)} |"


def draw_figures(found: Mapping[Study, Mapping[Overflow, Outcome]], file: Path) -> None:
    """Draw the seconds of swap and auto, as shares of recompute's, over the share of KV; a panel per time of a copy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = sorted({study.token_s for study in found})
    kinds = sorted({(study.prompt, study.output, study.block_size) for study in found})
    figure, panels = pyplot.subplots(1, len(times), figsize=(4 * len(times), 3.6), dpi=110, sharey=True, squeeze=False)
    for token_s, axes in zip(times, panels[0], strict=True):
        for color, (prompt, output, size) in enumerate(kinds):
            studies = [Study(one.share, token_s, size, prompt=prompt, output=output) for one in found]
            studies = sorted(set(studies), key=lambda study: study.share)
            for policy, line in ((Overflow.SWAP, "--"), (Overflow.AUTO, "-")):
                ratios = [found[one][policy].seconds / found[one][Overflow.RECOMPUTE].seconds for one in studies]
                label = f"{policy}, {prompt} + {output}, blocks of {size}"
                shares = [100 * one.share for one in studies]
                axes.plot(shares, ratios, line, marker=".", color=f"C{color}", label=label)
        axes.axhline(1, color="gray", linewidth=0.8)
        axes.set_title(f"{1000 * token_s:g} ms to copy a token", fontsize=10)
        axes.set_xlabel("KV memory, % of the requests' need")
    panels[0][0].set_ylabel("seconds / seconds of recompute")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=7)
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.savefig(file)
    pyplot.close(figure)


@click.command()
@click.option("--length", multiple=True, type=(int, int), default=((375, 256),), show_default=True)
@click.option("--share", multiple=True, type=float, default=(0.12, 0.25, 0.5), show_default=True)
@click.option("--block-size", multiple=True, type=int, default=(16,), show_default=True)
@click.option("--token-ms", multiple=True, type=float, default=(0.05, 0.5, 1.5, 5.0), show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="A PNG to write.")
def command(
    length: tuple[tuple[int, int], ...],
    share: tuple[float, ...],
    block_size: tuple[int, ...],
    token_ms: tuple[float, ...],
    plot: Path | None,
) -> None:
    """Print the seconds until all of 32 requests have ended, by policy, at each point."""
    headings = ["block size", "prompt + output", "share of KV", "copy of a token, ms", "recompute, s", "swap, s"]
    click.echo(f"| {' | '.join([*headings, 'auto, s', 'auto / better', 'preemptions', 'swaps'])} |")
    click.echo("|---" * (len(headings) + 4) + "|")
    studies = [
        Study(part, ms / 1000, size, prompt=prompt, output=output)
        for size, (prompt, output), part, ms in product(block_size, length, share, token_ms)
    ]
    found = {}
    for study in studies:
        found[study] = {policy: simulate(study, policy) for policy in Overflow}
        click.echo(row(study, found[study]))
    if plot is not None:
        draw_figures(found, plot)


if __name__ == "__main__":
    command()
