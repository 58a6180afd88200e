"""Tool calls and reasoning in the text of models, family by family."""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.dialects.internal import ToolCallPart
from moeserve.frontend.parsers.families import CALLS, REASONING
from moeserve.frontend.parsers.feed import CallIds, Feed, JsonScan, Markers, Parsed
from moeserve.frontend.parsers.message_form import MESSAGES, Start
from moeserve.frontend.parsers.parser import OutputParser
from moeserve.settings.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from tests.support.examples import examples
from tests.support.model_answers import ANSWERS
from tests.support.parsing import SCHEMAS, calls_of, parse, parse_cut, parser

PARIS = ("get_weather", {"city": "Paris", "days": 2})
ROME = ("get_weather", {"city": "Rome", "days": 1})


@pytest.mark.parametrize("family", CALLS)
def test_each_family_says_something_and_makes_two_calls(family: str) -> None:
    parsed = parse_cut(ANSWERS[family], family)
    assert parsed.text == "I look."
    assert calls_of(parsed) == [PARIS, ROME]


def test_the_settings_name_the_families() -> None:
    assert {*TOOL_CALL_PARSERS} == {"auto", "none", *CALLS}
    assert {*REASONING_PARSERS} == {"auto", "none", *REASONING}


OLDER_FORMS = [
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}, "id": "abcdefghi"}]'),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Rome", "days": 1}'),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome", "days": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    ("llama3", '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome", "days": 1}}'),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "function": {"name": "get_weather", '
        '"parameters": {"city": "Rome", "days": 1}}}',
    ),
    ("mistral", '[TOOL_CALLS][TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]'),
    ("mistral", '[TOOL_CALLS] \n[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 1}'),
    ("granite", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]'),
    ("granite", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]</tool_call>'),
    (
        "hermes",
        '<tool_call>\n```json\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}\n```\n</tool_call>',
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather<|tool_call_argument_begin|>"
        '{"city": "Rome", "days": 1}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    (
        "kimi",
        '<|tool_call_begin|>get_weather.0<|tool_call_argument_begin|>{"city": "Rome", "days": 1}<|tool_call_end|>',
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.get_weatherjson<|message|>{"city": "Rome", "days": 1}<|call|>',
    ),
    ("harmony", '<|channel|>commentary to=functions.get_weather json {"city": "Rome", "days": 1}<|call|>'),
    (
        "qwen3-coder",
        "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Rome", "days": 1}, "name": "get_weather"}</tool_call>'),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 1}"}</tool_call>',
    ),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}}</tool_call>'),
]


@pytest.mark.parametrize(("family", "text"), OLDER_FORMS)
def test_other_forms_of_a_family_are_known(family: str, text: str) -> None:
    parsed = parse_cut(text, family)
    assert (parsed.text, calls_of(parsed)) == ("", [ROME])


NO_CALLS = [
    ("hermes", "<tool_call>later</tool_call> yes"),
    ("hermes", '<tool_call>{"nom": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_w'),
    ("hermes", "a </tool_call> b"),
    ("qwen3-coder", "<tool_call>\nno function</tool_call>"),
    ("qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=days>\n1"),
    ("qwen3-coder", "<tool_call>\n<function=broken</function>\n</tool_call>"),
    ("qwen3-coder", "<tool_call>\n<function=get weather>\n</function>\n</tool_call>"),
    ("qwen3-coder", "The tag <function=main> begins it."),
    ("glm", "<tool_call>is what I would write</tool_call>"),
    ("glm", "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>1"),
    ("glm", "<tool_call>get_weather<tool_sep></tool_call>"),
    ("hermes", '<tool_call>{"name": "get weather<", "arguments": {}}</tool_call>'),
    ("deepseek", "<｜tool▁call▁begin｜>get weather<｜tool▁sep｜>{}"),
    ("kimi", "<|tool_call_begin|>functions.<x>:0<|tool_call_argument_begin|>{}"),
    ("minimax", "<minimax:tool_call> is a tag"),
    ("llama3", '{"name": "unknown", "parameters": {}}'),
    ("llama3", '{"answer": 5}'),
    ("llama3", " { not JSON"),
    ("llama3", 'So: {"type": "object", "name": "unknown", "parameters": {}} {"name": "send"'),
    ("llama3", 'So: {"city": {"name": "get_weather", "parameters": {}}}'),
    ("mistral", "[TOOL_CALLS]not a name"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]<x>[ARGS]{}"),
    ("none", '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'),
]


