"""Calls whose arguments models write as JSON: objects between markers, and JSON behind a name."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Sink, drop, read_value
from moeserve.frontend.parsers.values import Schemas, decode, plain_arguments

# Tools have no other names; text that is none names no tool.
NAME = re.compile(r"[A-Za-z0-9_.-]*")
_NAME_KEYS = frozenset({"name", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args"})
# Where nothing marks a call, an object that begins with any other key is none.
_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | {"type", "id", "index", "function", "tool_call_id"}
_FENCED = re.compile(r"\w*")
_CLOSERS = re.compile(r"[\s\]}`]*")
_NUMBER = re.compile(r"[:.][0-9]+$")

# What stood where calls may: none, whole ones, or such whose last goes on with something invalid.
Found = Literal["none", "whole", "cut"]


class CallShape(Protocol):
    """The spelling of calls by a family of models."""

    @property
    def opens(self) -> tuple[str, ...]:
        """The markers that begin calls."""

    @property
    def others(self) -> tuple[str, ...]: ...

    @property
    def ends_reasoning(self) -> bool:
        """True if calls also begin inside reasoning, since their markers are tokens that no text has."""

    @property
    def bare(self) -> str:
        """The characters that begin a call without any marker, if it names a tool."""

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        """Read the calls after `marker`, which was read, and report them; show text that is no call.

        An empty marker stands for none, before a character of `bare`; calls must name tools of `schemas` then.

        Return a marker of `opens` that was read and begins more calls, or None.
        """


@dataclass(frozen=True, slots=True)
class JsonLayout:
    """The texts that templates write around calls."""

    before: str
    after: str = ""  # behind the last
    between: str = ", "
    object: str = '{"name": "NAME", "arguments": '  # before each call's arguments; NAME stands for the tool's name

    @property
    def is_keyed(self) -> bool:
        """True if a call's name is the only key of its object."""
        return self.object.startswith('{"NAME"')


class JsonCalls:
    """Objects with name and arguments, one or several, perhaps in a list, between two markers or behind one.

    also: other markers that begin calls. is_bare: also without a marker.
    """

    def __init__(
        self, layout: JsonLayout, *also: str, close: str = "", is_bare: bool = False, ends_reasoning: bool = False
    ) -> None:
        """close: the marker behind calls, if the layout has none."""
        self.layout = layout
        self.ends_reasoning = ends_reasoning
        self.opens = tuple(filter(None, (layout.before.rstrip("[ \n"), *also)))
        self.others = tuple(filter(None, (close or layout.after.lstrip("] \n"),)))
        self.bare = "{" if is_bare else ""
        self._end = Markers(*self.opens, *self.others)

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        told = yield from read_objects(feed, sink, None if marker else schemas, is_keyed=self.layout.is_keyed)
        if told == "none" and not marker:
            feed.back()
            yield from read_value(feed, sink.say, is_raw=True)
            return None
        rest = feed.kept()
        if told == "none":
            sink.say_marker(marker)
            sink.say(rest)
        elif told == "cut" and (self.others or sink.in_call):
            found = yield from feed.until(self._end, sink.arguments if sink.in_call else drop)
            if sink.in_call:
                sink.close_call()
            return found if found in self.opens else None
        elif not self.others:
            sink.say(rest)
        else:
            # Some models write a bracket too many, others leave the last marker out.
            more = yield from feed.run(_CLOSERS)
            if not (yield from feed.through(*self.others)):
                sink.say(rest + "".join(filter(str.isspace, more)))
        return None


def read_objects(feed: Feed, sink: Sink, known: Collection[str] | None, *, is_keyed: bool = False) -> Reading[Found]:
    """Read calls one after the other, with commas, semicolons or a list's brackets around them, perhaps in a fence.

    `feed.kept` then has the text after the last whole call. If `sink.in_call`, its broken arguments continue.
    """
    told: Found = "none"
    is_list = False
    feed.keep()
    while True:
        char = yield from feed.space()
        if char == "{":
            found = yield from (_read_keyed(feed, sink, known) if is_keyed else read_call(feed, sink, known))
            if found == "none":
                return told
            feed.kept()
            feed.keep()
            told = found
            if found == "cut":
                return found
        elif char == "[" and told == "none" and not is_list:
            feed.take(1)
            is_list = True
        elif char == "]" and told != "none" and is_list:
            feed.take(1)
            feed.kept()
            feed.keep()
            return told
        elif told != "none" and char and char in ",;":
            feed.take(1)
        elif told != "none" or not (yield from feed.through("```")):
            return told
        else:
            yield from feed.run(_FENCED)


def read_call(feed: Feed, sink: Sink, known: Collection[str] | None, *, is_inner: bool = False) -> Reading[Found]:
    """Read `{"name": ..., "arguments": {...}}` and report it as a call, its arguments as they come.

    The result is `none` where it is no such object, or names no tool of `known`; then nothing was reported. The keys
    stand in any order, perhaps in an object that is the value of `function`; other keys are skipped.
    """
    if not (yield from feed.through("{")):
        return "none"
    name, arguments, is_told = "", "", False
    char = yield from feed.space()
    while char == '"':
        key = yield from _read_key(feed)
        if known is not None and key not in _KEYS and not is_told:
            return "none"
        char = yield from feed.space()
        is_arguments = key in _ARGUMENT_KEYS and not is_told
        if is_arguments and char == "{" and name:
            sink.open_call(name)
            if not (yield from read_value(feed, sink.arguments)):
                return "cut"
            sink.close_call()
            is_told = True
        elif key == "function" and char == "{" and not (is_told or is_inner):
            found = yield from read_call(feed, sink, known, is_inner=True)
            if found != "whole":
                return found
            is_told = True
        else:
            pieces: list[str] = []
            if not (yield from read_value(feed, pieces.append)):
                return "cut" if is_told else "none"
            if is_arguments:
                arguments = "".join(pieces)
            elif key in _NAME_KEYS and not is_told and not (name := _checked(decode("".join(pieces)), known)):
                return "none"
        char = yield from feed.space()
        if char == ",":
            feed.take(1)
            char = yield from feed.space()
    if char == "}":
        feed.take(1)
    if is_told:
        return "whole" if char == "}" else "cut"
    if char != "}" or not name:
        return "none"
    sink.add_call(name, plain_arguments(arguments))
    return "whole"


