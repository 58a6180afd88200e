"""`moeserve experts simulate` as a user types it."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.routing.files import save_trace
from launcher.cli import main
from moeserve.engine.experts.simulate import first_requests


@pytest.fixture
def trace(tmp_path):
    made = synthetic_trace(SyntheticSpec(4, 8, 2, coupling=3.0, edge=1.0), 4, 20, 0)
    save_trace(tmp_path / "trace", made)
    return tmp_path / "trace"


def simulate(*arguments):
    return CliRunner().invoke(main, ["experts", "simulate", *map(str, arguments)])


def test_a_table_compares_policies_on_demand_and_with_predictors(trace):
    result = simulate(trace, "--policy", "lru", "--policy", "lfru", "--predictor", "affinity")
    assert result.exit_code == 0, result.output
    assert "4 layers of 8 experts, 2 per token; 80 tokens" in result.output
    # 10 MB at 20 GB/s against a layer of half a millisecond.
    assert "4 slots per layer; beta 1.00" in result.output
    rows = [line.split()[:2] for line in result.output.splitlines()[2:]]
    assert rows == [["lru", "on"], ["lru", "affinity"], ["lfru", "on"], ["lfru", "affinity"]]


def test_json_has_every_figure(trace):
    options = ("--predictor", "gate-late", "--bandwidth", 10, "--residency", 0.25, "--streams", 2, "--json")
    result = simulate(trace, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert (found["beta"], found["num_slots"], found["control"]) == (2.0, 2, None)
    on_demand, silent = found["runs"]
    assert on_demand["num_steps"] == 20
    assert on_demand["num_hits"] + on_demand["num_misses"] > 0 == on_demand["prefetch_bytes"]
    # The trace has no guesses of gates, so nothing is foreseen and nothing changes.
    assert silent["by_distance"] == [{"distance": d, "recall": None, "precision": None} for d in (1, 2, 3)]
    assert (silent["stall_saved"], silent["num_misses"]) == (0.0, on_demand["num_misses"])


@pytest.mark.slow
def test_a_control_takes_the_structure_out(tmp_path):
    trace = tmp_path / "longer"
    save_trace(trace, synthetic_trace(SyntheticSpec(4, 8, 2, coupling=3.0, edge=1.0), 8, 40, 0))
    gains = [
        json.loads(simulate(trace, "--predictor", "affinity", "--json", *control).output)["runs"][1]["stall_saved"]
        for control in ((), ("--control", "uniform"))
    ]
    assert gains[0] > 0.1 > abs(gains[1])


def test_a_budget_bounds_what_one_prediction_asks_for(trace):
    moved = [
        json.loads(simulate(trace, "--predictor", "affinity", "--bandwidth", 80, "--json", *budget).output)["runs"][1]
        for budget in ((), ("--budget", "10MB"), ("--budget", "9MB"))
    ]
    prefetched = [run["prefetch_bytes"] for run in moved]
    # Of 10 MB experts, one or none at a time.
    assert prefetched[0] > prefetched[1] > prefetched[2] == 0


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--predictor", "routes"), "'routes' is not one of 'affinity', 'gate-early', 'gate-late'"),
        (("--policy", "mru"), "'mru' is not one of"),
        (("--expert-size", "big"), "'big' is not a size"),
        (("--residency", "0"), "0.0 is not in the range"),
        (("--max-tokens", "0"), "not in the range"),
    ],
)
def test_bad_options_are_named(trace, options, complaint):
    result = simulate(trace, *options)
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_trace_that_cannot_be_used_is_named(tmp_path):
    result = simulate(tmp_path / "none")
    assert (result.exit_code, result.output) == (1, f"Error: There is no trace file {tmp_path}/none.\n")
    save_trace(tmp_path / "one", synthetic_trace(SyntheticSpec(2, 4, 1), 1, 5, 0))
    result = simulate(tmp_path / "one")
    assert result.exit_code == 1
    assert "one request" in result.output


def test_whole_requests_are_taken_up_to_a_bound():
    trace = synthetic_trace(SyntheticSpec(2, 4, 1), 5, 10, 0)
    assert set(first_requests(trace, 35).requests.tolist()) == {0, 1, 2}
    assert set(first_requests(trace, 1).requests.tolist()) == {0, 1}
    assert first_requests(trace, 50).ids.shape == trace.ids.shape
