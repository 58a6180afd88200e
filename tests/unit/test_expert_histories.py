"""What a request did before: profiles, signatures of prefixes, and activation matrices."""

import numpy as np
import pytest

from experts.predictor import BEFORE, ObservedStep, StepPredictor
from experts.predictors import ActivationMatrixSource, LearntAffinity, SignatureSource
from experts.routing import RoutingStatistics, StatisticsSpec
from experts.signatures import RequestProfiles, encode_signature, merge_signatures


def step_of(requests, *layers):
    """layers: for each the chosen experts of each token."""
    ids = {layer: np.array(chosen) for layer, chosen in enumerate(layers)}
    return ObservedStep(np.zeros(len(requests), np.int64), np.array(requests), ids)


def test_a_profile_counts_the_experts_of_a_request_by_layer():
    profiles = RequestProfiles(2, 3)
    profiles.add(step_of([5, 5, 6], [[0], [0], [1]], [[2], [1], [0]]))
    counts, tokens = profiles.of(5)
    assert counts.tolist() == [[2, 0, 0], [0, 1, 1]]
    assert tokens.tolist() == [2, 2]
    assert profiles.rows(np.array([6, 7]), 0)[0].tolist() == [[0, 1, 0], [0, 0, 0]]


def test_older_tokens_fade():
    profiles = RequestProfiles(1, 2, half_life=2)
    profiles.add(step_of([0], [[0]]))
    profiles.add(step_of([0, 0], [[1], [1]]))
    counts, tokens = profiles.of(0)
    assert counts[0].tolist() == pytest.approx([0.5, 2])
    assert tokens.tolist() == pytest.approx([2.5])


def test_a_layer_that_was_not_observed_is_not_counted():
    profiles = RequestProfiles(2, 2)
    profiles.add(step_of([0], [[1]]))
    assert profiles.of(0)[1].tolist() == [1, 0]


def test_a_request_that_ended_is_forgotten_and_its_row_used_again():
    profiles = RequestProfiles(1, 2)
    for request in range(20):
        profiles.add(step_of([request], [[1]]))
    profiles.end(range(20))
    assert 3 not in profiles
    profiles.add(step_of([30], [[0]]))
    assert profiles.of(30)[0].tolist() == [[1, 0]]


def test_a_signature_keeps_rates_to_a_byte_and_no_use_becomes_none():
    rates = np.array([[0.5, 0.0001], [0.0, 1.0]], np.float32)
    data = encode_signature(rates)
    assert len(data) == 4
    again = merge_signatures([(10, data)], 2, 2)
    assert again == pytest.approx(rates, abs=1 / 255)
    assert again[0, 1] > 0
    assert again[1, 0] == 0


def test_the_signatures_of_a_path_are_weighted_by_their_tokens():
    parts = [(30, encode_signature(np.array([[1.0, 0.0]]))), (10, encode_signature(np.array([[0.0, 1.0]])))]
    assert merge_signatures(parts, 1, 2).tolist() == [pytest.approx([0.75, 0.25])]
    with pytest.raises(ValueError, match="no tokens"):
        merge_signatures([], 1, 2)
    with pytest.raises(ValueError, match="2 bytes, expected 3"):
        merge_signatures(parts, 1, 3)


def test_a_prefix_announces_the_experts_of_a_request_before_its_first_token():
    source = SignatureSource(LearntAffinity(RoutingStatistics(StatisticsSpec(2, 4, 1))), prior_tokens=4)
    source.profiles.seed(3, np.array([[0, 0, 1, 0], [0.5, 0, 0, 0.5]], np.float32), num_tokens=12)
    predictor = StepPredictor(source, 4)
    predictor.begin(np.array([1]), np.array([3]))
    # 4 of 16 tokens are the prior, a quarter for each expert.
    assert predictor.predict(BEFORE, 1) == pytest.approx([1 / 16, 1 / 16, 13 / 16, 1 / 16], abs=1e-5)
    assert predictor.predict(BEFORE, 2) == pytest.approx([7 / 16, 1 / 16, 1 / 16, 7 / 16], abs=1e-5)


def test_the_likest_finished_request_is_followed_with_a_discount():
    source = ActivationMatrixSource(3, 4, 1)
    predictor = StepPredictor(source, 4)

    def token(request, *experts):
        predictor.begin(np.array([0]), np.array([request]))
        for layer, expert in enumerate(experts):
            predictor.observe(layer, np.array([[expert]]), np.ones((1, 1), np.float32))

    token(0, 0, 0, 0)
    assert predictor.predict(0, 1).tolist() == [0, 0, 0, 0]
    token(1, 1, 1, 1)
    token(1, 1, 1, 2)
    predictor.end([0, 1])
    token(2, 1)
    assert predictor.predict(0, 1) == pytest.approx([0, 1 - 1 / 4, 0, 0], abs=1e-5)
    assert predictor.predict(0, 2) == pytest.approx([0, 0.5 * (1 - 2 / 4), 0.5 * (1 - 2 / 4), 0], abs=1e-5)
    token(2, 0)
    # It has now chosen 1 once before and 0 now: as like one as the other, and the first of the collection counts.
    assert predictor.predict(0, 1)[0] == pytest.approx(0.75, abs=1e-5)


def test_of_a_full_collection_the_matrix_used_least_gives_way():
    source = ActivationMatrixSource(2, 3, 1, capacity=2)
    for request in range(2):
        source.learn(step_of([request], [[request]], [[request]]))
        source.end([request])
    used = step_of([7], [[0]])
    assert source.probabilities(used, 0, 1)[0].argmax() == 0
    source.learn(used)
    source.learn(step_of([8], [[2]], [[2]]))
    source.end([8])
    found = [source.probabilities(step_of([9], [[expert]]), 0, 1)[0] for expert in range(3)]
    assert [row.argmax() for row in found] == [0, 0, 2]
