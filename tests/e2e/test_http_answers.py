"""Answers over real HTTP from a frontend process whose engine follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support.fake_engine import say
from tests.support.frontend import Frontend, frontend


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("f")) as running:
        yield running


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], **fields)


def test_chat_answer_in_one_piece(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("Grüße 🎉")
    answer = ask(client)
    assert answer.choices[0].message.content == "Grüße 🎉"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("Grüße 🎉".encode())
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_gives_the_same_text(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("Grüße 🎉")
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Grüße 🎉"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + len("Grüße 🎉".encode())
