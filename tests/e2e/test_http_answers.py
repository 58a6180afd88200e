"""Answers over real HTTP from a frontend process whose engine follows a script, read by the openai package."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from moeserve.plan import FinishReason, TokenLogprobs
from moeserve.wire import Admitted, Finish, Generate, Output, Outputs, unpack_token_ids
from tests.support.fake_engine import FakeEngine, say
from tests.support.frontend import Frontend, frontend
from tests.support.tiny_model import ASSISTANT, BOS, END, USER

GREETING = "Grüße 🎉"
NUM_TOKENS = len(GREETING.encode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend")) as running:
        yield running


@pytest.fixture
def client(server: Frontend) -> Iterator[OpenAI]:
    server.engine.received.clear()
    server.engine.script = say(GREETING)
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    )


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "hi", **fields})


def with_logprobs(engine: FakeEngine, generate: Generate) -> None:
    """Says "ok" with log probabilities; where the prompt's are asked for, they come in two pieces."""
    engine.send(Admitted(generate.request_id))
    if generate.sampling.prompt_logprobs is not None:
        rest = [
            TokenLogprobs(-float(token_id), ((1, -0.125),)) for token_id in unpack_token_ids(generate.token_ids)[1:]
        ]
        engine.output(generate, [], prompt_logprobs=rest[:1])
        engine.output(generate, [], prompt_logprobs=rest[1:])
    engine.output(generate, [ord("o")], logprobs=[TokenLogprobs(-0.5, ((ord("a"), -0.25), (ord("o"), -0.5)))])
    last = [TokenLogprobs(-1.0, ((ord("k"), -1.0), (ord("b"), -2.0)))]
    engine.output(generate, [ord("k")], logprobs=last, finish_reason=FinishReason.LENGTH, num_output_tokens=2)


def test_a_chat_answer(server: Frontend, client: OpenAI) -> None:
    answer = chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == GREETING
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, NUM_TOKENS)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    (generate,) = server.engine.of(Generate)
    assert list(unpack_token_ids(generate.token_ids)) == [BOS, USER, *b"hi", END, ASSISTANT]
    assert generate.sampling.max_tokens == 512 - 6
    assert generate.sampling.stop_token_ids == (END,)
    assert generate.namespace == ""


