"""The answers of a model with judgement, for conversations whose user spells the calls: `get_weather({"city": "Rome"})`.

The demo model cannot tell when to call a tool. Where the last of a user's messages that spells calls of offered tools
is found, the text of the answer is decided here: the calls that have no result yet, then a sentence with the results.
Every other conversation is the model's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, Tool

_LONGEST_SENTENCE = 400
# Tools that take an agent's answer, where the agent has the model call something in any case.
_ANSWERING = ("final_answer", "final_result")


def scripted_text(request: GenerateRequest) -> str | None:
    """Return the text that the model is to write, in hermes' form; None where it writes its own."""
    prompt = request.prompts[0]
    if not isinstance(prompt, ChatPrompt) or not request.tools or request.tool_choice.mode == "none":
        return None
    place, calls = _last_spelled(prompt.messages, request.tools)
    if not calls:
        return None
    results = [text for message in prompt.messages[place + 1 :] if (text := _result(message)) is not None]
    waiting = calls[len(results) :]
    if waiting:
        return _written(waiting if request.parallel_tool_calls else waiting[:1])
    sentence = f"The tools said: {'; '.join(results)}"[:_LONGEST_SENTENCE]
    if request.tool_choice.mode == "required":
        return _answer_by_call(request.tools, sentence)
    return sentence if request.output_format is None else None


def exact_grammar(text: str) -> str:
    """Return a llguidance grammar that allows one text."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps(text)}"}]})


def _last_spelled(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> tuple[int, list[dict[str, Any]]]:
    """Return the last user's message that spells calls, and the calls; -1 and none where there is no such message."""
    for place in reversed(range(len(messages))):
        message = messages[place]
        if message["role"] == "user" and (calls := list(_spelled(message.get("content") or "", tools))):
            return place, calls
    return -1, []


def _spelled(text: str, tools: Sequence[Tool]) -> Iterator[dict[str, Any]]:
    """Yield the calls in a text, in its order."""
    names = "|".join(re.escape(tool.name) for tool in sorted(tools, key=lambda tool: -len(tool.name)))
    for found in re.finditer(rf"(?<![\w.-])({names})\((?=\{{)", text):
        try:
            arguments, _ = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            continue
        yield {"name": found[1], "arguments": arguments}


def _result(message: dict[str, Any]) -> str | None:
    """Return the text of a tool's result; smolagents has a user say it."""
    text: str = message.get("content") or ""
    if message["role"] == "tool" or (message["role"] == "user" and text.startswith("Observation:")):
        return text.strip()
    return None


def _answer_by_call(tools: Sequence[Tool], sentence: str) -> str | None:
    """Return the call of the tool that takes the agent's answer; None where no tool does."""
    for tool in tools:
        if tool.name in _ANSWERING:
            (argument, *_) = (tool.parameters or {}).get("properties", {"answer": {}})
            return _written([{"name": tool.name, "arguments": {argument: sentence}}])
    return None


def _written(calls: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
