"""`/v1/responses` over real HTTP from a frontend whose engine follows a script, read by the openai package."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from moeserve.plan import FinishReason
from moeserve.wire import Generate, unpack_token_ids
from tests.support.fake_engine import say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.tiny_model import ASSISTANT, BOS, END, USER

GREETING = "Grüße 🎉"
NUM_TOKENS = len(GREETING.encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), api_key=("first", "second")) as running:
        running.http.headers["authorization"] = "Bearer first"
        yield running


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    server.engine.received.clear()
    server.engine.script = say(GREETING)
    with OpenAI(base_url=server.url + "/v1", api_key="first", max_retries=0) as client:
        yield client


def create(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "hi", **fields})


def prompts(server: Frontend) -> list[list[int]]:
    return [list(unpack_token_ids(generate.token_ids)) for generate in server.engine.of(Generate)]


def test_a_response(server: Frontend, client: OpenAI) -> None:
    answer = create(client, instructions="be kind")
    assert answer.id.startswith("resp_")
    assert (answer.output_text, answer.status) == (GREETING, "completed")
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens) == (NUM_TOKENS, 3)
    assert prompts(server) == [[BOS, USER, *b"be kind", END, USER, *b"hi", END, ASSISTANT]]


def test_a_stream_gives_the_same_response(client: OpenAI) -> None:
    with client.responses.stream(model="tiny", input="hi") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == GREETING
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert final.output_text == GREETING


def test_what_a_stream_ended_in_is_what_is_kept(client: OpenAI) -> None:
    final = list(create(client, stream=True))[-1].response
    assert client.responses.retrieve(final.id) == final


def test_an_answer_cut_by_its_length_is_incomplete(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("ab", finish=FinishReason.LENGTH)
    answer = create(client, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert list(create(client, stream=True, max_output_tokens=5))[-1].type == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_a_response(server: Frontend, client: OpenAI, stream: bool) -> None:
    server.engine.script = say("one")
    if stream:
        first = list(create(client, instructions="be kind", stream=True))[-1].response
    else:
        first = create(client, instructions="be kind")
    second = create(client, previous_response_id=first.id, input="more")
    assert second.previous_response_id == first.id
    assert prompts(server)[1] == [
        *(BOS, USER, *b"hi", END, ASSISTANT, *b"one", END),
        *(USER, *b"more", END, ASSISTANT),
    ]


def test_a_deleted_response_is_gone(client: OpenAI) -> None:
    answer = create(client)
    (item,) = client.responses.input_items.list(answer.id).data
    assert item.content[0].text == "hi"  # type: ignore[union-attr, index]
    client.responses.delete(answer.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            use(answer.id)
    with pytest.raises(openai.NotFoundError, match=answer.id):
        create(client, previous_response_id=answer.id)


def test_what_is_not_to_be_stored_is_not(client: OpenAI) -> None:
    answer = create(client, store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_nobody_sees_the_responses_of_another_key(server: Frontend, client: OpenAI) -> None:
    answer = create(client)
    with OpenAI(base_url=server.url + "/v1", api_key="second", max_retries=0) as other:
        for use in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                use(answer.id)
        with pytest.raises(openai.NotFoundError):
            create(other, previous_response_id=answer.id)
        reference: Any = [{"type": "item_reference", "id": answer.output[0].id}]
        with pytest.raises(openai.BadRequestError):
            create(other, input=reference)
    assert client.responses.retrieve(answer.id).output_text == GREETING


def test_a_conversation_holds_what_was_said_in_it(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("one")
    item: Any = {"type": "message", "role": "user", "content": "before"}
    made = client.conversations.create(items=[item], metadata={"topic": "x"})
    assert client.conversations.retrieve(made.id) == made
    answer = create(client, conversation=made.id, input="hi")
    assert answer.conversation.id == made.id
    create(client, conversation={"id": made.id}, input="more", stream=True).close()
    list(create(client, conversation=made.id, input="again", stream=True))
    assert prompts(server)[-1][-8:] == [END, USER, *b"again"[-5:], END, ASSISTANT][-8:]
    assert prompts(server)[0] == [BOS, USER, *b"before", END, USER, *b"hi", END, ASSISTANT]
    listed: Any = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [one.content[0].text for one in listed[:3]] == ["before", "hi", "one"]
    assert client.conversations.items.retrieve(listed[2].id, conversation_id=made.id) == listed[2]


def test_conversations_are_changed_and_dropped(server: Frontend, client: OpenAI) -> None:
    made = client.conversations.create()
    assert client.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    call: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    added: Any = client.conversations.items.create(made.id, items=[call, output])
    assert [item.type for item in added.data] == ["function_call", "function_call_output"]
    create(client, conversation=made.id, input="so?")
    assert b"42" in bytes(token for token in prompts(server)[0] if token < 256)
    client.conversations.items.delete(added.data[1].id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.data[1].id, conversation_id=made.id)
    with OpenAI(base_url=server.url + "/v1", api_key="second", max_retries=0) as other:
        for use in (other.conversations.retrieve, other.conversations.delete, other.conversations.items.list):
            with pytest.raises(openai.NotFoundError):
                use(made.id)
        with pytest.raises(openai.NotFoundError):
            create(other, conversation=made.id)
    deleted: Any = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError, match=made.id):
        create(client, conversation=made.id)
    for items in ([{"type": "item_reference", "id": "x"}], [{"type": "unknown"}], []):
        refused = server.http.post(f"/v1/conversations/{made.id}/items", json={"items": items})
        assert refused.status_code == 400


def test_input_items_come_in_pages(server: Frontend, client: OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    answer = create(client, input=items)

    def texts(**query: Any) -> list[str]:
        page: Any = client.responses.input_items.list(answer.id, **query)
        return [item.content[0].text for item in page]

    assert texts() == ["4", "3", "2", "1", "0"]
    assert texts(order="asc", limit=2) == ["0", "1", "2", "3", "4"]
    for query, name in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
        refused = server.http.get(f"/v1/responses/{answer.id}/input_items?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_dropped_tools_are_named_in_a_header_and_counted(server: Frontend, client: OpenAI) -> None:
    body = {"model": "tiny", "input": "hi", "tools": [{"type": "web_search"}, {"type": "x\r\ny: 1"}]}
    for stream in (False, True):
        answer = server.http.post("/v1/responses", json={**body, "stream": stream})
        assert (answer.status_code, answer.headers["x-moeserve-dropped-tools"]) == (200, "web_search,x??y??1")
    assert "x-moeserve-dropped-tools" not in server.http.post("/v1/responses", json={**body, "tools": []}).headers
    refused = server.http.post("/v1/responses", json={**body, "tool_choice": {"type": "web_search"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice.type")


def test_a_prompt_that_is_too_long_names_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, input="x" * 600)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def test_an_engine_that_dies_ends_the_stream_as_a_failed_response(server: Frontend, client: OpenAI) -> None:
    server.engine.script = trickle("ab")
    with server.http.stream("POST", "/v1/responses", json={"model": "tiny", "input": "hi", "stream": True}) as answer:
        lines = answer.iter_lines()
        seen = []
        for line in lines:
            seen.append(line)
            if line == "event: response.output_text.delta":
                break
        (generate,) = server.engine.of(Generate)
        server.engine.output(generate, [], finish_reason=FinishReason.ERROR)
        rest = list(lines)
    assert "event: response.failed" in rest
    assert not any(line.startswith("data: [DONE]") for line in rest)


def test_what_does_not_exist_is_refused(server: Frontend) -> None:
    refused = server.http.put("/v1/responses/resp_1")
    assert refused.status_code == 405
    assert {"GET", "DELETE"} <= set(refused.headers["allow"].split(", "))
    assert server.http.post("/v1/responses/compact", json={}).status_code == 404