@pytest.mark.parametrize(("family", "text"), NO_CALLS)
def test_what_is_no_call_stays_visible_as_it_is(family: str, text: str) -> None:
    assert parse_cut(text, family) == Parsed(text=text)


@pytest.mark.parametrize("family", ["mistral", "kimi", "llama3"])
def test_markers_that_are_special_tokens_never_show(family: str) -> None:
    markers = (*CALLS[family].opens, *CALLS[family].others)
    parsed = parse([f"a{marker}b " for marker in markers], family, hidden=markers)
    assert not any(marker in parsed.text for marker in markers)
    assert parsed.text.startswith("a")


BROKEN = [
    ("hermes", '<tool_call>{"name": "send", "arguments": {"to": oops}</tool_call>', '{"to": oops}'),
    ("hermes", '<tool_call>{"name": "send", "arguments": {"to": ["a', '{"to": ["a'),
    ("deepseek", "<｜tool▁call▁begin｜>send<｜tool▁sep｜>to a<｜tool▁call▁end｜>", "to a"),
    ("kimi", "<|tool_call_begin|>functions.send:3<|tool_call_argument_begin|>{]<|tool_call_end|>", "{]"),
    ("mistral", '[TOOL_CALLS]send[ARGS]{"to": nobody}', '{"to": nobody}'),
    ("harmony", "<|channel|>commentary to=functions.send<|message|>{oops<|call|>", "{oops"),
]


@pytest.mark.parametrize(("family", "text", "arguments"), BROKEN)
def test_broken_arguments_are_given_as_they_are(family: str, text: str, arguments: str) -> None:
    parsed = parse([text], family)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("send", arguments)]
    assert parsed.text == ""


def test_llamas_calls_may_stand_behind_prose() -> None:
    said = 'Here: {"name": "get_weather", "parameters": {"city": "Rome", "days": 1}} and {"x": 1}.'
    parsed = parse_cut(said, "llama3")
    assert (parsed.text, calls_of(parsed)) == ('Here:  and {"x": 1}.', [ROME])


def test_what_is_no_name_hides_no_call_behind_it() -> None:
    said = "<tool_call>\n<function=broken</function>\n</tool_call>\n"
    parsed = parse_cut(said + ANSWERS["qwen3-coder"].removeprefix("I look.\n\n"), "qwen3-coder")
    assert (parsed.text, calls_of(parsed)) == (said.rstrip(), [PARIS, ROME])


def test_kimis_calls_without_a_number_have_ids_of_their_own() -> None:
    said = "<|tool_call_begin|>functions.send<|tool_call_argument_begin|>{}<|tool_call_end|>" * 2
    assert [(call.call_id, call.name) for call in parse_cut(said, "kimi").calls] == [("id0", "send"), ("id1", "send")]
    (call,) = parse_cut("<|tool_call_begin|>functions.other.0<|tool_call_argument_begin|>{}", "kimi").calls
    assert call.name == "other"


def test_a_broken_call_does_not_hide_the_next() -> None:
    text = '<tool_call>{"name": "send", "arguments": {"to": oops}</tool_call>\n' + ANSWERS["hermes"].split("\n", 1)[1]
    assert [call.name for call in parse([text], "hermes").calls] == ["send", "get_weather", "get_weather"]


def test_line_breaks_and_lone_backslashes_in_strings_are_put_right() -> None:
    text = '<tool_call>{"name": "send", "arguments": {"body": "a\n\tb \\d \\" \\u00e9 \x01"}}</tool_call>'
    assert calls_of(parse([text], "hermes")) == [("send", {"body": 'a\n\tb \\d " é \x01'})]


def test_markers_inside_json_strings_end_nothing() -> None:
    text = '<tool_call>{"name": "send", "arguments": {"body": "</tool_call>"}}</tool_call>done'
    parsed = parse([text], "hermes")
    assert (calls_of(parsed), parsed.text) == ([("send", {"body": "</tool_call>"})], "done")


TAGS_IN_VALUES = [
    (
        "qwen3-coder",
        "<tool_call>\n<function=send>\n<parameter=body>\n{}\n</parameter>\n</function>\n</tool_call>",
        "a </parameter> b </function> c </tool_call> <parameter=x>",
    ),
    (
        "glm",
        "<tool_call>send<arg_key>body</arg_key><arg_value>{}</arg_value></tool_call>",
        "a </tool_call> </arg_value> b",
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="send">\n<parameter name="body">{}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "a </invoke> </parameter>\n\nb",
    ),
]


@pytest.mark.parametrize(("family", "form", "value"), TAGS_IN_VALUES)
def test_tags_inside_values_end_nothing(family: str, form: str, value: str) -> None:
    for pieces in ([form.format(value)], list(form.format(value))):
        parsed = parse(pieces, family)
        assert (calls_of(parsed), parsed.text) == ([("send", {"body": value})], "")


