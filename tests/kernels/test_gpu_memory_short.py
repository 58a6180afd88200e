"""A step for which the GPU lacks memory: what is computed again, and whose requests fail. The model is stood in for."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from moeserve.model.gpu.runner import GpuModelRunner, LaunchedStep
from moeserve.plan import Chunk, SamplingParams, StepPlan

GREEDY = SamplingParams(4, temperature=0.0)
CPU = torch.device("cpu")


class Device(GpuModelRunner):
    """Computes steps of up to `room` tokens; a larger one lacks memory, as often as `faults` says."""

    def __init__(self, room: int, faults: int = 100, state_pool: Any = None) -> None:
        computes = SimpleNamespace(decoder=SimpleNamespace(device=CPU))
        super().__init__(
            cast("Any", computes), cast("Any", None), cast("Any", None), decode=None, state_pool=state_pool
        )
        self.room, self.faults, self.tried = room, faults, list[int]()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        self.tried.append(len(plan.chunks))
        if sum(len(chunk.token_ids) for chunk in plan.chunks) > self.room and self.faults:
            self.faults -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self._drawn = torch.tensor([chunk.start for chunk in plan.chunks if chunk.sampling is not None])
        drawn = SimpleNamespace(token_ids=self._drawn)
        results = [SimpleNamespace(error=None) for _ in plan.chunks]
        return LaunchedStep(plan, cast("Any", SimpleNamespace(drawn=drawn, results=lambda: list(results))), None)

    @property
    def drawn(self) -> list[int]:
        assert self._drawn is not None
        return self._drawn.tolist()


def chunk(start: int, length: int, sampling: SamplingParams | None = GREEDY) -> Chunk:
    return Chunk(str(start), array("i", [1] * length), start, array("i", [0]), sampling)


PLAN = StepPlan(7, [chunk(10, 1), chunk(20, 1), chunk(30, 8), chunk(40, 8), chunk(50, 1)])


def test_memory_that_comes_back_is_enough_for_the_whole_step() -> None:
    device = Device(room=10, faults=1)
    result = device.launch(PLAN).result()
    assert device.tried == [5, 5]
    assert [found.error for found in result.chunks] == [None] * 5


def test_the_newest_prompts_fail_and_the_others_are_computed() -> None:
    device = Device(room=11)
    launched = device.launch(PLAN)
    assert device.tried == [5, 5, 4, 3]
    assert launched.plan is PLAN
    assert launched.routing is None
    errors = [found.error for found in launched.result().chunks]
    assert errors[:3] == [None] * 3
    assert all(error is not None and "no memory for this prompt" in error for error in errors[3:])
    # A step that was planned meanwhile may name a failed request's token by its place.
    assert device.drawn == [10, 20, 30, 0, 0]


def test_a_prompt_that_does_not_fit_alone_fails_alone() -> None:
    device = Device(room=11)
    (found,) = device.launch(StepPlan(7, [chunk(30, 12)])).result().chunks
    assert found.error is not None
    assert device.drawn == [0]


def test_decodes_for_which_memory_is_short_end_the_process() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Device(room=1).launch(PLAN)


def test_a_step_that_has_advanced_recurrent_states_is_not_computed_again() -> None:
    device = Device(room=11, state_pool=object())
    with pytest.raises(torch.cuda.OutOfMemoryError):
        device.launch(PLAN)
    assert device.tried == [5]
