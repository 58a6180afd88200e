"""`python -m benchmarks.constrained`: what a JSON schema costs a decode step of the demo on this machine's CPU.

Every step is computed twice, with the schema's masks and without them, in turns which goes first: the same tokens at
the same positions choose the same experts, and other work on the machine slows both. The streams go on with the
schema's tokens; its end is far away, which keeps every stream going. Masks are made between two steps, so the time from
one step to the next is told too, beside that of streams without a schema.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from tokenizers import Tokenizer

from benchmarks.token_engine import advance
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_caches, build_scheduler, build_text_parts
from moeserve.frontend.dialects.formats import constraint_of
from moeserve.frontend.dialects.internal import OutputFormat
from moeserve.grammars.masks import GrammarMasks
from moeserve.model.demo import ensure_demo
from moeserve.plan import Chunk, Computed, Pending, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.grammars import Drafts
from moeserve.scheduling.steps import Runner, Steps

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


# The first one computes the prompts; grammars and caches are new in the next.
_FIRST_STEP = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a step: seconds, and CPU seconds of the thread that computes it."""

    wall: float
    cpu: float


@dataclass
class Twice:
    """An executor that computes every step with its grammars and without them, and gives the result with them."""

    runner: Runner
    plain: list[Cost] = field(default_factory=list)
    constrained: list[Cost] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    _ended_at: float = 0.0

    def launch(self, plans: Sequence[StepPlan]) -> Pending[list[StepResult]]:
        self.between.append(time.perf_counter() - self._ended_at)
        (plan,) = plans
        without = replace(plan, chunks=[_without_grammar(chunk) for chunk in plan.chunks])
        plain_first = len(self.plain) % 2 == 0
        if plain_first:
            self.plain.append(self._compute(without)[0])
        cost, result = self._compute(plan)
        self.constrained.append(cost)
        if not plain_first:
            self.plain.append(self._compute(without)[0])
        for computed in result.chunks:
            if computed.error is not None:
                raise RuntimeError(computed.error)
        self._ended_at = time.perf_counter()
        return Computed([result])

    def check(self) -> None:
        """Do nothing: no other rank can be missing."""

    def _compute(self, plan: StepPlan) -> tuple[Cost, StepResult]:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = self.runner.launch(plan).result()
        return Cost(time.perf_counter() - wall, time.thread_time() - cpu), result


def _without_grammar(chunk: Chunk) -> Chunk:
    sampling = chunk.sampling
    return chunk if sampling is None else replace(chunk, sampling=replace(sampling, grammar=None), extras=None)


class Bench:
    """A model with one rank, and streams of one prompt and the schema."""

    def __init__(self, folder: Path, max_streams: int) -> None:
        config = ServeConfig(max_num_seqs=max_streams, max_model_len=1024, enable_prefix_caching=False)
        rank = load_rank(folder, plan_model(folder, config), config, lambda _: None).start()
        self._eos = tuple(rank.model.eos_token_ids)
        self._masks = GrammarMasks(folder / "tokenizer.json", rank.model.spec.vocab_size, self._eos)
        parts = build_text_parts(self._masks, Drafts())
        self._scheduler = build_scheduler(config, rank.model.kv, build_caches(config, rank.model.kv), parts=parts)
        self._runner = rank.runner
        self._prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
        self._grammar = constraint_of(OutputFormat("json_schema", SCHEMA)).grammar

    def measure(self, streams: int, steps: int, *, constrained: bool = True) -> Twice:
        """Return the cost of the steps in which every stream decodes one token, without the first few."""
        grammar, ends = (self._grammar, self._eos) if constrained else (None, ())
        for stream in range(streams):
            sampling = SamplingParams(steps + 1, seed=stream, stop_token_ids=ends, grammar=grammar)
            self._scheduler.add(Request(f"{stream}", array("i", self._prompt), sampling))
        twice = Twice(self._runner)
        steps_of = Steps(self._scheduler, twice, 0)
        while advance(steps_of, self._masks) is not None:
            pass
        self._scheduler.take_started()
        first = _FIRST_STEP
        return Twice(self._runner, twice.plain[first:], twice.constrained[first:], twice.between[first:])


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model; the demo unless given.")
@click.option("--streams", multiple=True, type=int, default=(1, 16), show_default=True, help="How many at once.")
@click.option("--steps", type=click.IntRange(min=20), default=240, show_default=True, help="Decode steps.")
def command(model: Path | None, streams: tuple[int, ...], steps: int) -> None:
    """Print, for each number of streams, a step's time without and with the schema, and their ratio."""
    bench = Bench(model or ensure_demo(), max(streams))
    for count in streams:
        twice = bench.measure(count, steps)
        for name in ("wall", "cpu"):
            plain, constrained = ([getattr(cost, name) for cost in part] for part in (twice.plain, twice.constrained))
            ratio = statistics.median(constrained) / statistics.median(plain)
            times = (
                f"{1000 * statistics.median(plain):.2f} ms plain, {1000 * statistics.median(constrained):.2f} ms with"
            )
            click.echo(f"{count:3} streams, {name:4}: {times}: x {ratio:.3f}")
        free = bench.measure(count, steps, constrained=False)
        without, with_masks = (1000 * statistics.median(each.between) for each in (free, twice))
        click.echo(f"{count:3} streams, from step to step: {without:.3f} ms plain, {with_masks:.3f} ms with")


if __name__ == "__main__":
    command()
