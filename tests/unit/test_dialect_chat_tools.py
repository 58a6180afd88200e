"""The chat dialect with tools: the prompt for the model, refusals by name, and calls in answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.frontend.dialects import chat
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    GenerateRequest,
    InputForm,
    ModelFacts,
    TokenText,
    Tool,
    ToolCallPart,
    ToolChoice,
    Usage,
)
from moeserve.frontend.errors import ApiError
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import TokenLogprobs
from tests.support.openai_types import openai_type
from tests.support.tiny_model import byte_tokenizer
from tests.support.written import answer_of

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
TOKENIZER = TextTokenizer(byte_tokenizer())
USAGE = Usage(prompt_tokens=5, completion_tokens=2)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True}}


def parse(**changes: Any) -> GenerateRequest:
    base = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    return chat.parse(json.dumps({**base, **changes}).encode(), FACTS)


def refuse(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**changes)
    assert caught.value.status == 400
    return caught.value


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    (prompt,) = parse(messages=list(messages)).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def test_tools_reach_the_request_and_the_prompt() -> None:
    request = parse(tools=[WEATHER, CLOCK])
    assert request.tools == (Tool("weather", "Tells.", SCHEMA), Tool("clock", strict=True))
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == request.tools
    assert (request.tool_choice, request.parallel_tool_calls) == (ToolChoice("auto"), True)
    assert parse(tools=[WEATHER], parallel_tool_calls=False).parallel_tool_calls is False


ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("none", ToolChoice("none")),
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "clock"}}, ToolChoice("required", ("clock",))),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, ToolChoice("required", ("clock",))),
        ({"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": "auto"}}, ToolChoice("auto", ("clock",))),
    ],
)
def test_every_choice_of_tools(choice: Any, expected: ToolChoice) -> None:
    assert parse(tools=[WEATHER, CLOCK], tool_choice=choice).tool_choice == expected


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": [named("no spaces")]}, "tools[0].function.name"),
        ({"tools": [named("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [named("")]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [named(f"t{n}") for n in range(limits.MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": {"x": "y" * 300_000}}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters"),
        ({"tools": "f"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("weather")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": named("clock")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "tool_choice": named(5)}, "tool_choice.function.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": "x"}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": ["weather"]}}},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"tools": [WEATHER], "functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"functions": [{"name": "f"}], "function_call": {}}, "function_call.name"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_bad_tools_and_functions_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refuse(**fields).param == param


def test_no_tools_and_no_wish_for_any_are_fine() -> None:
    for choice in ("none", "auto"):
        assert parse(tool_choice=choice).tools == ()
    assert parse(tools=[], functions=[], function_call="auto").tools == ()


# Conversations with calls.

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
READ_CALL = {**CALL, "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def test_calls_and_results_in_history() -> None:
    read = messages_of(
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
        {"role": "assistant", "reasoning": "so"},
        {"role": "tool", "tool_call_id": "other", "name": "n"},
    )
    assert read[1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [READ_CALL]},
        {"role": "tool", "content": "sun", "tool_call_id": "call_1", "name": "weather"},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
        {"role": "tool", "content": "", "tool_call_id": "other", "name": "n"},
    ]


@pytest.mark.parametrize(
    "spelling", ['{"city":"Rome","n":1}', '{ "city" : "Rome",\n "n": 1 }', {"city": "Rome", "n": 1}]
)
def test_arguments_are_the_same_however_a_client_spells_them(spelling: Any) -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": spelling}}
    (message,) = messages_of({"role": "assistant", "tool_calls": [call]})
    assert list(message["tool_calls"][0]["function"]["arguments"].items()) == [("city", "Rome"), ("n", 1)]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}),
        (None, {}),
        ("{}", {}),
        ("{oops", {"invalid_arguments": "{oops"}),
        ("[1]", {"invalid_arguments": "[1]"}),
        ("[" * 100_000, {"invalid_arguments": "[" * 100_000}),
    ],
)
def test_a_conversation_goes_on_after_broken_arguments(arguments: Any, read: Any) -> None:
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    (message,) = messages_of({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == read


def test_older_functions_read_as_tools_and_their_messages_as_calls() -> None:
    request = parse(
        functions=[{"name": "weather", "parameters": SCHEMA}],
        function_call={"name": "weather"},
        messages=[
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "weather", "content": "sun"},
        ],
    )
    assert request.tools == (Tool("weather", None, SCHEMA),)
    assert (request.tool_choice, request.parallel_tool_calls) == (ToolChoice("required", ("weather",)), False)
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    call_id = prompt.messages[1]["tool_calls"][0]["id"]
    assert call_id.startswith("call_")
    assert prompt.messages[2] == {"role": "tool", "name": "weather", "content": "sun", "tool_call_id": call_id}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [CALL] * 300}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0].custom.name"),
        ({"role": "tool", "content": [{"type": "video"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
    ],
)
def test_bad_calls_in_history_are_refused_by_name(message: dict[str, Any], param: str) -> None:
    assert refuse(messages=[message]).param == param


def test_an_image_in_a_tools_result_is_a_placeholder_and_the_session_goes_on() -> None:
    content = [{"type": "text", "text": "shot"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    request = parse(messages=[{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": content}])
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1]["content"] == "shot\n[image left out: this model reads text]"


def test_custom_calls_and_parts_of_thinking_in_history_are_read() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "Ok."}]
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    request = parse(messages=[{"role": "assistant", "content": parts, "tool_calls": [called]}])
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    (message,) = prompt.messages
    assert (message["content"], message["reasoning_content"]) == ("Ok.", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "*** Begin"}}


def test_a_message_is_continued_on_request() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"}]
    request = parse(messages=messages, continue_final_message=True, echo=True)
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.continued, prompt.add_generation_prompt, request.echo) == ("Hel", False, True)
    assert refuse(messages=messages, continue_final_message=True, add_generation_prompt=True).param == (
        "continue_final_message"
    )
    assert refuse(continue_final_message=True).param == "continue_final_message"
    assert refuse(echo=True).param == "echo"


def test_text_options_reach_the_request() -> None:
    request = parse(include_stop_str_in_output=True, skip_special_tokens=False, prompt_logprobs=3)
    assert (request.include_stop, request.skip_special_tokens, request.prompt_logprobs) == (True, False, 3)
    assert request.sampling.prompt_logprobs == 3
    plain = parse(prompt_logprobs=False)
    assert (plain.include_stop, plain.skip_special_tokens, plain.prompt_logprobs) == (False, True, None)
    assert refuse(prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    assert refuse(prompt_logprobs=21).param == "prompt_logprobs"
    assert refuse(prompt_logprobs=True).param == "prompt_logprobs"


# Answers.


def formatter(**changes: Any) -> chat.ChatFormatter:
    return chat.ChatFormatter("chatcmpl-1", 17, parse(**changes), TOKENIZER, "fp_x")


def event(data: bytes) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    openai_type("chat.ChatCompletionChunk").validate_python(chunk)
    choice: dict[str, Any] = chunk["choices"][0]
    return choice


CALLED = Delta(0, "", [], "tool_calls", "hm", [ToolCallPart(0, "{}", "call_1", "clock")])


def test_a_whole_answer_with_a_call() -> None:
    body = answer_of(formatter(tools=[CLOCK]).complete([CALLED], USAGE))
    openai_type("chat.ChatCompletion").validate_python(body)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    assert message["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    ]


def test_a_streamed_call_has_its_head_once() -> None:
    writer = formatter(tools=[CLOCK], stream=True)
    first = event(writer.delta(Delta(0, calls=[ToolCallPart(0, "", "call_1", "clock")]), USAGE))["delta"]
    assert first == {
        "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "clock", "arguments": ""}}]
    }
    later = event(writer.delta(Delta(0, calls=[ToolCallPart(0, '{"a'), ToolCallPart(1, "}")]), USAGE))["delta"]
    assert later == {
        "tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}, {"index": 1, "function": {"arguments": "}"}}]
    }


FORM = {"syntax": "regex", "definition": "[0-9]+"}
PATCH = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": FORM}}}
CALLED_CUSTOM = [
    ToolCallPart(0, "", "call_1", "patch"),
    ToolCallPart(0, '{"input": "'),
    ToolCallPart(0, '1\\n2"}'),
    ToolCallPart(1, "{}", "call_2", "clock"),
    ToolCallPart(2, '{"input":"3"}', "call_3", "patch"),
]


def test_a_custom_tool_is_a_function_of_one_text_that_its_format_holds() -> None:
    plain, held = parse(tools=[{"type": "custom", "custom": {"name": "a", "description": "d"}}, PATCH]).tools
    assert (plain.name, plain.description, plain.strict, plain.input_form) == ("a", "d", False, None)
    assert (held.name, held.strict) == ("patch", True)
    assert held.input_form == InputForm("[0-9]+", "tools[1].custom.format.grammar.definition")
    assert held.parameters is not None
    assert held.parameters["required"] == ["input"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}, "tools[0].custom.format.type"),
        (
            {"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}},
            "tools[0].custom.format.grammar.definition",
        ),
    ],
)
def test_bad_custom_tools_are_refused_by_name(tool: dict[str, Any], param: str) -> None:
    assert refuse(tools=[tool]).param == param


def test_a_custom_tool_is_chosen_by_its_name() -> None:
    named = {"type": "custom", "custom": {"name": "patch"}}
    assert parse(tools=[CLOCK, PATCH], tool_choice=named).tool_choice == ToolChoice("required", ("patch",))
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    assert parse(tools=[CLOCK, PATCH], tool_choice=allowed).tool_choice == ToolChoice("auto", ("patch",))


def test_whole_and_streamed_calls_of_custom_tools_have_their_input_as_text() -> None:
    whole = Delta(0, "", [], "tool_calls")
    whole.append(Delta(0, "", [], "tool_calls", calls=CALLED_CUSTOM))
    (choice,) = answer_of(formatter(tools=[CLOCK, PATCH]).complete([whole], USAGE))["choices"]
    calls = choice["message"]["tool_calls"]
    assert [call["type"] for call in calls] == ["custom", "function", "custom"]
    assert [call["custom"] for call in calls[::2]] == [
        {"name": "patch", "input": "1\n2"},
        {"name": "patch", "input": "3"},
    ]
    writer = formatter(tools=[CLOCK, PATCH], stream=True)
    parts = []
    for number, part in enumerate(CALLED_CUSTOM):
        finish = "tool_calls" if number == len(CALLED_CUSTOM) - 1 else None
        data = writer.delta(Delta(0, finish_reason=finish, calls=[part]), USAGE)
        parts += json.loads(data.removeprefix(b"data: "))["choices"][0]["delta"].get("tool_calls", [])
    assert [(part["index"], part.get("custom")) for part in parts] == [
        (0, {"name": "patch", "input": ""}),
        (0, {"input": "1\n2"}),
        (1, None),
        (2, {"name": "patch", "input": ""}),
        (2, {"input": "3"}),
    ]


def test_older_functions_get_the_older_form_of_an_answer() -> None:
    writer = formatter(functions=[{"name": "clock"}])
    (choice,) = answer_of(writer.complete([CALLED], USAGE))["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "clock", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    first = event(writer.delta(Delta(0, calls=[ToolCallPart(0, "{", "call_1", "clock")]), USAGE))
    assert first["delta"] == {"function_call": {"name": "clock", "arguments": "{"}}
    last = event(writer.delta(Delta(0, "", [], "tool_calls", "", [ToolCallPart(0, "}")]), USAGE))
    assert (last["delta"], last["finish_reason"]) == ({"function_call": {"arguments": "}"}}, "function_call")


def test_prompt_log_probabilities_by_token_id() -> None:
    prompt = [
        TokenText(256, 0),
        TokenText(97, 0, TokenLogprobs(-2.5, ((98, -0.5), (97, -2.5)))),
        TokenText(99, 1, TokenLogprobs(float("-inf"), ((98, -0.5),))),
    ]
    body = answer_of(formatter(prompt_logprobs=2).complete([Delta(0, "x", prompt=prompt)], USAGE))
    assert body["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -2.5, "rank": 2, "decoded_token": "a"},
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
        {
            "99": {"logprob": -9999.0, "rank": None, "decoded_token": "c"},
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
    ]
    assert "prompt_logprobs" not in answer_of(formatter().complete([Delta(0, "x")], USAGE))
