"""The arithmetic of scaling, against figures that are easy by hand."""

from __future__ import annotations

import pytest

from benchmarks.scaling import Machine, Model, ranks_of_a_row, row_bytes, step_seconds


def test_one_choice_reaches_one_rank_and_many_choices_reach_nearly_all_of_few() -> None:
    assert ranks_of_a_row(Model(top_k=1), 64) == pytest.approx(1)
    assert ranks_of_a_row(Model(top_k=64), 2) == pytest.approx(2)
    assert ranks_of_a_row(Model(top_k=8), 64) == pytest.approx(7.57, abs=0.01)


def test_an_all_gather_in_fp32_sends_four_bytes_home_for_every_row_and_rank() -> None:
    _, home = row_bytes(Model(), Machine(), 64, 128)["all-gather, fp32 home"]
    assert 64 * home == 64 * 128 * 7168 * 4


def test_a_capacity_never_exceeds_the_rows_there_are() -> None:
    of_few = row_bytes(Model(), Machine(slack=100), 8, 16)
    assert of_few["fixed capacity, bf16 home"] == of_few["all-gather, bf16 home"]


def test_the_slower_kind_of_link_decides() -> None:
    machine = Machine(latency=0.0)
    inside = step_seconds(Model(), machine, 8, (1e6, 0.0), calls=2)
    assert inside == pytest.approx(58 * 7e6 / 400e9)
    assert step_seconds(Model(), machine, 16, (1e6, 0.0), calls=2) == pytest.approx(58 * 8e6 / 50e9)
