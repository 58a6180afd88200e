"""The frontend's client of the engine over several lives of it, with a link that tests speak through."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from moeserve.config import ServeConfig
from moeserve.frontend import engine_client
from moeserve.frontend.engine_client import MAX_COMMANDS_OF_KEY, EngineClient
from moeserve.frontend.request_group import CrashSuspect, EngineBusy, EngineGone
from moeserve.plan import SamplingParams, Terms
from moeserve.wire import (
    Abort,
    Control,
    ControlResult,
    EngineNews,
    Generate,
    Message,
    Output,
    Outputs,
    RunContext,
    encode_news,
    pack_token_ids,
    unpack_token_ids,
)
from tests.support.engine_ready import engine_ready


class Link:
    """Stands in for the connection to one life of the engine, and keeps what was sent."""

    def __init__(
        self,
        run: RunContext,
        sockets: zmq.asyncio.Context,
        *,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
        **_: Any,
    ) -> None:
        self.say, self.die = on_message, lambda: on_end("died")
        self.sent: list[Message] = []

    def send(self, message: Message) -> bool:
        self.sent.append(message)
        return True

    def watch(self, pid: int) -> None:
        """Its end is said here."""

    def close(self) -> None:
        """Nothing is open."""

    async def stop(self) -> None:
        """Nothing is open."""

    @property
    def generates(self) -> list[Generate]:
        return [message for message in self.sent if isinstance(message, Generate)]

    def asked(self) -> list[str]:
        return [message.request_id for message in self.generates]

    def answer(self, request_id: str, *token_ids: int) -> None:
        self.say(Outputs([Output(request_id, list(token_ids))]))


class Lives:
    """A client, and the lives of its engine."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.links: list[Link] = []

        def connect(*arguments: Any, **options: Any) -> Link:
            self.links.append(Link(*arguments, **options))
            return self.links[-1]

        monkeypatch.setattr(engine_client, "EngineLink", connect)
        hearing, self._news = os.pipe()
        run = RunContext(
            config=ServeConfig(),
            model_dir="none",
            model_hash="none",
            run_dir=str(folder),
            incarnation=1,
            secret="00",
            served_model_names=("none",),
        )
        self.client = EngineClient(run, news_fd=hearing)

    async def begin(self) -> Link:
        """Return the link to the first or the next life of the engine, which is ready."""
        number = len(self.links) + 1
        if number == 1:
            await self.client.start()
        else:
            os.write(self._news, encode_news(EngineNews(number)))
        while len(self.links) < number:
            await asyncio.sleep(0)
        self.links[-1].say(engine_ready())
        return self.links[-1]

    async def end(self) -> None:
        await self.client.stop()
        os.close(self._news)


def generate(name: str, *, prompt: str | None = None, seed: int = 0, background: bool = False) -> list[Generate]:
    """prompt: its own for each name by default."""
    token_ids = pack_token_ids([*(prompt or name).encode()])
    return [Generate(name, token_ids, SamplingParams(max_tokens=50, seed=seed), terms=Terms(background=background))]


def test_an_engine_that_dies_ends_the_request_at_fault_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        lives = Lives(tmp_path, monkeypatch)
        client = lives.client
        link = await lives.begin()
        async with client.submit(generate("a")) as a, client.submit(generate("b")) as b, client.submit(generate("c")):
            assert link.asked() == ["a", "b", "c"]
            link.answer("a", 5)
            link.die()
            # Each is tried until it is beyond where it was.
            link = await lives.begin()
            assert link.asked() == ["a"]
            link.answer("a", 6, 7, 8)
            assert link.asked() == ["a"]
            link.answer("a", 9)
            assert link.asked() == ["a", "b"]
            link.answer("a", 10)
            link.die()
            with pytest.raises(EngineGone, match="2 times"):
                await b.next()
            link = await lives.begin()
            assert link.asked() == ["a"]
            link.answer("a", 11, 12, 13, 14)
            assert link.asked() == ["a", "c"]
            assert [*unpack_token_ids(link.generates[0].output_token_ids)] == [5, 6, 7, 8, 9, 10]
            assert [token for _, output in await a.next() for token in output.token_ids] == [*range(5, 15)]
        await lives.end()

    asyncio.run(run())


def test_a_request_that_ended_engines_is_refused_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        lives = Lives(tmp_path, monkeypatch)
        client = lives.client
        link = await lives.begin()
        async with client.submit(generate("a")) as first, client.submit(generate("twin", prompt="a", seed=7)) as twin:
            link.die()
            (await lives.begin()).die()
            with pytest.raises(CrashSuspect, match="2 times"):
                await first.next()
            link = await lives.begin()
            with pytest.raises(CrashSuspect, match="before"):
                await twin.next()
        with pytest.raises(CrashSuspect, match="before"):
            async with client.submit(generate("again", prompt="a", seed=8)):
                pass
        async with client.submit(generate("other")):
            assert link.asked() == ["other"]
        await lives.end()

    asyncio.run(run())


def test_requests_in_the_background_are_tried_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        lives = Lives(tmp_path, monkeypatch)
        client = lives.client
        link = await lives.begin()
        async with client.submit(generate("a", background=True)), client.submit(generate("b")):
            link.die()
            assert (await lives.begin()).asked() == ["b"]
        await lives.end()

    asyncio.run(run())


def test_a_client_that_leaves_holds_up_nobody_on_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        lives = Lives(tmp_path, monkeypatch)
        client = lives.client
        link = await lives.begin()
        async with client.submit(generate("a")) as a:
            async with client.submit(generate("b")), client.submit(generate("c")):
                link.die()
                link = await lives.begin()
                assert link.asked() == ["a"]
            # They never had their turn.
            assert [message.request_id for message in link.sent if isinstance(message, Abort)] == []
            async with client.submit(generate("new")) as new:
                assert link.asked() == ["a", "new"]
                link.die()
                link = await lives.begin()
                assert link.asked() == ["new"]
                assert (a.num_deaths, new.num_deaths) == (2, 1)
        await lives.end()

    asyncio.run(run())


def test_a_key_that_asks_too_much_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        lives = Lives(tmp_path, monkeypatch)
        link = await lives.begin()
        asked = [asyncio.ensure_future(lives.client.control("x", {}, "a")) for _ in range(MAX_COMMANDS_OF_KEY + 3)]
        other = asyncio.ensure_future(lives.client.control("x", {}, "b"))
        await asyncio.sleep(0)
        sent = [message for message in link.sent if isinstance(message, Control)]
        assert [message.tenant for message in sent] == ["a"] * MAX_COMMANDS_OF_KEY + ["b"]
        results = await asyncio.gather(*asked[MAX_COMMANDS_OF_KEY:], return_exceptions=True)
        assert all(isinstance(result, EngineBusy) for result in results)
        for message in sent:
            link.say(ControlResult(message.control_id, {}, "no", is_refused=message.control_id == 1))
        answers = await asyncio.gather(*asked[:MAX_COMMANDS_OF_KEY], other, return_exceptions=True)
        assert [isinstance(answer, EngineBusy) for answer in answers] == [True] + [False] * MAX_COMMANDS_OF_KEY
        # The places are free again.
        again = asyncio.ensure_future(lives.client.control("x", {}, "a"))
        await asyncio.sleep(0)
        link.say(ControlResult(sent[-1].control_id + 1, {"done": True}))
        assert (await again).result == {"done": True}
        await lives.end()

    asyncio.run(run())
