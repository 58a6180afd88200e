"""A run of the kernel benchmark with a clock, times and ceilings of our own: what it writes, and when it stops."""

import math
import re

import pytest
import torch

from benchmarks.kernels.__main__ import _sections, main
from benchmarks.kernels.attention import attention_case
from benchmarks.kernels.attention_case import AttentionCase
from benchmarks.kernels.cases import Measurement, PeerTime, Section
from benchmarks.kernels.measure import Check, Timing
from benchmarks.kernels.report import TARGETS, Target, in_order
from tests.support.made_up_gpu import CEILINGS, Machine, planned, rows, run, tables, targets


def test_a_row_has_time_rate_error_peers_and_configuration(tmp_path):
    right, text = run(tmp_path, [Section("Small", [planned("copy", ["torch"])])], Machine())
    assert right
    assert "copy 4.00 TB/s" in text
    assert "1 of 1 checks" in text
    row = rows(text)["copy"]
    assert row[:9] == ["100.0", "2%", "1.0e-03", "3400", "85%", "10.0", "1%", "1.00", "torch 100.0"]
    assert row[-1] == "config rows=16"


def test_what_begins_after_the_limit_is_left_out_and_said_to_be(tmp_path, capsys):
    sections = [
        Section("First", [planned("a"), planned("b", ["torch", "flex"]), planned("c")]),
        Section("Second", [planned("d")]),
    ]
    machine = Machine(seconds=10)
    right, text = run(tmp_path, sections, machine, limit=35.0)
    # One of each section in turn: a until 10, d until 20, b until 30, its first peer until 40.
    assert right
    assert machine.timed == 4
    found = rows(text)
    assert found["d"][0] == "100.0"
    assert found["b"][8] == "torch 100.0; flex: not measured"
    assert found["c"][0] == "not measured"
    assert "1 of 4 cases not measured: 35 s were used up." in text
    assert "1 of 4 cases not measured: 35 s were used up." in capsys.readouterr().out


def test_ceilings_and_the_state_of_the_machine_stand_before_checks_and_at_the_end(tmp_path):
    _, text = run(tmp_path, [Section("Small", [planned("copy")])], Machine())
    places = [text.index(part) for part in ("copy 4.00", "After the ceilings clocks are high", "1 of 1 checks")]
    assert places == sorted(places)
    assert "At the end clocks are high." in text


def test_ratios_have_a_mean_within_their_section(tmp_path):
    class Uneven(Machine):
        def time_calls(self, *groups):
            found = super().time_calls(*groups)
            # Peers of the first case take four times as long, peers of the second as long.
            return [*found[:-1], Timing(400.0, 0.0)] if len(groups) > 1 and self.timed == 2 else found

    cases = [planned("a", ["torch"]), planned("b", ["torch"]), planned("c")]
    _, text = run(tmp_path, [Section("Small", cases), Section("Other", [planned("d")])], Uneven())
    assert [rows(text)[name][7] for name in "abcd"] == ["4.00", "1.00", "", ""]
    assert text.count("Geometric mean") == 1
    assert "Geometric mean over 2 cases with peers: 2.00 times the best peer." in text


def test_a_peer_that_fails_while_it_is_timed_leaves_the_others(tmp_path):
    class Refusing(Machine):
        def time_calls(self, *groups):
            if self.timed == 1:
                self.timed += 1
                raise ValueError("another project's words")
            return super().time_calls(*groups)

    right, text = run(tmp_path, [Section("Small", [planned("a", ["flex", "torch"])])], Refusing())
    assert right
    assert rows(text)["a"][7:9] == ["1.00", "torch 100.0; flex: fails: ValueError"]


def test_what_is_timed_without_a_graph_says_so(tmp_path):
    class Waiting(Machine):
        def time_calls(self, *groups):
            return [Timing(each.microseconds, 0.0, in_graph=False) for each in super().time_calls(*groups)]

    _, text = run(tmp_path, [Section("Small", [planned("a", ["loop"])])], Waiting())
    assert rows(text)["a"][8] == "loop 100.0 (no graph)"
    assert rows(text)["a"][0] == "100.0 (no graph)"


def test_the_time_that_checks_take_counts(tmp_path):
    machine = Machine()

    def checks():
        machine.now += 30.0
        yield Check("norm", 1e-4)

    _, text = run(tmp_path, [Section("Small", [planned("copy")])], machine, limit=20.0, checks=checks())
    assert machine.timed == 0
    assert rows(text)["copy"][0] == "not measured"


def test_a_run_that_is_cut_off_leaves_what_it_measured(tmp_path):
    class Killed(BaseException):
        pass

    class Cut(Machine):
        def time_calls(self, *groups):
            if self.timed == 2:
                raise Killed
            return super().time_calls(*groups)

    with pytest.raises(Killed):
        run(tmp_path, [Section("Small", [planned("a"), planned("b"), planned("c")])], Cut())
    found = rows((tmp_path / "benchmarks" / "kernels-gpu.md").read_text())
    assert [found[name][0] for name in "abc"] == ["100.0", "100.0", "not measured"]


