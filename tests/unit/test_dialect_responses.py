"""The Responses dialect: its requests in."""

import json
from typing import Any

import msgspec
import pytest

from moeserve.frontend.dialects import chat, responses
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    GenerateRequest,
    InputForm,
    ModelFacts,
    OutputFormat,
    Tool,
    ToolChoice,
)
from moeserve.frontend.dialects.responses_items import ClientName, Earlier, Named, seal_reasoning
from moeserve.frontend.errors import ApiError
from tests.support.refusals import refused

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


def parse(earlier: Earlier | None = None, **changes: Any) -> GenerateRequest:
    body = json.dumps({"model": "tiny", "input": "hi", **changes}).encode()
    return responses.parse(body, FACTS, earlier or Earlier())


def prompt_of(request: GenerateRequest) -> ChatPrompt:
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def messages(items: Any, **changes: Any) -> list[dict[str, Any]]:
    return prompt_of(parse(input=items, **changes)).messages


def turn_of(request: GenerateRequest) -> responses.Turn:
    return msgspec.json.decode(request.repeated, type=responses.Turn)


def refuse(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**changes)
    return caught.value


def call(name: str, call_id: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "call_id": call_id, "arguments": arguments, **fields}


def result(call_id: str, output: Any = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def in_chat(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_text_is_a_user_message_after_the_instructions() -> None:
    assert messages("hello", instructions="be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]


def test_a_conversation_is_the_same_prompt_as_through_chat() -> None:
    spoken = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "developer", "content": "in the middle"},
        {"role": "user", "content": ""},
    ]
    body = {"model": "tiny", "messages": spoken, "reasoning_effort": "low"}
    (through_chat,) = chat.parse(json.dumps(body).encode(), FACTS).prompts
    assert prompt_of(parse(input=spoken, reasoning={"effort": "low"})) == through_chat
    assert prompt_of(parse(input=spoken[1:], instructions="s", reasoning={"effort": "low"})) == through_chat


def test_an_agents_turns_become_chats_messages() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "two"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look", "annotations": []}],
        },
        call("weather", "c1", '{ "city":"Paris" }', id="fc_1", status="completed"),
        call("weather", "c2", '{"city": "Rome"}'),
        result("c1", "sunny"),
        result("c2", [{"type": "input_text", "text": "wet"}, {"type": "input_text", "text": "cold"}]),
        {"role": "assistant", "content": "done"},
    ]
    assert prompt_of(parse(input=items, tools=[WEATHER])) == ChatPrompt(
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": "I look",
                "reasoning_content": "two",
                "tool_calls": [
                    in_chat("c1", "weather", {"city": "Paris"}),
                    in_chat("c2", "weather", {"city": "Rome"}),
                ],
            },
            {"role": "tool", "content": "sunny", "tool_call_id": "c1", "name": "weather"},
            {"role": "tool", "content": "wet\ncold", "tool_call_id": "c2", "name": "weather"},
            {"role": "assistant", "content": "done"},
        ],
        tools=(Tool("weather", None, {"type": "object"}),),
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"a": 1.0}', {"a": 1.0}),
        ("not json", {"invalid_arguments": "not json"}),
        ("[1]", {"invalid_arguments": "[1]"}),
    ],
)
def test_arguments_are_objects_whatever_the_model_wrote(arguments: str, expected: dict[str, Any]) -> None:
    (message,) = messages([call("f", "1", arguments)])
    assert message["tool_calls"] == [in_chat("1", "f", expected)]


