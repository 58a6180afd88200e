"""The frontend's client of the engine over several lives of it, with a link that tests speak through."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from moeserve.config import ServeConfig
from moeserve.frontend.relay import engine_client
from moeserve.frontend.relay.engine_client import MAX_COMMANDS_OF_KEY, EngineClient, EngineLink
from moeserve.frontend.relay.request_group import CrashSuspect, EngineAsleep, EngineBusy, EngineGone
from moeserve.plan import FinishReason, SamplingParams
from moeserve.run_context import RunContext, keep_ready
from moeserve.wire import (
    Abort,
    Admitted,
    Control,
    ControlResult,
    EngineNews,
    Generate,
    Left,
    Message,
    Output,
    Outputs,
    Rejected,
    Rest,
    ToEngine,
    decode,
    encode_news,
    pack_token_ids,
    unpack_token_ids,
)
from tests.support.engine_ready import engine_ready

FIELDS: dict[str, Any] = {
    "config": ServeConfig(),
    "model_dir": "none",
    "model_hash": "none",
    "incarnation": 1,
    "secret": "00",
    "served_model_names": ("none",),
}


class Link:
    """Stands in for the connection to one life of the engine, and keeps sent messages."""

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

    def send(self, message: Message) -> None:
        self.sent.append(message)

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
        self.folder = folder
        self.links: list[Link] = []

        def connect(*arguments: Any, **options: Any) -> Link:
            self.links.append(Link(*arguments, **options))
            return self.links[-1]

        monkeypatch.setattr(engine_client, "EngineLink", connect)
        hearing, self._news = os.pipe()
        self.client = EngineClient(RunContext(**FIELDS, run_dir=str(folder)), news_fd=hearing)

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

    async def rest(self, rest: Rest) -> None:
        """Have the newest life end so that the service sleeps."""
        os.write(self._news, encode_news(EngineNews(len(self.links), rest=rest)))
        await self.client.until_rest(rest)

    async def end_of_all(self, reason: str) -> None:
        """Tell that no further life follows."""
        os.write(self._news, encode_news(EngineNews(None, reason)))
        await self.client.lost.wait()

    async def end(self) -> None:
        await self.client.stop()
        os.close(self._news)


def with_lives(test: Callable[[Lives], Coroutine[Any, Any, None]]) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Make a test of a coroutine function; uvloop runs it, as in a service."""

    def run_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def run() -> None:
            lives = Lives(tmp_path, monkeypatch)
            await test(lives)
            await lives.end()

        uvloop.run(run())

    return run_test


def generate(name: str) -> list[Generate]:
    return [Generate(name, pack_token_ids([*name.encode()]), SamplingParams(max_tokens=50))]


@with_lives
async def test_the_next_engine_gets_all_open_requests_at_once_in_the_order_of_their_arrival(lives: Lives) -> None:
    client = lives.client
    link = await lives.begin()
    async with client.submit(generate("a")) as a, client.submit(generate("b")), client.submit(generate("c")):
        assert link.asked() == ["a", "b", "c"]
        assert not any(generate.resumes for generate in link.generates)
        link.answer("a", 5)
        for number in range(2, 5):
            link.die()
            async with client.submit(generate(f"in pause {number}")):
                link = await lives.begin()
                assert link.asked() == ["a", "b", "c", f"in pause {number}"]
                assert [generate.resumes for generate in link.generates] == [True, True, True, False]
                link.answer("a", number)
        assert a.num_deaths == 3
        assert [*unpack_token_ids(link.generates[0].output_token_ids)] == [5, 2, 3]
        assert [token for _, output in await a.next() for token in output.token_ids] == [5, 2, 3, 4]


@with_lives
async def test_a_request_that_ended_engines_ends_and_the_others_go_on(lives: Lives) -> None:
    client = lives.client
    link = await lives.begin()
    async with client.submit(generate("a")) as a, client.submit(generate("b")) as b:
        link.say(Admitted("a"))
        link.answer("a", 5)
        link.die()
        link = await lives.begin()
        link.say(Rejected("a", "engine_crash", "the engine ended 2 times"))
        link.answer("b", 6)
        assert [token for _, output in await a.next() for token in output.token_ids] == [5]
        with pytest.raises(CrashSuspect, match="2 times"):
            await a.next()
        assert len(await b.next()) == 1
    async with client.submit(generate("again")) as again:
        link.say(Rejected("again", "engine_crash", "before"))
        with pytest.raises(CrashSuspect, match="before"):
            await again.admitted()


