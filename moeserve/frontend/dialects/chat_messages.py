"""The messages of a chat request: read, checked, and given the form that templates take."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects import tools
from moeserve.frontend.dialects.cache_options import CacheBreakpoint, read_breakpoint
from moeserve.frontend.http import invalid, unsupported

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class MessageCall(msgspec.Struct):
    id: str | None = None
    type: str = "function"
    function: CalledFunction | None = None


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
    """Return the text of a predicted answer, empty without one. Raises ApiError that names the field."""
    if prediction is None:
        return ""
    if prediction.type != "content":
        raise unsupported("prediction.type", prediction.type[:40])
    if prediction.content is None:
        raise invalid("`prediction.content` is required", "prediction.content")
    return _content_text(prediction.content, "prediction")


def read_messages(messages: list[ChatMessage] | None) -> list[dict[str, Any]]:
    """Return the messages as in `ChatPrompt`. Raises ApiError that names the field."""
    if not messages:
        raise invalid("`messages` must hold at least one message", "messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise invalid(f"`messages` takes at most {limits.MAX_MESSAGES} messages", "messages")
    if sum(len(message.tool_calls or ()) for message in messages) > limits.MAX_CALLS:
        raise invalid(f"`messages` take at most {limits.MAX_CALLS} calls", "messages")
    read: list[dict[str, Any]] = []
    latest_id = ""
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role not in ROLES:
            raise invalid(f"`{where}.role` must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
        if message.content is None and message.role in ("user", "system", "developer"):
            raise invalid(f"`{where}.content` is required", f"{where}.content")
        plain: dict[str, Any] = {"role": message.role, "content": _content_text(message.content, where)}
        if message.name is not None:
            plain["name"] = message.name
        if message.role == "assistant":
            latest_id = _add_assistant_parts(plain, message, where, index) or latest_id
        elif message.role in ("tool", "function"):
            plain |= {"role": "tool", "tool_call_id": message.tool_call_id or latest_id}
        read.append(plain)
    tools.name_results(read)
    return read


def read_breakpoints(
    messages: list[ChatMessage] | None, options: dict[str, Any] | None
) -> tuple[tuple[int, float], ...]:
    """Return the marked prefixes as in `CacheOptions`: a mark inside a message counts at its end. Raises ApiError.

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
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        plain["reasoning_content"] = reasoning
    calls = [
        _call(call, f"{where}.tool_calls[{number}]", index) for number, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call is not None and message.function_call.name is not None:
        called = message.function_call
        call_id = tools.made_up_id(index, str(called.name))
        calls.append(_function(called, call_id, f"{where}.function_call"))
    if len(calls) > limits.MAX_CALLS_PER_MESSAGE:
        raise invalid(f"`{where}.tool_calls` takes at most {limits.MAX_CALLS_PER_MESSAGE} calls", f"{where}.tool_calls")
    if calls:
        plain["tool_calls"] = calls
        return str(calls[-1]["id"])
    return ""


def _call(call: MessageCall, where: str, index: int) -> dict[str, Any]:
    if call.type != "function":
        raise unsupported(f"{where}.type", call.type[:40])
    if call.function is None:
        raise invalid(f"`{where}.function` is required", f"{where}.function")
    call_id = call.id or tools.made_up_id(index, str(call.function.name))
    return _function(call.function, call_id, f"{where}.function")


def _function(called: CalledFunction, call_id: str, where: str) -> dict[str, Any]:
    if not called.name or len(called.name) > limits.MAX_CALLED_NAME_CHARS:
        raise invalid(f"`{where}.name` must be the name of a function", f"{where}.name")
    return tools.call_in_history(call_id, called.name, called.arguments or {})


def _content_text(content: str | list[ContentPart] | None, where: str) -> str:
    """Return the text of a message's content. Parts are joined by a newline, so that no two words merge."""
    if content is None or isinstance(content, str):
        return content or ""
    if len(content) > limits.MAX_CONTENT_PARTS:
        raise invalid(f"`{where}.content` takes at most {limits.MAX_CONTENT_PARTS} parts", f"{where}.content")
    texts = []
    for index, part in enumerate(content):
        name = "refusal" if part.type == "refusal" else "text"
        if part.type != "refusal" and part.type not in TEXT_PARTS:
            raise unsupported(f"{where}.content[{index}].type", part.type[:40])
        text = part.refusal if name == "refusal" else part.text
        if text is None:
            raise invalid(f"`{where}.content[{index}].{name}` is required", f"{where}.content[{index}].{name}")
        texts.append(text)
    return "\n".join(texts)
