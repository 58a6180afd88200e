"""`/v1/messages` over a whole service with a tiny random model: what only the real engine can show."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.service import Service, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint

CONTEXT = 512
MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("service"), "--max-model-len", str(CONTEXT)) as started:
        yield started


def body(text: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": "m", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return {**asked, "messages": [{"role": "user", "content": [{"type": "text", "text": text, **MARK}]}], **fields}


def ask(running: Service, text: str, **fields: Any) -> dict[str, Any]:
    response = running.http.post("/v1/messages", json=body(text, **fields))
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def test_a_stream_says_what_the_whole_message_says(running: Service) -> None:
    message = ask(running, "again and again")
    stream = running.http.post("/v1/messages", json=body("again and again", stream=True)).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    pieces = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == message["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == message["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == message["usage"]["output_tokens"] == 16


def test_a_prompt_that_was_there_before_is_read_from_the_cache(running: Service) -> None:
    text = "cache me " * 20
    counted = running.http.post("/v1/messages/count_tokens", json=body(text)).json()["input_tokens"]
    first, second = ask(running, text)["usage"], ask(running, text)["usage"]
    assert first["cache_creation_input_tokens"] == counted
    assert second["cache_read_input_tokens"] > counted / 2
    assert second["cache_read_input_tokens"] + second["cache_creation_input_tokens"] == counted


def test_an_answer_may_ask_for_more_than_the_context_has_room_for(running: Service) -> None:
    message = ask(running, "long", max_tokens=32_000)
    assert message["stop_reason"] == "model_context_window_exceeded"
    usage = message["usage"]
    assert usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == CONTEXT
