"""How far a prompt is, over real HTTP in every dialect, as their clients read it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from moeserve.plan import FinishReason
from moeserve.wire import Generate
from tests.support.fake_engine import compute, say
from tests.support.frontend import Frontend, frontend

PROGRESS = {"total": 21034, "cache": 6016, "processed": 8192, "time_ms": 0, "left_ms": 41250}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend")) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(server: Frontend) -> None:
    server.engine.received.clear()
    server.engine.script = compute((21034, 6016, 8192))


def answer(server: Frontend, text: bytes = b"Hello") -> None:
    """Have the scripted engine answer the request whose progress it has told."""
    (generate,) = server.engine.wait_for(Generate)
    server.engine.output(generate, list(text), num_cached_tokens=6016)
    server.engine.output(generate, [], finish_reason=FinishReason.STOP, num_output_tokens=len(text))


def streamed(server: Frontend, path: str) -> list[dict[str, Any]]:
    """The events of a stream whose answer comes once the progress was read."""
    found: list[dict[str, Any]] = []
    with server.http.stream("POST", path, json={**BODIES[path], "stream": True, "return_progress": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            found.append(json.loads(line.removeprefix("data: ")))
            if "prompt_progress" in found[-1]:
                answer(server)
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_tells_how_far_its_prompt_is_before_the_first_token(server: Frontend, path: str) -> None:
    events = streamed(server, path)
    assert [event["prompt_progress"] for event in events if "prompt_progress" in event] == [PROGRESS]
    assert "Hello" in json.dumps(events[1:])
    assert server.engine.of(Generate)[0].reports_progress


@pytest.mark.parametrize("path", BODIES)
def test_who_does_not_ask_for_progress_or_does_not_stream_hears_nothing_of_it(server: Frontend, path: str) -> None:
    server.engine.script = say("Hello")
    for fields in ({"stream": True}, {"return_progress": True}):
        response = server.http.post(path, json={**BODIES[path], **fields})
        assert "prompt_progress" not in response.text
        ignored = response.headers.get("x-moeserve-ignored")
        assert ignored == ("return_progress" if "return_progress" in fields else None)
    assert [generate.reports_progress for generate in server.engine.of(Generate)] == [False, False]


def test_chats_and_completions_have_the_shape_of_llama_cpps(server: Frontend) -> None:
    chunk = streamed(server, "/v1/chat/completions")[0]
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    server.engine.received.clear()
    chunk = streamed(server, "/v1/completions")[0]
    assert chunk["choices"] == [{"index": 0, "text": "", "finish_reason": None}]


def test_a_message_tells_it_in_a_ping_that_clients_pass_over(server: Frontend) -> None:
    first, second, *_ = streamed(server, "/v1/messages")
    assert (first["type"], second["type"]) == ("ping", "message_start")


def test_the_openai_package_reads_streams_with_progress(server: Frontend) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"extra_body": {"return_progress": True}}
        with client.chat.completions.stream(**CHAT, **asked) as chat:
            for event in chat:
                if event.type == "chunk" and hasattr(event.chunk, "prompt_progress"):
                    answer(server)
            message = chat.get_final_completion().choices[0].message
        assert (message.role, message.content) == ("assistant", "Hello")
        server.engine.received.clear()
        with client.responses.stream(model="tiny", input="hi", **asked) as responses:
            kinds = []
            for each in responses:
                kinds.append(each.type)
                if str(each.type) == "response.prompt_progress":
                    answer(server)
            assert responses.get_final_response().output_text == "Hello"
        assert kinds[:3] == ["response.created", "response.in_progress", "response.prompt_progress"]


def test_each_of_several_prompts_has_its_own_progress(server: Frontend) -> None:
    body = {"model": "tiny", "prompt": ["one", "two"], "stream": True, "return_progress": True}
    seen = set()
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            event = json.loads(line.removeprefix("data: ") if line.startswith("data: {") else "{}")
            if "prompt_progress" in event:
                seen.add(event["choices"][0]["index"])
            if seen == {0, 1}:
                break
    assert seen == {0, 1}


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_says_in_headers_what_its_prompt_took(server: Frontend, path: str) -> None:
    server.engine.script = say("Hello")
    headers = server.http.post(path, json=BODIES[path]).headers
    assert headers["x-moeserve-cached-tokens"] == "3"
    assert int(headers["x-moeserve-ttft-ms"]) >= 0