def left(link: Link) -> list[str]:
    return [message.request_id for message in link.sent if isinstance(message, Left)]


@with_lives
async def test_a_client_that_leaves_in_the_pause_is_not_handed_over_and_told_to_the_next_engine(lives: Lives) -> None:
    client = lives.client
    link = await lives.begin()
    async with client.submit(generate("a")):
        async with client.submit(generate("b")):
            link.die()
            async with client.submit(generate("new")):
                pass
        link = await lives.begin()
        assert link.asked() == ["a"]
        assert isinstance(link.sent[0], Left)
        assert left(link) == ["b"]
        assert not any(isinstance(message, Abort) for message in link.sent)
    assert [message.request_id for message in link.sent if isinstance(message, Abort)] == ["a"]


@with_lives
async def test_an_engine_is_told_whose_clients_left_before_the_last_one_died_without_ending_them(lives: Lives) -> None:
    """As of an engine that hangs."""
    link = await lives.begin()
    for name in "abc":
        async with lives.client.submit(generate(name)):
            pass
    link.say(Outputs([Output("a", [], FinishReason.ABORT)]))
    link.say(Rejected("c", "invalid", "no"))
    link.die()
    link = await lives.begin()
    assert left(link) == ["b"]
    link.die()
    assert left(await lives.begin()) == []


def test_messages_wait_in_order_for_an_engine_that_takes_none_yet(tmp_path: Path) -> None:
    async def run() -> None:
        context = RunContext(**FIELDS, run_dir=str(tmp_path))
        sockets = zmq.asyncio.Context()
        ended: list[str] = []
        say = ended.append
        link = EngineLink(context, sockets, on_message=print, on_unreadable=say, on_end=say)
        link.send(generate("a")[0])
        link.send(Abort("a"))
        engine = sockets.socket(zmq.ROUTER)
        engine.bind(context.engine_address)
        found = [decode((await engine.recv_multipart())[1], ToEngine)[1] for _ in range(3)]
        assert [type(message).__name__ for message in found] == ["Hello", "Generate", "Abort"]
        link.send(Abort("b"))
        await link.stop()
        assert ended == []
        engine.close()
        sockets.term()

    asyncio.run(run())


@with_lives
async def test_a_key_that_asks_too_much_is_refused_before_anything_is_sent(lives: Lives) -> None:
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


@with_lives
async def test_what_comes_while_the_service_sleeps_waits_for_the_engine_that_wakes_it(lives: Lives) -> None:
    client = lives.client
    link = await lives.begin()
    async with client.submit(generate("a")) as a:
        link.answer("a", 5)
        await lives.rest(Rest.FALLING)
        await lives.rest(Rest.ASLEEP)
        with pytest.raises(EngineAsleep):
            await client.control("list_prefixes")
        awake = asyncio.ensure_future(client.until_rest(Rest.AWAKE))
        async with client.submit(generate("b")):
            link = await lives.begin()
            await awake
            assert link.asked() == ["a", "b"]
            assert [generate.resumes for generate in link.generates] == [True, False]
            link.answer("a", 6)
        assert [token for _, output in await a.next() for token in output.token_ids] == [5, 6]
    assert client.num_restarts == 0


@with_lives
async def test_whoever_waits_for_sleep_or_its_end_hears_that_no_engine_will_come(lives: Lives) -> None:
    await lives.begin()
    waiting = [asyncio.ensure_future(lives.client.until_rest(Rest.ASLEEP))]
    await asyncio.sleep(0)
    await lives.end_of_all("no more")
    for each in waiting:
        with pytest.raises(EngineGone, match="no more"):
            await each
    with pytest.raises(EngineGone):
        await lives.client.until_rest(Rest.AWAKE)


@with_lives
async def test_a_connection_may_have_the_number_of_the_pipe_on_which_the_end_was_told(lives: Lives) -> None:
    await lives.begin()
    await lives.end_of_all("no more")
    await lives.client.stop()
    loop = asyncio.get_running_loop()
    for _ in range(3):
        own, other = socket.socketpair()
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, own)
        transport.close()
        other.close()


@with_lives
async def test_a_process_that_was_started_asleep_knows_the_model_from_the_last_engine(lives: Lives) -> None:
    keep_ready(RunContext(**FIELDS, run_dir=str(lives.folder)), engine_ready(max_model_len=77))
    await lives.client.start()
    await lives.rest(Rest.ASLEEP)
    assert lives.client.ready is not None
    assert lives.client.ready.max_model_len == 77
    async with lives.client.submit(generate("a")):
        assert (await lives.begin()).asked() == ["a"]
