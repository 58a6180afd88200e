"""The answers of a model with judgement, where the user spells the calls: `get_weather({"city": "Rome"})`.

The demo model cannot tell when to call a tool. After the last of a user's messages that spells calls of offered tools
the answer is decided here: the calls that have no result yet, then a sentence with the results, or what the model
writes in the form that the answer must have. Every other conversation is the model's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, OutputFormat, Tool

_LONGEST_SENTENCE = 400
# Tools that take an agent's answer, where the agent has the model call something in any case.
_ANSWERING = ("final_answer", "final_result")

Calls = list[dict[str, Any]]

# Beginnings of the questions of `canitoolcall probe`, which spell no call, with calls or an answer.
QUESTIONS: dict[str, Calls | str] = {
    "What's the weather in Paris": [{"name": "get_weather", "arguments": {"city": "Paris"}}],
    "Get the current weather in Paris and in Tokyo.": [
        {"name": "get_weather", "arguments": {"city": "Paris", "unit": "c"}},
        {"name": "get_weather", "arguments": {"city": "Tokyo"}},
    ],
    "What is 17 + 25?": "42",
    "Create an event titled": [
        {
            "name": "create_event",
            "arguments": {
                "title": "Design review",
                "start": "2026-10-01T15:00:00Z",
                "attendees": [
                    {"name": "Ana", "email": "ana@example.com"},
                    {"name": "Bo", "email": "bo@example.com"},
                ],
                "location": {"city": "Berlin", "room": "4.12"},
            },
        }
    ],
    "Save a note titled": [
        {
            "name": "save_note",
            "arguments": {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"},
        }
    ],
    "What time is it on the server?": [{"name": "get_server_time", "arguments": {}}],
    "Think it through step by step": [{"name": "record_answer", "arguments": {"answer": "9.9"}}],
}


def scripted_form(request: GenerateRequest) -> OutputFormat | None:
    """Return the form of the answer's text, which says calls as hermes does; None where the model decides."""
    prompt = request.prompts[0]
    if not isinstance(prompt, ChatPrompt) or not request.tools or request.tool_choice.mode == "none":
        return None
    place, said = _last_spelled(prompt.messages, request.tools)
    if said is None:
        return None
    if isinstance(said, str):
        return _exactly(said)
    later = prompt.messages[place + 1 :]
    results = [message["content"].strip() for message in later if message["role"] == "tool"]
    # smolagents has a user say the results of all calls together.
    together = [text for message in later if (text := message.get("content") or "").startswith("Observation:")]
    waiting = [] if together else said[len(results) :]
    results += together
    if waiting:
        return _exactly(_written(waiting if request.parallel_tool_calls else waiting[:1]))
    sentence = f"The tools said: {'; '.join(results)}"[:_LONGEST_SENTENCE]
    if request.tool_choice.mode == "required":
        call = _answer_by_call(request.tools, sentence)
        return None if call is None else _exactly(call)
    # Where the answer has a form already the model writes it.
    return request.output_format or _exactly(sentence)


def _exactly(text: str) -> OutputFormat:
    return OutputFormat("grammar", f"start: {json.dumps(text, ensure_ascii=False)}")


def _last_spelled(messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> tuple[int, Calls | str | None]:
    """Return the place of the last user's message that decides the answer, and its calls or, for some questions, its
    answer; None where there is no such message."""
    for place in reversed(range(len(messages))):
        message = messages[place]
        text = message.get("content") or ""
        if message["role"] != "user":
            continue
        if calls := list(_spelled(text, tools)):
            return place, calls
        known = next((answer for beginning, answer in QUESTIONS.items() if text.startswith(beginning)), None)
        if known is not None:
            return place, known
    return -1, None


def _spelled(text: str, tools: Sequence[Tool]) -> Iterator[dict[str, Any]]:
    """Yield the calls in a text, in its order."""
    names = "|".join(re.escape(tool.name) for tool in sorted(tools, key=lambda tool: -len(tool.name)))
    for found in re.finditer(rf"(?<![\w.-])({names})\((?=\{{)", text):
        try:
            arguments, _ = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError:
            continue
        yield {"name": found[1], "arguments": arguments}


def _answer_by_call(tools: Sequence[Tool], sentence: str) -> str | None:
    """Return the call of the tool that takes the agent's answer; None where no tool does."""
    for tool in tools:
        if tool.name in _ANSWERING:
            (argument, *_) = (tool.parameters or {}).get("properties", {"answer": {}})
            return _written([{"name": tool.name, "arguments": {argument: sentence}}])
    return None


def _written(calls: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
