"""`python -m benchmarks.kv_overflow`: KV of preempted requests that is swapped to disk or computed again.

Requests with prompts of their own come together and run in KV memory for a part of what all of them need at their ends.
Each point runs with every policy in turn; a run has an empty cache and an empty folder. All must give the same tokens.
A drive of less bandwidth than this machine's can be stood in for: each copy of a block then takes as much longer.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory

import click

from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.kv_disk.copier import BlockCopier, make_buffers
from moeserve.engine.kv_disk.files import BlockFiles
from moeserve.engine.kv_disk.opening import memories_of
from moeserve.engine.memory_plan import plan_model
from moeserve.model.demo import ensure_demo
from moeserve.plan import Request, SamplingParams
from moeserve.scheduling.overflow import Fate, Overflow
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import LocalExecutor, Steps
from radix_cache import BlockCopy, PrefixCache, StoredBlocks

MAX_BATCHED_TOKENS = 256
_FINGERPRINT = "0" * 32
_COPY_SECONDS = 0.002  # as the engine waits while nothing can be computed before a copy has ended


class SlowFiles(BlockFiles):
    """Files on a drive that moves `bytes_per_s`, beside what this machine's takes."""

    bytes_per_s: float | None = None

    def write(self, copy: BlockCopy, content: memoryview) -> int:
        return self._delayed(super().write(copy, content))

    def read(self, copy: BlockCopy, content: memoryview) -> int:
        return self._delayed(super().read(copy, content))

    def _delayed(self, num_bytes: int) -> int:
        if self.bytes_per_s is not None:
            time.sleep(num_bytes / self.bytes_per_s)
        return num_bytes


@dataclass(slots=True)
class Run:
    """ends_s: when each request ended. num_rows: of all steps."""

    tokens: dict[str, list[int]]
    ends_s: list[float] = field(default_factory=list)
    num_rows: int = 0
    num_preemptions: int = 0
    num_swapped: int = 0
    read_bytes: int = 0

    @property
    def seconds(self) -> float:
        return max(self.ends_s)


