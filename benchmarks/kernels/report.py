"""The file of a kernel benchmark: rows of cases, and targets with their verdicts. Without a clock and without a GPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.gpu import Ceilings
from benchmarks.kernels.cases import KernelCase, Measurement, PeerTime, PlannedCase, Section

NOT_MEASURED = "not measured"
HEADER = (
    "| case | us | spread | error | GB/s | of copy | TFLOP/s | of product | times the best peer | peers, us | target "
    "| with |",
    "|" + "---|" * 12,
)
State = Literal["met", "MISSED", "FAILED", "not measured"]
TABLE_HEADER = ("| target | asked | found | |", "|---|---|---|---|")


class KernelReport:
    """Lines about the run, the targets, then a table per section. Every change is written at once, so that a run that
    is cut off leaves its measurements."""

    def __init__(self, path: Path, title: str, sections: Sequence[Section], targets: Sequence[str] = ()) -> None:
        """targets: the lines of their table. Raise OSError, as every method that writes."""
        self._path = path
        self._lines = [f"# {title}\n"]
        self._targets = targets
        self._sections = sections
        self._rows = {case.name: remark(case.name, NOT_MEASURED) for section in sections for case in section.cases}
        self._remarks: dict[str, str] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def add_line(self, line: str) -> None:
        self._lines.append(line)
        self._write()

    def set_row(self, name: str, row: str, targets: Sequence[str] | None = None) -> None:
        """Set the row of a case, in the columns of `HEADER`. targets: their table as it is now, if it has changed."""
        self._rows[name] = row
        self._targets = self._targets if targets is None else targets
        self._write()

    def set_remark(self, title: str, text: str) -> None:
        """Put a line above the table of a section."""
        self._remarks[title] = text
        self._write()

    def text(self) -> str:
        lines = list(self._lines)
        if self._targets:
            lines += ["", "## Targets", "", *self._targets]
        for section in self._sections:
            lines += ["", f"## {section.title}", ""]
            if section.title in self._remarks:
                lines += [self._remarks[section.title], ""]
            lines += [*HEADER, *(self._rows[case.name] for case in section.cases)]
        return "\n".join(lines) + "\n"

    def _write(self) -> None:
        # In one move: a run that is cut off here leaves the previous text.
        beside = self._path.with_name(self._path.name + ".part")
        beside.write_text(self.text())
        os.replace(beside, self._path)


def row(name: str, case: KernelCase, found: Measurement, ceilings: Ceilings, verdict: str) -> str:
    """Return the row of a measured case, in the columns of `HEADER`."""
    best = found.best_ratio
    cells = (
        name,
        f"{found.microseconds:.1f}{_without_graph(found)}",
        f"{found.spread:.0%}",
        "" if found.error is None else f"{found.error:.1e}{'' if found.is_right else ' **WRONG**'}",
        f"{found.bytes_per_second / 1e9:.0f}",
        f"{found.bytes_per_second / ceilings.copy:.0%}",
        f"{found.flops_per_second / 1e12:.1f}",
        f"{found.flops_per_second / ceilings.flops:.0%}",
        "" if best is None else f"{best:.2f}",
        "; ".join(_beside(case, found)),
        verdict,
        "; ".join(f"{key} {value}" for key, value in case.notes.items()),
    )
    return table_row(cells)


def _beside(case: KernelCase, found: Measurement) -> list[str]:
    """Return the peers' times, fastest first, and why others have none."""
    timed = sorted(found.peers.items(), key=lambda entry: entry[1].microseconds)
    beside = [f"{name} {peer.microseconds:.1f}{_without_graph(peer)}" for name, peer in timed]
    absent = {**case.absent, **found.absent}
    beside += [f"{name}: not measured" for name in case.peers if name not in found.peers and name not in absent]
    return [*beside, *(f"{name}: {reason}" for name, reason in absent.items())]


def _without_graph(found: Measurement | PeerTime) -> str:
    return "" if found.in_graph else " (no graph)"


