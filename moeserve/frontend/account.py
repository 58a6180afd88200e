"""The log line of an answer, for which a key answers with its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import structlog

log = structlog.get_logger(__name__)


class Spent(msgspec.Struct, frozen=True):
    """The tokens of an answer. key: the name of its key. cached: of the prompt."""

    key: str
    prompt: int
    cached: int
    generated: int


# Counts an answer and writes its log line, of an event and its fields.
Tell = Callable[[Spent, str, dict[str, Any]], None]


class RequestLine:
    """The log line of one HTTP request. It is written at the request's end, or by `tell` if it has tokens.

    `fields`: counts and times, never text. An answer may outlive its request, and then has a line of its own.
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self.fields: dict[str, Any] = {}
        self._tell = tell
        self._spent: Spent | None = None
        self._is_over = False

    def spend(self, spent: Spent, fields: dict[str, Any]) -> None:
        """Enter the answer's tokens, and what else its line says of it."""
        if self._is_over and self._tell is not None:
            self._tell(spent, "answer", fields)
            return
        self._spent = spent
        self.fields |= fields

    def end(self, fields: dict[str, Any], *, is_watch: bool) -> None:
        """Write the line. is_watch: operators look at the route all the time."""
        self._is_over = True
        fields = self.fields | fields
        if self._spent is not None and self._tell is not None:
            self._tell(self._spent, "request", fields)
        else:
            (log.debug if is_watch else log.info)("request", **fields)
