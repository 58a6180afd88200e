"""Tool calls and reasoning over real HTTP from a frontend whose engine follows a script, read by the openai package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from moeserve.plan import FinishReason, TokenLogprobs
from moeserve.wire import Admitted, Generate, Turned, unpack_token_ids
from tests.support.fake_engine import FakeEngine, say
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until

CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "clock")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("frontend")
    with frontend(folder, reasoning_parser="think", engine={"max_model_len": 8192}) as running:
        yield running


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    server.engine.received.clear()
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: OpenAI, *messages: Any, **fields: Any) -> Any:
    said = messages or ({"role": "user", "content": "hi"},)
    return client.chat.completions.create(model="tiny", messages=list(said), **fields)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


def test_two_calls_whole(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("<think>hm</think>" + CALLS)
    answer = chat(client, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert (choice.message.reasoning_content, choice.message.reasoning) == ("hm", "hm")
    assert calls_of(choice.message) == [("weather", '{"city": "Rome"}'), ("clock", "{}")]
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_stream_of_calls_adds_up_to_the_whole_answer(server: Frontend, client: OpenAI, chunk: int) -> None:
    server.engine.script = say("<think>hm</think>" + CALLS, chunk=chunk)
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], tools=TOOLS
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.message.content == "I look."
    assert calls_of(choice.message) == [("weather", '{"city": "Rome"}'), ("clock", "{}")]
    heads, reasoning = [], ""
    for event in chat(client, tools=TOOLS, stream=True):
        delta = event.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", "")
        heads += [(part.index, part.id, part.type) for part in delta.tool_calls or () if part.function.name]
    assert reasoning == "hm"
    assert [(index, kind) for index, _, kind in heads] == [(0, "function"), (1, "function")]
    assert all(call_id.startswith("call_") for _, call_id, _ in heads)


def test_the_next_turn_continues_the_tokens_of_the_last(server: Frontend, client: OpenAI) -> None:
    """However the client spells the arguments that it sends back."""
    server.engine.script = say(CALLS)
    user = {"role": "user", "content": "hi"}
    message = chat(client, user, tools=TOOLS).choices[0].message
    first = list(unpack_token_ids(server.engine.of(Generate)[0].token_ids))
    prompts = []
    for spelling in ('{"city":"Rome"}', '{ "city": "Rome" }'):
        server.engine.received.clear()
        sent = message.model_dump(exclude_none=True)
        sent["tool_calls"][0]["function"]["arguments"] = spelling
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in sent["tool_calls"]]
        chat(client, user, sent, *results, tools=TOOLS)
        (generate,) = server.engine.of(Generate)
        prompts.append(list(unpack_token_ids(generate.token_ids)))
    assert prompts[0] == prompts[1]
    assert prompts[0][: len(first) + len(CALLS)] == first + list(CALLS.encode())


def test_forced_calls_and_strict_tools_reach_the_engine_with_a_grammar(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say(CALLS)
    chat(client, tools=TOOLS)
    chat(client, tools=TOOLS, tool_choice="required")
    chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "clock"}})
    free, required, named = (generate.sampling.grammar for generate in server.engine.of(Generate))
    assert free is None
    assert "weather" in required
    assert "weather" not in named
    assert "clock" in named


def test_the_engine_is_told_which_answers_may_call_tools_and_which_do(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say(CALLS)
    chat(client, tools=TOOLS)
    list(chat(client, tools=TOOLS, stream=True))
    server.engine.script = say("no call")
    chat(client, tools=TOOLS)
    chat(client)
    generates = server.engine.of(Generate)
    assert [generate.has_tools for generate in generates] == [True, True, True, False]
    calling = [generate.request_id for generate in generates[:2]]
    wait_until(lambda: set(calling) <= {turn.request_id for turn in server.engine.of(Turned)})
    # Messages about other tests' answers may still arrive.
    asked = {generate.request_id for generate in generates}
    assert [turn.request_id for turn in server.engine.of(Turned) if turn.request_id in asked] == calling


def test_older_functions_are_called_the_older_way(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say(CALLS)
    functions: list[Any] = [tool["function"] for tool in TOOLS]
    (choice,) = chat(client, functions=functions).choices
    assert choice.finish_reason == "function_call"
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == (
        "weather",
        '{"city": "Rome"}',
    )
    events = list(chat(client, functions=functions, stream=True))
    assert events[-1].choices[0].finish_reason == "function_call"
    pieces = [event.choices[0].delta.function_call for event in events if event.choices[0].delta.function_call]
    assert "".join(piece.arguments for piece in pieces) == '{"city": "Rome"}'
    assert [piece.name for piece in pieces if piece.name] == ["weather"]


def test_a_stop_string_ends_text_and_no_arguments(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say(CALLS)
    assert chat(client, tools=TOOLS, stop="Rome").choices[0].finish_reason == "tool_calls"
    (choice,) = chat(client, tools=TOOLS, stop="look").choices
    assert (choice.message.content, choice.finish_reason) == ("I ", "stop")


def test_a_system_message_in_the_middle_and_content_left_out(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("ok")
    answer = chat(
        client,
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "clock", "arguments": "{oops"}}]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "bad arguments"}]},
        {"role": "system", "content": "Try again."},
        tools=TOOLS,
    )
    assert answer.choices[0].message.content == "ok"


def test_a_continued_message_is_echoed(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("lo")
    extra = {"continue_final_message": True, "echo": True}
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel"})
    assert chat(client, *messages, extra_body=extra).choices[0].message.content == "Hello"
    (generate,) = server.engine.of(Generate)
    assert bytes(list(unpack_token_ids(generate.token_ids))[-3:]) == b"Hel"
    chunks = list(chat(client, *messages, extra_body=extra, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"


def scored(engine: FakeEngine, generate: Generate) -> None:
    """One token, with log probabilities that differ from sample to sample, and the prompt's log probabilities."""
    engine.send(Admitted(generate.request_id))
    number = int(generate.request_id.rpartition("-")[2])
    prompt = unpack_token_ids(generate.token_ids)
    rest = [TokenLogprobs(-1.0, ((token, -1.0),)) for token in prompt[1:]]
    engine.output(
        generate,
        [ord("a") + number],
        logprobs=[TokenLogprobs(-abs(number - 2.0))],
        prompt_logprobs=rest if generate.sampling.prompt_logprobs is not None else None,
        finish_reason=FinishReason.LENGTH,
        num_output_tokens=1,
    )


