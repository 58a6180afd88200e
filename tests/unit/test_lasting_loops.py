"""The loops of an HTTP process under a lack of memory and of locks: the turn in hand gets its error, the next works."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq.asyncio

from moeserve import forever, wire
from moeserve.frontend.errors import ApiError
from moeserve.frontend.exchange import Entry
from moeserve.frontend.jobs import journal as journals
from moeserve.frontend.jobs import runner
from moeserve.frontend.jobs.batch_runner import Batches
from moeserve.frontend.jobs.jobs import Jobs
from moeserve.frontend.jobs.journal import Journal
from moeserve.frontend.keys import KeyRing
from moeserve.frontend.relay.engine_client import EngineLink
from moeserve.frontend.store import jobs, threads
from moeserve.frontend.store import store as store_module
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.jobs import StoredJob
from moeserve.frontend.store.store import Store
from moeserve.frontend.store.threads import Threads
from moeserve.frontend.usage import UsageBook
from moeserve.wire import Admitted
from tests.support.stores import LARGE


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forever, "_AFTER_ERROR_S", 0.001)
    monkeypatch.setattr(runner, "_LOOK_APART_S", 0.001)


def with_store(test: Callable[[Store], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """Make a test of a coroutine function that is given a store."""

    def run_test(tmp_path: Path) -> None:
        async def run() -> None:
            store = Store(tmp_path / "store", LARGE)
            await store.start()
            try:
                await test(store)
            finally:
                await store.stop()

        asyncio.run(run())

    return run_test


def fail_once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: Exception) -> asyncio.Event:
    """Let the next call of a function raise an error; return the event that is set by the calls after it."""
    real, errors, has_gone_on = getattr(where, name), [error], asyncio.Event()

    def failing(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        has_gone_on.set()
        return real(*arguments, **options)

    monkeypatch.setattr(where, name, failing)
    return has_gone_on


def book_of(store: Store, owner: Owner) -> UsageBook:
    return UsageBook(KeyRing(), store, owner, Counter())


def services(**more: Any) -> Any:
    engine = SimpleNamespace(dead_reason=None, ready=object(), rest=None)
    run = SimpleNamespace(reader="", response_store=None)
    return SimpleNamespace(run=run, engine=engine, is_draining=False, **more)


def entries() -> list[Entry]:
    return [None]


def create(shelf: Any, job_id: str, owner: str) -> None:
    jobs.create(shelf, job_id, b"record", owner, None, None)


@pytest.mark.parametrize(("place", "error"), [("pack_entries", MemoryError()), ("append", OSError("no locks"))])
def test_an_append_that_fails_gets_its_error_and_the_next_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    @with_store
    async def run(store: Store) -> None:
        await store.write(b"", partial(create, job_id="a", owner="me"))
        journal = Journal(store, "me")
        journal.start()
        fail_once(monkeypatch, journals if place == "pack_entries" else jobs, place, error)
        with pytest.raises(type(error)):
            await asyncio.wait_for(journal.append("a", entries()), 60)
        await asyncio.wait_for(journal.append("a", entries()), 60)
        found = await store.read(b"", partial(jobs.news, job_id="a", number=-1))
        assert found is not None
        assert len(found.rows) == 1
        await journal.stop()

    run(tmp_path)


@with_store
async def test_a_lack_of_memory_in_the_store_is_a_503_and_the_next_call_works(store: Store) -> None:
    def no_memory(_: Any) -> None:
        raise MemoryError

    for call in (store.read, store.write):
        with pytest.raises(ApiError) as caught:
            await call(b"", no_memory)
        assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
        assert await call(b"", lambda _: "works") == "works"


def test_a_connection_that_could_not_be_rolled_back_is_not_used_again(tmp_path: Path) -> None:
    async def run() -> None:
        made = Threads(tmp_path / "store", 1)
        for _ in range(2):  # a transaction that is open would refuse another one
            await made.run(b"", lambda db: db.execute("BEGIN IMMEDIATE"))
        await made.stop()

    asyncio.run(run())


class _LateIdle(deque[Any]):
    """Has something until somebody takes it: another thread has been faster."""

    def __bool__(self) -> bool:
        return True


def test_of_two_threads_that_find_one_idle_connection_the_slower_one_opens_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threads, "deque", _LateIdle)
            made = Threads(tmp_path / "store", 1)
        assert await made.run(b"", lambda _: "read") == "read"
        await made.stop()

    asyncio.run(run())


@pytest.mark.parametrize("error", [MemoryError(), OSError(37, "No locks available")])
def test_a_look_for_jobs_that_fails_is_followed_by_one_that_adopts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    @with_store
    async def run(store: Store) -> None:
        await store.write(b"", partial(create, job_id="a", owner="0123456789abcdef"))
        owner = Owner(tmp_path / "store")
        owner.hold()
        fail_once(monkeypatch, owner, "is_dead", error)
        made = Jobs(services(), store, owner, book_of(store, owner))
        await made.start()
        # It is taken over, and fails: the record is none.
        while (await store.read(b"", partial(jobs.status, job_id="a"))).state == "open":
            await asyncio.sleep(0.001)
        await made.stop()
        owner.release()

    run(tmp_path)


def test_a_look_for_batches_that_fails_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @with_store
    async def run(store: Store) -> None:
        has_gone_on = fail_once(monkeypatch, store, "read", OSError("no locks"))
        owner = Owner(tmp_path / "store")
        made = Batches(services(), store, owner, book_of(store, owner))
        made.start()
        await asyncio.wait_for(has_gone_on.wait(), 60)
        await made.stop()

    run(tmp_path)


def test_a_follower_hears_of_news_after_a_look_at_the_file_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @with_store
    async def run(store: Store) -> None:
        await store.write(b"", partial(create, job_id="a", owner="other"))
        has_gone_on = fail_once(monkeypatch, store, "has_changed", MemoryError())
        owner = Owner(tmp_path / "store")
        following = Jobs(services(), store, owner, book_of(store, owner))
        following._watching.start()
        followed = following.follow(StoredJob("a", b"", b"record"))
        first = asyncio.ensure_future(anext(followed))
        await asyncio.wait_for(has_gone_on.wait(), 60)
        row = {"a": journals.pack_entries(entries())}
        await store.write(b"", partial(jobs.append, owner="other", entries=row))
        assert await asyncio.wait_for(first, 60) == [None]
        await followed.aclose()
        await following._watching.stop()

    run(tmp_path)


def test_the_store_is_cleaned_again_after_a_cleaning_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SECONDS_BETWEEN_CLEANINGS", 0.001)

    async def run() -> None:
        has_gone_on = fail_once(monkeypatch, store_module, "drop_old", OSError("no locks"))
        store = Store(tmp_path / "store", LARGE)
        await store.start()
        await asyncio.wait_for(has_gone_on.wait(), 60)
        await store.stop()

    asyncio.run(run())


def test_a_message_of_the_engine_that_cannot_be_taken_in_fails_open_requests_and_the_next_one_is_heard(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        engine = context.socket(zmq.ROUTER)
        address = f"ipc://{tmp_path}/engine"
        engine.bind(address)
        heard, failures = asyncio.Event(), list[str]()
        errors = [MemoryError()]

        def take(_: Any) -> None:
            if errors:
                raise errors.pop()
            heard.set()

        run = cast("Any", SimpleNamespace(engine_address=address, incarnation=1, model_hash="none"))
        link = EngineLink(run, context, on_message=take, on_unreadable=failures.append, on_end=failures.append)
        frontend, _ = await engine.recv_multipart()
        for _ in range(2):
            await engine.send_multipart([frontend, wire.encode(Admitted("a"), 1)])
        await asyncio.wait_for(heard.wait(), 60)
        assert failures == ["MemoryError"]
        await link.stop()
        engine.close(linger=0)
        context.term()

    asyncio.run(run())
