"""The parser of one choice: text in, as it is generated; reasoning, text and calls out.

Streaming gives the same parts however the text is cut. An invalid call stays visible as text, or goes to the client as
unparsed arguments; no text of a model is an error.

In the harmony form of gpt-oss messages have a header that names their channel and, for calls, their recipient.
`<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are text, and a message to `functions.NAME` is a
call, whose body is the JSON of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from moeserve.frontend.parsers.calls import CallShape, Schemas, read_arguments
from moeserve.frontend.parsers.feed import Feed, Markers, Parsed, Reading, Say, Sink

HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEAD = Markers(*HARMONY_MARKERS)
HARMONY_BODY_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_BODY = Markers(*HARMONY_BODY_ENDS)
HARMONY_THOUGHT = "<|channel|>analysis"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

# Where the prompt leaves off: before an answer, inside its reasoning, or inside its text.
Start = Literal["answer", "reasoning", "text"]


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around reasoning."""

    begin: str
    end: str


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
        parallel: bool = True,
    ) -> None:
        """new_id: makes ids of calls. schemas: of the request's tools. hidden: markers that are special tokens.
        parallel: more than one call."""
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
            self._reading = _read_answer(self._feed, self._sink, reasoning, calls, schemas or {}, start)
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
    feed: Feed, sink: Sink, reasoning: Reasoning | None, calls: CallShape | None, schemas: Schemas, start: Start
) -> Reading[None]:
    """Read reasoning, text and calls until the end of the text."""
    found: str | None = None
    if reasoning is not None and start != "text":
        found = yield from _read_reasoning(feed, sink, reasoning, calls, start)
    if calls is None:
        yield from _read_text(feed, sink)
        return
    if found is None and calls.is_bare and start != "text":
        feed.keep()
        char = yield from feed.space()
        sink.say(feed.kept())
        if char == "{":
            found = yield from calls.read("", feed, sink, schemas)
    markers = Markers(*calls.opens, *calls.others)
    while True:
        if found is None:
            found = yield from feed.until(markers, sink.say)
            if found is None:
                return
        if found in calls.opens:
            found = yield from calls.read(found, feed, sink, schemas)
        else:
            sink.say_marker(found)
            found = None


def _read_text(feed: Feed, sink: Sink) -> Reading[None]:
    while not feed.ended:
        sink.say(feed.take(len(feed.rest)))
        yield
    sink.say(feed.take(len(feed.rest)))


def _read_reasoning(
    feed: Feed, sink: Sink, reasoning: Reasoning, calls: CallShape | None, start: Start
) -> Reading[str | None]:
    """Read reasoning at the beginning of an answer, if there is any. Return the marker of a call that ended it."""
    if start != "reasoning":
        feed.keep()
        yield from feed.space()
        is_there = yield from feed.through(reasoning.begin)
        before = feed.kept()
        if not is_there:
            sink.say(before)
            return None
    sink.begin_reasoning()
    ends = calls.opens if calls is not None and calls.ends_reasoning else ()
    # Some models repeat the marker that the template has opened reasoning with.
    yield from feed.space()
    yield from feed.through(reasoning.begin)
    found = yield from feed.until(Markers(reasoning.end, *ends), sink.think)
    sink.end_reasoning()
    return found if found in ends else None


def ends_in_thought(text: str) -> bool:
    """Return whether a prompt ends inside the body of a message in the analysis channel that has no recipient."""
    _, opening, rest = text.rpartition(HARMONY_THOUGHT)
    header, message, _ = rest.partition("<|message|>")
    return bool(opening and message) and "to=" not in header and not any(end in rest for end in HARMONY_BODY_ENDS)


def read_harmony(
    feed: Feed, sink: Sink, schemas: Schemas, *, reasons: bool, calls: bool, in_body: bool
) -> Reading[None]:
    """Read an answer. Without `reasons` and `calls`, the parts of these kinds are text.

    in_body: the prompt ends inside a message to the user.
    """
    found: str | None = "<|start|>"
    is_first = not in_body
    if in_body:
        found = yield from feed.until(_BODY, sink.say)
    while found is not None:
        head, found = yield from _read_head(feed, found)
        if found is None:
            if is_first and len(head) == 1:
                # Text without any header.
                sink.say(head[0])
            return
        is_first = False
        if found == "<|message|>":
            found = yield from _read_body(feed, sink, schemas, head, reasons=reasons, calls=calls)


def _read_head(feed: Feed, found: str | None) -> Reading[tuple[list[str], str | None]]:
    """Return the parts of a header, that before the first marker first, and the marker after it."""
    parts = [""] if found != "<|channel|>" else ["", "channel:"]

    def add(piece: str) -> None:
        parts[-1] += piece

    while True:
        found = yield from feed.until(_HEAD, add)
        if found == "<|channel|>":
            parts.append("channel:")
        elif found == "<|constrain|>":
            parts.append("")
        else:
            return parts, found


def _read_body(
    feed: Feed, sink: Sink, schemas: Schemas, head: list[str], *, reasons: bool, calls: bool
) -> Reading[str | None]:
    channel = next((part.removeprefix("channel:").split() for part in head if part.startswith("channel:")), [])
    recipient = next((match[1] for part in head if (match := _RECIPIENT.search(part))), "")
    name = recipient.removeprefix("functions.")
    if calls and name and (name != recipient or name in schemas):
        return (yield from read_arguments(feed, sink, name, _BODY))
    say: Say = sink.say
    is_reasoning = reasons and ((channel and channel[0] == "analysis") or bool(recipient))
    if is_reasoning:
        sink.begin_reasoning()
        say = sink.think
    found = yield from feed.until(_BODY, say)
    if is_reasoning:
        sink.end_reasoning()
    return found
