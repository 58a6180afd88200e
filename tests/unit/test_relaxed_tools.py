"""Words of a tool's schema that cannot be enforced: without `strict` they are left out, with it they are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.errors import ApiError
from moeserve.frontend.parsers.shape import OutputShape
from moeserve.frontend.prepare import grammar_check
from moeserve.frontend.prepare.prepare import Preparer, make_programs
from moeserve.frontend.prepare.templates import load_chat_template
from moeserve.frontend.prepare.text_messages import Ask, Kind, Prepared, Watch, pack_reply, unpack_reply
from moeserve.frontend.text import TextTokenizer
from moeserve.grammars.compiler import compile_grammar
from moeserve.grammars.schemas import without
from moeserve.grammars.tokens import load_tokens
from tests.support.tiny_model import EOS, write_model_dir

FACTS = ModelFacts(("tiny",), 100_000, 300, (EOS,), {}, 20)
EMAIL = "^(?!\\.)(?!.*\\.\\.)([a-z0-9_'+\\-\\.]*)[a-z0-9_+-]@([a-z0-9][a-z0-9\\-]*\\.)+[a-z]{2,}$"  # of zod 4
SAID = [{"role": "user", "content": "hi"}]


class Server:
    """The preparation of bodies of a model whose calls are in hermes' form."""

    def __init__(self, model: Path, shape: OutputShape) -> None:
        tokenizer, watch = TextTokenizer.from_file(model / "tokenizer.json"), Watch()
        programs = make_programs(model, tokenizer, load_chat_template(model), watch)
        self._preparer = Preparer(tokenizer, shape, watch, programs)
        self._tokens: LLTokenizer = load_tokens(model / "tokenizer.json", [EOS])

    def reply(self, *tools: dict[str, Any], kind: Kind = "chat", **fields: Any) -> Prepared | ApiError:
        listed = [{"type": "function", "function": tool} for tool in tools] if kind == "chat" else list(tools)
        body = {"model": "tiny", "messages": SAID, "tools": listed, **fields}
        reply = unpack_reply(pack_reply(self._preparer.prepare(Ask(kind, FACTS), json.dumps(body).encode())))
        assert isinstance(reply, Prepared | ApiError)
        return reply

    def prepared(self, *tools: dict[str, Any], **fields: Any) -> Prepared:
        reply = self.reply(*tools, **{"tool_choice": "required", **fields})
        assert isinstance(reply, Prepared), reply
        return reply

    def error(self, *tools: dict[str, Any], **fields: Any) -> ApiError:
        reply = self.reply(*tools, **{"tool_choice": "required", **fields})
        assert isinstance(reply, ApiError)
        assert reply.status == 400
        assert " | " not in reply.message
        assert "start:" not in reply.message
        return reply

    def allows(self, prepared: Prepared, name: str, arguments: Any) -> bool:
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        assert prepared.request.sampling.grammar is not None
        matcher = compile_grammar(self._tokens, prepared.request.sampling.grammar)
        token_ids = list(call.encode())
        return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(write_model_dir(tmp_path / "model"), OutputShape("hermes"))


def tool(schema: Any, name: str = "send", **more: Any) -> dict[str, Any]:
    return {"name": name, "parameters": schema, **more}


def with_age(**properties: Any) -> dict[str, Any]:
    """A schema whose other properties are to stay enforced."""
    return {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 9}, **properties},
        "required": ["age"],
    }


