"""The text of one grammar in llguidance's dialect of Lark, rule by rule.

Added tokens of the vocabulary are named by id wherever a marker holds their text: a text never becomes such a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from moeserve.frontend.dialects.chat_parts import CUSTOM_INPUT
from moeserve.frontend.dialects.formats import ascii_pattern, closed, enforceable, json_expression
from moeserve.frontend.dialects.internal import Tool

ANY_TEXT = "/(?s:.*)/"
# More calls at once than this are the babble of a model that does not find its end.
_MOST_CALLS = 16
# JSON is written as templates render it, so that the next turn's prompt continues the same tokens.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Rules:
    """The rules of one grammar. ids: of the added tokens, by text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        # By options and body, the names.
        self._names: dict[str, str] = {}

    def add(self, body: str, options: str = "", kind: str = "r") -> str:
        """Add a rule unless it is there, and return its name. kind: begins the name; `T` for a lexeme."""
        return self._names.setdefault(f"{options}: {body}", f"{kind}{len(self._names)}")

    def choice(self, bodies: Iterable[str]) -> str:
        """Add a rule for one of several bodies and return its name."""
        return self.add(" | ".join([self.add(body) for body in bodies]))

    def knot(self, body: Callable[[str], str]) -> str:
        """Add a rule whose body names it, and return its name. body: by the name."""
        name = f"k{len(self._names)}"
        self._names[name] = name  # keeps its number meanwhile
        rule = body(name)
        del self._names[name]
        self._names[f": {rule}"] = name
        return name

    def is_token(self, marker: str) -> bool:
        return marker in self._ids

    def text(self, text: str) -> str:
        """Return the expression for a fixed text."""
        return self._joined(self._pieces(text))

    def line(self, text: str) -> str:
        """Return the expression for a fixed text with a line break before it or without."""
        # One lexeme: of two, the break alone would be taken for text where text may stand.
        is_plain = text and len(self._pieces(text)) == 1
        return f"/\\n?{escaped(text)}/" if is_plain else f'"\\n"? {self.text(text)}'

    def until(self, end: str, without: Iterable[str] = ()) -> str:
        """Return the expression for any text that holds none of some texts, and `end` behind it."""
        return self._until(end, [f"~/(?s:.*{escaped(other)}.*)/" for other in without])

    def value(self, end: str, tags: Iterable[str]) -> str:
        """Return the expression for any text and `end` behind it. An `end` that none of `tags` follows is text."""
        further = self._until(end, [f"~/\\s*({'|'.join(map(escaped, tags))})(?s:.*)/"])
        return f"{self.until(end)} ({further})*"

    def matching(self, pattern: str, end: str, tags: Iterable[str] = ()) -> str:
        """Return the expression for a text that a pattern matches whole, and `end` behind it. The text holds no `end`
        that one of `tags` follows, and none at all without tags."""
        read_early = f"~/(?s:.*){escaped(end)}\\s*({'|'.join(map(escaped, tags))})(?s:.*)/"
        return self._until(end, [read_early], f"({ascii_pattern(pattern)})")

    def _until(self, end: str, but: Sequence[str], text: str = "(?s:.*)") -> str:
        """text: a pattern between slashes. but: patterns of Lark."""
        pieces = self._pieces(end)
        if len(pieces) == 1:
            return self.add(" & ".join([f"/{text}/", *but]), f"[suffix={literal(end)}]")
        # A lexeme of any text takes what is text before the first token.
        lexeme = self.add(" & ".join([f"/{text}{escaped(pieces[0])}/", *but]), kind="T")
        return f"{lexeme} {self._joined(['', *pieces[1:]])}"

    def several(self, one: str, between: str, parallel: bool) -> str:
        """Return one expression or, if `parallel`, several with another one between them."""
        return f"{one} ({between} {one}){{0,{_MOST_CALLS - 1}}}" if parallel else one

    def listed(self, parts: Sequence[tuple[str, bool]], between: str) -> str:
        """Return the expression for parts in their order, with another one between them. Each is (expression, whether
        it must be there)."""
        # Behind a part and before any one, from the last part to the first.
        later, first = "", ""
        for part, is_needed in reversed(parts):
            with_it = self.add(f"{part} {later}".strip())
            after = f"{between} {with_it}"
            later, first = (
                (self.add(after), with_it)
                if is_needed
                else (self.add(_or(after, later)), self.add(_or(with_it, first)))
            )
        return first

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(name + rule for rule, name in self._names.items())]) + "\n"

    def _pieces(self, text: str) -> list[str]:
        """Return a text cut around the added tokens in it, which are every other piece."""
        found = sorted((token for token in self._ids if token in text and not token.isspace()), key=len, reverse=True)
        return re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]

    def _joined(self, pieces: Sequence[str]) -> str:
        texts = (f"<[{self._ids[piece]}]>" if place % 2 else literal(piece) for place, piece in enumerate(pieces))
        return " ".join(text for text in texts if text != '""')


def _or(one: str, other: str) -> str:
    return f"{one} | {other}" if other else f"({one})?"


def escaped(text: str) -> str:
    """Return a pattern for a text inside slashes."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Return the expression for JSON of a schema."""
    return json_expression(spaced(schema, strict=strict), "tools")


def spaced(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return a schema with the spacing of calls. Unless it is strict, words that llguidance lacks are passed over."""
    return {**enforceable(schema, "tools"), "x-guidance": {**_SPACING, "lenient": not strict}}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object. Objects that list their properties have no others."""
    if tool.input_form is not None:
        text = {"type": "string", "pattern": f"^(?:{tool.input_form.pattern})$"}
        return {**(tool.parameters or {}), "properties": {CUSTOM_INPUT: text}}
    schema = closed(enforceable(tool.parameters or {}, "tools"))
    return schema if schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"} else {"type": "object", **schema}


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that references of a schema may name."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}
