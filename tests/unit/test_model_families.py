"""Families of models beyond the common forms: their calls, their reasoning, and how they are found."""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

from typing import Any

import pytest

from moeserve.frontend.parsers.elements import MARK
from moeserve.frontend.parsers.families import calls_of, reasoning_of
from moeserve.frontend.parsers.feed import Parsed
from moeserve.frontend.parsers.message_form import MESSAGES, Start
from moeserve.frontend.parsers.shape import choose_shape
from tests.support.model_answers import ANSWERS
from tests.support.parsing import Call, parse_cut
from tests.support.parsing import calls_of as told

SCHEMAS: dict[str, Any] = {
    "now": {},
    "add": {"properties": {"n": {"type": "integer"}}},
    "find": {"properties": {"q": {"type": "string"}, "max": {"type": "integer"}, "opts": {"type": "object"}}},
    "put": {"properties": {"tags": {"type": "array"}, "o": {"type": "object"}}},
    "buy": {
        "properties": {
            "id": {"type": "integer"},
            "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
            "to": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"$ref": "#/$defs/Zip"}}},
            "notes": {"type": "array", "items": {"type": "string"}},
        },
        "$defs": {
            "Item": {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}},
            "Zip": {"type": "string"},
        },
    },
}
NOW: list[Call] = [("now", {})]


def m3(text: str) -> str:
    return text.replace("P<", f"{MARK}<")


def dsml(text: str) -> str:
    return text.replace("D", "｜DSML｜")


