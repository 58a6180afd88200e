"""Text that comes in pieces, as parsers read it: up to markers, and JSON values; and the parts that they find.

A parser is a generator that yields where it needs more text. Its output depends on the text alone and never on how it
was cut: every reading function either knows enough to go on, or yields. Each character is looked at a bounded number
of times.

Models write two things into strings that JSON forbids: line breaks and tabs, and backslashes before any character. Both
are put right on the way, so that clients can parse the result.

White space around calls and at the borders of reasoning belongs to the form in which models write, and is dropped
unless it stands between two pieces of text.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from moeserve.frontend.dialects.internal import ToolCallPart

_T = TypeVar("_T")
# A generator that yields for more text and returns a value.
Reading = Generator[None, None, _T]
Say = Callable[[str], object]

_MAX_DEPTH = 200
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"\s+")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[-+.\w]*")
_SCALAR_VALUE = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
# States inside of a string or number, where white space is not between tokens.
_IN_TOKENS = frozenset({"string", "key string", "string escape", "key string escape", "scalar"})
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def drop(_: str) -> None:
    """Discard text."""


class Markers:
    """A set of texts to look for; the first that comes is found.

    Raises ValueError for a text that begins another, or stands in another before its end: which one is found would
    depend on how the text was cut.
    """

    def __init__(self, *texts: str) -> None:
        self._texts = tuple(dict.fromkeys(texts))
        for text, other in itertools.permutations(self._texts, 2):
            if text in other[:-1]:
                raise ValueError(f"marker {text!r} hides in {other!r}")
        self._longest = max(map(len, self._texts))
        self._first = re.compile("|".join({re.escape(text[0]) for text in self._texts}))
        self.pattern = re.compile("|".join(map(re.escape, self._texts)))

    def safe_end(self, text: str, start: int) -> int:
        """Return the place from which `text`, which holds no whole marker after `start`, may go on as one."""
        for found in self._first.finditer(text, max(start, len(text) - self._longest + 1)):
            tail = text[found.start() :]
            if any(marker.startswith(tail) for marker in self._texts):
                return found.start()
        return len(text)


class Feed:
    """The text that a parser has not read yet. `ended`: no more will come."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._num_added = 0
        self._kept: list[list[str]] = []

    @property
    def num_read(self) -> int:
        """The characters that were read."""
        return self._num_added - len(self._text) + self._at

    def add(self, text: str) -> None:
        self._num_added += len(text)
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self.ended = True

    def keep(self) -> None:
        """Remember the text that is read from here on, for `kept` or `back`. A second one begins inside the first."""
        self._kept.append([])

    def kept(self) -> str:
        """Return the text that was read since the last `keep`."""
        text = "".join(self._kept.pop())
        if self._kept:
            self._kept[-1].append(text)
        return text

    def back(self) -> None:
        """Unread the text that was read since the last `keep`."""
        self._text = "".join(self._kept.pop()) + self.rest

    def unread(self, text: str) -> None:
        """Unread `text`, which was read last and is not kept."""
        self._text = text + self.rest

    def take(self, end: int) -> str:
        """Return the text up to the place `end` of `rest`, as read."""
        piece = self._text[self._at : self._at + end]
        self._at += end
        if self._kept:
            self._kept[-1].append(piece)
        return piece

    @property
    def rest(self) -> str:
        """The text that came and is not read."""
        if self._at:
            self._text = self._text[self._at :]
            self._at = 0
        return self._text

    def until(self, markers: Markers, say: Say) -> Reading[str | None]:
        """Pass the text before the next marker on, and return the marker, read; None at the end of the text."""
        while True:
            found = markers.pattern.search(self._text, self._at)
            if found is not None:
                before = self.take(found.start() - self._at)
                if before:
                    say(before)
                return self.take(len(found[0]))
            end = len(self._text) if self.ended else markers.safe_end(self._text, self._at)
            if end > self._at:
                say(self.take(end - self._at))
            if self.ended:
                return None
            yield

    def text_until(self, markers: Markers) -> Reading[tuple[str, str | None]]:
        """Return the text before the next marker, and the marker, read; None at the end of the text."""
        text: list[str] = []
        found = yield from self.until(markers, text.append)
        return "".join(text), found

    def peek(self) -> Reading[str]:
        """Return the next character, not read; empty at the end of the text."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def space(self, say: Say = drop) -> Reading[str]:
        """Read white space, passed on; return the character after it, not read, or nothing at the end of the text."""
        while True:
            char = yield from self.peek()
            if not char or not char.isspace():
                return char
            match = _SPACE.match(self._text, self._at)
            say(self.take(match.end() - match.start() if match else 1))

    def run(self, chars: re.Pattern[str]) -> Reading[str]:
        """Return the longest text that matches, read. chars: a pattern of any number of characters of one class."""
        pieces = []
        while True:
            match = chars.match(self._text, self._at)
            pieces.append(self.take(match.end() - match.start() if match else 0))
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def through(self, *words: str) -> Reading[str]:
        """Return the word with which the text goes on, read; empty for none. No word begins another."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, words))]
            if found := next(filter(rest.startswith, words), ""):
                return self.take(len(found))
            if self.ended or not any(word.startswith(rest) for word in words):
                return ""
            yield

    def ahead(self, reading: Reading[_T]) -> Reading[_T]:
        """Return what a reading of this text finds, and unread it."""
        self.keep()
        found = yield from reading
        self.back()
        return found


