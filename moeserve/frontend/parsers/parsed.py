"""The parts of an answer that parsers find, and the sink that receives them.

White space around calls and at the borders of reasoning belongs to the form in which models write, and is dropped
unless it stands between two pieces of text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from moeserve.frontend.dialects.internal import ToolCallPart


@dataclass(slots=True)
class Parsed:
    """New parts of an answer, in the order reasoning, text, calls."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCallPart] = field(default_factory=list)


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
        """Let the held-back white space out."""
        self._out += self._space
        self._space.clear()

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text


class Sink:
    """Collects the parts that a parser finds, until `take`.

    hidden: markers that are special tokens, which never show as text. parallel: all calls of an answer are
    told; otherwise those after the first are dropped.
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

    def begin_reasoning(self) -> None:
        self._reasoning.border()

    def think(self, text: str) -> None:
        self._reasoning.add(text)

    def end_reasoning(self) -> None:
        self._reasoning.border()
        self._text.border()

    def open_call(self, name: str, call_id: str = "") -> None:
        """Begin a call."""
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

    def tell(self, name: str, arguments: str, call_id: str = "") -> None:
        """Tell a whole call."""
        self.open_call(name, call_id)
        self.arguments(arguments)
        self.close_call()

    def end(self) -> None:
        """End the text: white space at its end shows unless it follows calls. A call that was cut stays as it is."""
        self._is_open = False
        if not self.num_calls:
            self._text.release()

    def take(self) -> Parsed:
        """Return the parts since the last call."""
        parsed = Parsed(self._reasoning.take(), self._text.take(), self._calls)
        self._calls = []
        return parsed
