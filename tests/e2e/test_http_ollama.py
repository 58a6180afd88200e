"""Ollama's API over real HTTP and a scripted engine: what strict clients read."""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from moeserve.wire import Generate, unpack_token_ids
from tests.support.fake_engine import say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.tiny_model import ASSISTANT, BOS, END, USER

HELLO = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("ollama"), reasoning_parser="think") as started:
        yield started


def test_the_version_is_high_enough_for_clients_that_compare_numbers(server: Frontend) -> None:
    version = server.http.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize("path", ["tags", "ps"])
def test_every_served_name_is_listed_with_the_fields_that_strict_clients_read(server: Frontend, path: str) -> None:
    models = server.http.get(f"/api/{path}").json()["models"]
    assert [model["name"] for model in models] == ["tiny", "alias"]
    for model in models:
        assert model["model"] == model["name"]
        assert model["size"] >= 0
        assert model["digest"]
        assert model["details"].keys() >= {"format", "family", "families", "parameter_size", "quantization_level"}
        for field in ("modified_at", "expires_at") if path == "ps" else ("modified_at",):
            assert datetime.fromisoformat(model[field]).tzinfo is not None


@pytest.mark.parametrize("body", [{"model": "tiny"}, {"name": "tiny"}, {"model": "tiny:latest", "verbose": True}])
def test_a_model_is_described_under_its_name_with_and_without_latest(server: Frontend, body: dict[str, str]) -> None:
    shown = server.http.post("/api/show", json=body).json()
    facts = shown["model_info"]
    assert facts["general.basename"] == "tiny"
    assert facts[f"{facts['general.architecture']}.context_length"] == 512
    assert shown["details"]["family"] == facts["general.architecture"]
    assert shown["capabilities"][:2] == ["completion", "tools"]


def test_a_served_model_is_there_already_and_no_other_is_pulled(server: Frontend) -> None:
    assert server.http.post("/api/pull", json={"model": "tiny"}).text == '{"status":"success"}\n'
    refused = server.http.post("/api/pull", json={"model": "other"})
    assert refused.status_code == 400
    assert "`tiny` or `alias`" in refused.json()["error"]


@pytest.mark.parametrize(("body", "status"), [({"model": "other"}, 404), ({"model": 3}, 400)])
def test_errors_are_a_sentence(server: Frontend, body: dict[str, object], status: int) -> None:
    answer = server.http.post("/api/show", json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert "model" in answer.json()["error"]


def lines(server: Frontend, path: str, **fields: Any) -> list[dict[str, Any]]:
    answer = server.http.post(f"/api/{path}", json={"model": "tiny", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_a_stream_of_lines_unless_it_is_asked_for_whole(server: Frontend) -> None:
    server.engine.script = say("<think>hm</think>Hello!")
    found = lines(server, "chat", messages=HELLO)
    parts = [line["message"] for line in found]
    assert "".join(part["content"] for part in parts) == "Hello!"
    assert "".join(part.get("thinking", "") for part in parts) == "hm"
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    whole = server.http.post("/api/chat", json={"model": "tiny", "messages": HELLO, "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello!", "thinking": "hm"}
    for end in (found[-1], whole):
        assert (end["done_reason"], end["eval_count"]) == ("stop", len("<think>hm</think>Hello!"))
        assert end["prompt_eval_count"] == len([BOS, USER, *b"hi", END, ASSISTANT])


def test_a_call_comes_whole_with_its_arguments_as_an_object(server: Frontend) -> None:
    server.engine.script = say(CALL)
    found = lines(server, "chat", messages=HELLO, tools=TOOLS)
    (made,) = [call for line in found for call in line["message"].get("tool_calls", [])]
    assert made["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}


def test_a_prompt_is_put_into_the_template_unless_it_is_raw(server: Frontend) -> None:
    server.engine.script = say("yes")
    for raw, expected in ((False, [BOS, USER, *b"hi", END, ASSISTANT]), (True, list(b"hi"))):
        server.engine.received.clear()
        found = lines(server, "generate", prompt="hi", raw=raw, options={"num_predict": 5, "num_ctx": 99})
        assert "".join(line["response"] for line in found) == "yes"
        (asked,) = [message for message in server.engine.received if isinstance(message, Generate)]
        assert list(unpack_token_ids(asked.token_ids)) == expected
        assert asked.sampling.max_tokens == 5


def test_passed_over_options_are_named_in_a_header(server: Frontend) -> None:
    server.engine.script = say("yes")
    answer = server.http.post("/api/chat", json={"model": "tiny", "messages": HELLO, "options": {"num_ctx": 99}})
    assert answer.headers["x-moeserve-ignored"] == "options.num_ctx"


def test_a_request_that_is_sent_again_gets_the_same_lines(server: Frontend) -> None:
    server.engine.script = say("yes")
    asked: dict[str, Any] = {"json": {"model": "tiny", "messages": HELLO}, "headers": {"idempotency-key": "once"}}
    first, again = (server.http.post("/api/chat", **asked) for _ in range(2))
    assert again.text == first.text
    assert json.loads(again.text.splitlines()[-1])["done"]
    assert again.headers["content-type"] == "application/x-ndjson"


def test_a_stream_that_fails_ends_with_a_line_that_says_so(tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": HELLO}
    with (
        frontend(tmp_path, engine={"script": trickle("a")}) as server,
        server.http.stream("POST", "/api/chat", json=body) as answer,
    ):
        found = answer.iter_lines()
        assert json.loads(next(found))["message"]["content"] == "a"
        server.engine.send(b"\xc1 no message")
        (end,) = found
    assert json.loads(end) == {"error": "A message of the engine could not be read"}


def test_an_unknown_path_of_ollamas_api_is_refused_with_a_sentence(server: Frontend) -> None:
    answer = server.http.post("/api/embed", json={"model": "tiny", "input": "x"})
    assert (answer.status_code, "embeddings" in answer.json()["error"]) == (404, True)


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_an_empty_request_loads_the_model(server: Frontend, path: str) -> None:
    answer = server.http.post(f"/api/{path}", json={"model": "tiny", "keep_alive": "5m"}).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "other", "messages": HELLO}, 404),
        ({"model": "tiny", "messages": HELLO, "options": {"top_p": 2}}, 400),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x" * 3000}]}, 400),
    ],
)
def test_a_chat_that_is_refused_gets_a_sentence(server: Frontend, fields: dict[str, Any], status: int) -> None:
    answer = server.http.post("/api/chat", json=fields)
    assert answer.status_code == status
    assert isinstance(answer.json()["error"], str)