def test_messages_of_the_assistant_stay_apart_and_text_after_calls_joins_them() -> None:
    assert messages([{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    items = [call("f", "1"), {"role": "assistant", "content": "late"}, result("1")]
    assert [(message["role"], message["content"]) for message in messages(items)] == [
        ("assistant", "late"),
        ("tool", "ok"),
    ]


def test_reasoning_comes_from_content_else_from_what_this_server_sealed_else_from_the_summary() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    for fields, expected in (
        ({"encrypted_content": seal_reasoning("long ü"), "summary": summary}, "long ü"),
        ({"encrypted_content": "gAAAA", "summary": summary}, "short"),
        ({"encrypted_content": "moeserve.1.%%%", "content": None, "summary": summary}, "short"),
    ):
        (message,) = messages([{"type": "reasoning", "id": "rs", **fields}, call("f", "1")])
        assert message["reasoning_content"] == expected
    (message,) = messages([{"type": "reasoning", "id": "rs", "summary": []}, call("f", "1")])
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (None, "input"),
        ([], "input"),
        ([{}], "input[0].type"),
        ([{"role": "wizard", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0].type"),
        ([{"type": "reasoning", "content": "x"}], "input[0].content"),
        ([{"type": "function_call", "name": "f", "call_id": "1"}], "input[0].arguments"),
        ([{"type": "function_call", "name": "f", "arguments": ""}], "input[0].call_id"),
        ([call("f", "1", namespace=3)], "input[0].namespace"),
        ([call("f", "1"), result("2")], "input[1].call_id"),
        ([call("f", "1"), result("1", None)], "input[1].output"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
        (["hi"], "input[0]"),
        ([{"role": "user", "content": "x"}] * 4097, "input"),
    ],
)
def test_bad_items_are_refused_by_name(items: Any, param: str) -> None:
    error = refuse(input=items)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("items", "named"),
    [
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "input[0].content[0].type=input_image",
        ),
        (
            [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}],
            "input[0].content[0].type=input_file",
        ),
        ([call("f", "1"), result("1", [{"type": "x"}])], "input[1].output[0].type=x"),
        ([{"type": "odd", "id": "x"}], "input[0].type=odd"),
    ],
)
def test_what_is_not_text_is_refused_in_words(items: Any, named: str) -> None:
    error = refuse(input=items)
    assert (error.code, named in error.message) == ("unsupported_parameter", True)


def test_a_summary_that_only_its_maker_reads_is_refused_in_a_sentence() -> None:
    error = refuse(input=[{"type": "compaction", "encrypted_content": "x"}])
    assert (error.param, "only its maker can read" in error.message) == ("input[0].type", True)


def test_calls_of_built_in_tools_are_read_with_their_results_or_left_out() -> None:
    shell = {"type": "local_shell_call", "call_id": "s", "action": {"type": "exec", "command": ["ls"]}}
    found = messages(
        [
            {"role": "user", "content": "go"},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            shell,
            {"type": "local_shell_call_output", "call_id": "s", "output": "a.txt"},
            {"type": "function_call", "name": "look", "call_id": "1", "arguments": {"path": "a.png"}},
            result("1", [{"type": "input_text", "text": "shot"}, {"type": "input_image", "image_url": "data:x"}]),
            {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "done"}]},
        ]
    )
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert found[1]["tool_calls"] == [in_chat("s", "local_shell", shell["action"])]
    assert found[2]["content"] == "a.txt"
    assert found[3]["tool_calls"] == [in_chat("1", "look", {"path": "a.png"})]
    assert found[4]["content"] == "shot\n[image left out: this model reads text]"
    assert found[5]["content"] == "done"


