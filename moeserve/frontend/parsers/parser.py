"""The parser of one choice: text in, as it is generated; reasoning, text and calls out.

Streaming gives the same parts however the text is cut. An invalid call stays visible as text, or goes to the client as
unparsed arguments; no text of a model is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from moeserve.frontend.parsers.calls import CallShape
from moeserve.frontend.parsers.content import read_content
from moeserve.frontend.parsers.feed import Feed, Parsed, Reading, Sink
from moeserve.frontend.parsers.message_form import Messages, Start, read_messages
from moeserve.frontend.parsers.reasoning import Reasoning, read_reasoning
from moeserve.frontend.parsers.values import Schemas


class OutputParser:
    """Parses one choice. With messages, `reasoning` and `calls` only switch their kinds of parts on."""

    def __init__(
        self,
        *,
        reasoning: Reasoning | None,
        calls: CallShape | None,
        new_id: Callable[[], str],
        messages: Messages | None = None,
        start: Start = "answer",
        schemas: Schemas | None = None,
        hidden: Collection[str] = (),
        tokens: Collection[str] = (),
        parallel: bool = True,
    ) -> None:
        """new_id: makes ids of calls. messages: the form of answers that are messages. schemas: of the request's tools.
        hidden: markers with special tokens. tokens: markers that are tokens of any kind. parallel: more than one call.
        """
        self._feed = Feed()
        self._sink = Sink(hidden, parallel, new_id)
        self._has_special_markers = messages is not None and set(messages.markers) <= set(hidden)
        self._num_guards = 0
        schemas = schemas or {}
        if messages is not None:
            reasons, has_calls = reasoning is not None, calls is not None
            self._reading = read_messages(
                self._feed, self._sink, messages, schemas, reasons=reasons, calls=has_calls, start=start
            )
        else:
            self._reading = _read_answer(self._feed, self._sink, reasoning, calls, schemas, tokens, start)
        self._is_over = False
        self._run()

    @property
    def num_calls(self) -> int:
        return self._sink.num_calls

    def push(self, text: str, *, is_special: bool = True) -> Parsed:
        """Return the parts that `text` completes. is_special: it is the text of a special token, or may be.

        Where all markers of a message are special tokens, text of other tokens that spells one is no marker.
        """
        if self._has_special_markers and not is_special and "<" in text:
            self._num_guards += text.count("<")
            text = text.replace("<", "<" + _GUARD)
        self._feed.add(text)
        self._run()
        return self._take()

    def finish(self) -> Parsed:
        """Return the remaining parts, at the end of the text."""
        self._feed.end()
        self._run()
        self._sink.end()
        return self._take()

    def _take(self) -> Parsed:
        parsed = self._sink.take()
        if self._num_guards:
            parsed.reasoning = parsed.reasoning.replace(_GUARD, "")
            parsed.text = parsed.text.replace(_GUARD, "")
            for call in parsed.calls:
                call.arguments = call.arguments.replace(_GUARD, "")
            if parsed.called_at is not None:
                parsed.called_at -= self._num_guards
        return parsed

    def _run(self) -> None:
        if not self._is_over:
            self._is_over = next(self._reading, _OVER) is _OVER


_OVER = object()
# Stands behind the first character of a marker that text only spells. No text of a model holds this noncharacter.
_GUARD = "\ufdd0"


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
    if reasoning is None:
        yield from read_content(feed, sink, calls, schemas)
        return
    found: str | None = None
    if start != "text":
        is_open = start == "reasoning"
        found = yield from read_reasoning(feed, sink, reasoning, calls, schemas, tokens, is_open=is_open)
    # Behind a call inside reasoning, models write the marker that they had forgotten.
    late = "" if found is None else reasoning.end
    is_framed = start == "text"
    yield from read_content(
        feed, sink, calls, schemas, found=found, frame=reasoning.frame, is_framed=is_framed, late=late
    )
