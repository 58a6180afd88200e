"""Text that comes in pieces, as parsers read it: a parser is a generator that yields where it needs more text.

A parser's output depends on the text alone and never on how it was cut: every reading function either knows enough to
go on, or yields. Each character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
# A generator that yields for more text and returns a value.
Reading = Generator[None, None, _T]
Say = Callable[[str], object]


def drop(_: str) -> None:
    """Take text that nobody is to see."""


class Markers:
    """A set of texts to look for.

    The first character of each stands in none of them but at its beginning, so that a marker can begin at one place
    only in the text that is left over. Raises ValueError for others, and for one that begins another.
    """

    def __init__(self, *texts: str) -> None:
        self._texts = tuple(dict.fromkeys(texts))
        self._firsts = "".join({text[0] for text in self._texts})
        for text in self._texts:
            if any(char in self._firsts for char in text[1:]):
                raise ValueError(f"marker {text!r} holds the first character of a marker")
            if any(other != text and other.startswith(text) for other in self._texts):
                raise ValueError(f"marker {text!r} begins another")
        self._longest = max(map(len, self._texts))
        self.pattern = re.compile("|".join(map(re.escape, self._texts)))

    def safe_end(self, text: str, start: int) -> int:
        """Return the place from which `text`, which holds no whole marker after `start`, may go on as one."""
        tail = max(start, len(text) - self._longest + 1)
        last = -1
        for char in self._firsts:
            last = max(last, text.rfind(char, tail))
        if last >= 0 and any(marker.startswith(text[last:]) for marker in self._texts):
            return last
        return len(text)


class Feed:
    """The text that a parser has not read yet. `ended`: no more will come."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self.ended = True

    def keep(self) -> None:
        """Remember the text that is read from here on, for `kept`."""
        self._kept = []

    def kept(self) -> str:
        """Return the text that was read since `keep`, and remember no more."""
        text = "".join(self._kept or ())
        self._kept = None
        return text

    def take(self, end: int) -> str:
        """Return the text up to the place `end` of `rest`, as read."""
        piece = self._text[self._at : self._at + end]
        self._at += end
        if self._kept is not None:
            self._kept.append(piece)
        return piece

    def put_back(self, text: str) -> None:
        """Have `text`, which was read last, read again."""
        self._text = text + self.rest

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

    def through(self, word: str) -> Reading[bool]:
        """Read `word` if the text goes on with it."""
        while len(self._text) - self._at < len(word) and not self.ended:
            if not word.startswith(self._text[self._at :]):
                return False
            yield
        if not self._text.startswith(word, self._at):
            return False
        self.take(len(word))
        return True

    def sees(self, words: tuple[str, ...]) -> Reading[bool]:
        """Return whether the text, which stays unread, goes on with one of `words` or is over."""
        while True:
            rest = self.rest
            if any(rest.startswith(word) for word in words):
                return True
            if self.ended:
                return not rest
            if not any(word.startswith(rest) for word in words):
                return False
            yield


_SPACE = re.compile(r"\s+")
