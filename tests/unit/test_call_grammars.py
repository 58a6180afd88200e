"""Grammars of calls: whatever they let through, the family's parser reads as calls that fit the schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer

from moeserve.frontend.dialects.custom_tools import custom_input, make_custom_tool
from moeserve.frontend.dialects.formats import ANSWER
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, OutputFormat, Tool, ToolChoice
from moeserve.frontend.errors import ApiError
from moeserve.frontend.parsers.call_grammars import GRAMMARS, call_grammar
from moeserve.frontend.parsers.elements import MARK
from moeserve.frontend.parsers.families import CALLS, DEEPSEEK, REASONING
from moeserve.frontend.parsers.feed import CallIds, Parsed
from moeserve.frontend.parsers.message_form import MESSAGES, Start
from moeserve.frontend.parsers.parser import OutputParser
from moeserve.frontend.parsers.rules import Rules, arguments_schema
from moeserve.frontend.parsers.shape import OutputShape
from moeserve.frontend.parsers.tagged import Layout, TaggedCalls
from moeserve.plan import SamplingParams
from tests.support.parsing import parse as parse_text
from tests.support.tiny_model import BOS, byte_tokenizer

TOOLS = (
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    ),
    Tool("send", parameters={"type": "object", "properties": {"to": {"type": "boolean"}}}, strict=True),
)
# Whether the markers are tokens differs between models of a family; harmony's always are.
FORMS = [*((family, special) for family in GRAMMARS for special in (False, True)), ("harmony", True)]
# Not `<|end|>`, which is one of harmony's markers.
_EOS = BOS
_TEXT_TAGS = ("<function", "</function", "<invoke", "</invoke", "<parameter", "</parameter")


def base(family: str) -> str:
    return family.removesuffix("-fenced")


def markers(family: str) -> list[str]:
    shape = CALLS[base(family)]
    found = {*shape.opens, *shape.others, "<think>", "</think>"}
    return sorted(marker for marker in found if not marker.startswith(_TEXT_TAGS))


class Model:
    """A model that says what its grammar allows. With `special` the family's markers are tokens."""

    def __init__(self, family: str, *, special: bool, grammar: str = "", **options: Any) -> None:
        self.tokenizer: Tokenizer = byte_tokenizer()
        texts = markers(family) if special else []
        self.tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
        ids = {text: self.tokenizer.token_to_id(text) for text in texts}
        tokens = llguidance.LLTokenizer(
            self.tokenizer.to_str(), n_vocab=self.tokenizer.get_vocab_size(), eos_token=_EOS
        )
        self.source = grammar or call_grammar(family, options.pop("tools", TOOLS), ids=ids, **options)
        self.matcher = llguidance.LLMatcher(tokens, self.source)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def allows(self, text: str) -> bool:
        """Whether the whole of `text` is an answer."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return bool(self.matcher.try_consume_tokens(token_ids) == len(token_ids) and self.matcher.is_accepting())

    def babble(self, seed: int, most: int = 2000) -> str:
        """An answer drawn at random from the allowed tokens, mostly the first one so that it ends."""
        source = random.Random(seed)
        said: list[int] = []
        while not self.matcher.is_stopped() and len(said) < most:
            allowed = [token for token, bias in enumerate(self.matcher.compute_logit_bias()) if bias]
            ends = [token for token in allowed if token >= _EOS]
            token = source.choice(ends if ends and source.random() < 0.5 else allowed)
            assert self.matcher.consume_token(token)
            if token != _EOS:
                said.append(token)
        return str(self.tokenizer.decode(said, skip_special_tokens=False))


def parse(
    family: str, text: str, reasoning: str = "none", start: Start = "text", tools: Sequence[Tool] = TOOLS
) -> Parsed:
    parser = OutputParser(
        reasoning=REASONING.get(reasoning),
        calls=CALLS[base(family)],
        messages=MESSAGES.get(family),
        start="answer" if start == "text" else start,
        schemas={tool.name: tool.parameters for tool in tools},
        hidden=markers(family),
        new_id=CallIds("", 0),
    )
    first, last = parser.push(text), parser.finish()
    assert not last.calls
    return Parsed(first.reasoning + last.reasoning, first.text + last.text, first.calls)


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "get_weather":
        assert value.keys() == {"city", "days"}
        assert value["city"] in ("Rome", "Paris")
        assert type(value["days"]) is int
        assert 1 <= value["days"] <= 9
    else:
        assert name == "send"
        assert value in ({}, {"to": True}, {"to": False})


@pytest.mark.parametrize(("family", "special"), FORMS)
def test_forced_calls_are_read_back_whole_and_fit_their_schemas(family: str, special: bool) -> None:
    start: Start = "answer" if family == "harmony" else "text"
    for seed in range(6):
        model = Model(family, special=special, forced=True, parallel=seed % 2 == 0, start=start)
        said = model.babble(seed)
        parsed = parse(family, said, "harmony" if family == "harmony" else "none")
        assert parsed.calls, said
        assert parsed.text == "", said
        assert seed % 2 == 0 or len(parsed.calls) == 1
        for call in parsed.calls:
            check_call(call.name, call.arguments)


SAVE = Tool(
    "save",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}},
        "required": ["path", "text"],
    },
)


def written(layout: Layout, name: str, arguments: dict[str, Any]) -> str:
    begin, middle, close = layout.argument
    values = ""
    for key, value in arguments.items():
        is_text = "true" if isinstance(value, str) else "false"
        values += f"{begin}{key}{middle.replace('STRING', is_text)}{value}{close}"
    return f"{layout.region[0]}{layout.call[0]}{name}{layout.call[1]}{values}{layout.call[2]}{layout.region[1]}"


@pytest.mark.parametrize(("family", "special"), [form for form in FORMS if isinstance(CALLS.get(form[0]), TaggedCalls)])
@pytest.mark.parametrize("text", ["", "a", "aCLOSEb", "aCLOSE", "CLOSE\n<b>CLOSE x", "\nCLOSE\n\n", "a</b>\n<function"])
def test_a_forced_text_holds_its_closing_tag_wherever_the_call_does_not_go_on(
    family: str, special: bool, text: str
) -> None:
    shape = CALLS[family]
    assert isinstance(shape, TaggedCalls)
    tag = shape.layout.argument[2].rstrip("\n")
    for more in ({}, {"mode": 7}):
        arguments = {"path": "p", "text": text.replace("CLOSE", tag), **more}
        said = written(shape.layout, "save", arguments)
        assert Model(family, special=special, forced=True, parallel=False, tools=[SAVE]).allows(said)
        parser = OutputParser(
            reasoning=None,
            calls=shape,
            schemas={"save": SAVE.parameters},
            hidden=markers(family),
            new_id=CallIds("", 0),
        )
        first, last = parser.push(said), parser.finish()
        (call,) = first.calls + last.calls
        assert json.loads(call.arguments) == arguments
    ended = written(shape.layout, "save", {"path": "p", "text": "a", "mode": "7", "further": "b"})
    assert not Model(family, special=special, forced=True, parallel=False, tools=[SAVE]).allows(ended)


@pytest.mark.parametrize(("family", "special"), FORMS)
def test_forced_calls_leave_no_way_out(family: str, special: bool) -> None:
    for text in ("No.", "", "{}", '{"name": "other", "arguments": {}}'):
        assert not Model(family, special=special, forced=True, parallel=True).allows(text), text


PAY = Tool(
    "pay",
    parameters={
        "type": "object",
        "properties": {
            "zip": {"$ref": "#/$defs/Zip"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"anyOf": [{"enum": ["g", "kg"]}, {"type": "null"}]},
            "count": {"$ref": "#/$defs/Count"},
        },
        "$defs": {"Zip": {"type": "string", "enum": ["10115"]}, "Count": {"type": "integer", "maximum": 9}},
    },
    strict=True,
)


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("zip", "10115", "10115"),
        ("zip", '"10115"', None),
        ("note", "so <b>", "so <b>"),
        ("note", "", ""),
        ("unit", "kg", "kg"),
        ("unit", "t", None),
        ("count", "7", 7),
        ("count", "10", None),
    ],
)
def test_texts_in_tags_are_held_to_their_schemas_without_quotes(name: str, value: str, result: Any) -> None:
    said = f"<tool_call>\n<function=pay>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    model = Model("qwen3-coder", special=False, tools=(PAY,), forced=True, parallel=False)
    assert model.allows(said) is (result is not None)
    if result is not None:
        (call,) = parse_text(said, "qwen3-coder", schemas={"pay": PAY.parameters}).calls
        assert json.loads(call.arguments) == {name: result}


ORDER = Tool(
    "order",
    parameters={
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 10, "maximum": 19},
            "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
            "note": {"anyOf": [{"enum": ["now", "later"]}, {"type": "null"}]},
            "to": {"type": "object", "properties": {"zip": {"enum": ["00118"]}}, "required": ["zip"]},
            "again": {"$ref": "#"},
        },
        "required": ["id", "to"],
        "$defs": {
            "Item": {"type": "object", "properties": {"sku": {"enum": ["a", "b"]}, "new": {"type": "boolean"}}},
        },
    },
)


@pytest.mark.parametrize("family", ["gemma4", "minimax-m3"])
@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
def test_values_that_nest_are_held_to_their_schemas(family: str, special: bool) -> None:
    said: set[str] = set()
    for seed in range(8):
        model = Model(family, special=special, tools=(ORDER,), forced=True, parallel=False)
        text = model.babble(seed, most=1500)
        if model.matcher.is_stopped():
            (call,) = parse_text(text, family, schemas={"order": ORDER.parameters}, hidden=markers(family)).calls
            jsonschema.validate(json.loads(call.arguments), {**ORDER.parameters, "additionalProperties": False})
            said.add(call.arguments)
    assert len(said) > 2


def test_an_added_token_inside_a_marker_is_named_by_its_id() -> None:
    rules = Rules({"|x|": 7, "</": 8, "\n": 9, "<|x|a>": 10})
    assert rules.text("<|x|b>\n") == '"<" <[7]> "b>\\n"'
    assert rules.text("<|x|a>") == "<[10]>"
    assert (rules.text(""), rules.text("b")) == ("", '"b"')
    assert rules.until("a|x|b") == 'T0 <[7]> "b"'
    assert rules.source("T0") == "start: T0\nT0: /(?s:.*)a/\n"


CALL = '{"name": "send", "arguments": {"to": true}}'


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
def test_text_may_come_before_calls_that_are_not_forced(special: bool) -> None:
    for said, allowed in (
        ("Just text.", True),
        (f"I send.\n<tool_call>\n{CALL}\n</tool_call>", True),
        (f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", True),
        ("I send.\n<tool_call>\nno", False),
        (f"<tool_call>\n{CALL.replace('true', '7')}\n</tool_call>", False),
        (f"<tool_call>\n{CALL}\n</tool_call> and text", False),
    ):
        assert Model("hermes", special=special, forced=False, parallel=True).allows(said) is allowed, said


def test_json_has_the_spacing_that_templates_render() -> None:
    compact = CALL.replace(": ", ":").replace(", ", ",")
    for said, allowed in ((CALL, True), (compact, False), (CALL.replace(" ", "  "), False)):
        model = Model("hermes", special=True, forced=True, parallel=True)
        assert model.allows(f"<tool_call>\n{said}\n</tool_call>") is allowed


def test_one_call_is_the_limit_where_calls_must_not_be_parallel() -> None:
    one = f"<tool_call>\n{CALL}\n</tool_call>"
    assert Model("hermes", special=True, forced=True, parallel=False).allows(one)
    assert not Model("hermes", special=True, forced=True, parallel=False).allows(f"{one}\n{one}")


def test_an_answer_is_calls_or_the_format() -> None:
    source = call_grammar("hermes", TOOLS, forced=False, parallel=True, ids={}, has_format=True)
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    grammar = json.dumps({"grammars": [{"lark_grammar": source}, {"name": ANSWER, "json_schema": schema}]})
    for said, allowed in (
        ('{"answer": 5}', True),
        (f"<tool_call>\n{CALL}\n</tool_call>", True),
        ("text", False),
        ('{"answer": "five"}', False),
    ):
        assert Model("hermes", special=False, grammar=grammar).allows(said) is allowed, said


@pytest.mark.parametrize("special", [False, True], ids=["text", "tokens"])
def test_reasoning_comes_first_where_the_model_reasons(special: bool) -> None:
    calls = f"<tool_call>\n{CALL}\n</tool_call>"
    options = {"forced": True, "parallel": True, "reasoning": REASONING["think"], "special": special}
    for start, said, allowed in (
        ("reasoning", f"hm, </thin\n</think>\n\n{calls}", True),
        ("reasoning", calls, False),
        # The parser would take it for a call that nothing held to its schema.
        ("reasoning", f"hm <tool_call>{CALL}\n</think>\n\n{calls}", False),
        ("answer", f"<think>\nhm\n</think>\n\n{calls}", True),
        ("answer", calls, True),
        ("text", calls, True),
        ("text", f"<think>hm</think>{calls}", False),
    ):
        assert Model("hermes", start=start, **options).allows(said) is allowed, (start, said)


def test_harmony_reasons_then_calls_or_says() -> None:
    call = '<|channel|>commentary to=functions.send <|constrain|>json<|message|>{"to": true}<|call|>'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    said = "<|channel|>final<|message|>Yes."
    for forced, text, allowed in (
        (True, call, True),
        (True, thought + call, True),
        (True, thought + said, False),
        (False, thought + said, True),
        (False, thought + call, True),
    ):
        model = Model("harmony", special=True, forced=forced, parallel=True, start="answer")
        assert model.allows(text) is allowed, text


def test_objects_have_the_properties_that_they_list_and_no_others() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "string"}}}
    schema = arguments_schema(Tool("f", parameters={"properties": {"a": inner, "b": {"type": "object"}}}))
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in schema["properties"]["b"]
    assert arguments_schema(Tool("f")) == {"type": "object"}
    together = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    assert arguments_schema(Tool("f", parameters=together)) == together
    kept = {"type": "object", "properties": {"properties": {"const": {"properties": {}}}}, "additionalProperties": True}
    assert arguments_schema(Tool("f", parameters=kept)) == kept


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "model": "tiny",
        "prompts": [ChatPrompt([{"role": "user", "content": "hi"}])],
        "sampling": SamplingParams(max_tokens=0),
        "max_tokens": None,
        "seed": None,
        "tools": TOOLS,
    }
    return GenerateRequest(**{**fields, **changes})


def test_only_requests_that_need_a_grammar_get_one() -> None:
    shape, thinker = OutputShape("hermes"), OutputShape("hermes", "think")
    loose = (TOOLS[0],)
    form = OutputFormat("json_object")
    assert shape.grammar(request(tools=loose), "", {}) is None
    assert shape.grammar(request(tools=()), "", {}) is None
    assert shape.grammar(request(prompts=["hi"], tools=()), "", {}) is None
    assert shape.grammar(request(tool_choice=ToolChoice("none")), "", {}) is None
    assert shape.grammar(request(tools=(), output_format=form), "", {}) is None
    assert shape.grammar(request(), "", {}) is not None
    assert shape.grammar(request(tools=loose, output_format=form), "", {}) is not None
    assert "</think>" in str(thinker.grammar(request(tools=(), output_format=form), "", {}))
    forced = str(shape.grammar(request(tool_choice=ToolChoice("required", ("send",))), "", {}))
    assert "send" in forced
    assert "get_weather" not in forced
    allowed = str(shape.grammar(request(tools=TOOLS, tool_choice=ToolChoice("auto", ("get_weather",))), "", {}))
    assert "send" not in allowed
    with pytest.raises(ApiError) as caught:
        OutputShape("none").grammar(request(tool_choice=ToolChoice("required")), "", {})
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    "shape", [OutputShape("muse", "muse"), OutputShape("inkling", "inkling"), OutputShape("step3")]
)
def test_a_form_to_which_a_family_cannot_be_held_is_refused_by_its_name(shape: OutputShape) -> None:
    form = OutputFormat("json_object", where="response_format")
    refused: list[tuple[str, dict[str, Any]]] = [
        ("tool_choice", {"tool_choice": ToolChoice("required")}),
        ("tool_choice", {"tool_choice": ToolChoice("auto", ("send",))}),
        ("tools", {}),
        ("response_format", {"output_format": form}),
    ]
    if shape.messages is not None:
        refused.append(("response_format", {"output_format": form, "tools": ()}))
    for where, changes in refused:
        with pytest.raises(ApiError) as caught:
            shape.grammar(request(**changes), "", {})
        assert caught.value.param == where
        assert shape.calls in caught.value.message
    assert shape.grammar(request(tools=(TOOLS[0],)), "", {}) is None


def test_a_tool_that_is_forced_by_its_name_is_called_once() -> None:
    def grammar(choice: ToolChoice, *, parallel: bool = True) -> str | None:
        return OutputShape("hermes").grammar(request(tool_choice=choice, parallel_tool_calls=parallel), "", {})

    named, both = ToolChoice("required", ("send",)), ToolChoice("required", ("send", "get_weather"))
    assert grammar(named) == grammar(named, parallel=False)
    assert grammar(both) != grammar(both, parallel=False)


def custom(definition: str, syntax: str = "lark") -> Tool:
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    return make_custom_tool("apply_patch", None, form, "tools[0]", 64)


PATCH = custom(
    r"""
    start: "*** Begin Patch" LF file+ "*** End Patch" LF?
    file: "*** Add File: " name LF ("+" /(.*)/ LF)+ -> added
        | "*** Delete File: " name LF
        | "*** Update File: " name LF ("@@ " /(.+)/ LF)? line+
    name: /(.+)/
    line: ("+" | "-" | " ") /(.*)/ LF  // of the file
    %import common.LF
    """
)
PATCHES = {
    '*** Begin Patch\n*** Add File: a "b"\n+\\n\té\n+\n*** End Patch': True,
    "*** Begin Patch\n*** Delete File: x\n*** Update File: y\n@@ f()\n-</p>\n+<q>\n z\n*** End Patch\n": True,
    "*** Begin Patch\n*** Add File: a\nno plus\n*** End Patch": False,
    "*** Begin Patch\n*** End Patch": False,
    "*** Begin Patch\n*** Delete File: x\n": False,
    "Here it is: *** Begin Patch\n*** Delete File: x\n*** End Patch": False,
}


def one_call(family: str, text: str) -> str:
    """A call of `apply_patch` as a model of the family writes it."""
    call = json.dumps({"name": "apply_patch", "arguments": {"input": text}}, ensure_ascii=False)
    inner = json.dumps({"input": text}, ensure_ascii=False)
    return {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "qwen3-coder": f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        "mistral": f"[TOOL_CALLS]apply_patch[ARGS]{inner}",
        "deepseek": f"{DEEPSEEK.section_open}{DEEPSEEK.call_open}apply_patch{DEEPSEEK.separator}"
        f"{inner}{DEEPSEEK.call_end}{DEEPSEEK.section_end}",
        "glm": f"<tool_call>apply_patch\n<arg_key>input</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.apply_patch:0<|tool_call_argument_begin|>"
        f"{inner}<|tool_call_end|><|tool_calls_section_end|>",
        "gemma4": f'<|tool_call>call:apply_patch{{input:<|"|>{text}<|"|>}}<tool_call|>',
        "minimax-m3": f'{MARK}<tool_call>\n{MARK}<invoke name="apply_patch">{MARK}<input>{text}{MARK}</input>'
        f"{MARK}</invoke>\n{MARK}</tool_call>",
        "lfm2": f"<|tool_call_start|>[apply_patch(input={json.dumps(text, ensure_ascii=False)})]<|tool_call_end|>",
        "minimax": f'<minimax:tool_call>\n<invoke name="apply_patch">\n<parameter name="input">{text}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "harmony": f"<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{inner}<|call|>",
    }[family]


@pytest.mark.parametrize("text", PATCHES)
@pytest.mark.parametrize(
    "family",
    [
        "hermes",
        "qwen3-coder",
        "mistral",
        "deepseek",
        "glm",
        "kimi",
        "minimax",
        "harmony",
        "gemma4",
        "minimax-m3",
        "lfm2",
    ],
)
@pytest.mark.parametrize("forced", [True, False])
def test_a_custom_tools_text_is_held_to_its_grammar_in_every_family(family: str, forced: bool, text: str) -> None:
    start: Start = "answer" if family == "harmony" else "text"
    said = one_call(family, text)
    for special in (True,) if family in ("harmony", "mistral") else (False, True):
        model = Model(family, special=special, tools=[PATCH], forced=forced, parallel=False, start=start)
        assert model.allows(said) is PATCHES[text]
    parsed = parse(family, said, "harmony" if family == "harmony" else "none", tools=[PATCH])
    assert [custom_input(call.arguments) for call in parsed.calls] == [text]


@pytest.mark.parametrize(("family", "special"), FORMS)
@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("lark", 'start: (/[^a-y]/ LF){1,2} "</parameter>\\n\\"\\\\"i?\nLF: "\\n"'),
        ("regex", r'^[<>="/\\\n]{1,4}|</(p\x22)?arg_value>\s$'),
    ],
)
def test_what_a_custom_tools_grammar_lets_through_is_read_as_a_text_of_it(
    family: str, special: bool, syntax: str, definition: str
) -> None:
    tool = custom(definition, syntax)
    start: Start = "answer" if family == "harmony" else "text"
    assert tool.input_form is not None
    allowed = re.compile(tool.input_form.pattern.replace("{a}", "0a"), re.ASCII)
    for seed in range(6):
        model = Model(family, special=special, tools=[tool], forced=True, parallel=seed % 2 == 0, start=start)
        said = model.babble(seed)
        parsed = parse(family, said, "harmony" if family == "harmony" else "none", tools=[tool])
        assert parsed.calls, said
        assert parsed.text == "", said
        for call in parsed.calls:
            assert call.name == "apply_patch"
            assert allowed.fullmatch(custom_input(call.arguments)), said