def test_white_space_between_two_pieces_of_text_stays() -> None:
    assert parse(["Before. <tool_call>\n" + '{"name": "send"}\n</tool_call>\n After. '], "hermes").text == (
        "Before. \n After."
    )
    assert parse(['\n <tool_call>{"name": "send"}</tool_call>\nAfter.'], "hermes").text == "After."


def test_a_header_that_was_cut_is_no_text() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.send<|channel|>commentary"
    assert parse([text], "harmony", "harmony") == Parsed("hm", "")


@pytest.mark.parametrize(
    ("text", "reasoning", "said"),
    [
        ('<|channel|>final {"answer": "hi"}<|return|>', "", '{"answer": "hi"}'),
        ("<|channel|>analysis hm<|end|><|start|>assistant<|channel|>final so", "hm", "so"),
        ("No header<|return|>", "", "No header"),
        ("<|channel|>fin", "", ""),
        ("<|channel|>commentary to=functions.send js", "", ""),
    ],
)
def test_a_message_whose_header_does_not_end_is_kept(text: str, reasoning: str, said: str) -> None:
    assert parse_cut(text, "harmony", "harmony") == Parsed(reasoning, said)


def test_calls_without_arguments_have_an_empty_object() -> None:
    for arguments in ("", ', "arguments": null', ', "arguments": {}'):
        parsed = parse([f'<tool_call>{{"name": "send"{arguments}}}</tool_call>'], "hermes")
        assert calls_of(parsed) == [("send", {})]
    assert calls_of(parse(["<tool_call>send</tool_call>"], "glm")) == [("send", {})]


def test_kimis_ids_are_the_models_own() -> None:
    assert [call.call_id for call in parse([ANSWERS["kimi"]], "kimi").calls] == [
        "functions.get_weather:0",
        "functions.get_weather:1",
    ]


def test_ids_are_openais() -> None:
    reader = OutputParser(reasoning=None, calls=CALLS["hermes"], schemas=SCHEMAS, new_id=CallIds("", 0))
    ids = [part.call_id for part in reader.push(ANSWERS["hermes"]).calls]
    assert len({*ids}) == 2
    for call_id in ids:
        assert call_id.startswith("call_")
        int(call_id.removeprefix("call_"), 16)
        assert len(call_id) == 29


@pytest.mark.parametrize("family", CALLS)
def test_only_the_first_call_is_told_where_calls_must_not_be_parallel(family: str) -> None:
    parsed = parse(list(ANSWERS[family]), family, parallel=False)
    assert (parsed.text, calls_of(parsed)) == ("I look.", [PARIS])


def test_json_arguments_come_as_they_are_written() -> None:
    reader = parser("hermes")
    pieces = ['<tool_call>{"name": "send", "arg', 'uments": {"to": ["a', '", "b"]', "}}</tool_call>"]
    parts = [part for piece in pieces for part in reader.push(piece).calls]
    assert parts == [
        ToolCallPart(0, '{"to": ["a', "id0", "send"),
        ToolCallPart(0, '", "b"]'),
        ToolCallPart(0, "}"),
    ]


# Reasoning.


@pytest.mark.parametrize(
    ("text", "start", "reasoning", "said"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nYes.", "answer", "hm\n\nso", "Yes."),
        ("hm\n</think>\n\nYes.", "reasoning", "hm", "Yes."),
        ("<think>\nhm</think>Yes.", "reasoning", "hm", "Yes."),
        ("hm, endless", "reasoning", "hm, endless", ""),
        ("\n\nYes <think>.", "answer", "", "\n\nYes <think>."),
        ("<thin", "answer", "", "<thin"),
        ("Yes.", "text", "", "Yes."),
        ("<think>", "answer", "", ""),
        ("<think></think>", "answer", "", ""),
    ],
)
def test_reasoning_is_told_apart(text: str, start: Start, reasoning: str, said: str) -> None:
    assert parse([text], "none", "think", start) == Parsed(reasoning, said)


def test_mistral_and_harmony_reason_in_markers_of_their_own() -> None:
    assert parse(["[THINK]hm[/THINK]Yes."], "mistral", "mistral") == Parsed("hm", "Yes.")
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert parse([text], "harmony", "harmony") == Parsed("hm", "Yes.")
    assert parse([text], "harmony", "none") == Parsed("", "hmYes.")
    assert parse(["es.<|return|>"], "harmony", "harmony", "text") == Parsed("", "es.")
    assert parse(["No header"], "harmony", "harmony") == Parsed("", "No header")


