"""What happens when nothing happens: silent engines, slow clients, readers that do not read."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.plan import FinishReason
from moeserve.wire import Abort, Generate, Output, Outputs
from tests.support.fake_engine import admit_only, ignore, say, trickle
from tests.support.in_process import Exchange, application, completion


async def reached(condition: Any) -> None:
    """Waits for something that other tasks bring about."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_stream_without_news_is_kept_alive_by_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEEP_ALIVE_S", 0.05)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, engine):
            engine.script = admit_only
            exchange = Exchange(app, "/v1/completions", completion(stream=True))
            await reached(lambda: len(exchange.sent) >= 3)
            assert set(exchange.writes) == {b": keep-alive\n\n"}
            (generate,) = engine.of(Generate)
            engine.send(Outputs([Output(generate.request_id, [65], FinishReason.LENGTH, 0, 1)]))
            await exchange.task
            assert exchange.writes[-1] == b"data: [DONE]\n\n"

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_dropped_for_its_wait_is_refused_with_a_status(tmp_path: Path, stream: bool) -> None:
    """Nothing waited when the engine last told its load."""

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, engine):
            engine.script = admit_only
            exchange = Exchange(app, "/v1/completions", completion(stream=stream))
            (generate,) = await asyncio.to_thread(engine.wait_for, Generate)
            engine.send(Outputs([Output(generate.request_id, [], FinishReason.LATE, 0, 0)]))
            await exchange.task
            assert (exchange.status, json.loads(exchange.writes[0])["error"]["code"]) == (503, "overloaded")
            assert b"retry-after" in dict(exchange.sent[0]["headers"])

    asyncio.run(scenario())


def test_a_reader_that_does_not_read_loses_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEND_TIMEOUT_S", 0.05)

    async def stalled(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with application(tmp_path) as (app, services, engine):
            engine.script = trickle("abc")
            exchange = Exchange(app, "/v1/completions", completion(stream=True), stalled)
            await exchange.task
            assert exchange.aborted
            assert services.admission.in_flight == 0
            await asyncio.to_thread(engine.wait_for, Abort)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_does_not_take_is_refused_and_aborted(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with application(tmp_path, engine_timeout=0.2) as (app, services, engine):
            engine.script = ignore
            exchange = Exchange(app, "/v1/completions", completion(stream=stream))
            await exchange.task
            error = json.loads(exchange.writes[0])["error"]
            assert (exchange.status, error["code"]) == (503, "engine_silent")
            assert "0.3 s" in error["message"]
            assert services.admission.in_flight == 0
            await asyncio.to_thread(engine.wait_for, Abort)

    asyncio.run(scenario())


def test_a_command_that_the_engine_does_not_answer_is_given_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with application(tmp_path, engine_timeout=0.2) as (app, _, engine):
            engine.answers_commands = False
            exchange = Exchange(app, "/reset_prefix_cache", b"")
            await exchange.task
            assert (exchange.status, json.loads(exchange.writes[0])["error"]["code"]) == (503, "engine_silent")

    asyncio.run(scenario())


def test_a_body_that_does_not_come_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECEIVE_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with application(tmp_path) as (app, _, _engine):
            exchange = Exchange(app, "/v1/completions", None)
            await exchange.task
            assert exchange.status == 408
            assert (b"connection", b"close") in exchange.sent[0]["headers"]

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_the_handler_at_once(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with application(tmp_path) as (app, services, engine):
            engine.script = admit_only
            exchange = Exchange(app, "/v1/completions", completion(stream=stream))
            await reached(lambda: services.engine.num_requests)
            exchange.leave()
            await exchange.task
            assert (services.engine.num_requests, services.admission.in_flight) == (0, 0)

    asyncio.run(scenario())


def test_a_long_prompt_is_tokenised_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with application(tmp_path) as (app, _, engine):
            engine.script = say("ok")
            for padding in (0, limits.INLINE_BODY_BYTES):
                exchange = Exchange(app, "/v1/completions", completion(prompt="x" * 100) + b" " * padding)
                await exchange.task
                assert exchange.status == 200
                assert len(engine.of(Generate)[-1].token_ids) == 4 * 100

    asyncio.run(scenario())


def test_every_step_of_a_stream_is_one_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with application(tmp_path) as (app, _, engine):
            engine.script = say("abcd", chunk=2)
            exchange = Exchange(app, "/v1/completions", completion(stream=True))
            await exchange.task
            assert all(write.endswith(b"\n\n") for write in exchange.writes)
            assert b"".join(exchange.writes).count(b"data: ") == 4

    asyncio.run(scenario())
