"""Counting tokens and long prompts beside everything else: bounded, and never on the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, internal
from moeserve.frontend.dialects.internal import GenerateRequest, TokenText
from moeserve.frontend.text import TextTokenizer
from tests.support.in_process import Exchange, application, completion


def test_texts_and_tokens_beyond_the_limits_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TOKENIZE_CHARS", 20)
    monkeypatch.setattr(limits, "MAX_CONVERTED_TOKENS", 5)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            for path, fits, too_much in (
                ("/tokenize", {"prompt": "12345"}, {"prompt": "123456"}),
                ("/tokenize", {"prompt": "12345"}, {"prompt": 21 * "1"}),
                ("/detokenize", {"tokens": 5 * [65]}, {"tokens": 6 * [65]}),
            ):
                for body, status in ((fits, 200), (too_much, 400)):
                    exchange = Exchange(app, path, json.dumps(body).encode())
                    await exchange.task
                    assert exchange.status == status

    asyncio.run(scenario())


def test_a_refused_request_is_let_go_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            gc.collect()
            gc.disable()
            try:
                exchange = Exchange(app, "/v1/completions", completion(prompt="x" * 100_000))
                await exchange.task
                assert json.loads(exchange.writes[0])["error"]["code"] == "context_length_exceeded"
                # The thread that converted may hold its work a little longer, but without a collector no circle ends.
                async with asyncio.timeout(10):
                    while any(isinstance(held, GenerateRequest) for held in gc.get_objects()):
                        await asyncio.sleep(0.01)
            finally:
                gc.enable()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "LONG"}]}),
        ("/v1/responses", {"input": "LONG"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "LONG"}], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "LONG"}]}),
        ("/tokenize", {"prompt": "LONG"}),
        ("/detokenize", {"tokens": [65] * 200}),
        ("/v1/cache/pin", {"prompt": "LONG"}),
    ],
)
def test_every_route_reads_a_big_body_beside_the_loop(
    path: str, body: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INLINE_BODY_BYTES", 300)
    read_here: list[bytes] = []
    decode = bodies.decode_json

    def noting(data: bytes, expected: Any) -> Any:
        read_here.append(data)
        return decode(data, expected)

    monkeypatch.setattr(bodies, "decode_json", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            asked = json.dumps({"model": "tiny", **body}).replace("LONG", "a" * 300).encode()
            exchange = Exchange(app, path, asked)
            await exchange.task
            assert exchange.sent
            assert read_here == []

    asyncio.run(scenario())


def test_a_body_of_too_many_values_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_COMMAS", 10)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            for num_tokens, status in ((5, 200), (20, 400)):
                exchange = Exchange(app, "/v1/completions", completion(prompt=[65] * num_tokens))
                await exchange.task
                assert exchange.status == status
            assert json.loads(exchange.writes[0])["error"]["code"] == "too_many_values"

    asyncio.run(scenario())


def test_a_prompt_far_too_long_is_counted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    encode = TextTokenizer.encode

    def noting(self: TextTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "encode", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, services, _engine):
            services.tokenizer.longest_token = 100  # As if a few tokens could be the whole text.
            exchange = Exchange(app, "/v1/completions", completion(prompt="a" * 9 * 512))
            await exchange.task
            assert exchange.status == 400
            assert json.loads(exchange.writes[0])["error"]["code"] == "context_length_exceeded"
            assert encoded == []

    asyncio.run(scenario())


def test_while_an_answer_with_many_tokens_is_written_others_are_served() -> None:
    tokens = [TokenText(65, place) for place in range(3 * internal.WRITTEN_AT_ONCE)]
    written = internal.written(tokens, lambda token: token.offset)
    assert next(written) is None
    assert next(written) is None
    with pytest.raises(StopIteration) as done:
        next(written)
    assert json.loads(bytes(done.value.value)) == list(range(3 * internal.WRITTEN_AT_ONCE))


def test_a_prompt_is_decoded_once_for_all_its_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = TextTokenizer.step

    def noting(self: TextTokenizer, stream: object, token_id: int) -> str | None:
        if token_id == ord("%"):
            steps.append(token_id)
        return step(self, stream, token_id)  # type: ignore[arg-type]

    monkeypatch.setattr(TextTokenizer, "step", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            for padding, num_steps in ((0, 50), (limits.INLINE_BODY_BYTES, 50)):
                asked = completion(prompt=[ord("%")] * 50, echo=True, n=4) + b" " * padding
                exchange = Exchange(app, "/v1/completions", asked)
                await exchange.task
                assert exchange.status == 200
                choices = json.loads(exchange.writes[0])["choices"]
                assert [choice["text"] for choice in choices] == ["%" * 50 + "Hello"] * 4
                # A big body's prompt is decoded by a text process.
                assert len(steps) == num_steps

    asyncio.run(scenario())
