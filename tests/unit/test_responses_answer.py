"""Answers of the Responses dialect: objects and events, as the openai package reads them."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from moeserve.frontend.dialects import responses
from moeserve.frontend.dialects.internal import Delta, ModelFacts, TokenText, ToolCallPart, Usage
from moeserve.frontend.dialects.responses_answer import ResponsesFormatter
from moeserve.frontend.dialects.responses_items import Earlier
from moeserve.frontend.errors import internal_error
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import TokenLogprobs
from tests.support.openai_types import openai_type
from tests.support.tiny_model import byte_tokenizer
from tests.support.written import answer_of

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
TOKENIZER = TextTokenizer(byte_tokenizer())
USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=4, reasoning_tokens=2)
TOOLS = [
    {"type": "function", "name": "f"},
    {"type": "namespace", "name": "ns", "description": "", "tools": [{"type": "function", "name": "g"}]},
    {"type": "custom", "name": "sql"},
]


def formatter(**changes: Any) -> ResponsesFormatter:
    body = json.dumps({"model": "tiny", "input": "hi", "tools": TOOLS, **changes}).encode()
    request = responses.parse(body, FACTS, Earlier())
    return ResponsesFormatter("resp_ab", 17, request, TOKENIZER, "fp_x")


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the events of some bytes, each validated."""
    events = []
    assert data.endswith(b"\n\n")
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        openai_type("responses.ResponseStreamEvent").validate_python(event)
        events.append(event)
    return events


def stream(deltas: Sequence[Delta], **changes: Any) -> list[dict[str, Any]]:
    """Return the events of a whole stream."""
    writer = formatter(**changes)
    data = writer.start(0, USAGE) + b"".join(writer.delta(delta, USAGE) for delta in deltas) + writer.end(USAGE)
    return events_of(data)


def whole(deltas: Sequence[Delta], **changes: Any) -> dict[str, Any]:
    """Return the response of an answer that is sent in one piece."""
    choice = Delta(0)
    for delta in deltas:
        choice.append(delta)
    response: dict[str, Any] = answer_of(formatter(**changes).complete([choice], USAGE))
    openai_type("responses.Response").validate_python(response)
    return response


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


TEXT = [Delta(0, "Hel"), Delta(0, "lo"), Delta(0, finish_reason="stop")]
EVERYTHING = [
    Delta(0, reasoning="let me "),
    Delta(0, reasoning="think", text="I look"),
    Delta(0, calls=[ToolCallPart(0, "", "call_1", "f")]),
    Delta(0, calls=[ToolCallPart(0, '{"a"')]),
    Delta(0, calls=[ToolCallPart(0, ":1}"), ToolCallPart(1, "{}", "call_2", "ns__g")]),
    Delta(0, calls=[ToolCallPart(2, '{"input":"SEL', "call_3", "sql")]),
    Delta(0, calls=[ToolCallPart(2, 'ECT \\"x\\""}')]),
    Delta(0, finish_reason="tool_calls"),
]


def test_a_text_comes_as_a_message_with_one_part() -> None:
    events = stream(TEXT)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[0]["response"]["status"] == "in_progress"
    assert events[2]["item"]["status"] == "in_progress"
    places = [(event["item_id"], event["output_index"], event["content_index"]) for event in events[3:8]]
    assert set(places) == {(events[2]["item"]["id"], 0, 0)}
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert all(event["logprobs"] == [] for event in events[4:7])
    assert (events[6]["text"], events[7]["part"]["text"]) == ("Hello", "Hello")
    assert events[-1]["response"]["output"] == [events[8]["item"]]


def test_a_whole_answer_has_every_field_of_a_response() -> None:
    response = whole(TEXT, metadata={"a": "b"})
    (message,) = response["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    names = (
        "id object created_at completed_at status incomplete_details model previous_response_id instructions output "
        "error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty "
        "top_logprobs temperature reasoning usage max_output_tokens max_tool_calls store background service_tier "
        "metadata safety_identifier prompt_cache_key"
    )
    assert set(names.split()) <= response.keys()


def test_reasoning_text_and_calls_are_items_in_that_order() -> None:
    output = whole(EVERYTHING)["output"]
    assert [(item["type"], item["id"]) for item in output] == [
        ("reasoning", "rs_ab00"),
        ("message", "msg_ab01"),
        ("function_call", "fc_ab02"),
        ("function_call", "fc_ab03"),
        ("custom_tool_call", "ctc_ab04"),
    ]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "let me think"}]
    assert (output[2]["name"], output[2]["call_id"], output[2]["arguments"]) == ("f", "call_1", '{"a":1}')
    assert (output[3]["name"], output[3]["namespace"]) == ("g", "ns")
    assert (output[4]["name"], output[4]["input"]) == ("sql", 'SELECT "x"')


@pytest.mark.parametrize("deltas", [TEXT, EVERYTHING, [Delta(0, finish_reason="stop")]])
def test_a_stream_ends_in_the_response_that_is_sent_whole(deltas: list[Delta]) -> None:
    events = stream(deltas)
    last = events[-1]["response"]
    assert {**last, "completed_at": 0} == {**whole(deltas), "completed_at": 0}
    assert [event["item"] for event in of_kind(events, "response.output_item.done")] == last["output"]
    added = of_kind(events, "response.output_item.added")
    assert [event["output_index"] for event in added] == list(range(len(last["output"])))


