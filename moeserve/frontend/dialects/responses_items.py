"""The parts of conversations as `/v1/responses` writes them: items, into the messages of a chat prompt, and tools.

Everything that the assistant put out in one turn, reasoning, text and calls, is one message, as chat has it. A model
knows tools by one name each: a function `f` of namespace `n` is `n__f` for it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.chat_parts import (
    CUSTOM_INPUT,
    call_in_history,
    check_choice,
    check_tool_name,
    check_tools,
    make_tool,
    placeholder,
)
from moeserve.frontend.dialects.custom_tools import make_custom_tool, repeated_format
from moeserve.frontend.dialects.internal import Tool, ToolChoice
from moeserve.frontend.errors import ApiError, invalid, missing, too_many, unsupported

Item = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
# Items of a conversation that bring tools: those of a client that declares them in `input`, and those of a search.
_WITH_TOOLS = ("additional_tools", "tool_search_output")
# The field of a built-in tool's call that says what it does, by clients' own types of calls.
_ARGUMENTS = ("arguments", "action", "operation", "input")
# Summaries in a form of their maker's; without them the conversation is another one.
_SEALED_ITEMS = ("compaction", "context_compaction", "compaction_summary")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
RESPONSE_PREFIX = "resp_"
_SEAL = "moeserve.1."
_MAX_DIGITS, _NO_PLACE = 9, 10**9  # of an item's number
_ID_DIGITS = 24  # hexadecimal digits of a response's id; an item's id has them too, with the item's number behind them


@dataclass(frozen=True, slots=True)
class ClientName:
    """The names by which the client knows a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ToolSet:
    """The tools of a request: for the model, as the client knows them, as the answer repeats them, and dropped ones.

    names: by the names that the model knows. paths: the field of each tool's name.
    """

    tools: list[Tool] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    names: dict[str, ClientName] = field(default_factory=dict)
    repeated: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def add_new(self, more: ToolSet) -> None:
        """Add the tools of `more` whose names are new."""
        for tool, path in zip(more.tools, more.paths, strict=True):
            if tool.name not in self.names:
                self.tools.append(tool)
                self.paths.append(path)
                self.names[tool.name] = more.names[tool.name]
        self.dropped += more.dropped


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(tools: list[dict[str, Any]] | None, items: Sequence[Item] = ()) -> ToolSet:
    """Return the tools of a body, then the tools that its items bring. Raise ApiError.

    Built-in ones, which this server does not have, are dropped. Items repeat tools from turn to turn: the first counts.
    """
    found = ToolSet()
    found.repeated += _read_list(found, tools or [], "tools")
    check_tools(list(zip(found.tools, found.paths, strict=True)))
    for index, item in enumerate(items):
        brought = item.get("tools") if item.get("type") in _WITH_TOOLS else None
        if isinstance(brought, list) and all(isinstance(tool, dict) for tool in brought):
            more = ToolSet()
            _read_list(more, brought, f"input[{index}].tools")
            found.add_new(more)
    check_tools(list(zip(found.tools, found.paths, strict=True)))
    return found