def within(feed: Feed, ends: Markers, inner: Feed, reading: Reading[object]) -> Reading[str | None]:
    """Pass the text before the next marker of `ends` to a reading of `inner`, and return the marker, read."""
    coming = feed.until(ends, inner.add)
    while True:
        try:
            next(coming)
        except StopIteration as stop:
            found: str | None = stop.value
            inner.end()
            next(reading, None)
            return found
        next(reading, None)
        yield


@dataclass(slots=True)
class Parsed:
    """New parts of an answer, in the order reasoning, text, calls.

    called_at: the place in the answer, in characters, of a call that ends its reasoning.
    """

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCallPart] = field(default_factory=list)
    called_at: int | None = None


class CallIds:
    """Makes the ids of the calls of one choice, the same ones each time that the answer of this id is written."""

    def __init__(self, answer_id: str, choice: int) -> None:
        self._seed = f"{answer_id}:{choice}"
        self._next = 0

    def __call__(self) -> str:
        """Return the id of the next call: `call_` and 24 hexadecimal digits."""
        digest = hashlib.blake2b(f"{self._seed}:{self._next}".encode(), digest_size=12).hexdigest()
        self._next += 1
        return f"call_{digest}"


class _Lane:
    """One kind of text on its way out. `trims`: white space is dropped until other text comes."""

    def __init__(self) -> None:
        self.trims = False
        self.is_empty = True
        self._out: list[str] = []
        self._space: list[str] = []

    def add(self, piece: str) -> None:
        """Take text; hold back white space at its end."""
        if self.trims:
            piece = piece.lstrip()
            if not piece:
                return
            self.trims = False
        body = piece.rstrip()
        if body:
            self.is_empty = False
            self._out += self._space
            self._out.append(body)
            self._space.clear()
        if len(body) < len(piece):
            self._space.append(piece[len(body) :])

    def border(self) -> None:
        """Drop the white space here, on both sides."""
        self._space.clear()
        self.trims = True

    def release(self) -> None:
        """Emit the held-back white space."""
        self._out += self._space
        self._space.clear()

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text


