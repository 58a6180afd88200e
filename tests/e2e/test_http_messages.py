"""`/v1/messages` over real HTTP: events, counts, errors in Anthropic's shape whoever raises them, HEAD and CORS."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from moeserve.config import ConfigError
from moeserve.frontend.app import create_app
from moeserve.frontend.services import Services
from moeserve.plan import FinishReason
from moeserve.wire import Admitted, Finish, Generate, Output, Outputs, unpack_token_ids
from tests.support.fake_engine import FakeEngine, reject, say
from tests.support.frontend import Frontend, frontend, run_context
from tests.support.tiny_model import ASSISTANT, BOS, END, USER

LIMIT = 20_000
PAGE = "http://page.example:3000"
KEY = {"x-api-key": "alice", "anthropic-version": "2023-06-01", "anthropic-beta": "some-2025-01-01"}
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("frontend")
    settings: dict[str, Any] = {"api_key": ("alice",), "cors_allow_origin": (PAGE,), "max_request_bytes": LIMIT}
    with frontend(folder, **settings) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(server: Frontend) -> None:
    server.engine.script = say("Hello")
    server.engine.received.clear()


def post(server: Frontend, path: str = "/v1/messages", **changes: Any) -> httpx2.Response:
    return server.http.post(path, json={**BODY, **changes}, headers=KEY)


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    """The data of a stream's events, each under its own name."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(response: httpx2.Response, status: int) -> tuple[str, str]:
    """(type, message) of an error, whose shape and ids are checked."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert body["error"].keys() == {"type", "message"}
    return body["error"]["type"], body["error"]["message"]


def test_a_message(server: Frontend) -> None:
    message = post(server, system="s").json()
    assert message["id"].startswith("msg_")
    assert message["content"] == [{"type": "text", "text": "Hello", "citations": None}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 3, 5)
    (generate,) = server.engine.of(Generate)
    assert list(unpack_token_ids(generate.token_ids)) == [BOS, USER, *b"s", END, USER, *b"hi", END, ASSISTANT]
    assert generate.sampling.max_tokens == 20


def test_a_stream_begins_with_its_input_tokens_and_ends_with_all_counts(server: Frontend) -> None:
    first, *rest, last, stop = events(post(server, stream=True))
    assert (first["type"], last["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    assert first["message"]["usage"]["input_tokens"] == 3
    assert first["message"]["usage"]["cache_read_input_tokens"] == 3
    deltas = [event["delta"]["text"] for event in rest if event["type"] == "content_block_delta"]
    assert "".join(deltas) == "Hello"
    assert last["delta"]["stop_reason"] == "end_turn"
    assert last["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_an_answer_is_named(server: Frontend, stream: bool) -> None:
    def endless(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Admitted(generate.request_id))
        engine.output(generate, list(b"abSTOPmore"))

    server.engine.script = endless
    response = post(server, stop_sequences=["END", "STOP"], stream=stream)
    end = events(response)[-2]["delta"] if stream else response.json()
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", "STOP")
    (finish,) = server.engine.of(Finish)
    assert finish.keep_tokens == 2


@pytest.mark.parametrize(("max_tokens", "reason"), [(5, "max_tokens"), (64_000, "model_context_window_exceeded")])
def test_more_tokens_than_the_context_has_room_for_end_there(server: Frontend, max_tokens: int, reason: str) -> None:
    server.engine.script = say("Hello", finish=FinishReason.LENGTH)
    assert post(server, max_tokens=max_tokens).json()["stop_reason"] == reason
    (generate,) = server.engine.of(Generate)
    assert generate.sampling.max_tokens == min(max_tokens, 512 - 6)


def test_tokens_are_counted_as_they_are_generated_from(server: Frontend) -> None:
    body: dict[str, Any] = {
        "system": "s",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}] * 3,
    }
    body["messages"].append({"role": "user", "content": "?"})
    usage = post(server, **body).json()["usage"]
    counted = post(server, "/v1/messages/count_tokens", **body, max_tokens=None).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_anthropics_shape_whoever_raises_them(server: Frontend, path: str) -> None:
    def send(**request: Any) -> httpx2.Response:
        return server.http.post(path, **{"headers": KEY, **request})

    assert error_of(send(content=b"{"), 400)[0] == "invalid_request_error"
    assert error_of(send(json=BODY, headers={}), 401)[0] == "authentication_error"
    assert error_of(send(json={**BODY, "model": "x"}), 404)[0] == "not_found_error"
    assert error_of(send(content=b" " * (LIMIT + 1)), 413)[0] == "request_too_large"
    assert error_of(server.http.get(path, headers=KEY), 405)[0] == "invalid_request_error"
    assert error_of(server.http.get(path + "/x", headers=KEY), 404)[0] == "not_found_error"
    kind, message = error_of(send(json={**BODY, "messages": [{"role": "user", "content": [{"type": "image"}]}]}), 400)
    assert (kind, "messages[0].content[0].type=image" in message) == ("invalid_request_error", True)


def test_other_routes_keep_openais_shape(server: Frontend) -> None:
    for path in ("/v1/messagesx", "/v1/models/x"):
        assert server.http.get(path, headers=KEY).json().keys() == {"error"}


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engine_have_that_shape_too(server: Frontend, stream: bool) -> None:
    server.engine.script = reject("queue_full", "full", 6.5)
    response = post(server, stream=stream)
    assert error_of(response, 503)[0] == "overloaded_error"
    assert 7 <= int(response.headers["retry-after"]) <= 10
    assert error_of(post(server, messages=[{"role": "user", "content": "x" * 600}]), 400)[1].startswith(
        "prompt is too long"
    )


def test_a_failure_in_the_middle_ends_the_stream_in_an_error_event(server: Frontend) -> None:
    admitted: list[Generate] = []

    def begin(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Admitted(generate.request_id))
        engine.output(generate, list(b"ab"))
        admitted.append(generate)

    server.engine.script = begin
    with server.http.stream("POST", "/v1/messages", json={**BODY, "stream": True}, headers=KEY) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"
        server.engine.send(Outputs([Output(admitted[0].request_id, finish_reason=FinishReason.ERROR)]))
        *_, name, data, _ = lines
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_a_failure_before_the_answer_is_a_status(server: Frontend) -> None:
    def fails(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Admitted(generate.request_id))
        engine.send(Outputs([Output(generate.request_id, finish_reason=FinishReason.ERROR)]))

    server.engine.script = fails
    assert error_of(post(server), 500)[0] == "api_error"


@pytest.mark.parametrize("header", [{"x-api-key": "alice"}, {"authorization": "Bearer alice"}])
def test_messages_and_models_take_a_key_in_either_header(server: Frontend, header: dict[str, str]) -> None:
    assert server.http.post("/v1/messages", json=BODY, headers=header).status_code == 200
    assert server.http.get("/v1/models", headers=header).status_code == 200


def test_models_are_listed_for_clients_of_both_kinds(server: Frontend) -> None:
    listed = server.http.get("/v1/models", headers=KEY).json()
    assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == (
        "list",
        False,
        "tiny",
        "alias",
    )
    model = server.http.get("/v1/models/alias", headers=KEY).json()
    assert model == listed["data"][1]
    assert (model["id"], model["object"], model["type"], model["display_name"]) == ("alias", "model", "model", "alias")
    assert model["created_at"].endswith("Z")


def test_head_is_answered_on_every_route_without_a_body(server: Frontend) -> None:
    for path in ("/", "/v1/messages", "/v1/chat/completions", "/v1/models", "/tokenize"):
        response = server.http.head(path, headers=KEY)
        assert (response.status_code, response.content) == (200, b""), path
    assert server.http.head("/nowhere", headers=KEY).status_code == 404
    assert server.http.head("/v1/messages").status_code == 401
    assert not server.engine.of(Generate)


def test_pages_of_an_allowed_origin_may_call_and_read_errors(server: Frontend) -> None:
    asked = "x-api-key, anthropic-version, authorization, content-type"
    preflight = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": asked}
    answer = server.http.options("/v1/messages", headers=preflight)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert answer.headers["access-control-allow-headers"] == asked
    refused = server.http.post("/v1/messages", json=BODY, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    assert server.http.options("/v1/messages", headers={**preflight, "origin": "http://other"}).status_code == 400
    other = server.http.post("/v1/messages", json=BODY, headers={**KEY, "origin": "http://other"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["page.example", "http://page.example/", "http://page.example/x", ""])
def test_origins_that_no_browser_sends_are_refused_at_the_start(tmp_path: Any, origin: str) -> None:
    with pytest.raises(ConfigError, match="cors-allow-origin"):
        create_app(Services.load(run_context(tmp_path, cors_allow_origin=(origin,))), 1024)


def test_tools_of_the_vendor_are_named_in_a_header(server: Frontend) -> None:
    response = post(server, tools=[{"type": "web_search_20250305", "name": "web_search"}, {"type": "a b", "name": "b"}])
    assert (response.status_code, response.headers["x-moeserve-dropped-tools"]) == (200, "web_search_20250305,a?b")
