"""Conversations in forms that templates take: tools for templates without any, and plainer forms of messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from moeserve.frontend.dialects.internal import Tool

_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_EXPLANATION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = dict[str, Any]


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form, as templates take it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}


def explain_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Return a conversation with tools as one without: for templates that know none.

    The tools stand in the system message, calls in the assistants' texts and results in users' texts, in hermes' form.
    """
    written = [_written(message) for message in messages]
    if tools:
        lines = "\n".join(_json(tool) for tool in tools)
        first = written[0] if written and written[0]["role"] == "system" else None
        text = _EXPLANATION.format(tools=lines)
        if first is not None:
            text = f"{first['content']}\n\n{text}"
        written = [{"role": "system", "content": text}, *(written if first is None else written[1:])]
    return list(_joined(written, "user", "\n"))


def _written(message: Message) -> Message:
    """Return a message with its calls, or its result, written out."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [f"<tool_call>\n{_json(_named_call(call))}\n</tool_call>" for call in message["tool_calls"]]
    text = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": text}


def _named_call(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plainer_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield forms of a conversation for templates that refuse it, the closest to it first.

    First each call of a message stands in a message of its own, with its results, for templates that take one call at a
    time. Then later system messages become user messages in their places, so the prompt before them stays a prefix;
    then messages of the same role are joined, for templates that want roles to alternate; then the first system message
    becomes the user's too.
    """
    if any(len(message.get("tool_calls", ())) > 1 for message in messages):
        messages = list(_one_call_each(messages))
        yield messages
    start = next((index for index, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    head = [{**messages[0], "content": _join([m["content"] for m in messages[:start]], "\n\n")}] if start else []
    rest = [_as_user(message) for message in messages[start:]]
    yield [*head, *rest]
    alternating = list(_joined(rest, "user", "\n\n"))
    yield [*head, *alternating]
    if head:
        yield list(_joined([_as_user(head[0]), *alternating], "user", "\n\n"))


def _one_call_each(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages, those with several calls as several, each followed by the results of its call."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = list(takewhile(lambda later: later["role"] == "tool", messages[place:]))
        place += len(results)
        for number, call in enumerate(calls):
            yield {**(message if number == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]}
            yield from (result for result in results if result.get("tool_call_id") == call["id"])
        ids = {call["id"] for call in calls}
        yield from (result for result in results if result.get("tool_call_id") not in ids)


_SYSTEM = ("system", "developer")


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] in _SYSTEM else message


def _joined(messages: list[Message], role: str, separator: str) -> Iterator[Message]:
    """Yield the messages; neighbours of `role` become one."""
    waiting: list[Message] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == role:
            waiting.append(message)
            continue
        if waiting:
            yield {**waiting[0], "content": _join([said["content"] for said in waiting], separator)}
            waiting = []
        if message is not None:
            yield message


def _join(texts: list[str], separator: str) -> str:
    return separator.join(text for text in texts if text)


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Return the messages with ids of calls that have nine letters and digits; ids of this form stay as they are."""
    short = []
    for message in messages:
        message = dict(message)
        if message.get("tool_call_id"):
            message["tool_call_id"] = short_id(message["tool_call_id"])
        if "tool_calls" in message:
            message["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in message["tool_calls"]]
        short.append(message)
    return short


def short_id(call_id: str) -> str:
    """Return nine letters and digits that stand for an id."""
    if len(call_id) == 9 and call_id.isalnum() and call_id.isascii():
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode(), digest_size=8).digest(), "big")
    return "".join(_ID_LETTERS[number // 62**place % 62] for place in range(9))
