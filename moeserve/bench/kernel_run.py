"""A run of the kernel benchmark: ceilings, checks, then case after case until its time is over. No GPU of its own."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moeserve.bench.kernel_case import PlannedCase, Section
from moeserve.bench.kernel_check import Check
from moeserve.bench.kernel_measurement import Measurement, TimeCalls, measure, remark, row
from moeserve.bench.kernel_report import NOT_MEASURED, KernelReport
from moeserve.bench.kernel_results import CaseResult, Results
from moeserve.bench.kernel_targets import in_order, target_rows, verdict_of
from moeserve.bench.kernel_timing import Ceilings, Deadline


class GpuLostError(Exception):
    """The GPU refuses all further work of this process, as after an access beside its memory."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a run consists of. sections: in the order in which they are measured. state: clocks and the like, a line.
    is_lost: whether the GPU refuses all further work."""

    sections: Sequence[Section]
    checks: Callable[[], Iterable[Check]]
    ceilings: Callable[[], Ceilings]
    time_calls: TimeCalls
    state: Callable[[], str] = str
    is_lost: Callable[[], bool] = bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run has found and where it is kept; at first what runs before it have found."""

    results: Results
    path: Path

    def write(self) -> None:
        self.results.write(self.path)


def run_bench(bench: Bench, report: KernelReport, deadline: Deadline, kept: Kept) -> bool:
    """Whether no kernel is wrong or fails. What is wrong or fails is told of and keeps nothing from being measured.

    Cases that `kept` has are not measured again. Raises GpuLostError when only another process can go on.
    """
    ceilings = bench.ceilings()
    report.add_line("Percentages are of the ceilings measured in the same run:\n")
    for line in (
        f"- copy {ceilings.copy / 1e12:.2f} TB/s (read and written), sum {ceilings.read / 1e12:.2f} TB/s (read)",
        f"- product of two 8192 x 8192 matrices in bf16: {ceilings.flops / 1e12:.0f} TFLOP/s",
    ):
        print(line, flush=True)
        report.add_line(line)
    report.add_line(f"\nAfter the ceilings {bench.state()}.\n")
    results = kept.results
    if not results.checks:
        results.checks, results.checks_right = print_checks(bench.checks())
        kept.write()
        if bench.is_lost():
            raise GpuLostError("the checks")
    for line in results.checks:
        report.add_line(line)
    run = _Run(bench, ceilings, report, deadline, kept)
    right = run.all()
    report.add_line(f"At the end {bench.state()}.")
    for line in run.targets():
        print(line, flush=True)
    return right and results.checks_right


def print_checks(checks: Iterable[Check]) -> tuple[list[str], bool]:
    """Prints each. What a report says of them, a line for those that passed and one per other, and whether all did."""
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
    """Measures case after case and keeps the report and the results up to date."""

    def __init__(self, bench: Bench, ceilings: Ceilings, report: KernelReport, deadline: Deadline, kept: Kept) -> None:
        self._bench, self._ceilings = bench, ceilings
        self._report, self._deadline, self._kept = report, deadline, kept

    def targets(self) -> list[str]:
        failed = {name for name, case in self._kept.results.cases.items() if case.found is None}
        return target_rows(self._found(), self._ceilings.copy, failed)

    def _found(self) -> dict[str, Measurement]:
        cases = self._kept.results.cases.items()
        return {name: case.found for name, case in cases if case.found is not None}

    def all(self) -> bool:
        """Whether nothing is wrong or fails."""
        cases = in_order(self._bench.sections)
        kept = self._kept.results.cases
        if known := [case.name for case in cases if case.name in kept]:
            self._report.add_line(
                f"{len(known)} cases were measured before, by a run that ended, beside its own ceilings.\n"
            )
            for name in known:
                self._tell(name)
        for number, planned in enumerate(cases):
            if planned.name in kept:
                continue
            if self._deadline.passed():
                left = sum(case.name not in kept for case in cases[number:])
                text = f"{left} of {len(cases)} cases {NOT_MEASURED}: {self._deadline.seconds:.0f} s were used up."
                self._report.add_line(f"{text}\n")
                print(text, flush=True)
                break
            kept[planned.name] = self._result(planned)
            self._kept.write()
            self._tell(planned.name)
            print(kept[planned.name].row, flush=True)
            if kept[planned.name].found is None and self._bench.is_lost():
                raise GpuLostError(planned.name)
        return all(case.is_right for case in kept.values())

    def _result(self, planned: PlannedCase) -> CaseResult:
        try:
            case = planned.make()
            found = measure(case, self._bench.time_calls, self._deadline.passed)
            verdict = verdict_of(planned.name, found, self._ceilings.copy)
            return CaseResult(row(planned.name, case, found, self._ceilings, verdict), found)
        except Exception as error:  # One kernel that does not run leaves the others to be measured.
            traceback.print_exc(file=sys.stderr)
            return CaseResult(remark(planned.name, f"FAILED: {_one_line(error)}"), None)

    def _tell(self, name: str) -> None:
        """The report, of a case."""
        self._report.set_row(name, self._kept.results.cases[name].row, self.targets())
        for section in self._bench.sections:
            if any(case.name == name for case in section.cases):
                self._tell_mean(section)

    def _tell_mean(self, section: Section) -> None:
        """Over one section's cases: what differs in kind has no mean."""
        found = self._found()
        ratios = [found[case.name].best_ratio for case in section.cases if case.name in found]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            mean = math.exp(sum(map(math.log, known)) / len(known))
            text = f"Geometric mean over {len(known)} cases with peers: {mean:.2f} times the best peer."
            self._report.set_remark(section.title, text)
