"""From what tokens will choose to what a step will need."""

import numpy as np
import pytest

from experts.prediction import BEFORE, StepPredictor, any_token


class Recorder:
    """A source that knows a fixed row per token and remembers what it was shown."""

    def __init__(self, rows):
        self.rows = rows
        self.seen = []

    def begin(self, token_ids, requests):
        self.seen.append((token_ids.tolist(), requests.tolist()))

    def observe(self, layer, expert_ids, weights):
        self.seen.append((layer, expert_ids.tolist()))

    def observe_gate(self, tap, layer, distance, logits):
        pass

    def token_probabilities(self, layer, distance):
        return self.rows

    def end(self, requests):
        self.seen.append(list(requests))


def rows(*values):
    return np.array(values, np.float32)


def test_an_expert_is_needed_if_any_token_chooses_it():
    assert any_token(rows([0.5, 0.0, 1.0], [0.5, 0.0, 0.0]), 2) == pytest.approx([0.75, 0.0, 1.0], abs=1e-3)


def test_a_sample_of_the_tokens_stands_for_all_of_them():
    assert any_token(rows([0.5, 0.1]), 2) == pytest.approx([0.75, 0.19], abs=1e-5)


def test_a_long_step_is_followed_by_an_even_sample():
    source = Recorder(rows([0.1], [0.1]))
    predictor = StepPredictor(source, num_experts=1, max_rows=2)
    predictor.begin(np.arange(5), np.zeros(5, np.int64))
    predictor.observe(0, np.arange(5)[:, None], np.ones((5, 1), np.float32))
    assert source.seen == [([0, 4], [0, 0]), (0, [[0], [4]])]
    assert predictor.predict(BEFORE, 1) == pytest.approx([1 - 0.9**5], abs=1e-5)


def test_what_is_not_known_is_not_predicted():
    predictor = StepPredictor(Recorder(None), num_experts=3)
    predictor.begin(np.arange(2), np.zeros(2, np.int64))
    assert predictor.predict(0, 2).tolist() == [0, 0, 0]
