"""Tools and calls as every dialect reads them: bounds on tools, choices that fit them, calls in a conversation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.fields import check_depth
from moeserve.frontend.dialects.internal import Tool, ToolChoice
from moeserve.frontend.http import invalid

_NAME = re.compile(r"[a-zA-Z0-9_.-]+")


def make_tool(
    name: str | None,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
    where: str,
    longest_name: int,
    schema_field: str = "parameters",
) -> Tool:
    """Return a tool. Raises ApiError.

    where: the field that holds the function, for errors; `schema_field` in it holds the parameters.
    """
    name = check_tool_name(name, f"{where}.name", longest_name)
    if description is not None and len(description) > limits.MAX_TOOL_DESCRIPTION_CHARS:
        longest = limits.MAX_TOOL_DESCRIPTION_CHARS
        raise invalid(f"`{where}.description` takes at most {longest} characters", f"{where}.description")
    if parameters is not None and len(msgspec.json.encode(parameters)) > limits.MAX_TOOL_SCHEMA_BYTES:
        largest = limits.MAX_TOOL_SCHEMA_BYTES
        raise invalid(f"`{where}.{schema_field}` takes at most {largest} bytes", f"{where}.{schema_field}")
    return Tool(name, description, parameters, bool(strict))


def check_tool_name(name: str | None, where: str, longest: int) -> str:
    """Return the name of a function. Raises ApiError unless it is one."""
    if name is None or len(name) > longest or not _NAME.fullmatch(name):
        raise invalid(f"`{where}` must be 1 to {longest} of the characters a-z, A-Z, 0-9, `_`, `.` and `-`", where)
    return name


def check_tools(found: Sequence[tuple[Tool, str]], where: str = "tools") -> tuple[Tool, ...]:
    """Return the tools of a request. Raises ApiError for too many, for two of one name, and for schemas too deep.

    found: each with the field that an error names.
    """
    if len(found) > limits.MAX_TOOLS:
        raise invalid(f"`{where}` takes at most {limits.MAX_TOOLS} tools", where)
    tools: dict[str, Tool] = {}
    for tool, path in found:
        if tool.name in tools:
            raise invalid(f"`{path}` has the name of an earlier tool, {tool.name}", path)
        tools[tool.name] = tool
    check_depth([tool.parameters for tool in tools.values()])
    return tuple(tools.values())


def check_choice(choice: ToolChoice, known: Collection[str], where: str = "tool_choice") -> ToolChoice:
    """Return the choice. Raises ApiError if it asks for tools that the request has not. known: their names."""
    if choice.mode == "required" and not known:
        raise invalid(f"`{where}` asks for a call, and `tools` has none that this server serves", where)
    for name in choice.names:
        if name not in known:
            raise invalid(f"`{where}` names a tool that is not in `tools`: {name[:80]}", where)
    return choice


def call_in_history(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of an earlier turn as templates take it. arguments: JSON, or its value."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments_of(arguments) if isinstance(arguments, str) else arguments},
    }


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments in the JSON that a client sends back, whatever its spacing.

    A model may have written something that is no JSON object. The conversation must be able to go on, so the template
    then gets the text as the only argument.
    """
    if not text.strip():
        return {}
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"invalid_arguments": text}


def made_up_id(place: int, name: str) -> str:
    """Return the id of a call that came without one: always the same for the same place in a conversation."""
    return "call_" + hashlib.blake2b(f"{place}:{name}".encode(), digest_size=12).hexdigest()


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Add to each tool message without a name the name of the tool that was called. Mutates the messages."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]
