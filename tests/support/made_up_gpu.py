"""A kernel benchmark on a made-up GPU with a clock and times of its own, and what its report says."""

import torch

from benchmarks.gpu import Ceilings, Deadline
from benchmarks.kernels.cases import KernelCase, PlannedCase
from benchmarks.kernels.measure import Check, Timing
from benchmarks.kernels.report import HEADER, KernelReport, target_rows
from benchmarks.kernels.run import Bench, run_bench

CEILINGS = Ceilings(copy=4e12, read=4.4e12, flops=8e14)


PASSED = (Check("norm", 1e-4),)


class Machine:
    """Every timing takes `seconds` of its clock and finds `microseconds`."""

    def __init__(self, seconds=10.0, microseconds=100.0):
        self.now, self.seconds, self.microseconds = 0.0, seconds, microseconds
        self.timed, self.lost = 0, False

    def is_lost(self):
        return self.lost

    def clock(self):
        return self.now

    def time_calls(self, *groups):
        self.now += self.seconds
        self.timed += 1
        return [Timing(self.microseconds, 0.02) for _ in groups]


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
    report = KernelReport(path, "Kernels on a GPU", sections, target_rows({}, 1.0))
    parts = (lambda: iter(checks), lambda: CEILINGS, machine.time_calls, lambda: "clocks are high", machine.is_lost)
    right = run_bench(Bench(sections, *parts), report, Deadline(limit, machine.clock))
    assert not list(path.parent.glob("*.part"))
    return right, path.read_text()


def tables(text):
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"]
    width = len(HEADER[0].strip("|").split("|"))
    assert {len(row) for row in cells} == {4, width}
    return [row for row in cells if len(row) == 4], [row for row in cells if len(row) == width]


def rows(text):
    """Cells by case."""
    return {row[0]: row[1:] for row in tables(text)[1]}


def targets(text):
    """What was found and the state, by case and what is asked."""
    return {tuple(row[:2]): tuple(row[2:]) for row in tables(text)[0]}
