"""What both OpenAI dialects share: bounds, defaults, refusals, and errors that name the field."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend import limits
from moeserve.frontend.dialects import chat, completions
from moeserve.frontend.dialects.bodies import BUDGETS, UNSUPPORTED
from moeserve.frontend.dialects.formats import FormatFields
from moeserve.frontend.dialects.internal import GenerateRequest, ModelFacts, ThoughtOptions
from moeserve.frontend.errors import ApiError
from tests.support.refusals import refused

FACTS = ModelFacts(
    names=("tiny", "alias"),
    max_model_len=512,
    vocab_size=260,
    eos_token_ids=(259,),
    default_sampling={},
    max_logprobs=20,
)
PARSERS = {"chat": chat.parse, "completions": completions.parse}
BASE = {
    "chat": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "completions": {"model": "tiny", "prompt": "hi"},
}


@pytest.fixture(params=["chat", "completions"])
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def parse(dialect: str, facts: ModelFacts = FACTS, **changes: Any) -> GenerateRequest:
    return PARSERS[dialect](json.dumps({**BASE[dialect], **changes}).encode(), facts)


def refuse(dialect: str, **changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(dialect, **changes)
    return caught.value


def test_openai_defaults_where_nothing_is_said(dialect: str) -> None:
    request = parse(dialect)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.stop_token_ids, sampling.logprobs) == (1.0, (259,), None)
    assert (request.n, request.stop, request.stream, request.seed) == (1, (), False, None)
    assert request.max_tokens == {"chat": None, "completions": 16}[dialect]


def test_the_checkpoints_defaults_come_before_openais(dialect: str) -> None:
    facts = ModelFacts(("tiny",), 512, 260, (259,), {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0}, 20)
    sampling = parse(dialect, facts).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
    assert type(sampling.top_k) is int
    assert parse(dialect, facts, temperature=0).sampling.temperature == 0


def test_null_is_the_same_as_absent(dialect: str) -> None:
    names = ("n", "stream", "stop", "seed", "temperature", "logit_bias", "max_tokens", "logprobs", "stream_options")
    assert parse(dialect, **dict.fromkeys(names)) == parse(dialect)


def test_every_sampling_field_arrives(dialect: str) -> None:
    request = parse(
        dialect,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "6": 1.5},
        seed=-3,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        max_tokens=9,
        min_tokens=4,
        n=3,
        priority=-1,
        cache_salt="s",
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 2, 1.5)
    assert sampling.logit_bias == {5: -100.0, 6: 1.5}
    assert (sampling.min_tokens, sampling.stop_token_ids) == (4, (259, 1, 2))
    assert (request.seed, request.stop, request.max_tokens, request.n) == (-3, ("a", "b"), 9, 3)
    assert (request.priority, request.cache_salt) == (-1, "s")


def test_ignore_eos_leaves_the_clients_own_stop_tokens(dialect: str) -> None:
    assert parse(dialect, ignore_eos=True, stop_token_ids=[5]).sampling.stop_token_ids == (5,)


@pytest.mark.parametrize("top_k", [-1, 0, 260, 10**6])
def test_top_k_that_filters_nothing_is_off(dialect: str, top_k: int) -> None:
    assert parse(dialect, top_k=top_k).sampling.top_k == 0


def test_one_stop_string_may_stand_alone(dialect: str) -> None:
    assert parse(dialect, stop="END").stop == ("END",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e9),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**70),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 17),
        ("n", 5_000_000),
        ("n", True),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop", [1]),
        ("stop_token_ids", [260]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(65))),
        ("logit_bias", {"260": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(index): 0 for index in range(1025)}),
        ("priority", 2**31),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("model", 5),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(dialect: str, field: str, value: Any) -> None:
    error = refuse(dialect, **{field: value})
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith(field)


@pytest.mark.parametrize("number", [10**400, -(10**400)], ids=["large", "small"])
@pytest.mark.parametrize("field", ["temperature", "max_tokens", "top_logprobs", "logprobs", "prompt_logprobs"])
def test_a_number_of_hundreds_of_digits_is_out_of_bounds(dialect: str, field: str, number: int) -> None:
    assert refuse(dialect, **{"logprobs": True, field: number}).status == 400


@pytest.mark.parametrize(
    ("field", "interval"),
    [
        ("min_tokens", "at least 0 and at most 2147483647"),
        ("seed", "at least -9223372036854775808 and at most 9223372036854775807"),
        ("top_p", "above 0 and at most 1"),
    ],
)
def test_a_refusal_names_its_bounds_in_full(dialect: str, field: str, interval: str) -> None:
    error = refuse(dialect, **{field: 2**70})
    assert (error.code, error.param, interval in error.message) == ("invalid_value", field, True)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"{}x", b"\xff", b'{"model":"\xff"}', b'"text"'])
def test_bodies_that_are_no_json_object_are_refused(dialect: str, body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        PARSERS[dialect](body, FACTS)
    assert caught.value.status == 400


NO_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"1" * 5000)
NO_STRINGS = (b'"\\ud800"', b'"\\udc00x"', b'"\xff"')
TOO_DEEP = (b"[" * 5000 + b"]" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((b"temperature", value) for value in NO_NUMBERS),
        *((b"stop", value) for value in NO_STRINGS),
        *((name, value) for name in (b"temperature", b"stop", b"user") for value in TOO_DEEP),
        *((b"user", value) for value in (b"NaN", b"Infinity", b'"\xff"')),
    ],
    ids=range(17),
)
def test_what_is_no_json_number_or_string_is_refused(dialect: str, field: bytes, value: bytes) -> None:
    body = json.dumps(BASE[dialect]).encode()[:-1] + b',"' + field + b'":' + value + b"}"
    with pytest.raises(ApiError) as caught:
        PARSERS[dialect](body, FACTS)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b" \n", "empty"),
        (b'{"model"', "truncated"),
        (b"{} {}", "(byte 4)"),
        (b'{"model": "caf\xe9"}', "byte 14"),
        ("{}".encode("utf-16"), "byte 0"),
        (b'{"model": "cut \\ud83d"}', "surrogate"),
        (b'{"model": "\\ude00 cut"}', "surrogate"),
        (b'{"model": "\\ud83d\\ude00" "x"}', "(byte 25)"),
    ],
    ids=range(8),
)
def test_the_fault_of_a_body_that_is_no_json_is_named(dialect: str, body: bytes, fault: str) -> None:
    with refused("invalid_json", None, fault):
        PARSERS[dialect](body, FACTS)


def test_a_byte_order_mark_before_a_body_is_passed_over(dialect: str) -> None:
    body = json.dumps(BASE[dialect]).encode()
    assert PARSERS[dialect](b"\xef\xbb\xbf" + body, FACTS) == PARSERS[dialect](body, FACTS)


BODIES = {"chat": chat.ChatBody, "completions": completions.CompletionBody}


@pytest.mark.parametrize("field", sorted(UNSUPPORTED.keys() - {*FormatFields.__struct_fields__}))
def test_what_would_change_the_answer_is_refused_by_name(dialect: str, field: str) -> None:
    if field in BODIES[dialect].__struct_fields__:
        pytest.skip("this dialect reads it")
    error = refuse(dialect, **{field: {"some": ["thing"]}})
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")
    assert field in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tools", None),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("best_of", 1),
        ("suffix", None),
        ("use_beam_search", False),
        ("skip_special_tokens", True),
        ("bad_words", []),
        ("typical_p", 1.0),
        ("mirostat", 0),
        ("include_reasoning", True),
    ],
)
def test_asking_for_nothing_is_no_reason_to_refuse(dialect: str, field: str, value: Any) -> None:
    assert parse(dialect, **{field: value}).ignored == ()


def test_fields_without_effect_are_ignored_and_named(dialect: str) -> None:
    request = parse(dialect, user="u", store=True, metadata={"a": "b"}, flux_capacitor=88)
    assert request.ignored == ("flux_capacitor", "metadata", "store", "user")


def test_for_an_unknown_model_the_served_one_is_named(dialect: str) -> None:
    error = refuse(dialect, model="gpt-9")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert all(name in error.message for name in ("gpt-9", "tiny", "alias"))


@pytest.mark.parametrize("model", [None, ""])
def test_a_request_without_a_model_gets_the_served_one(dialect: str, model: str | None) -> None:
    assert parse(dialect, model=model).model == "tiny"


def test_a_service_may_take_any_name_and_answers_under_it(dialect: str) -> None:
    assert parse(dialect, replace(FACTS, takes_any_name=True), model="gpt-9").model == "gpt-9"


def test_the_answer_speaks_under_the_name_that_was_asked_for(dialect: str) -> None:
    assert parse(dialect, model="alias").model == "alias"


def test_stream_options_need_a_stream(dialect: str) -> None:
    request = parse(dialect, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (request.stream, request.include_usage, request.continuous_usage) == (True, True, True)
    assert refuse(dialect, stream_options={"include_usage": True}).param == "stream_options"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted({*chat.ChatBody.__struct_fields__, *completions.CompletionBody.__struct_fields__})


@pytest.mark.slow
@given(st.sampled_from(["chat", "completions"]), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4))
def test_any_json_is_a_request_or_an_error_of_the_client(dialect: str, changes: dict[str, Any]) -> None:
    try:
        parse(dialect, **changes)
    except ApiError as refusal:
        error = refusal
    else:
        return
    assert error.status in (400, 404)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_an_error_of_the_client(body: bytes) -> None:
    for parser in PARSERS.values():
        with pytest.raises(ApiError):
            parser(body, FACTS)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({f"field {number}": 0 for number in range(20_000)}, None),
        ({"unheard_of": "x" * limits.MAX_OPTION_BYTES}, None),
        ({"logit_bias": {str(number): 0.0 for number in range(30_000)}}, "logit_bias"),
    ],
    ids=["many unknown", "a long unknown", "biases"],
)
def test_what_is_no_prompt_is_short(dialect: str, fields: dict[str, Any], named: str | None) -> None:
    error = refuse(dialect, **fields)
    assert error.code == "too_many_values"
    assert (error.param == named) == (named is not None)


def test_a_long_prompt_is_read(dialect: str) -> None:
    text = "x" * limits.MAX_OPTION_BYTES
    long = {"chat": {"messages": [{"role": "user", "content": text}]}, "completions": {"prompt": text}}[dialect]
    assert parse(dialect, unheard_of=1, **long).ignored == ("unheard_of",)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([{"role": "user", "content": "x" * 64}] * (limits.MAX_MESSAGES + 1), "messages"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "x" * 64}] * 4097},
            ],
            "messages[1].content",
        ),
        ([{"role": "assistant", "tool_calls": [CALL] * 200}] * (limits.MAX_CALLS // 200 + 1), "messages"),
    ],
    ids=["messages", "parts", "calls"],
)
def test_a_conversation_of_too_many_parts_is_refused_before_they_are_read(
    messages: list[dict[str, Any]], named: str
) -> None:
    error = refuse("chat", messages=messages)
    assert (error.code, error.param) == ("too_many_values", named)


def test_tools_are_bounded_in_bytes() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 100_000}}
    assert refuse("chat", tools=11 * [tool]).param == "tools"


def test_a_budget_of_thought_has_three_names_and_the_smallest_counts(dialect: str) -> None:
    assert parse(dialect).thought == ThoughtOptions()
    for name in BUDGETS:
        for value in (-1, 0, 7):
            assert parse(dialect, **{name: value}).thought == ThoughtOptions(value, None, (name,))
        with pytest.raises(ApiError) as caught:
            parse(dialect, **{name: -2})
        assert caught.value.param == name
    assert parse(dialect, thinking_token_budget=-1, thinking_budget_tokens=5, reasoning_budget_tokens=9).thought == (
        ThoughtOptions(5, None, BUDGETS)
    )


def test_an_effort_goes_with_the_request() -> None:
    assert parse("chat", reasoning_effort="low").thought == ThoughtOptions(effort="low")
