"""The schemas in a JSON schema, and the part of it at fault when a grammar of it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_OF_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_OF_SOME = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_BY_NAME = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")

SchemaPath = tuple[str | int, ...]


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[SchemaPath, Any]]:
    """Yield the path and value of each schema right inside a schema, definitions first. Examples and constants are
    none."""
    for keyword in _BY_NAME:
        if isinstance(schema.get(keyword), dict):
            yield from (((keyword, name), inner) for name, inner in schema[keyword].items())
    for keyword in _OF_SOME:
        if isinstance(schema.get(keyword), list):
            yield from (((keyword, place), inner) for place, inner in enumerate(schema[keyword]))
    for keyword in _OF_ONE:
        if isinstance(schema.get(keyword), dict | bool):
            yield (keyword,), schema[keyword]


def find_error(schema: Any, fails: Callable[[Any], bool]) -> list[str | int]:
    """Return the path of the smallest part of a schema that `fails` by itself, ending in the keyword at fault."""
    path: list[str | int] = []
    definitions = {}
    if isinstance(schema, dict):
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    while isinstance(schema, dict):
        inner = next((found for found in subschemas(schema) if fails(_with(definitions, found[1]))), None)
        if inner is None:
            return [*path, *_keyword_at_fault(schema, definitions, fails)]
        path += inner[0]
        schema = inner[1]
    return path


def without(schema: Any, path: SchemaPath) -> Any:
    """Return a schema without the word that a path of `find_error` ends in, or without what the schema there says."""
    if not path or not isinstance(schema, dict) or path[0] not in schema:
        return {}
    word, *rest = path
    if not rest:
        return {other: value for other, value in schema.items() if other != word}
    inner = schema[word]
    if word in _BY_NAME or isinstance(inner, list):
        inner = inner.copy()
        inner[rest[0]] = without(inner[rest[0]], tuple(rest[1:]))
    else:
        inner = without(inner, tuple(rest))
    return {**schema, word: inner}


def _keyword_at_fault(
    schema: dict[str, Any], definitions: dict[str, Any], fails: Callable[[Any], bool]
) -> Iterator[str]:
    """Yield the first keyword without which the schema does not fail, if there is one."""
    for keyword in schema:
        rest = {other: value for other, value in schema.items() if other != keyword}
        if keyword not in definitions and not fails(_with(definitions, rest)):
            yield keyword
            return


def _with(definitions: dict[str, Any], schema: Any) -> Any:
    return {**definitions, **schema} if isinstance(schema, dict) else schema
