"""The log line of an answer, for which a key answers with its tokens."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
import structlog

log = structlog.get_logger(__name__)


class Spent(msgspec.Struct, frozen=True):
    """The tokens of an answer. key: the name of its key. cached: of the prompt."""

    key: str
    prompt: int
    cached: int
    generated: int


class Ledger(Protocol):
    """Counts answers, and writes their log lines."""

    def expect(self, key: str) -> asyncio.Future[None]:
        """Return a future that is done once an answer that has ended is counted. The key's next request waits for
        it."""

    def tell(
        self, spent: Spent, event: str, fields: dict[str, Any], counted: asyncio.Future[None] | None = None
    ) -> None:
        """Count an answer, and then write its log line. counted: of `expect`."""


class RequestLine:
    """The log line of one HTTP request. It is written at the request's end, by a ledger if it has tokens.

    `fields`: counts and times, never text.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.fields: dict[str, Any] = {}
        self._ledger = ledger
        self._spent: Spent | None = None
        self._counted: asyncio.Future[None] | None = None
        self._is_apart = False

    def set_apart(self) -> None:
        """Have the answer get a line of its own, since it may outlive the request."""
        self._is_apart = True

    def spend(self, spent: Spent, fields: dict[str, Any]) -> None:
        """Enter the answer's tokens and the other fields of its line."""
        if self._is_apart and self._ledger is not None:
            self._ledger.tell(spent, "answer", fields)
            return
        self._spent = spent
        self._counted = None if self._ledger is None else self._ledger.expect(spent.key)
        self.fields |= fields

    def end(self, fields: dict[str, Any], *, is_watch: bool) -> None:
        """Write the line. is_watch: operators look at the route all the time."""
        fields = self.fields | fields
        if self._spent is not None and self._ledger is not None:
            self._ledger.tell(self._spent, "request", fields, self._counted)
        else:
            (log.debug if is_watch else log.info)("request", **fields)
