"""Messages, calls and tools: the parts of conversations that all dialects read in the same way."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies
from moeserve.frontend.dialects.fields import CacheBreakpoint, read_breakpoint
from moeserve.frontend.dialects.internal import Tool, ToolChoice
from moeserve.frontend.errors import invalid, missing, too_long, too_many, unsupported

_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
CUSTOM_INPUT = "input"  # the one parameter by which a model knows the text of a custom tool

# Names for parts of a tool's result that become placeholders, by their types: agents take pictures unasked.
_LEFT_OUT = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image"),
    **dict.fromkeys(("document", "file", "input_file"), "file"),
    **dict.fromkeys(("audio", "input_audio"), "audio"),
}

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


def make_tool(
    name: str | None,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
    where: str,
    longest_name: int,
    schema_field: str = "parameters",
) -> Tool:
    """Return a tool. Raise ApiError.

    where: the field that holds the function, for errors; `schema_field` in it holds the parameters.
    """
    name = check_tool_name(name, f"{where}.name", longest_name)
    if description is not None and len(description) > limits.MAX_TOOL_DESCRIPTION_CHARS:
        longest = limits.MAX_TOOL_DESCRIPTION_CHARS
        raise too_long(f"{where}.description", longest, "characters")
    if parameters is not None and len(msgspec.json.encode(parameters)) > limits.MAX_TOOL_SCHEMA_BYTES:
        largest = limits.MAX_TOOL_SCHEMA_BYTES
        raise too_long(f"{where}.{schema_field}", largest, "bytes")
    return Tool(name, description, parameters, bool(strict))


def check_tool_name(name: str | None, where: str, longest: int) -> str:
    """Return the name of a function. Raise ApiError unless it is one."""
    if name is None or len(name) > longest or not _NAME.fullmatch(name):
        raise invalid(f"`{where}` must be 1 to {longest} of the characters a-z, A-Z, 0-9, `_`, `.` and `-`", where)
    return name


def check_tools(found: Sequence[tuple[Tool, str]], where: str = "tools") -> tuple[Tool, ...]:
    """Return the tools of a request. Raise ApiError for too many, for two of one name, and for schemas too deep.

    found: each with the field that an error names.
    """
    if len(found) > limits.MAX_TOOLS:
        raise too_many(where, limits.MAX_TOOLS, "tools")
    tools: dict[str, Tool] = {}
    for tool, path in found:
        if tool.name in tools:
            raise invalid(f"`{path}` has the name of an earlier tool, {tool.name}", path)
        tools[tool.name] = tool
    bodies.check_depth([tool.parameters for tool in tools.values()])
    return tuple(tools.values())


def check_choice(choice: ToolChoice, known: Collection[str], where: str = "tool_choice") -> ToolChoice:
    """Return the choice. Raise ApiError if it asks for tools that the request has not. known: their names."""
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

    A model may have written text that is no JSON object. The conversation must be able to continue, so the template
    then gets this text as the only argument.
    """
    if not text.strip():
        return {}
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"invalid_arguments": text}


def placeholder(kind: str) -> str | None:
    """Return the text for a part of a tool's result that no model here reads, None for a part of another type."""
    what = _LEFT_OUT.get(kind)
    return None if what is None else f"[{what} left out: this model reads text]"


def made_up_id(place: int, name: str) -> str:
    """Return an id for a call without one: always the same for the same place in a conversation."""
    return "call_" + hashlib.blake2b(f"{place}:{name}".encode(), digest_size=12).hexdigest()


def name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Add to each tool message without a name the name of the tool that was called. Mutates the messages."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name") and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    thinking: str | list[ContentPart] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class CalledCustom(msgspec.Struct):
    name: str | None = None
    input: str | None = None


class MessageCall(msgspec.Struct):
    id: str | None = None
    type: str = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Prediction(msgspec.Struct):
    type: str = "content"
    content: str | list[ContentPart] | None = None


def read_prediction(prediction: Prediction | None) -> str:
    """Return the text of a predicted answer, empty without one. Raise ApiError that names the field."""
    if prediction is None:
        return ""
    if prediction.type != "content":
        raise unsupported("prediction.type", prediction.type[:40])
    if prediction.content is None:
        raise missing("prediction.content")
    return _content_text(prediction.content, "prediction")


