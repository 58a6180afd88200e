"""Parsers of model output: one for a family, and all parts of a text that comes in pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

from moeserve.frontend.dialects.internal import ToolCallPart
from moeserve.frontend.parsers.families import CALLS, REASONING
from moeserve.frontend.parsers.feed import Parsed
from moeserve.frontend.parsers.message_form import MESSAGES, Start
from moeserve.frontend.parsers.parser import OutputParser

SCHEMAS: dict[str, dict[str, Any] | None] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["c", "f"]}},
    },
    "send": {"type": "object", "properties": {"to": {"type": "array"}, "body": {"type": ["string", "null"]}}},
    "write": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
}

Call = tuple[str, Any]


def parser(family: str, reasoning: str = "none", start: Start = "answer", **options: Any) -> OutputParser:
    ids = (f"id{number}" for number in itertools.count())
    return OutputParser(
        reasoning=REASONING.get(reasoning),
        calls=CALLS.get(family),
        messages=MESSAGES.get(family) or MESSAGES.get(reasoning),
        start=start,
        new_id=lambda: next(ids),
        **{"schemas": SCHEMAS, **options},
    )


def parse(pieces: Iterable[str], *arguments: Any, **options: Any) -> Parsed:
    """All parts of a text that comes in pieces, calls joined."""
    reader = parser(*arguments, **options)
    whole = Parsed()
    for parsed in [*map(reader.push, pieces), reader.finish()]:
        whole.reasoning += parsed.reasoning
        whole.text += parsed.text
        for part in parsed.calls:
            if part.name:
                assert part.place == len(whole.calls)
                whole.calls.append(ToolCallPart(part.place, part.arguments, part.call_id, part.name))
            else:
                whole.calls[part.place].arguments += part.arguments
    return whole


def parse_cut(text: str, *arguments: Any, **options: Any) -> Parsed:
    """All parts of a text, which are the same for each cut in two and for single characters."""
    whole = parse([text], *arguments, **options)
    for cut in range(len(text)):
        assert parse([text[:cut], text[cut:]], *arguments, **options) == whole
    assert parse(text, *arguments, **options) == whole
    return whole


def calls_of(parsed: Parsed) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]
