"""`python -m benchmarks.draft_sources`: what each source of draft tokens gains, on a scripted clock.

A model writes the answers of `benchmarks.drafts` once, without drafts. As drafts change no token, the answers are then
replayed by the service's scheduler with other sources of drafts each time; grammars make their masks anew. Steps take
the processor time of one thread that steps of as many rows took on this machine, linear between them. So counts of
steps and rows are exact, and other programs disturb nothing but the prices. What drafting itself takes is left out.
"""

from __future__ import annotations

import statistics
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import click

from benchmarks.drafts import NONE, Bench, Kind, edited, kinds
from moeserve.config import ServeConfig
from moeserve.device import step_budget
from moeserve.engine.planner import build_text_parts
from moeserve.grammars.made_masks import MadeMask
from moeserve.grammars.masks import GrammarMasks
from moeserve.model.source import resolve_model
from moeserve.plan import Asked, ChunkResult, Computed, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.draft_sources import CACHED_TEXT, FORCED, LAYOUT, OWN_TEXT, PREDICTED_TEXT, Guess
from moeserve.scheduling.drafting import Drafting
from moeserve.scheduling.grammars import Drafts
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import Steps
from moeserve.settings.drafts import SpeculativeConfig
from radix_cache import PrefixCache

_TEXTS = (PREDICTED_TEXT, CACHED_TEXT, OWN_TEXT)
_ALL = frozenset((*_TEXTS, FORCED, LAYOUT))
# What is on in a column. The layout is guessed between forced tokens, so it is nothing without these.
COLUMNS = {
    "all": _ALL,
    **{f"only {source}": frozenset([source]) for source in (*_TEXTS, FORCED)},
    **{f"without {source}": _ALL - {source} for source in _TEXTS},
    f"without {FORCED} and {LAYOUT}": _ALL - {FORCED, LAYOUT},
    f"without {LAYOUT}": _ALL - {LAYOUT},
}
_PRICED_ROWS = (1, 2, 4, 8, 16, 32, 64)
_PRICED_TOKENS = 16  # of each stream
_BLOCKS, _BLOCK_SIZE = 16384, 16

# By kind of text and number of streams, and by column.
Gains = dict[tuple[str, int], dict[str, float]]


class SomeDrafting(Drafting):
    """Guesses from some sources alone."""

    def __init__(self, sources: frozenset[str]) -> None:
        super().__init__(SpeculativeConfig("auto"))
        self._sources = sources

    def _guesses(self, *args: Any) -> Iterator[Guess]:
        yield from (guess for guess in super()._guesses(*args) if guess.source in self._sources)

    def receive(self, request: Request, tokens: array[int], num_forced: int, num_laid: int) -> None:
        num_kept = len(tokens)
        if LAYOUT not in self._sources:
            num_kept, num_laid = num_kept - num_laid, 0
        if FORCED not in self._sources:
            num_kept, num_forced = num_kept - num_forced, 0
        super().receive(request, tokens[:num_kept], num_forced, num_laid)


class PatientMasks(GrammarMasks):
    """Waits for every mask, so that a replay does not depend on threads."""

    def take(self, seconds: float = 0.0) -> list[MadeMask]:
        while self._awaited:
            self.wait(1.0)
        return super().take()


@dataclass(slots=True)
class KnownAnswers:
    """Computes steps by looking up the answers: by request, its tokens and the number of those of its prompt."""

    answers: dict[str, tuple[Sequence[int], int]] = field(default_factory=dict)
    num_rows: int = 0

    def launch(self, plans: Sequence[StepPlan]) -> Computed[list[StepResult]]:
        (plan,) = plans
        self.num_rows = plan.num_tokens
        results = []
        for chunk in plan.chunks:
            answer, num_prompt = self.answers[chunk.request_id]
            place = chunk.start + len(chunk.token_ids) - chunk.num_drafts - num_prompt
            if chunk.sampling is None:
                results.append(ChunkResult())
                continue
            guess = Guess("", 0, chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :])
            num_right = min(guess.num_right(answer[place:]), len(answer) - place - 1)
            further = tuple((token, None) for token in answer[place + 1 : place + 1 + num_right])
            results.append(ChunkResult(answer[place], further=further))
        return Computed([StepResult(plan.step, results)])

    def check(self) -> None:
        """Nothing can be missing."""


@dataclass(slots=True)
class Recorded:
    """prompts, answers: by kind of text, one for each stream. prices: seconds of a step by its rows."""

    prompts: dict[str, list[array[int]]]
    answers: dict[str, list[list[int]]]
    prices: Mapping[int, float]

    def price(self, rows: int) -> float:
        """Return the seconds of a step, on a line through the two nearest prices."""
        knots = sorted(self.prices)
        place = min(max(1, bisect_left(knots, rows)), len(knots) - 1)
        low, high = knots[place - 1 : place + 1]
        return self.prices[low] + (self.prices[high] - self.prices[low]) * (rows - low) / (high - low)


