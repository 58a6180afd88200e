"""The type of an argument's value by the tool's schema, where models write values as plain text."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.frontend.parsers.values import Properties
from tests.support.parsing import calls_of, parse_cut


@pytest.mark.parametrize(
    ("value", "schema", "result"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {}, 5),
        ("five", {"type": "integer"}, "five"),
        ("null", {"type": ["string", "null"]}, None),
        ("nil", {"type": ["string", "null"]}, "nil"),
        ("true", {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, 1),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("1", {"enum": ["1", "2"]}, "1"),
        ('"quoted"', {}, '"quoted"'),
        ("a\nb", None, "a\nb"),
        ("5", {"type": 7, "anyOf": 3, "enum": 4}, 5),
    ],
)
def test_the_schema_decides_the_type_of_a_tagged_value(value: str, schema: Any, result: Any) -> None:
    found = Properties({"properties": {"x": schema}}).typed("x", value)
    assert found == result
    assert type(found) is type(result)


ZIP = {"type": "string", "enum": ["10115", "20095"]}
ROOT = {
    "properties": {
        "zip": {"$ref": "#/$defs/Zip"},
        "nested": {"$ref": "#/$defs/Outer"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
        "all": {"allOf": [{"$ref": "#/$defs/Zip"}], "description": "as pydantic wrote it"},
        "one": {"oneOf": [{"$ref": "#/definitions/a~1b%20c"}]},
        "place": {"$ref": "#/properties/maybe/anyOf/0"},
        "cycle": {"$ref": "#/$defs/Node"},
        "self": {"$ref": "#"},
        "lost": {"$ref": "#/$defs/Nowhere"},
        "elsewhere": {"$ref": "https://example.org/zip.json"},
        "nullable": {"type": "integer", "nullable": True},
        "const": {"const": "7"},
        "flag": {"enum": [True, False]},
    },
    "$defs": {
        "Zip": ZIP,
        "Outer": {"$ref": "#/$defs/Zip"},
        "Node": {"anyOf": [{"$ref": "#/$defs/Node"}, {"$ref": "#/$defs/Zip"}]},
    },
    "definitions": {"a/b c": ZIP},
}


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        *((name, "10115", "10115") for name in ("zip", "nested", "maybe", "all", "one", "place", "cycle")),
        ("maybe", "null", None),
        ("lost", "10115", 10115),
        ("elsewhere", "10115", 10115),
        ("self", '{"zip": 1}', {"zip": 1}),
        ("nullable", "null", None),
        ("nullable", "5", 5),
        ("const", "7", "7"),
        ("flag", "true", True),
        ("unknown", "5", 5),
    ],
)
def test_references_are_followed(name: str, value: str, result: Any) -> None:
    found = Properties(ROOT).typed(name, value)
    assert found == result
    assert type(found) is type(result)


def test_properties_are_found_behind_references() -> None:
    root = {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": {"zip": ZIP}}}}
    assert "zip" in Properties(root)
    assert Properties(root).typed("zip", "10115") == "10115"


@pytest.mark.parametrize(
    "schema", [None, True, {}, {"properties": 5}, {"$ref": 7}, {"anyOf": [3, None]}, {"enum": "x"}]
)
def test_schemas_that_say_nothing_leave_the_value_as_it_reads(schema: Any) -> None:
    assert Properties(schema).typed("x", "5") == 5
    assert Properties({"properties": {"x": schema}}).typed("x", "5") == 5


def test_a_calls_values_have_the_types_of_their_references() -> None:
    said = "<tool_call>pay<arg_key>zip</arg_key><arg_value>10115</arg_value></tool_call>"
    assert calls_of(parse_cut(said, "glm", schemas={"pay": ROOT})) == [("pay", {"zip": "10115"})]
    said = "<tool_call>\n<function=pay>\n<parameter=zip>\n10115\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(parse_cut(said, "qwen3-coder", schemas={"pay": ROOT})) == [("pay", {"zip": "10115"})]
