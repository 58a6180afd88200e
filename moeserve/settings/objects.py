"""Settings that are one JSON object."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TypeVar

_T = TypeVar("_T")

_NOUNS = {
    "bool": "true or false",
    "int": "a whole number above 0",
    "float": "a number above 0",
    "str": "a text",
    "str | None": "a text or null",
}


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raise ValueError, a clause, for another text."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:80]!r} is not JSON") from None
    if not isinstance(given, dict):
        raise ValueError(f"{text[:80]!r} is not a JSON object")
    return given


def read_object(text: str, kind: type[_T]) -> _T:
    """Return the dataclass `kind` that a JSON object describes; fields that it leaves out have their defaults.

    Raise ValueError, a clause each, for other JSON, unknown fields and values of other types.
    """
    given = json_object(text)
    known = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{name!r} is not one of {', '.join(known)}")
        if not _has_type(value, known[name]):
            raise ValueError(f"{name} is {json.dumps(value)[:80]}, not {_NOUNS[known[name]]}")
    return kind(**given)


def _has_type(value: Any, kind: str) -> bool:
    match kind:
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 10**9
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 10**9
        case "str | None":
            return value is None or isinstance(value, str)
        case _:
            return isinstance(value, str)
