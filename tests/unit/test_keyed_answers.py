"""Answers to requests with an `Idempotency-Key`: computed once, kept whole or not at all, bounded by key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.held import HeldBytes
from moeserve.frontend.http import Piece
from moeserve.frontend.jobs.idempotency import KeyedAnswers, Work
from moeserve.frontend.store import idempotency, jobs
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.idempotency import Name
from moeserve.frontend.store.store import Bounds, NoRoom, Shelf, Store, drop_old
from tests.support.refusals import refused
from tests.support.stores import LARGE, MakeShelf, shelves

A, B = b"a", b"b"
NAME = Name(b"key", b"content")
HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"x-moeserve-ignored", b"user")]}


def begin(shelf: Shelf, answer_id: str, owner: str = "me", dead: str = "") -> None:
    idempotency.begin(shelf, NAME, answer_id, owner, lambda other: other == dead)


def test_a_key_has_one_answer_which_is_kept_when_it_is_whole(shelf: MakeShelf) -> None:
    begin(shelf(A), "1")
    with refused("idempotency_key_in_use", "Idempotency-Key"):
        begin(shelf(A), "2", "other")
    begin(shelf(B), "3")
    idempotency.finish(shelf(A), "1", b"head", b"0123456789")
    found = idempotency.find(shelf(A), NAME)
    assert found is not None
    assert (found.kept_id, found.owner, found.headers, found.num_bytes) == ("1", None, b"head", 10)
    assert [idempotency.read(shelf(A), "1", start, 4) for start in (0, 4, 8, 12)] == [b"0123", b"4567", b"89", b""]
    assert idempotency.read(shelf(B), "1", 0, 4) == b""
    with refused("idempotency_key_in_use", "Idempotency-Key"):
        begin(shelf(A), "4", dead="me")


def test_the_key_of_an_answer_that_is_lost_is_free(shelf: MakeShelf) -> None:
    begin(shelf(A), "1", "dead")
    begin(shelf(A), "2", "me", dead="dead")
    assert not shelf(A).has("1")
    idempotency.finish(shelf(A), "1", b"head", b"of nobody")
    found = idempotency.find(shelf(A), NAME)
    assert found is not None
    assert (found.kept_id, found.headers) == ("2", None)


def test_an_answer_is_known_for_a_day_and_one_whose_process_has_died_no_longer(shelf: MakeShelf) -> None:
    begin(shelf(A, now=100.0), "1")
    idempotency.finish(shelf(A, now=200.0), "1", b"head", b"body")
    begin(shelf(B, now=200.0), "2")
    drop_old(shelf(now=199.0 + limits.IDEMPOTENCY_KEY_S))
    assert shelf(A).has("1")
    assert shelf(B).has("2")
    drop_old(shelf(now=201.0 + limits.IDEMPOTENCY_KEY_S))
    assert not shelf(A).has("1")
    assert not shelf(B).has("2")
    assert shelf(A).num_bytes == shelf(B).num_bytes == 0


def test_an_answer_counts_in_its_keys_share_and_one_without_room_is_not_kept(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(6_000, 1e9)) as shelf:
        begin(shelf(A), "1")
        idempotency.finish(shelf(A), "1", b"head", b"x" * 3_000)
        assert 3_000 < shelf(A).num_bytes < 6_000
        jobs.create(shelf(A), "job", b"x" * 1_000, "me", None, None)
        idempotency.begin(shelf(A), Name(b"other", b""), "2", "me", lambda _: False)
        with pytest.raises(NoRoom), shelf(A).attempt():
            idempotency.finish(shelf(A), "2", b"head", b"x" * 5_000)


# In one process.


class Process:
    """An HTTP process's answers. `works` are those that are computed, by number."""

    def __init__(self, path: Path, store: Store, owner: Owner) -> None:
        self.path = path
        self.store = store
        self.answers = KeyedAnswers(store, owner, HeldBytes())
        self.started: list[bytes] = []
        self.may_end = asyncio.Event()
        self.places = 0  # that are held

    def work(self, text: bytes = b"text", *, is_whole: bool = True, error: Exception | None = None) -> Work:
        async def run(send: Callable[[Any], Coroutine[Any, Any, None]]) -> bool:
            self.started.append(text)
            await send(HEAD)
            await send({"type": "http.response.body", "body": b"begin ", "more_body": True})
            await self.may_end.wait()
            if error is not None:
                raise error
            await send({"type": "http.response.body", "body": text})
            return is_whole

        return run

    def begin(self, work: Work, *, name: Name = NAME, caller: bytes = A) -> AsyncGenerator[Piece]:
        def leave() -> None:
            self.places -= 1

        places = ExitStack()
        self.places += 1
        places.callback(leave)
        return self.answers.begin(caller, name, work, places)

    async def find(self, name: Name = NAME, caller: bytes = A) -> Any:
        return await self.answers.find(caller, name)


async def read(answer: AsyncGenerator[Piece]) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    sent, body = list[tuple[bytes, bytes]](), b""
    async for headers, piece, _ in answer:
        sent, body = headers, body + piece
    return body, sent


