"""The completions dialect: its prompts in, its answers out, as the openai package reads them."""

import json
from typing import Any

import pytest

from moeserve.frontend.dialects import completions
from moeserve.frontend.dialects.internal import Delta, GenerateRequest, ModelFacts, TokenText, Usage
from moeserve.frontend.errors import ApiError
from moeserve.frontend.http import DONE
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import TokenLogprobs
from tests.support.openai_types import openai_type
from tests.support.tiny_model import byte_tokenizer
from tests.support.written import answer_of, body_of

FACTS = ModelFacts(("tiny",), 512, 260, (259,), {}, 20)
TOKENIZER = TextTokenizer(byte_tokenizer())
USAGE = Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4)


def parse(**changes: Any) -> GenerateRequest:
    return completions.parse(json.dumps({"model": "tiny", "prompt": "hi", **changes}).encode(), FACTS)


def refuse(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**changes)
    return caught.value


def formatter(**changes: Any) -> completions.CompletionFormatter:
    return completions.CompletionFormatter("cmpl-1", 17, parse(**changes), TOKENIZER, "fp_x")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 259], [[1, 2, 259]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_text_or_ids_or_several_of_them(prompt: Any, prompts: list[Any]) -> None:
    assert parse(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [""], [[]], ["a", 1], [[1], "a"], [260], [-1], [[1, 260]], [1.5], [True], [None], {}, ["a"] * 257],
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    error = refuse(prompt=prompt)
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith("prompt")


def test_logprobs_of_the_prompt_are_asked_for_with_echo_alone() -> None:
    assert parse(logprobs=3).sampling.prompt_logprobs is None
    request = parse(logprobs=3, echo=True)
    assert (request.echo, request.sampling.logprobs, request.sampling.prompt_logprobs) == (True, 3, 3)
    assert refuse(logprobs=21).param == "logprobs"
    assert refuse(logprobs=True).param == "logprobs"


def test_every_prompt_gives_n_choices() -> None:
    assert parse(prompt=["a", "b"], n=3).num_choices == 6


def test_a_whole_answer_has_the_fields_of_openais_completions() -> None:
    tokens = [
        TokenText(ord("h"), 0),
        TokenText(ord("i"), 1, TokenLogprobs(-0.5, ((ord("a"), -0.25), (ord("b"), -0.375)))),
        TokenText(0xC3, 2, TokenLogprobs(-1.0, ((0xC3, -1.0), (0xC4, float("-inf"))))),
    ]
    body = answer_of(formatter(logprobs=2).complete([Delta(0, "hi", tokens, "length")], USAGE))
    assert body["object"] == "text_completion"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["h", "i", "bytes:\\xc3"],
        "token_logprobs": [None, -0.5, -1.0],
        "top_logprobs": [
            None,
            {"a": -0.25, "b": -0.375, "i": -0.5},
            {"bytes:\\xc3": -1.0, "bytes:\\xc4": -9999.0},
        ],
        "text_offset": [0, 1, 2],
    }


def test_the_openai_package_takes_an_answer() -> None:
    token = TokenText(ord("i"), 0, TokenLogprobs(-0.5, ((ord("a"), -0.25),)))
    openai_type("Completion").validate_json(
        body_of(formatter(logprobs=1).complete([Delta(0, "i", [token], "stop")], USAGE))
    )


def test_a_stream_has_an_event_per_delta_and_one_for_usage() -> None:
    writer = formatter(stream=True, stream_options={"include_usage": True})
    assert writer.start(0, USAGE) == b""
    chunk = json.loads(writer.delta(Delta(2, "é", [], "stop"), USAGE).removeprefix(b"data: "))
    openai_type("Completion").validate_python({**chunk, "usage": None})
    assert chunk["choices"] == [{"index": 2, "text": "é", "logprobs": None, "finish_reason": "stop"}]
    assert chunk["usage"] is None
    last = json.loads(writer.end(USAGE).removesuffix(DONE).removeprefix(b"data: "))
    assert (last["choices"], last["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 4})


def test_without_output_tokens_a_request_is_about_its_prompt() -> None:
    assert parse(max_tokens=0, echo=True).max_tokens == 0
    assert parse(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert refuse(max_tokens=0).param == "max_tokens"


def test_the_best_of_more_samples_than_are_given() -> None:
    request = parse(n=2, best_of=5)
    assert (request.n, request.best, request.sampling.logprobs) == (5, 2, 0)
    assert parse(n=2, best_of=5, logprobs=3).sampling.logprobs == 3
    assert (parse(n=2, best_of=2).n, parse(n=2, best_of=2).best) == (2, None)
    for changes in ({"n": 3, "best_of": 2}, {"best_of": 17}, {"best_of": 2, "stream": True}):
        assert refuse(**changes).param == "best_of"


def test_log_probabilities_that_only_rank_samples_are_not_shown() -> None:
    body = answer_of(formatter(best_of=2).complete([Delta(0, "a", [TokenText(97, 0, TokenLogprobs(-1.0))])], USAGE))
    assert body["choices"][0]["logprobs"] is None


def test_prompt_log_probabilities_belong_to_their_choice() -> None:
    prompt = [TokenText(97, 0), TokenText(98, 1, TokenLogprobs(-1.5, ((98, -1.5),)))]
    body = answer_of(formatter(prompt_logprobs=1).complete([Delta(0, "a", [], "stop", prompt=prompt)], USAGE))
    (choice,) = body["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.5, "rank": 1, "decoded_token": "b"}}]
    openai_type("Completion").validate_python(body)
