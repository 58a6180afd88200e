"""The shape of dispatch of a step: the faster one for its rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.engine.ranks.together import ShapeChoice

SECONDS = st.floats(1e-6, 1.0)
TIMES = st.fixed_dictionaries({"allgather": SECONDS, "alltoall": SECONDS})


def test_a_shape_that_is_faster_at_both_sizes_is_always_taken() -> None:
    choice = ShapeChoice.measured({16: {"allgather": 1.0, "alltoall": 2.0}, 128: {"allgather": 3.0, "alltoall": 4.0}})
    assert {choice.shape_of([rows, 0]) for rows in (0, 1, 16, 128, 4096)} == {"allgather"}
    assert str(choice) == "allgather"


def test_decodes_and_prompts_take_different_shapes_if_that_is_faster() -> None:
    choice = ShapeChoice.measured({16: {"allgather": 1.0, "alltoall": 2.0}, 116: {"allgather": 9.0, "alltoall": 6.0}})
    # The lines 1 + 0.08 n and 2 + 0.04 n cross 25 rows after 16.
    assert str(choice) == "allgather, alltoall from 41 rows"
    assert choice.shape_of([40, 3]) == "allgather"
    assert choice.shape_of([1, 41]) == "alltoall"


def test_where_a_step_is_never_large_the_faster_shape_of_a_small_one_is_taken() -> None:
    assert str(ShapeChoice.measured({8: {"allgather": 2.0, "alltoall": 1.0}})) == "alltoall"


@pytest.mark.parametrize("rows", [[0, 0], [5, 1]])
def test_a_shape_that_was_named_is_taken_whatever_the_rows(rows: list[int]) -> None:
    assert ShapeChoice.always("alltoall").shape_of(rows) == "alltoall"


@given(TIMES, TIMES)
def test_at_the_measured_sizes_the_faster_shape_is_taken(few: dict[str, float], many: dict[str, float]) -> None:
    choice = ShapeChoice.measured({16: few, 128: many})
    for rows, seconds in ((16, few), (128, many)):
        taken = choice.shape_of([rows])
        assert seconds[taken] <= min(seconds.values()) or choice.rows in (16, 128)
