"""One JSON value in text that comes in pieces: where it ends, and whether it is one.

Models write two things into strings that JSON forbids: line breaks and tabs, and backslashes before any character. Both
are put right on the way, so that clients can parse the result.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from moeserve.frontend.parsers.feed import Feed, Reading, Say, Sink

_MAX_DEPTH = 200
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[-+.\w]*")
_SCALAR_VALUE = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


class JsonScan:
    """Reads one value. `done`: it is complete; `broken`: the text so far begins no value."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._closers: list[str] = []
        self._wants = "value"
        self._scalar = ""
        self._out: list[str] = []

    def scan(self, text: str, *, ended: bool = False) -> tuple[int, str]:
        """Return how many characters of `text` belong to the value, and these put right. ended: no more will come."""
        at = 0
        while at < len(text) and not (self.done or self.broken):
            at = self._STEPS[self._wants](self, text, at)
        if ended and self._wants == "scalar" and not self.broken:
            self._end_scalar()
        out = "".join(self._out)
        self._out.clear()
        return at, out

    def _copy(self, text: str, start: int, end: int) -> int:
        self._out.append(text[start:end])
        return end

    def _space(self, text: str, at: int) -> int:
        match = _SPACE.match(text, at)
        return self._copy(text, at, match.end()) if match else at

    def _value(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == "]" and self._wants == "value or ]":
            return self._close(text, at)
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            self._wants = "key or }" if char == "{" else "value or ]"
            self.broken = len(self._closers) > _MAX_DEPTH
        elif char == '"':
            self._wants = "string"
        elif char == "-" or char.isalnum():
            self._wants = "scalar"
            return at
        else:
            self.broken = True
            return at
        return self._copy(text, at, at + 1)

    def _key(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        if text[at] == "}" and self._wants == "key or }":
            return self._close(text, at)
        if text[at] != '"':
            self.broken = True
            return at
        self._wants = "key string"
        return self._copy(text, at, at + 1)

    def _colon(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            self.broken = True
            return at
        self._wants = "value"
        return self._copy(text, at, at + 1)

    def _next(self, text: str, at: int) -> int:
        at = self._space(text, at)
        if at == len(text):
            return at
        if text[at] == self._closers[-1]:
            return self._close(text, at)
        if text[at] != ",":
            self.broken = True
            return at
        self._wants = "key" if self._closers[-1] == "}" else "value"
        return self._copy(text, at, at + 1)

    def _close(self, text: str, at: int) -> int:
        self._closers.pop()
        self._after_value()
        return self._copy(text, at, at + 1)

    def _after_value(self) -> None:
        if self._closers:
            self._wants = "next"
        else:
            self.done = True

    def _string(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        end = match.end() if match else at
        self._copy(text, at, end)
        if end == len(text):
            return end
        char = text[end]
        if char == "\\":
            # Written with the character after it, which decides how.
            self._wants += " escape"
        elif char == '"':
            self._out.append(char)
            if self._wants == "key string":
                self._wants = "colon"
            else:
                self._after_value()
        else:
            self._out.append(_ESCAPES.get(char, f"\\u{ord(char):04x}"))
        return end + 1

    def _escape(self, text: str, at: int) -> int:
        self._wants = self._wants.removesuffix(" escape")
        char = text[at]
        if char in '"\\/bfnrtu':
            self._out.append("\\" + char)
            return at + 1
        self._out.append("\\\\")
        return at

    def _scalar_part(self, text: str, at: int) -> int:
        match = _SCALAR.match(text, at)
        end = match.end() if match else at
        self._scalar += text[at:end]
        self._copy(text, at, end)
        if end < len(text):
            self._end_scalar()
        return end

    def _end_scalar(self) -> None:
        if _SCALAR_VALUE.fullmatch(self._scalar):
            self._scalar = ""
            self._after_value()
        else:
            self.broken = True

    _STEPS = {  # noqa: RUF012 - a table of methods
        "value": _value,
        "value or ]": _value,
        "key": _key,
        "key or }": _key,
        "colon": _colon,
        "next": _next,
        "string": _string,
        "key string": _string,
        "string escape": _escape,
        "key string escape": _escape,
        "scalar": _scalar_part,
    }


def read_value(feed: Feed, say: Say) -> Reading[bool]:
    """Read one JSON value and pass its text on, put right. Return False if it is none; the remainder is not read."""
    scan = JsonScan()
    while True:
        length, text = scan.scan(feed.rest, ended=feed.ended)
        feed.take(length)
        if text:
            say(text)
        if scan.done or scan.broken or feed.ended:
            return scan.done
        yield


def read_call(feed: Feed, sink: Sink, known: Collection[str] | None = None) -> Reading[bool]:
    """Read `{"name": ..., "arguments": {...}}` and tell it as a call, its arguments as they come.

    Return False where it is no such object, or names no tool of `known`: then either nothing was told, or the call is
    still open and the remainder belongs to its broken arguments. The keys stand in any order; other keys are passed
    over, and so is anything wrong behind the arguments.
    """
    if not (yield from feed.through("{")):
        return False
    name, arguments, is_told = "", "", False
    char = yield from feed.space()
    while char == '"':
        key = yield from _read_key(feed)
        char = yield from feed.space()
        is_arguments = key in ("arguments", "parameters") and not is_told
        if is_arguments and char == "{" and name:
            sink.open_call(name)
            if not (yield from read_value(feed, sink.arguments)):
                return False
            sink.close_call()
            is_told = True
        else:
            pieces: list[str] = []
            if not (yield from read_value(feed, pieces.append)):
                return is_told
            if is_arguments:
                arguments = "".join(pieces)
            elif key == "name" and not (name := _name_of("".join(pieces), known)):
                return is_told
        char = yield from feed.space()
        if char == ",":
            feed.take(1)
            char = yield from feed.space()
    if char == "}":
        feed.take(1)
        if name and not is_told:
            sink.tell(name, plain_arguments(arguments))
            is_told = True
    return is_told


def _read_key(feed: Feed) -> Reading[str]:
    """Read a key and the colon after it. Return an empty key where there is none."""
    pieces: list[str] = []
    if not (yield from read_value(feed, pieces.append)):
        return ""
    yield from feed.space()
    if not (yield from feed.through(":")):
        return ""
    return str(decode("".join(pieces)))


def _name_of(text: str, known: Collection[str] | None) -> str:
    name = decode(text)
    return name if isinstance(name, str) and (known is None or name in known) else ""


def plain_arguments(text: str) -> str:
    """Return the JSON of arguments: some models write it into a string, or null for none."""
    value = decode(text) if text else None
    return "" if value is None else value if isinstance(value, str) else text


def decode(text: str) -> Any:
    """Return the value of JSON, None for text that is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