def with_process(test: Callable[[Process], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run_test(tmp_path: Path) -> None:
        async def run() -> None:
            path = tmp_path / "store"
            store, owner = Store(path, LARGE), Owner(path)
            await store.start()
            owner.hold()
            process = Process(path, store, owner)
            try:
                await test(process)
                assert process.places == 0
            finally:
                await process.answers.stop()
                await store.stop()
                owner.release()

        asyncio.run(asyncio.wait_for(run(), 60))

    return run_test


@with_process
async def test_requests_with_one_key_share_one_computation_and_later_ones_get_the_same_bytes(process: Process) -> None:
    answers = [process.begin(process.work()), process.begin(process.work(b"another")), await process.find()]
    reading = [asyncio.create_task(read(answer)) for answer in answers]
    process.may_end.set()
    assert [await one for one in reading] == [(b"begin text", HEAD["headers"])] * 3
    assert process.started == [b"text"]
    assert await read(await process.find()) == (b"begin text", HEAD["headers"])
    for caller, name in ((B, NAME), (A, Name(b"other key", b"content"))):
        assert await process.find(name, caller) is None


@with_process
async def test_an_answer_is_in_the_store_before_anybody_has_all_of_it(process: Process) -> None:
    answer = process.begin(process.work())
    process.may_end.set()
    assert [(piece, is_last) async for _, piece, is_last in answer] == [(b"begin ", False), (b"text", True)]
    found = await process.store.read(A, partial(idempotency.find, name=NAME))
    assert found is not None
    assert found.headers is not None


@with_process
async def test_an_answer_goes_on_when_its_clients_have_left(process: Process) -> None:
    answer = process.begin(process.work())
    await anext(answer)
    await answer.aclose()
    process.may_end.set()
    await read(await process.find())
    assert await read(await process.find()) == (b"begin text", HEAD["headers"])


@pytest.mark.parametrize("error", [None, invalid("no such thing"), ValueError("a defect")])
def test_an_answer_that_fails_gives_its_key_back(tmp_path: Path, error: Exception | None) -> None:
    @with_process
    async def run(process: Process) -> None:
        process.may_end.set()
        answer = process.begin(process.work(b"the event of an error", is_whole=False, error=error))
        if error is None:
            assert (await read(answer))[0] == b"begin the event of an error"
        else:
            with pytest.raises(ApiError) as caught:
                await read(answer)
            assert caught.value.status == (400 if isinstance(error, ApiError) else 500)
        assert await process.find() is None
        assert (await read(process.begin(process.work())))[0] == b"begin text"

    run(tmp_path)


@with_process
async def test_another_request_with_the_key_is_refused_while_the_first_runs_and_later(process: Process) -> None:
    other = Name(NAME.key, b"else")
    answer = process.begin(process.work())
    for begins in (partial(process.begin, process.work(), name=other), partial(process.find, other)):
        with pytest.raises(ApiError) as caught:
            await begins()  # type: ignore[misc]
        assert (caught.value.status, caught.value.code) == (422, "idempotency_key_reused")
    process.may_end.set()
    await read(answer)
    with refused("idempotency_key_reused", "Idempotency-Key"):
        await process.find(other)


@with_process
async def test_an_answer_that_another_process_computes_is_refused_for_now_and_begun_anew_once_it_has_died(
    process: Process,
) -> None:
    other = Owner(process.path)
    other.hold()
    enter = partial(idempotency.begin, name=NAME, answer_id="theirs", owner=other.name, is_over=lambda _: False)
    await process.store.write(A, enter)
    process.may_end.set()
    for ask in (process.find, lambda: read(process.begin(process.work()))):
        with pytest.raises(ApiError) as caught:
            await ask()
        assert (caught.value.status, caught.value.code) == (409, "idempotency_key_in_use")
        assert caught.value.retry_after_s == 1.0
    other.release()
    assert await process.find() is None
    assert (await read(process.begin(process.work())))[0] == b"begin text"


@with_process
async def test_an_answer_that_the_store_does_not_take_reaches_its_clients_and_leaves_the_key_free(
    process: Process,
) -> None:
    answer = process.begin(process.work())
    await anext(answer)
    write = process.store.write

    async def fail(caller: bytes, work: Callable[[Shelf], Any]) -> Any:
        def no_disk(shelf: Shelf) -> Any:
            shelf.db.execute("no SQL")

        return await write(caller, no_disk)

    process.store.write = fail  # type: ignore[method-assign, assignment]
    process.may_end.set()
    assert [piece async for _, piece, _ in answer] == [b"text"]
    process.store.write = write  # type: ignore[method-assign]
    assert await process.find() is None
    assert (await read(process.begin(process.work())))[0] == b"begin text"


def test_an_answer_longer_than_is_kept_reaches_its_client_and_leaves_the_key_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_KEPT_ANSWER_BYTES", 1000)

    @with_process
    async def run(process: Process) -> None:
        process.may_end.set()
        answer = process.begin(process.work(b"x" * 2_000))
        assert (await read(answer))[0] == b"begin " + b"x" * 2_000
        assert await process.find() is None

    run(tmp_path)


@with_process
async def test_a_process_that_stops_ends_the_answers_that_it_computes(process: Process) -> None:
    answer = process.begin(process.work())
    reading = asyncio.create_task(read(answer))
    while not process.started:
        await asyncio.sleep(0)
    await process.answers.stop()
    with pytest.raises(ApiError) as caught:
        await reading
    assert (caught.value.status, caught.value.code) == (503, "draining")
    assert await process.find() is None
