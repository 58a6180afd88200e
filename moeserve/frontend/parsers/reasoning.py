"""Reasoning at the beginning of an answer, and calls inside it: models forget to end a thought before they call.

A call inside a thought ends it if the marker that begins the call is a token that no text has. Where text may have it,
the call must be complete and of a known tool. And where the marker is several tokens, which models write in prose, too,
nothing but calls and the thought's end may follow it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from moeserve.frontend.dialects.internal import ToolCallPart
from moeserve.frontend.parsers.calls import CallShape
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Sink
from moeserve.frontend.parsers.values import Schemas, decode


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around reasoning.

    frame: what some models write before the text behind it, and behind that text.
    """

    begin: str
    end: str
    frame: tuple[str, ...] = ()

    def suffixed(self, suffix: str) -> Reasoning:
        """Return these markers with a suffix in their tags."""
        return Reasoning(self.begin.replace(">", f"{suffix}>"), self.end.replace(">", f"{suffix}>"), self.frame)


def read_reasoning(
    feed: Feed,
    sink: Sink,
    reasoning: Reasoning,
    calls: CallShape | None,
    schemas: Schemas,
    tokens: Collection[str],
    *,
    is_open: bool,
) -> Reading[str | None]:
    """Read reasoning, if there is any. Return the marker of a call that ended it, read.

    tokens: markers that are tokens of their own. is_open: the prompt ends inside the reasoning.
    """
    if not is_open:
        feed.keep()
        yield from feed.space()
        is_there = yield from feed.through(reasoning.begin)
        before = feed.kept()
        if not is_there:
            sink.say(before)
            return None
    sink.begin_reasoning()
    # Some models repeat the marker that the template has opened reasoning with.
    yield from feed.space()
    yield from feed.through(reasoning.begin)
    markers = Markers(reasoning.end, *(calls.opens if calls is not None else ()))
    while True:
        found = yield from feed.until(markers, sink.think)
        if calls is None or found is None or found == reasoning.end:
            sink.end_reasoning()
            return None
        attempt = _Attempt(calls, schemas, found)
        if calls.ends_reasoning or (yield from attempt.succeeds(feed, reasoning.end, must_be_last=found not in tokens)):
            sink.end_reasoning(feed.num_read - len(found))
            return found
        sink.think(found + feed.take(attempt.num_read))


class _Attempt:
    """Reads what stands behind a marker inside a thought as calls, to find out whether it is any."""

    def __init__(self, calls: CallShape, schemas: Schemas, marker: str) -> None:
        self._calls, self._schemas = calls, schemas
        self._feed, self._sink = Feed(), Sink((), True, str)
        self._told: list[ToolCallPart] = []
        self._has_text = False
        self._reading = self._read(marker)

    @property
    def num_read(self) -> int:
        """The characters that were read where there is no call."""
        return self._feed.num_read

    def succeeds(self, feed: Feed, end: str, *, must_be_last: bool) -> Reading[bool]:
        """Return whether complete calls of known tools come before the thought's end; the text stays unread.

        must_be_last: nothing but calls and the end may come behind them.
        """
        border = Markers(end)
        feed.keep()
        while True:
            rest = feed.rest
            place = rest.find(end)
            is_all = place >= 0 or feed.ended
            self._feed.add(feed.take(place if place >= 0 else len(rest) if is_all else border.safe_end(rest, 0)))
            if is_all:
                self._feed.end()
            is_over = next(self._reading, self) is self
            self._collect()
            whole = self._told[:-1] if self._sink.in_call else self._told
            known = [call for call in whole if call.name in self._schemas and isinstance(decode(call.arguments), dict)]
            if is_over or (known and not must_be_last):
                break
            yield
        found = bool(known)
        if must_be_last:
            found = found and known == self._told and not self._has_text
            if found and (yield from feed.through(end)):
                found = not (yield from feed.space())
        feed.back()
        return found

    def _read(self, marker: str) -> Reading[None]:
        found: str | None = marker
        while found:
            found = yield from self._calls.read(found, self._feed, self._sink, self._schemas)
            self._collect()
            if self._has_text:
                return
            if not found:
                yield from self._feed.space()
                found = yield from self._feed.through(*self._calls.opens)
        self._has_text = bool((yield from self._feed.peek()))

    def _collect(self) -> None:
        parsed = self._sink.take()
        self._has_text = self._has_text or parsed.text != ""
        for part in parsed.calls:
            if part.name:
                self._told.append(part)
            else:
                self._told[-1].arguments += part.arguments
