"""A decimal that no double holds is refused where a schema enforces it, and read as ever in other places."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.frontend.dialects import chat, completions, messages, responses
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.dialects.responses_items import Earlier
from moeserve.frontend.errors import ApiError

FACTS = ModelFacts(("m",), 4096, 300, (3,), {}, 20)
LONG = "0.1000000000000000055511151231257827"
READERS: dict[str, Any] = {
    "chat": (chat.parse, {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": (completions.parse, {"prompt": "hi"}),
    "messages": (messages.parse, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    "responses": (lambda body, facts: responses.parse(body, facts, Earlier()), {"input": "hi"}),
}


def read(dialect: str, number: str, **fields: Any) -> Any:
    """Read a body in which `NUMBER` is that number."""
    parse, said = READERS[dialect]
    body = json.dumps({"model": "m", **said, **fields}).replace('\\"NUMBER\\"', number).replace('"NUMBER"', number)
    return parse(body.encode(), FACTS)


def in_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


FUNCTION = {"name": "f", "parameters": {"properties": {"a": {"minimum": "NUMBER"}}}}


@pytest.mark.parametrize(
    ("dialect", "fields", "place"),
    [
        ("chat", in_format({"const": "NUMBER"}), "response_format.json_schema.schema.const"),
        ("chat", in_format({"enum": [1, {"a": ["NUMBER"]}]}), "response_format.json_schema.schema.enum[1].a[0]"),
        (
            "chat",
            {"tools": [{"type": "function", "function": FUNCTION}]},
            "tools[0].function.parameters.properties.a.minimum",
        ),
        ("chat", {"guided_json": json.dumps({"multipleOf": "NUMBER"})}, "guided_json.multipleOf"),
        ("completions", {"structured_outputs": {"json": {"maximum": "NUMBER"}}}, "structured_outputs.json.maximum"),
        ("messages", {"tools": [{"name": "f", "input_schema": {"const": "NUMBER"}}]}, "tools[0].input_schema.const"),
        ("responses", {"tools": [{"type": "function", **FUNCTION}]}, "tools[0].parameters.properties.a.minimum"),
    ],
)
def test_as_a_constant_or_a_bound_it_is_refused_with_its_place(dialect: str, fields: Any, place: str) -> None:
    for number in (LONG, "9007199254740993.5", "1e-400", "2.5e-99999999999999999999"):
        with pytest.raises(ApiError) as refused:
            read(dialect, number, **fields)
        assert (refused.value.status, refused.value.param) == (400, place)
        assert "double" in refused.value.message
    for number in ("0.1", "1e22", "-0.0", "123456789.12345678", "9007199254740993", "0.10000000000000000000"):
        read(dialect, number, **fields)


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("chat", in_format({"type": "number", "default": "NUMBER", "examples": ["NUMBER"], "x": "NUMBER"})),
        ("chat", {"messages": [{"role": "user", "content": "a", "const": "NUMBER"}]}),
        ("chat", {"temperature": "NUMBER", "metadata": None, "chat_template_kwargs": {"pi": "NUMBER"}}),
    ],
)
def test_elsewhere_it_is_read_as_a_double(dialect: str, fields: Any) -> None:
    assert read(dialect, LONG, **fields)


def test_a_number_beyond_all_doubles_is_refused_everywhere() -> None:
    with pytest.raises(ApiError) as refused:
        read("chat", "1e400", **in_format({"default": "NUMBER"}))
    assert refused.value.status == 400
    assert "out of range" in refused.value.message
    assert str(refused.value.param).startswith("response_format")
