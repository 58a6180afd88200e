"""The chat dialect: its messages in, its answers out, as the openai package reads them."""

import json
from typing import Any

import pytest

from moeserve.frontend.dialects import chat
from moeserve.frontend.dialects.internal import (
    CacheOptions,
    ChatPrompt,
    Delta,
    GenerateRequest,
    ModelFacts,
    TokenText,
    Usage,
)
from moeserve.frontend.errors import ApiError
from moeserve.frontend.http import DONE
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import TokenLogprobs
from tests.support.openai_types import openai_type
from tests.support.tiny_model import byte_tokenizer
from tests.support.written import answer_of

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
TOKENIZER = TextTokenizer(byte_tokenizer())
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)
TOKEN = TokenText(ord("a"), 0, TokenLogprobs(-0.5, ((ord("a"), -0.5), (0xC3, float("-inf")))))


def parse(**changes: Any) -> GenerateRequest:
    base = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    return chat.parse(json.dumps({**base, **changes}).encode(), FACTS)


def prompt_of(request: GenerateRequest) -> ChatPrompt:
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def refuse(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**changes)
    return caught.value


def formatter(**changes: Any) -> chat.ChatFormatter:
    return chat.ChatFormatter("chatcmpl-1", 17, parse(**changes), TOKENIZER, "fp_x")


def event(data: bytes) -> dict[str, Any]:
    assert data.startswith(b"data: ")
    assert data.endswith(b"}\n\n")
    assert data.count(b"\n") == 2
    chunk: dict[str, Any] = json.loads(data[6:])
    openai_type("chat.ChatCompletionChunk").validate_python(chunk)
    return chunk


def marked(role: str, *breakpoints: Any) -> dict[str, Any]:
    """Return a message with one part for each mark."""
    parts = [{"type": "text", "text": "a", "prompt_cache_breakpoint": mark} for mark in breakpoints]
    return {"role": role, "content": parts}


def test_marks_of_content_parts_are_breakpoints_at_the_ends_of_their_messages() -> None:
    explicit = {"mode": "explicit"}
    messages = [
        marked("system", explicit),
        marked("user", None),
        marked("user", {**explicit, "ttl": "12h"}, explicit),
        {"role": "user", "content": "b"},
    ]
    request = parse(messages=messages)
    assert request.cache == CacheOptions(breakpoints=((1, 1800), (3, 43_200)))
    assert prompt_of(request).messages[0] == {"role": "system", "content": "a"}
    options = {"mode": "explicit", "ttl": "2h"}
    request = parse(messages=messages[:1], prompt_cache_options=options, cache_report=True)
    assert request.cache == CacheOptions(breakpoints=((1, 7200),), report=True)
    assert parse(messages=messages[:1], prompt_cache_options={"ttl": "2h"}).cache.seconds == 7200


@pytest.mark.parametrize(
    ("mark", "end"),
    [({"mode": "implicit"}, ".mode"), ({"mode": "explicit", "ttl": "2d"}, ".ttl"), ({}, ""), (True, "")],
)
def test_a_wrong_mark_is_named(mark: Any, end: str) -> None:
    error = refuse(messages=[marked("user", mark)])
    assert error.status == 400
    assert str(error.param).replace("[...]", "[0]").endswith(f"content[0].prompt_cache_breakpoint{end}")


def test_messages_reach_the_template_as_they_are() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant"},
        {"role": "system", "content": "in the middle"},
        {"role": "developer", "content": ""},
    ]
    assert prompt_of(parse(messages=messages)).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "in the middle"},
        {"role": "developer", "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
    ],
)
def test_bad_messages_are_refused_by_name(messages: Any, param: str) -> None:
    error = refuse(messages=messages)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("message", "param", "named"),
    [
        (
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "shell"}]},
            "messages[0].tool_calls[0].type",
            "messages[0].tool_calls[0].type=shell",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type=image_url",
        ),
    ],
)
def test_messages_of_what_is_not_served_are_refused(message: dict[str, Any], param: str, named: str) -> None:
    error = refuse(messages=[message])
    assert (error.code, error.param) == ("unsupported_parameter", param)
    assert named in error.message


