"""`python -m benchmarks.recording [FOLDER]`: measure what recording the routing costs a decode step.

Of the model in a folder, or without one of random routing in the shape of large models, on the engine's side alone. CPU
time, not wall time: a step and its recording run in one thread of one process, one after the other, so that other
load on the machine changes their ratio little.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

from experts.placement.placement import contiguous
from experts.routing.choices import RoutingShape
from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.experts.observe import ExpertRecording, RecordingPlan, first_statistics, plan_recording
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_caches, build_scheduler
from moeserve.plan import Chunk, ChunkResult, Request, SamplingParams, StepPlan, StepResult

_WARM_UP_STEPS = 8
# Layers with experts, experts, and experts of a token: Qwen3-30B-A3B and DeepSeek V3.
_SHAPES = {"48 x 128, k=8": RoutingShape(48, 128, 8), "58 x 256, k=8": RoutingShape(58, 256, 8)}
_ROWS, _RANKS = 256, (1, 8)


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--streams", type=click.IntRange(min=1), multiple=True, default=(1, 16), show_default=True)
@click.option("--steps", type=click.IntRange(min=16), default=96, show_default=True, help="Per number of streams.")
def command(model: Path | None, streams: tuple[int, ...], steps: int) -> None:
    """Measure what --record-experts costs a decode step of the MODEL in a folder, on one thread; without a MODEL, what
    it costs the engine for random routing of large models with 256 rows per rank."""
    if model is None:
        for name, shape in _SHAPES.items():
            for num_ranks in _RANKS:
                mean, worst = random_routing(shape, num_ranks, steps, time.process_time)
                case = f"{name}, {num_ranks} x {_ROWS} rows"
                click.echo(f"{case}: recording {1e3 * mean:.2f} ms CPU a step, at most {1e3 * worst:.1f} ms")
        return
    recorded = RecordedModel(model)
    for count in streams:
        measured: Measured = recorded.measure(prompts(count), steps, time.process_time)
        click.echo(
            f"{count} streams: step {1e3 * measured.step:.2f} ms, recording {1e6 * measured.recording:.0f} us CPU, "
            f"{100 * measured.recording / measured.step:.2f} %"
        )


def random_routing(shape: RoutingShape, num_ranks: int, steps: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the mean and the longest time that the engine records in a step of 256 decodes per rank."""
    generator = np.random.default_rng(0)
    size = (shape.num_layers, _ROWS, shape.num_experts)
    narrow = np.uint8 if shape.num_experts <= 256 else np.int16
    routing = generator.random(size).argpartition(shape.top_k, axis=2)[:, :, : shape.top_k].astype(narrow).tobytes()
    placement = None if num_ranks == 1 else contiguous(shape.num_layers, shape.num_experts, num_ranks)
    recording = ExpertRecording(RecordingPlan(shape, first_statistics(shape), ""), lambda: placement)
    sampling = SamplingParams(max_tokens=steps, temperature=0.0)
    seconds = []
    for step in range(_WARM_UP_STEPS + 8 * steps):
        tokens = generator.integers(0, 30_000, _ROWS).tolist()
        chunks = [Chunk(f"{row}", array("i", [tokens[row]]), step, array("i", [row]), sampling) for row in range(_ROWS)]
        plans = [StepPlan(step, chunks) for _ in range(num_ranks)]
        results = [StepResult(step, [ChunkResult(1)] * _ROWS, routing) for _ in range(num_ranks)]
        started = clock()
        recording.begin(plans)
        recording.end(plans, results)
        seconds.append(clock() - started)
    return sum(seconds[_WARM_UP_STEPS:]) / (8 * steps), max(seconds[_WARM_UP_STEPS:])


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
        kv = self._rank.model.kv
        scheduler = build_scheduler(self._config, kv, build_caches(self._config, kv))
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