def read_messages(messages: list[ChatMessage] | None) -> list[dict[str, Any]]:
    """Return the messages as in `ChatPrompt`. Raise ApiError that names the field."""
    if not messages:
        raise invalid("`messages` must hold at least one message", "messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise too_many("messages", limits.MAX_MESSAGES, "messages")
    if sum(len(message.tool_calls or ()) for message in messages) > limits.MAX_CALLS:
        raise invalid(f"`messages` take at most {limits.MAX_CALLS} calls", "messages")
    read: list[dict[str, Any]] = []
    latest_id = ""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise invalid(f"`{where}.role` must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
        if message.content is None and message.role in ("user", "system", "developer"):
            raise missing(f"{where}.content")
        content, of_tool = message.content, message.role in ("tool", "function")
        if message.role == "assistant" and isinstance(content, list):
            content = [part for part in content if part.type != "thinking"]
        plain: dict[str, Any] = {"role": message.role, "content": _content_text(content, where, of_tool=of_tool)}
        if message.name is not None:
            plain["name"] = message.name
        if message.role == "assistant":
            latest_id = _add_assistant_parts(plain, message, where, index) or latest_id
        elif of_tool:
            plain |= {"role": "tool", "tool_call_id": message.tool_call_id or latest_id}
        read.append(plain)
    name_results(read)
    return read


def read_breakpoints(
    messages: list[ChatMessage] | None, options: dict[str, Any] | None
) -> tuple[tuple[int, float], ...]:
    """Return the marked prefixes as in `CacheOptions`: a mark inside a message counts at its end. Raise ApiError.

    options: `prompt_cache_options`, which has the time of marks without one.
    """
    found = []
    for index, message in enumerate(messages or ()):
        parts = message.content if isinstance(message.content, list) else ()
        seconds = [
            read_breakpoint(mark, options, f"messages[{index}].content[{number}].prompt_cache_breakpoint")
            for number, part in enumerate(parts)
            if (mark := part.prompt_cache_breakpoint) is not None
        ]
        if seconds:
            found.append((index + 1, float(max(seconds))))
    return tuple(found)


def _add_assistant_parts(plain: dict[str, Any], message: ChatMessage, where: str, index: int) -> str:
    """Add reasoning and calls to a message. Return the id of the last call."""
    if reasoning := message.reasoning_content or message.reasoning or _thoughts(message.content, where):
        plain["reasoning_content"] = reasoning
    calls = [
        _call(call, f"{where}.tool_calls[{number}]", index) for number, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None and message.function_call.name is not None:
        called = message.function_call
        call_id = made_up_id(index, str(called.name))
        calls.append(_function(called, call_id, f"{where}.function_call"))
    if len(calls) > limits.MAX_CALLS_PER_MESSAGE:
        raise too_many(f"{where}.tool_calls", limits.MAX_CALLS_PER_MESSAGE, "calls")
    if calls:
        plain["tool_calls"] = calls
        return str(calls[-1]["id"])
    return ""


def _thoughts(content: str | list[ContentPart] | None, where: str) -> str:
    """Return the text of the parts of type `thinking`, as Mistral's clients send them."""
    parts = content if isinstance(content, list) else []
    thoughts = [part.thinking for part in parts if part.type == "thinking"]
    return "\n".join(_content_text(thought, f"{where}.thinking") for thought in thoughts)


def _call(call: MessageCall, where: str, index: int) -> dict[str, Any]:
    if call.type == "custom":
        custom = call.custom or CalledCustom()
        called = CalledFunction(custom.name, {CUSTOM_INPUT: custom.input or ""})
        return _function(called, call.id or made_up_id(index, str(custom.name)), f"{where}.custom")
    if call.type != "function":
        raise unsupported(f"{where}.type", call.type[:40])
    if call.function is None:
        raise missing(f"{where}.function")
    call_id = call.id or made_up_id(index, str(call.function.name))
    return _function(call.function, call_id, f"{where}.function")


def _function(called: CalledFunction, call_id: str, where: str) -> dict[str, Any]:
    if not called.name or len(called.name) > limits.MAX_CALLED_NAME_CHARS:
        raise invalid(f"`{where}.name` must be the name of a function", f"{where}.name")
    return call_in_history(call_id, called.name, called.arguments or {})


def _content_text(content: str | list[ContentPart] | None, where: str, *, of_tool: bool = False) -> str:
    """Return the text of a message's content. Parts are joined by a newline, so that no two words merge.

    of_tool: it is a tool's result, whose images and files become placeholders.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise too_many(f"{where}.content", limits.MAX_CONTENT_PARTS, "parts")
    texts = []
    for index, part in enumerate(content):
        if of_tool and (instead := placeholder(part.type)) is not None:
            texts.append(instead)
            continue
        name = "refusal" if part.type == "refusal" else "text"
        if part.type != "refusal" and part.type not in TEXT_PARTS:
            raise unsupported(f"{where}.content[{index}].type", part.type[:40])
        text = part.refusal if name == "refusal" else part.text
        if text is None:
            raise missing(f"{where}.content[{index}].{name}")
        texts.append(text)
    return "\n".join(texts)