@pytest.mark.parametrize(
    ("schema", "paths", "arguments"),
    [
        (
            with_age(to={"type": "string", "pattern": EMAIL, "maxLength": 3}),
            ("parameters.properties.to.pattern",),
            {"to": "a"},
        ),
        (with_age(to={"type": "string", "pattern": "(a)\\1"}), ("parameters.properties.to.pattern",), {"to": "b"}),
        (with_age(to={"type": "object", "required": None}), ("parameters.properties.to.required",), {"to": {}}),
        (with_age(required=["age"]), ("parameters.properties.required",), {"required": 1}),
        (with_age(to={"$ref": "https://example.org/s"}), ("parameters.properties.to.$ref",), {"to": 1}),
        (with_age(to={"type": "text"}), ("parameters.properties.to.type",), {"to": 1}),
        (
            with_age(to={"anyOf": [{"type": "null"}, {"pattern": "(?=a)"}]}),
            ("parameters.properties.to.anyOf[1].pattern",),
            {"to": "b"},
        ),
        (with_age(to={"enum": [2**60 + 1], "maximum": 3}), ("parameters.properties.to.enum",), {"to": 1}),
        (
            with_age(a={"pattern": "(?=a)", "type": "string"}, b={"required": None, "type": "object"}),
            ("parameters.properties.b.required", "parameters.properties.a.pattern"),
            {"a": "x", "b": {}},
        ),
        (
            {**with_age(to={"$ref": "#/$defs/d"}), "$defs": {"d": {"type": "string", "pattern": "(?<!a)b"}}},
            ("parameters.$defs.d.pattern",),
            {"to": "x"},
        ),
    ],
)
def test_a_word_at_fault_is_left_out_and_the_rest_of_the_schema_holds(
    server: Server, schema: Any, paths: tuple[str, ...], arguments: dict[str, Any]
) -> None:
    other = tool({"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"]}, "other")
    prepared = server.prepared(other, tool(schema))
    assert [(one.tool, one.paths) for one in prepared.relaxed] == [("send", paths)]
    assert server.allows(prepared, "send", {"age": 9, **arguments})
    assert not server.allows(prepared, "send", {"age": 10, **arguments})
    assert not server.allows(prepared, "send", {"age": 9, **arguments, "further": 1})
    assert (server.allows(prepared, "other", {"n": 1}), server.allows(prepared, "other", {"n": 2})) == (True, False)
    # The parser of the answer gets the schema as the client sent it.
    assert prepared.request.tools[1].parameters == schema
    strict = server.error(other, tool(schema, strict=True))
    assert strict.param == "tools"
    assert "`send`" in strict.message
    assert f"`{paths[0]}`" in strict.message


def test_a_schema_that_lost_words_is_told_once(server: Server) -> None:
    faulty = tool(with_age(to={"type": "string", "pattern": EMAIL}))
    first, second = server.prepared(faulty), server.prepared(faulty)
    assert (len(first.relaxed), second.relaxed) == (1, ())
    assert first.request.sampling == second.request.sampling
    assert len(server.prepared(faulty | {"name": "another"}).relaxed) == 0


def test_every_dialect_takes_any_tool_of_several(server: Server) -> None:
    schema = with_age(to={"type": "string", "pattern": EMAIL})
    for choice in (
        "required",
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "send"}}]},
        },
    ):
        assert server.allows(server.prepared(tool(schema), tool_choice=choice), "send", {"age": 1})
    anthropic = {"name": "send", "input_schema": schema}
    prepared = server.prepared(anthropic, kind="messages", tool_choice={"type": "any"}, max_tokens=9)
    assert server.allows(prepared, "send", {"age": 1})


def test_a_strict_tool_beside_others_is_held_and_they_lose_words(server: Server) -> None:
    strict = tool(with_age(), "strict", strict=True)
    prepared = server.prepared(tool(with_age(to={"pattern": "(?=a)"})), strict, tool_choice="auto")
    assert [one.tool for one in prepared.relaxed] == ["send"]
    assert not server.allows(prepared, "strict", {"age": 10})


def test_a_fault_of_the_answers_form_is_named_there_also_beside_tools(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"pattern": "(?=a)"}}}}}
    faulty = tool(with_age(to={"pattern": "(?=a)"}))
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "none"}):
        error = server.error(faulty, response_format=form, **fields)
        assert error.param == "response_format.json_schema.schema.properties.a.pattern"
        assert "look-around" in error.message
    sound = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    assert len(server.prepared(faulty, response_format=sound, tool_choice="auto").relaxed) == 1


