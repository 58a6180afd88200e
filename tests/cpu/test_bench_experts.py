"""`python -m benchmarks.experts`: verdicts, tables and JSON, and every figure that needs no model, on little."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.experts.__main__ import MEASUREMENTS, command, measure_of
from benchmarks.experts.figures import Figure, Unavailable, Verdict, at_least, at_most, half_width, in_turn, within
from benchmarks.experts.lab_traces import GateGuesses
from benchmarks.experts.placement import (
    balanced,
    fewest_touched,
    remote_ranks_of_trace,
    zipf_loads,
)
from benchmarks.experts.prediction import recalls, stall_saved
from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from benchmarks.experts.traces import documents, halves
from experts.routing.files import Tap

COUPLED = SyntheticSpec(5, 8, 2, coupling=3.0, topic=0.5, persistence=0.2, edge=1.0)


def guessed_trace():
    """Ten requests; the gates see most of what comes."""
    trace = synthetic_trace(COUPLED, 10, 20, 0)
    random = np.random.default_rng(0)
    guesses = []
    for distance in (1, 2, 3):
        logits = random.standard_normal((5 - distance, trace.ids.shape[1], 8))
        seen = np.take_along_axis(logits, trace.ids[distance:].astype(np.int64), 2) + 2.5 / distance
        np.put_along_axis(logits, trace.ids[distance:].astype(np.int64), seen, 2)
        guesses.append(GateGuesses(Tap.EARLY, distance, logits.astype(np.float16)))
    return replace(trace, guesses=tuple(guesses))


def verdict(values, limit, **more):
    return Figure("", "", tuple(values), limit=limit, **more).verdict


def test_a_verdict_goes_by_the_whole_interval():
    assert verdict([1.0, 1.1, 1.2], at_least(0.5)) is Verdict.MET
    assert verdict([1.0, 1.1, 1.2], at_least(2)) is Verdict.MISSED
    assert verdict([1.0, 1.1, 1.2], at_least(1.1)) is Verdict.OPEN
    assert verdict([1.0, 1.1], None) is Verdict.REPORTED
    assert verdict([0.1, 0.11, 0.12], at_most(0.2)) is Verdict.MET


def test_a_control_has_to_lie_in_a_band_around_zero():
    assert verdict([0.01, -0.01, 0.0], within(0.05)) is Verdict.MET
    assert verdict([0.1, 0.11, 0.12], within(0.05)) is Verdict.MISSED
    assert verdict([-0.5, 0.5, 0.1], within(0.05)) is Verdict.OPEN


def test_one_value_decides_only_what_is_counted():
    assert verdict([1.0], at_least(0.5)) is Verdict.OPEN
    assert verdict([1.0], at_least(0.5), exact=True) is Verdict.MET
    assert verdict([0.4], at_least(0.5), exact=True) is Verdict.MISSED


def test_the_interval_is_that_of_students_t():
    assert half_width([1.0]) is None
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30 / 3**0.5)


def test_requests_are_held_out_whole_and_by_seed():
    trace = synthetic_trace(COUPLED, 10, 5, 0)
    learning, held_out = halves(trace, 3)
    assert set(learning.requests) | set(held_out.requests) == set(range(10))
    assert not set(learning.requests) & set(held_out.requests)
    assert len(set(learning.requests)) == 5
    assert set(halves(trace, 4)[0].requests) != set(learning.requests)


def test_texts_are_many_and_differ():
    texts = documents()
    assert len(texts) > 40
    assert len(set(texts)) == len(texts)


def test_remote_ranks_are_saved_where_there_is_structure():
    found = remote_ranks_of_trace(synthetic_trace(SyntheticSpec(4, 8, 2, coupling=2.5, kinship=0.8), 40, 80, 1), 0)
    saved = {name: figure.saved for name, figure in found.items()}
    assert saved["homes in turn"] > 0.03 > abs(saved["uniform control"])
    best = saved["optimum for the requests measured, loads left aside"]
    assert best >= max(saved["ranks as busy as in the plain placement"], saved["homes in turn"])
    assert "shuffled control" in saved


def test_the_fewest_ranks_are_those_of_all_placements():
    routing = np.array([[[0, 3], [1, 2], [0, 3]], [[0, 1], [2, 3], [2, 3]]])
    assert fewest_touched(routing, 4, 2).first_ranks().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]


def test_replicas_balance_skewed_loads():
    found = balanced(*zipf_loads(1.0, 0), 8, 8)
    assert found["replicas"] > 0.85 > found["contiguous"]
    even = balanced(*zipf_loads(0.0, 0), 8, 8)
    assert even["replicas"] == pytest.approx(even["contiguous"], abs=0.02)


def test_recall_by_predictor_distance_and_control():
    found = recalls({"": guessed_trace()}, 200, 0)
    assert found["gate-early d=1"] > found["gate-early d=3"] > found["popularity d=3"]
    assert found["affinity / popularity d=1"] > 1.1
    assert found["best / popularity d=1, uniform control"] < 1.3


def test_stall_is_saved_and_an_oracle_saves_more():
    found = stall_saved(guessed_trace(), (1.0, 2.0), 200, 0)
    assert 0.2 < found[1.0, "stall saved"] < found[1.0, "with an oracle for the gate"]
    # Gates that know nothing are believed as well, and cost: the judge that stops them is no part of this.
    assert -0.2 < found[1.0, "uniform control"] < 0.05
    assert 0 <= found[1.0, "bytes moved for nothing"] < 0.3
    assert found[2.0, "stall saved"] < found[1.0, "stall saved"]


def test_every_measurement_names_functions_that_are_there():
    functions = [function for measurement in MEASUREMENTS.values() for function in measurement.functions]
    # Measurements of memory need torch.
    assert all(callable(measure_of(function)) for function in functions if not function.startswith("memory:"))


def test_runs_take_turns_and_come_back_in_the_order_of_the_arms():
    order = []

    def run(arm, number):
        order.append((arm, number))
        return f"{arm}{number}"

    assert in_turn("ab", 2, run, warm_up=True) == [("a0", "b0"), ("a1", "b1")]
    assert order == [("b", -1), ("a", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)]


@pytest.fixture
def scripted(monkeypatch):
    """Two quick measurements; one of them cannot be made."""

    def measure(amount, progress):
        progress("something")
        values = tuple(np.float64(0.9 + seed) for seed in amount.seeds)
        yield Figure("balance", "contiguous", values, limit=at_least(0.5))
        yield Figure("share", "all", (0.25,), "%", at_most(0.1), exact=True, note="why [not]")

    def refuse(amount, progress):
        raise Unavailable("nothing is there")

    functions = {"placement:balance": measure, "prediction:recall": refuse}
    monkeypatch.setattr("benchmarks.experts.__main__.measure_of", lambda function: functions[function])


def test_the_command_prints_a_table_and_what_was_left_out(scripted):
    result = CliRunner().invoke(command, ["--only", "balance, recall"])
    assert result.exit_code == 0, result.output
    for word in ("balancedness", "contiguous", "25.0 %", "missed", "met", "why [not]", "seeds 0, 1, 2, 3, 4"):
        assert word in result.output
    assert "recall was not measured: nothing is there" in result.output
    assert "1 of 2 figures miss their target" in result.output


def test_the_command_writes_all_values(scripted, tmp_path):
    file = tmp_path / "experts.json"
    arguments = ["--only", "balance", "--quick", "--json", str(file)]
    assert CliRunner().invoke(command, arguments).exit_code == 0
    written = json.loads(file.read_text())
    even, share = written["figures"]
    assert even["measurement"] == share["measurement"] == "balance"
    assert even["values"] == [0.9, 1.9]
    assert (even["verdict"], share["verdict"]) == ("open", "missed")
    assert share["limit"] == ["≤", 0.1]
    assert written["quick"] is True
    assert written["environment"]["num_cores"] >= 1


def test_an_unknown_measurement_is_refused():
    result = CliRunner().invoke(command, ["--only", "recall,T11"])
    assert result.exit_code == 2
    assert "there is no T11" in result.output