def test_arguments_come_in_pieces_and_once_more_complete() -> None:
    events = stream(EVERYTHING)
    deltas = of_kind(events, "response.function_call_arguments.delta")
    assert [(event["item_id"], event["delta"]) for event in deltas] == [
        ("fc_ab02", '{"a"'),
        ("fc_ab02", ":1}"),
        ("fc_ab03", "{}"),
    ]
    done = of_kind(events, "response.function_call_arguments.done")
    assert [(event["arguments"], event["name"]) for event in done] == [('{"a":1}', "f"), ("{}", "g")]
    assert [event["item"]["arguments"] for event in of_kind(events, "response.output_item.added")[2:4]] == ["", ""]
    assert [event["input"] for event in of_kind(events, "response.custom_tool_call_input.done")] == ['SELECT "x"']


def test_reasoning_has_events_of_its_own() -> None:
    events = stream([Delta(0, reasoning="a"), Delta(0, reasoning="b"), *TEXT])
    assert [event["delta"] for event in of_kind(events, "response.reasoning_text.delta")] == ["a", "b"]
    (done,) = of_kind(events, "response.reasoning_text.done")
    assert (done["text"], done["output_index"]) == ("ab", 0)
    assert of_kind(events, "response.content_part.done")[0]["part"] == {"type": "reasoning_text", "text": "ab"}


def test_sealed_reasoning_comes_back_as_it_was() -> None:
    reasoning = whole([Delta(0, reasoning="hm ü"), *TEXT], include=["reasoning.encrypted_content"])["output"][0]
    without_content = {name: value for name, value in reasoning.items() if name != "content"}
    body = json.dumps({"model": "tiny", "input": [without_content, {"role": "assistant", "content": "x"}]}).encode()
    (prompt,) = responses.parse(body, FACTS, Earlier()).prompts
    assert prompt.messages == [{"role": "assistant", "content": "x", "reasoning_content": "hm ü"}]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("deltas", "types"),
    [
        ([Delta(0, "Hel"), Delta(0, finish_reason="length")], ["message"]),
        ([Delta(0, reasoning="hm"), Delta(0, finish_reason="length")], ["reasoning"]),
        ([Delta(0, calls=[ToolCallPart(0, "{", "c", "f")]), Delta(0, finish_reason="length")], ["function_call"]),
        ([Delta(0, finish_reason="length")], ["message"]),
    ],
)
def test_an_answer_cut_by_its_length_is_incomplete_and_so_is_its_last_item(
    deltas: list[Delta], types: list[str]
) -> None:
    events = stream(deltas, max_output_tokens=7)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(item["type"], item["status"]) for item in response["output"]] == [(kind, "incomplete") for kind in types]


def test_a_complete_answer_of_reasoning_alone_has_an_empty_message() -> None:
    output = whole([Delta(0, reasoning="hm"), Delta(0, finish_reason="stop")])["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[1]["content"][0]["text"] == ""


def test_log_probabilities_go_with_their_text() -> None:
    tokens = [
        TokenText(ord(c), i, TokenLogprobs(-0.5, ((ord(c), -0.5), (0xC3, float("-inf"))))) for i, c in enumerate("abc")
    ]
    deltas = [
        Delta(0, "a", tokens=[tokens[0]]),
        Delta(0, "", tokens=[tokens[1]]),
        Delta(0, "b", finish_reason="stop", tokens=[tokens[2]]),
    ]
    events = stream(deltas, top_logprobs=2)
    streamed = [
        entry["token"] for event in of_kind(events, "response.output_text.delta") for entry in event["logprobs"]
    ]
    assert streamed == ["a", "b", "c"]
    (done,) = of_kind(events, "response.output_text.done")
    assert [entry["top_logprobs"][1]["logprob"] for entry in done["logprobs"]] == [-9999.0] * 3
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == done["logprobs"]
    assert whole(deltas, top_logprobs=2)["output"] == events[-1]["response"]["output"]


@pytest.mark.parametrize("started", [False, True])
def test_an_error_ends_the_stream_as_a_failed_response(started: bool) -> None:
    writer = formatter()
    data = b""
    if started:
        data = writer.start(0, USAGE) + writer.delta(Delta(0, "x"), USAGE)
    events = events_of(data + writer.error(internal_error("broken")))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "broken"}


def test_a_ping_is_a_comment() -> None:
    assert formatter().ping().startswith(b":")


END = Delta(0, "x", finish_reason="stop")


def test_a_complete_response_is_to_be_kept_with_its_input() -> None:
    writer = formatter()
    answer = answer_of(writer.complete([END], USAGE))
    assert writer.kept is not None
    assert json.loads(writer.kept.response) == answer
    assert json.loads(writer.kept.input) == [{"type": "message", "role": "user", "content": "hi"}]
    assert answer["store"] is True
    streaming = formatter()
    assert streaming.start(0, USAGE) + streaming.delta(END, USAGE)
    assert streaming.kept is None
    streaming.end(USAGE)
    assert streaming.kept is not None


def test_nothing_is_kept_that_is_not_to_be_or_has_failed() -> None:
    writer = formatter(store=False)
    assert answer_of(writer.complete([END], USAGE))["store"] is False
    assert writer.kept is None
    failed = formatter()
    failed.error(internal_error())
    assert failed.kept is None


def test_a_response_for_which_there_is_no_room_says_that_it_is_not_stored() -> None:
    writer = formatter()
    answer = answer_of(writer.complete([END], USAGE))
    assert json.loads(writer.unkept()) == answer | {"store": False}
    streaming = formatter()
    begin = streaming.start(0, USAGE) + streaming.delta(END, USAGE)
    events = events_of(begin + streaming.end(USAGE))
    last = events_of(streaming.unkept())
    assert [event["sequence_number"] for event in last] == [events[-1]["sequence_number"]]
    assert last[0]["response"] == events[-1]["response"] | {"store": False}
