"""Answers that are messages: each a header, a marker, and a body. The header or the marker says the kind of the body.

In the harmony form of gpt-oss `<|channel|>analysis<|message|>` is reasoning, `final` and `commentary` are text, and a
message to `functions.NAME` is a call, whose body is the JSON of its arguments. Muse's messages go to `self`, to `user`
or to a tool, with tags in their bodies. Inkling's have a marker for each kind of body.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from moeserve.frontend.parsers.calls import CallShape, JsonCalls, JsonLayout, is_name, read_arguments
from moeserve.frontend.parsers.content import read_content
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Sink, within
from moeserve.frontend.parsers.tagged import Layout, TaggedCalls
from moeserve.frontend.parsers.values import Schemas

# Where the prompt leaves off: before an answer, inside its reasoning, or inside its text.
Start = Literal["answer", "reasoning", "text"]
# What a body is: text, a thought, a call, or the arguments of the call that the header names.
Kind = Literal["text", "thought", "call", "arguments"]
# The header's parts, and the marker behind it.
KindOf = Callable[[list[str], str, Schemas], tuple[Kind, str]]

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = "<|channel|>"
_CHANNELS = frozenset({"analysis", "commentary", "final"})
# The words of a header.
_WORDS = re.compile(r"(?:<\|\w+\|>|\s|(?:assistant|analysis|commentary|final|json|code)(?!\w)|to=[^\s<{]*)*")


@dataclass(frozen=True, slots=True)
class Messages:
    """The markers of one family.

    start: begins a header. parts: inside a header. bodies: between a header and a body. ends: behind a body. thought:
    the text that begins a thought; then the first of `thought_heads` decides, if there are any. calls: the form of
    bodies that are calls.
    """

    start: str
    bodies: tuple[str, ...]
    ends: tuple[str, ...]
    kind: KindOf
    thought: str
    thought_heads: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    calls: CallShape | None = None

    @property
    def heads(self) -> tuple[str, ...]:
        """The markers that may stand in a header, or end it."""
        return tuple(dict.fromkeys((self.start, *self.parts, *self.bodies, *self.ends)))

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.heads, *(() if self.calls is None else (*self.calls.opens, *self.calls.others)))


def read_messages(
    feed: Feed, sink: Sink, form: Messages, schemas: Schemas, *, reasons: bool, calls: bool, start: Start
) -> Reading[None]:
    """Read an answer. Without `reasons` and `calls`, the parts of these kinds are text.

    start: where the prompt ends; `text` is inside a message to the user.
    """
    reader = _Reader(feed, sink, form, schemas, reasons, calls)
    found: str | None = form.start
    is_first = start == "answer"
    if not is_first:
        found = yield from (reader.read_thought() if start == "reasoning" else feed.until(reader.ends, sink.say))
    while found is not None:
        head, found = ([""], found) if found in form.bodies else (yield from reader.read_head(found))
        if found is not None and found in form.bodies:
            found = yield from reader.read_body(head, found)
        else:
            yield from reader.read_unmarked(head, is_first=is_first)
        is_first = False


class _Reader:
    """Reads the parts of messages."""

    def __init__(self, feed: Feed, sink: Sink, form: Messages, schemas: Schemas, reasons: bool, calls: bool) -> None:
        self.ends = Markers(*form.ends)
        self._feed, self._sink, self._form, self._schemas = feed, sink, form, schemas
        self._reasons, self._calls = reasons, calls
        self._heads = Markers(*form.heads)

    def read_head(self, found: str) -> Reading[tuple[list[str], str | None]]:
        """Return the parts of a header, that before the first marker first, and the marker after it."""
        parts = ["", found] if found in self._form.parts else [""]

        def add(piece: str) -> None:
            parts[-1] += piece

        while True:
            after = yield from self._feed.until(self._heads, add)
            if after is None or after not in self._form.parts:
                return parts, after
            parts.append(after)

    def read_body(self, head: list[str], marker: str) -> Reading[str | None]:
        """Read a body; return the marker that ended it."""
        kind, name = self._form.kind(head, marker, self._schemas)
        if kind == "arguments" and self._calls:
            return (yield from read_arguments(self._feed, self._sink, name, self.ends))
        if kind == "call" and self._calls and self._form.calls is not None:
            body, calls = Feed(), self._form.calls
            found = marker if marker in calls.opens else None
            reading = read_content(body, self._sink, calls, self._schemas, found=found)
            return (yield from within(self._feed, self.ends, body, reading))
        if kind == "text" or not self._reasons:
            return (yield from self._feed.until(self.ends, self._sink.say))
        return (yield from self.read_thought())

    def read_thought(self) -> Reading[str | None]:
        self._sink.begin_reasoning()
        found = yield from self._feed.until(self.ends, self._sink.think)
        self._sink.end_reasoning()
        return found

    def read_unmarked(self, head: list[str], *, is_first: bool) -> Reading[None]:
        """Read the body of a message that lacks the marker before it: the text behind the words of its header."""
        words = _WORDS.match(head[-1])
        rest = head[-1][words.end() :] if words else ""
        if _recipient_of(head):
            is_body = rest.startswith("{")
        else:
            is_body = _channel_of(head) in _CHANNELS or (is_first and len(head) == 1)
        if is_body and rest:
            body = Feed()
            body.add(rest)
            body.end()
            reader = _Reader(body, self._sink, self._form, self._schemas, self._reasons, self._calls)
            yield from reader.read_body(head, "")


def ends_in_thought(text: str) -> bool:
    """Return whether a prompt of gpt-oss ends inside a body in the analysis channel that has no recipient."""
    _, opening, rest = text.rpartition(HARMONY.thought)
    header, message, _ = rest.partition("<|message|>")
    return bool(opening and message) and "to=" not in header and not any(end in rest for end in HARMONY.ends)


def _channel_of(head: list[str]) -> str:
    part = next((part for part in head if part.startswith(_CHANNEL)), "")
    return next(iter(part.removeprefix(_CHANNEL).split()), "")


def _recipient_of(head: list[str]) -> str:
    return next((match[1] for part in head if (match := _RECIPIENT.search(part))), "")


def _of_harmony(head: list[str], marker: str, schemas: Schemas) -> tuple[Kind, str]:
    recipient = _recipient_of(head)
    name = recipient.removeprefix("functions.")
    if name not in schemas and name.removesuffix("json") in schemas:
        # The space before the word for the body's type is missing.
        name = name.removesuffix("json")
    if is_name(name) and (name != recipient or name in schemas):
        return "arguments", name
    return ("thought" if recipient or _channel_of(head) == "analysis" else "text"), ""


def _of_muse(head: list[str], marker: str, schemas: Schemas) -> tuple[Kind, str]:
    kinds: dict[str, Kind] = {"": "text", "user": "text", "self": "thought"}
    return kinds.get(_recipient_of(head), "call"), ""


def _of_inkling(head: list[str], marker: str, schemas: Schemas) -> tuple[Kind, str]:
    kinds: dict[str, Kind] = {"<|content_thinking|>": "thought", "<|content_invoke_tool_json|>": "call"}
    return kinds.get(marker, "text"), ""


_HARMONY_ENDS = ("<|end|>", "<|start|>", _CHANNEL, "<|call|>", "<|return|>")
HARMONY = Messages(
    "<|start|>",
    bodies=("<|message|>",),
    ends=_HARMONY_ENDS,
    kind=_of_harmony,
    thought=f"{_CHANNEL}analysis",
    thought_heads=("<|message|>", "to=", *_HARMONY_ENDS),
    parts=(_CHANNEL, "<|constrain|>"),
)
_MUSE_ENDS = ("<|eom|>", "<|eot|>", "<|start|>")
_INKLING_BODIES = (
    "<|content_text|>",
    "<|content_thinking|>",
    "<|content_invoke_tool_json|>",
    "<|content_invoke_tool_text|>",
    "<|content_tool_error|>",
)
MESSAGES: Mapping[str, Messages] = {
    "harmony": HARMONY,
    "muse": Messages(
        "<|start|>",
        bodies=("<|message|>",),
        ends=_MUSE_ENDS,
        kind=_of_muse,
        thought="to=self<|message|>",
        calls=TaggedCalls(
            Layout(
                ("<atem:function_calls>\n", "</atem:function_calls>"),
                ('<atem:invoke name="', '">\n', "</atem:invoke>\n"),
                ('<atem:parameter name="', '">', "</atem:parameter>\n"),
            )
        ),
    ),
    "inkling": Messages(
        "<|message_model|>",
        bodies=_INKLING_BODIES,
        ends=("<|end_message|>", "<|content_model_end_sampling|>", "<|message_model|>", *_INKLING_BODIES),
        kind=_of_inkling,
        thought="<|content_thinking|>",
        calls=JsonCalls(JsonLayout("<|content_invoke_tool_json|>")),
    ),
}
