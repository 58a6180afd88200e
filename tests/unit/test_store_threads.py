"""Turns of callers on the store's threads."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from moeserve.frontend.store.store import Store
from moeserve.frontend.store.threads import Turns
from tests.support.stores import LARGE


def test_callers_take_turns_however_much_one_of_them_asks() -> None:
    async def run() -> None:
        turns, begun = Turns(1), list[str]()

        async def work(caller: str) -> None:
            await turns.enter(caller.encode())
            begun.append(caller)
            await asyncio.sleep(0)
            turns.leave(caller.encode())

        await asyncio.gather(*map(work, "aaaaabbc"))
        assert "".join(begun) == "aabcabaa"

    asyncio.run(run())


def test_a_caller_alone_has_all_places_and_gives_the_next_free_one_to_another() -> None:
    async def run() -> None:
        turns = Turns(2)
        for _ in range(2):
            await turns.enter(b"a")
        waiting = [asyncio.create_task(turns.enter(caller)) for caller in (b"a", b"b")]
        await asyncio.sleep(0)
        turns.leave(b"a")
        await waiting[1]
        assert not waiting[0].done()
        turns.leave(b"a")
        await waiting[0]

    asyncio.run(run())


def test_a_turn_that_was_given_up_goes_to_the_next_one() -> None:
    async def run() -> None:
        turns = Turns(1)
        await turns.enter(b"a")
        waiting = [asyncio.create_task(turns.enter(b"a")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        turns.leave(b"a")
        waiting[1].cancel()  # it has its turn and does not know yet
        await waiting[2]
        assert [task.cancelled() for task in waiting] == [True, True, False]

    asyncio.run(run())


def test_a_key_whose_reads_fill_the_threads_holds_up_another_key_for_one_read_at_most(tmp_path: Path) -> None:
    async def run() -> None:
        store = Store(tmp_path / "store", LARGE)
        await store.start()
        begun, go, num_done = threading.Semaphore(0), threading.Semaphore(0), 0

        def wait(_: Any) -> None:
            nonlocal num_done
            begun.release()
            go.acquire()
            num_done += 1

        floods = [asyncio.create_task(store.read(b"flood", wait)) for _ in range(50)]
        for _ in range(2):  # on every thread that reads
            await asyncio.to_thread(begun.acquire)
        other = asyncio.create_task(store.read(b"other", lambda shelf: num_done))
        await asyncio.sleep(0)
        go.release()
        assert await other == 1
        go.release(50)
        await asyncio.gather(*floods)
        await store.stop()

    asyncio.run(run())


def test_a_write_that_has_begun_is_done_whole_though_its_caller_was_cancelled(tmp_path: Path) -> None:
    async def run() -> None:
        store = Store(tmp_path / "store", LARGE)
        await store.start()
        begun, go = threading.Event(), threading.Event()

        def add(shelf: Any) -> None:
            begun.set()
            go.wait()
            shelf.add("thing", 1)

        adding = asyncio.create_task(store.write(b"", add))
        await asyncio.to_thread(begun.wait)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        go.set()
        assert await store.write(b"", lambda shelf: shelf.has("thing"))
        await store.stop()

    asyncio.run(run())
