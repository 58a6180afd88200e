"""The works-with table: outcomes of the scripts as rows, written into docs/clients.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CHECKS = ("plain", "streaming", "tool", "parallel", "streamed_tool", "required", "structured", "error")
_BEGIN, _END = "<!-- table: make test-clients -->", "<!-- end of table -->"
_SIGNS = {True: "yes", False: "**no**", None: "-"}


@dataclass(slots=True)
class Row:
    """Outcomes of one client with one API: True, False, or None for a check that the client cannot do."""

    title: str
    version: str
    api: str
    outcomes: dict[str, bool | None] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        return [check for check, ok in self.outcomes.items() if ok is False]

    @property
    def cells(self) -> tuple[str, ...]:
        """The row's cells; a check that was never reported shows as one that failed."""
        return (
            self.title,
            self.version,
            self.api,
            *(_SIGNS[self.outcomes.get(check, False)] for check in CHECKS),
        )


def render(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of cells as a Markdown table."""
    head = ("client", "version", "API", *(check.replace("_", " ") for check in CHECKS))
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def merge_into(page: Path, rows: Sequence[Row]) -> None:
    """Put rows into the table of a page, in place of those of the same clients, other rows as they are.

    Raises ValueError if the page has no table's marks.
    """
    before, begin, rest = page.read_text().partition(_BEGIN)
    table, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} lacks {_BEGIN} and {_END}")
    written = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.strip().splitlines()[2:]]
    new: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        new.setdefault(row.title, []).append(row.cells)
    merged: list[tuple[str, ...]] = []
    for cells in written:
        merged += new.pop(cells[0], []) if cells[0] in new else [cells] if not _is_new(cells[0], rows) else []
    for remaining in new.values():
        merged += remaining
    page.write_text(f"{before}{_BEGIN}\n{render(merged)}\n{_END}{after}")


def _is_new(title: str, rows: Sequence[Row]) -> bool:
    return any(row.title == title for row in rows)