CALLS: list[tuple[str, str, str, list[Call]]] = [
    # DeepSeek: an attribute says what is text where the schema leaves it open.
    ("deepseek-v3.2", dsml('<Dfunction_calls>\n<Dinvoke name="now">\n</Dinvoke>\n</Dfunction_calls>'), "", NOW),
    (
        "deepseek-v4",
        dsml(
            'Moment.\n\n<Dtool_calls>\n<Dinvoke name="add">\n<Dparameter name="n" string="false">7</Dparameter>\n'
            "</Dinvoke>\n</Dtool_calls>"
        ),
        "Moment.",
        [("add", {"n": 7})],
    ),
    (
        "deepseek-v4",
        dsml(
            '<Dfunction_calls>\n<Dinvoke name="now">\n<Dparameter name="id" string="true">12</Dparameter>\n'
            '<Dparameter name="x" string="false">{"a": 1}</Dparameter>\n</Dinvoke>\n</Dfunction_calls>'
        ),
        "",
        [("now", {"id": "12", "x": {"a": 1}})],
    ),
    (
        "deepseek-v3.2",
        dsml('<Dinvoke name="find">\n<Dparameter name="q" string="true"> a\n</Dparameter>\n</Dinvoke>\n</Dtool_calls>'),
        "",
        [("find", {"q": " a\n"})],
    ),
    ("deepseek-v4.1", dsml('<D calls>\n<D invoke name="now">\n</D invoke>\n</D calls>'), "", NOW),
    # Gemma.
    ("gemma4", "<|tool_call>call:now{}<tool_call|>", "", NOW),
    (
        "gemma4",
        '<|tool_call>call:find{q:<|"|>a, {b}<|"|>,max:3}<tool_call|>',
        "",
        [("find", {"q": "a, {b}", "max": 3})],
    ),
    (
        "gemma4",
        'Ok.<|tool_call>call:put{tags:[<|"|>x\n"<|"|>,null],o:{<|"|>on<|"|>:true,n:-1.5}}<tool_call|>',
        "Ok.",
        [("put", {"tags": ['x\n"', None], "o": {"on": True, "n": -1.5}})],
    ),
    ("gemma4", "<|tool_call>:find{q:bare word}<tool_call|> so", "so", [("find", {"q": "bare word"})]),
    # MiniMax M3.
    ("minimax-m3", m3('P<tool_call>\nP<invoke name="now">P</invoke>\nP</tool_call>'), "", NOW),
    ("minimax-m3", m3('P<invoke name="buy">P<id>5P</id>P</invoke>'), "", [("buy", {"id": 5})]),
    (
        "minimax-m3",
        m3(
            'P<tool_call>\nP<invoke name="buy">P<items>P<item>P<sku>aP</sku>P<count>2P</count>P</item>P</items>'
            "P<to>P<city>RomeP</city>P<zip>00118P</zip>P</to>P<notes>P</notes>P</invoke>P</tool_call>"
        ),
        "",
        [("buy", {"items": [{"sku": "a", "count": 2}], "to": {"city": "Rome", "zip": "00118"}, "notes": []})],
    ),
    (
        "minimax-m3",
        m3('P<invoke name="now">P<a>P<b>1P</b>P<b>2P</b>P</a>P<c>P<item>x</c>P</item>P</c>P</invoke>P</tool_call>'),
        "",
        [("now", {"a": {"b": [1, 2]}, "c": ["x</c>"]})],
    ),
    # Tags of other models.
    ("hy", "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", "", NOW),
    (
        "hy",
        "<tool_calls><tool_call>add<tool_sep><arg_key>n</arg_key><arg_value>4</arg_value></tool_call></tool_calls>",
        "",
        [("add", {"n": 4})],
    ),
    ("longcat", '<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>', "", NOW),
    (
        "longcat",
        'Ok.\n<longcat_tool_call>{"name": "now"}</longcat_tool_call>\n<longcat_tool_call>now</longcat_tool_call>',
        "Ok.",
        NOW * 2,
    ),
    ("hunyuan", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', "", NOW),
    ("dots", '<dots_function_call><invoke name="now"></invoke></dots_function_call>', "", NOW),
    (
        "dots",
        '<dots_function_call>\n{"name": "add", "arguments": {"n": 3}}\n</dots_function_call>so',
        "so",
        [("add", {"n": 3})],
    ),
    ("solar", "<|tool_call:start|>now\n<|tool_call:end|>", "", NOW),
    (
        "solar",
        "<|tool_call:start|>add\n<|tool_arg:start|>n<|tool_arg:value|>4<|tool_arg:end|>\n"
        "<|tool_arg:start|>n<|tool_arg:value|>5<|tool_arg:end|>\n<|tool_call:start|>find\n"
        "<|tool_arg:start|>q<|tool_arg:value|>x<|tool_arg:start|>max<|tool_arg:value|>2<|tool_call:end|>",
        "",
        [("add", {"n": 4}), ("find", {"q": "x", "max": 2})],
    ),
    (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
        "",
        NOW,
    ),
    ("k2-horizon", "<ifm|tool_calls><ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>", "", NOW),
    (
        "kimi-k3",
        '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|>'
        '<|open|>argument key="a&quot;&amp;" type="number"<|sep|>4<|close|>argument<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>4<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        "",
        [("now", {'a"&': 4, "s": "4"})],
    ),
    (
        "cohere",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        "",
        NOW,
    ),
    ("apertus", '<|tools_prefix|>[{"now": {}, "add": {"n": 1}}]<|tools_suffix|>', "", [*NOW, ("add", {"n": 1})]),
    ("phi", 'functools[{"name": "now", "arguments": {}}]', "", NOW),
    # Python.
    ("llama4", "[now()]", "", NOW),
    ("llama4", "<|python_start|>[now()]<|python_end|>", "", NOW),
    ("llama4", '{"name": "add", "parameters": {"n": 1}}', "", [("add", {"n": 1})]),
    ("llama4", '<|python_start|>{"name": "add", "parameters": {"n": 1}}<|python_end|>', "", [("add", {"n": 1})]),
    ("llama4", "See [1] and [now](x).\n[add(n=1)]", "See [1] and [now](x).", [("add", {"n": 1})]),
    (
        "lfm2",
        "<|tool_call_start|>[find(q='it\\'s', opts={'k': [1, None], \"t\": true})]<|tool_call_end|> behind",
        "behind",
        [("find", {"q": "it's", "opts": {"k": [1, None], "t": True}})],
    ),
    ("olmo3", "<function_calls>\nnow()\nadd(n=-2)\n</function_calls>", "", [*NOW, ("add", {"n": -2})]),
]


@pytest.mark.parametrize(("family", "text", "said", "calls"), CALLS)
def test_calls_are_read(family: str, text: str, said: str, calls: list[Call]) -> None:
    parsed = parse_cut(text, family, schemas=SCHEMAS)
    assert (parsed.text, told(parsed)) == (said, calls)


NO_CALLS = [
    ("gemma4", "<|tool_call>no call<tool_call|>"),
    ("minimax-m3", m3("P<tool_call> is a tag")),
    ("minimax-m3", m3('P<invoke name="unknown">P</invoke>')),
    ("minimax-m3", m3('P<tool_call>P<invoke name="now">P<a>x')),
    ("apertus", "<|tools_prefix|>[1]<|tools_suffix|>"),
    ("phi", "import functools\n@functools.cache"),
    ("llama4", "[unknown()]"),
    ("llama4", "a[0] = [find(x)]"),
    ("lfm2", "<|tool_call_start|>[find('positional')]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[find(q=open('x'))]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[find(q='x"),
    ("olmo3", "<function_calls> wrap calls"),
]


@pytest.mark.parametrize(("family", "text"), NO_CALLS)
def test_what_is_no_call_stays_visible(family: str, text: str) -> None:
    assert parse_cut(text, family, schemas=SCHEMAS) == Parsed(text=text)


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'a\"b'", 'a"b'),
        ('"a\'b"', "a'b"),
        ("'it's late'", "it's late"),
        ("'a\nb'", "a\nb"),
        ("'a\\nb\\\\'", "a\nb\\"),
        ("'\\d\\/ \\\nx'", "\\d/ \\\nx"),
        ("'''a 'b'\n'''", "a 'b'\n"),
        ("'\\ud83d\\ude00 \\ud83d'", "\U0001f600 \ufffd"),
        ("12345678901234567890", 12345678901234567890),
        ("[1, -2.5, True, none]", None),
        ("[1, -2.5, True, null]", [1, -2.5, True, None]),
        ("{'a': {\"b\": (1, 2)}}", {"a": {"b": [1, 2]}}),
        ("{1, 2}", None),
        ("--1", None),
        ("1 + 2", None),
        ("1e999", None),
        ("b'x'", None),
        ("f(1)", None),
        ("[" * 80 + "]" * 80, None),
        ("-" * 500 + "1", None),
        ("x", None),
        ("", None),
    ],
)
def test_pythons_values_are_literals(literal: str, value: Any) -> None:
    parsed = parse_cut(f"<|tool_call_start|>[now(x={literal})]<|tool_call_end|>", "lfm2", schemas=SCHEMAS)
    assert told(parsed) == ([] if value is None else [("now", {"x": value})])


