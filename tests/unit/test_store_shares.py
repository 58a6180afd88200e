"""Shares of the response store: each key finds room for its own, whatever the others have in use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.dialects.batch_lines import LinePlace
from moeserve.frontend.dialects.responses_answer import KeptResponse
from moeserve.frontend.listing import Page
from moeserve.frontend.store import batches, files, jobs, responses
from moeserve.frontend.store.store import Bounds, Crowded, NoRoom, Shelf, Store, drop_old, store_full
from tests.support.examples import examples
from tests.support.refusals import refused
from tests.support.stores import MakeShelf, add_file, shelves

A, B = b"a", b"b"
HALVES = Bounds(40_000, 1e9, {A: 0.5, B: 0.5}.__getitem__)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[MakeShelf]:
    with shelves(tmp_path, HALVES) as make:
        yield make


def finds_room(shelf: Shelf, work: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    try:
        with shelf.attempt():
            work(shelf, *arguments, **options)
    except NoRoom:
        return False
    return True


def open_job(shelf: Shelf, job_id: str, size: int = 0, needs: str | None = None) -> bool:
    return finds_room(shelf, jobs.create, job_id, b"." * size, "me", needs, None)


def open_batch(shelf: Shelf, file_id: str) -> bool:
    return finds_room(shelf, batches.add_batch, "me", "/v1/x", file_id, b"{}")


def keep(shelf: Shelf, name: str, size: int, previous: str | None = None) -> bool:
    return responses.put(shelf, KeptResponse(name, b"{}", b"[]", b"[]" + b" " * size, previous))


def test_open_batches_and_jobs_of_one_key_leave_room_for_jobs_and_files_of_another(shelf: MakeShelf) -> None:
    file = add_file(shelf(A), b"." * 9_000)
    other = add_file(shelf(A), b"." * 9_000)
    assert open_batch(shelf(A), file)
    assert not open_batch(shelf(A), other)
    while open_job(shelf(A), f"a{shelf(A).now}", 2_000):
        pass
    for number in range(5):
        assert open_job(shelf(B), f"b{number}", 1_000)
    assert add_file(shelf(B), b"." * 8_000)


def test_what_is_not_in_use_may_exceed_its_keys_share_and_makes_room_for_others(shelf: MakeShelf) -> None:
    for number in range(30):
        assert keep(shelf(A), f"resp_a{number}", 1_000)
    assert shelf(A).num_bytes > 30_000
    for number in range(9):
        assert keep(shelf(B), f"resp_b{number}", 1_000)
    assert [responses.find(shelf(B), f"resp_b{number}") is None for number in range(9)] == [False] * 9
    assert shelf(A).num_bytes + shelf(B).num_bytes <= HALVES.max_bytes


def test_batches_on_one_file_count_it_once(shelf: MakeShelf) -> None:
    file = add_file(shelf(A), b"." * 9_000)
    for _ in range(8):
        assert open_batch(shelf(A), file)


def test_a_job_holds_the_whole_conversation_that_it_continues(shelf: MakeShelf) -> None:
    keep(shelf(A), "resp_1", 6_000)
    keep(shelf(A), "resp_2", 6_000, "resp_1")
    assert open_job(shelf(A), "one", needs="resp_2")
    assert not open_job(shelf(A), "two", 5_000)
    assert open_job(shelf(A), "three", 2_000)


def test_a_journal_that_exceeds_its_keys_share_is_refused_and_others_are_written(shelf: MakeShelf) -> None:
    assert open_job(shelf(A), "a", 15_000)
    assert open_job(shelf(B), "b", 5_000)
    refused = jobs.append(shelf(b""), "me", {"a": b"." * 5_000, "b": b"." * 5_000, "c": b""})
    assert refused.keys() == {"a", "c"}
    assert isinstance(refused["a"], NoRoom)
    assert refused["c"] is None
    first, second = (jobs.news(shelf(), name, -1) for name in ("a", "b"))
    assert first is not None
    assert second is not None
    assert (len(first.rows), len(second.rows)) == (0, 1)


def test_results_of_a_batch_and_items_of_a_conversation_are_refused_beyond_the_share(shelf: MakeShelf) -> None:
    file = add_file(shelf(A), b"." * 9_000)
    batch = batches.add_batch(shelf(A), "me", "/v1/x", file, b"{}")
    assert batch is not None
    batches.add_lines(shelf(A), batch.batch_id, 0, [LinePlace(1, "a")])
    assert not finds_room(shelf(A), batches.keep_answer, batch.batch_id, 1, b"." * 9_000, failed=False)
    made = responses.create_conversation(shelf(A), b"{}", [])
    assert made is not None
    assert open_job(shelf(B), "b", 18_000)
    items = [{"role": "user", "content": "." * 12_000}]
    assert not finds_room(shelf(A), responses.append_items, made.conversation_id, items)


def test_a_response_that_finds_no_room_is_not_kept_and_displaces_nothing(shelf: MakeShelf) -> None:
    assert open_job(shelf(A), "a", 17_000)
    assert open_job(shelf(B), "b", 10_000)
    keep(shelf(B), "resp_b", 4_000)
    assert not keep(shelf(A), "resp_a", 9_000)
    assert responses.find(shelf(B), "resp_b") is not None
    assert responses.find(shelf(A), "resp_a") is None


def test_many_small_items_count_the_rows_around_them(shelf: MakeShelf) -> None:
    made = responses.create_conversation(shelf(A), b"{}", [])
    assert made is not None
    before = shelf(A).num_bytes
    assert responses.append_items(shelf(A), made.conversation_id, [{"role": "user", "content": ""}] * 20) is not None
    assert shelf(A).num_bytes - before > 20 * 200


def test_the_refusal_names_the_share(tmp_path: Path) -> None:
    async def run() -> None:
        store = Store(tmp_path / "store", Bounds(2**20, 1e9, lambda _: 0.5))
        await store.start()
        with refused("store_full", None, "0.5 MiB") as caught:
            await store.write(A, lambda shelf: jobs.create(shelf, "a", b"." * 2**20, "me", None, None))
        assert caught.value.status == 429
        await store.stop()

    asyncio.run(run())
    assert store_full(NoRoom(0)).retry_after_s is not None


def test_things_make_room_some_in_each_transaction(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(1_000_000, 1e9)) as shelf:
        for number in range(900):
            keep(shelf(A), f"resp_{number}", 50)
        before = shelf().db.execute("SELECT count(*) FROM kept").fetchone()[0]
        with pytest.raises(Crowded) as crowd:
            shelf(B).add("big", 900_000)
        shelf().drop("big")
        rounds = 0
        while not shelf(B).make_way(crowd.value.caller, crowd.value.num_bytes):
            rounds += 1
        assert rounds >= 1
        assert before - shelf().db.execute("SELECT count(*) FROM kept").fetchone()[0] <= (rounds + 2) * 256
        shelf(B).add("big", 900_000)


def test_a_write_for_which_much_must_go_is_done_once_there_is_room(tmp_path: Path) -> None:
    async def run() -> None:
        store = Store(tmp_path / "store", Bounds(1_000_000, 1e9))
        await store.start()
        for start in range(0, 900, 300):
            numbers = range(start, start + 300)
            await store.write(A, lambda shelf, numbers=numbers: [keep(shelf, f"resp_{n}", 50) for n in numbers])
        await store.write(B, lambda shelf: shelf.add("big", 900_000))
        assert await store.read(B, lambda shelf: shelf.has("big"))
        assert await store.read(A, lambda shelf: shelf.has("resp_899"))
        await store.stop()

    asyncio.run(run())


def test_old_things_go_some_in_each_transaction(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(2**20, 100)) as shelf:
        for number in range(300):
            keep(shelf(A, now=0), f"resp_{number}", 0)
        assert [drop_old(shelf(now=200)) for _ in range(2)] == [True, False]
        assert shelf(A).num_bytes == 0


STEPS = st.lists(
    st.tuples(st.sampled_from(["keep", "file", "job", "batch", "end"]), st.integers(0, 30), st.integers(0, 6_000)),
    max_size=40,
)


@examples(2)
@given(steps=STEPS)
def test_whatever_a_key_does_another_one_finds_room_for_its_share(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    """Whatever A does, B, which has nothing, finds room for things in use that take up its share."""
    with shelves(tmp_path_factory.mktemp("s"), HALVES) as shelf:
        kept, opened = list[str](), list[str]()
        for number, (step, chosen, size) in enumerate(steps):
            name = f"{step}{number}"
            earlier = kept[chosen % len(kept)] if kept and chosen else None
            if step == "keep" and keep(shelf(A), name, size, earlier):
                kept.append(name)
            elif step == "job" and open_job(shelf(A), name, size, earlier):
                opened.append(name)
            elif step == "file":
                finds_room(shelf(A), add_file, b"." * size)
            elif step == "batch":
                for file in files.listed(shelf(A), Page(100))[0]:
                    open_batch(shelf(A), file.file_id)
            elif step == "end" and opened:
                jobs.end(shelf(A), opened[chosen % len(opened)], "done")
        for number in range(9):
            assert open_job(shelf(B), f"b{number}", 1_000)
        total = shelf().db.execute("SELECT sum(size) FROM kept").fetchone()[0]
        assert total <= HALVES.max_bytes
