"""Grammars of arguments in notations that nest: Gemma's, and MiniMax M3's elements.

Types, properties, items and choices of a schema hold; its bounds hold for values that are neither texts nor nested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from moeserve.frontend.dialects.internal import Tool
from moeserve.frontend.parsers.elements import MARK
from moeserve.frontend.parsers.rules import Rules, arguments_schema, definitions, json_value, literal
from moeserve.frontend.parsers.values import Properties, choices_of, items_of, types_of

_QUOTE = '<|"|>'
_MAX_DEPTH = 8  # of values that are held to their schemas; those of cycles are deeper
_SCALARS = {
    "boolean": '"true" | "false"',
    "null": '"null"',
    "integer": "/-?[0-9]+/",
    "number": r"/-?[0-9]+(\.[0-9]+)?/",
}


class NestedValues(ABC):
    """The expressions for the arguments of one tool."""

    def __init__(self, rules: Rules, tool: Tool) -> None:
        self.rules = rules
        self._root, self._strict, self._form = arguments_schema(tool), tool.strict, tool.input_form

    def arguments(self, close: str = "") -> str:
        """Return the expression for all arguments and the text `close` behind them."""
        return self.object(self._root, 0, close)

    def value(self, schema: Any, depth: int, close: str = "") -> str:
        """Return the expression for a value and the text `close` behind it."""
        types = types_of(schema, self._root)
        if not types or depth > _MAX_DEPTH:
            return self.free(close)
        if types <= _SCALARS.keys():
            value = json_value({**schema, **definitions(self._root)}, strict=self._strict)
            return f"{value} {self.rules.text(close)}"
        bodies = {
            "string": lambda: self.text(choices_of(schema, self._root), close),
            "object": lambda: self.object(schema, depth + 1, close),
            "array": lambda: self.array(items_of(schema, self._root), depth + 1, close),
        }
        return self.rules.choice(
            bodies[kind]() if kind in bodies else f"({_SCALARS[kind]}) {self.rules.text(close)}"
            for kind in sorted(types & {*bodies, *_SCALARS})
        )

    def listed(self, schema: Any) -> list[tuple[str, Any, bool]]:
        """Return the properties of an object: name, schema, and whether it must be there."""
        return Properties(schema, self._root).listed()

    @abstractmethod
    def free(self, close: str) -> str:
        """Return the expression for any value."""

    def any_text(self, end: str) -> str:
        """Return the expression for a text and `end` behind it. A custom tool has one, which its form holds."""
        return self.rules.until(end) if self._form is None else self.rules.matching(self._form.pattern, end)

    @abstractmethod
    def text(self, choices: list[str] | None, close: str) -> str: ...

    @abstractmethod
    def object(self, schema: Any, depth: int, close: str) -> str: ...

    @abstractmethod
    def array(self, items: Any, depth: int, close: str) -> str: ...


class GemmaValues(NestedValues):
    """Values in Gemma's notation."""

    def free(self, close: str) -> str:
        text, scalar = self.text(None, ""), " | ".join(_SCALARS.values())
        key = "/[a-zA-Z0-9_.-]{1,64}/"

        def body(value: str) -> str:
            member = f'{key} ":" {value}'
            return f'{text} | {scalar} | "[" ({value} ("," {value})*)? "]" | "{{" ({member} ("," {member})*)? "}}"'

        return self.rules.knot(body)

    def text(self, choices: list[str] | None, close: str) -> str:
        quote = self.rules.text(_QUOTE)
        if choices is None:
            return f"{quote} {self.any_text(_QUOTE)}"
        return self.rules.choice(
            '"null"' if choice == "null" else f"{quote} {literal(choice)} {quote}" for choice in choices
        )

    def object(self, schema: Any, depth: int, close: str = "") -> str:
        members = [
            (self.rules.add(f"{literal(f'{name}:')} {self.value(inner, depth)}"), is_needed)
            for name, inner, is_needed in self.listed(schema)
        ]
        if members:
            return f'"{{" {self.rules.listed(members, literal(","))} "}}"'
        return '"{" "}"'

    def array(self, items: Any, depth: int, close: str) -> str:
        item = self.rules.add(self.value(items, depth))
        return f'"[" ({item} ("," {item})*)? "]"'


class ElementValues(NestedValues):
    """Values as MiniMax M3's elements."""

    def free(self, close: str) -> str:
        return self.rules.until(close)

    def text(self, choices: list[str] | None, close: str) -> str:
        if choices is None:
            return self.any_text(close)
        return f"({' | '.join(map(literal, choices))}) {self.rules.text(close)}"

    def object(self, schema: Any, depth: int, close: str) -> str:
        children = []
        for name, inner, is_needed in self.listed(schema):
            child = self.rules.add(self._element(name, inner, depth))
            children.append(child if is_needed else f"{child}?")
        return f"{' '.join(children)} {self.rules.text(close)}"

    def array(self, items: Any, depth: int, close: str) -> str:
        return f"({self.rules.add(self._element('item', items, depth))})* {self.rules.text(close)}"

    def _element(self, name: str, schema: Any, depth: int) -> str:
        return f"{self.rules.text(f'{MARK}<{name}>')} {self.value(schema, depth, f'{MARK}</{name}>')}"
