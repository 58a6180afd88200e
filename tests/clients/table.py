"""The works-with tables: outcomes of scripts as rows, written into docs/clients.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.clients.service import Prompt

CHECKS = ("plain", "streaming", "tool", "parallel", "streamed_tool", "required", "structured", "error", "cached")
# Tokens at the end of a prompt that a longer one does not share: the beginning of the answer, and a block that is not
# full.
_MOST_NEW_TOKENS = 32
_ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
    "responses": "/v1/responses",
    "tgi": "/generate",
}
_HEADS = {
    "client": ("client", "version", "API", *(check.replace("_", " ") for check in CHECKS)),
    "conformance": ("suite", "version", "API", "passed", "failed", "not applicable"),
    "benchmark": ("tool", "version", "API", "passed", "failed", "not applicable"),
}
_SIGNS = {True: "yes", False: "**no**", None: "-"}

Cells = tuple[str, ...]


@dataclass(slots=True)
class Row:
    """Outcomes of one client with one API: True, False, or None for a check that the client cannot do."""

    title: str
    version: str
    api: str
    outcomes: dict[str, bool | None] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    def note_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Judge the `cached` check: some prompt went on from an earlier one, and found that in the cache.

        Its detail becomes the share that was cached of the prompt that went on from the longest one.
        """
        if self.outcomes.get("cached", True) is None:
            return
        route = next((path for name, path in _ROUTES.items() if self.api.split(" (")[0].endswith(name)), "")
        own = [prompt for prompt in prompts if prompt.route == route]
        found = [
            (earlier.num_tokens, later.num_cached / later.num_tokens, later.num_tokens)
            for place, later in enumerate(own)
            for earlier in own[:place]
            if earlier.num_tokens < later.num_tokens
            and later.num_cached >= max(1, earlier.num_tokens - _MOST_NEW_TOKENS)
        ]
        self.outcomes["cached"] = bool(found)
        if found:
            _, share, num_tokens = max(found)
            self.details["cached"] = f"{100 * share:.0f} % of {num_tokens:,}"
        else:
            self.details["cached"] = f"(tokens, cached): {[prompt[1:] for prompt in own]}"

    @property
    def failures(self) -> list[str]:
        return [check for check, ok in self.outcomes.items() if ok is False]

    def cells(self, group: str) -> Cells:
        """Return the row's cells. A client's check that was never reported shows as one that failed."""
        if group == "client":
            marks = [_SIGNS[self.outcomes.get(check, False)] for check in CHECKS]
            if self.outcomes.get("cached"):
                marks[-1] = self.details.get("cached", _SIGNS[True])
        else:
            said = list(self.outcomes.values())
            marks = [str(said.count(outcome)) for outcome in (True, False, None)]
        return (self.title, self.version, self.api, *marks)


def render(group: str, rows: Iterable[Cells]) -> str:
    """Return a group's rows as a Markdown table."""
    head = _HEADS[group]
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def merge(page: str, group: str, rows: Sequence[Row], order: Sequence[str]) -> str:
    """Return a page with rows in its table of a group, in place of the same clients' rows; other rows stay.

    order: titles of clients; rows of others are left out. Raise ValueError if the page has no such table.
    """
    by_title: dict[str, list[Cells]] = {}
    for cells in _rows_of(page, group):
        by_title.setdefault(cells[0], []).append(cells)
    by_title |= {title: [row.cells(group) for row in rows if row.title == title] for title in {r.title for r in rows}}
    return _with_table(page, group, [cells for title in order for cells in by_title.get(title, [])])


def _rows_of(page: str, group: str) -> list[Cells]:
    table = _parts(page, group)[1]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in table.strip().splitlines()[2:]]


def _with_table(page: str, group: str, rows: Iterable[Cells]) -> str:
    before, _, after = _parts(page, group)
    return f"{before}\n{render(group, rows)}\n{after}"


def _parts(page: str, group: str) -> tuple[str, str, str]:
    """Return the page up to a group's table, the table, and the rest. Raise ValueError if it has none."""
    begin, end = f"<!-- table: {group} -->", f"<!-- end: {group} -->"
    before, found, rest = page.partition(begin)
    table, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page lacks {begin} and {end}")
    return before + begin, table, end + after
