"""Numbers of a schema that no double holds are enforced digit by digit, or refused with their place."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLTokenizer

from moeserve.frontend.dialects.formats import constraint_of, of_calls
from moeserve.frontend.dialects.internal import OutputFormat, StructuralTags, Tag, Tool
from moeserve.frontend.errors import ApiError
from moeserve.frontend.parsers.call_grammars import GRAMMARS, call_grammar
from moeserve.grammars.compiler import compile_grammar, error_in
from moeserve.grammars.tokens import load_tokens
from tests.support.tiny_model import EOS, write_model_dir

N = 2**53 + 1
ID = 2512292042121000001
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}
NODE = {"type": "object", "properties": {"v": {"$ref": "#/$defs/id"}, "n": {"anyOf": [{"$ref": "#/$defs/node"}, {}]}}}
TREE = {"$defs": {"id": {"const": N}, "node": NODE | {"required": ["v"]}}, "$ref": "#/$defs/node"}
OPTIONAL = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 2},
        "id": {"enum": [N, ID]},
        "l": {"type": "array", "items": {"const": N}, "minItems": 2, "maxItems": 3},
    },
    "required": ["id"],
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return load_tokens(write_model_dir(tmp_path_factory.mktemp("model")) / "tokenizer.json", [EOS])


def json_grammar(schema: Any) -> str:
    return constraint_of(OutputFormat("json_schema", schema, "s")).grammar


def accepts(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    matcher, token_ids = compile_grammar(tokens, grammar), list(text.encode())
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"const": N}, [f"{N}"], [f"{N - 1}", f"{N + 1}", f'"{N}"']),
        ({"const": -N}, [f"-{N}"], [f"-{N - 1}", f"{N}"]),
        ({"const": 12345678901234567890}, ["12345678901234567890"], ["12345678901234567000"]),
        ({"const": 10**30 + 1}, [f"{10**30 + 1}"], [f"{10**30}"]),
        ({"const": 1e22}, [f"{10**22}"], [f"{10**22 + 1}"]),
        ({"enum": [N, 1, "a", None]}, [f"{N}", "1", '"a"', "null"], [f"{N - 1}", "2"]),
        ({"type": "integer", "enum": [N, "a", 0.5]}, [f"{N}"], ['"a"', "0.5"]),
        (
            {"const": {"i": N, "l": [1, N]}},
            [f'{{"i":{N},"l":[1,{N}]}}'],
            [f'{{"i":{N - 1},"l":[1,{N}]}}', f'{{"i":{N}}}'],
        ),
        ({"type": ["array", "null"], "items": {"enum": [ID]}}, ["[]", "null", f"[{ID}, {ID}]"], [f"[{ID - 1}]", "1"]),
        ({"items": {"const": N}}, ["1", f"[{N}]", '{"a": 1}'], ["[1]"]),
        ({"anyOf": [{"const": N}, {"type": "boolean"}]}, [f"{N}", "true"], [f"{N - 1}"]),
        (TREE, [f'{{"v":{N}}}', f'{{"v":{N},"n":{{"v":{N},"n":{{"v":{N}}}}}}}'], [f'{{"v":{N - 1}}}', "{}"]),
        ({"$defs": {"x": {"const": N}}, "type": "integer", "maximum": 3}, ["3"], ["4"]),
        ({"type": "integer", "title": "n", "default": N, "examples": [10**400]}, [f"{N}", "1"], ["0.5"]),
    ],
)
def test_constants_keep_their_digits(tokens: LLTokenizer, schema: Any, accepted: list[str], refused: list[str]) -> None:
    grammar = json_grammar(schema)
    assert [text for text in accepted if not accepts(tokens, grammar, text)] == []
    assert [text for text in refused if accepts(tokens, grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"type": "integer", **INT64}, ["0", f"{2**63 - 1}", f"-{2**63}"], [f"{2**63}", f"-{2**63 + 1}", "0.5"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["7", f"{2**64 - 1}"], [f"{2**64}", "-1"]),
        ({"type": "integer", "minimum": N}, [f"{N}", f"{10**30}"], [f"{N - 1}", f"-{N}", "1"]),
        ({"type": "integer", "exclusiveMinimum": N - 1, "exclusiveMaximum": N + 1}, [f"{N}"], [f"{N - 1}", f"{N + 1}"]),
        ({"type": "integer", "maximum": -N}, [f"-{N}", f"-{10**30}"], [f"-{N - 1}", "0", f"{N}"]),
        ({"type": "number", "minimum": 0.5, "maximum": N}, ["0.5", "1.25", f"{N}"], ["0.25", f"{N + 1}"]),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, ["-1.5", f"{10**25}"], ['"a"']),
        ({"type": ["integer", "null"], "maximum": N}, ["null", f"{N}"], [f"{N + 1}"]),
        ({"maximum": N}, ["null", '"a"', "[1]", "{}", f"{N}", "0.5"], [f"{N + 1}"]),
        ({"type": "integer", "multipleOf": 5, "maximum": 2**63}, ["10"], ["11"]),
    ],
)
def test_bounds_are_exact(tokens: LLTokenizer, schema: Any, accepted: list[str], refused: list[str]) -> None:
    test_constants_keep_their_digits(tokens, schema, accepted, refused)


def test_integers_of_any_range_are_those_within_it(tokens: LLTokenizer) -> None:
    source = random.Random(1)
    for _ in range(60):
        low = source.choice([-1, 1]) * source.randrange(10 ** source.randrange(15, 25))
        high = low + source.randrange(10 ** source.randrange(1, 25))
        grammar = json_grammar({"type": "integer", "minimum": low, "maximum": high})
        near = {bound + step for bound in (low, high, 2**53, -(2**53), 0) for step in (-1, 0, 1)}
        for value in {*near, (low + high) // 2, low * 10, high * 10, high // 10}:
            assert accepts(tokens, grammar, str(value)) == (low <= value <= high), (low, high, value)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (f'{{"id":{N}}}', True),
        (f'{{ "a" : "x", "id": {ID} }}', True),
        (f'{{\n  "id": {N},\n  "l": [{N}, {N}]\n}}', True),
        (f'{{"a":"x","id":{ID},"l":[{N},{N},{N}]}}', True),
        ('{"a":"x"}', False),
        ("{}", False),
        (f'{{"id":{N - 1}}}', False),
        (f'{{"id":{N},}}', False),
        (f'{{,"id":{N}}}', False),
        (f'{{"l":[{N},{N}],"id":{N}}}', False),
        (f'{{"id":{N},"l":[{N}]}}', False),
        (f'{{"id":{N},"l":[{N},{N},{N},{N}]}}', False),
        (f'{{"id":{N},"x":1}}', False),
        (f'{{  "id":{N}}}', False),
        (f'{{"id":\n\n{N}}}', False),
    ],
)
def test_objects_around_them_are_those_of_other_schemas(tokens: LLTokenizer, text: str, is_allowed: bool) -> None:
    assert accepts(tokens, json_grammar(OPTIONAL), text) == is_allowed
    small = json.loads(json.dumps(OPTIONAL).replace(str(N), "7").replace(str(ID), "8"))
    assert accepts(tokens, json_grammar(small), text.replace(str(N), "7").replace(str(ID), "8")) == is_allowed


def test_an_object_without_required_properties_may_be_empty(tokens: LLTokenizer) -> None:
    grammar = json_grammar({"type": "object", "properties": {"a": {"const": N}, "b": {"const": N}}})
    for text in ("{}", f'{{"a":{N}}}', f'{{"b":{N}}}', f'{{"a":{N},"b":{N}}}'):
        assert accepts(tokens, grammar, text)
    assert not accepts(tokens, grammar, f'{{,"b":{N}}}')


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"multipleOf": N}, ".multipleOf"),
        ({"type": "integer", "minimum": N, "multipleOf": 3}, ".minimum"),
        ({"allOf": [{"type": "integer"}, {"maximum": N}]}, ".allOf[1].maximum"),
        ({"oneOf": [{"const": N}, {"const": "a"}]}, ".oneOf[0].const"),
        ({"const": N, "maximum": 3}, ".const"),
        ({"type": "string", "enum": [N]}, ".enum"),
        ({"properties": {"a": {"enum": [N]}}, "additionalProperties": True}, ".properties.a.enum"),
        ({"patternProperties": {"^a": {"minimum": N}}}, ".patternProperties.^a.minimum"),
        ({"$defs": {"x": {"not": {"const": N}}}, "$ref": "#/$defs/x"}, ".$defs.x.not.const"),
        ({"$ref": "#/$defs/y", "$defs": {"x": {"const": N}}}, ".$defs.x.const"),
        ({"enum": N}, ".enum"),
        ({"type": 5, "maximum": N}, ".maximum"),
        ({"type": "integer", "minimum": "x", "maximum": N}, ".maximum"),
        ({"type": "array", "items": {"const": N}, "maxItems": "x"}, ".items.const"),
    ],
)
def test_where_they_cannot_be_enforced_they_are_refused_with_their_place(schema: Any, path: str) -> None:
    with pytest.raises(ApiError) as refused:
        json_grammar(schema)
    assert (refused.value.status, refused.value.param) == (400, f"s{path}")
    assert "2**53" in refused.value.message


@pytest.mark.parametrize("family", GRAMMARS)
def test_forced_calls_and_tags_hold_them_too(tokens: LLTokenizer, family: str) -> None:
    tool = Tool("f", parameters=OPTIONAL, strict=True)
    calls = of_calls(call_grammar(family, [tool], forced=True, parallel=True, ids={}), None).grammar
    assert error_in(tokens, calls) is None
    if family == "hermes":
        whole = '<tool_call>\n{{"name": "f", "arguments": {{"a": "x", "id": {}, "l": [{}, {}]}}}}\n</tool_call>'
        assert accepts(tokens, calls, whole.format(ID, N, N))
        assert not accepts(tokens, calls, whole.format(ID - 1, N, N))
    tags = StructuralTags((Tag("<f", "<f>", {"const": N}, "</f>"),), True, True)
    tagged = constraint_of(OutputFormat("structural_tag", tags)).grammar
    assert accepts(tokens, tagged, f"a <f>{N}</f>")
    assert not accepts(tokens, tagged, f"a <f>{N - 1}</f>")
