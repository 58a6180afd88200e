"""From what tokens will choose to what a step will need."""

import numpy as np
import pytest

from experts.predictor import BEFORE, StepPredictor, Tap, any_token


class Recorder:
    """A source that knows a fixed row per token and remembers what it was shown."""

    def __init__(self, rows):
        self.rows = rows
        self.step = None
        self.learnt = []
        self.ended = []

    def probabilities(self, step, layer, distance):
        self.step = step
        return self.rows

    def learn(self, step):
        self.learnt.append(step.token_ids.tolist())

    def end(self, requests):
        self.ended += requests


def rows(*values):
    return np.array(values, np.float32)


def test_an_expert_is_needed_if_any_token_chooses_it():
    assert any_token(rows([0.5, 0.0, 1.0], [0.5, 0.0, 0.0]), 2) == pytest.approx([0.75, 0.0, 1.0], abs=1e-3)


def test_a_sample_of_the_tokens_stands_for_all_of_them():
    assert any_token(rows([0.5, 0.1]), 2) == pytest.approx([0.75, 0.19], abs=1e-5)


def test_a_long_step_is_followed_by_an_even_sample():
    source = Recorder(rows([0.1], [0.1]))
    predictor = StepPredictor(source, num_experts=1, max_rows=2)
    predictor.begin(np.arange(5), np.array([7, 7, 7, 8, 8]))
    predictor.observe(0, np.arange(5)[:, None], np.ones((5, 1), np.float32))
    predictor.observe_gate(Tap.LATE, 0, 2, np.arange(5, dtype=np.float32)[:, None])
    assert predictor.predict(BEFORE, 1) == pytest.approx([1 - 0.9**5], abs=1e-5)
    assert source.step.requests.tolist() == [7, 8]
    assert source.step.ids[0].tolist() == [[0], [4]]
    assert source.step.gates[Tap.LATE, 0, 2].tolist() == [[0], [4]]


def test_a_step_is_learnt_once_when_it_is_over():
    source = Recorder(None)
    predictor = StepPredictor(source, num_experts=1)
    predictor.begin(np.array([1]), np.array([0]))
    predictor.begin(np.array([2]), np.array([0]))
    assert source.learnt == [[1]]
    predictor.end([0])
    predictor.end([])
    assert source.learnt == [[1], [2]]
    assert source.ended == [0]


def test_what_is_not_known_is_not_predicted():
    predictor = StepPredictor(Recorder(None), num_experts=3)
    with pytest.raises(ValueError, match="no step"):
        predictor.predict(0, 2)
    predictor.begin(np.arange(2), np.zeros(2, np.int64))
    assert predictor.predict(0, 2).tolist() == [0, 0, 0]
