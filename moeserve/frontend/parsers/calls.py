"""The contract of the shapes in which models write calls, and the form of all that are JSON between markers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from moeserve.frontend.parsers.feed import Feed, Markers, Reading, drop
from moeserve.frontend.parsers.json_text import read_call, read_value
from moeserve.frontend.parsers.parsed import Sink

# The JSON schemas of the arguments, by the name of the tool; None where a tool has none.
Schemas = Mapping[str, dict[str, Any] | None]


class CallShape(Protocol):
    """The spelling of calls by a family of models."""

    @property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin calls."""
        ...

    @property
    def others(self) -> tuple[str, ...]:
        """The other markers."""
        ...

    @property
    def ends_reasoning(self) -> bool:
        """True if calls also begin inside reasoning, since their markers are tokens that no text has."""
        ...

    @property
    def is_bare(self) -> bool:
        """True if an answer that begins with a JSON object may be a call."""
        ...

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        """Read the calls after `marker`, which was read, and tell them; show text that is no call.

        An empty marker stands for the beginning of an answer, where calls must name tools of `schemas`.

        Return a marker of `opens` that was read and begins more calls, or None.
        """
        ...


class JsonCalls:
    """Objects with name and arguments, one or several, perhaps in a list, between two markers or behind one.

    is_bare: also at the beginning of an answer, without a marker.
    """

    ends_reasoning = False

    def __init__(self, *opens: str, close: str = "", is_bare: bool = False) -> None:
        self.opens = opens
        self.others = (close,) if close else ()
        self.is_bare = is_bare
        self._begin = Markers(*opens)
        self._end = Markers(*opens, close) if close else None

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        told = yield from read_objects(feed, sink, None if marker else schemas)
        rest = feed.kept()
        if not told:
            sink.say_marker(marker)
            sink.say(rest)
            return None
        if self._end is None and not sink.in_call:
            sink.say(rest)
            return None
        found = yield from feed.until(self._end or self._begin, sink.arguments if sink.in_call else drop)
        if sink.in_call:
            sink.close_call()
        return found if found in self.opens else None


def read_objects(feed: Feed, sink: Sink, known: Collection[str] | None = None) -> Reading[bool]:
    """Read calls one after the other, with commas, semicolons or a list's brackets around them.

    Return whether one was told; if `sink.in_call`, the last one's arguments are broken and go on. `feed.kept` then has
    the text after the last whole call.
    """
    told = is_list = False
    feed.keep()
    while True:
        char = yield from feed.space()
        if char == "{":
            if not (yield from read_call(feed, sink, known)):
                return told or sink.in_call
            told = True
            feed.keep()
        elif char == "[" and not told:
            feed.take(1)
            is_list = True
        elif char == "]" and told and is_list:
            feed.take(1)
            feed.keep()
            return True
        elif told and char and char in ",;":
            feed.take(1)
        else:
            return told


def read_arguments(feed: Feed, sink: Sink, name: str, end: Markers, call_id: str = "") -> Reading[str | None]:
    """Read the JSON of a call's arguments up to a marker of `end`, told as it comes. Return that marker.

    Arguments that are no JSON object are given as they are; without a name all is text.
    """
    if not name:
        return (yield from feed.until(end, sink.say))
    sink.open_call(name, call_id)
    char = yield from feed.space()
    is_whole = False
    if char == "{":
        is_whole = yield from read_value(feed, sink.arguments)
    found = yield from feed.until(end, drop if is_whole else sink.arguments)
    sink.close_call()
    return found


class MistralCalls:
    """`[TOOL_CALLS]` before a list of objects, or before each call's name, `[ARGS]` and JSON."""

    opens = ("[TOOL_CALLS]",)
    others = ("[ARGS]", "[CALL_ID]")
    ends_reasoning = False
    is_bare = False

    def __init__(self) -> None:
        self._objects = JsonCalls("[TOOL_CALLS]")
        self._names = Markers("[ARGS]", "[CALL_ID]", "[TOOL_CALLS]", "{")
        self._ids = Markers("[ARGS]", "[TOOL_CALLS]")
        self._begin = Markers("[TOOL_CALLS]")

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        feed.keep()
        char = yield from feed.space()
        before = feed.kept()
        if char in ("[", "{"):
            return (yield from self._objects.read(marker, feed, sink, schemas))
        name: list[str] = [before]
        found = yield from feed.until(self._names, name.append)
        if found == "[CALL_ID]":
            found = yield from feed.until(self._ids, drop)
        called = "".join(name).strip()
        if found not in ("[ARGS]", "{") or not called or any(char.isspace() for char in called):
            sink.say_marker(marker)
            sink.say("".join(name))
            if found is not None and found not in self.opens:
                sink.say_marker(found)
            return found if found in self.opens else None
        if found == "{":
            feed.put_back("{")
        sink.open_call(called)
        if (yield from read_value(feed, sink.arguments)):
            sink.close_call()
            return None
        found = yield from feed.until(self._begin, sink.arguments)
        sink.close_call()
        return found


class MarkedCalls:
    """A section of calls, each with a header, a marker, and JSON: DeepSeek's and Kimi's form."""

    ends_reasoning = True
    is_bare = False

    def __init__(self, *, section: tuple[str, str], call: tuple[str, str], separator: str, has_ids: bool) -> None:
        """section, call: where they begin and end. has_ids: the header is the call's id, `functions.NAME:NUMBER`."""
        self.opens = (section[0], call[0])
        self.others = (section[1], call[1], separator)
        self._call_open, self._separator = call[0], separator
        self._has_ids = has_ids
        self._between = Markers(call[0], section[1])
        self._header = Markers(separator, call[1], section[1])
        self._end = Markers(call[1], section[1])

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        found: str | None = marker
        while True:
            if found != self._call_open:
                text: list[str] = []
                found = yield from feed.until(self._between, text.append)
                if found != self._call_open:
                    sink.say("".join(text))
                    return None
            header: list[str] = []
            found = yield from feed.until(self._header, header.append)
            if found != self._separator:
                sink.say("".join(header))
            else:
                found = yield from self._call("".join(header).strip(), feed, sink)
            if found is None or found == self.others[0]:
                return None

    def _call(self, header: str, feed: Feed, sink: Sink) -> Reading[str | None]:
        if self._has_ids:
            name = header.removeprefix("functions.").rpartition(":")[0] or header
            return (yield from read_arguments(feed, sink, name, self._end, header))
        if header != "function":
            return (yield from read_arguments(feed, sink, header, self._end))
        # The older form: the call's kind before the separator, then its name, and the JSON in a fence.
        line: list[str] = []
        yield from feed.until(_LINE_END, line.append)
        yield from feed.space()
        yield from feed.through("```json")
        return (yield from read_arguments(feed, sink, "".join(line).strip(), self._end))


_LINE_END = Markers("\n")
