"""The items of a conversation as `/v1/responses` writes them, into the messages of a chat prompt.

Everything that the assistant put out in one turn, reasoning, text and calls, is one message, as chat has it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.responses_tools import CUSTOM_INPUT, model_name
from moeserve.frontend.dialects.tools import call_in_history
from moeserve.frontend.http import invalid, unsupported

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
RESPONSE_PREFIX = "resp_"
_SEAL = "moeserve.1."
_ID_DIGITS = 24  # of a response, between its prefix and, in an item's id, the number of the item


class Named(msgspec.Struct, frozen=True):
    """The ids by which a request refers to a conversation, and to single items."""

    previous_id: str | None
    conversation_id: str | None
    item_ids: list[str]


class Earlier(msgspec.Struct, array_like=True, frozen=True):
    """The parts of conversations that a request refers to, as JSON: lists of the items of a conversation, oldest first,
    None where there is none of that id, and single items by their ids."""

    turns: list[bytes] | None = None
    items: dict[str, bytes] = {}

    def conversation(self) -> list[Item] | None:
        """Return all items of the conversation; None where there is none."""
        if self.turns is None:
            return None
        return [item for turn in self.turns for item in msgspec.json.decode(turn, type=list[Item])]

    def item(self, item_id: str) -> Item | None:
        """Return an item, None for an unknown one."""
        found = self.items.get(item_id)
        return None if found is None else msgspec.json.decode(found, type=Item)


def item_id_of(prefix: str, response_id: str, number: int) -> str:
    """Return the id of an item that a response puts out."""
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}{number:02d}"


def response_of_item(item_id: str) -> str:
    """Return the id of the response that has put out an item of that id, if any has."""
    return RESPONSE_PREFIX + item_id.partition("_")[2][:_ID_DIGITS]


def is_reference(item: Item) -> bool:
    """Return whether an item stands for another one, by its id."""
    return item.get("type") in ("item_reference", None) and "role" not in item and isinstance(item.get("id"), str)


def listed_item(item: Item, item_id: str) -> Item:
    """Return an item of a request as lists show it: it has an id, that one unless it had one, and a list as content."""
    complete = {**item, "id": item.get("id") or item_id, "status": item.get("status") or "completed"}
    if "role" in item:
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        content = item.get("content")
        complete["type"] = "message"
        complete["content"] = [{"type": kind, "text": content}] if isinstance(content, str) else content
        if kind == "output_text" and isinstance(content, str):
            complete["content"][0]["annotations"] = []
    return complete


def seal_reasoning(text: str) -> str:
    """Return `encrypted_content` of a reasoning item: the text itself, for clients that give back nothing else."""
    return _SEAL + base64.b64encode(text.encode()).decode()


def _unseal(content: Any) -> str | None:
    """Return the text of `encrypted_content`, None if another server wrote it."""
    if not isinstance(content, str) or not content.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(content.removeprefix(_SEAL), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


class ItemReader:
    """Collects messages from items. Its methods raise ApiError."""

    def __init__(self, find: Callable[[str], Item | None], calls: Collection[str] = ()) -> None:
        """find: returns an item that a reference names. calls: ids of calls that were before the first item."""
        self.messages: list[dict[str, Any]] = []
        self._find = find
        self._assistant: dict[str, Any] | None = None  # the message that the assistant's next items belong to
        self._called = dict.fromkeys(calls, "")  # the names of the tools that were called, by the ids of the calls

    def say(self, role: str, text: str) -> None:
        """Add a message of somebody else than the assistant."""
        self._assistant = None
        self.messages.append({"role": role, "content": text})

    def add(self, item: Item, where: str) -> None:
        """Add an item; `where` is its path in the request."""
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._add_reasoning(item, where)
            case "function_call":
                self._add_call(item, _required(item, "arguments", where), where)
            case "custom_tool_call":
                self._add_call(item, {CUSTOM_INPUT: _required(item, "input", where)}, where)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, where)
            case "item_reference" | None if isinstance(item.get("id"), str):
                self._add_reference(item["id"], where)
            case str(kind):
                raise unsupported(f"{where}.type", kind[:40])
            case _:
                raise invalid(f"`{where}.type` is required", f"{where}.type")

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise invalid(f"`{where}.role` must be one of {', '.join(ROLES)}", f"{where}.role")
        text = _content_text(item.get("content"), f"{where}.content")
        if role != "assistant":
            self.say(role, text)
            return
        if self._assistant is not None and self._assistant["content"] and "tool_calls" not in self._assistant:
            self._assistant = None
        self._open()["content"] += text

    def _add_reasoning(self, item: Item, where: str) -> None:
        text = _reasoning_text(item, where)
        if text:
            message = self._open()
            message["reasoning_content"] = message.get("reasoning_content", "") + text

    def _add_call(self, item: Item, arguments: str | dict[str, Any], where: str) -> None:
        call_id, namespace = _required(item, "call_id", where), item.get("namespace")
        if not isinstance(namespace, str | None):
            raise invalid(f"`{where}.namespace` must be a string", f"{where}.namespace")
        name = model_name(_required(item, "name", where), namespace)
        self._open().setdefault("tool_calls", []).append(call_in_history(call_id, name, arguments))
        self._called[call_id] = name

    def _add_output(self, item: Item, where: str) -> None:
        call_id = _required(item, "call_id", where)
        if call_id not in self._called:
            raise invalid(
                f"`{where}.call_id` is {call_id[:80]!r}, and no item before it is that call", f"{where}.call_id"
            )
        content = _content_text(item.get("output"), f"{where}.output")
        self._assistant = None
        self.messages.append(
            {"role": "tool", "content": content, "tool_call_id": call_id, "name": self._called[call_id]}
        )

    def _add_reference(self, item_id: str, where: str) -> None:
        found = self._find(item_id)
        if found is None or is_reference(found):
            raise invalid(
                f"`{where}.id` is {item_id[:80]!r}, an item that is not kept here: send the item itself",
                f"{where}.id",
                "item_not_found",
            )
        self.add(found, where)

    def _open(self) -> dict[str, Any]:
        """Return the assistant's message, a new one if somebody else spoke last."""
        if self._assistant is None:
            self._assistant = {"role": "assistant", "content": ""}
            self.messages.append(self._assistant)
        return self._assistant


