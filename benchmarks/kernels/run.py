"""A run of the kernel benchmark: ceilings, checks, then case after case until its time is over."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.gpu import Ceilings, Deadline
from benchmarks.kernels.cases import Measurement, PlannedCase, Section, TimeCalls, measure
from benchmarks.kernels.measure import Check
from benchmarks.kernels.report import NOT_MEASURED, KernelReport, in_order, remark, row, target_rows, verdict_of


@dataclass(frozen=True, slots=True)
class Bench:
    """The parts of a run. sections: in the order of the report. state: clocks and the like, a line. is_lost: whether
    the GPU refuses all further work, as after an access beside its memory."""

    sections: Sequence[Section]
    checks: Callable[[], Iterable[Check]]
    ceilings: Callable[[], Ceilings]
    time_calls: TimeCalls
    state: Callable[[], str] = str
    is_lost: Callable[[], bool] = bool


def run_bench(bench: Bench, report: KernelReport, deadline: Deadline) -> bool:
    """Return whether every kernel runs and is right. One that does not leaves the others to be measured."""
    ceilings = bench.ceilings()
    report.add_line("Percentages are of the ceilings measured in the same run:\n")
    for line in (
        f"- copy {ceilings.copy / 1e12:.2f} TB/s (read and written), sum {ceilings.read / 1e12:.2f} TB/s (read)",
        f"- product of two 8192 x 8192 matrices in bf16: {ceilings.flops / 1e12:.0f} TFLOP/s",
    ):
        print(line, flush=True)
        report.add_line(line)
    report.add_line(f"\nAfter the ceilings {bench.state()}.\n")
    lines, checks_right = print_checks(bench.checks())
    for line in lines:
        report.add_line(line)
    run = _Run(bench, ceilings, report, deadline)
    right = run.all()
    report.add_line(f"At the end {bench.state()}.")
    for line in run.targets():
        print(line, flush=True)
    return right and checks_right


def print_checks(checks: Iterable[Check]) -> tuple[list[str], bool]:
    """Print each check. Return the report's lines, one per failure after their number, and whether all passed."""
    passed, wrong = 0, []
    try:
        for check in checks:
            text = f"{check.name}: relative error {check.error:.1e}"
            print(f"{'ok   ' if check.passed else 'WRONG'} {text}", flush=True)
            passed += check.passed
            if not check.passed:
                wrong.append(f"**WRONG**: {text}.\n")
    except Exception as error:  # A kernel that does not run leaves the cases to be measured.
        traceback.print_exc(file=sys.stderr)
        wrong.append(f"**FAILED** after {passed} checks: {_one_line(error)}\n")
    number = f"{passed} of {passed + len(wrong)} checks of correctness on small shapes passed.\n"
    return [number, *wrong], not wrong


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


class _Run:
    """Measures case after case and keeps the report up to date."""

    def __init__(self, bench: Bench, ceilings: Ceilings, report: KernelReport, deadline: Deadline) -> None:
        self._bench, self._ceilings, self._report, self._deadline = bench, ceilings, report, deadline
        self._found: dict[str, Measurement] = {}
        self._failed: set[str] = set()

    def targets(self) -> list[str]:
        return target_rows(self._found, self._ceilings.copy, self._failed)

    def all(self) -> bool:
        """Return whether every kernel that was measured runs and is right."""
        cases = in_order(self._bench.sections)
        for number, planned in enumerate(cases):
            if self._deadline.passed():
                self._leave(cases[number:], f"{self._deadline.seconds:.0f} s were used up")
                break
            self._measure(planned)
            if planned.name in self._failed and self._bench.is_lost():
                self._leave(cases[number + 1 :], f"the GPU refuses further work after {planned.name}")
                break
        return not self._failed and all(found.is_right for found in self._found.values())

    def _leave(self, left: Sequence[PlannedCase], reason: str) -> None:
        total = sum(len(section.cases) for section in self._bench.sections)
        text = f"{len(left)} of {total} cases {NOT_MEASURED}: {reason}."
        self._report.add_line(f"{text}\n")
        print(text, flush=True)

    def _measure(self, planned: PlannedCase) -> None:
        try:
            case = planned.make()
            found = measure(case, self._bench.time_calls, self._deadline.passed)
            verdict = verdict_of(planned.name, found, self._ceilings.copy)
            line = row(planned.name, case, found, self._ceilings, verdict)
            self._found[planned.name] = found
        except Exception as error:  # One kernel that does not run leaves the others to be measured.
            traceback.print_exc(file=sys.stderr)
            line = remark(planned.name, f"FAILED: {_one_line(error)}")
            self._failed.add(planned.name)
        print(line, flush=True)
        self._report.set_row(planned.name, line, self.targets())
        for section in self._bench.sections:
            if planned in section.cases:
                self._tell_mean(section)

    def _tell_mean(self, section: Section) -> None:
        """The mean is of one section's cases: cases that differ in kind have none."""
        ratios = [self._found[case.name].best_ratio for case in section.cases if case.name in self._found]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            mean = math.exp(sum(map(math.log, known)) / len(known))
            text = f"Geometric mean over {len(known)} cases with peers: {mean:.2f} times the best peer."
            self._report.set_remark(section.title, text)
