"""`python -m benchmarks.recording FOLDER`: measure what recording the routing costs a decode step.

CPU time, not wall time: a step and its recording run in one thread of one process, one after the other, so that other
load on the machine changes their ratio little.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from moeserve.config import ServeConfig
from moeserve.engine.assemble import build_scheduler, load_rank
from moeserve.engine.experts.observe import ExpertRecording, plan_recording
from moeserve.engine.memory_plan import plan_model
from moeserve.plan import Request, SamplingParams

_WARM_UP_STEPS = 8


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--streams", type=click.IntRange(min=1), multiple=True, default=(1, 16), show_default=True)
@click.option("--steps", type=click.IntRange(min=16), default=96, show_default=True, help="Per number of streams.")
def command(model: Path, streams: tuple[int, ...], steps: int) -> None:
    """Measure what --record-experts costs a decode step of the MODEL in a folder, on one thread."""
    recorded = RecordedModel(model)
    for count in streams:
        measured: Measured = recorded.measure(prompts(count), steps, time.process_time)
        click.echo(
            f"{count} streams: step {1e3 * measured.step:.2f} ms, recording {1e6 * measured.recording:.0f} us CPU, "
            f"{100 * measured.recording / measured.step:.2f} %"
        )


def prompts(count: int) -> list[array[int]]:
    """Return different prompts of 20 tokens."""
    return [array("i", (1 + (7 * stream + 13 * place) % 100 for place in range(20))) for stream in range(count)]


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean seconds per step."""

    step: float
    recording: float


class RecordedModel:
    """A model whose routing is observed in every step and recorded after it."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self._config = ServeConfig(threads=1, kv_cache_memory=2**28)
        plan, recording = plan_model(directory, self._config), None
        if plan.spec.moe is not None:
            recording = plan_recording(self._config, directory, plan.spec)
        if recording is None:
            raise click.ClickException(f"The model in {directory} has no experts.")
        self._rank = load_rank(directory, plan, self._config, lambda _: None).start()
        self._recording = ExpertRecording(recording)

    def measure(self, prompts: Sequence[array[int]], steps: int, clock: Callable[[], float]) -> Measured:
        """Decode the prompts together. Statistics that are digested now and then are part of the mean."""
        scheduler, _ = build_scheduler(self._config, self._rank.model.kv)
        for number, prompt in enumerate(prompts):
            scheduler.add(Request(f"{number}", prompt, SamplingParams(max_tokens=steps, temperature=0.0)))
        computing, recording, count = 0.0, 0.0, 0
        while plans := scheduler.schedule():
            started = clock()
            results = [self._rank.runner.launch(plans[0]).result()]
            computed = clock()
            self._recording.begin(plans)
            self._recording.end(plans, results)
            recorded = clock()
            scheduler.commit(plans, results)
            count += 1
            if count > _WARM_UP_STEPS:
                computing += computed - started
                recording += recorded - computed
        return Measured(computing / (count - _WARM_UP_STEPS), recording / (count - _WARM_UP_STEPS))


if __name__ == "__main__":
    command(prog_name="python -m benchmarks.recording")