def _required(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"`{where}.{key}` must be a string", f"{where}.{key}")
    return value


def _content_text(content: Any, where: str) -> str:
    """Return the text of `content`, a string or parts. Parts are joined by a newline, so that no two words merge."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"`{where}` must be a string or a list of parts", where)
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise invalid(f"`{where}` takes at most {limits.MAX_CONTENT_PARTS} parts", where)
    return "\n".join(_part_text(part, f"{where}[{index}]", TEXTS) for index, part in enumerate(content))


def _part_text(part: Any, where: str, fields: dict[str, str]) -> str:
    """Return the text of a part; `fields` has the name of its field by the part's type."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"`{where}.type` is required", f"{where}.type")
    if kind not in fields:
        raise unsupported(f"{where}.type", kind[:40])
    return _required(part, fields[kind], where)


def _reasoning_text(item: Item, where: str) -> str:
    """Return the reasoning of an item: its content, else its sealed content, else its summary."""
    for key, kind in (("content", "reasoning_text"), ("encrypted_content", ""), ("summary", "summary_text")):
        value = item.get(key)
        if not value:
            continue
        if not kind:
            text = _unseal(value)
        elif isinstance(value, list):
            parts = enumerate(value)
            text = "\n".join(_part_text(part, f"{where}.{key}[{index}]", {kind: "text"}) for index, part in parts)
        else:
            raise invalid(f"`{where}.{key}` must be a list of parts", f"{where}.{key}")
        if text:
            return text
    return ""
