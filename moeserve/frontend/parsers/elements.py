"""MiniMax M3's calls: elements named after the arguments, which nest where a value is an object or a list.

Every tag begins with the same mark, so values may hold any other text. Arguments are reported when the call ends: an
element that is repeated makes its value a list.
"""

from __future__ import annotations

import re
from typing import Any

from moeserve.frontend.parsers.calls import is_name
from moeserve.frontend.parsers.feed import Feed, Markers, Reading, Sink
from moeserve.frontend.parsers.values import Properties, Schemas, encode, items_of, types_of

MARK = "]<]minimax[>["
_REGION, _REGION_END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
_CALL, _CALL_END = f"{MARK}<invoke name=", f"{MARK}</invoke>"
_MAX_DEPTH = 64
_MARKS = Markers(MARK)
_TAG = re.compile(r"[^<>]*")
# A text, or children by their names.
_Value = str | list[tuple[str, "_Value"]]


class ElementCalls:
    """Calls of MiniMax M3."""

    opens = (_REGION, _CALL)
    others = (_REGION_END, _CALL_END)
    ends_reasoning = False
    bare = ""

    def read(self, marker: str, feed: Feed, sink: Sink, schemas: Schemas) -> Reading[str | None]:
        feed.keep()
        found = marker
        if marker == _REGION:
            yield from feed.space()
            found = yield from feed.through(_CALL)
        while found == _CALL:
            head = (yield from feed.run(_TAG)).strip().strip("\"'")
            is_call = is_name(head) and (head in schemas or marker != _CALL) and (yield from feed.through(">"))
            value = (yield from _read_element(feed, "invoke", 0)) if is_call else None
            if value is None:
                break
            marker, schema = "", schemas.get(head)
            arguments = {} if isinstance(value, str) else _object(value, schema, schema)
            sink.add_call(head, encode(arguments))
            feed.kept()
            feed.keep()
            yield from feed.space()
            found = yield from feed.through(_CALL, _REGION_END)
            if found == _REGION_END:
                feed.kept()
                return None
        sink.say_marker(marker)
        sink.say(feed.kept())
        return None


def _read_element(feed: Feed, name: str, depth: int) -> Reading[_Value | None]:
    """Read an element behind its opening tag, up to its closing one; None if that does not come."""
    text: list[str] = []
    children: list[tuple[str, _Value]] = []
    while (yield from feed.until(_MARKS, text.append)):
        if (yield from feed.through(f"</{name}>")):
            return children or "".join(text)
        if not (yield from feed.through("<")):
            text.append(MARK)
            continue
        child = yield from feed.run(_TAG)
        if depth == _MAX_DEPTH or not (yield from feed.through(">")) or child.startswith("/"):
            return None
        value = yield from _read_element(feed, child.strip(), depth + 1)
        if value is None:
            return None
        children.append((child.strip(), value))
    return None


def _object(children: list[tuple[str, _Value]], schema: Any, root: Any) -> dict[str, Any]:
    properties = Properties(schema, root)
    found: dict[str, list[Any]] = {}
    for name, value in children:
        found.setdefault(name, []).append(_converted(value, properties.schema(name), root))
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _converted(value: _Value, schema: Any, root: Any) -> Any:
    """Return the value of an element in the type of its schema."""
    types = types_of(schema, root)
    if isinstance(value, str):
        if not value.strip() and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return Properties({"properties": {"": schema}}, root).typed("", value)
    is_list = "array" in types or ("object" not in types and all(name == "item" for name, _ in value))
    if is_list:
        return [_converted(child, items_of(schema, root), root) for _, child in value]
    return _object(value, schema, root)
