"""A run of the kernel benchmark with a clock, times and ceilings of our own: what it writes, and when it stops."""

import math
import re

import pytest
import torch

from moeserve.bench.kernel_bench import _attention_case, _sections, main
from moeserve.bench.kernel_case import KernelCase, PlannedCase, Section
from moeserve.bench.kernel_cases_attention import AttentionCase
from moeserve.bench.kernel_cases_small import small_cases
from moeserve.bench.kernel_checks import Check
from moeserve.bench.kernel_measurement import HEADER, Measurement
from moeserve.bench.kernel_report import KernelReport
from moeserve.bench.kernel_run import Bench, run_bench
from moeserve.bench.kernel_targets import TARGETS, Target, targets_first
from moeserve.bench.kernel_timing import Ceilings, Deadline, Timing

CEILINGS = Ceilings(copy=4e12, read=4.4e12, flops=8e14)


PASSED = (Check("norm", 1e-4),)


class Machine:
    """Every timing takes `seconds` of its clock and finds `microseconds`."""

    def __init__(self, seconds=10.0, microseconds=100.0):
        self.now, self.seconds, self.microseconds = 0.0, seconds, microseconds
        self.timed = 0

    def clock(self):
        return self.now

    def time_calls(self, calls):
        self.now += self.seconds
        self.timed += 1
        return Timing(self.microseconds, 0.02)


def planned(name, peers=(), error=1e-3):
    def make():
        if error is None:
            raise RuntimeError("out of resource | shared memory")
        calls = [lambda: torch.zeros(1)]
        return KernelCase(
            calls, dict.fromkeys(peers, calls), 340_000_000, 10**9, {"config": "rows=16"}, {}, lambda: error
        )

    return PlannedCase(name, make)


def run(tmp_path, sections, machine, limit=1000.0, checks=PASSED):
    path = tmp_path / "benchmarks" / "kernels-gpu.md"
    report = KernelReport(path, "Kernels on a GPU", sections)
    bench = Bench(sections, lambda: iter(checks), lambda: CEILINGS, machine.time_calls)
    right = run_bench(bench, report, Deadline(limit, machine.clock))
    assert not list(path.parent.glob("*.part"))
    return right, path.read_text()


def rows(text):
    """Cells by case."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert all(len(row) == len(HEADER[0].strip("|").split("|")) for row in cells)
    return {row[0]: row[1:] for row in cells}


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
    right, text = run(tmp_path, sections, machine, limit=25.0)
    # a until 10, b until 20, its first peer until 30.
    assert right
    assert machine.timed == 3
    found = rows(text)
    assert found["b"][8] == "torch 100.0; flex: not measured"
    assert found["c"][0] == found["d"][0] == "not measured"
    assert "The last 1 not measured: 25 s were used up." in text
    assert "All not measured: 25 s were used up." in text
    assert "Second: skipped from d on, 25 s were used up" in capsys.readouterr().out


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
        def time_calls(self, calls):
            if self.timed == 2:
                raise Killed
            return super().time_calls(calls)

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


def test_cases_with_targets_come_first_and_their_rows_say_whether_they_are_reached(tmp_path):
    name = next(iter(TARGETS))
    sections = targets_first([Section("Decode", [planned("other"), planned(name)])])
    assert [[case.name for case in section.cases] for section in sections] == [[name], ["other"]]
    for microseconds, verdict in ((100.0, "85% of copy reached"), (101.0, "85% of copy MISSED")):
        _, text = run(tmp_path, sections, Machine(microseconds=microseconds))
        assert rows(text)[name][9] == verdict


@pytest.mark.parametrize(
    ("peers", "verdict"),
    [
        ({"SDPA cuDNN": 70.0}, "400 TFLOP/s reached; 0.65 x SDPA cuDNN reached"),
        ({"SDPA cuDNN": 64.0}, "400 TFLOP/s reached; 0.65 x SDPA cuDNN MISSED"),
        ({}, "400 TFLOP/s reached; 0.65 x SDPA cuDNN not measured"),
    ],
)
def test_a_target_beside_a_peer_compares_times(peers, verdict):
    found = Measurement(100.0, 0.0, None, 1e12, 4.5e14, peers)
    assert Target(teraflops=400, beside=("SDPA cuDNN", 0.65)).verdict(found, CEILINGS.copy) == verdict


def test_every_target_is_of_a_case_that_is_measured():
    names = [case.name for section in _sections(torch.device("cpu"), 132) for case in section.cases]
    assert len(set(names)) == len(names)
    assert set(TARGETS) <= set(names)
    assert sum(bool(re.search("extend .*fp8", name)) for name in names) == 1


def test_the_command_writes_a_file_named_after_the_gpu(tmp_path, monkeypatch, capsys):
    machine = Machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Gpu", (), {"multi_processor_count": 132}))
    monkeypatch.setattr("moeserve.bench.kernel_bench._sections", lambda *_: [Section("Small", [planned("copy")])])
    monkeypatch.setattr("moeserve.bench.kernel_checks.checks", lambda *_: [Check("norm", 1e-4)])
    monkeypatch.setattr("moeserve.bench.kernel_timing.measure_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr("moeserve.bench.kernel_timing.time_calls", machine.time_calls)
    assert main(["--out-dir", str(tmp_path), "--time-limit", "100"]) == 0
    path = tmp_path / "kernels-nvidia-h200.md"
    assert capsys.readouterr().out.endswith(f"written to {path}\n")
    assert rows(path.read_text())["copy"][0] == "100.0"
    assert f"torch {torch.__version__}" in path.read_text()
    assert main(["--out-dir", str(tmp_path), "--time-limit", "0"]) == 0
    assert rows(path.read_text())["copy"][0] == "not measured"


# The smallest of each kind; larger ones take minutes in the interpreter.
SMALLEST = {
    number: case.name
    for number, case in enumerate(small_cases(torch.device("cpu")))
    if re.search(r"norm, 64 |, 64 tokens|, 1 x", case.name)
}


@pytest.mark.parametrize("number", SMALLEST, ids=SMALLEST.values())
def test_small_cases_compute_what_their_peers_do(number, device, monkeypatch):
    for size, small in {"_WIDTH": 64, "_HEADS": 4, "_KV_HEADS": 2, "_DIM": 32, "_VOCAB": 500, "_COLD_BYTES": 1}.items():
        monkeypatch.setattr(f"moeserve.bench.kernel_cases_small.{size}", small)

    def make():
        torch.manual_seed(0)
        return small_cases(device)[number].make()

    case = make()
    ours = case.calls[0]().clone()
    assert ours.numel()
    for peer in case.peers:
        # Made anew, since some work in place.
        calls = make().peers[peer]
        assert len(calls) == len(case.calls)
        if peer != "torch.sort":  # It draws.
            torch.testing.assert_close(calls[0]().reshape(ours.shape), ours, rtol=2e-2, atol=2e-2)


def test_an_attention_case_is_made_with_its_check(device, monkeypatch):
    monkeypatch.setattr("moeserve.bench.kernel_attention._COLD_BYTES", 1)
    case = _attention_case(AttentionCase("extend", "extend", (40, 40), (3, 3), 4, 4, 32, 32, 16), device, 4)
    assert case.relative_error() < 1e-2
    assert case.notes["config"].startswith("ExtendConfig")
    assert case.num_bytes > 0
