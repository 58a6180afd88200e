"""Jobs in the store: one end each, adopted once, bounded, keys of clients known for a time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve.frontend import limits
from moeserve.frontend.dialects.responses_answer import KeptResponse
from moeserve.frontend.dialects.responses_items import Named
from moeserve.frontend.jobs.jobs import Jobs
from moeserve.frontend.jobs.journal import pack_entries
from moeserve.frontend.keys import KeyRing
from moeserve.frontend.listing import Page
from moeserve.frontend.store import idempotency, jobs, responses
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.idempotency import Name
from moeserve.frontend.store.jobs import StoredJob
from moeserve.frontend.store.store import Bounds, NoRoom, Shelf, Store, drop_old
from moeserve.frontend.usage import UsageBook
from tests.support.refusals import refused
from tests.support.stores import LARGE, MakeShelf, shelves

NAME = Name(b"key", b"content")


def create(shelf: Shelf, job_id: str, owner: str = "me", name: Name | None = None) -> str:
    return jobs.create(shelf, job_id, b"record", owner, None, name)


def test_a_job_ends_once_and_its_journal_with_it(shelf: MakeShelf) -> None:
    create(shelf(), "a")
    assert jobs.append(shelf(), "me", {"a": b"one"}) == {}
    assert jobs.append(shelf(), "other", {"a": b"no"}) == {"a": None}
    assert jobs.end(shelf(), "a", "cancelled")
    assert not jobs.end(shelf(), "a", "done")
    assert jobs.append(shelf(), "me", {"a": b"late"}) == {"a": None}
    found = jobs.news(shelf(), "a", -1)
    assert found is not None
    assert (found.rows, found.status.state, found.is_whole) == ([b"one"], "cancelled", True)


def test_open_jobs_of_the_dead_are_adopted_once_and_tries_count_until_there_is_progress(shelf: MakeShelf) -> None:
    for job_id in ("a", "b"):
        create(shelf(), job_id, "dead")
    jobs.end(shelf(), "b", "done")
    assert [(job.job_id, job.tries) for job in jobs.adopt(shelf(), {"dead"}, (), "me")] == [("a", 1)]
    assert jobs.adopt(shelf(), {"dead"}, (), "late") == []
    assert [job.tries for job in jobs.adopt(shelf(), (), {"a"}, "me")] == [2]
    jobs.append(shelf(), "me", {"a": b"one"})
    assert [job.tries for job in jobs.adopt(shelf(), {"me"}, (), "next")] == [1]


def test_a_key_names_one_job_of_one_caller_until_that_fails_or_is_old(shelf: MakeShelf) -> None:
    def named(caller: bytes = b"", name: Name = NAME) -> str | None:
        found = idempotency.find(shelf(caller), name)
        return None if found is None else found.kept_id

    assert [create(shelf(), job_id, name=NAME) for job_id in ("a", "b")] == ["a", "a"]
    with refused("idempotency_key_reused", "Idempotency-Key"):
        create(shelf(), "c", name=Name(NAME.key, b"else"))
    assert named(b"other caller") is None
    jobs.end(shelf(), "a", "failed", failure=b"x")
    assert named() is None
    create(shelf(), "c", name=NAME)
    jobs.end(shelf(now=100.0), "c", "done")
    drop_old(shelf(now=99.0 + limits.IDEMPOTENCY_KEY_S))
    assert named() == "c"
    drop_old(shelf(now=101.0 + limits.IDEMPOTENCY_KEY_S))
    assert named() is None
    assert jobs.find(shelf(), "c") is not None


def test_a_caller_has_so_many_open_jobs(shelf: MakeShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OPEN_JOBS_PER_KEY", 2)
    for job_id in ("a", "b"):
        create(shelf(), job_id)
    with refused("too_many_jobs", None, "2"):
        create(shelf(), "c")
    create(shelf(b"other"), "d")
    jobs.end(shelf(), "a", "done")
    create(shelf(), "e")


def test_what_runs_makes_no_room(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(5_000, 1e9)) as shelf:
        create(shelf(), "a")
        with pytest.raises(NoRoom):
            jobs.create(shelf(), "b", b"x" * 4_000, "me", None, None)
        assert jobs.find(shelf(), "a") is not None


def test_a_store_tells_whether_anybody_has_written(tmp_path: Path) -> None:
    async def run() -> None:
        one, other = (Store(tmp_path / "store", LARGE) for _ in range(2))
        await one.start()
        await other.start()
        await one.has_changed()
        assert not await one.has_changed()
        for number, store in enumerate((other, one)):
            await store.write(b"", partial(create, job_id=str(number)))
            assert [await one.has_changed(), await one.has_changed()] == [True, False]
        await one.stop()
        await other.stop()

    asyncio.run(run())


class _CountedStore(Store):
    """Counts its reads, and its looks at the file; `looked_often` is set after five looks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, LARGE)
        self.num_reads = self.num_looks = 0
        self.looked_often = asyncio.Event()

    async def read(self, caller: bytes, work: Callable[[Shelf], Any]) -> Any:
        self.num_reads += 1
        return await super().read(caller, work)

    async def has_changed(self) -> bool:
        self.num_looks += 1
        if self.num_looks == 5:
            self.looked_often.set()
        return await super().has_changed()


def test_a_follower_of_another_processes_job_reads_its_journal_only_when_somebody_has_written(tmp_path: Path) -> None:
    async def run() -> None:
        store = _CountedStore(tmp_path / "store")
        await store.start()
        await store.write(b"", partial(create, job_id="a", owner="other"))
        engine = SimpleNamespace(dead_reason=None, ready=None)
        services = SimpleNamespace(
            run=SimpleNamespace(reader="", response_store=None), engine=engine, is_draining=False
        )
        owner = Owner(tmp_path / "store")
        following = Jobs(cast("Any", services), store, owner, UsageBook(KeyRing(), store, owner, Counter()))
        following._watching.start()
        entries = following.follow(StoredJob("a", b"", b"record"))
        first = asyncio.ensure_future(anext(entries))
        await store.looked_often.wait()
        assert store.num_reads <= 2
        await store.write(b"", partial(jobs.append, owner="other", entries={"a": pack_entries([None])}))
        assert await first == [None]
        await entries.aclose()
        # Nobody follows any more, so there are no further looks.
        while following._awaited.is_set():
            await asyncio.sleep(0)
        await following._watching.stop()
        await store.stop()

    asyncio.run(run())


def test_the_items_of_a_request_in_the_background_are_kept_once_and_become_its_responses(shelf: MakeShelf) -> None:
    items = b'[{"role":"user","content":"%b"}]' % (b"." * 5_000)
    jobs.create(shelf(), "resp_a", b"record", "me", None, None, items)
    before = shelf().num_bytes
    assert before > len(items)

    def texts() -> list[str]:
        listed = responses.input_page(shelf(), "resp_a", Page(10))
        assert listed is not None
        return [json.loads(item)["content"][0]["text"] for _, item in listed.rows]

    assert texts() == ["." * 5_000]
    assert jobs.end(shelf(), "resp_a", "done")
    assert responses.put(shelf(), KeptResponse("resp_a", b"{}", b"[]", b"[]"))
    jobs.note_kept(shelf(), "resp_a")
    assert texts() == ["." * 5_000]
    assert shelf().num_bytes == before + len(b"{}[]")
    earlier = responses.earlier(shelf(), Named("resp_a", None, []))
    assert earlier.turns == [items, b"[]"]
