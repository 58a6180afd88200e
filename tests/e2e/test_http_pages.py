"""The pages, the description of the routes and the live figures over real HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend.pages import FILES
from moeserve.wire import Stats
from tests.support.frontend import Frontend, frontend

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("frontend")
    (folder / "keys").write_text("metrics:prom\nuser:bob\n")
    with frontend(folder, api_key_file=str(folder / "keys")) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def stats(**fields: Any) -> Stats:
    nothing = {name: 0 for name in Stats.__struct_fields__ if name not in ("queue_seconds", "features")}
    return Stats(**{**nothing, "rejections": {}, "step_seconds": 0.0, "load": None, **fields})


def test_browsers_get_the_page_and_clients_what_they_ask_for(server: Frontend) -> None:
    page = server.http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    index = server.http.get("/", headers={"accept": "application/json"})
    assert "POST /v1/chat/completions" in index.json()["endpoints"]
    for accept in ("*/*", "text/plain", ""):
        assert server.http.get("/", headers={"accept": accept}).text == "Ollama is running"
    assert {server.http.head("/").status_code, index.status_code} == {200}
    assert page.headers["vary"] == index.headers["vary"] == "accept"


@pytest.mark.parametrize("path", sorted(FILES))
def test_files_are_public_and_under_a_strict_policy(server: Frontend, path: str) -> None:
    whole = server.http.get(path)
    assert whole.status_code == 200
    policy = whole.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    head = server.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    again = server.http.get(path, headers={"if-none-match": whole.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/pages/", "/pages/../keys.py", "/pages/%2e%2e/keys.py", "/pages/chat.js/", "/pages"])
def test_nothing_else_is_public(server: Frontend, path: str) -> None:
    assert server.http.get(path).status_code == 401


def test_the_routes_are_described(server: Frontend) -> None:
    document = server.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    chat = document["paths"]["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages"} <= set(schema["required"]) <= set(schema["properties"])


def test_figures_need_the_role_of_metrics(server: Frontend) -> None:
    for path in ("/v1/stats", "/v1/stats/stream"):
        assert server.http.get(path).status_code == 401
        assert server.http.get(path, headers=bearer("bob")).status_code == 403
    answer = server.http.get("/v1/stats", headers=bearer("prom")).json()
    assert answer["about"]["models"] == ["tiny", "alias"]
    assert answer["about"]["ready"] is True


def test_head_of_the_stream_is_answered_at_once(server: Frontend) -> None:
    head = server.http.head("/v1/stats/stream", headers=bearer("prom"))
    assert head.status_code == 200
    assert head.headers["content-type"].startswith("text/event-stream")


def test_the_stream_begins_with_all_there_is_and_tells_every_sample(server: Frontend) -> None:
    with server.http.stream("GET", "/v1/stats/stream", headers=bearer("prom")) as response:
        events = read_events(response)
        name, begin = next(events)
        assert (name, begin["about"]["block_size"]) == ("stats", 16)
        # Stats within a second of the ones before give no sample; the engine sends on.
        for running in (2, 3):
            told: list[int] = []
            while running not in told:
                server.engine.send(stats(num_running=running, blocks_free=7))
                samples = server.http.get("/v1/stats", headers=bearer("prom")).json()["samples"]
                told = [sample["running"] for sample in samples]
        found = [next(events) for _ in told]
        assert [name for name, _ in found] == ["sample"] * len(told)
        assert [sample["running"] for _, sample in found] == told
        assert {sample["kv"]["free"] for _, sample in found} == {7}


def test_the_stream_ends_when_the_service_does(tmp_path: Path) -> None:
    with frontend(tmp_path) as running, running.http.stream("GET", "/v1/stats/stream") as response:
        events = read_events(response)
        next(events)
        running.process.terminate()
        assert list(events) == []
        assert running.process.wait(60) == 0


def read_events(response: Any) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


@pytest.mark.parametrize(
    ("template", "budgets", "thinking"),
    [
        ("{% if enable_thinking %}<think>{% endif %}", "{}", {"can_be_off": True, "efforts": []}),
        ("{{ reasoning_effort }}", "{}", {"can_be_off": False, "efforts": ["low", "medium", "high"]}),
        ("it says thinkingly", '{"low": 9}', {"can_be_off": False, "efforts": ["low"]}),
    ],
)
def test_the_models_say_how_they_sample_and_how_they_can_be_asked_to_think(
    tmp_path: Path, template: str, budgets: str, thinking: dict[str, Any]
) -> None:
    facts = {"default_sampling": {"temperature": 0.6}}
    settings = {"reasoning_parser": "qwen3", "reasoning_effort_budgets": budgets}
    with frontend(tmp_path, engine=facts, template=template, **settings) as running:
        (model, _) = running.http.get("/v1/models").json()["data"]
        assert (model["default_sampling"], model["thinking"]) == ({"temperature": 0.6}, thinking)


def test_a_model_that_does_not_think_says_so(server: Frontend) -> None:
    assert server.http.get("/v1/models/tiny", headers=bearer("bob")).json()["thinking"] is None