def test_a_fault_behind_a_thought_is_named_in_the_form(tmp_path: Path) -> None:
    server = Server(write_model_dir(tmp_path / "model"), OutputShape("hermes", "think"))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "intger"}}}
    error = server.error(response_format=form, tool_choice="none")
    assert error.param == "response_format.json_schema.schema.type"


@pytest.mark.parametrize("bound", ["_SECONDS_TO_LOCATE", "_SECONDS_TO_RELAX"])
def test_faults_that_take_too_long_to_find_cost_the_schema_and_not_the_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(grammar_check, bound, -1.0)
    faulty = tool(with_age(to={"pattern": "(?=a)"}))
    prepared = server.prepared(faulty)
    assert [one.paths for one in prepared.relaxed] == [("parameters",)]
    assert server.allows(prepared, "send", {"any": [1]})
    assert "look-around" in server.error(faulty | {"strict": True}).message


@pytest.mark.parametrize("family", ["qwen3-coder", "glm", "mistral", "kimi"])
def test_other_families_lose_the_same_words(tmp_path: Path, family: str) -> None:
    server = Server(write_model_dir(tmp_path / "model"), OutputShape(family))
    prepared = server.prepared(tool(with_age(to={"type": "object", "required": None})))
    assert [one.paths for one in prepared.relaxed] == [("parameters.properties.to.required",)]


def test_the_word_or_the_schema_at_a_path_goes() -> None:
    schema = {"a": 1, "properties": {"p": {"items": {"b": 2, "c": 3}}}, "anyOf": [{"d": 4}, 5]}
    assert without(schema, ("a",)) == {key: schema[key] for key in ("properties", "anyOf")}
    assert without(schema, ("properties", "p", "items", "b"))["properties"] == {"p": {"items": {"c": 3}}}
    assert without(schema, ("properties", "p"))["properties"] == {"p": {}}
    assert without(schema, ("anyOf", 1))["anyOf"] == [{"d": 4}, {}]
    assert without(schema, ("anyOf", 0, "d"))["anyOf"] == [{}, 5]
    assert without(schema, ("other",)) == without(schema, ()) == without(False, ("a",)) == {}
    assert schema["properties"] == {"p": {"items": {"b": 2, "c": 3}}}


def custom(syntax: str, definition: str) -> dict[str, Any]:
    return {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }


def of_responses(server: Server, *tools: dict[str, Any], **fields: Any) -> Prepared | ApiError:
    return server.reply(*tools, kind="responses", messages=None, input="hi", **fields)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "custom", "name": "patch"}])
def test_a_custom_tools_grammar_holds_whether_a_call_is_forced_or_free(server: Server, choice: Any) -> None:
    tools = custom("lark", 'start: "+" /.*/ LF\n%import common.LF'), {"type": "function", **tool({"type": "object"})}
    prepared = of_responses(server, *tools, tool_choice=choice)
    assert isinstance(prepared, Prepared)
    assert server.allows(prepared, "patch", {"input": '+"a"\n'})
    assert not server.allows(prepared, "patch", {"input": "-a\n"})
    assert not server.allows(prepared, "patch", {"input": "+a\n+b\n"})


@pytest.mark.parametrize(
    ("syntax", "definition", "reason"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: /[/", "unclosed character class"),
        ("lark", "start: start", "names itself"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_custom_tools_grammar_that_cannot_be_held_is_refused_with_its_field_and_the_reason(
    server: Server, syntax: str, definition: str, reason: str, choice: str
) -> None:
    error = of_responses(server, custom("regex", "x"), {**custom(syntax, definition), "name": "b"}, tool_choice=choice)
    assert isinstance(error, ApiError)
    assert (error.status, error.param) == (400, "tools[1].format.definition")
    assert reason in error.message
    assert "^(?:" not in error.message
    assert "start: /" not in error.message