class Bench:
    """One model with blocks of one size, and memory for all requests at their ends."""

    def __init__(self, folder: Path, block_size: int, prompts: list[array[int]], output: int, seats: int) -> None:
        self._prompts, self._output, self._seats, self._block_size = prompts, output, seats, block_size
        self.longest = max(map(len, prompts)) + output
        config = ServeConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=self.longest,
            block_size=block_size,
        )
        rank = load_rank(folder, plan_model(folder, config), config, lambda _: None).start()
        self.num_blocks = sum(-(-(len(prompt) + output) // block_size) for prompt in prompts)
        if rank.model.kv.num_blocks < self.num_blocks:
            raise click.ClickException(f"The KV memory has {rank.model.kv.num_blocks} blocks of {self.num_blocks}.")
        self._memories = memories_of(rank)
        self._executor = LocalExecutor(rank.runner)
        self._depth = rank.depth

    def run(self, num_blocks: int, policy: Overflow, bytes_per_s: float | None) -> Run:
        """Run all requests in the first blocks of memory."""
        with TemporaryDirectory() as folder:
            files = SlowFiles(Path(folder), _FINGERPRINT)
            files.bytes_per_s = bytes_per_s
            files.describe(b"{}")
            copier = BlockCopier(files, lambda: make_buffers(self._memories))
            stored = StoredBlocks(bytes(32), _FINGERPRINT, 10**12)
            scheduler = Scheduler(
                [PrefixCache(num_blocks, self._block_size, stored=stored)],
                max_num_seqs=self._seats,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_num_queued_reqs=len(self._prompts),
                max_model_len=self.longest,
                run_ahead=self._depth > 0,
                overflow=policy,
            )
            run = Run({f"{number}": [] for number in range(len(self._prompts))})
            try:
                self._serve(scheduler, copier, run)
            finally:
                while copier.is_busy:
                    copier.take(1.0)
                copier.close()
            assert scheduler.lower is not None
            run.num_preemptions = scheduler.counters.preemptions
            run.num_swapped = scheduler.lower.counters.fates[Fate.SWAP]
            run.read_bytes = scheduler.lower.counters.read_bytes
        return run

    def _serve(self, scheduler: Scheduler, copier: BlockCopier, run: Run) -> None:
        for name, prompt in zip(run.tokens, self._prompts, strict=True):
            scheduler.add(Request(name, prompt[:], SamplingParams(self._output, temperature=0.0)))
        steps = Steps(scheduler, self._executor, self._depth)
        begin = time.perf_counter()
        while not scheduler.is_idle:
            began = time.perf_counter()
            scheduler.set_time(began)
            exchange(scheduler, copier)
            outputs = steps.advance()
            if outputs is None:
                exchange(scheduler, copier, _COPY_SECONDS)
                continue
            now = time.perf_counter()
            scheduler.count_step(now - began)
            for output in outputs:
                if output.token_id is None:
                    raise click.ClickException(f"request {output.request.request_id} failed: {output.error}")
                run.tokens[output.request.request_id].append(output.token_id)
                if output.finish_reason is not None:
                    run.ends_s.append(now - begin)


def exchange(scheduler: Scheduler, copier: BlockCopier, seconds: float = 0.0) -> None:
    """Do what the engine does between steps."""
    for result in copier.take(seconds):
        scheduler.waiting.end_copy(result, time.time())
    for job in scheduler.waiting.take_copies(time.time()):
        copier.start(job)


def points(
    bench: Bench, shares: tuple[float, ...], bandwidths: tuple[float, ...], block_size: int, rounds: int
) -> Iterator[str]:
    """Yield a row of the table for each point."""
    least = -(-bench.longest // block_size)
    expected: dict[str, list[int]] | None = None
    bench.run(bench.num_blocks, Overflow.AUTO, None)  # the first steps of each size take longer than later ones
    for share, mbytes in product(shares, bandwidths):
        num_blocks = max(round(share * bench.num_blocks), least)
        runs: dict[Overflow, list[Run]] = {policy: [] for policy in Overflow}
        for number in range(rounds):
            for policy in list(Overflow)[:: 1 if number % 2 else -1]:
                run = bench.run(num_blocks, policy, mbytes * 1e6 or None)
                expected = expected or run.tokens
                if run.tokens != expected:
                    raise click.ClickException(f"{policy} in {num_blocks} blocks gives other tokens.")
                runs[policy].append(run)
        seconds = {policy: mean(run.seconds for run in of) for policy, of in runs.items()}
        better = min(seconds[Overflow.SWAP], seconds[Overflow.RECOMPUTE])
        auto = runs[Overflow.AUTO]
        figures = [f"{block_size}", f"{bench.longest}", f"{share:.0%}", f"{mbytes:g}" if mbytes else "own"]
        figures += [f"{seconds[policy]:.1f}" for policy in (Overflow.RECOMPUTE, Overflow.SWAP, Overflow.AUTO)]
        figures += [f"{seconds[Overflow.AUTO] / better:.2f}"]
        figures += [f"{mean(run.num_preemptions for run in auto):.0f}", f"{mean(run.num_swapped for run in auto):.0f}"]
        yield f"| {' | '.join(figures)} |"


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model; the demo unless given.")
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--seats", type=click.IntRange(min=1), default=16, show_default=True, help="How many run at once.")
@click.option(
    "--length", multiple=True, type=(int, int), default=((94, 64),), show_default=True, help="Prompt, output."
)
@click.option("--share", multiple=True, type=float, default=(0.12, 0.25, 0.5), show_default=True)
@click.option("--block-size", multiple=True, type=int, default=(16,), show_default=True)
@click.option("--bandwidth", multiple=True, type=float, default=(0.0,), help="Of the drive, in MB/s; 0 is this one's.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True)
def command(
    model: Path | None,
    requests: int,
    seats: int,
    length: tuple[tuple[int, int], ...],
    share: tuple[float, ...],
    block_size: tuple[int, ...],
    bandwidth: tuple[float, ...],
    rounds: int,
) -> None:
    """Print the seconds until all requests have ended, by policy, at each point."""
    headings = ["block size", "prompt + output", "share of KV", "drive, MB/s", "recompute, s", "swap, s", "auto, s"]
    click.echo(f"| {' | '.join([*headings, 'auto / better', 'preemptions', 'swaps'])} |")
    click.echo("|---" * (len(headings) + 3) + "|")
    draw = Random(1)
    for size, (prompt, output) in product(block_size, length):
        prompts = [array("i", (draw.randrange(100, 250) for _ in range(prompt))) for _ in range(requests)]
        for row in points(Bench(model or ensure_demo(), size, prompts, output, seats), share, bandwidth, size, rounds):
            click.echo(row)


if __name__ == "__main__":
    command()