def test_tools_that_items_bring_can_be_called_and_count_once() -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [WEATHER, {"type": "custom", "name": "exec"}]}
    deferred = [{"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "find"}]}]
    items = [
        brought,
        brought,
        {"type": "tool_search_call", "call_id": "t", "arguments": {"query": "find"}},
        {"type": "tool_search_output", "call_id": "t", "tools": deferred},
        {"role": "user", "content": "go"},
    ]
    request = parse(input=items, tools=[WEATHER], tool_choice={"type": "function", "name": "find", "namespace": "mcp"})
    assert [tool.name for tool in request.tools] == ["weather", "exec", "mcp__find"]
    assert turn_of(request).names["exec"] == ClientName("exec", None, True)
    assert len(turn_of(request).repeated["tools"]) == 1
    assert [message["role"] for message in prompt_of(request).messages] == ["assistant", "tool", "user"]
    earlier = Earlier([json.dumps([brought]).encode()])
    later = parse(input="on", earlier=earlier, previous_response_id="resp_1")
    assert [tool.name for tool in later.tools] == ["weather", "exec"]


def test_functions_reach_the_model_and_the_answer_repeats_all_their_fields() -> None:
    request = parse(tools=[{**WEATHER, "description": "d", "strict": True}, {"type": "function", "name": "now"}])
    assert request.tools == (Tool("weather", "d", {"type": "object"}, True), Tool("now"))
    assert prompt_of(request).tools == request.tools
    assert turn_of(request).repeated["tools"] == [
        {"type": "function", "name": "weather", "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "now", "description": None, "parameters": None, "strict": False},
    ]


def test_a_namespaces_functions_have_its_name_for_the_model_alone() -> None:
    tools = [{"type": "namespace", "name": "mcp", "description": "d", "tools": [WEATHER, {"type": "web_search"}]}]
    request = parse(input=[call("weather", "1", namespace="mcp")], tools=tools)
    assert [tool.name for tool in request.tools] == ["mcp__weather"]
    assert turn_of(request).names == {"mcp__weather": ClientName("weather", "mcp")}
    assert prompt_of(request).messages[0]["tool_calls"][0]["function"]["name"] == "mcp__weather"
    assert request.dropped_tools == ("web_search",)


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    items = [
        {"type": "custom_tool_call", "call_id": "1", "name": "sql", "input": "SELECT 1"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "1"},
    ]
    request = parse(input=items, tools=[{"type": "custom", "name": "sql", "description": "d"}])
    (tool,) = request.tools
    assert (tool.name, tool.description) == ("sql", "d")
    assert tool.parameters is not None
    assert tool.parameters["required"] == ["input"]
    assert prompt_of(request).messages[0]["tool_calls"] == [in_chat("1", "sql", {"input": "SELECT 1"})]
    assert prompt_of(request).messages[1] == {"role": "tool", "content": "1", "tool_call_id": "1", "name": "sql"}


def custom(name: str, form: Any) -> dict[str, Any]:
    return {"type": "custom", "name": name, "format": form}


def test_a_custom_tool_with_a_grammar_is_strict_and_the_model_and_the_answer_have_the_grammar() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" LF\n%import common.LF'}
    request = parse(tools=[custom("patch", form)])
    (tool,) = request.tools
    assert tool.strict
    assert tool.parameters is not None
    assert form["definition"] in tool.parameters["properties"]["input"]["description"]
    assert turn_of(request).repeated["tools"][0]["format"] == form


@pytest.mark.parametrize(
    ("definition", "pattern"), [("^a|b$", "a|b"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("[0-9]+", "[0-9]+")]
)
def test_anchors_around_a_custom_tools_expression_are_left_out_as_it_matches_whole_texts(
    definition: str, pattern: str
) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    (tool,) = parse(tools=[custom("c", form)]).tools
    assert tool.input_form == InputForm(pattern, "tools[0].format.definition")


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "function": {"name": "f"}}], "tools[0].name"),
        ([{"type": "function", "name": "two words"}], "tools[0].name"),
        ([{"type": "function", "name": "x" * 129}], "tools[0].name"),
        ([{"type": "function", "name": 1}], "tools[0].name"),
        ([{**WEATHER, "description": "x" * 140_000}], "tools[0].description"),
        ([{**WEATHER, "parameters": {"x": "y" * 300_000}}], "tools[0].parameters"),
        ([{"type": "namespace", "name": "n", "tools": [WEATHER, WEATHER]}], "tools[0].tools[1].name"),
        ([{"type": "function", "name": f"f{n}"} for n in range(1025)], "tools"),
        ([{"type": "function", "name": "f", "parameters": []}], "tools[0].parameters"),
        ([{"type": "function", "name": "f", "strict": "yes"}], "tools[0].strict"),
        ([{"type": "function", "name": "f", "description": 1}], "tools[0].description"),
        ([WEATHER, WEATHER], "tools[1].name"),
        ([{"type": "namespace", "name": "n", "tools": {}}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0].name"),
        ([custom("c", {"type": "json"})], "tools[0].format.type"),
        ([custom("c", [])], "tools[0].format"),
        ([custom("c", {"type": "grammar", "definition": "x"})], "tools[0].format.syntax"),
        ([custom("c", {"type": "grammar", "syntax": "gbnf", "definition": "x"})], "tools[0].format.syntax"),
        ([custom("c", {"type": "grammar", "syntax": "regex"})], "tools[0].format.definition"),
        (
            [custom("c", {"type": "grammar", "syntax": "lark", "definition": "x" * 2**18})],
            "tools[0].format.definition",
        ),
        ([custom("c", {"type": "grammar", "syntax": "lark", "definition": "x"})], "tools[0].format.definition"),
    ],
)
def test_bad_tools_and_namespaces_are_refused_by_name(tools: Any, param: str) -> None:
    assert refuse(tools=tools).param == param


def test_built_in_tools_are_dropped_and_named() -> None:
    request = parse(tools=[{"type": "web_search"}, WEATHER, {"type": "mcp", "server_label": "x"}])
    assert request.dropped_tools == ("web_search", "mcp")
    assert [tool["type"] for tool in turn_of(request).repeated["tools"]] == ["function"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "weather"}, ToolChoice("required", ("weather",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            ToolChoice("auto", ("weather",)),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "web_search"}, {"type": "function", "name": "now"}],
            },
            ToolChoice("required", ("now",)),
        ),
        ({"type": "allowed_tools", "tools": [{"type": "web_search"}]}, ToolChoice("none")),
    ],
)
def test_the_choice_of_tools(choice: Any, expected: ToolChoice) -> None:
    request = parse(tools=[WEATHER, {"type": "function", "name": "now"}, {"type": "web_search"}], tool_choice=choice)
    assert request.tool_choice == expected