class Replay:
    """A service without a model, on a clock of its own."""

    def __init__(self, recorded: Recorded, drafts: Drafts, masks: GrammarMasks) -> None:
        self._recorded = recorded
        config = ServeConfig(max_num_seqs=64)
        self._scheduler = Scheduler(
            [PrefixCache(_BLOCKS, _BLOCK_SIZE)],
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=step_budget(config),
            max_num_queued_reqs=1000,
            max_model_len=_BLOCKS * _BLOCK_SIZE // 16,
            parts=build_text_parts(masks, drafts),
        )
        self._executor = KnownAnswers()
        self._steps = Steps(self._scheduler, self._executor, 0)
        self._now = 0.0

    def serve(self, name: str, kind: Kind, streams: int, namespace: str, first: int) -> float:
        """Serve a kind of text as `benchmarks.drafts` does, and return its tokens per second."""
        prompts, answers = self._recorded.prompts[name][:streams], self._recorded.answers[name][:streams]
        draw = Random(first)
        predicted = [edited(answer, draw) if kind.is_predicted else array("i") for answer in answers]
        num_before = kind.sampling.max_tokens if kind.is_second_run else 1
        self._run(prompts, answers, replace(kind.sampling, max_tokens=num_before), namespace, None)
        began = self._now
        self._run(prompts, answers, kind.sampling, namespace, predicted)
        return sum(map(len, answers)) / (self._now - began)

    def _run(
        self,
        prompts: Sequence[array[int]],
        answers: Sequence[list[int]],
        sampling: SamplingParams,
        namespace: str,
        predicted: Sequence[array[int]] | None,
    ) -> None:
        known = self._executor.answers
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            name = f"{len(known)}"
            known[name] = answer, len(prompt)
            guess = array("i") if predicted is None else predicted[number]
            own = replace(sampling, seed=number)
            self._scheduler.add(Request(name, prompt[:], own, namespace, asked=Asked(predicted=guess)))
        while True:
            self._scheduler.set_time(self._now)
            self._executor.num_rows = 0
            outputs = self._steps.advance()
            if outputs is None:
                return
            if errors := [output.error for output in outputs if output.error is not None]:
                raise click.ClickException(errors[0])
            self._scheduler.take_started()
            if self._executor.num_rows:
                seconds = self._recorded.price(self._executor.num_rows)
                self._now += seconds
                self._scheduler.count_step(seconds)


def record(bench: Bench, table: Mapping[str, Kind], streams: int) -> Recorded:
    """Have the model write all answers, and measure its steps."""
    service = bench.services[NONE]
    prompts = {name: bench.prompts(kind, streams) for name, kind in table.items()}
    answers = {name: service.serve(prompts[name], kind.sampling, name) for name, kind in table.items()}
    prices = {}
    for rows in _PRICED_ROWS:
        asked = [array("i", [*range(9), number]) for number in range(rows)]
        service.serve(asked, SamplingParams(_PRICED_TOKENS, temperature=1.0), f"{rows} rows")
        # The first ones have prompts, and the last ones may lack a stream.
        prices[rows] = statistics.median(service.step_s[-_PRICED_TOKENS + 4 : -2])
    return Recorded(prompts, answers, prices)


def gains(bench: Bench, recorded: Recorded, table: Mapping[str, Kind], streams: Sequence[int], rounds: int) -> Gains:
    """Return the tokens per second of each column, kind and number of streams, over those without drafts."""
    paces: dict[str, dict[tuple[str, int], list[float]]] = {}
    for column, sources in {NONE: frozenset[str](), **COLUMNS}.items():
        drafts = Drafts() if column == NONE else SomeDrafting(sources)
        masks = PatientMasks(bench.tokenizer_json, bench.vocab_size, bench.eos, most_drafts=drafts.most_forced)
        replay = Replay(recorded, drafts, masks)
        found = paces[column] = {(name, number): [] for name in table for number in streams}
        for turn in range(rounds):
            for (name, number), own in found.items():
                own.append(replay.serve(name, table[name], number, f"{turn} {name} {number}", turn))
        masks.close()
    base = {cell: statistics.harmonic_mean(own) for cell, own in paces.pop(NONE).items()}
    return {
        cell: {column: statistics.harmonic_mean(own[cell]) / base[cell] for column, own in paces.items()}
        for cell in base
    }


@click.command()
@click.option("--streams", type=click.IntRange(1), multiple=True, default=(1, 4, 16), show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="To generate in each stream.")
@click.option("--rounds", type=click.IntRange(1), default=4, show_default=True)
@click.option("--model", help="As of `moeserve serve`; the demo unless given.")
def main(streams: tuple[int, ...], tokens: int, rounds: int, model: str | None) -> None:
    """Print the tokens per second with some sources of drafts over the tokens per second without drafts."""
    bench = Bench(resolve_model(model), max(_PRICED_ROWS), (NONE,), cpu_time=True)
    table = kinds(tokens, bench.eos)
    recorded = record(bench, table, max(streams))
    bench.close()
    click.echo(f"Steps: {', '.join(f'{rows} rows {1000 * s:.1f} ms' for rows, s in recorded.prices.items())}.\n")
    click.echo(f"| text | streams | {' | '.join(COLUMNS)} |")
    click.echo("|---" * (2 + len(COLUMNS)) + "|")
    for (name, number), own in gains(bench, recorded, table, streams, rounds).items():
        click.echo(f"| {name} | {number} | {' | '.join(f'{gain:.2f}' for gain in own.values())} |")


if __name__ == "__main__":
    main()
