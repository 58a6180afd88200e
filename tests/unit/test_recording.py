"""A recorded answer: every reader gets all of it, whenever it comes, within bounds of memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.held import HeldBytes, Hold
from moeserve.frontend.jobs.recording import PIECE_BYTES, Recording

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


A, B = b"a", b"b"


class Held(HeldBytes):
    def __getitem__(self, caller: bytes) -> int:
        return self._of_key[caller]


def with_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(asyncio.wait_for(test(), 60))


async def say(recording: Recording, text: bytes, *, more: bool = True) -> None:
    await recording.send({"type": "http.response.body", "body": text, "more_body": more})


async def pieces_of(recording: Recording) -> AsyncGenerator[tuple[bytes, bool]]:
    async with aclosing(recording.read()) as answer:
        async for _, piece, is_last in answer:
            yield piece, is_last


async def read(recording: Recording) -> list[tuple[bytes, bool]]:
    return [piece async for piece in pieces_of(recording)]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@with_loop
async def test_readers_get_the_answer_from_its_beginning_whenever_they_come() -> None:
    held = Held()
    recording = Recording(b"content", Hold(held, A))
    early = asyncio.create_task(read(recording))
    await recording.send(START)
    await say(recording, b"one ")
    await settled()
    late = asyncio.create_task(read(recording))
    await say(recording, b"two ")
    await settled()
    await say(recording, b"end", more=False)
    await settled()
    assert not early.done()
    assert recording.body == b"one two end"
    recording.end(None)
    assert await early == [(b"one ", False), (b"two ", False), (b"end", True)]
    assert await late == [(b"one two ", False), (b"end", True)]
    assert await read(recording) == [(b"one two end", True)]
    assert recording.headers == START["headers"]
    assert held[A] == 0


@with_loop
async def test_the_last_part_of_an_answer_that_fails_is_not_given() -> None:
    recording = Recording(b"content", Hold(Held(), A))
    await say(recording, b"one")
    await say(recording, b"end", more=False)
    recording.end(invalid("no such thing"))
    pieces = pieces_of(recording)
    assert await anext(pieces) == (b"one", False)
    with pytest.raises(ApiError, match="no such thing"):
        await anext(pieces)


@with_loop
async def test_pieces_are_bounded_and_hold_whole_parts() -> None:
    recording = Recording(b"content", Hold(Held(), A))
    part = b"x" * (PIECE_BYTES // 4)
    for _ in range(9):
        await say(recording, part)
    await say(recording, b"", more=False)
    recording.end(None)
    assert [len(piece) for piece, _ in await read(recording)] == [4 * len(part), 4 * len(part), len(part)]


async def _outgrown(held: Held, *, readers: int) -> tuple[Recording, list[AsyncGenerator[tuple[bytes, bool]]]]:
    """Return an answer that has outgrown its room, and readers that have all of it."""
    recording = Recording(b"content", Hold(held, A))
    attached = [pieces_of(recording) for _ in range(readers)]
    firsts = [asyncio.ensure_future(anext(pieces)) for pieces in attached]
    await settled()
    await say(recording, b"x" * 900)
    await asyncio.gather(*firsts)
    assert recording.is_kept
    return recording, attached


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_KEPT_ANSWER_BYTES", 1000)
    monkeypatch.setattr(limits, "MAX_HELD_BYTES_PER_KEY", 1500)


@pytest.mark.usefixtures("small")
def test_an_answer_beyond_its_room_goes_on_at_the_pace_of_its_slowest_reader_and_nobody_else_comes_in() -> None:
    @with_loop
    async def run() -> None:
        held = Held()
        recording, (quick, slow) = await _outgrown(held, readers=2)
        await say(recording, b"y" * 200)
        assert not recording.is_kept
        assert 200 < held[A] < 400
        saying = asyncio.create_task(say(recording, b"z" * 900))
        await settled()
        assert await anext(quick) == (b"y" * 200 + b"z" * 900, False)
        await settled()
        assert not saying.done()
        assert await anext(slow) == (b"y" * 200 + b"z" * 900, False)
        await saying
        assert held[A] == 0
        with pytest.raises(ApiError) as refused:
            await read(recording)
        assert (refused.value.status, refused.value.code) == (409, "idempotency_key_in_use")
        await say(recording, b"end", more=False)
        recording.end(None)
        for pieces in (quick, slow):
            assert [piece async for piece in pieces] == [(b"end", True)]
        assert held[A] == 0

    run()


@pytest.mark.usefixtures("small")
def test_an_answer_beyond_its_room_that_nobody_reads_any_more_ends() -> None:
    @with_loop
    async def run() -> None:
        recording, (reader,) = await _outgrown(Held(), readers=1)
        await say(recording, b"y" * 200)
        saying = asyncio.create_task(say(recording, b"z" * 900))
        await settled()
        await reader.aclose()
        with pytest.raises(ApiError, match="not answered yet"):
            await saying

    run()


@pytest.mark.usefixtures("small")
def test_the_answers_of_one_key_share_a_room_and_those_of_another_have_their_own() -> None:
    @with_loop
    async def run() -> None:
        held = Held()
        first, second, other = (Recording(b"content", Hold(held, caller)) for caller in (A, A, B))
        for recording in (first, second, other):
            await say(recording, b"x" * 700, more=False)
        assert [recording.is_kept for recording in (first, second, other)] == [True, False, True]
        first.end(None)
        second.end(None)
        assert held[A] == 0

    run()


@with_loop
async def test_an_answer_that_is_read_slowly_holds_its_room_until_the_last_reader_has_left() -> None:
    held = Held()
    recording = Recording(b"content", Hold(held, A))
    pieces = pieces_of(recording)
    first = asyncio.ensure_future(anext(pieces))
    await settled()
    await say(recording, b"x" * 100)
    await first
    await say(recording, b"end", more=False)
    recording.end(None)
    assert held[A] > 100
    assert await anext(pieces) == (b"end", True)
    await pieces.aclose()
    assert held[A] == 0
