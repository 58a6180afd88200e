"""The schemas of `/openapi.json` and the readers of bodies agree about bounds, required fields and examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from moeserve.frontend.dialects import chat, completions, messages, ollama, responses, tgi
from moeserve.frontend.dialects.chat import parse_warm
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.dialects.responses_items import Earlier
from moeserve.frontend.errors import ApiError
from moeserve.frontend.routes import openapi
from moeserve.frontend.routes.openapi import describe
from moeserve.frontend.routes.table import ROUTES

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
DOCUMENT = describe(ROUTES, FACTS)
HELLO = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


def parse_response(body: bytes, model: ModelFacts) -> Any:
    return responses.parse(body, model, Earlier())


READERS: dict[str, tuple[Callable[[bytes, ModelFacts], Any], dict[str, Any]]] = {
    "/v1/chat/completions": (chat.parse, {"messages": HELLO}),
    "/v1/completions": (completions.parse, {"prompt": "hi"}),
    "/v1/responses": (parse_response, {"input": "hi"}),
    "/v1/messages": (messages.parse, {"messages": HELLO, "max_tokens": 4}),
    "/v1/messages/count_tokens": (messages.parse_count, {"messages": HELLO}),
    "/v1/cache/warm": (parse_warm, {"prompt": "hi"}),
    "/api/chat": (ollama.parse_chat, {"messages": HELLO}),
    "/api/generate": (ollama.parse_generate, {"prompt": "hi"}),
    "/generate": (tgi.parse_tgi, {"inputs": "hi"}),
    "/v2/models/{name}/generate": (tgi.parse_triton, {"text_input": "hi"}),
}
# Their names may end in `:latest`. Without messages, or a prompt, they ask that the model is loaded.
OLLAMAS = ("/api/chat", "/api/generate")
UNNAMED = ("/generate", "/v2/models/{name}/generate")  # their bodies name no model


def content_of(path: str) -> dict[str, Any]:
    content: dict[str, Any] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return content


def told(path: str, body: Any) -> bool:
    schema = {**content_of(path)["schema"], "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema).is_valid(body)


def read(path: str, body: Any) -> ApiError | None:
    try:
        READERS[path][0](json.dumps(body).encode(), FACTS)
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("path", READERS)
def test_the_example_is_a_body_that_is_taken(path: str) -> None:
    example = content_of(path)["example"]
    assert told(path, example)
    assert read(path, example) is None


def bounded_fields() -> list[tuple[str, str, float, bool]]:
    """Return (path, field, value, whether it is taken) for values at the bounds of each number, and beyond them."""
    cases = []
    # Counting tokens does not look at how an answer would be sampled.
    for path in READERS.keys() - {"/v1/messages/count_tokens"}:
        for field, schema in content_of(path)["schema"]["properties"].items():
            for word, inside, step in (
                ("minimum", True, -1),
                ("maximum", True, 1),
                ("exclusiveMinimum", False, 0),
            ):
                if word in schema:
                    bound = schema[word]
                    cases += [(path, field, bound, True)] if inside else []
                    cases.append((path, field, bound + step, False))
    return sorted(cases)


@pytest.mark.parametrize(("path", "field", "value", "taken"), bounded_fields())
def test_bounds_are_those_of_the_reader(path: str, field: str, value: float, taken: bool) -> None:
    beside = {
        "/v1/chat/completions": {
            "top_logprobs": {"logprobs": True},
            "best_of": {"use_beam_search": value != 1},
        },
        "/v1/completions": {"max_tokens": {"echo": True}},
    }
    body = {"model": "tiny", **READERS[path][1], **beside.get(path, {}).get(field, {}), field: value}
    error = read(path, body)
    assert told(path, body) is taken
    assert (error is None) is taken
    assert error is None or error.param == field


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        *((path, {"model": 1}) for path in READERS if path not in UNNAMED),
        *((path, {"model": "other"}) for path in READERS if path not in (*OLLAMAS, *UNNAMED)),
        *((path, {field: None}) for path, (_, base) in READERS.items() if path not in OLLAMAS for field in base),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": None}]}]}),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("/v1/chat/completions", {"tools": [{"type": "custom"}]}),
        ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "a b"}}]}),
        ("/v1/chat/completions", {"stop": [""]}),
        ("/v1/chat/completions", {"stop_token_ids": [260]}),
        ("/v1/chat/completions", {"reasoning_effort": "much"}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": ["a", 1]}),
        ("/v1/completions", {"prompt": [260]}),
        ("/v1/completions", {"logit_bias": {"x": 1}}),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "f", "call_id": "1"}]}),
        ("/v1/responses", {"guided_regex": "x"}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}),
        ("/v1/messages", {"temperature": 1.5}),
        ("/v1/messages", {"tools": [{"name": "f"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("/v1/messages", {"container": "c"}),
        ("/v1/cache/warm", {"messages": HELLO}),
    ],
)
def test_what_a_schema_refuses_is_refused(path: str, changes: dict[str, Any]) -> None:
    body = {"model": "tiny", **READERS[path][1]}
    assert told(path, body)
    assert read(path, body) is None
    assert not told(path, body | changes)
    assert read(path, body | changes) is not None


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}),
        ("/v1/chat/completions", {"stop": "x", "n": None, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"prompt_cache_options": {"ttl": 90, "mode": None}}),
        ("/v1/chat/completions", {"chat_template_kwargs": {"Enable_x": False, "_y": 1.5}}),
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/completions", {"prompt": [[1], [2]], "logit_bias": {"3": -100}}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]}),
        (
            "/v1/responses",
            {
                "input": [
                    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "x"},
                ]
            },
        ),
        ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "text"}}}]}),
        ("/v1/responses", {"tools": [{"type": "web_search"}, {"type": "custom", "name": "c"}]}),
        ("/v1/responses", {"background": True, "text": {"format": {"type": "text"}}}),
        (
            "/v1/messages",
            {"tools": [{"type": "web_search_20250305", "name": "w s"}, {"name": "f", "input_schema": {}}]},
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]}
                        ],
                    },
                ]
            },
        ),
        ("/v1/cache/warm", {"model": None, "prompt_cache_retention": "24h"}),
    ],
)
def test_what_is_taken_is_allowed(path: str, changes: dict[str, Any]) -> None:
    body = {"model": "tiny", **READERS[path][1], **changes}
    assert read(path, body) is None
    assert told(path, body)


def test_every_bound_belongs_to_a_field_that_is_there() -> None:
    names = {name.removeprefix("moeserve.frontend.dialects.") for name in DOCUMENT["components"]["schemas"]}
    names |= {operation.body.__name__ for operation in ROUTES if operation.body is not None}
    for table in (openapi._OF_STRUCTS, openapi._REQUIRED, openapi._VARIANTS):
        assert table.keys() <= names
    fields = {
        field for operation in ROUTES if operation.body is not None for field in operation.body.__struct_encode_fields__
    }
    assert openapi._OF_FIELDS.keys() <= fields
