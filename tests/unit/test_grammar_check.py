"""The check of grammars: errors name their place, and verdicts are kept."""

from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend.dialects.formats import Constraint, constraint_of
from moeserve.frontend.dialects.internal import OutputFormat, StructuralTags, Tag
from moeserve.frontend.errors import ApiError
from moeserve.frontend.prepare.grammar_check import GrammarCheck
from moeserve.frontend.prepare.text_messages import Watch
from moeserve.grammars.schemas import find_error
from moeserve.plan import SamplingParams
from tests.support.tiny_model import EOS, write_model_dir

IN_FORMAT = "response_format.json_schema.schema"
SAMPLING = SamplingParams(8, stop_token_ids=(EOS,))


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model")) / "tokenizer.json"


class Checks:
    """The check of this process, without bounds."""

    def __init__(self, tokenizer_json: Path) -> None:
        self._check = GrammarCheck(tokenizer_json, Watch())

    def __call__(self, constraint: Constraint) -> SamplingParams:
        return self._check.constrain(constraint, SAMPLING, (EOS,))

    def refusal(self, constraint: Constraint) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self(constraint)
        assert caught.value.status == 400
        return caught.value


@pytest.fixture(scope="module")
def check(tokenizer_json: Path) -> Checks:
    return Checks(tokenizer_json)


def schema(value: Any) -> Constraint:
    return constraint_of(OutputFormat("json_schema", value, IN_FORMAT))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"type": "object", "properties": {"age": {"type": "intger"}}}, ".properties.age.type"),
        ({"type": "object", "properties": {"a b": {"minimum": "x", "type": "integer"}}}, ".properties.a b.minimum"),
        ({"anyOf": [{"type": "string"}, {"items": {"pattern": "((", "type": "string"}}]}, ".anyOf[1].items.pattern"),
        ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, ".properties.a.not"),
        ({"type": "object", "properties": 3}, ".properties"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}, ".properties.a.$ref"),
        ({"$defs": {"x": {"enum": 3}}, "items": {"$ref": "#/$defs/x"}}, ".$defs.x.enum"),
        ({"$ref": "https://example.org/schema"}, ".$ref"),
        ({"$defs": {"x": {"pattern": "(?=a)"}}, "items": {"$ref": "#/$defs/x"}}, ".$defs.x.pattern"),
        ({"properties": {"a": {"const": 2**60 + 1}, "b": {"type": "no"}}}, ".properties.b.type"),
        (False, ""),
    ],
)
def test_an_error_names_its_place_in_the_schema(check: Checks, value: Any, path: str) -> None:
    error = check.refusal(schema(value))
    assert error.param == IN_FORMAT + path
    assert f"`{IN_FORMAT}{path}`" in error.message


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (OutputFormat("json_schema", {"pattern": "(?=a)"}), "regex parse error: (?=a) error: look-around, "),
        (OutputFormat("json_schema", {"type": "string", "pattern": "^a$", "maxLength": 0}), "Regex is empty"),
        (OutputFormat("regex", "(?=a)b"), "look-around, including look-ahead and look-behind, is not supported"),
        (OutputFormat("grammar", "start: x"), 'unknown name: "x"'),
        (OutputFormat("structural_tag", StructuralTags((Tag("<", "<a>", {"required": None}, ""),))), "got null"),
    ],
)
def test_a_reason_shows_nothing_of_the_grammar(check: Checks, form: OutputFormat, reason: str) -> None:
    message = check.refusal(constraint_of(form)).message
    assert reason in message
    for part in (" | ", "start:", "%json", "^^", "SearchRegex"):
        assert part not in message


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(("),
        ("regex", "(?=a)b"),
        ("grammar", "start: x"),
        ("grammar", 'root ::= "a" b'),
        ("grammar", "x ::="),
    ],
)
def test_an_invalid_pattern_or_grammar_names_its_field(check: Checks, kind: Any, value: str) -> None:
    error = check.refusal(constraint_of(OutputFormat(kind, value, "guided_x")))
    assert error.param == "guided_x"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_object", None),
        ("regex", r"^\d{3}/[a-z]+$"),
        ("choice", ['say "hi"', "back\\slash", "new\nline", "é"]),
        ("grammar", 'start: "a" b*\nb: /[0-9]/'),
        ("grammar", 'root ::= "a" b\nb ::= [0-9]+'),
    ],
)
def test_a_valid_form_becomes_the_grammar_of_the_request(check: Checks, kind: Any, value: Any) -> None:
    grammar = check(constraint_of(OutputFormat(kind, value))).grammar
    assert grammar is not None
    assert "::=" not in grammar


def test_a_ready_grammar_is_checked_too(check: Checks) -> None:
    ready = '{"grammars": [{"lark_grammar": "start: @a | \\"x\\""}, {"name": "a", "json_schema": {"type": "integer"}}]}'
    assert check(Constraint(ready, "tools")).grammar == ready
    assert check(Constraint('start: "x"', "tools")).grammar == 'start: "x"'
    assert check.refusal(Constraint("start: @a", "tools")).param == "tools"


def test_a_known_verdict_needs_no_tokens(tokenizer_json: Path) -> None:
    check = Checks(tokenizer_json)
    good, bad = schema({"type": "integer"}), schema({"type": "no"})
    first = check(good), check.refusal(bad).message
    assert (check(good), check.refusal(bad).message) == first


def test_a_tokenizer_that_is_gone_is_an_error_of_the_request(tmp_path: Path) -> None:
    assert "cannot be used" in Checks(tmp_path / "tokenizer.json").refusal(schema({"type": "string"})).message


def test_the_search_for_an_error_goes_to_the_smallest_part_that_fails() -> None:
    tried: list[Any] = []

    def fails(part: Any) -> bool:
        tried.append(part)
        return "BAD" in str(part)

    assert find_error({"properties": {"x": {"items": {"type": "BAD"}}}}, fails) == ["properties", "x", "items", "type"]
    assert find_error({"default": {"type": "BAD"}}, fails) == ["default"]
    assert find_error(None, fails) == []
