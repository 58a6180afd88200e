"""`python -m benchmarks.preemption`: what it costs to run requests in KV memory that does not hold them all.

Requests with prompts of their own run with room for all of them, and in turn with that in smaller pools, where some are
preempted and computed again. Their tokens must be the same. Some steps no scheduler can save: a request holds a block
for as many steps as it generates tokens behind it, and a pool has only so many blocks in each step.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import click

from moeserve.assemble import load_rank
from moeserve.config import ServeConfig
from moeserve.memory_plan import plan_model
from moeserve.model.demo import ensure_demo
from moeserve.plan import Pending, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduler import Scheduler
from moeserve.steps import LocalExecutor, Steps
from radix_cache import PrefixCache

BLOCK_SIZE = 16
MAX_BATCHED_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, (prompt, tokens to generate) each; `seats` of them run at once where there is room."""

    requests: list[tuple[array[int], int]]
    seats: int

    @property
    def room(self) -> int:
        """Blocks in which nobody lacks any: those of the longest request for every seat."""
        return self.seats * max(num_blocks(len(prompt) + count) for prompt, count in self.requests)

    def least_steps(self, pool: int) -> int:
        """Return how many steps the requests take at least in a pool of that many blocks."""
        held = sum(num_blocks(len(prompt) + done) for prompt, count in self.requests for done in range(count))
        return -(-held // pool)


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True)
class Run:
    """`num_rows`: tokens that were computed, again and again where requests were preempted."""

    tokens: dict[str, list[int]]
    seconds: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    num_preemptions: int = 0


class CountingExecutor:
    """Executes steps and counts them and their rows into a run."""

    def __init__(self, executor: LocalExecutor, run: Run) -> None:
        self._executor = executor
        self._run = run

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        self._run.num_steps += 1
        self._run.num_rows += sum(plan.num_tokens for plan in plans)
        return self._executor.launch(plans)

    def check(self) -> None:
        self._executor.check()


class Bench:
    """One model. Each run has a scheduler and an empty cache of its own, over as many blocks as it may use."""

    def __init__(self, folder: Path, load: Load) -> None:
        config = ServeConfig(
            max_num_seqs=load.seats,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=BLOCK_SIZE * load.room // load.seats,
            block_size=BLOCK_SIZE,
        )
        rank = load_rank(folder, plan_model(folder, config), config, lambda _: None).start()
        if rank.model.kv.num_blocks < load.room:
            raise click.ClickException(f"The KV memory has {rank.model.kv.num_blocks} blocks of {load.room}.")
        self._executor = LocalExecutor(rank.runner)
        self._depth = rank.depth
        self._load = load

    def run(self, pool: int) -> Run:
        """Run the load in the first `pool` blocks."""
        load = self._load
        scheduler = Scheduler(
            [PrefixCache(pool, BLOCK_SIZE)],
            max_num_seqs=load.seats,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_queued_reqs=len(load.requests),
            max_model_len=BLOCK_SIZE * load.room // load.seats,
            run_ahead=self._depth > 0,
        )
        run = Run({f"{number}": [] for number in range(len(load.requests))})
        for name, (prompt, count) in zip(run.tokens, load.requests, strict=True):
            scheduler.add(Request(name, prompt[:], SamplingParams(count, temperature=0.0)))
        steps = Steps(scheduler, CountingExecutor(self._executor, run), self._depth)
        begin = time.perf_counter()
        while (outputs := steps.advance()) is not None:
            for output in outputs:
                if output.token_id is None:
                    raise click.ClickException(f"request {output.request.request_id} failed: {output.error}")
                run.tokens[output.request.request_id].append(output.token_id)
        run.seconds = time.perf_counter() - begin
        run.num_preemptions = scheduler.counters.preemptions
        return run


def random_load(requests: int, seats: int, prompt: tuple[int, int], output: tuple[int, int]) -> Load:
    """Return requests whose prompts and outputs have lengths from `prompt` and `output`, bounds included."""
    draw = Random(1)
    found = []
    for _ in range(requests):
        tokens = array("i", (draw.randrange(100, 250) for _ in range(draw.randint(*prompt))))
        found.append((tokens, draw.randint(*output)))
    return Load(found, seats)


def report(bench: Bench, load: Load, part: float, rounds: int) -> str:
    """Run in turn with room and in a pool of `part` of it. Return a row of the table."""
    pool = max(round(part * load.room), load.room // load.seats)
    pairs = []
    for _ in range(rounds):
        roomy, tight = bench.run(load.room), bench.run(pool)
        if roomy.tokens != tight.tokens:
            raise click.ClickException(f"The tokens in {pool} blocks are not those with room.")
        pairs.append((roomy, tight))
    roomy, tight = pairs[0]
    ratio = median(second.seconds / first.seconds for first, second in pairs)
    least = max(load.least_steps(pool), roomy.num_steps)
    recomputed = tight.num_rows - roomy.num_rows
    figures = [f"{part:.0%}", f"{pool}", f"{tight.num_preemptions}", f"{recomputed}"]
    figures += [f"{tight.num_steps / roomy.num_steps:.2f}", f"{least / roomy.num_steps:.2f}", f"{ratio:.2f}"]
    return f"| {' | '.join(figures)} |"


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model; the demo unless given.")
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--seats", type=click.IntRange(min=1), default=16, show_default=True, help="How many run at once.")
@click.option("--prompt", type=(int, int), default=(20, 200), show_default=True, help="Tokens, least and most.")
@click.option("--output", type=(int, int), default=(50, 150), show_default=True, help="Tokens, least and most.")
@click.option("--pool", multiple=True, type=float, default=(0.6, 0.45, 0.3), show_default=True, help="Parts of room.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Pairs of runs.")
def command(
    model: Path | None,
    requests: int,
    seats: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    pool: tuple[float, ...],
    rounds: int,
) -> None:
    """Print steps and time in small pools, as multiples of those with room for all requests."""
    load = random_load(requests, seats, prompt, output)
    bench = Bench(model or ensure_demo(), load)
    bench.run(load.room)
    click.echo("| pool | blocks | preemptions | tokens computed again | steps | steps at least | time |")
    click.echo("|---|---|---|---|---|---|---|")
    for part in pool:
        click.echo(report(bench, load, part, rounds))


if __name__ == "__main__":
    command()
