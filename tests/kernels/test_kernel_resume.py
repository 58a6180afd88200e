"""A kernel benchmark that goes on where another ended, because of its time or of a kernel that took the GPU away."""

import math
import sys

import pytest

from moeserve.bench.kernel_bench import _go_on
from moeserve.bench.kernel_case import Section
from moeserve.bench.kernel_check import Check
from moeserve.bench.kernel_measurement import Measurement, PeerTime
from moeserve.bench.kernel_results import CaseResult, Results
from moeserve.bench.kernel_run import GpuLostError
from tests.support.made_up_gpu import Machine, planned, rows, run


def test_a_run_goes_on_where_another_ended(tmp_path):
    sections = [Section("Small", [planned("b", error=None), planned("a", ["torch"]), planned("c")])]
    _, first = run(tmp_path, sections, Machine(seconds=10), limit=20.0)
    assert rows(first)["c"][0] == "not measured"

    def checks():
        raise AssertionError("they were made before")
        yield

    machine = Machine(microseconds=50.0)
    right, text = run(tmp_path, sections, machine, checks=checks(), resume=True)
    assert not right, "b failed in the first run"
    assert machine.timed == 1
    assert rows(text) == {**rows(first), "c": rows(text)["c"]}
    assert rows(text)["c"][0] == "50.0"
    assert "2 cases were measured before" in text
    assert "Geometric mean over 1 cases" in text
    assert "1 of 1 checks" in text


def test_a_kernel_that_takes_the_gpu_away_is_not_begun_again(tmp_path):
    class Lost(Machine):
        def is_lost(self):
            return self.timed == 1

    sections = [Section("Small", [planned("a"), planned("b", error=None), planned("c")])]
    with pytest.raises(GpuLostError, match="b"):
        run(tmp_path, sections, Lost())
    right, text = run(tmp_path, sections, Machine(), resume=True)
    assert not right
    found = rows(text)
    assert [found[name][0][:6] for name in "abc"] == ["100.0", "FAILED", "100.0"]


def test_checks_that_take_the_gpu_away_are_not_made_again(tmp_path):
    machine = Machine()
    machine.lost = True
    sections = [Section("Small", [planned("a")])]
    with pytest.raises(GpuLostError, match="the checks"):
        run(tmp_path, sections, machine, checks=[Check("norm", math.nan)])
    right, text = run(tmp_path, sections, Machine(), checks=None, resume=True)
    assert not right
    assert "**WRONG**: norm" in text
    assert rows(text)["a"][0] == "100.0"


def test_results_of_something_else_are_not_gone_on_with(tmp_path):
    path = tmp_path / "results.json"
    found = Measurement(
        100.0, 0.02, math.nan, 1e12, 1e14, {"torch": PeerTime(70.0, 0.7, in_graph=False)}, {"flex": "no"}
    )
    results = Results("a GPU", {"a": CaseResult("| a |", found), "b": CaseResult("| b |", None)}, ["1 of 1"], False)
    results.write(path)
    again = Results.read(path, "a GPU")
    assert repr(again) == repr(results)
    for other in (Results.read(path, "another GPU"), Results.read(tmp_path / "none", "a GPU")):
        assert (other.cases, other.checks) == ({}, [])
    path.write_text('{"of": "a GPU"}')
    assert Results.read(path, "a GPU") == Results("a GPU")


def test_another_process_takes_the_place_of_one_that_lost_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("os.execv", lambda *args: started.append(args))
    started = []
    _go_on(tmp_path, 41.6)
    ((program, arguments),) = started
    assert program == arguments[0] == sys.executable
    assert arguments[1:3] == ["-m", "moeserve.bench.kernel_bench"]
    assert arguments[3:] == ["--resume", "--out-dir", str(tmp_path), "--time-limit", "42"]
