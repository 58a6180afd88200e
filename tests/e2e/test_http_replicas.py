"""What routers ask of a replica, over real HTTP from a frontend process whose engine follows a script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from moeserve.wire import Generate, unpack_token_ids
from tests.support.examples import examples
from tests.support.fake_engine import say
from tests.support.frontend import Frontend, frontend

SOURCE = {"endpoint": "tcp://0.0.0.0:5557", "replay_endpoint": "tcp://127.0.0.1:5558", "topic": "", "buffer_steps": 9}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    folder = tmp_path_factory.mktemp("frontend")
    with frontend(folder, engine={"kv_event_sources": [SOURCE]}) as running:
        yield running


def tokens_of(server: Frontend, path: str, body: dict[str, Any]) -> list[list[int]]:
    """The token ids that the engine gets for a request, of each prompt once."""
    server.engine.received.clear()
    server.engine.script = say("ok")
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [unpack_token_ids(generate.token_ids).tolist() for generate in server.engine.of(Generate)]


texts = st.text(max_size=30)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=4,
)
chats = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": messages, "max_tokens": st.integers(1, 3)},
    optional={
        "add_generation_prompt": st.booleans(),
        "chat_template_kwargs": st.just({"other": 1}),
        "truncate_prompt_tokens": st.integers(1, 20),
        "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
        "reasoning_effort": st.sampled_from(["low", "high"]),
        "cache_salt": st.sampled_from(["a", "b"]),
        "stream": st.booleans(),
    },
)
prompts = st.one_of(
    st.text(min_size=1, max_size=30),
    st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3),
    st.lists(st.integers(0, 250), min_size=1, max_size=9),
    st.lists(st.lists(st.integers(0, 250), min_size=1, max_size=5), min_size=1, max_size=3),
)
completions = st.fixed_dictionaries(
    {"model": st.just("tiny"), "prompt": prompts, "max_tokens": st.integers(1, 3)},
    optional={"truncate_prompt_tokens": st.integers(1, 6), "echo": st.booleans()},
)


@settings(examples(0.5), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=chats)
def test_a_chat_is_rendered_to_the_tokens_that_the_engine_gets(server: Frontend, body: dict[str, Any]) -> None:
    rendered = server.http.post("/v1/chat/completions/render", json=body)
    if rendered.status_code != 200:
        assert server.http.post("/v1/chat/completions", json=body).status_code == rendered.status_code
        return
    assert [rendered.json()["token_ids"]] == tokens_of(server, "/v1/chat/completions", body)
    (generate,) = server.engine.of(Generate)
    assert (rendered.json()["cache_salt"] or "") == generate.namespace


@settings(examples(0.5), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=completions)
def test_prompts_are_rendered_to_the_tokens_that_the_engine_gets(server: Frontend, body: dict[str, Any]) -> None:
    rendered = server.http.post("/v1/completions/render", json=body)
    if rendered.status_code != 200:
        assert server.http.post("/v1/completions", json=body).status_code == rendered.status_code
        return
    assert [one["token_ids"] for one in rendered.json()] == tokens_of(server, "/v1/completions", body)


def test_rendering_generates_nothing(server: Frontend) -> None:
    server.engine.received.clear()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    assert server.http.post("/v1/chat/completions/render", json=body).status_code == 200
    assert server.engine.of(Generate) == []


def test_a_bad_request_is_refused_as_the_real_one_is(server: Frontend) -> None:
    for path, body in (("chat/completions", {"model": "tiny"}), ("completions", {"model": "none", "prompt": "x"})):
        real, rendered = (server.http.post(f"/v1/{path}{end}", json=body) for end in ("", "/render"))
        assert (real.status_code, real.json()["error"]["message"]) == (
            rendered.status_code,
            rendered.json()["error"]["message"],
        )


def test_the_sources_of_events_name_the_host_that_was_asked(server: Frontend) -> None:
    told = server.http.get("/kv_event_sources").json()
    assert told == {"0": {**SOURCE, "endpoint": "tcp://127.0.0.1:5557"}}


def test_without_events_there_are_no_sources(tmp_path: Any) -> None:
    with frontend(tmp_path) as running:
        answer = running.http.get("/kv_event_sources")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_events")


def test_routers_learn_what_the_replica_is(server: Frontend) -> None:
    info = server.http.get("/get_server_info").json()
    assert (info["model_id"], info["kv_block_size"], info["dp_size"]) == ("tiny", 16, 1)
    assert info["max_total_num_tokens"] == 64 * 16
    assert server.http.get("/server_info").json() == info
    model = server.http.get("/get_model_info").json()
    assert (model["is_generation"], model["max_context_length"]) == (True, 512)
    assert server.http.get("/model_info").json() == model
    assert server.http.get("/v1/loads").json()["dp_rank_count"] == 1
