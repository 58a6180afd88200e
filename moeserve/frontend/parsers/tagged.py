"""Calls whose arguments stand in tags: `<function=NAME><parameter=KEY>value</parameter></function>`.

Values in tags are plain text, so the tool's schema decides which are strings. Such a value of a known tool is reported
as it comes; a call is reported from the first one on, and one without any when it ends. Before that a call that is cut
stays text.

Values may hold tags as text. A tag ends a value where the call goes on behind it. Models also leave closing tags out:
then the value ends where the next argument of the schema begins, or where the call ends and nothing but calls follows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from html import unescape

from moeserve.frontend.parsers.calls import JsonCalls, JsonLayout, is_name, read_objects
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Say, Sink, drop
from moeserve.frontend.parsers.values import Properties, Schemas, encode

_TAGS = re.compile(r"<[^<>\s]*>|>")
_TAG_ENDS = re.compile(r"(?<=\w)>")
_HEAD = re.compile(r"[^<>\n]*")
_QUOTED = re.compile(r"""\s*(["'])(.*?)\1""")
# An attribute that says whether a value is text: DeepSeek's and Kimi's.
_KIND = re.compile(r'\b(?:string|type)="(\w+)"')
_TEXT_KINDS = frozenset({"true", "string"})


@dataclass(frozen=True, slots=True)
class Layout:
    """The texts that templates write around names and values. In a model's text the white space between tags is free.

    region: around calls, or two empty texts. call: before the name, behind it, and behind the arguments. argument:
    before the key, behind it, and behind the value. between: two calls. is_loose: some models leave out line breaks.
    kind: around the value's type, which may stand before the value.
    """

    region: tuple[str, str]
    call: tuple[str, str, str]
    argument: tuple[str, str, str]
    between: str = ""
    is_loose: bool = False
    kind: tuple[str, str] = ("", "")

    def suffixed(self, suffix: str) -> Layout:
        """Return this layout with a suffix in every tag."""

        def put(text: str) -> str:
            return _TAG_ENDS.sub(suffix + ">", text)

        (begin, end), (name, behind, close) = map(put, self.region), map(put, self.call)
        key, value, value_end = map(put, self.argument)
        return replace(self, region=(begin, end), call=(name, behind, close), argument=(key, value, value_end))


class TaggedCalls:
    """Calls with arguments in tags, by their layout.

    regions: other spellings of the tags around calls. skipped: what means nothing between the calls of a region.
    """

    bare = ""

    def __init__(
        self,
        layout: Layout,
        *regions: tuple[str, str],
        skipped: tuple[str, ...] = (),
        ends_reasoning: bool = False,
    ) -> None:
        self.layout = layout
        self.ends_reasoning = ends_reasoning
        begins, ends = zip(*((begin.strip(), end.strip()) for begin, end in (layout.region, *regions)), strict=True)
        self._region_opens, self._region_ends = tuple(filter(None, begins)), tuple(filter(None, ends))
        self._skipped = skipped
        self._call_open, self._name_ends, self._call_end = _tags_of(layout.call)
        self._key_open, self._key_ends, self._value_end = _tags_of(layout.argument)
        # Such a line break belongs to the layout, not to the value.
        self._trims = layout.argument[1].endswith("\n")
        self._begins_line = self._key_open[-1] != ">" and layout.argument[2].endswith("\n")
        self.opens = (*self._region_opens, self._call_open)
        tags = (*self._region_ends, self._call_end, self._key_open, *self._name_ends, *self._key_ends, self._value_end)
        self.others = tuple(tag for tag in tags if tag != ">")
        self._inside = (self._key_open, *self._region_ends, self._call_end, *self.opens)
        self._any_inside = Markers(*self._inside)
        self._in_value = Markers(self._value_end, self._key_open, self._call_end)

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        found, before = marker, ""
        if marker != self._call_open:
            feed.keep()
            char = yield from self._space(feed)
            if char and char in "{[":
                feed.back()
                end = self._region_ends[self._region_opens.index(marker)]
                return (yield from JsonCalls(JsonLayout(marker), close=end).read(marker, feed, sink, schemas))
            before = feed.kept()
            found = yield from feed.through(self._call_open)
            if not found:
                sink.say_marker(marker)
                sink.say(before)
                return None
        # Without a region around it, only the name of a tool makes a call.
        must_be_known = marker == self._call_open and bool(self._region_opens)
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
                feed.keep()
                yield from self._space(feed)
                space = feed.kept()
                found = yield from feed.through(self._call_open, *self._region_ends)
                if not found:
                    sink.say(space)
        return found if found in self.opens else None

    def _space(self, feed: Feed) -> Reading[str]:
        """Read white space and what means nothing; return the next character, not read."""
        while True:
            char = yield from feed.space()
            if not self._skipped or not (yield from feed.through(*self._skipped)):
                return char

    def _call(self, feed: Feed, sink: Sink, schemas: Schemas, *, must_be_known: bool) -> Reading[str]:
        """Read one call behind its opening tag, up to its end or to the tag of another part, and return that tag.

        The result is empty for no call, and for one that was cut, which `sink.in_call` then.
        """
        if self._call_open[-1] == ">" and (yield from feed.space()) == "{":
            return (yield from self._objects(feed, sink))
        name, _ = yield from self._head(feed, self._name_ends)
        if name not in schemas and (plain := name.rpartition(".")[2]) in schemas:
            name = plain
        if not is_name(name) or (must_be_known and name not in schemas):
            return ""
        call = _Call(sink, name, schemas)
        yield from feed.space()
        found = yield from feed.through(*self._inside)
        while found == self._key_open:
            key, attributes = yield from self._head(feed, self._key_ends)
            if not key:
                # A broken tag; the arguments behind it count.
                found = (yield from feed.until(self._any_inside, drop)) or ""
                continue
            found = yield from self._argument(feed, call, key, attributes)
            if found == self._value_end:
                yield from feed.space()
                found = yield from feed.through(*self._inside)
        if found:
            call.close()
        return found

    def _objects(self, feed: Feed, sink: Sink) -> Reading[str]:
        """Read a call as JSON, which some models write between the tags; see `_call`."""
        told = yield from read_objects(feed, sink, None)
        feed.kept()
        if told != "whole":
            return ""
        yield from feed.through(self._call_end)
        return self._call_end

    def _argument(self, feed: Feed, call: _Call, key: str, attributes: str) -> Reading[str]:
        """Read the value of an argument and add it to the call. Return the tag that ended it, empty for none."""
        value: list[str] = []
        is_again, kind = key in call.keys, _KIND.search(attributes)
        is_text = call.is_text(key, None if kind is None else kind[1] in _TEXT_KINDS)
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
                is_end = is_end and call.lacks((yield from feed.ahead(self._head(feed, self._key_ends)))[0])
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
        if char and self._region_ends and (yield from feed.through(*self._region_ends)):
            char = yield from feed.space()
        return not char or (yield from feed.through(*self.opens)) != ""

    def _head(self, feed: Feed, ends: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """Read a name, its attributes and the tags `ends` behind it; the name is empty where other text follows."""
        head = yield from feed.run(_HEAD)
        quoted = _QUOTED.match(head)
        name, attributes = (unescape(quoted[2]), head[quoted.end() :]) if quoted else (head.strip(), "")
        for end in ends:
            yield from feed.space()
            if self.layout.kind[0] and (yield from feed.through(self.layout.kind[0])):
                attributes = f'type="{(yield from feed.run(_HEAD))}"'
                yield from feed.through(self.layout.kind[1])
                yield from feed.space()
            if not (yield from feed.through(end)):
                return "", ""
        return name, attributes


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

    def is_text(self, key: str, is_said: bool | None) -> bool:
        """is_said: whether the value's tag says so; it counts where the schema leaves that open."""
        types = self._properties.types(key)
        return types == {"string"} or (is_said is True and (not types or "string" in types))

    def add(self, key: str, value: str) -> None:
        self._begin(key)
        self._write(encode(self._properties.typed(key, value)))

    def begin_text(self, key: str) -> None:
        self._begin(key)
        self._write('"')
        if self._is_known and not self._is_open:
            self._is_open = True
            self._sink.open_call(self._name)
            self._sink.arguments("".join(self._before))

    def add_text(self, piece: str) -> None:
        self._write(encode(piece)[1:-1])

    def end_text(self) -> None:
        self._write('"')

    def close(self) -> None:
        self._write("}")
        if self._is_open:
            self._sink.close_call()
        else:
            self._sink.add_call(self._name, "".join(self._before))

    def _begin(self, key: str) -> None:
        self._write(f"{', ' if self.keys else ''}{encode(key)}: ")
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