@pytest.mark.parametrize(
    ("tools", "choice", "param", "word"),
    [
        ([], "required", "tool_choice", "none"),
        ([{"type": "web_search"}], "required", "tool_choice", "web_search"),
        ([{"type": "web_search"}], {"type": "web_search"}, "tool_choice.type", "web_search"),
        ([WEATHER], {"type": "function", "name": "other"}, "tool_choice.name", "other"),
        ([WEATHER], {"type": "allowed_tools", "mode": "required", "tools": []}, "tool_choice", "none"),
        ([WEATHER], {"type": "allowed_tools", "mode": "maybe", "tools": []}, "tool_choice.mode", "auto"),
        ([WEATHER], "sometimes", "tool_choice", "auto"),
        ([WEATHER], {}, "tool_choice", "auto"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(tools: Any, choice: Any, param: str, word: str) -> None:
    error = refuse(tools=tools, tool_choice=choice)
    assert (error.status, error.param) == (400, param)
    assert word in error.message


def test_formats_of_the_text() -> None:
    schema = {"type": "object"}
    named = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert parse(text={"format": {"type": "text"}}).output_format is None
    assert parse(text={"format": {"type": "json_object"}}).output_format == OutputFormat(
        "json_object", None, "text.format"
    )
    request = parse(text={"format": named, "verbosity": "low"})
    assert request.output_format == OutputFormat("json_schema", schema, "text.format.schema")
    assert turn_of(request).repeated["text"] == {"format": {**named, "description": None}, "verbosity": "low"}
    assert request.ignored == ("verbosity",)
    assert refuse(text={"format": {"type": "json_schema", "name": "n"}}).param == "text.format.schema"
    assert refuse(text={"format": {"type": "json_schema", "schema": {}}}).param == "text.format.name"
    assert refuse(text={"format": {"type": "xml"}}).param == "text.format.type"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", {"id": "p"}),
        ("context_management", [{"type": "compaction"}]),
        ("n", 2),
        ("prompt_logprobs", 3),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("response_format", {"type": "json_object"}),
        ("max_tokens", 5),
    ],
)
def test_fields_that_are_not_served_are_refused_in_words(field: str, value: Any) -> None:
    error = refuse(**{field: value})
    assert (error.code, error.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_output_tokens", 0, "max_output_tokens"),
        ("max_tool_calls", 0, "max_tool_calls"),
        ("top_logprobs", 21, "top_logprobs"),
        ("truncation", "sometimes", "truncation"),
        ("reasoning", {"effort": "much"}, "reasoning.effort"),
        ("reasoning", {"summary": "long"}, "reasoning.summary"),
        ("text", {"verbosity": "loud"}, "text.verbosity"),
        ("metadata", {"k": 1}, "metadata[...]"),
        ("metadata", {"k": "v" * 513}, "metadata"),
        ("metadata", {str(i): "" for i in range(17)}, "metadata"),
        ("user", "u" * 513, "user"),
        ("stream_options", {}, "stream_options"),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: Any, param: str) -> None:
    error = refuse(**{field: value})
    assert (error.status, error.param) == (400, param)


def nested(place: str, depth: int) -> bytes:
    """Return a body that holds objects in objects at that place."""
    value = '{"a":' * depth + "1" + "}" * depth
    fields = {
        "tools": f'"tools": [{{"type": "function", "name": "f", "parameters": {value}}}], "input": "x"',
        "text": f'"text": {{"format": {{"type": "json_schema", "name": "n", "schema": {value}}}}}, "input": "x"',
        "input": f'"input": [{{"role": "user", "content": "x", "extra": {value}}}]',
    }
    return f'{{"model": "tiny", {fields[place]}}}'.encode()


@pytest.mark.parametrize("place", ["tools", "text", "input"])
def test_what_is_nested_too_deeply_is_refused_at_every_depth(place: str) -> None:
    responses.parse(nested(place, 50), FACTS, Earlier())
    for depth in (400, *range(980, 1000), 100_000):
        with refused("invalid_json"):
            responses.parse(nested(place, depth), FACTS, Earlier())


def test_options_reach_the_request_and_are_repeated() -> None:
    request = parse(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        reasoning={"effort": "high", "summary": "auto"},
        parallel_tool_calls=False,
        metadata={"a": "b"},
        prompt_cache_key="k",
        truncation="auto",
        seed=3,
        stop="x",
    )
    assert (request.max_tokens, request.sampling.temperature, request.sampling.top_p) == (7, 0.5, 0.25)
    assert (request.seed, request.stop, request.parallel_tool_calls) == (3, ("x",), False)
    assert prompt_of(request).variables == {"reasoning_effort": "high"}
    assert request.thought.effort == "high"
    repeated = turn_of(request).repeated
    assert repeated["reasoning"] == {"effort": "high", "summary": None}
    assert (repeated["metadata"], repeated["prompt_cache_key"], repeated["truncation"]) == ({"a": "b"}, "k", "disabled")


def test_log_probabilities_are_asked_for_by_number_or_by_include() -> None:
    assert parse().sampling.logprobs is None
    assert parse(top_logprobs=3).sampling.logprobs == 3
    assert parse(include=["message.output_text.logprobs"]).sampling.logprobs == 0


ASKED = {"role": "user", "content": "weather?"}
CALLED = call("weather", "c1", '{"city":"Paris"}', id="fc_1")


def stored() -> Earlier:
    """A turn that called a tool."""
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    turns = [json.dumps(items).encode() for items in ([ASKED], [reasoning, CALLED])]
    return Earlier(turns, {"fc_1": json.dumps(CALLED).encode()})


def test_an_earlier_response_goes_before_the_input_without_its_instructions() -> None:
    request = parse(stored(), input=[result("c1")], previous_response_id="resp_1", instructions="new")
    assert prompt_of(request).messages == [
        {"role": "system", "content": "new"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [in_chat("c1", "weather", {"city": "Paris"})],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c1", "name": "weather"},
    ]
    assert msgspec.json.decode(request.own_items) == [result("c1")]


def test_items_are_kept_for_a_stored_response_alone() -> None:
    assert msgspec.json.decode(parse(input=[CALLED]).own_items) == [CALLED]
    assert parse(input=[CALLED], store=False).own_items == b"[]"


def test_a_reference_stands_for_a_kept_item() -> None:
    request = parse(stored(), input=[{"type": "item_reference", "id": "fc_1"}, result("c1")])
    assert [message["role"] for message in prompt_of(request).messages] == ["assistant", "tool"]
    assert msgspec.json.decode(request.own_items) == [CALLED, result("c1")]


def test_a_reference_to_a_reference_is_an_item_that_is_not_kept() -> None:
    reference = {"type": "item_reference", "id": "x"}
    with pytest.raises(ApiError) as caught:
        parse(Earlier(None, {"x": json.dumps(reference).encode()}), input=[reference])
    assert caught.value.code == "item_not_found"


@pytest.mark.parametrize("name", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_goes_before_the_input(name: Any) -> None:
    request = parse(Earlier([json.dumps([ASKED]).encode()]), conversation=name)
    assert [message["content"] for message in prompt_of(request).messages] == ["weather?", "hi"]
    assert turn_of(request).conversation_id == "conv_1"
    assert turn_of(request).repeated["conversation"] == {"id": "conv_1"}


def test_a_conversation_that_is_unknown_or_named_twice_is_refused() -> None:
    error = refuse(conversation="conv_9")
    assert (error.status, error.code, error.param) == (404, "conversation_not_found", "conversation")
    assert refuse(conversation="conv_9", previous_response_id="resp_9").status == 400


def test_the_ids_that_a_request_refers_to_are_those_of_responses_conversations_and_items() -> None:
    items = [{"type": "item_reference", "id": "x"}, {"id": "y"}, {"role": "user", "id": "z", "content": "hi"}]
    body = json.dumps({"previous_response_id": "r", "input": items}).encode()
    assert responses.earlier_names(body) == Named("r", None, ["x", "y"])
    assert responses.earlier_names(b'{"conversation": {"id": "c"}}') == Named(None, "c", [])
    assert responses.earlier_names(b'{"input": "hi"}') is None
    assert responses.earlier_names(b"no json") is None


def test_an_unknown_earlier_response_is_a_404_that_says_so() -> None:
    error = refuse(previous_response_id="resp_9")
    assert (error.status, error.code, error.param) == (404, "previous_response_not_found", "previous_response_id")
    assert "resp_9" in error.message