def _read_keyed(feed: Feed, sink: Sink, known: Collection[str] | None) -> Reading[Found]:
    """Read `{"NAME": {...}}` and report it; see `read_call`."""
    told: Found = "none"
    separators = "{"
    while (yield from feed.through(*separators)):
        yield from feed.space()
        name = _checked((yield from _read_key(feed)), known)
        if not name or (yield from feed.space()) != "{":
            return "none" if told == "none" else "cut"
        sink.open_call(name)
        if not (yield from read_value(feed, sink.arguments)):
            return "cut"
        sink.close_call()
        told, separators = "whole", ","
        yield from feed.space()
    return "whole" if (yield from feed.through("}")) else "none" if told == "none" else "cut"


def _read_key(feed: Feed) -> Reading[str]:
    """Read a key and the colon after it. Return an empty key where there is none."""
    pieces: list[str] = []
    if not (yield from read_value(feed, pieces.append)):
        return ""
    yield from feed.space()
    if not (yield from feed.through(":")):
        return ""
    return str(decode("".join(pieces)))


def _checked(name: object, known: Collection[str] | None) -> str:
    """Return a name that a call may have, empty for any other value."""
    return name if isinstance(name, str) and is_name(name) and (known is None or name in known) else ""


def is_name(text: str) -> bool:
    return text != "" and NAME.fullmatch(text) is not None


def read_arguments(feed: Feed, sink: Sink, name: str, end: Markers, call_id: str = "") -> Reading[str | None]:
    """Read the JSON of a call's arguments up to a marker of `end`, and report it as it comes. Return that marker.

    Arguments that are no JSON object are given as they are.
    """
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
    bare = ""

    def __init__(self) -> None:
        self._objects = JsonCalls(JsonLayout("[TOOL_CALLS]"))
        self._ids = Markers("[ARGS]", "[TOOL_CALLS]")
        self._begin = Markers("[TOOL_CALLS]")

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        feed.keep()
        char = yield from feed.space()
        if (yield from feed.through(marker)):
            feed.kept()
            return marker
        if char in ("[", "{"):
            feed.back()
            return (yield from self._objects.read(marker, feed, sink, schemas))
        name = yield from feed.run(NAME)
        yield from feed.space()
        said = feed.kept()
        found = yield from feed.through("[CALL_ID]", "[ARGS]")
        if found == "[CALL_ID]":
            found = (yield from feed.until(self._ids, drop)) or ""
        if not name or not (found == "[ARGS]" or (not found and (yield from feed.peek()) == "{")):
            sink.say_marker(marker)
            sink.say(said)
            if found not in self.opens:
                sink.say_marker(found)
            return found if found in self.opens else None
        sink.open_call(name)
        if (yield from read_value(feed, sink.arguments)):
            sink.close_call()
            return None
        again = yield from feed.until(self._begin, sink.arguments)
        sink.close_call()
        return again


class MarkedCalls:
    """A section of calls, each with a header, a marker, and JSON: DeepSeek's and Kimi's form."""

    ends_reasoning = True
    bare = ""

    def __init__(self, *, section: tuple[str, str], call: tuple[str, str], separator: str, has_ids: bool) -> None:
        """section, call: where they begin and end. has_ids: the header is the call's id, `functions.NAME:NUMBER`."""
        (self.section_open, self.section_end), (self.call_open, self.call_end) = section, call
        self.separator = separator
        self.opens = (self.section_open, self.call_open)
        self.others = (self.section_end, self.call_end, separator)
        self._has_ids = has_ids
        self._between = Markers(self.call_open, self.section_end)
        self._header = Markers(separator, self.call_end, self.section_end)
        self._end = Markers(self.call_end, self.section_end)

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        found: str | None = marker
        while True:
            if found != self.call_open:
                text, found = yield from feed.text_until(self._between)
                if found != self.call_open:
                    sink.say(text)
                    return None
            header, found = yield from feed.text_until(self._header)
            if found != self.separator:
                sink.say(header)
            else:
                found = yield from self._call(header.strip(), feed, sink, schemas)
            if found is None or found == self.section_end:
                return None

    def _call(self, header: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        name, call_id = header, ""
        if self._has_ids:
            name = header.removeprefix("functions.")
            if name not in schemas and (number := _NUMBER.search(name)):
                name, call_id = name[: number.start()], header
        elif header == "function":
            # The older form: the call's kind before the separator, then its name, and the JSON in a fence.
            line, _ = yield from feed.text_until(_LINE_END)
            yield from feed.space()
            yield from feed.through("```json")
            name = line.strip()
        if not is_name(name):
            sink.say_marker(self.call_open)
            sink.say(header)
            sink.say_marker(self.separator)
            return (yield from feed.until(self._end, sink.say))
        return (yield from read_arguments(feed, sink, name, self._end, call_id))


_LINE_END = Markers("\n")
