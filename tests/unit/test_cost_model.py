"""What the model of a step's cost learns, and how much of a step fits into a time."""

from __future__ import annotations

from math import sqrt
from random import Random

import pytest

from moeserve.scheduling.cost_model import CostModel, StepSize


def true_seconds(rows: int, attended: float) -> float:
    return 0.03 + 0.012 * sqrt(rows) + 0.001 * rows + 2e-6 * attended


def learnt(num_steps: int = 3000, noise: float = 0.0) -> CostModel:
    model, random = CostModel(), Random(1)
    for _ in range(num_steps):
        rows = random.choice([1, 2, 5, 16, 40, 64, 100, 256])
        attended = rows * random.randrange(20, 2000)
        model.observe(rows, attended, true_seconds(rows, attended) * (1 + noise * random.uniform(-1, 1)))
    return model


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_learns_the_rows_and_the_context(noise: float) -> None:
    model = learnt(noise=noise)
    for rows in (1, 16, 64, 256):
        for context in (100, 1000):
            attended = rows * context
            assert model.seconds(rows, attended) == pytest.approx(true_seconds(rows, attended), rel=0.15)


def test_nothing_is_expected_before_the_first_step() -> None:
    assert CostModel().seconds(100, 1000.0) == 0.0


def test_one_step_is_enough_for_a_guess_at_all_others() -> None:
    model = CostModel()
    model.observe(256, 0.0, 0.8)
    assert model.seconds(256, 0.0) == pytest.approx(0.8)
    assert 0.0 < model.seconds(1, 0.0) < 0.2
    assert 0.8 < model.seconds(1000, 0.0) < 4.0


def test_a_step_that_was_held_up_is_soon_forgotten() -> None:
    model = learnt()
    usual = model.seconds(64, 6400)
    model.observe(64, 6400, 60.0)
    for _ in range(20):
        model.observe(64, 6400, usual)
    assert model.seconds(64, 6400) == pytest.approx(usual, rel=0.05)


def test_it_follows_a_machine_that_has_become_slower() -> None:
    model = learnt()
    for _ in range(60):
        model.observe(64, 6400, 3 * true_seconds(64, 6400))
    assert model.seconds(64, 6400) == pytest.approx(3 * true_seconds(64, 6400), rel=0.05)


def test_as_many_rows_fit_into_a_time_as_the_prediction_says() -> None:
    model = learnt()
    for seconds in (0.01, 0.1, 0.3, 9.0):
        rows = model.rows_within(seconds, 256, StepSize())
        assert rows == max([n for n in range(1, 257) if model.seconds(n, 0.5 * n * n) <= seconds], default=0)


def test_no_parameter_becomes_negative_whatever_is_measured() -> None:
    model, random = CostModel(), Random(2)
    for _ in range(500):
        model.observe(random.randrange(1, 300), random.uniform(0, 1e6), random.uniform(0, 2))
        assert model.seconds(random.randrange(1, 10**6), random.uniform(0, 1e7)) >= 0.0
