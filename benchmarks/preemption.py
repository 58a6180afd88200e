"""`python -m benchmarks.preemption`: the costs of running requests in KV memory that does not hold them all.

Requests with prompts of their own run with room for all of them, then in smaller pools, where some are preempted and
computed again, then with room once more. Their tokens must be the same. Some steps no scheduler can save: a request
holds a block for as many steps as it generates tokens behind it, and a pool has a fixed number of blocks in each step.
"At least" is the time of these steps with every token computed once, by the measured times of steps.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean

import click

from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.model.demo import ensure_demo
from moeserve.plan import Pending, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.cost_model import CostModel
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import LocalExecutor, Steps
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
        """Blocks with which no request lacks any: for every seat as many as the longest request needs."""
        return self.seats * max(num_blocks(len(prompt) + count) for prompt, count in self.requests)

    @property
    def held(self) -> int:
        """Blocks that the requests hold, summed over the steps in which they generate their tokens."""
        return sum(num_blocks(len(prompt) + done) for prompt, count in self.requests for done in range(count))

    @property
    def need(self) -> int:
        """Blocks that requests in all seats hold on average."""
        return self.seats * self.held // sum(count for _, count in self.requests)


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
    """Executes steps, and counts them and their rows into a run."""

    def __init__(self, executor: LocalExecutor, run: Run) -> None:
        self._executor = executor
        self._run = run
        self.latest_rows = 0

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        self.latest_rows = sum(plan.num_tokens for plan in plans)
        self._run.num_steps += 1
        self._run.num_rows += self.latest_rows
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
        # The duration of steps, learnt in all runs.
        self.cost = CostModel()

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
        executor = CountingExecutor(self._executor, run)
        steps = Steps(scheduler, executor, self._depth)
        begin = began = time.perf_counter()
        while (outputs := steps.advance()) is not None:
            for output in outputs:
                if output.token_id is None:
                    raise click.ClickException(f"request {output.request.request_id} failed: {output.error}")
                run.tokens[output.request.request_id].append(output.token_id)
            now = time.perf_counter()
            self.cost.observe(executor.latest_rows, 0, now - began)
            began = now
        run.seconds = time.perf_counter() - begin
        run.num_preemptions = scheduler.counters.preemptions
        click.echo(f"{run.num_steps} steps in {pool} blocks: {run.seconds:.1f} s", err=True)
        return run


def random_load(requests: int, seats: int, prompt: tuple[int, int], output: tuple[int, int]) -> Load:
    """Return requests whose prompts and outputs have lengths from `prompt` and `output`, bounds included."""
    draw = Random(1)
    found = []
    for _ in range(requests):
        tokens = array("i", (draw.randrange(100, 250) for _ in range(draw.randint(*prompt))))
        found.append((tokens, draw.randint(*output)))
    return Load(found, seats)


def report(load: Load, pool: int, roomy: Run, tight: Run, cost: CostModel, room_s: float) -> str:
    """Return a row of the table, in multiples of the run with room, which takes `room_s`."""
    least_steps = max(-(-load.held // pool), roomy.num_steps)
    least_s = least_steps * cost.seconds(round(roomy.num_rows / least_steps), 0)
    # The duration of steps is learnt as a curve: with room it has an error as well.
    least_s *= room_s / (roomy.num_steps * cost.seconds(round(roomy.num_rows / roomy.num_steps), 0))
    figures = [f"{pool / load.need:.2f}", f"{pool}", f"{tight.num_preemptions}"]
    figures += [f"{tight.num_rows / roomy.num_rows:.2f}", f"{tight.num_steps / roomy.num_steps:.2f}"]
    figures += [f"{least_steps / roomy.num_steps:.2f}", f"{tight.seconds / room_s:.2f}", f"{least_s / room_s:.2f}"]
    return f"| {' | '.join([*figures, f'{tight.seconds / least_s:.2f}'])} |"


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model; the demo unless given.")
@click.option("--requests", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seats", type=click.IntRange(min=1), default=8, show_default=True, help="How many run at once.")
@click.option("--prompt", type=(int, int), default=(20, 100), show_default=True, help="Tokens, least and most.")
@click.option("--output", type=(int, int), default=(30, 80), show_default=True, help="Tokens, least and most.")
@click.option(
    "--pool", multiple=True, type=float, default=(1.0, 0.7, 0.5), show_default=True, help="Parts of the need."
)
@click.option("--rounds", type=click.IntRange(min=1), default=1, show_default=True)
def command(
    model: Path | None,
    requests: int,
    seats: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    pool: tuple[float, ...],
    rounds: int,
) -> None:
    """Print tokens, steps and time in small pools, as multiples of the figures with room for all requests.

    A pool of 1.0 holds what requests in all seats need on average.
    """
    load = random_load(requests, seats, prompt, output)
    bench = Bench(model or ensure_demo(), load)
    pools = [max(round(part * load.need), load.room // load.seats) for part in pool]
    # The first steps of each size take longer than later ones.
    bench.run(load.room)
    bench.cost = CostModel()
    roomy = [bench.run(load.room)]
    tight: dict[int, list[Run]] = {blocks: [] for blocks in pools}
    for _ in range(rounds):
        for blocks, runs in tight.items():
            runs.append(bench.run(blocks))
            if runs[-1].tokens != roomy[0].tokens:
                raise click.ClickException(f"The tokens in {blocks} blocks are not those with room.")
        roomy.append(bench.run(load.room))
    room_s = mean(run.seconds for run in roomy)
    headings = ["of the need", "blocks", "preemptions", "tokens computed", "steps", "steps at least"]
    click.echo(f"| {' | '.join([*headings, 'time', 'time at least', 'times that'])} |")
    click.echo("|---" * (len(headings) + 3) + "|")
    for blocks, runs in tight.items():
        run = replace(runs[0], seconds=mean(run.seconds for run in runs))
        click.echo(report(load, blocks, roomy[0], run, bench.cost, room_s))


if __name__ == "__main__":
    command()
