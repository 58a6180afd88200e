"""Calls in the answers of `/v1/chat/completions`, whole and in parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from moeserve.frontend.dialects.custom_tools import custom_input
from moeserve.frontend.dialects.internal import Delta, ToolCallPart


class ChatCalls:
    """Writes calls. The older names `functions` and `function_call` get the older form of an answer.

    The input of a custom tool is complete only with its arguments, so it comes in one piece.
    """

    def __init__(self, *, is_legacy: bool, custom: Collection[str]) -> None:
        """custom: the names of custom tools."""
        self.is_legacy = is_legacy
        self._custom = custom
        # By choice and place, the pieces of the arguments of a custom tool's call that has not ended.
        self._pieces: dict[tuple[int, int], list[str]] = {}

    def whole(self, calls: list[ToolCallPart]) -> dict[str, Any]:
        """Return the fields of a message for its calls."""
        if not calls:
            return {}
        if self.is_legacy:
            return {"function_call": {"name": calls[0].name, "arguments": calls[0].arguments}}
        return {"tool_calls": [{"id": call.call_id, **self._named(call)} for call in calls]}

    def parts(self, delta: Delta) -> dict[str, Any]:
        """Return the fields of a `delta` for its parts of calls. A call's id, type and name come once."""
        if not self.is_legacy:
            parts = list(self._parts(delta))
            return {"tool_calls": parts} if parts else {}
        if not delta.calls:
            return {}
        part = delta.calls[0]
        name = {"name": part.name} if part.name else {}
        return {"function_call": {**name, "arguments": part.arguments}}

    def _parts(self, delta: Delta) -> Iterator[dict[str, Any]]:
        for part in delta.calls:
            place = (delta.index, part.place)
            if part.name:
                yield from self._inputs(delta.index)
                is_custom = part.name in self._custom
                if is_custom:
                    self._pieces[place] = [part.arguments]
                head = ToolCallPart(part.place, "", part.call_id, part.name) if is_custom else part
                yield {"index": part.place, "id": part.call_id, **self._named(head)}
            elif place in self._pieces:
                self._pieces[place].append(part.arguments)
            else:
                yield {"index": part.place, "function": {"arguments": part.arguments}}
        if delta.finish_reason is not None:
            yield from self._inputs(delta.index)

    def _inputs(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the input of a choice's call that ends, if a custom tool was called."""
        for place in [place for place in self._pieces if place[0] == index]:
            yield {"index": place[1], "custom": {"input": custom_input("".join(self._pieces.pop(place)))}}

    def _named(self, call: ToolCallPart) -> dict[str, Any]:
        if call.name in self._custom:
            text = custom_input(call.arguments) if call.arguments else ""
            return {"type": "custom", "custom": {"name": call.name, "input": text}}
        return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
