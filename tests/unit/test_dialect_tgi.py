"""The dialects of TGI and of Triton: requests, and what their clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moeserve.frontend.dialects import tgi
from moeserve.frontend.dialects.internal import Delta, Formatter, GenerateRequest, ModelFacts, TokenText, Usage
from moeserve.frontend.errors import ApiError
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import TokenLogprobs
from tests.support.refusals import refused
from tests.support.tiny_model import byte_tokenizer
from tests.support.written import answer_of

FACTS = ModelFacts(("tiny", "alias"), 512, 260, (259,), {"temperature": 0.6}, 20)
USAGE = Usage(prompt_tokens=9, completion_tokens=2)


def parse(kind: str, **fields: Any) -> GenerateRequest:
    text = {"inputs": "hi"} if kind.startswith("tgi") else {"text_input": "hi"}
    request: GenerateRequest = getattr(tgi, f"parse_{kind}")(json.dumps({**text, **fields}).encode(), FACTS)
    return request


def formatter(kind: type[Formatter], request: GenerateRequest) -> Any:
    return kind("1", 17, request, TextTokenizer(byte_tokenizer()), "fp")  # type: ignore[call-arg]


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix(b"data:")) for event in data.split(b"\n\n") if event]


def token(text: str, logprob: float) -> TokenText:
    return TokenText(ord(text), 0, TokenLogprobs(logprob, ()))


def test_tgi_is_greedy_unless_it_is_asked_for_samples() -> None:
    assert parse("tgi").sampling.temperature == 0
    assert parse("tgi", parameters=None).max_tokens == 100
    assert parse("tgi", parameters={"do_sample": True}).sampling.temperature == 0.6
    asked = parse("tgi", parameters={"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_new_tokens": 3, "seed": 1})
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (asked.max_tokens, asked.seed, asked.stream, asked.model) == (3, 1, False, "tiny")


@pytest.mark.parametrize("kind", ["tgi", "triton"])
def test_a_stream_is_asked_for_by_the_path_or_by_the_body(kind: str) -> None:
    assert parse(f"{kind}_stream").stream
    assert parse(kind, stream=True).stream
    assert not parse(kind).stream


@pytest.mark.parametrize(
    ("name", "value"),
    [("best_of", 2), ("typical_p", 0.5), ("watermark", True), ("adapter_id", "a"), ("temperature", 0)],
)
def test_parameters_of_tgi_that_would_change_the_answer_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=name) as caught:
        parse("tgi", parameters={name: value})
    assert caught.value.status == 400


def test_a_grammar_of_tgi_holds_the_answer() -> None:
    schema = {"type": "object", "properties": {}}
    form = parse("tgi", parameters={"grammar": {"type": "json", "value": schema}}).output_format
    assert form is not None
    assert (form.kind, form.value) == ("json_schema", schema)
    form = parse("tgi", parameters={"grammar": {"type": "regex", "value": "a+"}}).output_format
    assert form is not None
    assert (form.kind, form.value) == ("regex", "a+")
    with refused("invalid_value", "parameters.grammar"):
        parse("tgi", parameters={"grammar": {"type": "xml", "value": "a"}})


def test_a_whole_answer_of_tgi_has_details_only_where_they_are_asked_for() -> None:
    choice = Delta(0, "ab", [token("a", -0.5), token("b", -1.0)], "length")
    asked = parse("tgi", parameters={"details": True, "return_full_text": True})
    answer = answer_of(formatter(tgi.TgiFormatter, asked).complete([choice], USAGE))
    assert answer["generated_text"] == "hiab"
    assert (answer["details"]["finish_reason"], answer["details"]["generated_tokens"]) == ("length", 2)
    assert [(one["id"], one["text"], one["logprob"]) for one in answer["details"]["tokens"]] == [
        (97, "a", -0.5),
        (98, "b", -1.0),
    ]
    plain = answer_of(formatter(tgi.TgiFormatter, parse("tgi")).complete([Delta(0, "ab")], USAGE))
    assert plain == {"generated_text": "ab"}


def test_a_stream_of_tgi_has_an_event_for_each_token_and_the_text_in_the_last() -> None:
    writer = formatter(tgi.TgiFormatter, parse("tgi_stream"))
    first = events(writer.delta(Delta(0, "ab", [token("a", -0.5), token("b", -1.0)]), USAGE))
    assert [(one["index"], one["token"]["text"], one["generated_text"]) for one in first] == [
        (1, "", None),
        (2, "ab", None),
    ]
    (last,) = events(writer.delta(Delta(0, "c", [token("c", -2.0)], "stop", matched_stop="d"), USAGE))
    assert (last["index"], last["token"]["text"], last["generated_text"]) == (3, "c", "abc")
    assert last["details"] == {"finish_reason": "stop_sequence", "generated_tokens": 2, "input_length": 9}
    (end,) = events(writer.delta(Delta(0, "", [], "stop"), USAGE))
    assert (end["token"]["special"], end["generated_text"]) == (True, "abc")


def test_parameters_of_triton_lie_beside_the_text_or_in_an_object() -> None:
    for fields in ({"max_tokens": 5, "temperature": 0}, {"parameters": {"max_tokens": 5, "temperature": 0}}):
        request = parse("triton", stop_words=["x"], **fields)
        assert (request.max_tokens, request.sampling.temperature, request.stop) == (5, 0, ("x",))


def test_answers_of_triton_name_the_model_and_repeat_the_input_where_they_should() -> None:
    writer = formatter(tgi.TritonFormatter, parse("triton", exclude_input_in_output=False))
    whole = answer_of(writer.complete([Delta(0, "ab")], USAGE))
    assert whole == {"model_name": "tiny", "model_version": "1", "text_output": "hiab"}
    assert [one["text_output"] for one in events(writer.delta(Delta(0, "a"), USAGE))] == ["a"]
    assert writer.delta(Delta(0, "", finish_reason="stop"), USAGE) == b""


@pytest.mark.parametrize(("kind", "field"), [("tgi", "inputs"), ("triton", "text_input")])
def test_a_text_is_required(kind: str, field: str) -> None:
    with refused("invalid_value", field):
        parse(kind, **{field: ""})


@pytest.mark.parametrize(("status", "kind"), [(400, "validation"), (503, "overloaded"), (500, "generation")])
def test_an_error_has_the_kind_that_tgi_gives_it(status: int, kind: str) -> None:
    assert json.loads(tgi.tgi_error(ApiError(status, "no"), "")) == {"error": "no", "error_type": kind}


def test_a_key_that_is_refused_is_no_fault_of_the_body() -> None:
    error = ApiError(401, "no", type="authentication_error")
    assert json.loads(tgi.tgi_error(error, ""))["error_type"] == "authentication_error"
