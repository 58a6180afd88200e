"""`python -m benchmarks.experts` with models: recording, runs with part of the experts in memory."""

import numpy as np
import pytest

from benchmarks.experts.figures import Verdict, in_turn
from benchmarks.experts.memory import (
    Run,
    Setting,
    SlowedTier,
    bandwidth_for,
    contest,
    layer_seconds,
    slot_bytes,
    stall_figures,
    throughput_figure,
)
from benchmarks.experts.record_routing import record_with_fits
from experts.routing.files import Tap

TEXTS = ["The harbour wakes before the town does.", "too short", "At half past four the first boats come back."]


def test_every_text_is_a_request_and_gates_guess_ahead(model):
    trace = record_with_fits(model, TEXTS, 30, 12, {}).traces[""]
    assert trace.num_experts == 4
    assert trace.ids.shape == (2, 60, 2)
    assert trace.requests.tolist() == [0] * 30 + [1] * 30
    ahead = next(guesses for guesses in trace.guesses if (guesses.tap, guesses.distance) == (Tap.EARLY, 1))
    assert ahead.logits.shape == (1, 60, 4)
    again = record_with_fits(model, TEXTS[2:], 30, 12, {}).traces[""]
    assert np.array_equal(again.ids, trace.ids[:, 30:])


def test_contestants_load_experts_and_give_the_same_answers(model, tmp_path, monkeypatch):
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    read, readers = SlowedTier.read, []
    monkeypatch.setattr(SlowedTier, "read", lambda tier, *place: (readers.append(tier), read(tier, *place)))
    assert bandwidth_for(model, 2.0, layer_seconds(model, 4)) > slot_bytes(model)
    demand = Setting(model, 0.5, "lru", "off", 10**8)
    with contest([demand, Setting(model, 0.5, "lfru", "gate", 10**8), Setting(model)]) as contestants:
        readers.clear()
        rounds = in_turn(contestants, 2, lambda contestant, _: contestant.run(2, 6))
        answers = [contestant.complete(2, 6, 5) for contestant in contestants]
    assert answers[0] == answers[1] == answers[2]
    assert len(set(readers)) == 2  # A fast machine may have loaded an expert before it is waited for.
    for loading, ahead, resident in rounds:
        assert loading.num_tokens == ahead.num_tokens == 12
        assert loading.stall >= 0 < loading.beta
        assert resident.stall == resident.beta == 0


def runs(*seconds):
    """Pairs in which the second run waits half as long."""
    pair = [Run(20, of_run, of_run / 2, 0.01, 0.1, beta=1.5) for of_run in seconds]
    return [(pair[0], pair[1]), (pair[0], pair[1])]


def test_measured_stall_counts_what_predictions_cost():
    saved, wasted = stall_figures("case", runs(2.0, 1.0))
    assert saved.values == pytest.approx((0.49, 0.49))
    assert wasted.values == (0.1, 0.1)
    assert "beta 1.50" in saved.note
    assert saved.verdict is Verdict.MET


def test_throughput_is_a_ratio_within_each_pair():
    resident = Run(20, 0.5)
    figure = throughput_figure("case", [(resident, *pair) for pair in runs(2.0, 1.0)])
    assert figure.values == (2.0, 2.0)
    assert "40.0 tokens/s with all experts in memory, 10.0 on demand (0.25), 20.0 (0.50)" in figure.note