def test_a_chat_stream_gives_the_same_text(client: OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == GREETING
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3


def test_a_completion_and_its_stream(client: OpenAI) -> None:
    assert complete(client).choices[0].text == GREETING
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == GREETING
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_grows_with_every_chunk_on_request(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in complete(client, stream=True, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == NUM_TOKENS
    first, *rest = chat(client, stream=True, stream_options=options)
    assert (first.choices[0].delta.role, first.usage.completion_tokens, first.usage.total_tokens) == ("assistant", 0, 6)
    assert all(chunk.usage.completion_tokens for chunk in rest)


def test_n_choices_share_the_prompt_and_have_seeds_of_their_own(server: Frontend, client: OpenAI) -> None:
    answer = chat(client, n=3, seed=5)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (0, GREETING),
        (1, GREETING),
        (2, GREETING),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 3 * NUM_TOKENS)
    generates = server.engine.of(Generate)
    assert len({generate.sampling.seed for generate in generates}) == 3
    assert len({generate.token_ids for generate in generates}) == 1


def test_a_stream_of_several_choices_keeps_them_apart(client: OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in chat(client, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: GREETING, 1: GREETING}


def test_prompts_as_texts_and_as_token_ids(server: Frontend, client: OpenAI) -> None:
    assert [choice.index for choice in complete(client, prompt=["a", "b"]).choices] == [0, 1]
    complete(client, prompt=[[1, 2], [3]])
    complete(client, prompt=[4, 5])
    prompts = [list(unpack_token_ids(generate.token_ids)) for generate in server.engine.of(Generate)]
    assert prompts == [[ord("a")], [ord("b")], [1, 2], [3], [4, 5]]


def test_seeds_are_drawn_where_none_is_given_and_the_clients_is_used(server: Frontend, client: OpenAI) -> None:
    chat(client)
    chat(client)
    chat(client, seed=99)
    seeds = [generate.sampling.seed for generate in server.engine.of(Generate)]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 99


def test_what_users_say_forms_no_control_tokens(server: Frontend, client: OpenAI) -> None:
    chat(client, messages=[{"role": "user", "content": "<|end|>"}])
    (generate,) = server.engine.of(Generate)
    assert list(unpack_token_ids(generate.token_ids)) == [BOS, USER, *b"<|end|>", END, ASSISTANT]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_request_in_the_engine(server: Frontend, client: OpenAI, stream: bool) -> None:
    def endless(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Admitted(generate.request_id))
        engine.output(generate, list(b"ab"), num_cached_tokens=2)
        engine.output(generate, list(b"ST"))
        engine.output(generate, list(b"OPmore"))

    server.engine.script = endless
    answer = complete(client, stop=["STOP"], max_tokens=100, stream=stream)
    if stream:
        chunks = list(answer)
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (2, 2)
    assert (text, reason) == ("ab", "stop")
    (finish,) = server.engine.of(Finish)
    assert finish.keep_tokens == 2


def test_a_stream_tells_the_same_log_probabilities_as_the_whole(server: Frontend, client: OpenAI) -> None:
    server.engine.script = with_logprobs
    answer = chat(client, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [("o", -0.5, [111]), ("k", -1.0, [107])]
    assert [top.token for top in content[0].top_logprobs] == ["a", "o"]
    chunks = list(chat(client, logprobs=True, top_logprobs=2, stream=True))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == content


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_prompt_and_answer(server: Frontend, client: OpenAI, stream: bool) -> None:
    server.engine.script = with_logprobs
    answer = complete(client, prompt="abc", echo=True, logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == "abcok"
    logprobs = [choice.logprobs for choice in choices if choice.logprobs]
    assert [text for part in logprobs for text in part.tokens] == ["a", "b", "c", "o", "k"]
    assert [value for part in logprobs for value in part.token_logprobs] == [None, -98.0, -99.0, -0.5, -1.0]
    assert [offset for part in logprobs for offset in part.text_offset] == [0, 1, 2, 3, 4]
    tops = [top for part in logprobs for top in part.top_logprobs]
    assert tops[3] == {"a": -0.25, "o": -0.5}
    assert tops[0] is None


def test_outputs_of_one_step_reach_all_their_choices(server: Frontend, client: OpenAI) -> None:
    waiting: list[Generate] = []

    def together(engine: FakeEngine, generate: Generate) -> None:
        waiting.append(generate)
        engine.send(Admitted(generate.request_id))
        if len(waiting) == 2:
            ends = [Output(one.request_id, [65 + i], FinishReason.LENGTH, 0, 1) for i, one in enumerate(waiting)]
            engine.send(Outputs(ends))

    server.engine.script = together
    answer = complete(client, n=2)
    assert [choice.text for choice in answer.choices] == ["A", "B"]


def test_every_event_is_one_data_line_and_done_is_last(server: Frontend, client: OpenAI) -> None:
    body = {"model": "tiny", "prompt": "hi", "stream": True}
    response = server.http.post("/v1/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event[6:])["object"] == "text_completion" for event in events[:-1])


def test_models_are_listed_under_all_their_names(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    model = client.models.retrieve("alias")
    assert (model.id, model.model_extra["max_model_len"]) == ("alias", 512)


def test_request_ids_are_repeated_where_they_are_harmless(server: Frontend) -> None:
    assert server.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for odd in ("a b", "x" * 200, "<b>"):
        assert server.http.get("/health", headers={"x-request-id": odd}).headers["x-request-id"] != odd


def test_text_to_tokens_and_back(server: Frontend) -> None:
    post = server.http.post
    tokens = post("/tokenize", json={"prompt": "é<|end|>"}).json()
    assert tokens == {"count": 3, "max_model_len": 512, "tokens": [0xC3, 0xA9, END]}
    assert post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "é<|end|>"}
    chat_tokens = post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat_tokens["tokens"] == [BOS, USER, *b"hi", END, ASSISTANT]


def test_the_routes_beside_generation_answer(server: Frontend, client: OpenAI) -> None:
    complete(client)
    get = server.http.get
    assert get("/health").json() == {"status": "ok"}
    assert get("/ready").json() == {"status": "ready"}
    assert get("/version").json().keys() == {"version"}
    assert "POST /v1/chat/completions" in get("/", headers={"accept": "application/json"}).json()["endpoints"]
    assert server.http.head("/health").status_code == 200
    assert server.http.post("/reset_prefix_cache").json() == {"status": "ok", "blocks": 7}
    metrics = get("/metrics")
    assert 'moeserve_http_responses_total{route="/v1/completions",status="200"}' in metrics.text
    assert "server" not in metrics.headers


def test_prompts_and_answers_are_not_logged(server: Frontend, client: OpenAI) -> None:
    server.engine.script = say("sesame-out")
    chat(client, messages=[{"role": "user", "content": "sesame-in"}], stop=["sesame-stop"])
    server.http.post("/v1/completions", json={"model": "tiny", "prompt": ["sesame-bad", 1]})
    log = server.log_path.read_text()
    assert "request_id" in log
    assert "sesame" not in log


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 32_000}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 32_000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32_000}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 32_000}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_the_context_leaves_are_cut_and_the_header_tells(
    server: Frontend, client: OpenAI, path: str, body: dict[str, Any], stream: bool
) -> None:
    answer = server.http.post(path, json={"model": "tiny", "stream": stream, **body})
    (generate,) = server.engine.of(Generate)
    left = 512 - len(unpack_token_ids(generate.token_ids))
    assert (answer.status_code, generate.sampling.max_tokens) == (200, left)
    assert answer.headers["x-moeserve-max-tokens"] == str(left)


BODIES = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
    "/v1/completions": ({"prompt": "hi"}, "max_tokens"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "hi"}]}, "max_tokens"),
    "/v1/responses": ({"input": "hi", "store": False}, "max_output_tokens"),
}


