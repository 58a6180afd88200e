"""Answers that outlive their connection, over real HTTP from a frontend whose engine follows a script."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import openai
import pytest
from openai import OpenAI

from moeserve.plan import FinishReason
from moeserve.wire import Abort, Generate
from tests.support.fake_engine import admit_only, reject, say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until

TEXT = "Grüße 🎉 an alle"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), api_key=("first", "second")) as running:
        running.http.headers["authorization"] = "Bearer first"
        yield running


@pytest.fixture
def store(server: Frontend) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(server.run.store_file)) as db:
        yield db


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    server.engine.received.clear()
    server.engine.script = say(TEXT)
    with OpenAI(base_url=server.url + "/v1", api_key="first", max_retries=0, timeout=60) as client:
        yield client


def create(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "hi", "background": True, **fields})


def ended(client: OpenAI, response_id: str) -> Any:
    found = client.responses.retrieve(response_id)
    wait_until(lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress"))
    found = client.responses.retrieve(response_id)
    return found


def test_what_is_read_to_show_a_response_in_the_background_has_none_of_its_input(
    server: Frontend, client: OpenAI, store: sqlite3.Connection
) -> None:
    server.engine.script = admit_only
    sealed: Any = {"type": "reasoning", "summary": [], "encrypted_content": "." * 300_000}
    made = create(client, input=[sealed, {"role": "user", "content": "hi"}])
    assert client.responses.retrieve(made.id).status == "queued"
    (size,) = store.execute("SELECT length(record) FROM jobs WHERE id = ?", (made.id,)).fetchone()
    assert size < 10_000
    kinds = [item.type for item in client.responses.input_items.list(made.id, order="asc").data]
    assert kinds == ["reasoning", "message"]
    client.responses.cancel(made.id)


def test_a_response_in_the_background_is_fetched_later(server: Frontend, client: OpenAI) -> None:
    server.engine.script = admit_only
    made = create(client)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    (generate,) = server.engine.wait_for(Generate)
    server.engine.output(generate, list(b"He"))
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    server.engine.output(generate, list(b"llo"), finish_reason=FinishReason.STOP, num_output_tokens=5)
    answer = ended(client, made.id)
    assert (answer.status, answer.output_text, answer.background) == ("completed", "Hello", True)
    assert answer.usage.output_tokens == 5
    assert [item.content[0].text for item in client.responses.input_items.list(made.id).data] == ["hi"]
    server.engine.script = say("more")
    assert create(client, previous_response_id=made.id, background=False).output_text == "more"


def test_its_events_are_taken_up_again_after_any_of_them(client: OpenAI) -> None:
    events = list(create(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[-1].type == "response.completed"
    name = events[0].response.id
    assert list(client.responses.retrieve(name, stream=True)) == events
    for number in range(len(events)):
        assert list(client.responses.retrieve(name, stream=True, starting_after=number)) == events[number + 1 :]
    assert client.responses.retrieve(name) == events[-1].response


def test_behind_the_last_event_of_a_response_that_has_ended_there_is_nothing_and_beyond_it_an_error(
    server: Frontend, client: OpenAI
) -> None:
    events = list(create(client, stream=True))
    path, last = f"/v1/responses/{events[0].response.id}", events[-1].sequence_number
    end = server.http.get(path, params={"stream": "true", "starting_after": last})
    assert (end.status_code, end.text) == (200, f": the response has ended with event {last}\n\n")
    beyond = server.http.get(path, params={"stream": "true", "starting_after": last + 1})
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "no_such_event")
    assert f"ended with event {last}" in beyond.json()["error"]["message"]


def test_a_client_ahead_of_a_running_response_hears_of_its_end(server: Frontend, client: OpenAI) -> None:
    server.engine.script = trickle("Hel")
    made = create(client)
    (generate,) = server.engine.wait_for(Generate)
    with client.responses.retrieve(made.id, stream=True, starting_after=99) as ahead:
        server.engine.output(generate, list(b"lo"), finish_reason=FinishReason.STOP, num_output_tokens=5)
        (error,) = ahead
    assert (error.type, error.param, error.code) == ("error", "starting_after", "no_such_event")
    assert ended(client, made.id).output_text == "Hello"


def test_a_client_that_left_takes_up_the_rest_while_it_comes(server: Frontend, client: OpenAI) -> None:
    server.engine.script = trickle("Hel")
    stream = create(client, stream=True)
    seen = [next(stream)]
    while seen[-1].type != "response.output_text.delta":
        seen.append(next(stream))
    stream.close()
    (generate,) = server.engine.of(Generate)
    again = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
    server.engine.output(generate, list(b"lo"), finish_reason=FinishReason.STOP, num_output_tokens=5)
    seen += list(again)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == "Hello"
    assert server.engine.of(Abort) == []


def test_a_cancelled_response_ends_once(server: Frontend, client: OpenAI) -> None:
    server.engine.script = trickle("Hel")
    made = create(client)
    (generate,) = server.engine.wait_for(Generate)
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    cancelled = client.responses.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    assert [abort.request_id for abort in server.engine.wait_for(Abort)] == [generate.request_id]
    assert client.responses.cancel(made.id) == client.responses.retrieve(made.id) == cancelled
    last = list(client.responses.retrieve(made.id, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    server.engine.script = say(TEXT)
    complete = create(client, background=False)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(complete.id)


def test_a_response_that_has_ended_is_made_from_its_journal_once(
    server: Frontend, client: OpenAI, store: sqlite3.Connection
) -> None:
    server.engine.script = trickle("Hel")
    made = create(client)
    wait_until(lambda: client.responses.retrieve(made.id).status == "in_progress")
    cancelled = client.responses.cancel(made.id)
    server.engine.script = reject("invalid", "no such thing")
    failed = ended(client, create(client).id)
    store.execute("DELETE FROM job_outputs")
    store.commit()
    assert [client.responses.retrieve(one.id) for one in (cancelled, failed)] == [cancelled, failed]
    assert cancelled.output_text == "Hel"
    assert [item.content[0].text for item in client.responses.input_items.list(made.id).data] == ["hi"]
    for one in (cancelled, failed):
        with pytest.raises(openai.NotFoundError, match=one.id):
            create(client, previous_response_id=one.id)


def test_a_request_that_fails_says_so_once(server: Frontend, client: OpenAI) -> None:
    server.engine.script = reject("invalid", "no such thing")
    made = create(client)
    answer = ended(client, made.id)
    assert (answer.status, answer.error.message) == ("failed", "no such thing")
    assert list(client.responses.retrieve(made.id, stream=True))[-1].type == "response.failed"


def test_a_full_queue_is_waited_for(server: Frontend, client: OpenAI) -> None:
    server.engine.script = reject("queue_full")
    made = create(client)
    server.engine.wait_for(Generate)
    server.engine.script = say("Hello")
    assert ended(client, made.id).output_text == "Hello"


def test_other_keys_do_not_find_it(server: Frontend, client: OpenAI) -> None:
    made = create(client)
    ended(client, made.id)
    with OpenAI(base_url=server.url + "/v1", api_key="second", max_retries=0) as other:
        for look in (
            lambda: other.responses.retrieve(made.id),
            lambda: list(other.responses.retrieve(made.id, stream=True)),
            lambda: other.responses.cancel(made.id),
            lambda: other.responses.delete(made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                look()


def test_a_deleted_one_is_computed_no_further(server: Frontend, client: OpenAI) -> None:
    server.engine.script = trickle("Hel")
    made = create(client)
    server.engine.wait_for(Generate)
    client.responses.delete(made.id)
    server.engine.wait_for(Abort)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_what_is_not_in_the_background_is_not_streamed_again(client: OpenAI) -> None:
    made = create(client, background=False)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.retrieve(made.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="store"):
        create(client, store=False)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(made.id, extra_query={"starting_after": 3})
