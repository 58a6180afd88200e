"""The Messages dialect's requests: the input of template and engine, and refusals in words."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.dialects import chat, messages
from moeserve.frontend.dialects.internal import (
    CacheOptions,
    ChatPrompt,
    GenerateRequest,
    ModelFacts,
    OutputFormat,
    ThoughtOptions,
    Tool,
    ToolChoice,
)
from moeserve.frontend.errors import ApiError

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {"temperature": 0.6}, 20)
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "d", "input_schema": SCHEMA}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def parse(**changes: Any) -> GenerateRequest:
    return messages.parse(json.dumps({**BASE, **changes}).encode(), FACTS)


def refuse(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**changes)
    assert caught.value.status in (400, 404)
    return caught.value


def prompt_of(request: GenerateRequest) -> ChatPrompt:
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def said(*turns: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    """The template's messages for these messages."""
    return prompt_of(parse(messages=list(turns), **changes)).messages


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def tool_use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": arguments}


def tool_result(call_id: str, content: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": call_id,
        **({} if content is None else {"content": content}),
        **fields,
    }


def test_the_same_conversation_through_chat_gives_the_same_prompt() -> None:
    here = parse(
        system=[text("s"), text("t")],
        messages=[user([text("a"), text("b")]), assistant("c"), user("d")],
    )
    body = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": [text("s"), text("t")]},
            user([text("a"), text("b")]),
            assistant("c"),
            user("d"),
        ],
    }
    assert here.prompts == chat.parse(json.dumps(body).encode(), FACTS).prompts


def test_a_turn_of_tools_becomes_one_message_with_its_calls_and_one_for_each_result() -> None:
    turns = said(
        user("go"),
        assistant(
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I look"),
                tool_use("toolu_1", city="Paris"),
                tool_use("functions.weather:0", city="Rome"),
            ]
        ),
        user([text("and?"), tool_result("toolu_1", "sun"), tool_result("functions.weather:0", [text("r"), text("n")])]),
    )
    assert turns == [
        user("go"),
        {
            "role": "assistant",
            "content": "I look",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}},
                {
                    "id": "functions.weather:0",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Rome"}},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "tool", "tool_call_id": "functions.weather:0", "content": "r\nn"},
        user("and?"),
    ]


def test_results_come_in_the_order_of_their_calls() -> None:
    calls = assistant([tool_use("toolu_1"), tool_use("toolu_2")])
    ids = [
        [message["tool_call_id"] for message in said(user("go"), calls, user([tool_result(id) for id in sent]))[2:]]
        for sent in (["toolu_2", "toolu_1"], ["toolu_9", "toolu_2"], ["toolu_2"])
    ]
    assert ids == [["call_1", "call_2"], ["call_2", "call_9"], ["call_2"]]


def test_a_result_without_its_call_and_a_call_without_its_result_are_taken() -> None:
    trimmed = said(user([tool_result("toolu_1", "sun")]), assistant([tool_use("toolu_2")]), user("never mind"))
    assert [message["role"] for message in trimmed] == ["tool", "assistant", "user"]
    assert trimmed[0]["content"] == "sun"


def test_messages_of_one_role_are_one_turn() -> None:
    assert said(user("a"), user([text("b")]), assistant("c"), assistant([text("d")]), user("e")) == [
        user("a\nb"),
        assistant("c\nd"),
        user("e"),
    ]
    assert said(assistant([tool_use("toolu_1")]), user([tool_result("toolu_1", "r")]), user("x"))[1:] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
        user("x"),
    ]


def test_a_system_message_may_stand_between_turns() -> None:
    assert said(user("a"), {"role": "system", "content": [text("now")]}, user("b")) == [
        user("a"),
        {"role": "system", "content": "now"},
        user("b"),
    ]


@pytest.mark.parametrize(
    ("result", "shown"), [("no file", "Error: no file"), ("Error 5", "Error 5"), (None, "Error: ")]
)
def test_a_failed_tool_says_so(result: str | None, shown: str) -> None:
    assert said(user([tool_result("toolu_1", result, is_error=True)]))[0]["content"] == shown
    assert said(user([tool_result("toolu_1", result, is_error=False)]))[0]["content"] == (result or "")


