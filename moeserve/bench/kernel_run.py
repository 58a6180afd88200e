"""A run of the kernel benchmark: ceilings, checks, then case after case until its time is over. No GPU of its own."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moeserve.bench.kernel_case import PlannedCase, Section
from moeserve.bench.kernel_check import Check
from moeserve.bench.kernel_measurement import Measurement, TimeCalls, measure, remark, row
from moeserve.bench.kernel_report import NOT_MEASURED, KernelReport
from moeserve.bench.kernel_targets import in_order, target_rows, verdict_of
from moeserve.bench.kernel_timing import Ceilings, Deadline


@dataclass(frozen=True, slots=True)
class Bench:
    """What a run consists of. sections: in the order in which they are measured. state: clocks and the like, a line."""

    sections: Sequence[Section]
    checks: Callable[[], Iterable[Check]]
    ceilings: Callable[[], Ceilings]
    time_calls: TimeCalls
    state: Callable[[], str] = str


def run_bench(bench: Bench, report: KernelReport, deadline: Deadline) -> bool:
    """Whether no kernel is wrong or fails. What is wrong or fails is told of and keeps nothing from being measured."""
    ceilings = bench.ceilings()
    report.add_line("Percentages are of the ceilings measured in the same run:\n")
    for line in (
        f"- copy {ceilings.copy / 1e12:.2f} TB/s (read and written), sum {ceilings.read / 1e12:.2f} TB/s (read)",
        f"- product of two 8192 x 8192 matrices in bf16: {ceilings.flops / 1e12:.0f} TFLOP/s",
    ):
        print(line, flush=True)
        report.add_line(line)
    report.add_line(f"\nAfter the ceilings {bench.state()}.\n")
    right = print_checks(bench.checks(), report)
    run = _Run(bench.time_calls, ceilings, report, deadline)
    right &= run.all(bench.sections)
    report.add_line(f"At the end {bench.state()}.")
    for line in run.targets():
        print(line, flush=True)
    return right


def print_checks(checks: Iterable[Check], report: KernelReport | None = None) -> bool:
    """Prints each; whether all passed. The report gets a line for those that did, and one per other."""
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
    if report is not None:
        report.add_line(f"{passed} of {passed + len(wrong)} checks of correctness on small shapes passed.\n")
        for line in wrong:
            report.add_line(line)
    return not wrong


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


class _Run:
    """Measures case after case and keeps the report up to date."""

    def __init__(self, time_calls: TimeCalls, ceilings: Ceilings, report: KernelReport, deadline: Deadline) -> None:
        self._time_calls, self._ceilings = time_calls, ceilings
        self._report, self._deadline = report, deadline
        self._found: dict[str, Measurement] = {}

    def targets(self) -> list[str]:
        return target_rows(self._found, self._ceilings.copy)

    def all(self, sections: Sequence[Section]) -> bool:
        """Whether nothing of them is wrong or fails."""
        right, cases = True, in_order(sections)
        for number, planned in enumerate(cases):
            if self._deadline.passed():
                left = f"{len(cases) - number} of {len(cases)} cases {NOT_MEASURED}"
                text = f"{left}: {self._deadline.seconds:.0f} s were used up."
                self._report.add_line(f"{text}\n")
                print(text, flush=True)
                break
            try:
                text, is_right = self._measured(planned)
            except Exception as error:  # One kernel that does not run leaves the others to be measured.
                traceback.print_exc(file=sys.stderr)
                text, is_right = remark(planned.name, f"FAILED: {_one_line(error)}"), False
            right &= is_right
            self._report.set_row(planned.name, text, self.targets())
            print(text, flush=True)
            for section in sections:
                if planned in section.cases:
                    self._tell_mean(section)
        return right

    def _measured(self, planned: PlannedCase) -> tuple[str, bool]:
        """The case's row, and whether its results are right."""
        case = planned.make()
        found = measure(case, self._time_calls, self._deadline.passed)
        self._found[planned.name] = found
        verdict = verdict_of(planned.name, found, self._ceilings.copy)
        return row(planned.name, case, found, self._ceilings, verdict), found.is_right

    def _tell_mean(self, section: Section) -> None:
        """Over one section's cases: what differs in kind has no mean."""
        found = [self._found[case.name] for case in section.cases if case.name in self._found]
        ratios = [each.best_ratio for each in found if each.best_ratio is not None]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            text = f"Geometric mean over {len(ratios)} cases with peers: {mean:.2f} times the best peer."
            self._report.set_remark(section.title, text)