@pytest.mark.parametrize("whole", [True, False])
def test_a_message_may_spell_the_markers_of_its_form_where_these_are_special_tokens(whole: bool) -> None:
    reader = parser("harmony", "harmony", hidden=MESSAGES["harmony"].markers)
    spelled = '{"city": "<|end|><|start|>a < b"}'
    answer = Parsed()
    texts = (
        "<|channel|>",
        "analysis",
        "<|message|>",
        "a <|return|>",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
    )
    texts = (*texts, "commentary to=functions.get_weather", "<|message|>", spelled, "<|call|>")
    for text in texts:
        is_special = text in MESSAGES["harmony"].markers
        for piece in [text] if whole or is_special else text:
            parsed = reader.push(piece, is_special=is_special)
            answer.reasoning += parsed.reasoning
            answer.calls += parsed.calls
    answer.calls += reader.finish().calls
    assert answer.reasoning == "a <|return|>"
    assert (answer.calls[0].name, "".join(call.arguments for call in answer.calls)) == ("get_weather", spelled)


def test_calls_may_end_reasoning_where_their_markers_are_tokens() -> None:
    text = "<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.send:0<|tool_call_argument_begin|>{}"
    parsed = parse([text], "kimi", "think")
    assert (parsed.reasoning, calls_of(parsed)) == ("hm", [("send", {})])
    assert parse(["<think>a <tool_call> b</think>c"], "hermes", "think") == Parsed("a <tool_call> b", "c")


# Cuts and time.

PIECES = st.one_of(
    st.sampled_from(
        [
            *{part for answer in ANSWERS.values() for part in (answer, answer[: len(answer) // 2], answer[-40:])},
            *{marker for shape in CALLS.values() for marker in (*shape.opens, *shape.others)},
            *(
                "<think>",
                "</think>",
                "[THINK]",
                "[/THINK]",
                "{",
                "}",
                '"',
                "\\",
                "\n",
                " ",
                "```json\n",
                ">",
                "to=send",
            ),
            *('{"name": "send", "arguments": {"to": ["a"]}}', '{"name": "send"', ', "arguments": ', "functions.send:0"),
        ]
    ),
    st.text(max_size=8),
)


@examples(3)
@given(
    st.lists(PIECES, max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(sorted(CALLS)),
    st.sampled_from(["none", *REASONING]),
    st.sampled_from(["answer", "reasoning", "text"]),
    st.booleans(),
)
def test_parts_do_not_depend_on_how_the_text_is_cut(
    text: str, cuts: list[int], family: str, reasoning: str, start: Start, are_tokens: bool
) -> None:
    tokens = CALLS[family].opens if are_tokens else ()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    whole = parse([text], family, reasoning, start, tokens=tokens)
    assert parse(pieces, family, reasoning, start, tokens=tokens) == whole
    assert parse(text, family, reasoning, start, tokens=tokens) == whole


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("filler", ["a", " ", "<", "[", '"', "\\", "\n", "{", '<tool_call>{"name": "'])
def test_work_grows_with_the_text_and_not_faster(family: str, filler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the characters that the feed copies for twice the text: about twice as many."""
    work: list[int] = []
    add = Feed.add

    def counting(feed: Feed, text: str) -> None:
        add(feed, text)
        work.append(len(feed.rest))

    monkeypatch.setattr(Feed, "add", counting)
    totals = []
    for times in (500, 1000):
        work.clear()
        parse([filler] * times, family)
        totals.append(sum(work))
    assert totals[1] <= 3 * totals[0]


# The parts.


def test_markers_that_could_hide_each_other_are_refused() -> None:
    for texts in (("<a>", "<a>b"), ("a<b>c", "<b>")):
        with pytest.raises(ValueError, match="marker"):
            Markers(*texts)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.booleans(), st.text("}] ,x", min_size=1, max_size=3))
def test_a_json_value_ends_where_it_ends(value: Any, ascii_only: bool, rest: str) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    if text[-1].isalnum():
        rest = "}" + rest
    scan = JsonScan()
    assert scan.scan(text + rest, ended=True) == (len(text), text)
    assert scan.done


@pytest.mark.parametrize(
    "text", ["x", "{1", '{"a" 1', '{"a": 1,}', "[1 2", "01", "tru", "-", "1e", "[" * 300, '{"a":]']
)
def test_what_is_no_json_is_noticed(text: str) -> None:
    scan = JsonScan()
    scan.scan(text, ended=True)
    assert scan.broken
