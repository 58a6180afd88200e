"""`python -m benchmarks.transformers_backend`: what a step costs on transformers' code, beside our own decoder.

Both compute every step, in turns which goes first, so that other work on the machine slows both. The streams go on
with the tokens of our own decoder, and each has its own KV.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import click

from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_caches, build_scheduler
from moeserve.engine.rank import Rank
from moeserve.model.demo import ensure_demo
from moeserve.plan import Computed, Pending, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.steps import Runner, Steps

_PROMPT_TOKENS = 32
_FEW_STEPS = 8


@dataclass
class Both:
    """An executor that computes every step with two decoders and gives the result of the first."""

    runners: tuple[Runner, Runner]
    # For each step: its tokens, the seconds of each decoder, and whether they chose the same tokens.
    steps: list[tuple[int, tuple[float, float], bool]] = field(default_factory=list)

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        (plan,) = plans
        seconds, results = [0.0, 0.0], {}
        for number in (0, 1) if len(self.steps) % 2 else (1, 0):
            begin = time.perf_counter()
            results[number] = self.runners[number].launch(plan).result()
            seconds[number] = time.perf_counter() - begin
        first, second = ([chunk.token_id for chunk in results[number].chunks] for number in (0, 1))
        self.steps.append((plan.num_tokens, (seconds[0], seconds[1]), first == second))
        return Computed([results[0]])

    def check(self) -> None:
        """Do nothing: no other rank can be missing."""


def _load(folder: Path, config: ServeConfig) -> Rank:
    return load_rank(folder, plan_model(folder, config), config, lambda _: None).start()


def _measure(ranks: Sequence[Rank], config: ServeConfig, streams: int, prompt_tokens: int, steps: int) -> Both:
    """Compute a number of streams of random prompts with both decoders."""
    scheduler = build_scheduler(config, ranks[0].model.kv, build_caches(config, ranks[0].model.kv))
    random, vocab_size = Random(streams), ranks[0].model.spec.vocab_size
    for stream in range(streams):
        prompt = array("i", (random.randrange(vocab_size) for _ in range(prompt_tokens)))
        scheduler.add(Request(f"{stream}", prompt, SamplingParams(steps, temperature=0.0)))
    both = Both((ranks[0].runner, ranks[1].runner))
    engine = Steps(scheduler, both, 0)
    while engine.advance() is not None:
        pass
    return both


def _report(what: str, both: Both, num_tokens: int) -> None:
    chosen = [(seconds, same) for tokens, seconds, same in both.steps if tokens == num_tokens][_FEW_STEPS:]
    native, other = (statistics.median(seconds[number] for seconds, _ in chosen) for number in (0, 1))
    ratio = statistics.median(seconds[1] / seconds[0] for seconds, _ in chosen)
    same = sum(same for _, same in chosen)
    click.echo(f"| {what} | {len(chosen)} | {1000 * native:.1f} ms | {1000 * other:.1f} ms | x {ratio:.2f} | {same} |")


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model with a native branch; the demo.")
@click.option("--streams", multiple=True, type=int, default=(1, 16), show_default=True, help="How many at once.")
@click.option("--steps", type=click.IntRange(min=20), default=120, show_default=True, help="Decode steps.")
@click.option(
    "--chunk", type=click.IntRange(min=32), default=256, show_default=True, help="Tokens of a prompt's chunk."
)
def command(model: Path | None, streams: tuple[int, ...], steps: int, chunk: int) -> None:
    """Print the median time of a step on our own decoder and on transformers' code, and the median of their ratios."""
    folder = model or ensure_demo()
    config = ServeConfig(
        max_num_seqs=max(streams),
        max_num_batched_tokens=max(chunk, *streams),
        max_model_len=2048,
        enable_prefix_caching=False,
        kv_cache_memory=2**29,
    )
    ranks = [_load(folder, replace(config, model_impl=name)) for name in ("native", "transformers")]
    click.echo("| step | steps | native | transformers' | median of ratios | steps with the same tokens |")
    click.echo("|---" * 6 + "|")
    for count in streams:
        _report(f"decode, {count}", _measure(ranks, config, count, _PROMPT_TOKENS, steps), count)
    prompts = _measure(ranks, config, 2 * _FEW_STEPS, chunk, 1)
    _report(f"chunk of {chunk}", prompts, chunk)


if __name__ == "__main__":
    command()
