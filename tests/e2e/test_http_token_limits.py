"""Counting tokens and long prompts beside everything else: bounded, and never on the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.frontend.dialects import completions, fields
from moeserve.frontend.dialects.internal import GenerateRequest
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


def test_counting_tokens_holds_up_no_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_CHARS", 8)
    gate, held = threading.Event(), threading.Event()
    encode = TextTokenizer.encode

    def slow(self: TextTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if text == "held":
            held.set()
            gate.wait()
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "encode", slow)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            asked = json.dumps({"prompt": "held"}).encode()
            counting = [Exchange(app, "/tokenize", asked) for _ in range(40)]
            await asyncio.to_thread(held.wait)
            generation = Exchange(app, "/v1/completions", completion(prompt="longer than the loop takes"))
            await generation.task
            assert generation.status == 200
            assert not any(exchange.task.done() for exchange in counting)
            gate.set()
            await asyncio.gather(*(exchange.task for exchange in counting))
            assert {exchange.status for exchange in counting} == {200}

    asyncio.run(scenario())


def test_a_big_body_is_read_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_BODY_BYTES", 1000)
    threads: list[bool] = []
    check = fields.check_token_ids

    def noting(name: str, token_ids: list[int], vocab_size: int) -> list[int]:
        if name == "prompt":
            threads.append(threading.current_thread() is threading.main_thread())
        return check(name, token_ids, vocab_size)

    monkeypatch.setattr(fields, "check_token_ids", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            for num_tokens in (10, 400):
                exchange = Exchange(app, "/v1/completions", completion(prompt=[65] * num_tokens))
                await exchange.task
                assert exchange.status == 200
            assert threads == [True, False]

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
    threads: list[bool] = []
    decode = fields.decode_json

    def noting(data: bytes, expected: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(data, expected)

    monkeypatch.setattr(fields, "decode_json", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            asked = json.dumps({"model": "tiny", **body}).replace("LONG", "a" * 300).encode()
            await Exchange(app, path, asked).task
            assert threads == [False]

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


def test_an_answer_with_many_tokens_is_written_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_TOKENS", 20)
    threads: list[bool] = []
    complete = completions.CompletionFormatter.complete

    def noting(self: Any, choices: Any, usage: Any) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return complete(self, choices, usage)

    monkeypatch.setattr(completions.CompletionFormatter, "complete", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            for num_tokens in (10, 40):
                asked = completion(prompt=[65] * num_tokens, echo=True, logprobs=0)
                exchange = Exchange(app, "/v1/completions", asked)
                await exchange.task
                assert exchange.status == 200
            assert threads == [True, False]

    asyncio.run(scenario())


def test_many_prompts_of_one_request_share_what_the_loop_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "INLINE_CHARS", 100)
    inline: list[str] = []
    encode = TextTokenizer.encode

    def noting(self: TextTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if threading.current_thread() is threading.main_thread():
            inline.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(TextTokenizer, "encode", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            exchange = Exchange(app, "/v1/completions", completion(prompt=["x" * 40] * 4))
            await exchange.task
            assert exchange.status == 200
            assert sum(map(len, inline)) == 80

    asyncio.run(scenario())


def test_a_prompt_is_decoded_once_for_all_its_choices_and_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INLINE_CHARS", 8)
    steps: list[bool] = []
    step = TextTokenizer.step

    def noting(self: TextTokenizer, stream: object, token_id: int) -> str | None:
        if token_id == ord("%"):
            steps.append(threading.current_thread() is threading.main_thread())
        return step(self, stream, token_id)  # type: ignore[arg-type]

    monkeypatch.setattr(TextTokenizer, "step", noting)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            exchange = Exchange(app, "/v1/completions", completion(prompt=[ord("%")] * 50, echo=True, n=4))
            await exchange.task
            assert exchange.status == 200
            choices = json.loads(exchange.writes[0])["choices"]
            assert [choice["text"] for choice in choices] == ["%" * 50 + "Hello"] * 4
            assert steps == [False] * 50

    asyncio.run(scenario())