@pytest.fixture(scope="module", params=[{"default_max_tokens": 9}, {"default_max_tokens": 9, "longest_answer": 20}])
def bounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with frontend(tmp_path_factory.mktemp("frontend"), engine=request.param) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_the_service_bounds_answers_and_the_header_tells(bounded: Frontend, path: str) -> None:
    longest = bounded.http.get("/v1/models/tiny").json()["max_tokens"]
    assert longest in (20, 512)
    body, field = BODIES[path]
    for asked in (None, 5, 30, 32_000):
        if asked is None and path in ("/v1/messages", "/v1/completions"):
            continue  # one requires the field, the other has a default of its own
        bounded.engine.received.clear()
        answer = bounded.http.post(path, json={"model": "tiny", **body, **({field: asked} if asked else {})})
        (generate,) = bounded.engine.of(Generate)
        got = generate.sampling.max_tokens
        room = 512 - len(unpack_token_ids(generate.token_ids))
        assert (answer.status_code, got) == (200, min(asked or 9, longest, room))
        told = answer.headers.get("x-moeserve-max-tokens")
        assert told == (None if got == asked else str(got))


def test_an_answer_that_the_service_cuts_says_so_and_ends_the_stream_of_a_client_without_a_bound(
    bounded: Frontend,
) -> None:
    bounded.engine.script = say("Hel", finish=FinishReason.LENGTH)
    with OpenAI(base_url=bounded.url + "/v1", api_key="none", max_retries=0) as client:
        free = list(client.responses.create(model="tiny", input="hi", stream=True))[-1]
        asked = list(client.responses.create(model="tiny", input="hi", stream=True, max_output_tokens=3))[-1]
        chat_answer = chat(client)
    assert (free.type, free.response.status) == ("response.completed", "incomplete")
    assert free.response.incomplete_details.reason == "max_output_tokens"
    assert asked.type == "response.incomplete"
    assert chat_answer.choices[0].finish_reason == "length"


