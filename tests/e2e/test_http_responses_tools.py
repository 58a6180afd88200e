"""Tool calls through `/v1/responses`: as items, as events, and in the next turn's prompt, the same as through chat."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from moeserve.wire import Generate, unpack_token_ids
from tests.support.fake_engine import say
from tests.support.frontend import Frontend, frontend

SAID = """Look. <tool_call>
{"name": "ns__f", "arguments": {"a": "ü", "b": [1, 2]}}
</tool_call>
<tool_call>
{"name": "sql", "arguments": {"input": "SELECT 1"}}
</tool_call>"""
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOLS: Any = [
    {"type": "namespace", "name": "ns", "description": "d", "tools": [FUNCTION]},
    {"type": "custom", "name": "sql"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    settings: dict[str, Any] = {"engine": {"max_model_len": 4096}, "tool_call_parser": "hermes"}
    with frontend(tmp_path_factory.mktemp("frontend"), **settings) as running:
        yield running


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    server.engine.received.clear()
    server.engine.script = say(SAID)
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "hi", "tools": TOOLS, **fields})


def without_ids(response: Any) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}
        for item in response.output
    ]


def outputs(response: Any) -> list[dict[str, Any]]:
    """Return an output for every call of a response."""
    return [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "done"}
        for item in response.output
        if item.type.endswith("_call")
    ]


def latest_prompt(server: Frontend) -> list[int]:
    return list(unpack_token_ids(server.engine.of(Generate)[-1].token_ids))


def test_calls_are_items_under_the_clients_names(client: OpenAI) -> None:
    message, function, custom = create(client).output
    assert message.content[0].text == "Look."
    assert (function.type, function.name, function.namespace) == ("function_call", "f", "ns")
    assert json.loads(function.arguments) == {"a": "ü", "b": [1, 2]}
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "sql", "SELECT 1")


def test_a_stream_ends_in_the_same_items(client: OpenAI) -> None:
    events = list(create(client, stream=True))
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert len(pieces) > 1
    assert "".join(pieces) == done
    assert without_ids(events[-1].response) == without_ids(create(client))


def test_the_next_turn_is_the_same_prompt_however_the_conversation_comes(server: Frontend, client: OpenAI) -> None:
    first = create(client)
    create(client, previous_response_id=first.id, input=outputs(first))
    kept = latest_prompt(server)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    items[1]["arguments"] = json.dumps(json.loads(items[1]["arguments"]), separators=(",", ":"))
    create(client, input=[{"role": "user", "content": "hi"}, *items, *outputs(first)])
    assert latest_prompt(server) == kept
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    create(client, input=[{"role": "user", "content": "hi"}, *references, *outputs(first)])
    assert latest_prompt(server) == kept
    through_chat: Any = {
        "model": "tiny",
        "tools": [
            {"type": "function", "function": {"name": "ns__f", "parameters": {"type": "object"}}},
            {
                "type": "function",
                "function": {
                    "name": "sql",
                    "parameters": {
                        "type": "object",
                        "properties": {"input": {"type": "string"}},
                        "required": ["input"],
                        "additionalProperties": False,
                    },
                },
            },
        ],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "Look.",
                "tool_calls": [
                    {
                        "id": first.output[1].call_id,
                        "type": "function",
                        "function": {"name": "ns__f", "arguments": first.output[1].arguments},
                    },
                    {
                        "id": first.output[2].call_id,
                        "type": "function",
                        "function": {"name": "sql", "arguments": '{"input":"SELECT 1"}'},
                    },
                ],
            },
            *({"role": "tool", "tool_call_id": one["call_id"], "content": "done"} for one in outputs(first)),
        ],
    }
    client.chat.completions.create(**through_chat)
    assert latest_prompt(server) == kept


def test_a_custom_tools_grammar_goes_to_the_engine_and_its_input_comes_as_events(
    server: Frontend, client: OpenAI
) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "SELECT " /[0-9]+/'}
    tools: Any = [{"type": "custom", "name": "sql", "format": form}]
    events = list(create(client, stream=True, tools=tools))
    grammar = server.engine.of(Generate)[-1].sampling.grammar
    assert grammar is not None
    assert "SELECT" in grammar
    kinds = [event.type for event in events if "custom_tool_call_input" in event.type]
    assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done.input == "SELECT 1"
    assert events[-1].response.tools[0].format.definition == form["definition"]
    through_chat: Any = [{"type": "custom", "custom": {"name": "sql", "format": {"type": "grammar", "grammar": form}}}]
    said: Any = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="tiny", messages=said, tools=through_chat, tool_choice="required")
    assert server.engine.of(Generate)[-1].sampling.grammar is not None
    calls: Any = answer.choices[0].message.tool_calls
    assert (calls[-1].type, calls[-1].custom.name, calls[-1].custom.input) == ("custom", "sql", "SELECT 1")


def test_a_custom_tools_grammar_that_cannot_be_enforced_is_a_400_with_its_field(client: OpenAI) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}
    with pytest.raises(BadRequestError, match="look-around") as caught:
        create(client, tools=[{"type": "custom", "name": "sql", "format": form}])
    assert caught.value.param == "tools[0].format.definition"