def test_both_names_of_the_limit_are_known() -> None:
    assert parse(max_tokens=5).max_tokens == 5
    assert parse(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert refuse(max_completion_tokens=0).param == "max_completion_tokens"


def test_log_probabilities_are_asked_for_first_and_bounded() -> None:
    assert parse(logprobs=True).sampling.logprobs == 0
    assert parse(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert refuse(logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refuse(logprobs=True, top_logprobs=-1).param == "top_logprobs"
    assert refuse(top_logprobs=2).param == "top_logprobs"
    assert refuse(logprobs=1).param == "logprobs"


def test_template_variables_have_any_name_that_is_free() -> None:
    asked = {"enable_thinking": False, "budget": 1.5, "style": "terse", "nothing": None}
    prompt = prompt_of(parse(chat_template_kwargs=asked, reasoning_effort="low"))
    assert prompt.variables == {"enable_thinking": False, "budget": 1.5, "style": "terse", "reasoning_effort": "low"}
    assert prompt_of(parse(reasoning_effort="none")).variables["enable_thinking"] is False
    for name in ("messages", "tools", "chat_template", "not a name"):
        assert refuse(chat_template_kwargs={name: 1}).param == f"chat_template_kwargs.{name}"
    assert refuse(chat_template_kwargs={"thinking": [1]}).param == "chat_template_kwargs.thinking"
    assert refuse(chat_template_kwargs={"style": "x" * 70_000}).param == "chat_template_kwargs.style"
    assert refuse(chat_template_kwargs={f"v{n}": n for n in range(65)}).param == "chat_template_kwargs"
    assert refuse(reasoning_effort="much").param == "reasoning_effort"


def test_the_generation_prompt_can_be_left_out() -> None:
    assert prompt_of(parse()).add_generation_prompt is True
    assert prompt_of(parse(add_generation_prompt=False)).add_generation_prompt is False


def test_a_whole_answer_has_the_fields_of_openais_chat() -> None:
    body = answer_of(formatter(logprobs=True).complete([Delta(0, 'é"', [TOKEN], "stop")], USAGE))
    openai_type("chat.ChatCompletion").validate_python(body)
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": 'é"', "refusal": None, "annotations": []}
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
                ],
            }
        ],
        "refusal": None,
    }
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_a_whole_answer_without_logprobs_says_null() -> None:
    assert answer_of(formatter().complete([Delta(0, "a", [], "length")], USAGE))["choices"][0]["logprobs"] is None


def test_a_stream_begins_with_the_role_and_ends_with_reason_and_usage() -> None:
    writer = formatter(stream=True, stream_options={"include_usage": True})
    start = event(writer.start(1, USAGE))
    assert start["choices"] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert start["usage"] is None
    assert event(writer.delta(Delta(1, "new\nline\u2028 é"), USAGE))["choices"][0]["delta"] == {
        "content": "new\nline\u2028 é"
    }
    end = event(writer.delta(Delta(1, "", [], "length"), USAGE))["choices"][0]
    assert (end["delta"], end["finish_reason"]) == ({}, "length")
    last = event(writer.end(USAGE).removesuffix(DONE))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)


def test_usage_goes_with_every_event_where_the_client_asks_for_that() -> None:
    writer = formatter(stream=True, stream_options={"continuous_usage_stats": True})
    first, second = event(writer.start(0, USAGE))["usage"], event(writer.start(1, USAGE))["usage"]
    assert (first["prompt_tokens"], first["completion_tokens"], first["total_tokens"]) == (5, 0, 5)
    assert second["completion_tokens"] == 2
    assert event(writer.delta(Delta(0, "a"), USAGE))["usage"]["completion_tokens"] == 2


def test_a_stream_without_usage_does_not_mention_it() -> None:
    assert "usage" not in event(formatter().delta(Delta(0, "a"), USAGE))


def test_events_carry_log_probabilities_of_their_tokens() -> None:
    chunk = event(formatter(logprobs=True).delta(Delta(0, "a", [TOKEN]), USAGE))
    assert chunk["choices"][0]["logprobs"]["content"][0]["token"] == "a"


def test_a_prediction_is_a_text_or_parts_of_text() -> None:
    assert parse().prediction == ""
    assert parse(prediction={"type": "content", "content": "def f():"}).prediction == "def f():"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(prediction={"type": "content", "content": parts}).prediction == "a\nb"
    assert refuse(prediction={"type": "other", "content": "a"}).param == "prediction.type"
    assert refuse(prediction={"type": "content"}).param == "prediction.content"
    image = [{"type": "image_url", "text": "a"}]
    assert refuse(prediction={"type": "content", "content": image}).param == "prediction.content[0].type"


def test_accepted_tokens_of_a_prediction_are_never_more_than_those_of_the_answer() -> None:
    usage = Usage(completion_tokens=7, accepted_prediction_tokens=9, rejected_prediction_tokens=3)
    body = answer_of(formatter().complete([Delta(0, "a", [], "stop")], usage))
    details = body["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (7, 3)
