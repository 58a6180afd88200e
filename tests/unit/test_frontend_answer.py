"""From a request to the engine's requests, and from the engine's outputs to text, deltas and usage."""

from __future__ import annotations

import pytest

from moeserve.frontend.answer import Answer, OutputText, build_generates, check_length, derive_seed
from moeserve.frontend.dialects.internal import Delta, GenerateRequest, TokenText
from moeserve.frontend.http import ApiError
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import FinishReason, SamplingParams, TokenLogprobs
from moeserve.wire import Output, unpack_token_ids
from tests.support.tiny_model import END, byte_tokenizer

TOKENIZER = TextTokenizer(byte_tokenizer())


def run(text: OutputText, tokens: list[int], chunk: int = 1, end: str = "length") -> Delta:
    """Feeds tokens, finishes, and joins all deltas."""
    whole = Delta(0)
    for start in range(0, len(tokens), chunk):
        ids = tokens[start : start + chunk]
        delta = text.push(Output("r", ids, logprobs=[TokenLogprobs(-float(token_id)) for token_id in ids]))
        whole.text += delta.text
        whole.tokens += delta.tokens
    last = text.push(Output("r"))
    text.finish(last, end)
    return Delta(0, whole.text + last.text, whole.tokens + last.tokens, last.finish_reason)


def test_a_stop_string_across_tokens_ends_the_text_and_says_what_counts() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["STOP"])
    answer = run(text, list(b"abSTOPcd"))
    assert (answer.text, answer.finish_reason, text.keep_tokens) == ("ab", "stop", 2)


def test_a_stop_string_inside_one_output_ignores_the_rest() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["ST"])
    assert (run(text, list(b"abSTcd"), chunk=6).text, text.num_tokens) == ("ab", 2)


def test_at_least_one_token_counts() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["a"])
    assert (run(text, list(b"abc")).text, text.keep_tokens) == ("", 1)


def test_held_back_text_comes_at_the_end() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["STOP"])
    answer = run(text, list(b"abST"))
    assert (answer.text, answer.finish_reason, text.keep_tokens) == ("abST", "length", None)


def test_no_stop_string_is_looked_for_before_min_tokens() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["a"], min_tokens=3)
    assert (run(text, list(b"aaabac")).text, text.keep_tokens) == ("aaab", 4)


def test_logprobs_cover_the_tokens_of_the_text_and_tell_their_offsets() -> None:
    answer = run(OutputText(0, TOKENIZER, [], wants_logprobs=True, offset=10), [*"é!".encode(), END])
    assert answer.tokens == [
        TokenText(0xC3, 10, TokenLogprobs(-195.0)),
        TokenText(0xA9, 10, TokenLogprobs(-169.0)),
        TokenText(ord("!"), 11, TokenLogprobs(-33.0)),
        TokenText(END, 12, TokenLogprobs(-float(END))),
    ]


def test_logprobs_do_not_tell_a_stop_string() -> None:
    answer = run(OutputText(0, TOKENIZER, [], stops=["STOP"], wants_logprobs=True), list(b"abSTOP"))
    assert [token.token_id for token in answer.tokens] == list(b"ab")


def test_logprobs_wait_for_their_text() -> None:
    text = OutputText(0, TOKENIZER, [], stops=["STOP"], wants_logprobs=True)
    assert text.push(Output("r", list(b"S"))).tokens == []
    assert [token.token_id for token in text.push(Output("r", list(b"x"))).tokens] == list(b"Sx")


def request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "model": "tiny",
        "prompts": ["ab"],
        "sampling": SamplingParams(max_tokens=0),
        "max_tokens": 4,
        "seed": None,
    }
    return GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_lengths_that_do_not_fit_are_told_with_both_counts() -> None:
    assert check_length(10, None, 16) == 6
    assert check_length(10, 6, 16) == 6
    with pytest.raises(ApiError) as caught:
        check_length(10, 7, 16)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 16 tokens" in caught.value.message
    assert "17" in caught.value.message
    assert "10 in the prompt" in caught.value.message
    with pytest.raises(ApiError):
        check_length(16, None, 16)


def test_samples_have_seeds_of_their_own_and_the_first_one_the_clients() -> None:
    seeds = [derive_seed(7, sample) for sample in range(16)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 16
    assert all(0 <= derive_seed(seed, sample) < 2**63 for seed in (-1, -(2**63), 2**63 - 1) for sample in (0, 1))


def test_every_choice_gets_a_message_of_its_own() -> None:
    prompts = [[1, 2], [3]]
    generates = build_generates(
        request(prompts=["a", "b"], n=2, max_tokens=None, priority=3),
        prompts,
        request_id="r",
        namespace="ns",
        seed=5,
        max_model_len=8,
    )
    assert [generate.request_id for generate in generates] == ["r-0", "r-1", "r-2", "r-3"]
    assert [list(unpack_token_ids(generate.token_ids)) for generate in generates] == [[1, 2], [1, 2], [3], [3]]
    assert [generate.sampling.max_tokens for generate in generates] == [6, 6, 7, 7]
    assert generates[0].sampling.seed == generates[2].sampling.seed == 5
    assert {(generate.namespace, generate.priority) for generate in generates} == {("ns", 3)}


def test_usage_counts_a_prompt_once_and_what_it_found_before_this_request() -> None:
    answer = Answer(request(n=2), [[1, 2, 3]], TOKENIZER)
    answer.take(0, Output("r-0", [97], num_cached_tokens=1))
    answer.take(1, Output("r-1", [97, 98], num_cached_tokens=2))
    answer.take(0, Output("r-0", [98], FinishReason.LENGTH, num_cached_tokens=3))
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 1)
    assert answer.num_open == 1


def test_an_echoed_prompt_comes_first_with_the_probabilities_that_came_in_chunks() -> None:
    sampling = SamplingParams(max_tokens=0, logprobs=0, prompt_logprobs=0)
    answer = Answer(request(prompts=["abc"], echo=True, sampling=sampling), [list(b"abc")], TOKENIZER)
    assert answer.take(0, Output("r", prompt_logprobs=[TokenLogprobs(-1.0)])) == []
    output = Output("r", [100], prompt_logprobs=[TokenLogprobs(-2.0)], logprobs=[TokenLogprobs(-3.0)])
    echo, first = answer.take(0, output)
    assert echo.text == "abc"
    assert [token.logprobs and token.logprobs.logprob for token in echo.tokens] == [None, -1.0, -2.0]
    assert [token.offset for token in echo.tokens + first.tokens] == [0, 1, 2, 3]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_request_that_failed_in_the_engine_is_an_error_without_its_words(reason: FinishReason) -> None:
    with pytest.raises(ApiError) as caught:
        Answer(request(), [[1]], TOKENIZER).take(0, Output("r", [], reason, error="/secret/path.py line 3"))
    assert caught.value.status == 500
    assert "secret" not in caught.value.message
