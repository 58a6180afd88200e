"""Refusals over real HTTP: status, shape, and that they harm nobody else."""

import gzip
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from moeserve.plan import FinishReason
from moeserve.wire import Abort, Generate, Output, Outputs
from tests.support.fake_engine import FakeEngine, admit_only, reject, say, trickle
from tests.support.frontend import Frontend, frontend
from tests.support.service import wait_until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
LIMIT = 20_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), max_request_bytes=LIMIT) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(server: Frontend) -> None:
    server.engine.script = say("ok")
    server.engine.received.clear()


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 9000, b'{"temperature":NaN}', b'{"tokens":5}'])
def test_malformed_bodies_are_refused_on_every_route(server: Frontend, path: str, body: bytes) -> None:
    error_of(server.http.post(path, content=body), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_is_not_served_is_named(server: Frontend, stream: bool) -> None:
    error = error_of(server.http.post("/v1/chat/completions", json={**CHAT, "audio": {}, "stream": stream}), 400)
    assert (error["param"], error["type"]) == ("audio", "invalid_request_error")


def test_unknown_models_routes_and_methods(server: Frontend) -> None:
    assert (
        error_of(server.http.post("/v1/completions", json={"model": "x", "prompt": "a"}), 404)["code"]
        == "model_not_found"
    )
    assert error_of(server.http.get("/v1/models/x"), 404)["code"] == "model_not_found"
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    got = server.http.get("/v1/completions")
    assert error_of(got, 405)["code"] == "method_not_allowed"
    assert got.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/health/", "/health"),
        ("//v1/models", "/v1/models"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions/", "/v1/chat/completions"),
        ("/models/", "/v1/models"),
    ],
)
def test_a_path_that_is_nearly_right_is_told_the_right_one(server: Frontend, asked: str, meant: str) -> None:
    error = error_of(server.http.get(str(server.http.base_url).rstrip("/") + asked), 404)
    assert (error["code"], error["message"].endswith(f" {meant}")) == ("not_found", True)


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 413)])
def test_a_client_that_sends_all_of_a_body_that_is_not_wanted_gets_its_answer(
    server: Frontend, path: str, status: int
) -> None:
    url = httpx2.URL(str(server.http.base_url))
    body = b"x" * 8_000_000
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(("prompt", "max_tokens"), [([1] * 512, 1), ([1] * 512, 13), ("x" * 513, 1), ("x" * 19_000, 1)])
def test_what_exceeds_the_context_is_told_with_both_counts(server: Frontend, prompt: Any, max_tokens: int) -> None:
    response = server.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": max_tokens})
    error = error_of(response, 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "512 tokens" in error["message"]
    assert not server.engine.of(Generate)


def test_a_body_over_the_limit_is_refused_however_it_is_sent(server: Frontend) -> None:
    big = {**CHAT, "messages": [{"role": "user", "content": "x" * LIMIT}]}
    assert error_of(server.http.post("/v1/chat/completions", json=big), 413)["code"] == "request_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(8):
            yield b" " * (LIMIT // 4)

    assert error_of(server.http.post("/v1/chat/completions", content=chunks()), 413)["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "retry_after"),
    [
        ("queue_full", 503, range(7, 11)),
        ("overloaded", 503, range(7, 11)),
        ("draining", 503, range(7, 8)),
        ("context_length_exceeded", 400, None),
        ("invalid", 400, None),
    ],
)
def test_a_rejection_by_the_engine_is_a_status_even_for_streams(
    server: Frontend, code: str, status: int, retry_after: range | None, stream: bool
) -> None:
    server.engine.script = reject(code, "the reason", 6.5 if status == 503 else None)
    response = server.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    error = error_of(response, status)
    if retry_after is None:
        assert "retry-after" not in response.headers
    else:
        assert int(response.headers["retry-after"]) in retry_after
    if code == "context_length_exceeded":
        assert error["code"] == code


def test_one_rejected_choice_aborts_its_siblings(server: Frontend) -> None:
    def second_is_rejected(engine: FakeEngine, generate: Generate) -> None:
        (reject("queue_full") if generate.request_id.endswith("-1") else admit_only)(engine, generate)

    server.engine.script = second_is_rejected
    error_of(server.http.post("/v1/chat/completions", json={**CHAT, "n": 2}), 503)
    (abort,) = server.engine.wait_for(Abort)
    assert abort.request_id.endswith("-0")


def test_more_than_runs_and_queues_is_refused_before_the_engine_hears_of_it(server: Frontend) -> None:
    server.engine.script = admit_only
    with httpx2.Client(base_url=server.url, timeout=60) as other, ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            threads.submit(other.post, "/v1/chat/completions", json={**CHAT, "n": 4})
        held = server.engine.wait_for(Generate, 8)
        response = server.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert error_of(response, 503)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        assert len(server.engine.of(Generate)) == 8
        for generate in held:
            server.engine.send(Outputs([Output(generate.request_id, [65], FinishReason.LENGTH, 0, 1)]))
    assert 'moeserve_rejections_total{reason="queue_full"} ' in server.http.get("/metrics").text
    # The places of answers that have ended are free a moment after their last byte.
    wait_until(lambda: server.http.post("/v1/chat/completions", json={**CHAT, "n": 5}).status_code == 400)


def test_a_failure_of_one_request_is_its_own(server: Frontend) -> None:
    server.engine.script = say("", finish=FinishReason.ERROR)
    for stream in (False, True):
        error = error_of(server.http.post("/v1/chat/completions", json={**CHAT, "stream": stream}), 500)
        assert error["type"] == "server_error"
    server.engine.script = trickle("par")
    with server.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        server.engine.output(server.engine.of(Generate)[-1], [], finish_reason=FinishReason.ERROR)
        data = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(data[-1])["error"]["type"] == "server_error"
    server.engine.script = say("ok")
    assert server.http.post("/v1/chat/completions", json=CHAT).status_code == 200


def raw(server: Frontend, data: bytes) -> bytes:
    """Return the server's answer to bytes on a connection until it closes it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


@pytest.mark.parametrize(
    "headers",
    [
        b"x: " + b"y" * 100_000,
        b"\r\n".join(b"x%d: y" % index for index in range(150)),
        b"x" * 100_000,
        b"no colon at all",
        b"content-length: -5",
        b"content-length: 1\r\ncontent-length: 2",
    ],
    ids=range(6),
)
def test_bad_headers_end_the_connection(server: Frontend, headers: bytes) -> None:
    answer = raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")


def test_headers_that_fit_are_fine(server: Frontend) -> None:
    assert server.http.get("/health", headers={"x": "y" * 20_000}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "evil.example"}, 403, "foreign_host"),
        ({"origin": "http://evil.example"}, 403, "foreign_origin"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"content-encoding": "zstd"}, 415, "unsupported_content_encoding"),
    ],
)
def test_a_foreign_page_does_nothing_on_a_server_without_keys(
    server: Frontend, headers: dict[str, str], status: int, code: str
) -> None:
    body = json.dumps(CHAT).encode()
    sent = {"content-type": "application/json", **headers}
    response = server.http.post("/v1/chat/completions", content=body, headers=sent)
    assert error_of(response, status)["code"] == code
    assert not server.engine.received
    answer = server.http.post("/v1/messages", content=body, headers=sent)
    assert (answer.status_code, answer.json()["type"]) == (status, "error")


def test_a_compressed_request_is_answered(server: Frontend) -> None:
    headers = {"content-type": "application/json; charset=utf-8", "content-encoding": "gzip"}
    body = gzip.compress(json.dumps(CHAT).encode())
    assert server.http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200


def test_a_preflight_learns_which_setting_it_takes(server: Frontend) -> None:
    asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    error = error_of(server.http.options("/v1/chat/completions", headers=asked), 405)
    assert "--cors-allow-origin https://chat.example" in error["message"]


@pytest.mark.parametrize(
    ("path", "word"),
    [
        *(("/v1/embeddings", "embeddings"), ("/v1/rerank", "embeddings"), ("/v1/audio/transcriptions", "whisper")),
        ("/v1/images/generations", "images"),
        *(("/chat/completions", "but /v1/chat/completions"), ("/v1/v1/completions", "but /v1/completions")),
        ("/v1/audiofile", "GET /openapi.json lists"),
    ],
)
def test_a_route_that_is_not_here_says_where_it_is(server: Frontend, path: str, word: str) -> None:
    error = error_of(server.http.post(path, json={}), 404)
    assert (error["code"], word in error["message"]) == ("not_found", True), error["message"]


def test_token_ids_are_refused_where_a_dialect_has_none(server: Frontend) -> None:
    body = {"model": "tiny", "input": "hi", "return_token_ids": True}
    error = error_of(server.http.post("/v1/responses", json=body), 400)
    assert error["code"] == "unsupported_parameter"