def remark(name: str, text: str) -> str:
    """Return the row of a case without figures."""
    return table_row((name, text, *[""] * 10))


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


@dataclass(frozen=True, slots=True)
class Verdict:
    """found: the measured figure, empty if there is none."""

    state: State
    found: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """`figure` of the case is to be at least `least`: a share of a copy's bytes per second, TFLOP/s, or the time of
    `peer` over ours."""

    case: str
    figure: Literal["copy", "teraflops", "peer"]
    least: float
    peer: str = ""

    @property
    def asked(self) -> str:
        if self.figure == "peer":
            return f"{self.least:.2f} x {self.peer}"
        return f"{self.least:.0%} of copy" if self.figure == "copy" else f"{self.least:.0f} TFLOP/s"

    def judge(self, found: Measurement | None, copy: float) -> Verdict:
        """copy: bytes per second. found: None if the case was not measured."""
        if found is None:
            return Verdict("not measured")
        if self.figure == "peer":
            peer = found.peers.get(self.peer)
            return Verdict("not measured") if peer is None else _verdict(peer.ratio, self.least, f"{peer.ratio:.2f} x")
        if self.figure == "copy":
            reached = found.bytes_per_second / copy
            return _verdict(reached, self.least, f"{reached:.1%}")
        reached = found.flops_per_second / 1e12
        return _verdict(reached, self.least, f"{reached:.0f} TFLOP/s")


def _verdict(reached: float, least: float, text: str) -> Verdict:
    return Verdict("met" if reached >= least else "MISSED", text)


def _targets() -> tuple[Target, ...]:
    targets = [
        Target("decode 64 x 4096, 32/4 heads", "copy", 0.85),
        Target("prefill 1 x 16384, 32/4 heads", "teraflops", 400),
        Target("prefill 1 x 16384, 32/4 heads", "peer", 0.65, "SDPA cuDNN"),
    ]
    for model in ("Qwen3-30B-A3B", "Mixtral-8x7B"):
        for num_tokens, least in ((64, 0.85), (256, 0.85), (1, 0.55)):
            targets.append(Target(f"{model} bfloat16, {num_tokens} tokens, uniform", "copy", least))
        targets.append(Target(f"{model} bfloat16, 8192 tokens, uniform, products alone", "teraflops", 350))
        targets.append(Target(f"{model} bfloat16, 8192 tokens, uniform", "peer", 1.0, "grouped_mm"))
    for name in ("RMS norm, 4096 x 2048", "residual and RMS norm, 4096 x 2048"):
        targets.append(Target(name, "copy", 0.75))
    for name in ("norms, rotation, KV write, 4096 tokens", "combine, 4096 tokens"):
        targets.append(Target(name, "copy", 0.75))
    return tuple(targets)


TARGETS = _targets()


def verdict_of(name: str, found: Measurement, copy: float) -> str:
    """Return each target of a case and whether it is met."""
    judged = [(target, target.judge(found, copy)) for target in TARGETS if target.case == name]
    return "; ".join(f"{target.asked} {verdict.state}" for target, verdict in judged)


def target_rows(found: Mapping[str, Measurement], copy: float, failed: Collection[str] = ()) -> list[str]:
    """Return a table of all targets by the measurements there are. failed: cases that did not run."""
    rows = []
    for target in TARGETS:
        verdict = Verdict("FAILED") if target.case in failed else target.judge(found.get(target.case), copy)
        rows.append(table_row((target.case, target.asked, verdict.found, verdict.state)))
    return [*TABLE_HEADER, *rows]


def in_order(sections: Sequence[Section]) -> list[PlannedCase]:
    """Return all cases: first the cases with a target, in the targets' order; then one of every section in turn, so
    that a run that ends early has measured some of each."""
    planned = {case.name: case for section in sections for case in section.cases}
    first = {target.case: planned[target.case] for target in TARGETS if target.case in planned}
    turns = itertools.zip_longest(*(section.cases for section in sections))
    in_turn = {case.name: case for turn in turns for case in turn if case is not None}
    return list((first | in_turn).values())
