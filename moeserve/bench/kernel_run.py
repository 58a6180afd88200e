"""A run of the kernel benchmark: checks, ceilings, then case after case until its time is over. No GPU of its own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moeserve.bench.kernel_case import PlannedCase, Section
from moeserve.bench.kernel_checks import Check
from moeserve.bench.kernel_measurement import TimeCalls, measure, remark, row
from moeserve.bench.kernel_report import NOT_MEASURED, KernelReport
from moeserve.bench.kernel_targets import TARGETS
from moeserve.bench.kernel_timing import Ceilings, Deadline


@dataclass(frozen=True, slots=True)
class Bench:
    """What a run consists of. sections: in the order in which they are measured."""

    sections: Sequence[Section]
    checks: Callable[[], Iterable[Check]]
    ceilings: Callable[[], Ceilings]
    time_calls: TimeCalls


def run_bench(bench: Bench, report: KernelReport, deadline: Deadline) -> bool:
    """Whether no kernel is wrong or fails. What is wrong or fails is told of and keeps nothing from being measured."""
    right = print_checks(bench.checks(), report)
    ceilings = bench.ceilings()
    report.add_line("Percentages are of the ceilings measured in the same run:\n")
    report.add_line(
        f"- copy {ceilings.copy / 1e12:.2f} TB/s (read and written), sum {ceilings.read / 1e12:.2f} TB/s (read)"
    )
    report.add_line(f"- product of two 8192 x 8192 matrices in bf16: {ceilings.flops / 1e12:.0f} TFLOP/s")
    for section in bench.sections:
        right &= _measure_section(section, bench.time_calls, ceilings, report, deadline)
    return right


def print_checks(checks: Iterable[Check], report: KernelReport | None = None) -> bool:
    """Prints each; whether all passed. The report gets a line for those that did, and one per other."""
    passed, wrong = 0, []
    for check in checks:
        text = f"{check.name}: relative error {check.error:.1e}"
        print(f"{'ok   ' if check.passed else 'WRONG'} {text}", flush=True)
        passed += check.passed
        if not check.passed:
            wrong.append(f"**WRONG**: {text}.\n")
    if report is not None:
        report.add_line(f"{passed} of {passed + len(wrong)} checks of correctness on small shapes passed.\n")
        for line in wrong:
            report.add_line(line)
    return not wrong


def _measure_section(
    section: Section, time_calls: TimeCalls, ceilings: Ceilings, report: KernelReport, deadline: Deadline
) -> bool:
    right = True
    for number, planned in enumerate(section.cases):
        if deadline.passed():
            skipped = "All" if not number else f"The last {len(section.cases) - number}"
            report.set_remark(section.title, f"{skipped} {NOT_MEASURED}: {deadline.seconds:.0f} s were used up.")
            print(f"{section.title}: skipped from {planned.name} on, {deadline.seconds:.0f} s were used up", flush=True)
            break
        try:
            text, is_right = _measured(planned, time_calls, ceilings, deadline)
        except Exception as error:  # One kernel that does not run leaves the others to be measured.
            traceback.print_exc(file=sys.stderr)
            text, is_right = remark(planned.name, f"FAILED: {type(error).__name__}: {error}"[:200]), False
        right &= is_right
        report.set_row(planned.name, text)
        print(text, flush=True)
    return right


def _measured(planned: PlannedCase, time_calls: TimeCalls, ceilings: Ceilings, deadline: Deadline) -> tuple[str, bool]:
    """The case's row, and whether its results are right."""
    case = planned.make()
    found = measure(case, time_calls, deadline.passed)
    target = TARGETS.get(planned.name)
    verdict = "" if target is None else target.verdict(found, ceilings.copy)
    return row(planned.name, case, found, ceilings, verdict), found.is_right
