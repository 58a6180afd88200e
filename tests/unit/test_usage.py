"""Accounts of keys: what is counted, what the log says, and who is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from structlog.testing import capture_logs

from moeserve.frontend.account import RequestLine, Spent
from moeserve.frontend.errors import unavailable
from moeserve.frontend.key_file import digest_of, read_line
from moeserve.frontend.keys import KeyRing
from moeserve.frontend.store import usage
from moeserve.frontend.store.file import Owner, connect
from moeserve.frontend.store.store import Store
from moeserve.frontend.store.usage import Account, Line, Refusal, Used
from moeserve.frontend.usage import UsageBook
from tests.support.refusals import refused
from tests.support.stores import LARGE, shelves

DAY = 86_400
ALICE, BOB = digest_of("a"), digest_of("b")


def line_of(key: str, tokens: int = 10, answer: str = "x") -> Line:
    return Line(Spent(key, tokens, 2, 1), "request", {"answer_id": answer})


def test_an_account_has_this_day_and_all_days(tmp_path: Path) -> None:
    with shelves(tmp_path) as shelf:
        usage.add(shelf(now=DAY - 1), "me", [Spent("alice", 100, 50, 7)], [])
        usage.add(shelf(now=DAY), "me", [Spent("alice", 10, 2, 1), Spent("bob", 3, 0, 3)], [])
        found = usage.accounts(shelf(now=DAY + 5))
        assert found["alice"] == Account(Used(1, 10, 2, 1), Used(2, 110, 52, 8))
        assert usage.accounts(shelf(now=DAY), ["bob", "carol"]) == {"bob": Account(Used(1, 3, 0, 3), Used(1, 3, 0, 3))}


def test_tokens_are_refused_once_they_are_used_up_until_the_next_day(tmp_path: Path) -> None:
    with shelves(tmp_path) as shelf:
        usage.add(shelf(now=DAY), "me", [Spent("alice", 90, 0, 9)], [])
        assert usage.begin(shelf(now=DAY), "alice", 100, None) is None
        usage.add(shelf(now=DAY), "me", [Spent("alice", 1, 0, 0)], [])
        assert usage.begin(shelf(now=2 * DAY - 10), "alice", 100, None) == Refusal("tokens", 100, 10)
        assert usage.begin(shelf(now=2 * DAY), "alice", 100, None) is None
        assert usage.begin(shelf(now=DAY), "bob", 100, None) is None


def test_requests_are_counted_by_the_minute(tmp_path: Path) -> None:
    with shelves(tmp_path) as shelf:
        assert [usage.begin(shelf(now=60 + second), "alice", None, 2) for second in (0, 1, 2)] == [
            None,
            None,
            Refusal("requests", 2, 58),
        ]
        assert usage.begin(shelf(now=119), "bob", None, 2) is None
        assert usage.begin(shelf(now=120), "alice", None, 2) is None


def test_the_lines_of_a_dead_process_are_written_by_another_one_until_they_are_dropped(tmp_path: Path) -> None:
    with shelves(tmp_path) as shelf:
        last = usage.add(shelf(), "dead", [], [line_of("alice", answer="1"), line_of("alice", answer="2")])
        usage.add(shelf(), "living", [], [line_of("bob")])
        usage.drop_written(shelf(), "dead", last - 1)
        assert usage.line_owners(shelf()) == {"dead", "living"}
        lines, number = usage.adopt_lines(shelf(), ["dead"], "living")
        assert [line.fields["answer_id"] for line in lines] == ["2"]
        usage.drop_written(shelf(), "living", number)
        assert usage.line_owners(shelf()) == set()


def test_an_answer_that_may_outlive_its_request_has_a_line_of_its_own() -> None:
    spent = Spent("alice", 1, 0, 1)
    ledger = Mock()
    for outlives in (False, True):
        line = RequestLine(ledger)
        line.fields["key"] = "alice"
        if outlives:
            line.set_apart()
        line.spend(spent, {"answer_id": "x"})
        line.end({"status": 200}, is_watch=False)
    assert ledger.tell.mock_calls == [
        call(spent, "request", {"key": "alice", "answer_id": "x", "status": 200}, ledger.expect()),
        call(spent, "answer", {"answer_id": "x"}),
    ]


class Book:
    """A book over a store of its own, which may fail."""

    def __init__(self, folder: Path, drain_logs: Callable[[float], bool] = lambda _: True) -> None:
        self.keys = KeyRing(
            [read_line("user:a name=alice tokens=100/day requests=3/min"), read_line("user:b name=bob")]
        )
        self.store = Store(folder / "store", LARGE)
        self.owner = Owner(folder / "store")
        self.rejections: Counter[str] = Counter()
        self.book = UsageBook(self.keys, self.store, self.owner, self.rejections, drain_logs)

    async def __aenter__(self) -> UsageBook:
        await self.store.start()
        self.owner.hold()
        self.book.start()
        return self.book

    async def __aexit__(self, *_: object) -> None:
        await self.book.stop()
        await self.store.stop()
        self.owner.release()


def run(work: Callable[[], Awaitable[None]]) -> list[Any]:
    """Return what a work logs."""
    with capture_logs() as logs:
        asyncio.run(work())  # type: ignore[arg-type]
    return list(logs)


def test_an_answer_is_counted_before_its_line_is_written(tmp_path: Path) -> None:
    async def work() -> None:
        async with Book(tmp_path) as book:
            book.tell(Spent("alice", 10, 4, 5), "request", {"answer_id": "x"})
            found = await book.accounts(["alice"])
            assert found["alice"].total == Used(1, 10, 4, 5)

    assert [(line["event"], line["answer_id"]) for line in run(work)] == [("request", "x")]


def test_a_key_is_refused_beyond_its_limits_with_a_time_and_others_are_not(tmp_path: Path) -> None:
    async def work() -> None:
        made = Book(tmp_path)
        async with made as book:
            for _ in range(3):
                await book.enter(ALICE)
            with refused("key_requests_used", None, "alice", "3") as caught:
                await book.enter(ALICE)
            assert caught.value.status == 429
            assert 1 <= (caught.value.retry_after_s or 0) <= 60
            for _ in range(9):
                await book.enter(BOB)
            made.keys.adopt(KeyRing([read_line("user:a name=alice tokens=100/day"), read_line("user:b name=bob")]))
            book.reopen()
            book.tell(Spent("alice", 99, 0, 1), "request", {})
            with refused("key_tokens_used", None, "100"):
                await book.enter(ALICE)
            assert made.rejections == {"key_requests_used": 1, "key_tokens_used": 1}

    run(work)


def test_a_keys_next_request_waits_until_its_answers_that_have_ended_are_counted(tmp_path: Path) -> None:
    async def work() -> None:
        async with Book(tmp_path) as book:
            line = RequestLine(book)
            line.spend(Spent("alice", 99, 0, 1), {})
            entering = asyncio.create_task(book.enter(ALICE))
            await book.enter(BOB)
            await book.accounts(["bob"])
            assert not entering.done()
            line.end({}, is_watch=False)
            with refused("key_tokens_used", None, "100"):
                await entering

    run(work)


def test_a_key_that_was_taken_out_of_the_file_is_refused(tmp_path: Path) -> None:
    async def work() -> None:
        made = Book(tmp_path)
        async with made as book:
            made.keys.adopt(KeyRing([read_line("user:b name=bob")]))
            with refused("key_gone") as caught:
                await book.enter(ALICE)
            assert caught.value.status == 401

    run(work)


def test_where_the_store_fails_lines_are_written_at_once_and_counted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moeserve.frontend.usage._LOOK_APART_S", 0.01)

    async def work() -> None:
        made = Book(tmp_path)
        async with made as book:
            write, has_failed = made.store.write, asyncio.Event()

            async def fail(*_: Any) -> Any:
                has_failed.set()
                raise unavailable("no", "store_unavailable")

            monkeypatch.setattr(made.store, "write", fail)
            book.tell(Spent("alice", 10, 4, 5), "request", {"answer_id": "x"})
            await has_failed.wait()
            monkeypatch.setattr(made.store, "write", write)
            while not await book.accounts(["alice"]):
                await asyncio.sleep(0.001)

    assert [line["answer_id"] for line in run(work)] == ["x"]


def test_lines_that_were_not_written_when_a_process_died_are_written_by_the_next_one(tmp_path: Path) -> None:
    def answers(logs: Sequence[Any]) -> list[str]:
        return [line["answer_id"] for line in logs]

    async def dies() -> None:
        async with Book(tmp_path, drain_logs=lambda _: False) as book:
            book.tell(Spent("alice", 10, 4, 5), "request", {"answer_id": "x"})

    async def follows(logs: Sequence[Any]) -> None:
        made = Book(tmp_path)
        async with made as book:
            while not logs:
                await asyncio.sleep(0.001)
            assert (await book.accounts())["alice"].total.requests == 1
        with closing(connect(tmp_path / "store")) as db:
            assert db.execute("SELECT count(*) FROM usage_lines").fetchone() == (0,)

    assert answers(run(dies)) == ["x"]
    with capture_logs() as logs:
        asyncio.run(follows(logs))
    assert answers(logs) == ["x"]
