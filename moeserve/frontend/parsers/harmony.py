"""The harmony form of gpt-oss: messages with a header that names their channel and, for calls, their recipient.

`<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are text, and a message to `functions.NAME` is a
call, whose body is the JSON of its arguments.
"""

from __future__ import annotations

import re

from moeserve.frontend.parsers.calls import Schemas, read_arguments
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Say
from moeserve.frontend.parsers.parsed import Sink

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEAD = Markers(*MARKERS)
BODY_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_BODY = Markers(*BODY_ENDS)
THOUGHT_OPENING = "<|channel|>analysis"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def ends_in_thought(text: str) -> bool:
    """Return whether a prompt ends inside the body of a message in the analysis channel that has no recipient."""
    _, opening, rest = text.rpartition(THOUGHT_OPENING)
    header, message, _ = rest.partition("<|message|>")
    return bool(opening and message) and "to=" not in header and not any(end in rest for end in BODY_ENDS)


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