def _read_list(found: ToolSet, tools: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Add tools; return those that the model may call as the answer repeats them."""
    repeated = []
    for index, tool in enumerate(tools):
        path = f"{where}[{index}]"
        match tool.get("type"):
            case "namespace":
                repeated.append(_namespace(found, tool, path))
            case "function" | "custom":
                repeated.append(_callable(found, tool, path, None))
            case str(kind):
                found.dropped.append(kind[:60])
            case _:
                raise missing(f"{path}.type")
    return repeated


def _namespace(found: ToolSet, tool: dict[str, Any], where: str) -> dict[str, Any]:
    name = _read_name(tool, where)
    nested = tool.get("tools")
    if not isinstance(nested, list) or not all(isinstance(one, dict) for one in nested):
        raise invalid(f"`{where}.tools` must be a list of tools", f"{where}.tools")
    kept = []
    for index, one in enumerate(nested):
        if one.get("type") in ("function", "custom"):
            kept.append(_callable(found, one, f"{where}.tools[{index}]", name))
        else:
            found.dropped.append(str(one.get("type"))[:60])
    description = _text(tool, "description", where) or ""
    return {"type": "namespace", "name": name, "description": description, "tools": kept}


def _callable(found: ToolSet, tool: dict[str, Any], where: str, namespace: str | None) -> dict[str, Any]:
    """Add a function or a custom tool; return it as the answer repeats it."""
    name, description = _read_name(tool, where), _text(tool, "description", where)
    is_custom = tool["type"] == "custom"
    repeated: dict[str, Any]
    if is_custom:
        form = tool.get("format")
        made = make_custom_tool(name, description, form, where, limits.MAX_TOOL_NAME_CHARS)
        repeated = {"description": description or "", "format": repeated_format(form)}
    else:
        made = _function(tool, name, description, where)
        repeated = {"description": description, "parameters": made.parameters, "strict": made.strict}
    known_as = model_name(name, namespace)
    found.tools.append(replace(made, name=known_as))
    found.paths.append(f"{where}.name")
    found.names[known_as] = ClientName(name, namespace, is_custom)
    return {"type": tool["type"], "name": name, **repeated}


def _function(tool: dict[str, Any], name: str, description: str | None, where: str) -> Tool:
    parameters, strict = tool.get("parameters"), tool.get("strict")
    if not isinstance(parameters, dict | None):
        raise invalid(f"`{where}.parameters` must be an object", f"{where}.parameters")
    if not isinstance(strict, bool | None):
        raise invalid(f"`{where}.strict` must be a boolean", f"{where}.strict")
    return make_tool(name, description, parameters, strict, where, limits.MAX_TOOL_NAME_CHARS)


def _read_name(entry: dict[str, Any], where: str) -> str:
    return check_tool_name(_text(entry, "name", where), f"{where}.name", limits.MAX_TOOL_NAME_CHARS)


def _text(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if not isinstance(value, str | None):
        raise invalid(f"`{where}.{key}` must be a string", f"{where}.{key}")
    return value


def read_tool_choice(choice: str | dict[str, Any] | None, found: ToolSet) -> ToolChoice:
    """Return which tools may or must be called. Raise ApiError: 400 for tools that the body does not define."""
    match choice:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required":
            return _any_call(found)
        case dict() if choice.get("type") in ("function", "custom"):
            return ToolChoice("required", (_chosen(choice, found, "tool_choice"),))
        case dict() if choice.get("type") == "allowed_tools":
            return _allowed(choice, found)
        case {"type": str(kind)}:
            raise unsupported("tool_choice.type", kind[:40])
        case _:
            raise invalid("`tool_choice` must be none, auto, required, or an object that names tools", "tool_choice")


def _allowed(choice: dict[str, Any], found: ToolSet) -> ToolChoice:
    mode, entries = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("`tool_choice.mode` must be auto or required", "tool_choice.mode")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise invalid("`tool_choice.tools` must be a list of objects", "tool_choice.tools")
    names = [
        _chosen(entry, found, f"tool_choice.tools[{index}]")
        for index, entry in enumerate(entries)
        if entry.get("type") in ("function", "custom")
    ]
    if names:
        return ToolChoice("required" if mode == "required" else "auto", tuple(dict.fromkeys(names)))
    # Tools of other types are built-in ones, which were dropped.
    return _any_call(ToolSet(dropped=found.dropped)) if mode == "required" else ToolChoice("none")


def _chosen(entry: dict[str, Any], found: ToolSet, where: str) -> str:
    namespace = _text(entry, "namespace", where)
    name = model_name(_read_name(entry, where), namespace)
    check_choice(ToolChoice("auto", (name,)), found.names, f"{where}.name")
    return name


def _any_call(found: ToolSet) -> ToolChoice:
    if found.tools or not found.dropped:
        return check_choice(ToolChoice("required"), found.names)
    kinds = ", ".join(dict.fromkeys(found.dropped))
    raise ApiError(
        400,
        f"`tool_choice` asks for a call of a built-in tool ({kinds}), which this server does not have",
        param="tool_choice",
        code="unsupported_parameter",
    )


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

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.turns or ())) + sum(map(len, self.items.values()))

    def conversation(self) -> list[Item] | None:
        if self.turns is None:
            return None
        return [item for turn in self.turns for item in msgspec.json.decode(turn, type=list[Item])]

    def item(self, item_id: str) -> Item | None:
        found = self.items.get(item_id)
        return None if found is None else msgspec.json.decode(found, type=Item)


def item_id_of(prefix: str, response_id: str, number: int) -> str:
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}{number:02d}"


def response_of_item(item_id: str) -> str:
    """Return the id of the response that put out the item with this id, if any did."""
    return RESPONSE_PREFIX + item_id.partition("_")[2][:_ID_DIGITS]


def number_of_item(item_id: str) -> int:
    """Return the place of an item in its response's output by its id; a large number for an id of another form."""
    digits = item_id.partition("_")[2][_ID_DIGITS:]
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < _MAX_DIGITS else _NO_PLACE


def check_named_bytes(num_bytes: int) -> None:
    """Raise ApiError for more bytes of kept items than one request may refer to."""
    most = limits.MAX_STORED_CONVERSATION_BYTES
    if num_bytes > most:
        raise invalid(f"`input` refers to kept items of more than {most // 2**20} MiB", "input", "too_many_values")


def is_reference(item: Item) -> bool:
    """Return whether an item is a reference to another one by its id."""
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
        """Add a message whose author is not the assistant."""
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
                self._add_call(item, _required(item, "name", where), _arguments(item, where), where)
            case "custom_tool_call":
                given = {CUSTOM_INPUT: _required(item, "input", where)}
                self._add_call(item, _required(item, "name", where), given, where)
            case "agent_message":
                self.say("user", _content_text(item.get("content"), f"{where}.content", left_out="encrypted_content"))
            case "additional_tools" | "mcp_list_tools":
                pass
            case str(kind) if kind in _SEALED_ITEMS:
                raise invalid(f"`{where}` is a summary that only its maker can read: send the items", f"{where}.type")
            case str(kind) if kind.endswith("_call"):
                # Without `call_id` the client's vendor has run it, and its result is no item.
                if isinstance(item.get("call_id"), str):
                    self._add_call(item, kind.removesuffix("_call"), _built_in_arguments(item), where)
            case str(kind) if kind.endswith("_output"):
                self._add_output(item, where)
            case "item_reference" | None if isinstance(item.get("id"), str):
                self._add_reference(item["id"], where)
            case str(kind):
                raise unsupported(f"{where}.type", kind[:40])
            case _:
                raise missing(f"{where}.type")

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

    def _add_call(self, item: Item, name: str, arguments: str | dict[str, Any], where: str) -> None:
        call_id, namespace = _required(item, "call_id", where), item.get("namespace")
        if not isinstance(namespace, str | None):
            raise invalid(f"`{where}.namespace` must be a string", f"{where}.namespace")
        name = model_name(name, namespace)
        self._open().setdefault("tool_calls", []).append(call_in_history(call_id, name, arguments))
        self._called[call_id] = name

    def _add_output(self, item: Item, where: str) -> None:
        call_id = _required(item, "call_id", where)
        if call_id not in self._called:
            raise invalid(
                f"`{where}.call_id` is {call_id[:80]!r}, and no item before it is that call", f"{where}.call_id"
            )
        content = _result_text(item, where)
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


def _arguments(item: Item, where: str) -> str | dict[str, Any]:
    found = item.get("arguments")
    return found if isinstance(found, dict) else _required(item, "arguments", where)


def _built_in_arguments(item: Item) -> dict[str, Any]:
    found: Any = next((item[name] for name in _ARGUMENTS if name in item), {})
    return found if isinstance(found, dict) else {CUSTOM_INPUT: found}


def _result_text(item: Item, where: str) -> str:
    """Return the result of a call as text; images and files in it are left out."""
    if item["type"] == "tool_search_output" and "output" not in item:
        tools = item.get("tools")
        names = [tool.get("name") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        return msgspec.json.encode({"tools": names}).decode()
    output = item.get("output")
    if isinstance(output, dict):
        return placeholder(str(output.get("type"))) or msgspec.json.encode(output).decode()
    if not isinstance(output, list):
        return _content_text(output, f"{where}.output")
    read = [
        {"type": "text", "text": instead}
        if isinstance(part, dict) and (instead := placeholder(str(part.get("type")))) is not None
        else part
        for part in output
    ]
    return _content_text(read, f"{where}.output")


def _content_text(content: Any, where: str, left_out: str | None = None) -> str:
    """Return the text of `content`, a string or parts. Parts are joined by a newline, so that no two words merge.

    left_out: the type of parts that are passed over.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"`{where}` must be a string or a list of parts", where)
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise too_many(where, limits.MAX_CONTENT_PARTS, "parts")
    return "\n".join(
        _part_text(part, f"{where}[{index}]", TEXTS)
        for index, part in enumerate(content)
        if left_out is None or not isinstance(part, dict) or part.get("type") != left_out
    )


def _part_text(part: Any, where: str, fields: dict[str, str]) -> str:
    """Return the text of a part; `fields` has the name of its field by the part's type."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise missing(f"{where}.type")
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