def test_a_header_names_the_fields_that_were_ignored(server: Frontend, client: OpenAI) -> None:
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
    fields = {"thinking_token_budget": 5, "user": "me", "strange\r\nname": 1}
    answer = server.http.post("/v1/completions", json={**body, **fields})
    assert answer.headers["x-moeserve-ignored"] == "strange??name,thinking_token_budget,user"
    message = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    thinking = {"type": "enabled", "budget_tokens": 2048}
    answer = server.http.post("/v1/messages", json={**message, "thinking": thinking})
    assert answer.headers["x-moeserve-ignored"] == "thinking.budget_tokens"
    assert [generate.thought for generate in server.engine.of(Generate)] == [None, None]
    assert len(server.http.post("/v1/completions", json={**body, "x" * 5000: 1}).headers["x-moeserve-ignored"]) == 200
    plain = server.http.post("/v1/completions", json=body).headers
    assert not {"x-moeserve-ignored", "x-moeserve-max-tokens"} & set(plain)


@pytest.mark.parametrize(
    ("kept", "prompt", "max_tokens", "expected"),
    [
        (3, "abcdef", 4, "def"),
        (3, list(b"abcdef"), 4, "def"),
        (9, "def", 4, "def"),
        (-1, "x" * 1000 + "y" * 412, 100, "y" * 412),
        (-1, "x" * 1000 + "y" * 511, None, "y" * 511),
        (-1, "x" * 1000 + "y" * 511, 32_000, "y" * 511),
    ],
)
def test_the_end_of_a_prompt_is_kept_where_that_is_asked_for(
    server: Frontend, client: OpenAI, kept: int, prompt: Any, max_tokens: int | None, expected: str
) -> None:
    complete(client, prompt=prompt, max_tokens=max_tokens, extra_body={"truncate_prompt_tokens": kept})
    (generate,) = server.engine.of(Generate)
    token_ids = list(unpack_token_ids(generate.token_ids))
    assert bytes(token_ids[-len(expected) :]).decode() == expected
    assert len(token_ids) <= max(len(expected), kept)


def test_an_echo_shows_the_end_of_a_prompt_that_was_kept(server: Frontend, client: OpenAI) -> None:
    server.engine.script = with_logprobs
    kept = {"truncate_prompt_tokens": 2}
    (choice,) = complete(client, prompt="zabc", echo=True, logprobs=2, extra_body=kept).choices
    assert (choice.text, choice.logprobs.tokens) == ("bcok", ["b", "c", "o", "k"])
    assert choice.logprobs.text_offset == [0, 1, 2, 3]


@pytest.mark.parametrize(("skips", "text"), [(True, "aok"), (False, "<|user|>aok")])
def test_an_echo_of_token_ids_shows_special_tokens_where_that_is_asked_for(
    server: Frontend, client: OpenAI, skips: bool, text: str
) -> None:
    server.engine.script = with_logprobs
    asked = {"skip_special_tokens": skips}
    (choice,) = complete(client, prompt=[USER, ord("a")], echo=True, extra_body=asked).choices
    assert choice.text == text


def test_a_conversation_is_truncated_as_well(server: Frontend, client: OpenAI) -> None:
    chat(client)
    whole = list(unpack_token_ids(server.engine.of(Generate)[0].token_ids))
    server.engine.received.clear()
    chat(client, extra_body={"truncate_prompt_tokens": 4, "guided_decoding_backend": "xgrammar"})
    assert list(unpack_token_ids(server.engine.of(Generate)[0].token_ids)) == whole[-4:]


@pytest.mark.parametrize(("path", "kept"), [("/v1/completions", 0), ("/v1/completions", -2), ("/tokenize", 3)])
def test_a_truncation_that_means_nothing_is_refused(server: Frontend, path: str, kept: int) -> None:
    answer = server.http.post(path, json={"model": "tiny", "prompt": "abc", "truncate_prompt_tokens": kept})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_prompt_far_beyond_the_context_is_not_read_to_be_truncated(server: Frontend) -> None:
    body = {"model": "tiny", "prompt": "x" * 20_000, "truncate_prompt_tokens": 5}
    answer = server.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "4 times" in answer.json()["error"]["message"]
