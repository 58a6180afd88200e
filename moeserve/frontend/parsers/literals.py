"""Calls in notations of their own: Python's, and Gemma's, which is JSON with other quotes.

Python's values are read as literals and never run. Calls in it are reported whole, Gemma's arguments as they come.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from moeserve.frontend.parsers.calls import NAME, JsonCalls, JsonLayout, is_name
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Say, Sink, drop
from moeserve.frontend.parsers.values import Schemas, decode, encode

_MAX_DEPTH = 64
_MOST_CHARS = 65_536  # of a Python value outside its strings
_IDENTIFIER = re.compile(r"\w*")
_PLAIN = re.compile(r"[^'\"()\[\]{},]*")
# Outside strings a literal has words, numbers and signs before numbers: no calls, no arithmetic, no prefixed strings.
_WORDS = re.compile(r"(?:\s|:|(?:[-+]?[0-9][\w.]*|[-+]?\.[0-9]\w*|True|False|None|true|false|null)(?![\w(]))*")
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_JSON_WORD = re.compile(r"\b(?:true|false|null)\b")
_ESCAPED = frozenset("\\'\"abfnrtv01234567xuUN")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
_QUOTE = '<|"|>'
_QUOTES = Markers(_QUOTE)
_BARE = re.compile(r"[^,\]}<\n]*")
_GEMMA_KEY = re.compile(r"[^:,{}\[\]<>\n]*")


class PythonCalls:
    """`[f(a='x', n=3), g()]`, or calls line by line, between markers. Some models write JSON between them instead.

    is_bare: also without markers, where a list begins with the name of a tool.
    """

    ends_reasoning = False

    def __init__(self, layout: JsonLayout, *also: str, close: str = "", is_bare: bool = False) -> None:
        """layout, also, close: see `JsonCalls`; the layout's object is not used."""
        self.layout = layout
        self._json = JsonCalls(layout, *also, close=close)
        self.opens, self.others = self._json.opens, self._json.others
        self.bare = "[{" if is_bare else ""

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        if (yield from feed.ahead(_is_json(feed))):
            return (yield from self._json.read(marker, feed, sink, schemas))
        feed.keep()
        yield from feed.space()
        is_list = yield from feed.through("[")
        is_told = False
        while call := (yield from self._call(feed)):
            name, arguments = call
            if not marker and name not in schemas:
                break
            sink.add_call(name, arguments)
            is_told = True
            feed.kept()
            feed.keep()
            yield from feed.space()
            yield from feed.through(",")
        if is_told and is_list:
            yield from feed.through("]")
        rest = feed.kept()
        if not is_told:
            sink.say_marker(marker)
            sink.say(rest)
        else:
            yield from self._end(feed, sink, rest)
        return None

    def _end(self, feed: Feed, sink: Sink, rest: str) -> Reading[None]:
        feed.keep()
        yield from feed.space()
        space = feed.kept()
        if not self.others or not (yield from feed.through(*self.others)):
            sink.say(rest.replace("]", "", 1) + space)

    def _call(self, feed: Feed) -> Reading[tuple[str, str] | None]:
        """Read a call; return its name and the JSON of its arguments. None, with the text read, for no call."""
        yield from feed.space()
        name = yield from feed.run(NAME)
        if not name or not (yield from feed.through("(")):
            return None
        arguments: dict[str, Any] = {}
        while (yield from feed.space()) != ")":
            key = yield from feed.run(_IDENTIFIER)
            yield from feed.space()
            if not key or not (yield from feed.through("=")):
                return None
            pieces = yield from _read_literal(feed)
            value = None if pieces is None else _json_of(pieces)
            if value is None:
                return None
            arguments.setdefault(key, value)
            yield from feed.through(",")
        feed.take(1)
        if not (yield from feed.ahead(self._is_over(feed))):
            return None
        return name, "{" + ", ".join(f"{encode(key)}: {value}" for key, value in arguments.items()) + "}"

    def _is_over(self, feed: Feed) -> Reading[bool]:
        """Return whether a call can end here."""
        feed.keep()
        char = yield from feed.space()
        is_line = "\n" in feed.kept()
        return not char or is_line or char in ",]" or (yield from feed.through(*self.others, *self.opens)) != ""


def _is_json(feed: Feed) -> Reading[bool]:
    """Return whether an object or a list of objects comes."""
    yield from feed.space()
    yield from feed.through("[")
    return (yield from feed.space()) == "{"


def _read_literal(feed: Feed) -> Reading[list[str] | None]:
    """Read a value up to the comma or parenthesis behind it. Return its parts, every other one a string in its quotes;
    None where it is none. The strings have no line breaks."""
    pieces, depth = [""], 0
    while True:
        pieces[-1] += yield from feed.run(_PLAIN)
        char = yield from feed.peek()
        if not char or depth > _MAX_DEPTH:
            return None
        if char in "'\"":
            string = yield from _read_string(feed, char)
            if string is None:
                return None
            pieces += [string, ""]
            continue
        if depth == 0 and char in ",)":
            return pieces
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return None
        pieces[-1] += feed.take(1)