def test_gemmas_arguments_come_as_they_are_written() -> None:
    (call,) = parse_cut('<|tool_call>call:find{q:<|"|>a', "gemma4", schemas=SCHEMAS).calls
    assert (call.name, call.arguments) == ("find", '{"q": "a')


REASONING: list[tuple[str, str, str, Start, str, str]] = [
    ("gemma4", "gemma4", "<|channel>thought\nLook.<channel|>Ok.", "answer", "Look.", "Ok."),
    ("minimax-m3", "minimax-m3", "hm</mm:think>Ok.", "reasoning", "hm", "Ok."),
    ("seed", "seed", "<seed:think>hm</seed:think>Ok.", "answer", "hm", "Ok."),
    ("longcat", "longcat", "<longcat_think>\nhm\n</longcat_think>\nOk.", "answer", "hm", "Ok."),
    ("solar", "solar", "<|think:start|>hm<|think:end|>Ok.", "answer", "hm", "Ok."),
    ("cohere", "cohere", "<|START_THINKING|>hm<|END_THINKING|>Ok.", "answer", "hm", "Ok."),
    ("apertus", "apertus", "<|inner_prefix|>hm<|inner_suffix|>Ok.", "answer", "hm", "Ok."),
    ("granite", "granite", "Here is my thought process:\n hm\nHere is my response: Ok.", "answer", "hm", "Ok."),
    ("hunyuan", "hunyuan", "<think>\nhm\n</think>\n<answer>\nOk.\n</answer>", "answer", "hm", "Ok."),
    ("hermes", "ernie", "hm\n</think>\n\n\n<response>\nOk.\n</response>\n", "reasoning", "hm", "Ok."),
    ("hermes", "ernie", "hm</think>Ok </response> <response> x", "reasoning", "hm", "Ok </response> <response> x"),
    ("hermes", "ernie", "hm</think><response>a </response> b</response>", "reasoning", "hm", "a </response> b"),
    (
        "kimi-k3",
        "kimi-k3",
        "hm<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|><|close|>message<|sep|>",
        "reasoning",
        "hm",
        "Ok.",
    ),
    (
        "muse",
        "muse",
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Ok.<|eot|>",
        "answer",
        "hm",
        "Ok.",
    ),
    ("muse", "muse", "<|message|>Ok.<|eot|>", "answer", "", "Ok."),
    ("muse", "muse", " to=us", "answer", "", ""),
    (
        "inkling",
        "inkling",
        "<|content_text|>Ok.<|end_message|><|message_model|>x<|content_thinking|>hm<|end_message|>",
        "answer",
        "hm",
        "Ok.",
    ),
    ("inkling", "inkling", "hm<|end_message|><|message_model|><|content_text|>Ok.", "reasoning", "hm", "Ok."),
]


