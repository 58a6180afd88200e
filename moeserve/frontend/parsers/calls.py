"""The shapes in which models write calls: JSON between markers, and a pair of tags for each argument.

Values in tags (Qwen3-Coder, MiniMax, GLM) are plain text, so the tool's schema decides which are strings. Such a call
is reported whole, when its tag closes; one that was cut stays text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import msgspec

from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Sink, drop, read_value

# The JSON schemas of the arguments, by the name of the tool; None where a tool has none.
Schemas = Mapping[str, dict[str, Any] | None]

_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
}
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


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
    def is_bare(self) -> bool:
        """True if an answer that begins with a JSON object may be a call."""

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        """Read the calls after `marker`, which was read, and report them; show text that is no call.

        An empty marker stands for the beginning of an answer, where calls must name tools of `schemas`.

        Return a marker of `opens` that was read and begins more calls, or None.
        """


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


def read_objects(feed: Feed, sink: Sink, known: Collection[str] | None) -> Reading[bool]:
    """Read calls one after the other, with commas, semicolons or a list's brackets around them.

    Return whether one was reported; if `sink.in_call`, the last one's arguments are broken and continue. `feed.kept`
    then has the text after the last whole call.
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
    """Read the JSON of a call's arguments up to a marker of `end`, and report it as it comes. Return that marker.

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
        name, found = yield from feed.text_until(self._names)
        if found == "[CALL_ID]":
            found = yield from feed.until(self._ids, drop)
        called = name.strip()
        if found not in ("[ARGS]", "{") or not called or any(char.isspace() for char in called):
            sink.say_marker(marker)
            sink.say(before + name)
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
                found = yield from self._call(header.strip(), feed, sink)
            if found is None or found == self.section_end:
                return None

    def _call(self, header: str, feed: Feed, sink: Sink) -> Reading[str | None]:
        if self._has_ids:
            name = header.removeprefix("functions.").rpartition(":")[0] or header
            return (yield from read_arguments(feed, sink, name, self._end, header))
        if header != "function":
            return (yield from read_arguments(feed, sink, header, self._end))
        # The older form: the call's kind before the separator, then its name, and the JSON in a fence.
        line, _ = yield from feed.text_until(_LINE_END)
        yield from feed.space()
        yield from feed.through("```json")
        return (yield from read_arguments(feed, sink, line.strip(), self._end))


_LINE_END = Markers("\n")


class TaggedCalls:
    """`<function=NAME><parameter=KEY>value</parameter></function>`, in a region's tags or without them."""

    ends_reasoning = False
    is_bare = False

    def __init__(self, *, region: tuple[str, str], call: tuple[str, str], parameter: tuple[str, str]) -> None:
        """Take the opening and closing tags; the opening ones of call and parameter without name and `>`."""
        self.opens = (region[0], call[0])
        self.others = (region[1], call[1], *parameter)
        self._call_open, self._region_end = call[0], region[1]
        self._parameter_open, self._parameter_end = parameter
        self._between = Markers(call[0], region[1])
        self._inside = Markers(parameter[0], call[1], region[1])
        self._value_end = Markers(parameter[1])
        self._after_value = (parameter[0], call[1], region[1])

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        if marker == self._call_open:
            if (yield from self._call(feed, sink, schemas, must_be_known=True)):
                # Some models leave out a region's begin and write its end.
                yield from feed.space()
                yield from feed.through(self._region_end)
            return None
        feed.keep()
        yield from feed.space()
        if not (yield from feed.through(self._call_open)):
            sink.say_marker(marker)
            sink.say(feed.kept())
            return None
        before = feed.kept().removesuffix(self._call_open)
        found: str | None = self._call_open
        while found == self._call_open and (yield from self._call(feed, sink, schemas, (marker, before))):
            marker = before = ""
            found = yield from feed.until(self._between, drop)
        return None

    def _call(
        self,
        feed: Feed,
        sink: Sink,
        schemas: Schemas,
        before: tuple[str, str] = ("", ""),
        *,
        must_be_known: bool = False,
    ) -> Reading[bool]:
        """Read one call behind the beginning of its tag. If it is none, show it as text and return False.

        before: the region's marker and the space after it, to be shown first.
        """
        feed.keep()
        name, found = yield from feed.text_until(_TAG_END)
        called = _plain(name)
        is_call = found is not None and called != "" and (called in schemas or not must_be_known)
        arguments: dict[str, Any] = {}
        while is_call:
            found = yield from feed.until(self._inside, drop)
            if found == self._parameter_open:
                key, _ = yield from feed.text_until(_TAG_END)
                value = yield from _read_value(feed, self._value_end, self._after_value)
                found = None if value is None else self._parameter_end
                if value is not None:
                    parameter = _plain(key)
                    arguments[parameter] = typed(_trim_lines(value), schemas.get(called), parameter)
            is_call = found is not None
            if found != self._parameter_end:
                break
        read = feed.kept()
        if not is_call:
            sink.say_marker(before[0])
            sink.say(before[1])
            sink.say_marker(self._call_open)
            sink.say(read)
            return False
        if found == self._region_end:
            feed.put_back(self._region_end)
        sink.add_call(called, json.dumps(arguments, ensure_ascii=False))
        return True


