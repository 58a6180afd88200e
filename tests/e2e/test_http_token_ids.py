"""`return_token_ids` in chat and completions, in the shape that vLLM has, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moeserve.wire import Generate, unpack_token_ids
from tests.support.fake_engine import say
from tests.support.frontend import Frontend, frontend

TEXT = "hello"
IDS = list(TEXT.encode())
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "return_token_ids": True}
PROMPT = {"model": "tiny", "prompt": "hi", "max_tokens": 20, "return_token_ids": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("ids")) as started:
        started.engine.script = say(TEXT, chunk=2)
        yield started


def prompt_ids(server: Frontend) -> list[int]:
    return list(unpack_token_ids(server.engine.of(Generate)[-1].token_ids))


def streamed(server: Frontend, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_a_whole_chat_has_the_tokens_of_prompt_and_answer(server: Frontend) -> None:
    answer = server.http.post("/v1/chat/completions", json=CHAT).json()
    assert answer["prompt_token_ids"] == prompt_ids(server)
    assert answer["choices"][0]["token_ids"] == IDS


def test_a_whole_completion_has_them_in_each_choice(server: Frontend) -> None:
    answer = server.http.post("/v1/completions", json={**PROMPT, "n": 2}).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [IDS, IDS]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompt_ids(server)] * 2


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)])
def test_a_stream_has_the_prompt_once_and_each_token_once(path: str, body: dict[str, Any], server: Frontend) -> None:
    events = streamed(server, path, body)
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert [one for choice in choices for one in choice.get("token_ids", ())] == IDS
    prompts = [holder.get("prompt_token_ids") for holder in (events if body is CHAT else choices)]
    assert [found for found in prompts if found] == [prompt_ids(server)]


def test_tokens_behind_a_stop_string_are_not_among_them(server: Frontend) -> None:
    answer = server.http.post("/v1/completions", json={**PROMPT, "stop": "ll"}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("he", IDS[: answer["usage"]["completion_tokens"]])


def test_answers_without_the_field_have_none(server: Frontend) -> None:
    answer = server.http.post("/v1/chat/completions", json={**CHAT, "return_token_ids": None}).json()
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