class Sink:
    """Collects the parts that a parser finds, until `take`.

    hidden: markers that are special tokens, which never show as text. parallel: all calls of an answer are
    kept; otherwise only the first.
    """

    def __init__(self, hidden: Collection[str], parallel: bool, new_id: Callable[[], str]) -> None:
        self.num_calls = 0
        self._hidden = frozenset(hidden)
        self._parallel = parallel
        self._new_id = new_id
        self._text, self._reasoning = _Lane(), _Lane()
        self._calls: list[ToolCallPart] = []
        self._is_open = False
        self._is_muted = False
        self._has_arguments = False
        self._called_at: int | None = None

    @property
    def in_call(self) -> bool:
        """True while a call has begun and has not ended."""
        return self._is_open

    def say(self, text: str) -> None:
        self._text.add(text)

    def say_marker(self, marker: str) -> None:
        """Show a marker that means nothing where it stands, unless it is a special token."""
        if marker not in self._hidden:
            self._text.add(marker)

    @property
    def has_no_text(self) -> bool:
        """True as long as no text was said but white space."""
        return self._text.is_empty

    def border(self) -> None:
        """Drop the white space of the text here, on both sides."""
        self._text.border()

    def begin_reasoning(self) -> None:
        self._reasoning.border()

    def think(self, text: str) -> None:
        self._reasoning.add(text)

    def end_reasoning(self, called_at: int | None = None) -> None:
        """called_at: as in `Parsed`."""
        self._called_at = called_at
        self._reasoning.border()
        self._text.border()

    def open_call(self, name: str, call_id: str = "") -> None:
        if self._text.is_empty:
            self._text.border()
        self._is_open, self._has_arguments = True, False
        self._is_muted = self.num_calls > 0 and not self._parallel
        if not self._is_muted:
            self._calls.append(ToolCallPart(self.num_calls, "", call_id or self._new_id(), name))
            self.num_calls += 1

    def arguments(self, piece: str) -> None:
        """Add a piece of the JSON of the open call's arguments."""
        if not piece:
            return
        self._has_arguments = True
        if self._is_muted:
            return
        if self._calls:
            self._calls[-1].arguments += piece
        else:
            self._calls.append(ToolCallPart(self.num_calls - 1, piece))

    def close_call(self) -> None:
        """End the open call; without arguments it has the empty object."""
        if not self._has_arguments:
            self.arguments("{}")
        self._is_open = False

    def add_call(self, name: str, arguments: str) -> None:
        """Add a whole call. arguments: JSON."""
        self.open_call(name)
        self.arguments(arguments)
        self.close_call()

    def end(self) -> None:
        """End the text: white space at its end shows unless it follows calls. A call that was cut stays as it is."""
        self._is_open = False
        if not self.num_calls:
            self._text.release()

    def take(self) -> Parsed:
        """Return the parts since the last call."""
        parsed = Parsed(self._reasoning.take(), self._text.take(), self._calls, self._called_at)
        self._calls, self._called_at = [], None
        return parsed


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
            if self._wants not in _IN_TOKENS and (at := self._space(text, at)) == len(text):
                break
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
        match = _JSON_SPACE.match(text, at)
        return self._copy(text, at, match.end()) if match else at

    def _value(self, text: str, at: int) -> int:
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
        if text[at] == "}" and self._wants == "key or }":
            return self._close(text, at)
        if text[at] != '"':
            self.broken = True
            return at
        self._wants = "key string"
        return self._copy(text, at, at + 1)

    def _colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            self.broken = True
            return at
        self._wants = "value"
        return self._copy(text, at, at + 1)

    def _next(self, text: str, at: int) -> int:
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


def read_value(feed: Feed, say: Say, *, is_raw: bool = False) -> Reading[bool]:
    """Read one JSON value and pass its text on, put right unless it is raw. Return False if it is none; the remainder
    is not read."""
    scan = JsonScan()
    while True:
        length, text = scan.scan(feed.rest, ended=feed.ended)
        raw = feed.take(length)
        if raw:
            say(raw if is_raw else text)
        if scan.done or scan.broken or feed.ended:
            return scan.done
        yield