def test_the_best_of_four(server: Frontend, client: OpenAI) -> None:
    server.engine.script = scored
    answer = client.completions.create(model="tiny", prompt="hi", best_of=4, n=2, max_tokens=1)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "c"), (1, "b")]
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 4


def test_a_prompt_is_scored_without_any_output(server: Frontend, client: OpenAI) -> None:
    server.engine.script = scored
    answer = client.completions.create(model="tiny", prompt="hi", echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.logprobs.tokens) == ("hi", ["h", "i"])
    assert choice.logprobs.token_logprobs == [None, -1.0]
    assert answer.usage.completion_tokens == 0
    with pytest.raises(BadRequestError):
        client.completions.create(model="tiny", prompt="hi", max_tokens=0)


def test_prompt_log_probabilities_in_both_dialects(server: Frontend, client: OpenAI) -> None:
    server.engine.script = scored
    entry = {"105": {"logprob": -1.0, "rank": 1, "decoded_token": "i"}}
    answer = client.completions.create(model="tiny", prompt="hi", extra_body={"prompt_logprobs": 1})
    assert answer.choices[0].model_dump()["prompt_logprobs"] == [None, entry]
    found = chat(client, extra_body={"prompt_logprobs": 1}).model_dump()["prompt_logprobs"]
    assert found[0] is None
    assert entry in found


def test_tokenize_counts_tools(server: Frontend) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    plain = server.http.post("/tokenize", json=body).json()["count"]
    assert server.http.post("/tokenize", json={**body, "tools": TOOLS}).json()["count"] > plain + 100


def test_whatever_stands_in_messages_and_tools_is_refused_or_served(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("ok")
    odd: list[Any] = [None, 5, "x", [], {}, [None], [5], [{}], {"type": "function"}, [{"type": "function"}]]
    for field in ("tools", "tool_choice", "functions", "function_call", "chat_template_kwargs", "best_of", "echo"):
        for value in odd:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], field: value}
            response = server.http.post("/v1/chat/completions", json=body)
            assert response.status_code in (200, 400), (field, value, response.text)
            if response.status_code == 400:
                assert json.loads(response.text)["error"]["param"] is not None, (field, value)
    for name in ("content", "tool_calls", "function_call", "tool_call_id", "name", "reasoning_content"):
        for role in ("user", "assistant", "tool", "system"):
            for value in odd:
                messages = [{"role": role, "content": "hi", name: value}]
                response = server.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
                assert response.status_code in (200, 400), (name, role, value, response.text)
