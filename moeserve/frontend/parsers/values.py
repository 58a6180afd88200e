"""Values of a call's arguments: JSON, and text whose type the tool's schema gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

# The JSON schemas of the arguments, by the name of the tool; None where a tool has none.
Schemas = Mapping[str, dict[str, Any] | None]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
    "string": str,
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


class Properties:
    """The schemas of an object's properties. References of its schema, a part of `root`, and branches are followed."""

    def __init__(self, schema: Any, root: Any = None) -> None:
        """root: where references begin; `schema` itself for None."""
        self._root = schema if root is None else root
        self._parts = _parts(schema, self._root)

    def __contains__(self, name: str) -> bool:
        return any(name in _dict(part.get("properties")) for part in self._parts)

    def schema(self, name: str) -> Any:
        """Return the schema of a property, None where none says more than any."""
        found = (_dict(part.get("properties")).get(name) for part in self._parts)
        return next((schema for schema in found if isinstance(schema, dict)), None)

    def listed(self) -> list[tuple[str, Any, bool]]:
        """Return the properties: name, schema, and whether it is required."""
        names = dict.fromkeys(name for part in self._parts for name in _dict(part.get("properties")))
        lists = [part["required"] for part in self._parts if isinstance(part.get("required"), list)]
        return [(name, self.schema(name), any(name in required for required in lists)) for name in names]

    def types(self, name: str) -> set[str]:
        """Return the JSON types of a property; none where the schema does not say."""
        return types_of(self.schema(name), self._root)

    def typed(self, name: str, value: str) -> Any:
        """Return the value of a text in the type of a property; text where nothing else fits."""
        types = self.types(name)
        if types == {"string"}:
            return value
        word = value.strip()
        read = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else decode(word)
        if read is None and word not in ("null", "None"):
            return value
        if any(_fits(read, kind) for kind in types - {"string"}):
            return read
        return value if "string" in types or isinstance(read, str) else read


def items_of(schema: Any, root: Any) -> Any:
    """Return the schema of the items of a list, None where none says more than any."""
    return next((part["items"] for part in _parts(schema, root) if isinstance(part.get("items"), dict)), None)


def types_of(schema: Any, root: Any) -> set[str]:
    """Return the JSON types that a schema, a part of `root`, allows; none where it does not say."""
    types: set[str] = set()
    for part in _parts(schema, root):
        kind = part.get("type")
        types |= {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
        if part.get("nullable") is True:
            types.add("null")
        choices = [part["const"]] if "const" in part else part.get("enum")
        if not kind and isinstance(choices, list):
            types |= {next(name for name in _TYPES if _fits(choice, name)) for choice in choices}
    return types


def choices_of(schema: Any, root: Any) -> list[str] | None:
    """Return the texts that a schema, a part of `root`, allows; None for any text, or where other values are chosen.

    Null is the text `null`.
    """
    found: list[Any] = []
    for part in _parts(schema, root):
        choices = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(choices, list):
            found += choices
        elif part.get("type") == "null":
            found.append(None)
        elif "string" in types_of({"type": part.get("type")}, None):
            return None
    is_plain = found and all(choice is None or isinstance(choice, str) for choice in found)
    return list(dict.fromkeys("null" if choice is None else choice for choice in found)) if is_plain else None


def _fits(value: Any, kind: str) -> bool:
    expected = _TYPES.get(kind)
    return expected is not None and isinstance(value, expected) and (kind == "boolean" or not isinstance(value, bool))


def _parts(schema: Any, root: Any) -> list[dict[str, Any]]:
    """Return a schema, the schemas that it refers to and its branches, each once."""
    waiting, parts, seen = [schema], list[dict[str, Any]](), set[int]()
    for part in waiting:  # which grows meanwhile
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        parts.append(part)
        if isinstance(part.get("$ref"), str):
            waiting.append(_pointed(part["$ref"], root))
        for word in ("anyOf", "oneOf", "allOf"):
            branches = part.get(word)
            waiting += branches if isinstance(branches, list) else []
    return parts


def _pointed(reference: str, root: Any) -> Any:
    """Return the schema at a JSON pointer in `root`, None where there is none."""
    place, _, path = reference.partition("#")
    if place or (path and not path.startswith("/")):
        return None
    found = root
    for step in path.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = _dict(found).get(name)
    return found


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def plain_arguments(text: str) -> str:
    """Return the JSON of arguments: some models write it into a string, or null for none."""
    value = decode(text) if text else None
    return "" if value is None else value if isinstance(value, str) else text


def encode(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def decode(text: str) -> Any:
    """Return the value of JSON, None for text that is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