def _read_string(feed: Feed, quote: str) -> Reading[str | None]:
    """Read a Python string; None if it does not end. A quote behind which no value can end belongs to the string."""
    end = (yield from feed.through(quote * 3)) or feed.take(1)
    parts: list[str] = []
    while True:
        parts.append((yield from feed.run(_IN_STRING[quote])).replace("\r", "\\r").replace("\n", "\\n"))
        char = yield from feed.peek()
        if not char:
            return None
        if char == "\\":
            feed.take(1)
            escaped = yield from feed.peek()
            parts.append(_escape(feed.take(1) if escaped else ""))
        elif (yield from feed.through(end)):
            if len(end) == 3 or (yield from feed.ahead(_ends_value(feed))):
                return quote + "".join(parts) + quote
            parts.append("\\" + quote)
        else:
            parts.append("\\" + feed.take(1))


def _escape(char: str) -> str:
    """Return the escape of a character in Python. What is none there means the backslash itself, but JSON's slash."""
    if char in _ESCAPED:
        return f"\\{char}"
    return "/" if char == "/" else "\\\\" + ("\\n" if char == "\n" else char)


def _ends_value(feed: Feed) -> Reading[bool]:
    char = yield from feed.space()
    return not char or char in ",:)]}"


def _json_of(pieces: list[str]) -> str | None:
    """Return the JSON of a value in the parts of `_read_literal`, None for one that is no literal."""
    outside = "".join(pieces[::2])
    if len(outside) > _MOST_CHARS or not all(
        _WORDS.fullmatch(part) for piece in pieces[::2] for part in re.split(r"[()\[\]{},]", piece)
    ):
        return None
    source = "".join(
        piece if place % 2 else _JSON_WORD.sub(lambda found: _JSON_WORDS[found[0]], piece)
        for place, piece in enumerate(pieces)
    )
    try:
        text = json.dumps(ast.literal_eval(source.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    # Escapes may have named halves of characters.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class GemmaCalls:
    """`<|tool_call>call:NAME{key:VALUE,key:VALUE}<tool_call|>` with bare keys, strings in quotes of their own, numbers,
    words, lists and objects."""

    opens = ("<|tool_call>",)
    others = ("<tool_call|>", _QUOTE)
    ends_reasoning = True
    bare = ""

    def __init__(self) -> None:
        self._end = Markers(*self.opens, "<tool_call|>")

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        feed.keep()
        yield from feed.space()
        yield from feed.through("call")
        yield from feed.through(":")
        name = yield from feed.run(NAME)
        said = feed.kept()
        if not is_name(name) or (yield from feed.peek()) != "{":
            sink.say_marker(marker)
            sink.say(said)
            return None
        sink.open_call(name)
        is_whole = yield from _read_gemma(feed, sink.arguments, 0)
        if is_whole:
            sink.close_call()
            feed.keep()
            yield from feed.space()
            space = feed.kept()
            if not (yield from feed.through("<tool_call|>")):
                sink.say(space)
            return None
        found = yield from feed.until(self._end, drop)
        sink.close_call()
        return found if found in self.opens else None


def _read_gemma(feed: Feed, say: Say, depth: int) -> Reading[bool]:
    """Read a value and pass it on as JSON. Return False if it is none or does not end."""
    char = yield from feed.space()
    if char and char in "{[":
        return depth < _MAX_DEPTH and (yield from _read_gemma_items(feed, say, depth))
    if (yield from feed.through(_QUOTE)):
        say('"')
        end = yield from feed.until(_QUOTES, lambda piece: say(encode(piece)[1:-1]))
        say('"' if end else "")
        return end is not None
    word = (yield from feed.run(_BARE)).strip()
    say(word if word == "null" or decode(word) is not None else encode(word))
    return not feed.ended or bool(feed.rest)


def _read_gemma_items(feed: Feed, say: Say, depth: int) -> Reading[bool]:
    """Read an object or a list."""
    is_object = feed.take(1) == "{"
    close = "}" if is_object else "]"
    say("{" if is_object else "[")
    separator = ""
    while (yield from feed.space()) != close:
        if is_object:
            key = yield from _read_gemma_key(feed)
            yield from feed.space()
            if not (yield from feed.through(":")):
                return False
            separator += f"{encode(key)}: "
        say(separator)
        if not (yield from _read_gemma(feed, say, depth + 1)):
            return False
        separator = ", "
        if (yield from feed.space()) != close and not (yield from feed.through(",")):
            return False
    say(feed.take(1))
    return True


def _read_gemma_key(feed: Feed) -> Reading[str]:
    if not (yield from feed.through(_QUOTE)):
        return (yield from feed.run(_GEMMA_KEY)).strip()
    key, _ = yield from feed.text_until(_QUOTES)
    return key
