"""TGI's and Triton's routes over real HTTP and a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.fake_engine import say
from tests.support.frontend import Frontend, frontend


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("tgi")) as started:
        yield started


def test_both_servers_answers_have_the_same_text(server: Frontend) -> None:
    server.engine.script = say("hello there")
    tgi = server.http.post("/generate", json={"inputs": "hi", "parameters": {"max_new_tokens": 20}})
    assert tgi.json() == {"generated_text": "hello there"}
    triton = server.http.post("/v2/models/alias/generate", json={"text_input": "hi", "max_tokens": 20})
    assert triton.json()["text_output"] == "hello there"


@pytest.mark.parametrize("path", ["/generate_stream", "/v2/models/tiny/generate_stream"])
def test_streams_are_events_whose_pieces_are_the_answer(path: str, server: Frontend) -> None:
    server.engine.script = say("hello")
    with server.http.stream("POST", path, json={"inputs": "hi", "text_input": "hi"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data:")) for line in response.iter_lines() if line.startswith("data:")]
    pieces = [event["token"]["text"] if "token" in event else event["text_output"] for event in events]
    assert "".join(pieces) == "hello"
    if path == "/generate_stream":
        assert events[-1]["generated_text"] == "hello"


def test_health_server_and_model_are_described(server: Frontend) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"):
        assert (server.http.get(path).status_code, server.http.get(path).content) == (200, b"")
    assert server.http.get("/v2").json()["name"] == "moeserve"
    model = server.http.get("/v2/models/tiny").json()
    assert (model["name"], model["versions"], model["outputs"][0]["name"]) == ("tiny", ["1"], "text_output")
    info = server.http.get("/info").json()
    assert (info["model_id"], info["max_total_tokens"]) == ("tiny", 512)


def test_errors_are_a_sentence_in_the_shape_of_each(server: Frontend) -> None:
    refused = server.http.post("/generate", json={"inputs": "", "parameters": {}})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "validation")
    unknown = server.http.post("/v2/models/other/generate", json={"text_input": "hi"})
    assert (unknown.status_code, unknown.json().keys()) == (404, {"error"})
    assert server.http.get("/v2/models/other").status_code == 404


def test_hugging_faces_client_reads_answers_and_streams(server: Frontend) -> None:
    client = pytest.importorskip("huggingface_hub").InferenceClient(f"{server.http.base_url}".rstrip("/") + "/generate")
    server.engine.script = say("hello")
    assert client.text_generation("hi", max_new_tokens=20) == "hello"
    detailed = client.text_generation("hi", max_new_tokens=20, details=True)
    assert detailed.details.generated_tokens == len(detailed.details.tokens)
    assert "".join(client.text_generation("hi", max_new_tokens=20, stream=True)) == "hello"
