"""Runs stages one after the other within a time, and writes what they have found after each."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from benchmarks.gpu import Deadline

Row = tuple[str, str]


class Closing(Protocol):
    def end_stage(self, *, keeps: bool) -> None:
        """End what a stage has started; with `keeps` the next stage uses it on."""


ContextT = TypeVar("ContextT", bound=Closing)


@dataclass(frozen=True, slots=True)
class Stage(Generic[ContextT]):
    """A part of the run. least_s: seconds without which it does not begin. keeps: the next stage uses its service."""

    name: str
    least_s: float
    run: Callable[[ContextT], Iterable[Row]]
    keeps: bool = False


@dataclass(slots=True)
class Report:
    """The tables of a run, as a file that is written anew after every stage."""

    path: Path
    title: str
    parts: list[str] = field(default_factory=list)

    def add(self, name: str, seconds: float, rows: Sequence[Row], fault: str = "") -> None:
        lines = [f"## {name}, {seconds:.0f} s", "", "| what | found |", "|---|---|"]
        lines += [f"| {_cell(what)} | {_cell(found)} |" for what, found in rows]
        if fault:
            lines += ["", "**Failed:**", "", "```", fault.strip(), "```"]
        self.parts.append("\n".join(lines))
        self.write()

    def skip(self, name: str, reason: str) -> None:
        self.parts.append(f"## {name}\n\nNot run: {reason}.")
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n\n".join([f"# {self.title}", *self.parts]) + "\n")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def run_stages(stages: Sequence[Stage[ContextT]], context: ContextT, report: Report, deadline: Deadline) -> bool:
    """Run the stages for which time is left. Return whether none failed; a failed one ends no other."""
    passed = True
    for stage in stages:
        if deadline.left() < stage.least_s:
            report.skip(stage.name, f"{deadline.left():.0f} s were left, and it takes {stage.least_s:.0f}")
            continue
        began, rows, fault = time.monotonic(), list[Row](), ""
        try:
            rows.extend(stage.run(context))
        except Exception:
            fault, passed = traceback.format_exc()[-3000:], False
        finally:
            context.end_stage(keeps=stage.keeps and not fault)
        report.add(stage.name, time.monotonic() - began, rows, fault)
        print(f"{stage.name}: {'failed' if fault else 'passed'}, {time.monotonic() - began:.0f} s", flush=True)
    return passed
