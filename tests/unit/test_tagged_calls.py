"""Calls with their arguments in tags: white space in values, closing tags that are missing, and values as they come."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.dialects.internal import ToolCallPart
from tests.support.examples import examples
from tests.support.parsing import calls_of, parse, parse_cut, parser


def in_qwen(*arguments: tuple[str, str], name: str = "write") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def in_minimax(*arguments: tuple[str, str], name: str = "write") -> str:
    inner = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
    return f'<minimax:tool_call>\n<invoke name="{name}">\n{inner}</invoke>\n</minimax:tool_call>'


def in_glm(*arguments: tuple[str, str], name: str = "write") -> str:
    inner = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments)
    return f"<tool_call>{name}{inner}</tool_call>"


FORMS = {"qwen3-coder": in_qwen, "minimax": in_minimax, "glm": in_glm}
VALUE_ENDS = {"qwen3-coder": "\n</parameter>", "minimax": "</parameter>", "glm": "</arg_value>"}
WRITTEN = ("write", {"path": "a", "content": "b"})


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("value", ["a\nb\n", "\na", "\n\n", "", " a ", "\n"])
def test_a_value_keeps_its_line_breaks(family: str, value: str) -> None:
    parsed = parse_cut(FORMS[family](("content", value)), family)
    assert calls_of(parsed) == [("write", {"content": value})]


@pytest.mark.parametrize("family", FORMS)
def test_a_missing_closing_tag_ends_a_value_before_the_next_argument(family: str) -> None:
    said = FORMS[family](("path", "a"), ("content", "b")).replace(VALUE_ENDS[family], "", 1)
    parsed = parse_cut(said, family)
    assert (parsed.text, calls_of(parsed)) == ("", [WRITTEN])


@pytest.mark.parametrize("family", FORMS)
def test_a_missing_closing_tag_ends_the_last_value_before_the_calls_end(family: str) -> None:
    said = "b".join(FORMS[family](("path", "a"), ("content", "b")).rsplit(f"b{VALUE_ENDS[family]}", 1))
    for more, calls in (("", [WRITTEN]), (f"\n{FORMS[family](('path', 'c'))}", [WRITTEN, ("write", {"path": "c"})])):
        parsed = parse_cut(said + more, family)
        assert (parsed.text, calls_of(parsed)) == ("", calls)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3-coder", in_qwen(("path", "a")).removesuffix("</function>\n</tool_call>") + "<tool_call>\n"),
        ("qwen3-coder", in_qwen(("path", "a")).replace("</function>\n", "") + "<tool_call>\n"),
        ("minimax", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a</parameter>\n'),
        ("glm", "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value>"),
    ],
)
def test_a_call_without_its_end_is_over_where_the_next_begins(family: str, said: str) -> None:
    second = FORMS[family](("path", "c"))
    second = second.removeprefix("<tool_call>\n" if family == "qwen3-coder" else "<minimax:tool_call>\n")
    parsed = parse_cut(said + second, family)
    assert (parsed.text, calls_of(parsed)) == ("", [("write", {"path": "a"}), ("write", {"path": "c"})])


def test_text_behind_calls_that_lack_their_last_tag_is_kept() -> None:
    said = in_qwen(("path", "a")).removesuffix("</tool_call>") + "Now I wait."
    assert parse_cut(said, "qwen3-coder").text == "Now I wait."
    hermes = '<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\nNow I wait.'
    assert parse_cut(hermes, "hermes").text == "Now I wait."


WHOLE_VALUES = [
    "a </parameter> b",
    "<parameter=path>",  # given already
    "x <parameter=content>",
    "\n<parameter=unknown>\n1",
    "a\n</function>\n</tool_call>\nb",
    "<tool_call>\n<function=write>\n",
    "</arg_value> <arg_key",
    "</tool_call> b",
    '<parameter name="path">',
    "</invoke>\n</minimax:tool_call>\nb",
]


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("value", WHOLE_VALUES)
def test_tags_in_a_complete_value_stay_text(family: str, value: str) -> None:
    parsed = parse_cut(FORMS[family](("path", "a"), ("content", value)), family)
    assert (parsed.text, calls_of(parsed)) == ("", [("write", {"path": "a", "content": value})])


def test_arguments_behind_a_broken_tag_count() -> None:
    said = in_qwen(("path", "a"), ("content", "b")).replace("<parameter=path>", "<parameter=pa")
    assert calls_of(parse_cut(said, "qwen3-coder")) == [("write", {"content": "b"})]


def test_the_first_of_two_equal_arguments_counts() -> None:
    assert calls_of(parse_cut(in_qwen(("path", "a"), ("path", "c")), "qwen3-coder")) == [("write", {"path": "a"})]


def test_json_in_a_region_is_read_as_calls() -> None:
    said = '<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>'
    parsed = parse_cut(said, "qwen3-coder")
    assert (parsed.text, calls_of(parsed)) == ("", [("write", {"path": "a"})])


@pytest.mark.parametrize("family", FORMS)
def test_a_text_is_told_as_it_comes(family: str) -> None:
    reader = parser(family)
    head, tail = FORMS[family](("path", "a"), ("content", "line 1\nXX")).split("XX")
    parts = [part for piece in (head, 'two"', "\n", "three", tail) for part in reader.push(piece).calls]
    assert parts == [
        ToolCallPart(0, '{"path": "a", "content": "line 1', "id0", "write"),
        ToolCallPart(0, '\\ntwo\\"'),
        ToolCallPart(0, "\\nthree"),
        ToolCallPart(0, '"}'),
    ]


def test_what_may_still_be_a_tag_is_not_told() -> None:
    reader = parser("qwen3-coder")
    told = []
    for piece in ("<tool_call>\n<function=write>\n<parameter=content>\na\n</parameter>\n</func", "y", "\n</parameter"):
        told += [part.arguments for part in reader.push(piece).calls]
    assert told == ['{"content": "a', "\\n</parameter>\\n</funcy"]


def test_values_that_are_no_text_come_whole() -> None:
    reader = parser("qwen3-coder")
    said = in_qwen(("days", "12"), ("city", "Rome"), name="get_weather")
    head, tail = said.split("2\n</parameter>")
    assert reader.push(head).calls == []
    assert [part.arguments for part in reader.push("2\n</parameter>" + tail).calls] == ['{"days": 12, "city": "Rome"}']


@pytest.mark.parametrize("family", FORMS)
def test_a_call_that_is_cut_is_told_as_far_as_it_came(family: str) -> None:
    said = FORMS[family](("path", "a"), ("content", "bcd"))
    (call,) = parse_cut(said[: said.index("cd")], family).calls
    assert (call.name, call.arguments) == ("write", '{"path": "a", "content": "b')
    untold = said[: said.index("write") + 5]
    assert parse_cut(untold, family).text == untold


TAGS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=write>", "</function>", "<parameter=path>", "<parameter=content>"),
        *("</parameter>", "<parameter=", "<arg_key>path</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>", "</"),
        *('<invoke name="write">', '<parameter name="path">', "</invoke>", "<minimax:tool_call>"),
        *("</minimax:tool_call>", "\n", " ", "a", ">", "get_weather", '{"name": "write", "arguments": {}}', "<think>"),
        *(in_qwen(("path", "a"), ("content", "b")), in_glm(("path", "a")), in_minimax(("path", "a\n")), "</think>"),
    ]
)


@pytest.mark.slow
@examples(10)
@given(
    st.lists(TAGS, max_size=14).map("".join),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from([*FORMS, "hermes"]),
    st.sampled_from(["none", "think"]),
    st.sampled_from([(), ("<tool_call>", "<minimax:tool_call>")]),
)
def test_calls_with_any_tags_missing_do_not_depend_on_how_the_text_is_cut(
    text: str, cuts: list[int], family: str, reasoning: str, tokens: tuple[str, ...]
) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    start = "answer" if reasoning == "none" else "reasoning"
    whole = parse([text], family, reasoning, start, tokens=tokens)
    assert parse(pieces, family, reasoning, start, tokens=tokens) == whole
    assert parse(text, family, reasoning, start, tokens=tokens) == whole
    for call in whole.calls[:-1]:
        if family != "hermes":
            json.loads(call.arguments)
