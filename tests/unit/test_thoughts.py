"""The tables of a model's markers, the thoughts that they find in tokens of any cut, and the budgets of requests."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from moeserve.config import ConfigError, ServeConfig, load_config
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, ThoughtOptions, Tool
from moeserve.frontend.parsers.counting import Thoughts
from moeserve.frontend.parsers.families import CALLS, REASONING
from moeserve.frontend.parsers.feed import CallIds
from moeserve.frontend.parsers.message_form import Start
from moeserve.frontend.parsers.parser import OutputParser
from moeserve.frontend.parsers.shape import OutputShape
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import SamplingParams
from moeserve.thoughts import BudgetedThought, Thought, ThoughtBudget, ThoughtForm, make_markers
from tests.support.examples import examples
from tests.support.tiny_model import END, byte_tokenizer

TOKENIZER = TextTokenizer(byte_tokenizer())
THINKER, HARMONY = OutputShape("hermes", "think"), OutputShape("harmony", "harmony")
CHAT = ChatPrompt([{"role": "user", "content": "hi"}])


def request(prompt: ChatPrompt | str = CHAT, **changes: object) -> GenerateRequest:
    given = {"model": "m", "prompts": [prompt], "sampling": SamplingParams(max_tokens=1), "max_tokens": 9, "seed": None}
    return GenerateRequest(**{**given, **changes})


def count(text: str, shape: OutputShape, start: Start = "answer", **changes: object) -> int:
    """The tokens inside the thoughts of an answer whose tokens are bytes."""
    thought = Thoughts(TOKENIZER, shape, ServeConfig()).follow(request(**changes), start)
    assert thought is not None
    for byte in text.encode():
        thought.push(byte)
    return thought.num_tokens


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("<think>hm</think>Yes. <think>no</think>", "answer", 2),
        (" \n<think>hm</think>Yes.", "answer", 2),
        ("Yes. <think>hm</think>", "answer", 0),
        ("hm</think>Yes.", "reasoning", 2),
        ("hm</thi", "reasoning", 7),
        ("h</thi</think>", "reasoning", 6),
        ("</think>Yes.", "reasoning", 0),
    ],
)
def test_the_tokens_between_the_markers_count(text: str, start: Start, expected: int) -> None:
    assert count(text, THINKER, start) == expected


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("<|start|>assistant<|channel|>analysis<|message|>", "reasoning"),
        ("<|channel|>analysis<|message|>no<|end|><|channel|>analysis<|message|>hm", "reasoning"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "answer"),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Y", "answer"),
        ("<|channel|>analysis to=python<|message|>1 + ", "answer"),
        ("<|channel|>analysis", "answer"),
        ("a <|message|> <|channel|>analysis", "answer"),
        ("Once upon a time", "answer"),
    ],
)
def test_a_text_ends_inside_a_thought_of_harmony_or_not(prompt: str, start: Start) -> None:
    assert HARMONY.start_of_text(prompt) == start
    assert count("hm<|end|><|channel|>final<|message|>Y", HARMONY, "reasoning") == 2


def test_a_call_ends_a_thought_where_the_parser_says_so() -> None:
    text = "<think>hm<|tool_calls_section_begin|>x</think>"
    for called_at, expected in ((None, len("hm<|tool_calls_section_begin|>x")), (len("<think>hm"), 2)):
        thought = Thoughts(TOKENIZER, THINKER, ServeConfig()).follow(request(), "answer")
        assert thought is not None
        for byte in text.encode():
            thought.push(byte)
        if called_at is not None:
            thought.cut(called_at)
        assert (thought.num_tokens, thought.is_open) == (expected, False)


@pytest.mark.parametrize(("family", "is_token"), [("hermes", True), ("hermes", False), ("kimi", False)])
def test_a_budget_ends_with_the_marker_of_a_call_that_may_end_the_thought(family: str, is_token: bool) -> None:
    """An end that is forced inside a call would break it."""
    tokenizer = byte_tokenizer()
    marker = CALLS[family].opens[0]
    if is_token:
        tokenizer.add_tokens([AddedToken(marker, normalized=False)])
    thoughts = Thoughts(TextTokenizer(tokenizer), OutputShape(family, "think"), ServeConfig(reasoning_budget=40))
    for tools, ends in (((Tool("t"),), is_token or family == "kimi"), ((), False)):
        budget = thoughts.budget(request(tools=tools), "reasoning")
        assert budget is not None
        followed = BudgetedThought(budget, tokenizer.encode(f"hm{marker}{'x' * 40}", add_special_tokens=False).ids[:40])
        assert (followed.due == ()) is ends


def test_every_message_in_the_analysis_channel_is_a_thought_unless_it_is_a_call() -> None:
    answer = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis to=functions.t<|message|>"
        "{}<|call|><|start|>assistant<|channel|>analysis<|message|>so<|channel|>final<|message|>Yes<|return|>"
    )
    assert count(answer, HARMONY) == 4


@pytest.mark.parametrize(
    ("family", "answer", "expected"),
    [
        ("muse", " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Yes<|eot|>", 2),
        ("muse", " to=user<|message|>Yes", 0),
        ("inkling", "<|content_text|>Yes<|end_message|><|message_model|><|content_thinking|>hm<|end_message|>", 2),
        ("inkling", "<|content_thinking|>hm<|content_invoke_tool_json|>{}<|end_message|>", 2),
        ("gemma4", "<|channel>thought\nhm<channel|>Yes", 3),
        ("kimi-k3", "<|open|>think<|sep|>hm<|close|>think<|sep|>Yes", 2),
    ],
)
def test_thoughts_between_other_markers_count(family: str, answer: str, expected: int) -> None:
    shape = OutputShape(family, family)
    assert count(answer, shape) == expected
    thoughts = Thoughts(TOKENIZER, shape, ServeConfig(reasoning_budget=0))
    budget = thoughts.budget(request(), "answer")
    assert budget is not None
    assert budget.closing


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "think>", "</thi", "<", ">", "a", " ", "\n", "é"]),
    max_size=12,
)


def cut(text: str, places: list[int]) -> list[bytes]:
    """The bytes of a text, cut at some places."""
    data = text.encode()
    return [data[a:b] for a, b in pairwise(sorted({0, len(data), *(place % (len(data) + 1) for place in places)}))]


def inside(tokens: list[bytes], start: Start) -> int:
    """The tokens inside the first thought, found in the whole text."""
    data, begin = b"".join(tokens), 0
    if start == "answer":
        begin = len(data) - len(data.lstrip())
        if not data[begin:].startswith(b"<think>"):
            return 0
        begin += len(b"<think>")
    ends = [sum(map(len, tokens[: n + 1])) for n in range(len(tokens))]
    # The thought begins behind the token that completes its marker.
    first = next(n for n, end in enumerate(ends) if end >= begin) + 1 if begin else 0
    rest = b"".join(tokens[first:])
    found = rest.find(b"</think>")
    if found < 0:
        return len(tokens) - first
    from_, base = found, ends[first - 1] if first else 0
    return sum(end - len(token) - base < from_ for token, end in zip(tokens[first:], ends[first:], strict=True))


@pytest.mark.slow
@examples(40)
@given(PIECES, st.lists(st.integers(0, 200), max_size=20), st.sampled_from(["answer", "reasoning"]))
def test_markers_are_found_however_tokens_cut_them(pieces: list[str], places: list[int], start: Start) -> None:
    tokens = cut("".join(pieces), places)
    vocabulary = list(enumerate(dict.fromkeys(tokens)))
    form = ThoughtForm(
        *make_markers(["<think>"], vocabulary, only_blanks_before=True),
        make_markers(["</think>"], vocabulary),
        blanks=tuple(token_id for token_id, data in vocabulary if not data.strip()),
    )
    thought = Thought(form, start == "reasoning")
    ids = {data: token_id for token_id, data in vocabulary}
    for data in tokens:
        thought.push(ids[data])
    assert thought.num_tokens == inside(tokens, start)


@pytest.mark.slow
@examples(20)
@given(PIECES, st.integers(0, 12))
def test_the_parser_ends_reasoning_where_the_budget_does(pieces: list[str], most: int) -> None:
    """Whatever the model says, the parser sees the forced end, and the thought has no more tokens than it may."""
    thoughts = Thoughts(TOKENIZER, THINKER, ServeConfig(reasoning_budget=most, reasoning_budget_message="Enough. "))
    budget = thoughts.budget(request(), "reasoning")
    assert budget is not None
    followed, answer = BudgetedThought(budget), bytearray()
    for byte in "".join(pieces).encode() + b"z" * 20:
        while due := followed.due:
            followed.push(due[0])
            answer.append(due[0])
        followed.push(byte)
        answer.append(byte)
    parser = OutputParser(reasoning=REASONING["think"], calls=None, start="reasoning", new_id=CallIds("", 0))
    parsed, rest = parser.push(answer.decode("utf-8", "replace")), parser.finish()
    assert (parsed.text + rest.text).endswith("z")
    told = parsed.reasoning + rest.reasoning
    counted = thoughts.follow(request(), "reasoning")
    assert counted is not None
    for byte in answer:
        counted.push(byte)
    assert counted.num_tokens <= most + len("Enough. ")
    assert counted.num_tokens <= most or "Enough." in told


def budget_of(shape: OutputShape = THINKER, start: Start = "answer", **settings: object) -> ThoughtBudget | None:
    asked = settings.pop("asked", ThoughtOptions())
    return Thoughts(TOKENIZER, shape, ServeConfig(**settings)).budget(request(thought=asked), start)


def test_a_request_goes_before_its_effort_and_that_before_the_service() -> None:
    settings = {"reasoning_budget": 7, "reasoning_effort_budgets": '{"low": 3, "high": -1}'}
    cases = {
        ThoughtOptions(): 7,
        ThoughtOptions(effort="medium"): 7,
        ThoughtOptions(effort="low"): 3,
        ThoughtOptions(effort="high"): None,
        ThoughtOptions(0, "low"): 0,
        ThoughtOptions(-1, "low"): None,
    }
    for asked, expected in cases.items():
        budget = budget_of(asked=asked, **settings)
        assert (budget.max_tokens if budget else None) == expected, asked
    assert budget_of() is None


def test_the_message_comes_once_before_the_end() -> None:
    budget = budget_of(reasoning_budget=1, reasoning_budget_message="So:\n")
    assert budget is not None
    assert bytes(budget.closing) == b"So:\n</think>"
    assert bytes(budget.closing_again) == b"</think>"
    harmony = budget_of(HARMONY, reasoning_budget=1)
    # One of the special tokens of this tokenizer is harmony's.
    assert harmony is not None
    assert harmony.closing == (END,)


def test_there_is_no_budget_where_there_is_no_thought() -> None:
    asked = ThoughtOptions(5)
    assert budget_of(OutputShape("hermes", "none"), asked=asked) is None
    assert budget_of(THINKER, "text", asked=asked) is None
    thoughts = Thoughts(TOKENIZER, THINKER, ServeConfig(reasoning_budget=5))
    assert thoughts.budget(request("a text"), "answer") is None


def test_settings_of_budgets() -> None:
    given = {
        "reasoning_budget": "0",
        "reasoning_budget_message": "\nEnough.\n",
        "reasoning_effort_budgets": '{"low":1}',
    }
    config = load_config(given, {})
    assert (config.reasoning_budget, config.reasoning_budget_message) == (0, "\nEnough.\n")
    for name, bad in {
        "reasoning_budget": "-2",
        "reasoning_budget_message": " ",
        "reasoning_effort_budgets": '{"lots": 1}',
    }.items():
        with pytest.raises(ConfigError):
            load_config({name: bad}, {})
    for bad in ("[]", "{", '{"low": "1"}', '{"low": true}', '{"low": -2}'):
        with pytest.raises(ConfigError):
            load_config({"reasoning_effort_budgets": bad}, {})
