"""Steps of a model and, after each, the recording of what its gates chose, timed apart."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from moeserve.assemble import build_scheduler, load_rank
from moeserve.config import ServeConfig
from moeserve.experts.observe import ExpertRecording, plan_recording
from moeserve.memory_plan import plan_model
from moeserve.plan import Request, SamplingParams

_WARM_UP_STEPS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean seconds per step."""

    step: float
    recording: float


class RecordedModel:
    """A model whose steps are computed with a tap."""

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
        """Decodes the prompts together. The time of what is digested now and then is part of the mean."""
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
