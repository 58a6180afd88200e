"""Ranks on GPUs begin a step alike: dispatch's shape and sizes follow from what all of them know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from moeserve.engine.ranks.together import GroupSteps, ShapeChoice, StepRows
from moeserve.model.step_arrays import StepShape


class Experts:
    """Keeps what it was told last."""

    def use(self, shape: str) -> None:
        self.shape = shape

    def begin_step(self, num_rows: Sequence[int], num_logit_rows: Sequence[int]) -> None:
        self.rows = [*num_rows], [*num_logit_rows]


class Ranks:
    num_ranks = 3


def make(shape: str, sizes: Sequence[int]) -> tuple[GroupSteps, Experts]:
    experts = Experts()
    steps = GroupSteps(cast("Any", experts), cast("Any", Ranks()))
    steps.use(ShapeChoice("allgather", shape, 3), sizes)
    return steps, experts


def test_decodes_take_the_captured_size_and_the_all_gather_whatever_suits_other_steps() -> None:
    steps, experts = make("alltoall", (1, 2, 4))
    steps.begin(StepRows([3, 0, 1], [3, 0, 1], only_decodes=True))
    assert (steps.decode_size, experts.shape, experts.rows) == (4, "allgather", ([4] * 3, [4] * 3))
    steps.begin(StepRows([3, 9, 1], [3, 1, 1], only_decodes=False))
    assert (steps.decode_size, experts.shape, experts.rows) == (None, "alltoall", ([3, 9, 1], [3, 1, 1]))
    steps.begin(StepRows([5, 1, 1], [5, 1, 1], only_decodes=True))
    assert (steps.decode_size, experts.shape) == (None, "alltoall")


def test_where_nothing_is_captured_every_step_is_of_its_own_rows() -> None:
    steps, experts = make("allgather", ())
    steps.begin(StepRows([1, 0, 1], [1, 0, 1], only_decodes=True))
    assert (steps.decode_size, experts.rows) == (None, ([1, 0, 1], [1, 0, 1]))


def test_a_blank_step_at_the_start_is_not_taken_for_decodes() -> None:
    steps, experts = make("allgather", (1, 2))
    steps.begin_alike(StepShape(2, (), 2))
    assert (steps.decode_size, experts.rows) == (None, ([2] * 3, [2] * 3))
