"""The Messages dialect's answers: content blocks, named events that say the same, ends, counts and errors."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.dialects.internal import CacheOptions, Delta, GenerateRequest, ToolCallPart, Usage
from moeserve.frontend.dialects.messages import MessageFormatter, error_body
from moeserve.frontend.errors import ApiError, context_length_exceeded, internal_error, unavailable, unknown_model
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import SamplingParams
from tests.support.tiny_model import byte_tokenizer
from tests.support.written import answer_of

TOKENIZER = TextTokenizer(byte_tokenizer())
USAGE = Usage(prompt_tokens=9, completion_tokens=7, cached_tokens=4, reasoning_tokens=2)
DIRECT = {"type": "direct"}


def formatter(seconds: float | None = None, **repeated: Any) -> MessageFormatter:
    request = GenerateRequest(
        model="m",
        prompts=[""],
        sampling=SamplingParams(max_tokens=0),
        max_tokens=7,
        seed=None,
        cache=CacheOptions(seconds),
        repeated=msgspec.json.encode(repeated),
    )
    return MessageFormatter("msg_1", 17, request, TOKENIZER, "fp")


def call(place: int, arguments: str = "", call_id: str = "", name: str = "") -> Delta:
    return Delta(0, calls=[ToolCallPart(place, arguments, call_id, name)])


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose names are those in their data."""
    found = []
    assert data.endswith(b"\n\n")
    for event in data[:-2].split(b"\n\n"):
        name, _, rest = event.partition(b"\n")
        found.append(json.loads(rest.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def streamed(*deltas: Delta, finish: str = "stop", **repeated: Any) -> list[dict[str, Any]]:
    writer = formatter(**repeated)
    parts = [*deltas, Delta(0, finish_reason=finish)]
    return events(writer.start(0, USAGE) + b"".join(writer.delta(part, USAGE) for part in parts) + writer.end(USAGE))


def whole(*deltas: Delta, finish: str = "stop", **repeated: Any) -> dict[str, Any]:
    choice = Delta(0)
    for delta in (*deltas, Delta(0, finish_reason=finish)):
        choice.append(delta)
    message: dict[str, Any] = answer_of(formatter(**repeated).complete([choice], USAGE))
    return message


def put_together(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events; the order of the events is checked on the way."""
    first, *rest, delta, stop = stream
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    pieces: list[str] = []
    is_open = False
    for event in rest:
        assert event["index"] == len(message["content"]) - is_open
        match event["type"]:
            case "content_block_start":
                assert not is_open
                is_open = True
                message["content"].append(event["content_block"])
                pieces = []
            case "content_block_delta":
                assert is_open
                kind = event["delta"]["type"]
                block = message["content"][-1]
                field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(kind)
                if field is None:
                    pieces.append(event["delta"]["partial_json"])
                else:
                    block[field] += event["delta"][field]
            case "content_block_stop":
                assert is_open
                is_open = False
                if pieces:
                    message["content"][-1]["input"] = json.loads("".join(pieces))
    assert not is_open
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}


def test_a_whole_message() -> None:
    message = whole(
        Delta(0, reasoning="hm"),
        Delta(0, "Hi"),
        call(0, '{"city":', "call_1", "weather"),
        call(0, ' "Paris"}'),
        call(1, "", "abc123xyz", "now"),
        finish="tool_calls",
    )
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Hi", "citations": None},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}, "caller": DIRECT},
            {"type": "tool_use", "id": "abc123xyz", "name": "now", "input": {}, "caller": DIRECT},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "cache_creation": None,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 2},
            "server_tool_use": None,
            "inference_geo": None,
            "service_tier": "standard",
        },
    }


def test_the_events_of_a_stream() -> None:
    stream = streamed(Delta(0, "a"), Delta(0, "b"), call(0, "{}", "call_1", "f"), finish="tool_calls")
    assert [event["type"] for event in stream] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert stream[0]["message"]["content"] == []
    assert stream[0]["message"]["stop_reason"] is None
    assert stream[0]["message"]["usage"]["input_tokens"] == 5
    assert stream[2] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    assert stream[5]["content_block"] == {
        "type": "tool_use",
        "id": "toolu_1",
        "name": "f",
        "input": {},
        "caller": DIRECT,
    }
    assert stream[6]["delta"] == {"type": "input_json_delta", "partial_json": "{}"}
    assert stream[-2]["delta"]["stop_reason"] == "tool_use"


def test_text_after_a_call_begins_a_block_of_its_own() -> None:
    late = Delta(0, "then", calls=[ToolCallPart(0, "1}"), ToolCallPart(1, "{}", "call_2", "g")])
    message = put_together(streamed(call(0, '{"a":', "call_1", "f"), late))
    kinds = [(block["type"], block.get("input", block.get("text"))) for block in message["content"]]
    assert kinds == [("tool_use", {"a": 1}), ("text", "then"), ("tool_use", {})]


PIECES = st.lists(st.text(' \n\u2028"\\aé', max_size=3), max_size=4)
CALLS = st.lists(st.sampled_from(['{"a": 1}', "{}", ' {"b": ["\\n"]}']), max_size=3)


@given(PIECES, PIECES, CALLS, st.integers(1, 4), st.booleans())
def test_a_stream_says_the_same_as_the_whole(
    reasoning: list[str], text: list[str], calls: list[str], cut: int, shows: bool
) -> None:
    parts = [Delta(0, reasoning=piece) for piece in reasoning] + [Delta(0, piece) for piece in text]
    for place, arguments in enumerate(calls):
        parts.append(call(place, arguments[:cut], f"call_{place}", "f"))
        parts.append(call(place, arguments[cut:]))
    assert put_together(streamed(*parts, shows_thinking=shows)) == whole(*parts, shows_thinking=shows)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_answer_without_a_word_has_one_empty_text(text: str) -> None:
    assert whole(Delta(0, text))["content"] == [{"type": "text", "text": text, "citations": None}]


def test_thinking_that_the_client_does_not_want_to_see_is_an_empty_block() -> None:
    message = whole(Delta(0, reasoning="hm"), Delta(0, "x"), shows_thinking=False)
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": ""}


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "null", "x"])
def test_arguments_that_are_no_object_are_kept_in_one(arguments: str) -> None:
    (block,) = whole(call(0, arguments, "call_1", "f"), finish="length")["content"]
    assert block["input"] == {"INVALID_JSON": arguments}


@pytest.mark.parametrize(
    ("end", "tokens", "reason", "sequence"),
    [
        (Delta(0, finish_reason="stop"), 3, "end_turn", None),
        (Delta(0, finish_reason="stop", matched_stop="END"), 3, "stop_sequence", "END"),
        (Delta(0, finish_reason="length"), 7, "max_tokens", None),
        (Delta(0, finish_reason="length"), 6, "model_context_window_exceeded", None),
        (Delta(0, finish_reason="tool_calls"), 3, "tool_use", None),
    ],
)
def test_why_an_answer_ended(end: Delta, tokens: int, reason: str, sequence: str | None) -> None:
    usage = Usage(1, tokens)
    writer = formatter()
    last = events(writer.start(0, usage) + writer.delta(end, usage) + writer.end(usage))[-2]["delta"]
    choice = Delta(0)
    choice.append(end)
    message = answer_of(formatter().complete([choice], usage))
    for said in (last, message):
        assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(("marked", "plain", "written"), [(False, 5, 0), (True, 0, 5)])
def test_the_three_kinds_of_input_tokens_add_up_to_the_prompt(marked: bool, plain: int, written: int) -> None:
    usage = whole(Delta(0, "a"), seconds=300 if marked else None)["usage"]
    kinds = [usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")]
    assert kinds == [plain, written, 4]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiError(400, "x"), "invalid_request_error"),
        (ApiError(401, "x"), "authentication_error"),
        (ApiError(403, "x"), "permission_error"),
        (unknown_model("x", ["m"]), "not_found_error"),
        (ApiError(405, "x"), "invalid_request_error"),
        (ApiError(413, "x"), "request_too_large"),
        (ApiError(429, "x"), "rate_limit_error"),
        (internal_error(), "api_error"),
        (unavailable("x", "y"), "overloaded_error"),
    ],
)
def test_errors_have_anthropics_shape(error: ApiError, kind: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": "r"}
    assert json.loads(error_body(error, "r")) == body
    assert events(formatter().error(error)) == [{**body, "request_id": None}]


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know() -> None:
    message = json.loads(error_body(context_length_exceeded(8, 9, 1), "r"))["error"]["message"]
    assert message.startswith("prompt is too long: ")


def test_a_ping_is_an_event() -> None:
    assert events(formatter().ping()) == [{"type": "ping"}]