@pytest.mark.parametrize(("family", "reasoning", "text", "start", "thought", "said"), REASONING)
def test_reasoning_is_told_apart(family: str, reasoning: str, text: str, start: Start, thought: str, said: str) -> None:
    for calls in (family, "none"):
        parsed = parse_cut(text, calls, reasoning, start)
        assert (parsed.reasoning, parsed.text, parsed.calls) == (thought, said, [])


def test_a_frame_around_calls_goes_with_them() -> None:
    said = "<think>\nhm\n</think>\n<answer>\n" + ANSWERS["hunyuan"].removeprefix("I look. ") + "\n</answer>"
    parsed = parse_cut(said, "hunyuan", "hunyuan")
    assert (parsed.reasoning, parsed.text, len(parsed.calls)) == ("hm", "", 2)


@pytest.mark.parametrize("family", ["gemma4", "deepseek-v3.2", "kimi-k3", "cohere"])
def test_calls_end_reasoning_where_no_text_has_their_markers(family: str) -> None:
    begin = family if family in ("gemma4", "kimi-k3", "cohere") else "think"
    parsed = parse_cut("hm" + ANSWERS[family].removeprefix("I look."), family, begin, "reasoning")
    assert (parsed.reasoning, parsed.text, len(parsed.calls)) == ("hm", "", 2)


def test_a_call_ends_a_thought_of_messages() -> None:
    said = "<|content_thinking|>hm<|content_invoke_tool_json|>" + '{"name": "now", "args": {}}<|end_message|>'
    parsed = parse_cut(said, "inkling", "inkling", schemas=SCHEMAS)
    assert (parsed.reasoning, told(parsed)) == ("hm", NOW)


def test_tags_in_a_thought_of_muse_are_no_call() -> None:
    call = ANSWERS["muse"].partition("to=get_weather<|message|>")[2].partition("<|eom|>")[0]
    for to, kind in (("self", "reasoning"), ("user", "text")):
        parsed = parse_cut(f" to={to}<|message|>{call}<|eot|>", "muse", "muse")
        assert parsed.calls == []
        assert getattr(parsed, kind) == call


def test_a_vocabularys_suffix_stands_in_every_tag() -> None:
    calls, reasoning = calls_of("hy", ":ab12"), reasoning_of("think", ":ab12")
    assert calls is not None
    assert reasoning is not None
    assert (reasoning.begin, reasoning.end) == ("<think:ab12>", "</think:ab12>")
    names = ("tool_calls", "tool_call", "arg_key", "arg_value")
    assert {*calls.opens, *calls.others} == {
        "<tool_sep:ab12>",
        *(f"<{name}:ab12>" for name in names),
        *(f"</{name}:ab12>" for name in names),
    }
    found = choose_shape(["tools {{ '<think' + TK }} {{ '<tool_sep' + TK }}"], "hy", added=("<s>", "<tool_calls:ab12>"))
    assert (found.calls, found.reasoning, found.suffix) == ("hy", "think", ":ab12")
    assert "</arg_key:ab12>" in found.markers
    assert choose_shape([], "qwen3_moe", added=("<tool_calls:ab12>",)).suffix == ""


def test_the_markers_of_messages_are_asked_for() -> None:
    for name, form in MESSAGES.items():
        assert {*form.markers} <= choose_shape([], "", name, "none").markers


