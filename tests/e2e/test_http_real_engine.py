"""A whole service with a tiny random model, asked by the openai package: what only the real engine can show."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support.service import Service, service, wait_until
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PROMPT = "It was the best of times, it was the worst of times; " * 4


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("service"), "--max-model-len", "4096") as started:
        yield started


@pytest.fixture(scope="module")
def client(running: Service) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> Any:
    base = {"model": "m", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return client.completions.create(**{**base, **fields})


def metric(running: Service, name: str) -> float:
    lines = running.http.get("/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name)))


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = ask(client).choices[0]
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"


def test_a_stream_tells_how_far_its_prompt_is_and_metrics_what_the_cache_saved(
    running: Service, client: OpenAI
) -> None:
    # Several steps each: the news of one may come with its token, and is left out then.
    for num_words in (200, 400):
        fields = {"return_progress": True, "ignore_eos": True}
        first, *_ = ask(client, prompt="progress " * num_words, stream=True, extra_body=fields)
        progress = first.prompt_progress
        assert progress["cache"] <= progress["processed"] < progress["total"]
        assert (progress["cache"] > 0) == (num_words > 200)
        assert progress["left_ms"] >= 0
    wait_until(lambda: metric(running, "moeserve_prompt_seconds_saved_total") > 0)
    assert metric(running, 'moeserve_latest_prompt_tokens{state="total"}') == progress["total"]


def test_a_seed_repeats_an_answer(client: OpenAI) -> None:
    texts = [ask(client, temperature=1.5, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_first_choice_is_the_answer_with_that_seed_alone(client: OpenAI) -> None:
    choices = ask(client, temperature=1.5, seed=7, n=3).choices
    assert choices[0].text == ask(client, temperature=1.5, seed=7).choices[0].text
    assert len({choice.text for choice in choices}) == 3


def test_a_prompt_that_was_there_before_is_cached_until_the_cache_is_reset(running: Service, client: OpenAI) -> None:
    def cached() -> int:
        return int(ask(client, prompt="cache me " * 20).usage.prompt_tokens_details.cached_tokens)

    assert cached() == 0
    assert cached() > 100
    assert running.http.post("/reset_prefix_cache").json()["status"] == "ok"
    assert cached() == 0


def test_echoed_log_probabilities_are_those_of_generation(client: OpenAI) -> None:
    drawn = ask(client, prompt=[1, 2, 3], logprobs=1).choices[0].logprobs
    ids = [3, *(bytes_of(text)[0] for text in drawn.tokens)]
    echoed = ask(client, prompt=[1, 2, *ids], logprobs=1, echo=True, max_tokens=1).choices[0].logprobs
    assert echoed.token_logprobs[0] is None
    assert echoed.token_logprobs[3:-1] == pytest.approx(drawn.token_logprobs, abs=1e-4)
    assert len(echoed.tokens) == len(echoed.text_offset) == 3 + 24 + 1


def bytes_of(token: str) -> bytes:
    """The bytes of a token as completions spell it."""
    return bytes.fromhex(token[8:]) if token.startswith("bytes:\\x") else token.encode()


def test_a_stop_string_cuts_the_text(client: OpenAI) -> None:
    letters = {"logit_bias": {str(token): 100.0 for token in b"abcdef"}, "temperature": 1.0, "seed": 3}
    text = ask(client, **letters).choices[0].text
    stop = text[10:12]
    answer = ask(client, **letters, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == max(1, text.index(stop))


def test_a_bias_forces_a_token(client: OpenAI) -> None:
    assert ask(client, logit_bias={str(ord("A")): 100}).choices[0].text == "A" * 24


def test_a_stop_token_ends_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], logit_bias={"259": 100}, logprobs=True
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["<|end|>"]
    assert answer.usage.completion_tokens == 1


def test_too_long_a_prompt_is_refused_with_its_length(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="maximum context length is 4096 tokens") as caught:
        ask(client, prompt=[1] * 4096)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("n", [1, 4])
def test_leaving_gives_the_blocks_back(running: Service, client: OpenAI, n: int) -> None:
    stream = ask(client, stream=True, max_tokens=3500, n=n)
    next(iter(stream))
    wait_until(lambda: metric(running, 'moeserve_kv_blocks{state="leased"}') > 0)
    stream.close()
    wait_until(lambda: metric(running, 'moeserve_kv_blocks{state="leased"}') == 0)
    assert metric(running, "moeserve_requests_running") == 0


def test_choices_are_counted_by_how_they_ended_under_both_names(running: Service, client: OpenAI) -> None:
    def ended(reason: str) -> list[float]:
        own = f'moeserve_choices_ended_total{{reason="{reason}"}}'
        theirs = f'vllm:request_success_total{{engine="0",finished_reason="{reason}",model_name="m"}}'
        lines = running.http.get("/metrics").text.splitlines()
        found = [[float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)] for name in (own, theirs)]
        return [sum(values) for values in found]

    before = {reason: ended(reason) for reason in ("length", "abort")}
    ask(client, max_tokens=3, n=2)
    stream = ask(client, stream=True, max_tokens=3500)
    next(iter(stream))
    stream.close()
    wait_until(lambda: ended("abort") == [count + 1 for count in before["abort"]])
    assert ended("length") == [count + 2 for count in before["length"]]


def test_chat_and_responses_say_the_same_and_find_each_others_prefix(
    client: OpenAI,
) -> None:
    sampling: Any = {"model": "m", "temperature": 0, "extra_body": {"ignore_eos": True}}
    through_chat = client.chat.completions.create(
        messages=[{"role": "user", "content": PROMPT}], max_tokens=24, **sampling
    )
    first = client.responses.create(input=PROMPT, max_output_tokens=24, **sampling)
    assert first.output_text == through_chat.choices[0].message.content
    assert first.usage is not None
    assert first.usage.input_tokens_details.cached_tokens > 100
    second = client.responses.create(input="Go on.", previous_response_id=first.id, max_output_tokens=4, **sampling)
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    # Not more: a random model's bytes are no text, so the answer has other tokens when it comes back.
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens_details.cached_tokens


def test_a_streamed_response_says_what_the_whole_one_says(client: OpenAI) -> None:
    sampling: Any = {"temperature": 0, "max_output_tokens": 24, "extra_body": {"ignore_eos": True}}
    whole = client.responses.create(model="m", input=PROMPT, **sampling)
    with client.responses.stream(model="m", input=PROMPT, **sampling) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text
    assert whole.status == "incomplete"
