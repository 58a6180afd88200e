"""The harmony form of gpt-oss: messages with a header that names their channel and, for calls, their recipient.

`<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are text, and a message to `functions.NAME` is a
call, whose body is the JSON of its arguments.
"""

from __future__ import annotations

import re

from moeserve.frontend.parsers.calls import is_name, read_arguments
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Say, Sink
from moeserve.frontend.parsers.values import Schemas

HARMONY_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEAD = Markers(*HARMONY_MARKERS)
HARMONY_BODY_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_BODY = Markers(*HARMONY_BODY_ENDS)
HARMONY_THOUGHT = "<|channel|>analysis"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNELS = frozenset({"analysis", "commentary", "final"})
# The words of a header.
_WORDS = re.compile(r"(?:channel:|\s|(?:assistant|analysis|commentary|final|json|code)(?!\w)|to=[^\s<{]*)*")


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
        body = feed
        if found != "<|message|>":
            body = _unmarked_body(head, is_first=is_first)
        if body.rest or found == "<|message|>":
            end = yield from _read_body(body, sink, schemas, head, reasons=reasons, calls=calls)
            found = end if body is feed else found
        is_first = False


def _unmarked_body(head: list[str], *, is_first: bool) -> Feed:
    """Return the body of a message that lacks the marker before it: the text behind the words of its header."""
    body = Feed()
    words = _WORDS.match(head[-1])
    rest = head[-1][words.end() :] if words else ""
    if (is_first and len(head) == 1) or (
        _channel_of(head) in _CHANNELS and (rest[:1] == "{" or not _recipient_of(head))
    ):
        body.add(rest)
    body.end()
    return body


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
    recipient = _recipient_of(head)
    name = recipient.removeprefix("functions.")
    if name not in schemas and name.removesuffix("json") in schemas:
        # The space before the word for the body's type is missing.
        name = name.removesuffix("json")
    if calls and is_name(name) and (name != recipient or name in schemas):
        return (yield from read_arguments(feed, sink, name, _BODY))
    say: Say = sink.say
    is_reasoning = reasons and (_channel_of(head) == "analysis" or bool(recipient))
    if is_reasoning:
        sink.begin_reasoning()
        say = sink.think
    found = yield from feed.until(_BODY, say)
    if is_reasoning:
        sink.end_reasoning()
    return found


def _channel_of(head: list[str]) -> str:
    part = next((part for part in head if part.startswith("channel:")), "")
    return next(iter(part.removeprefix("channel:").split()), "")


def _recipient_of(head: list[str]) -> str:
    return next((match[1] for part in head if (match := _RECIPIENT.search(part))), "")