@pytest.mark.parametrize("nonce", ["cch=1", "cch=2; cc_version=2.1"])
def test_the_billing_header_does_not_reach_the_prompt(nonce: str) -> None:
    header = f"x-anthropic-billing-header: {nonce};"
    assert said(user("a"), system=[text(header), text("s")]) == [{"role": "system", "content": "s"}, user("a")]
    assert said(user("a"), system=header + "\ns") == [{"role": "system", "content": "s"}, user("a")]
    assert said(user("a"), system=[text(header)]) == [user("a")]


def test_tools_and_the_choice_of_them() -> None:
    tool = Tool("weather", "d", SCHEMA, strict=True)
    request = parse(tools=[{**WEATHER, "type": "custom", "strict": True}])
    assert (request.tools, prompt_of(request).tools) == ((tool,), (tool,))
    assert (request.tool_choice, request.parallel_tool_calls) == (ToolChoice(), True)
    for choice, expected in (
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "tool", "name": "weather"}, ToolChoice("required", ("weather",))),
    ):
        assert parse(tools=[WEATHER], tool_choice=choice).tool_choice == expected
    alone = parse(tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert not alone.parallel_tool_calls


def test_a_tools_name_may_have_128_characters_here() -> None:
    (tool,) = parse(tools=[{**WEATHER, "name": "w" * 128}]).tools
    assert tool.name == "w" * 128


def test_tools_of_the_vendor_are_dropped_and_counted_and_refused_where_they_are_forced() -> None:
    request = parse(tools=[WEB_SEARCH, WEATHER, {"type": "bash_20250124", "name": "bash"}])
    assert [tool.name for tool in request.tools] == ["weather"]
    assert request.dropped_tools == ("web_search_20250305", "bash_20250124")
    error = refuse(tools=[WEB_SEARCH, WEATHER], tool_choice={"type": "tool", "name": "web_search"})
    assert (error.param, "web_search_20250305" in error.message) == ("tool_choice.name", True)
    assert refuse(tools=[WEB_SEARCH], tool_choice={"type": "any"}).param == "tool_choice"


def test_thinking_is_for_the_template_to_turn_on_or_off() -> None:
    def variables(**changes: Any) -> dict[str, Any]:
        return prompt_of(parse(**changes)).variables

    assert variables() == {}
    assert variables(thinking={"type": "adaptive", "display": "updates"})["enable_thinking"] is True
    assert variables(thinking={"type": "enabled", "budget_tokens": 2048, "display": "summarized"}) == {
        "enable_thinking": True,
        "thinking": True,
        "thinking_budget": 2048,
    }
    assert variables(thinking={"type": "adaptive"}) == {"enable_thinking": True, "thinking": True}
    assert variables(thinking={"type": "disabled"}) == {"enable_thinking": False, "thinking": False}
    assert variables(output_config={"effort": "low"}) == {"reasoning_effort": "low"}


def test_a_budget_of_thinking_bounds_it() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert parse(thinking=thinking).thought == ThoughtOptions(2048, None, ("thinking.budget_tokens",))
    assert parse(thinking={**thinking, "type": "disabled"}).thought == ThoughtOptions()
    assert parse(output_config={"effort": "max"}).thought == ThoughtOptions(effort="max")
    both = parse(thinking=thinking, thinking_token_budget=64, output_config={"effort": "low"}).thought
    assert both == ThoughtOptions(64, "low", ("thinking_token_budget", "thinking.budget_tokens"))


def test_sampling_and_the_checkpoints_defaults() -> None:
    assert parse().sampling.temperature == 0.6
    request = parse(temperature=0, top_p=0.5, top_k=7, stop_sequences=["a", "b"], stream=True, seed=3, ignore_eos=True)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.0, 0.5, 7)
    assert (request.stop, request.stream, request.seed, request.max_tokens) == (("a", "b"), True, 3, 9)
    assert request.sampling.stop_token_ids == ()


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_a_schema_for_the_text(field: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    request = parse(**{field: {"format": wanted} if field == "output_config" else wanted})
    where = f"{field}.format.schema" if field == "output_config" else f"{field}.schema"
    assert request.output_format == OutputFormat("json_schema", SCHEMA, where)


def test_cache_control_marks_prefixes_that_end_where_it_stands() -> None:
    long = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    short = {"cache_control": {"type": "ephemeral"}}
    assert parse(**long).cache == CacheOptions(seconds=3600)
    assert parse(tools=[{**WEATHER, **long}]).cache.breakpoints == ((0, 3600),)
    assert parse(system=[text("s", **short)]).cache.breakpoints == ((1, 300),)
    turns = [user([text("a", **short), text("b", **long)]), {"role": "assistant", "content": "c"}, user("d")]
    assert parse(system="s", messages=turns).cache.breakpoints == ((2, 3600),)
    assert parse(system=[text("s")], tools=[WEATHER]).cache == CacheOptions()


def test_a_cache_control_with_another_time_is_refused() -> None:
    assert "cache_control" in str(refuse(cache_control={"type": "ephemeral", "ttl": "2h"}).param)


def test_what_clients_send_without_asking_for_anything_is_taken() -> None:
    request = parse(
        metadata={"user_id": "u"},
        service_tier="auto",
        speed="standard",
        inference_geo=None,
        container=None,
        mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        diagnostics={"previous_message_id": None},
    )
    assert request.ignored == ("diagnostics",)


def test_images_and_found_tools_in_a_tools_result_become_text() -> None:
    content = [text("shot"), {"type": "image", "source": {}}, {"type": "tool_reference", "tool_name": "mcp__find"}]
    turns = said(user("look"), assistant([tool_use("t")]), user([tool_result("t", content)]))
    assert turns[-1]["content"] == "shot\n[image left out: this model reads text]\n[tool mcp__find]"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": "gpt"}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [user("a"), assistant("b")]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [user("a"), {"role": "user"}]}, "messages[1]"),
        ({"messages": [user([{"type": "image", "source": {}}])]}, "messages[0].content[0].type"),
        ({"messages": [user([{"type": "document", "source": {}}])]}, "messages[0].content[0].type"),
        ({"messages": [user([tool_result("t", [{"type": "x"}])])]}, "messages[0].content[0].content[0].type"),
        (
            {"messages": [user([tool_result("t", [{"type": "tool_reference"}])])]},
            "messages[0].content[0].content[0].tool_name",
        ),
        ({"messages": [user([tool_use("t")])]}, "messages[0].content[0].type"),
        ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
        ({"messages": [user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [assistant([{"type": "tool_use", "id": "a", "name": "b"}])]}, "messages[0].content[0].input"),
        ({"messages": [assistant([{"type": "tool_use", "id": "a", "input": {}}])]}, "messages[0].content[0].name"),
        ({"messages": [assistant([{"type": "tool_use", "name": "a", "input": {}}])]}, "messages[0].content[0].id"),
        ({"messages": [assistant([{"type": "thinking"}])]}, "messages[0].content[0].thinking"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a" * 129, "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "description": "x" * 140_000}]}, "tools[0].description"),
        ({"tools": [{**WEATHER, "input_schema": {"x": "y" * 300_000}}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER] * 2000}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"output_format": {"type": "xml"}}, "output_format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"effort": "much"}}, "output_config.effort"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"inference_geo": "us"}, "inference_geo"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], param: str) -> None:
    error = refuse(**changes)
    assert (error.param, param in error.message) == (param, True)


def test_counting_reads_the_same_prompt_and_needs_no_max_tokens() -> None:
    body = {**BASE, "tools": [WEATHER], "system": "s", "thinking": {"type": "adaptive"}}
    (prompt,) = messages.parse(json.dumps(body).encode(), FACTS).prompts
    del body["max_tokens"]
    assert messages.parse_count(json.dumps(body).encode(), FACTS) == prompt


KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image", "search_result")
VALUES = st.sampled_from([None, "", "x", 0, True, [], {}, [text("y")], [{"type": "text"}], {"type": "ephemeral"}])
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={name: VALUES for name in messages.Block.__struct_fields__ if name != "type"},
)
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
    optional={"content": st.one_of(VALUES, st.lists(BLOCKS, max_size=3))},
)
OPTIONAL = {name: VALUES for name in messages.MessagesBody.__struct_fields__ if name not in BASE}


@given(st.fixed_dictionaries({"messages": st.lists(TURNS, max_size=3)}, optional=OPTIONAL))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    with suppress(ApiError):
        assert all(isinstance(message["content"], str) for message in prompt_of(parse(**body)).messages)
