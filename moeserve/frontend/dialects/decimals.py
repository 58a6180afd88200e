"""JSON whose schemas keep their numbers: a decimal that no double holds is refused where a schema enforces it.

`msgspec` and everything behind it read decimals as doubles. In texts, defaults and examples another last digit harms
nobody. As a constant or a bound it would be another number than the one that the client enforces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, TypeVar

import msgspec

from moeserve.frontend.errors import invalid

_MOST_EXACT = 17  # characters of a decimal without an exponent that a double holds: 15 digits, a zero and a point
_INEXACT = "a decimal that no double holds"
_ENFORCED = frozenset({"const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_ANNOTATIONS = frozenset({"default", "examples"})
# The fields of bodies that hold texts and tokens.
_NO_SCHEMAS = frozenset({"messages", "prompt", "input", "system", "instructions", "tokens"})

# Stands for such a decimal.
_MARK = object()

_T = TypeVar("_T")


def decode(text: bytes | str, expected: type[_T], where: str = "") -> _T:
    """Return typed JSON. where: the field that it comes from, empty for a body. Raise what `msgspec` raises, and
    ApiError for a decimal in a schema that no double holds."""
    kind: Any = expected
    try:
        found: _T = _decoder(kind).decode(text)
        return found
    except msgspec.ValidationError as error:
        if not str(error).startswith(_INEXACT):
            raise
    whole = json.loads(text, parse_float=_marked, parse_int=str)
    if not where and isinstance(whole, dict):
        whole = {name: value for name, value in whole.items() if name not in _NO_SCHEMAS}
    for place in _places(whole, where, is_enforced=False):
        raise invalid(f"Invalid value for `{place}`: {_INEXACT}", place)
    return msgspec.json.decode(text, type=expected)


@cache
def _decoder(expected: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(expected, float_hook=_read)


def _read(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    if (len(text) > _MOST_EXACT or "e" in text.lower()) and not _is_exact(text):
        raise ValueError(_INEXACT)
    return value


def _is_exact(text: str) -> bool:
    try:
        return Decimal(text) == Decimal(repr(float(text)))
    except InvalidOperation:  # an exponent beyond all bounds
        return False


def _marked(text: str) -> object:
    return 0.0 if _is_exact(text) else _MARK


def _places(value: Any, path: str, *, is_enforced: bool) -> Iterator[str]:
    """Yield the places of marked decimals that a schema enforces."""
    if value is _MARK and is_enforced:
        yield path
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _places(inner, f"{path}[{place}]", is_enforced=is_enforced)
    elif isinstance(value, dict):
        for name, inner in value.items():
            is_word = name not in _ANNOTATIONS and (is_enforced or name in _ENFORCED)
            yield from _places(inner, f"{path}.{name[:60]}".lstrip("."), is_enforced=is_word)
