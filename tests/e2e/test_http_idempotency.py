"""Requests with an `Idempotency-Key`, over real HTTP from a frontend whose engine follows a script."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from moeserve.frontend.store import idempotency
from moeserve.frontend.store.file import Owner, connect
from moeserve.frontend.store.idempotency import Name
from moeserve.frontend.store.store import Shelf
from moeserve.plan import FinishReason
from moeserve.wire import Abort, Generate
from tests.support.fake_engine import admit_only, reject, say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until
from tests.support.stores import LARGE

TEXT = "Grüße 🎉 an alle"
# By path: the fields that make a small request.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10**6, "foo": 1},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50},
}
CHAT = "/v1/chat/completions"
ECHOED = ("content-type", "content-length", "x-moeserve-max-tokens", "x-moeserve-ignored")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), api_key=("first", "second")) as running:
        running.http.headers["authorization"] = "Bearer first"
        yield running


@pytest.fixture(autouse=True)
def says_text(server: Frontend) -> None:
    server.engine.received.clear()
    server.engine.script = say(TEXT)


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="first", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def key() -> str:
    return secrets.token_hex(8)


def ask(server: Frontend, key: str, path: str = CHAT, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", **BODIES[path], **fields}
    return server.http.post(path, json=body, headers={"idempotency-key": key})


def shown(answer: httpx2.Response) -> tuple[int, dict[str, str], bytes]:
    return answer.status_code, {name: answer.headers[name] for name in ECHOED if name in answer.headers}, answer.content


def chat(client: OpenAI, key: str, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    return client.chat.completions.create(**body, extra_headers={"Idempotency-Key": key})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_repeated_request_gets_the_same_bytes(server: Frontend, key: str, path: str, stream: bool) -> None:
    first = shown(ask(server, key, path, stream=stream))
    assert first[0] == 200
    assert first[1]["content-type"].startswith("text/event-stream" if stream else "application/json")
    assert ("x-moeserve-ignored" in first[1]) == (path == CHAT)
    for _ in range(2):
        assert shown(ask(server, key, path, stream=stream)) == first
    assert len(server.engine.of(Generate)) == 1


def test_a_repeated_request_joins_the_running_one_from_its_beginning(server: Frontend, client: OpenAI) -> None:
    server.engine.script = trickle("Hel")
    first = chat(client, "joins", stream=True)
    seen = [next(first)]
    first.close()
    again = chat(client, "joins", stream=True)
    assert next(again) == seen[0]
    (generate,) = server.engine.of(Generate)
    server.engine.output(generate, list(b"lo"), finish_reason=FinishReason.STOP, num_output_tokens=5)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in again).endswith("lo")
    assert server.engine.of(Abort) == []


def test_an_answer_goes_on_when_its_client_leaves_and_waits_for_the_next(server: Frontend, key: str) -> None:
    server.engine.script = admit_only
    with httpx2.Client(base_url=server.url, headers=server.http.headers, timeout=0.5) as hasty:
        body = {"model": "tiny", **BODIES[CHAT]}
        with pytest.raises(httpx2.ReadTimeout):
            hasty.post(CHAT, json=body, headers={"idempotency-key": key})
    (generate,) = server.engine.wait_for(Generate)
    server.engine.output(generate, list(b"Hello"), finish_reason=FinishReason.STOP, num_output_tokens=5)
    assert ask(server, key).json()["choices"][0]["message"]["content"] == "Hello"
    assert (len(server.engine.of(Generate)), server.engine.of(Abort)) == (1, [])


def test_a_response_is_kept_once_and_its_answer_is_repeated_after_it_was_deleted(server: Frontend, key: str) -> None:
    first = ask(server, key, "/v1/responses")
    name = f"/v1/responses/{first.json()['id']}"
    assert server.http.get(name).json() == first.json()
    assert server.http.delete(name).status_code == 200
    assert shown(ask(server, key, "/v1/responses")) == shown(first)
    assert server.http.get(name).status_code == 404


def test_a_key_belongs_to_one_request_of_one_caller(server: Frontend, client: OpenAI) -> None:
    first = chat(client, "mine")
    with pytest.raises(openai.UnprocessableEntityError, match="another request"):
        chat(client, "mine", temperature=0.5)
    with OpenAI(base_url=server.url + "/v1", api_key="second", max_retries=0) as other:
        assert chat(other, "mine", temperature=0.5).id != first.id
    with pytest.raises(openai.BadRequestError, match="255"):
        chat(client, "k" * 256)


def test_a_refusal_gives_the_key_back(server: Frontend, key: str) -> None:
    for stream in (True, False):
        server.engine.script = reject("queue_full")
        assert ask(server, key, stream=stream).status_code == 503
        server.engine.script = reject("invalid", "no such thing")
        assert ask(server, key, stream=not stream).status_code == 400
    server.engine.script = say(TEXT)
    assert ask(server, key, temperature=0.5).json()["choices"][0]["message"]["content"] == TEXT


def test_an_error_amid_a_stream_gives_the_key_back(server: Frontend, key: str) -> None:
    server.engine.script = trickle("Hel")
    body, headers = {"model": "tiny", **BODIES[CHAT], "stream": True}, {"idempotency-key": key}
    with server.http.stream("POST", CHAT, json=body, headers=headers) as broken:
        lines = broken.iter_lines()
        assert "choices" in next(lines)
        (generate,) = server.engine.wait_for(Generate)
        server.engine.output(generate, [], finish_reason=FinishReason.ERROR)
        assert "error" in json.loads([line for line in lines if line][-1].removeprefix("data: "))
    server.engine.script = say(TEXT)
    assert ask(server, key, stream=True).text.endswith("data: [DONE]\n\n")
    assert len(server.engine.of(Generate)) == 2


def test_a_request_that_another_process_answers_is_refused_until_it_has_died(server: Frontend, key: str) -> None:
    path, other = CHAT, Owner(server.run.store_file)
    request = server.http.build_request("POST", path, json={"model": "tiny", **BODIES[path]})
    content = hashlib.sha256(path.encode() + b"\0" + request.content).digest()
    name = Name(hashlib.sha256(key.encode()).digest(), content)
    other.hold()
    with closing(connect(server.run.store_file)) as db:
        caller = db.execute("SELECT caller FROM kept LIMIT 1").fetchone()[0]
        shelf = Shelf(db, bytes(caller), 0.0, LARGE)
        idempotency.begin(shelf, name, "theirs", other.name, lambda _: False)
    send = partial(server.http.post, path, content=request.content, headers={"idempotency-key": key})
    refused = send()
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_in_use")
    assert refused.headers["retry-after"] == "1"
    assert server.engine.of(Generate) == []
    other.release()
    assert send().json()["choices"][0]["message"]["content"] == TEXT


def test_a_key_of_a_response_in_the_background_names_that_response(server: Frontend, key: str) -> None:
    def background() -> dict[str, Any]:
        return dict(ask(server, key, "/v1/responses", background=True).json())

    made = background()
    assert made["status"] == "queued"
    wait_until(lambda: background()["status"] == "completed")
    assert background() == server.http.get(f"/v1/responses/{made['id']}").json()
    assert len(server.engine.of(Generate)) == 1
