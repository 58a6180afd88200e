"""Grammars for JSON schemas with large numbers.

llguidance holds the numbers of a schema in double precision: of 9007199254740993 it makes 9007199254740992, and some
bounds end the process. Up to 2**53 its integers are exact. A schema with larger ones becomes a grammar in Lark: texts
and patterns for these numbers, rules for the objects, lists and definitions around them, and llguidance's own JSON for
each part without such numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from moeserve.grammars.schemas import SchemaPath, subschemas

_LARGEST = 2**53
_MOST_DIGITS = 40  # of a number within bounds; a pattern for more would be very long
_LEAST_OF: Mapping[str, Callable[[Fraction], int]] = {
    "minimum": math.ceil,
    "exclusiveMinimum": lambda bound: math.floor(bound) + 1,
}
_MOST_OF: Mapping[str, Callable[[Fraction], int]] = {
    "maximum": math.floor,
    "exclusiveMaximum": lambda bound: math.ceil(bound) - 1,
}
_OF_NUMBERS = frozenset({*_LEAST_OF, *_MOST_OF, "multipleOf"})
_OF_TYPES: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_OF_ONE_TYPE = frozenset[str]().union(*_OF_TYPES.values())
# With the words of one type, all that restrict a value. Others are annotations.
_RESTRICTING = _OF_ONE_TYPE.union(
    ("type", "const", "enum", "$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    ("contains", "minContains", "maxContains", "uniqueItems", "prefixItems", "additionalItems", "unevaluatedItems"),
    ("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    ("dependentRequired", "dependentSchemas", "dependencies"),
)
_NAMES = {type(None): "null", bool: "boolean", str: "string", dict: "object", list: "array"}
_DEFINITIONS = ("$defs", "definitions")


class LargeNumberError(Exception):
    """A large number is in a place where it cannot be enforced. path: of its word in the schema."""

    def __init__(self, path: SchemaPath) -> None:
        super().__init__(
            "numbers beyond 2**53 can be constants and bounds, in objects without further properties, in lists, in "
            "`anyOf` and behind `$ref`, and not beside other words"
        )
        self.path = path


def part_of(schema: Any) -> dict[str, Any]:
    """Return the part of a grammar that is JSON of a schema, with its spacing in `x-guidance`. Raise
    LargeNumberError."""
    return {"lark_grammar": _lark_of(schema)} if _has_large_numbers(schema) else {"json_schema": schema}


def expression_of(schema: Any) -> str:
    """Return the expression in Lark for JSON of a schema, as `part_of`."""
    return f"%lark {{\n{_lark_of(schema)}}}" if _has_large_numbers(schema) else _json(schema)


def _has_large_numbers(schema: Any) -> bool:
    return any(_large_word(part) for part, _ in _parts_of(schema, definitions=True))


def _lark_of(schema: dict[str, Any]) -> str:
    try:
        return _Writer(schema).source()
    except (AttributeError, LookupError, TypeError, ValueError):
        # A word beside a large number has a value of a wrong kind.
        raise _refusal(schema, ()) from None


def _json(schema: Any) -> str:
    return "%json " + json.dumps(schema, ensure_ascii=False)


class _Writer:
    """Writes the rules of one schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._options = root.get("x-guidance", {})
        self._comma = _literal(self._options.get("item_separator", ","))
        self._colon = _literal(self._options.get("key_separator", ":"))
        self._rules: list[str] = []
        # By reference, the name of its rule.
        self._names: dict[str, str] = {}

    def source(self) -> str:
        lines = [f"start: {self._expression(self._root, ())}"]
        pattern = self._options.get("whitespace_pattern")
        if pattern is not None:
            lines += ['%llguidance {"ignore_once": true}', f"%ignore /{pattern}/"]
        return "\n".join([*lines, *self._rules]) + "\n"

    def _rule(self, expression: str) -> str:
        self._rules.append(f"r{len(self._rules)}: {expression}")
        return f"r{len(self._rules) - 1}"

    def _expression(self, schema: Any, path: SchemaPath) -> str:
        if not any("$ref" in part or _large_word(part) for part, _ in _parts_of(schema)):
            return self._json(schema)
        words = _RESTRICTING.intersection(schema)
        if words == {"$ref"}:
            return self._named(schema["$ref"])
        if words == {"anyOf"}:
            options = enumerate(schema["anyOf"])
            return _choice(self._expression(option, (*path, "anyOf", place)) for place, option in options)
        if words <= {"const", "type"} or words <= {"enum", "type"}:
            return self._constants(schema, path)
        if words <= {"type"} | _OF_ONE_TYPE:
            return self._of_types(schema, path)
        raise _refusal(schema, path)

    def _named(self, ref: str) -> str:
        """Return the name of the rule for the target of a reference."""
        if ref not in self._names:
            document, *steps = [step.replace("~1", "/").replace("~0", "~") for step in ref.split("/")]
            if document != "#":
                raise _refusal(self._root, ())
            target = self._root
            for step in steps:
                target = target[step]
            self._names[ref] = name = f"d{len(self._names)}"
            self._rules.append(f"{name}: {self._expression(target, tuple(steps))}")
        return self._names[ref]

    def _of_types(self, schema: dict[str, Any], path: SchemaPath) -> str:
        kind = schema.get("type", [kind for kind in _OF_TYPES if kind != "integer"])
        if isinstance(kind, list):
            return _choice(self._expression(schema | {"type": one}, path) for one in kind)
        own = {word: value for word, value in schema.items() if word not in _OF_ONE_TYPE - _OF_TYPES[kind]}
        if own.keys() != schema.keys():
            return self._expression(own, path)
        match kind:
            case "object":
                return self._object(schema, path)
            case "array":
                return self._list(schema, path)
        return self._number(schema, path)

    def _object(self, schema: dict[str, Any], path: SchemaPath) -> str:
        """Return the expression for an object, with its properties in the order of the schema."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("additionalProperties") is not False or not properties.keys() >= set(required):
            raise _refusal(schema, path)
        rest, wholes = "", list[str]()
        for name in reversed(properties):
            one = self._rule(self._pair(name, self._expression(properties[name], (*path, "properties", name))))
            wholes = [*([] if name in required else wholes), f"{one} {rest}"]
            rest = self._rule(f"({self._comma} {one}){'' if name in required else '?'} {rest}")
        return f'"{{" {_choice(wholes)}{"" if required else "?"} "}}"'

    def _pair(self, name: str, value: str) -> str:
        return f"{_literal(json.dumps(name, ensure_ascii=False))} {self._colon} {value}"

    def _list(self, schema: dict[str, Any], path: SchemaPath) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        one = self._rule(self._expression(schema["items"], (*path, "items")))
        more = f"({self._comma} {one}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" ({one} {more}){"" if least else "?"} "]"'

    def _constants(self, schema: dict[str, Any], path: SchemaPath) -> str:
        """Return the expression for the constants of the schema's types."""
        values, types = schema.get("enum", [schema.get("const")]), schema.get("type", list(_OF_TYPES))
        allowed = {types} if isinstance(types, str) else {*types}
        fitting = [value for value in values if allowed & _types_of(value)]
        parts = [self._constant(value) for value in fitting if _is_large(value)]
        if small := [value for value in fitting if not _is_large(value)]:
            parts.append(self._json({"enum": small}))
        if not parts:
            raise _refusal(schema, path)
        return _choice(parts)

    def _constant(self, value: Any) -> str:
        if not _is_large(value):
            return self._json({"const": value})
        if isinstance(value, dict):
            pairs = f" {self._comma} ".join(self._pair(name, self._constant(inner)) for name, inner in value.items())
            return f'"{{" {pairs} "}}"'
        if isinstance(value, list):
            return f'"[" {f" {self._comma} ".join(map(self._constant, value))} "]"'
        return _literal(str(_exact(value)))

    def _number(self, schema: dict[str, Any], path: SchemaPath) -> str:
        """Return the expression for a number within bounds: llguidance's up to 2**53, integers beyond.

        Multiples are written up to 2**53: a pattern cannot tell them.
        """
        least = max((of(_exact(schema[word])) for word, of in _LEAST_OF.items() if word in schema), default=-math.inf)
        most = min((of(_exact(schema[word])) for word, of in _MOST_OF.items() if word in schema), default=math.inf)
        inner = {word: value for word, value in schema.items() if not _is_large(value)}
        inner |= {} if inner.keys() & _LEAST_OF else {"minimum": -_LARGEST}
        inner |= {} if inner.keys() & _MOST_OF else {"maximum": _LARGEST}
        parts = [self._json(inner)] if least <= _LARGEST and most >= -_LARGEST else []
        if "multipleOf" not in schema:
            parts += [f"/{digits}/" for digits in _integers(max(least, _LARGEST + 1), most)]
            parts += [f"/-{digits}/" for digits in _integers(max(-most, _LARGEST + 1), -least)]
        if not parts or _is_large(schema.get("multipleOf")):
            raise _refusal(schema, path)
        return _choice(parts)

    def _json(self, schema: Any) -> str:
        """Return llguidance's expression for a schema without large numbers and references."""
        if not isinstance(schema, dict):
            schema = {} if schema else {"anyOf": []}
        own = {word: value for word, value in schema.items() if word not in _DEFINITIONS}
        return _json({**own, "x-guidance": self._options})