def test_what_fails_or_is_wrong_is_told_of_and_the_rest_is_measured(tmp_path):
    for error, told in ((None, "FAILED: RuntimeError: out of resource"), (0.5, "WRONG"), (math.nan, "WRONG")):
        right, text = run(tmp_path, [Section("Small", [planned("a", error=error), planned("b")])], Machine())
        assert not right
        assert told in " ".join(rows(text)["a"])
        assert rows(text)["b"][0] == "100.0"
    right, text = run(tmp_path, [Section("Small", [planned("b")])], Machine(), checks=[Check("norm", math.nan)])
    assert not right
    assert "**WRONG**: norm" in text
    assert "0 of 1 checks" in text
    assert rows(text)["b"][0] == "100.0"


def test_a_check_that_fails_leaves_the_cases_to_be_measured(tmp_path):
    def checks():
        yield Check("norm", 1e-4)
        raise RuntimeError("out of resource")

    right, text = run(tmp_path, [Section("Small", [planned("b")])], Machine(), checks=checks())
    assert not right
    assert "**FAILED** after 1 checks: RuntimeError: out of resource" in text
    assert rows(text)["b"][0] == "100.0"


def test_cases_with_targets_come_first_and_a_table_says_whether_they_are_met(tmp_path):
    name, other = TARGETS[0].case, TARGETS[1].case
    sections = [Section("Prefill", [planned("plain"), planned(other)]), Section("Decode", [planned(name)])]
    assert [case.name for case in in_order(sections)] == [name, other, "plain"]
    for microseconds, found, state in ((100.0, "85.0%", "met"), (101.0, "84.2%", "MISSED")):
        _, text = run(tmp_path, sections, Machine(microseconds=microseconds), limit=10.0)
        assert rows(text)[name][9] == f"85% of copy {state}"
        assert targets(text)[name, "85% of copy"] == (found, state)
        # The time is over.
        assert targets(text)[other, "400 TFLOP/s"] == ("", "not measured")
    assert len(tables(text)[0]) == len(TARGETS) + 2
    _, text = run(tmp_path, [Section("Decode", [planned(name, error=None)])], Machine())
    assert targets(text)[name, "85% of copy"] == ("", "FAILED")


def test_a_kernel_that_takes_the_gpu_away_ends_the_run(tmp_path):
    class Lost(Machine):
        def is_lost(self):
            return self.timed == 1

    sections = [Section("Small", [planned("a"), planned("b", error=None), planned("c")])]
    right, text = run(tmp_path, sections, Lost())
    assert not right
    assert [rows(text)[name][0][:12] for name in "abc"] == ["100.0", "FAILED: Runt", "not measured"]
    assert "1 of 3 cases not measured: the GPU refuses further work after b." in text


@pytest.mark.parametrize(
    ("peers", "found", "state"),
    [
        ({"SDPA cuDNN": PeerTime(70.0, 0.7)}, "0.70 x", "met"),
        ({"SDPA cuDNN": PeerTime(64.0, 0.64)}, "0.64 x", "MISSED"),
        ({}, "", "not measured"),
    ],
)
def test_a_target_beside_a_peer_compares_times(peers, found, state):
    target = Target("prefill", "peer", 0.65, "SDPA cuDNN")
    verdict = target.judge(Measurement(100.0, 0.0, None, 1e12, 4.5e14, peers), CEILINGS.copy)
    assert (verdict.found, verdict.state) == (found, state)
    assert target.asked == "0.65 x SDPA cuDNN"


def test_every_target_is_of_a_case_that_is_measured():
    names = [case.name for section in _sections(torch.device("cpu"), 132) for case in section.cases]
    assert len(set(names)) == len(names)
    assert {target.case for target in TARGETS} <= set(names)
    for format in ("int8", "fp8", "int4"):
        assert sum(bool(re.search(f"Qwen3.* {format}, ", name)) for name in names) == 4
    assert sum(bool(re.search("extend .*fp8", name)) for name in names) == 1


def test_the_command_writes_a_file_named_after_the_gpu(tmp_path, monkeypatch, capsys):
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    gpu = {"name": "NVIDIA H200", "multi_processor_count": 132, "total_memory": 2**37, "L2_cache_size": 60 << 20}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Gpu", (), gpu))
    monkeypatch.setattr("benchmarks.kernels.__main__._sections", lambda *_: [Section("Small", [planned("copy")])])
    monkeypatch.setattr("benchmarks.kernels.checks.checks", lambda *_: [Check("norm", 1e-4)])
    monkeypatch.setattr("benchmarks.gpu.measure_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr("benchmarks.kernels.measure.time_calls", machine.time_calls)
    monkeypatch.setattr("benchmarks.gpu.is_lost", lambda: False)
    assert main(["--out-dir", str(tmp_path), "--time-limit", "100"]) == 0
    path = tmp_path / "kernels-nvidia-h200.md"
    assert capsys.readouterr().out.endswith(f"written to {path}\n")
    assert rows(path.read_text())["copy"][0] == "100.0"
    assert f"torch {torch.__version__}" in path.read_text()
    assert "132 multiprocessors, 128 GiB, 60 MiB of L2" in path.read_text()
    assert main(["--out-dir", str(tmp_path), "--time-limit", "0"]) == 0
    assert rows(path.read_text())["copy"][0] == "not measured"


def test_an_attention_case_is_made_with_its_check(device, monkeypatch):
    monkeypatch.setattr("benchmarks.kernels.measure.COLD_BYTES", 1)
    case = attention_case(AttentionCase("extend", "extend", (40, 40), (3, 3), 4, 4, 32, 32, 16), device, 4)
    assert case.relative_error() < 1e-2
    assert case.notes["config"].startswith("ExtendConfig")
    assert case.notes["sets"] == "1"
    assert case.num_bytes > 0