class GlmCalls:
    """`<tool_call>NAME<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    opens = ("<tool_call>",)
    others = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    ends_reasoning = False
    is_bare = False

    def __init__(self) -> None:
        self._next = Markers("<arg_key>", "</tool_call>")
        self._key_end = Markers("</arg_key>", "</tool_call>")
        self._value_end = Markers("</arg_value>")

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        feed.keep()
        name, found = yield from feed.text_until(self._next)
        called = name.strip()
        schema, arguments = schemas.get(called), dict[str, Any]()
        while found == "<arg_key>":
            key, found = yield from feed.text_until(self._key_end)
            if found == "</arg_key>":
                yield from feed.space()
                yield from feed.through("<arg_value>")
                value = yield from _read_value(feed, self._value_end, ("<arg_key>", "</tool_call>"))
                found = None
                if value is not None:
                    arguments[key.strip()] = typed(value, schema, key.strip())
                    found = yield from feed.until(self._next, drop)
        read = feed.kept()
        if found is None or not called or any(char.isspace() for char in called):
            sink.say_marker(marker)
            sink.say(read)
        else:
            sink.add_call(called, json.dumps(arguments, ensure_ascii=False))
        return None


_TAG_END = Markers(">")


def _read_value(feed: Feed, end: Markers, after: tuple[str, ...]) -> Reading[str | None]:
    """Read a value and its closing tag; return the value, None if the tag does not come.

    A tag behind which the call does not go on, with one of `after`, is part of the value.
    """
    value: list[str] = []
    while True:
        found = yield from feed.until(end, value.append)
        if found is None:
            return None
        space: list[str] = []
        yield from feed.space(space.append)
        if (yield from feed.sees(after)):
            return "".join(value)
        value += [found, *space]


def _plain(name: str) -> str:
    """Return a tag's name without spaces and quotes."""
    return name.strip().strip("\"'")


def _trim_lines(value: str) -> str:
    """Return a value without the line breaks beside its tags, one on each side."""
    return value.removeprefix("\n").removesuffix("\n")


def typed(value: str, schema: dict[str, Any] | None, name: str) -> Any:
    """Return an argument's value in the type that the tool's schema gives it; text where nothing else fits."""
    types = _types_of(schema, name)
    if types == {"string"}:
        return value
    word = value.strip()
    read = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else decode(word)
    if read is None and word not in ("null", "None"):
        return value
    if not types:
        return value if isinstance(read, str) else read
    for kind in types - {"string"}:
        expected = _TYPES.get(kind)
        if expected and isinstance(read, expected) and (kind == "boolean" or not isinstance(read, bool)):
            return read
    return value if "string" in types or isinstance(read, str) else read


def _types_of(schema: dict[str, Any] | None, name: str) -> set[str]:
    """Return the JSON types of a property; none where the schema does not say."""
    properties = (schema or {}).get("properties")
    found = properties.get(name) if isinstance(properties, dict) else None
    types: set[str] = set()
    waiting = [found] if isinstance(found, dict) else []
    while waiting:
        part = waiting.pop()
        kind = part.get("type")
        types |= {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
        for value in part.get("enum", ()) if isinstance(part.get("enum"), list) and not kind else ():
            types.add("string" if isinstance(value, str) else "number" if isinstance(value, int | float) else "null")
        for word in ("anyOf", "oneOf", "allOf"):
            branches = part.get(word)
            if isinstance(branches, list):
                waiting += [branch for branch in branches if isinstance(branch, dict)]
    return types


def read_call(feed: Feed, sink: Sink, known: Collection[str] | None) -> Reading[bool]:
    """Read `{"name": ..., "arguments": {...}}` and report it as a call, its arguments as they come.

    Return False where it is no such object, or names no tool of `known`: then either nothing was reported, or the call
    is still open and the remainder belongs to its broken arguments. The keys stand in any order; other keys, and
    anything invalid behind the arguments, are skipped.
    """
    if not (yield from feed.through("{")):
        return False
    name, arguments, is_told = "", "", False
    char = yield from feed.space()
    while char == '"':
        key = yield from _read_key(feed)
        char = yield from feed.space()
        is_arguments = key in ("arguments", "parameters") and not is_told
        if is_arguments and char == "{" and name:
            sink.open_call(name)
            if not (yield from read_value(feed, sink.arguments)):
                return False
            sink.close_call()
            is_told = True
        else:
            pieces: list[str] = []
            if not (yield from read_value(feed, pieces.append)):
                return is_told
            if is_arguments:
                arguments = "".join(pieces)
            elif key == "name" and not (name := _name_of("".join(pieces), known)):
                return is_told
        char = yield from feed.space()
        if char == ",":
            feed.take(1)
            char = yield from feed.space()
    if char == "}":
        feed.take(1)
        if name and not is_told:
            sink.add_call(name, plain_arguments(arguments))
            is_told = True
    return is_told


def _read_key(feed: Feed) -> Reading[str]:
    """Read a key and the colon after it. Return an empty key where there is none."""
    pieces: list[str] = []
    if not (yield from read_value(feed, pieces.append)):
        return ""
    yield from feed.space()
    if not (yield from feed.through(":")):
        return ""
    return str(decode("".join(pieces)))


def _name_of(text: str, known: Collection[str] | None) -> str:
    name = decode(text)
    return name if isinstance(name, str) and (known is None or name in known) else ""


def plain_arguments(text: str) -> str:
    """Return the JSON of arguments: some models write it into a string, or null for none."""
    value = decode(text) if text else None
    return "" if value is None else value if isinstance(value, str) else text


def decode(text: str) -> Any:
    """Return the value of JSON, None for text that is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
