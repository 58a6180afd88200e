"""A kernel benchmark on a made-up GPU with a clock and times of its own, and what its report says."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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

    def __init__(self, seconds: float = 10.0, microseconds: float = 100.0) -> None:
        self.now, self.seconds, self.microseconds = 0.0, seconds, microseconds
        self.timed, self.lost = 0, False

    def is_lost(self) -> bool:
        return self.lost

    def clock(self) -> float:
        return self.now

    def time_calls(self, *groups: Sequence[Callable[[], Any]]) -> list[Timing]:
        self.now += self.seconds
        self.timed += 1
        return [Timing(self.microseconds, 0.02) for _ in groups]


def planned(name: str, peers: Sequence[str] = (), error: float | None = 1e-3) -> PlannedCase:
    def make() -> KernelCase:
        if error is None:
            raise RuntimeError("out of resource | shared memory")
        found = error
        calls: list[Callable[[], Any]] = [lambda: torch.zeros(1)]
        return KernelCase(
            calls, dict.fromkeys(peers, calls), 340_000_000, 10**9, {"config": "rows=16"}, {}, lambda: found
        )

    return PlannedCase(name, make)


def run(
    tmp_path: Path, sections: Any, machine: Machine, limit: float = 1000.0, checks: Sequence[Check] = PASSED
) -> tuple[bool, str]:
    path = tmp_path / "benchmarks" / "kernels-gpu.md"
    report = KernelReport(path, "Kernels on a GPU", sections, target_rows({}, 1.0))
    parts = (lambda: iter(checks), lambda: CEILINGS, machine.time_calls, lambda: "clocks are high", machine.is_lost)
    right = run_bench(Bench(sections, *parts), report, Deadline(limit, machine.clock))
    assert not list(path.parent.glob("*.part"))
    return right, path.read_text()


def tables(text: str) -> tuple[list[list[str]], list[list[str]]]:
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"]
    width = len(HEADER[0].strip("|").split("|"))
    assert {len(row) for row in cells} == {4, width}
    return [row for row in cells if len(row) == 4], [row for row in cells if len(row) == width]


def rows(text: str) -> dict[str, list[str]]:
    """Cells by case."""
    return {row[0]: row[1:] for row in tables(text)[1]}


def targets(text: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The found figure and its state, by case and question."""
    return {tuple(row[:2]): tuple(row[2:]) for row in tables(text)[0]}