def _integers(low: float, high: float) -> Iterator[str]:
    """Yield patterns that together match the positive integers from `low` to `high`, without leading zeros."""
    if high == math.inf:
        yield f"[1-9][0-9]{{{len(str(low))},}}"
        high = 10 ** len(str(low)) - 1
    high = min(high, 10**_MOST_DIGITS)
    while low <= high:
        step = 1
        while low % (10 * step) == 0 and low + 10 * step - 1 <= high:
            step *= 10
        head, first = divmod(low // step, 10)
        last = min(9, first + (high - low + 1) // step - 1)
        yield f"{head or ''}[{first}-{last}][0-9]{{{len(str(step)) - 1}}}"
        low += (last - first + 1) * step


def _parts_of(
    schema: Any, path: SchemaPath = (), *, definitions: bool = False
) -> Iterator[tuple[dict[str, Any], SchemaPath]]:
    """Yield a schema and all schemas in it, with their paths. definitions: those in definitions too."""
    if isinstance(schema, dict):
        yield schema, path
        for steps, inner in subschemas(schema):
            if definitions or steps[0] not in _DEFINITIONS:
                yield from _parts_of(inner, (*path, *steps), definitions=definitions)


def _large_word(schema: dict[str, Any]) -> str | None:
    """Return the word of a schema, not of those in it, that has a large number."""
    return next((word for word in ("const", "enum", *sorted(_OF_NUMBERS)) if _is_large(schema.get(word))), None)


def _refusal(schema: Any, path: SchemaPath) -> LargeNumberError:
    """Return the error of a schema that cannot be enforced for the sake of its first large number."""
    words = ((*inner, word) for part, inner in _parts_of(schema, path, definitions=True) if (word := _large_word(part)))
    return LargeNumberError(next(words, (*path, "$ref")))


def _is_large(value: Any) -> bool:
    """Return whether a value is or holds a number that llguidance would round."""
    pending = [value]
    while pending:
        match pending.pop():
            case dict() as inner:
                pending += inner.values()
            case list() as inner:
                pending += inner
            case int() | float() as number if abs(number) > _LARGEST:
                return True
    return False


def _exact(number: float) -> Fraction:
    """Return the number as JSON had it: the decimals of a double are its shortest ones."""
    return Fraction(repr(number))


def _types_of(value: Any) -> set[str]:
    if type(value) in _NAMES:
        return {_NAMES[type(value)]}
    return {"number", "integer"} if value == int(value) else {"number"}


def _choice(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
