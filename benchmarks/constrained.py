"""`python -m benchmarks.constrained`: what a JSON schema costs a decode step of the demo on this machine's CPU.

Rounds with and without the schema take turns in one process, so that a machine that gets slower slows both. The end of
the schema is far away, which keeps every stream going. A round without it draws its tokens too, but goes on with those
of the round before: other tokens would choose other experts, and take another time for that.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from tokenizers import Tokenizer

from moeserve.assemble import build_scheduler, load_rank
from moeserve.config import ServeConfig
from moeserve.frontend.constraints import constraint_of
from moeserve.frontend.dialects.internal import OutputFormat
from moeserve.memory_plan import plan_model
from moeserve.model.demo import ensure_demo
from moeserve.plan import Computed, Pending, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduler import Scheduler
from moeserve.steps import LocalExecutor, Runner, Steps

PROMPT = "List the staff of a hospital as JSON."
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 18, "maximum": 99},
            "role": {"enum": ["doctor", "nurse", "porter", "clerk"]},
            "skills": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "age", "role", "skills", "address"],
        "additionalProperties": False,
    },
}


@dataclass
class Teacher:
    """An executor that remembers the tokens of streams, by request and position, or gives the remembered ones."""

    runner: Runner
    teaches: bool = False
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        results = LocalExecutor(self.runner).launch(plans).result()
        for chunk, result in zip(plans[0].chunks, results[0].chunks, strict=True):
            if result.error is not None:
                raise RuntimeError(result.error)
            place = chunk.request_id, chunk.start + len(chunk.token_ids)
            if self.teaches:
                result.token_id = self.tokens[place]
            elif result.token_id is not None:
                self.tokens[place] = result.token_id
        return Computed(results)

    def check(self) -> None:
        """Do nothing: no other rank can be missing."""


class Bench:
    """A model with one rank, and the rounds of streams with one prompt."""

    def __init__(self, folder: Path, max_streams: int) -> None:
        config = ServeConfig(max_num_seqs=max_streams, max_model_len=1024, enable_prefix_caching=False)
        rank = load_rank(folder, plan_model(folder, config), config, lambda _: None).start()
        self._scheduler: Scheduler = build_scheduler(config, rank.model.kv)[0]
        self._teacher = Teacher(rank.runner)
        self._steps = Steps(self._scheduler, self._teacher, 0)
        self._prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
        self._eos = tuple(rank.model.eos_token_ids)
        self._grammar = constraint_of(OutputFormat("json_schema", SCHEMA)).grammar

    def compare(self, streams: int, steps: int, rounds: int) -> tuple[float, float]:
        """Return the median seconds of a decode step without and with the schema. The first rounds do not count."""
        plain, constrained = [], []
        for number in range(rounds + 1):
            constrained.append(self._round(streams, steps, number, self._grammar))
            plain.append(self._round(streams, steps, number, None))
        return statistics.median(plain[1:]), statistics.median(constrained[1:])

    def _round(self, streams: int, steps: int, number: int, grammar: str | None) -> float:
        """Return the median seconds of the steps in which every stream decodes one token."""
        self._teacher.teaches = grammar is None
        for stream in range(streams):
            seed = 100 * number + stream
            sampling = SamplingParams(steps + 1, seed=seed, stop_token_ids=self._eos, grammar=grammar)
            self._scheduler.add(Request(f"{stream}", array("i", self._prompt), sampling))
        times = []
        while True:
            started = time.perf_counter()
            outputs = self._steps.advance()
            if outputs is None:
                break
            if len(outputs) == streams:
                times.append(time.perf_counter() - started)
        self._scheduler.take_started()
        # The first one computes the prompts.
        return statistics.median(times[1:])


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model; the demo unless given.")
@click.option("--streams", multiple=True, type=int, default=(1, 16), show_default=True, help="How many at once.")
@click.option("--steps", type=click.IntRange(min=4), default=48, show_default=True, help="Decode steps of a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True, help="Rounds of each kind.")
def command(model: Path | None, streams: tuple[int, ...], steps: int, rounds: int) -> None:
    """Print, for each number of streams, a step's time without and with the schema, and their ratio."""
    bench = Bench(model or ensure_demo(), max(streams))
    for count in streams:
        plain, constrained = bench.compare(count, steps, rounds)
        ratio = constrained / plain
        click.echo(f"{count:3} streams: {1000 * plain:.2f} ms plain, {1000 * constrained:.2f} ms with: x {ratio:.3f}")


if __name__ == "__main__":
    command()
