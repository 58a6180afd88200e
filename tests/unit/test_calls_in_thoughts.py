"""Calls inside a thought that the model forgot to end, and calls that a thought only speaks of."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from moeserve.frontend.parsers.families import CALLS
from moeserve.frontend.parsers.feed import Feed
from tests.support.parsing import calls_of, parse, parse_cut

WEATHER = ("get_weather", {"city": "Rome"})
CALL_OF = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen3-coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "minimax": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}',
    "llama3": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]',
}


def markers(family: str) -> Collection[str]:
    return CALLS[family].opens


@pytest.mark.parametrize("family", CALL_OF)
@pytest.mark.parametrize("are_tokens", [True, False])
def test_a_call_in_a_thought_that_never_ends_is_a_call(family: str, are_tokens: bool) -> None:
    tokens = markers(family) if are_tokens else ()
    parsed = parse_cut(f"I need it.\n\n{CALL_OF[family]}", family, "think", "reasoning", tokens=tokens)
    assert (parsed.reasoning, parsed.text, calls_of(parsed)) == ("I need it.", "", [WEATHER])


@pytest.mark.parametrize("family", CALL_OF)
@pytest.mark.parametrize("are_tokens", [True, False])
def test_the_thoughts_end_behind_its_last_call_changes_nothing(family: str, are_tokens: bool) -> None:
    tokens = markers(family) if are_tokens else ()
    said = f"<think>I need it.\n{CALL_OF[family]}\n</think>\n\n"
    parsed = parse_cut(said, family, "think", tokens=tokens)
    assert (parsed.reasoning, parsed.text, calls_of(parsed)) == ("I need it.", "", [WEATHER])


def test_two_calls_in_a_thought_are_calls() -> None:
    for tokens in (("<tool_call>",), ()):
        said = f"Both.\n{CALL_OF['hermes']}\n{CALL_OF['hermes']}"
        parsed = parse_cut(said, "hermes", "think", "reasoning", tokens=tokens)
        assert (parsed.reasoning, parsed.text, calls_of(parsed)) == ("Both.", "", [WEATHER, WEATHER])


def test_behind_a_call_whose_marker_is_a_token_the_thought_is_over() -> None:
    said = f"Hm.{CALL_OF['hermes']} I wait.</think>\n\nDone."
    parsed = parse_cut(said, "hermes", "think", "reasoning", tokens=("<tool_call>",))
    assert (parsed.reasoning, parsed.text, calls_of(parsed)) == ("Hm.", "I wait.\n\nDone.", [WEATHER])


NO_CALLS = [
    "a <tool_call> b",
    "a <tool_call>",
    "<tool_call>\n<tool_call> is how it begins",
    'I write <tool_call>{"name": "unknown", "arguments": {}}</tool_call> then.',
    'I write <tool_call>{"name": "get_weather", "arguments": {"city": oops}}</tool_call>.',
    'I write <tool_call>{"name": "get_weather", "arguments": {"city": "R',
]


@pytest.mark.parametrize("thought", NO_CALLS)
@pytest.mark.parametrize("tokens", [("<tool_call>",), ()])
def test_a_marker_in_a_thought_is_prose_where_no_complete_call_of_a_known_tool_follows(
    thought: str, tokens: tuple[str, ...]
) -> None:
    for said, answer in ((f"<think>{thought}</think>\n\nYes.", "Yes."), (f"<think>{thought}", "")):
        parsed = parse_cut(said, "hermes", "think", tokens=tokens)
        assert (parsed.reasoning, parsed.text, parsed.calls) == (thought, answer, [])


def test_a_call_that_a_thought_speaks_of_in_prose_is_no_call_where_the_marker_is_text() -> None:
    for rest in (" or not.", "</think>No need.", f" {CALL_OF['hermes']} or not.</think>No need."):
        thought, _, said = rest.partition("</think>")
        parsed = parse_cut(f"Maybe {CALL_OF['hermes']}{rest}", "hermes", "think", "reasoning")
        assert parsed.calls == []
        assert parsed.reasoning == f"Maybe {CALL_OF['hermes']}{thought}"
        assert parsed.text == said


def test_an_end_of_the_thought_inside_a_call_leaves_no_call() -> None:
    said = '<tool_call>{"name": "write", "arguments": {"path": "a</think>Yes.'
    parsed = parse_cut(said, "hermes", "think", "reasoning", tokens=("<tool_call>",))
    assert (parsed.reasoning, parsed.text) == (said.removesuffix("</think>Yes."), "Yes.")


def test_without_tools_a_thought_has_no_calls() -> None:
    parsed = parse_cut(CALL_OF["hermes"], "hermes", "think", "reasoning", tokens=("<tool_call>",), schemas={})
    assert (parsed.reasoning, parsed.calls) == (CALL_OF["hermes"], [])


@pytest.mark.parametrize("family", CALL_OF)
def test_markers_in_a_thought_take_work_that_grows_with_the_text(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work: list[int] = []
    add = Feed.add

    def counting(feed: Feed, text: str) -> None:
        add(feed, text)
        work.append(len(feed.rest))

    monkeypatch.setattr(Feed, "add", counting)
    for filler in (markers(family)[0], CALL_OF[family][:-3], f"{CALL_OF[family]} x "):
        for tokens in (markers(family), ()):
            totals = []
            for times in (100, 200):
                work.clear()
                parse([filler] * times, family, "think", "reasoning", tokens=tokens)
                totals.append(sum(work))
            assert totals[1] <= 3 * totals[0]
