"""The fields that ask for a form of the answer, and the grammars that they become."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from moeserve.frontend import limits
from moeserve.frontend.dialects import chat, completions
from moeserve.frontend.dialects.formats import ascii_classes, constrain, constraint_of, of_calls, prepare_schema
from moeserve.frontend.dialects.internal import ModelFacts, OutputFormat, StructuralTags, Tag
from moeserve.frontend.errors import ApiError
from moeserve.plan import SamplingParams

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
IN_FORMAT = "response_format.json_schema.schema"


def read(dialect: str, **fields: Any) -> OutputFormat | None:
    if dialect == "chat":
        base = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        return chat.parse(json.dumps({**base, **fields}).encode(), FACTS).output_format
    body = {"model": "tiny", "prompt": "hi", **fields}
    return completions.parse(json.dumps(body).encode(), FACTS).output_format


@pytest.mark.parametrize("dialect", ["chat", "completions"])
@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": {}}, None),
        ({"response_format": {"type": "json_object"}}, OutputFormat("json_object", None, "response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": AGE}}},
            OutputFormat("json_schema", AGE, IN_FORMAT),
        ),
        (
            {"response_format": {"type": "json_object", "schema": AGE}},
            OutputFormat("json_schema", AGE, "response_format.schema"),
        ),
        ({"guided_json": AGE}, OutputFormat("json_schema", AGE, "guided_json")),
        ({"guided_json": json.dumps(AGE)}, OutputFormat("json_schema", AGE, "guided_json")),
        ({"guided_regex": "[a-z]+"}, OutputFormat("regex", "[a-z]+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, OutputFormat("choice", ["a", "b"], "guided_choice")),
        ({"guided_grammar": 'start: "a"'}, OutputFormat("grammar", 'start: "a"', "guided_grammar")),
        ({"json_schema": json.dumps(AGE)}, OutputFormat("json_schema", AGE, "json_schema")),
        ({"regex": "a+"}, OutputFormat("regex", "a+", "regex")),
        ({"ebnf": 'root ::= "a"'}, OutputFormat("grammar", 'root ::= "a"', "ebnf")),
        (
            {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}, "ebnf": 'start: "a"'},
            OutputFormat("grammar", 'start: "a"', "structured_outputs.grammar"),
        ),
        (
            {"json_schema": json.dumps(AGE), "guided_json": AGE},
            OutputFormat("json_schema", AGE, "guided_json"),
        ),
        ({"structured_outputs": {"json": AGE}}, OutputFormat("json_schema", AGE, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a+"}}, OutputFormat("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, OutputFormat("choice", ["a"], "structured_outputs.choice")),
        (
            {"structured_outputs": {"json_object": True}},
            OutputFormat("json_object", None, "structured_outputs.json_object"),
        ),
    ],
)
def test_both_dialects_read_every_spelling(dialect: str, fields: dict[str, Any], form: OutputFormat | None) -> None:
    assert read(dialect, **fields) == form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.structures"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{"begin": "<a>"}], "triggers": ["<b"]}},
            "response_format.structures[0].begin",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "tag"}}}, "response_format.format.type"),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "triggered_tags",
                        "triggers": ["<"],
                        "tags": [{"begin": "<a>", "content": {"type": "any_text"}}],
                    },
                }
            },
            "response_format.format.tags.content.type",
        ),
        ({"json_schema": "{"}, "json_schema"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"regex": "a", "guided_regex": "b"}, "regex"),
        ({"response_format": {}}, None),
        ({"response_format": {"type": "json_schema"}}, IN_FORMAT),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, IN_FORMAT),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}}, IN_FORMAT),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, None),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": " "}, "guided_regex"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, None),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read("chat", **fields)
    assert caught.value.status == 400
    if param is not None:
        assert caught.value.param == param
        assert param in caught.value.message
    else:
        assert next(iter(fields)) in caught.value.message


def refusal(form: OutputFormat) -> ApiError:
    with pytest.raises(ApiError) as caught:
        constraint_of(form)
    assert (caught.value.status, caught.value.param) == (400, form.where)
    return caught.value


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_both_forms_of_structural_tags_are_read() -> None:
    older = {"structures": [{"begin": "<f=a>", "schema": AGE, "end": "</f>"}], "triggers": ["<g", "<f="]}
    tag = {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": AGE}, "end": "</f>"}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag], "stop_after_first": True}}
    tags = (Tag("<f=", "<f=a>", AGE, "</f>"),)
    for fields, flags in ((older, {}), (newer, {"stop_after_first": True})):
        form = read("chat", response_format={"type": "structural_tag", **fields})
        assert form == OutputFormat("structural_tag", StructuralTags(tags, **flags), "response_format")


def test_classes_of_characters_mean_ascii_in_patterns_of_grammars_and_nowhere_else() -> None:
    lark = 'start: A "\\d // /" B // all \\d /\nA: /\\d+\\S/i\nB: /[\\w\\/]\\\\d/ | "/"'
    assert ascii_classes(lark) == (
        'start: A "\\d // /" B // all \\d /\nA: /[0-9]+[^ \\t\\n\\r\\f\\v]/i\nB: /[[0-9a-zA-Z_]\\/]\\\\d/ | "/"'
    )


def test_limits_hold_before_anything_is_compiled() -> None:
    long = "x" * (limits.MAX_GRAMMAR_BYTES + 1)
    for form in (
        OutputFormat("json_schema", {"description": long}, "a.b"),
        OutputFormat("regex", long, "r"),
        OutputFormat("grammar", long, "g"),
        OutputFormat("choice", [long], "c"),
    ):
        assert str(limits.MAX_GRAMMAR_BYTES) in refusal(form).message
    assert "levels" in refusal(OutputFormat("json_schema", nested(limits.MAX_SCHEMA_DEPTH + 1), "s")).message
    constraint_of(OutputFormat("json_schema", nested(limits.MAX_SCHEMA_DEPTH), "s"))
    refusal(OutputFormat("choice", [], "c"))
    refusal(OutputFormat("choice", ["x"] * (limits.MAX_FORMAT_CHOICES + 1), "c"))
    refusal(OutputFormat("json_schema", ["no schema"], "s"))


def test_keywords_that_forbid_nothing_are_left_out_and_the_rest_stays() -> None:
    schema = {
        "type": "object",
        "x-guidance": {"lenient": True},
        "properties": {
            "format": {"type": "integer", "format": "int64"},
            "when": {"type": "string", "format": "date"},
            "tags": {"type": "array", "uniqueItems": False, "items": {"type": "string", "format": "password"}},
            "map": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"format": "x"}},
            "constant": {"const": {"format": "int64"}},
        },
        "anyOf": [{"uniqueItems": True}, {"propertyNames": {"maxLength": 3}}],
    }
    before = json.dumps(schema)
    prepared = prepare_schema(schema, "s")
    assert json.dumps(schema) == before
    assert prepared.pop("x-guidance")["lenient"] is False
    assert prepared == {
        "type": "object",
        "properties": {
            "format": {"type": "integer"},
            "when": {"type": "string", "format": "date"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "map": {"type": "object", "additionalProperties": {}},
            "constant": {"const": {"format": "int64"}},
        },
        "anyOf": [{"uniqueItems": True}, {"propertyNames": {"maxLength": 3}}],
    }


def test_a_form_is_part_of_a_larger_grammar() -> None:
    def part(form: OutputFormat) -> dict[str, Any]:
        calls, answer = json.loads(of_calls("start: @answer", form).grammar)["grammars"]
        assert calls == {"lark_grammar": "start: @answer"}
        assert answer.pop("name") == "answer"
        return answer

    assert part(OutputFormat("choice", ['a"b', "é"])) == {"lark_grammar": 'start: "a\\"b" | "é"'}
    assert part(OutputFormat("json_object"))["json_schema"]["type"] == "object"
    assert part(OutputFormat("regex", "a/b")) == {"lark_grammar": "start: /a\\/b/"}


def test_gbnf_is_turned_into_the_last_part_of_its_grammar() -> None:
    form = OutputFormat("grammar", 'root ::= "a"', "ebnf")
    for constraint in (constraint_of(form), of_calls("start: @answer", form)):
        assert (constraint.bnf, constraint.where) == ('root ::= "a"', "ebnf")
        before = json.loads(constraint.grammar)["grammars"]
        after = json.loads(constraint.with_lark('start: "a"'))["grammars"]
        assert after == [*before[:-1], {**before[-1], "lark_grammar": 'start: "a"'}]


def test_eos_ends_an_answer_with_a_grammar_also_where_the_client_ignores_it() -> None:
    plain = constrain(SamplingParams(8, stop_token_ids=(259, 7)), "g", (259,))
    assert (plain.grammar, plain.stop_token_ids, plain.logit_bias) == ("g", (259, 7), None)
    ignoring = constrain(SamplingParams(8, stop_token_ids=(7,), logit_bias={3: 1.0, 259: 9.0}), "g", (259,))
    assert ignoring.stop_token_ids == (259, 7)
    assert ignoring.logit_bias is not None
    assert ignoring.logit_bias[3] == 1.0
    assert ignoring.logit_bias[259] < -1000


def prepared(schema: Any) -> Any:
    """Return a schema as grammars take it, without the options for its layout."""
    return {word: value for word, value in prepare_schema(schema, "guided_json").items() if word != "x-guidance"}


def test_objects_of_a_format_have_the_properties_that_they_list_and_no_others() -> None:
    listed = prepared({"type": "object", "properties": {"a": AGE}, "required": ["a"]})
    assert listed["additionalProperties"] is False
    assert listed["properties"]["a"]["additionalProperties"] is False
    either = prepared({"anyOf": [AGE, {"type": "null"}], "$defs": {"x": AGE}, "items": AGE})
    assert [either["anyOf"][0], either["$defs"]["x"], either["items"]] == 3 * [{**AGE, "additionalProperties": False}]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "minProperties": 2},
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/b", "$defs": {"b": {"properties": {"b": {}}}}},
        {"required": ["a", "b"], "anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"items": {"oneOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}}]}},
        {"type": "object", "not": {"properties": {"a": {"const": 1}}}},
    ],
)
def test_an_object_that_may_have_others_or_is_described_in_several_places_stays_open(schema: Any) -> None:
    assert prepared(schema) == schema


_PARTS: list[dict[str, Any]] = [
    {},
    {"properties": {"a": {}}},
    {"properties": {"b": {}}},
    {"properties": {"a": {}}, "required": ["a"]},
    {"properties": {"a": {}}, "required": ["a", "b"]},
    {"properties": {"a": {}}, "minProperties": 2},
    {"properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
    {"properties": {"a": {"properties": {"b": {}}}}},
    {"$ref": "#/$defs/d"},
]
_DEFINED = {"$defs": {"d": {"properties": {"b": {}}, "required": ["b"]}}}
_OBJECTS: list[Any] = [{}, {"a": 0}, {"b": 0}, {"a": True}, {"a": 0, "b": 0}, {"a": {"a": 0, "b": 0}}, {"a": {"b": 0}}]


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_whatever_obeys_the_enforced_schema_obeys_the_clients(word: str) -> None:
    for one, other in itertools.product(_PARTS, _PARTS):
        for schema in ({word: [one, other]}, {**one, word: [other]}, {"properties": {"a": one, "b": other}}):
            asked = jsonschema.Draft202012Validator({**schema, **_DEFINED})
            enforced = jsonschema.Draft202012Validator(prepared({**schema, **_DEFINED}))
            allowed = [value for value in _OBJECTS if enforced.is_valid(value)]
            assert all(map(asked.is_valid, allowed)), schema
            assert allowed or not any(map(asked.is_valid, _OBJECTS)), schema


def test_a_schema_is_refused_from_so_many_levels_on() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = {"const": value}
    assert refusal(OutputFormat("json_schema", value, "guided_json")).param == "guided_json"
