"""Calls whose arguments stand in tags: `<function=NAME><parameter=KEY>value</parameter></function>`.

Values in tags are plain text, so the tool's schema decides which are strings. Such a value of a known tool is reported
as it comes; a call is reported from the first one on, and one without any when it ends. Before that a call that is cut
stays text.

Values may hold tags as text. A tag ends a value where the call goes on behind it. Models also leave closing tags out:
then the value ends where the next argument of the schema begins, or where the call ends and nothing but calls follows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from moeserve.frontend.parsers.calls import JsonCalls, JsonLayout, is_name
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Say, Sink, drop
from moeserve.frontend.parsers.values import Properties, Schemas

_TAGS = re.compile(r"<[^<>\s]*>|>")
_HEAD = re.compile(r"[^<>\n]*")
_QUOTED = re.compile(r"""\s*(["'])(.*?)\1""")


@dataclass(frozen=True, slots=True)
class Layout:
    """What templates write around names and values. In a model's text the white space between tags is free.

    region: around calls, or two empty texts. call: before the name, behind it, and behind the arguments. argument:
    before the key, behind it, and behind the value. between: two calls. is_loose: some models leave out line breaks.
    """

    region: tuple[str, str]
    call: tuple[str, str, str]
    argument: tuple[str, str, str]
    between: str = ""
    is_loose: bool = False


class TaggedCalls:
    """Calls with arguments in tags, by their layout."""

    ends_reasoning = False
    is_bare = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._region_open, self._region_end = (text.strip() for text in layout.region)
        self._call_open, self._name_ends, self._call_end = _tags_of(layout.call)
        self._key_open, self._key_ends, self._value_end = _tags_of(layout.argument)
        # Such a line break belongs to the layout, not to the value.
        self._trims = layout.argument[1].endswith("\n")
        self._begins_line = self._key_open[-1] != ">" and layout.argument[2].endswith("\n")
        self.opens = tuple(filter(None, (self._region_open, self._call_open)))
        ends = tuple(filter(None, (self._region_end, self._call_end)))
        tags = (self._key_open, *self._key_ends, self._value_end)
        self.others = (*ends, *(tag for tag in tags if tag != ">"))
        self._inside = (self._key_open, *ends, *self.opens)
        self._any_inside = Markers(*self._inside)
        self._in_value = Markers(self._value_end, self._key_open, self._call_end)
        self._json = JsonCalls(JsonLayout(layout.region[0]), close=self._region_end) if self._region_open else None

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        found, before = marker, ""
        if marker == self._region_open and self._json is not None:
            feed.keep()
            char = yield from feed.space()
            if char and char in "{[":
                feed.back()
                return (yield from self._json.read(marker, feed, sink, schemas))
            before = feed.kept()
            found = yield from feed.through(self._call_open)
            if not found:
                sink.say_marker(marker)
                sink.say(before)
                return None
        # Without a region around it, only the name of a tool makes a call.
        must_be_known = marker == self._call_open and bool(self._region_open)
        while found == self._call_open:
            feed.keep()
            end = yield from self._call(feed, sink, schemas, must_be_known=must_be_known)
            said = feed.kept()
            if sink.in_call:
                sink.close_call()
                return None
            if not end:
                if found != marker:
                    sink.say_marker(marker)
                    sink.say(before)
                sink.say_marker(found)
                sink.say(said)
                return None
            marker, before, found = "", "", end
            if end == self._call_end:
                # Some models leave out a region's begin and write its end.
                space: list[str] = []
                yield from feed.space(space.append)
                found = yield from feed.through(*filter(None, (self._call_open, self._region_end)))
                if not found:
                    sink.say("".join(space))
        return found if found in self.opens else None

    def _call(self, feed: Feed, sink: Sink, schemas: Schemas, *, must_be_known: bool) -> Reading[str]:
        """Read one call behind its opening tag, up to its end or to the tag of another part, and return that tag.

        The result is empty for no call, and for one that was cut, which `sink.in_call` then.
        """
        head = yield from _read_head(feed, self._name_ends)
        name = "" if head is None else _split(head)[0]
        if not is_name(name) or (must_be_known and name not in schemas):
            return ""
        call = _Call(sink, name, schemas)
        yield from feed.space()
        found = yield from feed.through(*self._inside)
        while found == self._key_open:
            head = yield from _read_head(feed, self._key_ends)
            if head is None:
                # A broken tag; the arguments behind it count.
                found = (yield from feed.until(self._any_inside, drop)) or ""
                continue
            found = yield from self._argument(feed, call, *_split(head))
            if found == self._value_end:
                yield from feed.space()
                found = yield from feed.through(*self._inside)
        if found:
            call.close()
        return found

    def _argument(self, feed: Feed, call: _Call, key: str, attributes: str) -> Reading[str]:
        """Read the value of an argument and add it to the call. Return the tag that ended it, empty for none."""
        value: list[str] = []
        is_text, is_again = call.is_text(key), key in call.keys
        if is_text and not is_again:
            call.begin_text(key)
        lines = _Lines(drop if is_again else call.add_text if is_text else value.append, self._trims)
        found = yield from self._value(feed, lines, call)
        if found and not is_again:
            if is_text:
                call.end_text()
            else:
                call.add(key, "".join(value))
        return found

    def _value(self, feed: Feed, lines: _Lines, call: _Call) -> Reading[str]:
        """Read a value; return the tag that ended it, which was read, empty at the end of the text."""
        while True:
            found = yield from feed.until(self._in_value, lines.push)
            if found is None:
                return ""
            if found == self._value_end:
                is_end = yield from feed.ahead(self._goes_on(feed))
            elif found == self._call_end:
                is_end = yield from feed.ahead(self._calls_follow(feed))
            else:
                is_end = lines.at_start or not self._begins_line
                is_end = is_end and (yield from feed.ahead(self._argument_follows(feed, call)))
            if is_end:
                lines.end(is_closed=found == self._value_end)
                return found
            lines.push(found)

    def _goes_on(self, feed: Feed) -> Reading[bool]:
        """Return whether the call goes on, or the text is over."""
        return not (yield from feed.space()) or (yield from feed.through(*self._inside)) != ""

    def _calls_follow(self, feed: Feed) -> Reading[bool]:
        """Return whether nothing but calls follows a call."""
        char = yield from feed.space()
        if char and self._region_end and (yield from feed.through(self._region_end)):
            char = yield from feed.space()
        return not char or (yield from feed.through(*self.opens)) != ""

    def _argument_follows(self, feed: Feed, call: _Call) -> Reading[bool]:
        """Return whether the tag that was read begins an argument that the tool has and the call lacks."""
        head = yield from _read_head(feed, self._key_ends)
        return head is not None and call.lacks(_split(head)[0])


class _Call:
    """Writes the arguments of one call as JSON: into the sink from the first text of a known tool on."""

    def __init__(self, sink: Sink, name: str, schemas: Schemas) -> None:
        self.keys: set[str] = set()
        self._sink, self._name = sink, name
        self._is_known = name in schemas
        self._properties = Properties(schemas.get(name))
        self._before = ["{"]
        self._is_open = False

    def lacks(self, key: str) -> bool:
        """Return whether the tool has an argument that the call has not."""
        return key in self._properties and key not in self.keys

    def is_text(self, key: str) -> bool:
        return self._properties.types(key) == {"string"}

    def add(self, key: str, value: str) -> None:
        self._begin(key)
        self._write(_json(self._properties.typed(key, value)))

    def begin_text(self, key: str) -> None:
        self._begin(key)
        self._write('"')
        if self._is_known and not self._is_open:
            self._is_open = True
            self._sink.open_call(self._name)
            self._sink.arguments("".join(self._before))

    def add_text(self, piece: str) -> None:
        self._write(_json(piece)[1:-1])

    def end_text(self) -> None:
        self._write('"')

    def close(self) -> None:
        self._write("}")
        if self._is_open:
            self._sink.close_call()
        else:
            self._sink.add_call(self._name, "".join(self._before))

    def _begin(self, key: str) -> None:
        self._write(f"{', ' if self.keys else ''}{_json(key)}: ")
        self.keys.add(key)

    def _write(self, text: str) -> None:
        if self._is_open:
            self._sink.arguments(text)
        else:
            self._before.append(text)


class _Lines:
    """Passes a value on, without the line breaks beside its tags if `trims`. at_start: at the start of a line."""

    def __init__(self, say: Say, trims: bool) -> None:
        self.at_start = True
        self._say = say
        self._trims = self._drops = trims
        self._held = ""

    def push(self, piece: str) -> None:
        self.at_start = piece.endswith("\n")
        if self._drops:
            self._drops = False
            piece = piece.removeprefix("\n")
        text = self._held + piece
        self._held = "\n" if text.endswith("\n") else ""
        self._say(text.removesuffix("\n"))

    def end(self, *, is_closed: bool) -> None:
        """End the value. is_closed: by its closing tag; otherwise a line break before the next tag belongs to that."""
        if is_closed and not self._trims:
            self._say(self._held)


def _tags_of(parts: tuple[str, str, str]) -> tuple[str, tuple[str, ...], str]:
    """Return the opening tag without a quote, the tags that end what follows it, and the closing tag."""
    return parts[0].strip().rstrip('"'), tuple(_TAGS.findall(parts[1])), parts[2].strip()


def _read_head(feed: Feed, ends: tuple[str, ...]) -> Reading[str | None]:
    """Read a name with its attributes and the tags behind it; None where other text follows."""
    head = yield from feed.run(_HEAD)
    for end in ends:
        yield from feed.space()
        if not (yield from feed.through(end)):
            return None
    return head


def _split(head: str) -> tuple[str, str]:
    """Return a name, which may be quoted, and the attributes behind a quoted one."""
    quoted = _QUOTED.match(head)
    return (quoted[2], head[quoted.end() :]) if quoted else (head.strip(), "")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