@pytest.mark.parametrize(
    ("template", "model_type", "shape"),
    [
        ("<tool_call> <think>", "qwen3_moe", ("hermes", "think")),
        ("<tool_call> <function= <think>", "qwen3_moe", ("qwen3-coder", "think")),
        ("[TOOL_CALLS]", "mixtral", ("mistral", "none")),
        ("[TOOL_CALLS] [THINK]", "mistral", ("mistral", "mistral")),
        ("<|channel|>", "gpt_oss", ("harmony", "harmony")),
        ("", "gpt_oss", ("harmony", "harmony")),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek_v3", ("deepseek", "think")),
        ("<tool_call> <arg_key> <think>", "glm4_moe", ("glm", "think")),
        ("<minimax:tool_call> <think>", "minimax_m2", ("minimax", "think")),
        ("<|tool_calls_section_begin|>", "kimi_k2", ("kimi", "none")),
        ("<|python_tag|>", "llama", ("llama3", "none")),
        ("plain", "llama", ("hermes", "none")),
        # A template that knows no tools gets them explained in hermes' form.
        ("plain", "glm4_moe", ("hermes", "none")),
        ("tools", "glm_moe_dsa", ("glm", "none")),
        ("<|channel>thought <|tool_call>call:", "gemma4", ("gemma4", "gemma4")),
        ("<mm:think> ]<]minimax[>[ <tool_call>", "minimax_m3_vl", ("minimax-m3", "minimax-m3")),
        ("'｜DSML｜' function_calls> <think>", "deepseek_v32", ("deepseek-v3.2", "think")),
        ("<｜DSML｜tool_calls> <think>", "deepseek_v4", ("deepseek-v4", "think")),
        ("<｜DSML｜ calls> <think>", "deepseek_v4", ("deepseek-v4.1", "think")),
        ("", "deepseek_v32", ("deepseek-v3.2", "think")),
        ("", "deepseek_v4", ("deepseek-v4", "think")),
        ("<tool_calls> <tool_call> <tool_sep> <arg_key> <think>", "hy_v4", ("hy", "think")),
        ("<longcat_tool_call> <longcat_think>", "longcat_flash", ("longcat", "longcat")),
        ("<seed:tool_call> <function= <seed:think>", "seed_oss", ("seed", "seed")),
        ("<tool_call><function= </function></tool_call> <think>", "mimo_v2_flash", ("mimo", "think")),
        ("<zyphra_tool_call> <function= <think>", "zaya", ("zaya", "think")),
        ("<tool_calls>[ <think>", "hunyuan_v1_moe", ("hunyuan", "hunyuan")),
        ("tools <think>", "hunyuan_v1_moe", ("hunyuan", "hunyuan")),
        ("tools", "jamba", ("hunyuan", "none")),
        ("<tool_call> <think>", "ernie4_5_moe", ("hermes", "ernie")),
        ("<|tool_call_start|> <think>", "lfm2_moe", ("lfm2", "think")),
        ("[func_name1(params)]", "llama4", ("llama4", "none")),
        ("tools", "llama4", ("llama4", "none")),
        ('{"name": function name, "parameters": {}}', "llama4", ("llama3", "none")),
        ("<function_calls> <think>", "olmo3", ("olmo3", "think")),
        ("<dots_function_call> <think>", "dots3_note_text", ("dots", "think")),
        ("'<|open|>' '<|close|>'", "kimi_k3", ("kimi-k3", "kimi-k3")),
        ("tools", "kimi_linear", ("kimi", "none")),
        ("<|tool_call:start|> <|think:start|>", "solar_open", ("solar", "solar")),
        ("<|START_ACTION|> <|START_THINKING|>", "cohere2_moe", ("cohere", "cohere")),
        ("<|content_invoke_tool_json|> <|content_thinking|>", "inkling2_text", ("inkling", "inkling")),
        ("<atem:function_calls> to=self<|message|>", "muse_spark", ("muse", "muse")),
        ("<steptml:invoke <think>", "step3_text", ("step3", "think")),
        ("<|tools_prefix|> <|inner_prefix|>", "apertus", ("apertus", "apertus")),
        ("<ifm|tool_calls> <think>", "k2_horizon", ("k2-horizon", "think")),
        ("functools[", "phimoe", ("phi", "none")),
        ("<|tool_call|> Here is my thought process:", "granitemoe", ("granite", "granite")),
        ("<|tool_call|> <think></think> <response></response>", "granitemoe", ("granite", "ernie")),
        ("tools", "qwen3_5_moe", ("qwen3-coder", "none")),
        ("tools", "mistral4", ("mistral", "none")),
    ],
)
def test_the_family_follows_from_template_and_type(template: str, model_type: str, shape: tuple[str, str]) -> None:
    found = choose_shape([template], model_type)
    assert (found.calls, found.reasoning) == shape
    assert choose_shape([template], model_type, "none", "none").markers == frozenset()
