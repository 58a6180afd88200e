"""The file of a kernel benchmark, whole at any time: what is not measured yet says so. No clock, no GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kernels.measurement import HEADER, remark
from moeserve.tune.kernel_case import Section

NOT_MEASURED = "not measured"


class KernelReport:
    """Lines about the run, the targets, then a table per section. Every change is written at once, so that a run which
    is cut off leaves what it had measured."""

    def __init__(self, path: Path, title: str, sections: Sequence[Section], targets: Sequence[str] = ()) -> None:
        """targets: the lines of their table. Raises OSError, as all that writes."""
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
        """Of the case of that name, in the columns of `HEADER`. targets: how they stand by now, if it is known."""
        self._rows[name] = row
        self._targets = self._targets if targets is None else targets
        self._write()

    def set_remark(self, title: str, text: str) -> None:
        """Above the table of the section of that title."""
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
