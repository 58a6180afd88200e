"""The parser of one choice: text in, as it is generated; reasoning, text and calls out.

Streaming gives the same parts however the text is cut. An invalid call stays visible as text, or goes to the client as
unparsed arguments; no text of a model is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

from moeserve.frontend.parsers.calls import CallShape
from moeserve.frontend.parsers.feed import Feed, Markers, Parsed, Reading, Sink
from moeserve.frontend.parsers.harmony import read_harmony
from moeserve.frontend.parsers.reasoning import Reasoning, read_reasoning
from moeserve.frontend.parsers.values import Schemas

# Where the prompt leaves off: before an answer, inside its reasoning, or inside its text.
Start = Literal["answer", "reasoning", "text"]


class OutputParser:
    """Parses one choice. With harmony, `reasoning` and `calls` only switch their kinds of parts on."""

    def __init__(
        self,
        *,
        reasoning: Reasoning | None,
        calls: CallShape | None,
        new_id: Callable[[], str],
        is_harmony: bool = False,
        start: Start = "answer",
        schemas: Schemas | None = None,
        hidden: Collection[str] = (),
        tokens: Collection[str] = (),
        parallel: bool = True,
    ) -> None:
        """new_id: makes ids of calls. schemas: of the request's tools. hidden: markers that are special tokens. tokens:
        markers that are tokens of any kind. parallel: more than one call."""
        self._feed = Feed()
        self._sink = Sink(hidden, parallel, new_id)
        if is_harmony:
            self._reading = read_harmony(
                self._feed,
                self._sink,
                schemas or {},
                reasons=reasoning is not None,
                calls=calls is not None,
                in_body=start == "text",
            )
        else:
            self._reading = _read_answer(self._feed, self._sink, reasoning, calls, schemas or {}, tokens, start)
        self._is_over = False
        self._run()

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def push(self, text: str) -> Parsed:
        """Return the parts that `text` completes."""
        self._feed.add(text)
        self._run()
        return self._sink.take()

    def finish(self) -> Parsed:
        """Return the remaining parts, at the end of the text."""
        self._feed.end()
        self._run()
        self._sink.end()
        return self._sink.take()

    def _run(self) -> None:
        if not self._is_over:
            self._is_over = next(self._reading, _OVER) is _OVER


_OVER = object()


def _read_answer(
    feed: Feed,
    sink: Sink,
    reasoning: Reasoning | None,
    calls: CallShape | None,
    schemas: Schemas,
    tokens: Collection[str],
    start: Start,
) -> Reading[None]:
    """Read reasoning, text and calls until the end of the text."""
    found: str | None = None
    if reasoning is not None and start != "text":
        is_open = start == "reasoning"
        found = yield from read_reasoning(feed, sink, reasoning, calls, schemas, tokens, is_open=is_open)
    if calls is None:
        yield from _read_text(feed, sink)
        return
    # Behind a call inside reasoning, models write the marker that they had forgotten.
    late = reasoning.end if reasoning is not None and found is not None else ""
    markers = Markers(*filter(None, (*calls.opens, *calls.others, "{" if calls.is_bare else "", late)))
    while True:
        if found is None:
            found = yield from feed.until(markers, sink.say)
        if found is None:
            return
        if found in calls.opens:
            found = yield from calls.read(found, feed, sink, schemas)
            continue
        if found == "{":
            feed.unread(found)
            found = yield from calls.read("", feed, sink, schemas)
            continue
        if found != late:
            sink.say_marker(found)
        found = None


def _read_text(feed: Feed, sink: Sink) -> Reading[None]:
    while not feed.ended:
        sink.say(feed.take(len(feed.rest)))
        yield
    sink.say(feed.take(len(feed.rest)))
