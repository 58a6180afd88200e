"""Batches in the store: each line is answered once, whoever works on it, and suspects of a death run alone."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend import limits
from moeserve.frontend.dialects.batch_lines import LinePlace
from moeserve.frontend.listing import Page
from moeserve.frontend.store import batches, files
from moeserve.frontend.store.batches import StoredBatch
from moeserve.frontend.store.file import VERSION, connect, prepare
from moeserve.frontend.store.store import OVERHEAD_BYTES, Bounds, NoRoom, Shelf
from tests.support.stores import MakeShelf, add_file, shelves

A, B = b"a", b"b"


def begun(shelf: MakeShelf, num_lines: int, owner: str = "me", file_id: str | None = None) -> str:
    """Enter a batch of A's that has been read; return its id."""
    file_id = file_id or add_file(shelf(A), b"x")
    batch = batches.add_batch(shelf(A), owner, "/v1/completions", file_id, b"{}")
    assert batch is not None
    places = [LinePlace(number, f"id-{number}", number, 1) for number in range(1, num_lines + 1)]
    assert batches.add_lines(shelf(A), batch.batch_id, 0, places) == []
    assert batches.move(shelf(A), batch.batch_id, ("validating",), "in_progress", total=num_lines)
    return batch.batch_id


def find(shelf: MakeShelf, batch_id: str) -> StoredBatch:
    found = batches.find(shelf(A), batch_id)
    assert found is not None
    return found


def next_number(shelf: MakeShelf, batch_id: str) -> int | None:
    line = batches.next_line(shelf(A), batch_id)
    return None if line is None else line.number


def content_of(shelf: MakeShelf, file_id: str | None) -> bytes:
    found, place = b"", 0
    assert file_id is not None
    while (read := files.next_pieces(shelf(A), file_id, place)) is not None and read[0]:
        found, place = found + read[0], read[1]
    return found


def test_answers_count_once_and_are_files_in_the_order_of_the_lines(shelf: MakeShelf) -> None:
    batch_id = begun(shelf, 4)
    large = b"x" * 3 * files.PIECE_BYTES
    for number, answer, failed in ((3, b"c", False), (1, large, False), (3, b"again", True), (2, b"bad", True)):
        batches.keep_answer(shelf(A), batch_id, number, answer, failed=failed)
    while batches.close_lines(shelf(A), batch_id):
        pass
    open_output = find(shelf, batch_id).output_file
    assert files.find(shelf(A), open_output or "") is None
    batches.end(shelf(A), batch_id, "completed")
    batches.end(shelf(A), batch_id, "failed")
    batches.keep_answer(shelf(A), batch_id, 4, b"late", failed=False)
    found = find(shelf, batch_id)
    assert (found.state, found.total, found.succeeded, found.failed) == ("completed", 4, 2, 1)
    assert json.loads(found.times).keys() == {"in_progress", "completed"}
    assert content_of(shelf, found.output_file) == large + b"c"
    assert content_of(shelf, found.error_file) == b"bad"
    assert files.next_pieces(shelf(B), found.output_file or "", 0) is None


def test_an_output_may_be_longer_than_sqlite_lets_a_value_be(shelf: MakeShelf) -> None:
    shelf().db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
    batch_id = begun(shelf, 3)
    for number in (1, 2, 3):
        batches.keep_answer(shelf(A), batch_id, number, b"%d" % number * 150_000, failed=False)
    batches.end(shelf(A), batch_id, "completed")
    found = find(shelf, batch_id)
    assert content_of(shelf, found.output_file) == b"1" * 150_000 + b"2" * 150_000 + b"3" * 150_000


def test_lines_without_an_answer_get_the_error_of_a_batch_that_expires(shelf: MakeShelf) -> None:
    batch_id = begun(shelf, 3)
    batches.keep_answer(shelf(A), batch_id, 2, b"two\n", failed=False)
    while batches.close_lines(shelf(A), batch_id, "expired"):
        pass
    batches.end(shelf(A), batch_id, "expired")
    found = find(shelf, batch_id)
    errors = [json.loads(line) for line in content_of(shelf, found.error_file).splitlines()]
    assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [
        ("id-1", "batch_expired"),
        ("id-3", "batch_expired"),
    ]


@given(ids=st.sets(st.text(min_size=1, max_size=30), min_size=1, max_size=20))
def test_a_batch_that_has_found_room_for_its_lines_finds_it_for_their_errors(
    tmp_path_factory: pytest.TempPathFactory, ids: set[str]
) -> None:
    places = [LinePlace(49_000 + number, custom_id) for number, custom_id in enumerate(ids)]
    with shelves(tmp_path_factory.mktemp("s")) as shelf:
        batch_id = begun(shelf, 0)
        batches.add_lines(shelf(A), batch_id, 0, places)
        needed = shelf(A).num_bytes + OVERHEAD_BYTES  # of the file with the errors
        bound = Bounds(needed, 1e9)
        assert batches.close_lines(Shelf(shelf().db, A, 0.0, bound), batch_id, "expired")
        assert find(shelf, batch_id).failed == len(ids)


def test_a_deleted_input_stays_until_the_batches_that_read_it_end(shelf: MakeShelf) -> None:
    file_id = add_file(shelf(A), b"lines")
    first, second = (begun(shelf, 1, file_id=file_id) for _ in range(2))
    assert shelf(A).delete(file_id)
    assert files.find(shelf(A), file_id) is None
    for batch_id in (first, second):
        assert files.read(shelf(A), file_id, 0, 10) == b"lines"
        batches.end(shelf(A), batch_id, "completed")
    assert files.has_dropped(shelf())
    assert shelf(A).db.execute("SELECT count(*) FROM kept WHERE id = ?", (file_id,)).fetchone() == (0,)


def test_a_batch_belongs_to_one_process(shelf: MakeShelf) -> None:
    batch_id = begun(shelf, 2, "dead")
    assert batches.take(shelf(A), batch_id, "other", "me") is None
    taken = batches.take(shelf(A), batch_id, "dead", "me")
    assert taken is not None
    assert taken.tries == 1
    assert batches.take(shelf(A), batch_id, "dead", "late") is None
    assert [(one.batch_id, one.owner) for one in batches.open_ones(shelf())] == [(batch_id, "me")]
    batches.end(shelf(A), batch_id, "cancelled")
    assert batches.take(shelf(A), batch_id, "me", "me") is None
    assert batches.open_ones(shelf()) == []


def test_a_process_that_leaves_a_batch_is_no_try(shelf: MakeShelf) -> None:
    batch_id = begun(shelf, 2)
    assert next_number(shelf, batch_id) == 1
    for before, owner in (("me", ""), ("", "next"), ("next", "next")):
        taken = batches.take(shelf(A), batch_id, before, owner)
        assert taken is not None
        assert taken.tries == 0
    line = batches.next_line(shelf(A), batch_id)
    assert line is not None
    assert (line.number, line.tries) == (1, 0)


def test_lines_of_a_dead_process_come_last_and_alone(shelf: MakeShelf) -> None:
    batch_id = begun(shelf, 4, "dead")
    assert [next_number(shelf, batch_id) for _ in range(2)] == [1, 2]
    batches.take(shelf(A), batch_id, "dead", "me")
    assert [next_number(shelf, batch_id) for _ in range(3)] == [3, 4, None]
    batches.keep_answer(shelf(A), batch_id, 3, b"3", failed=False)
    assert next_number(shelf, batch_id) is None
    batches.keep_answer(shelf(A), batch_id, 4, b"4", failed=False)
    assert [next_number(shelf, batch_id) for _ in range(2)] == [1, None]
    batches.keep_answer(shelf(A), batch_id, 1, b"1", failed=False)
    assert [next_number(shelf, batch_id) for _ in range(2)] == [2, None]


@given(killers=st.sets(st.integers(1, 6), max_size=2), places=st.integers(1, 4))
def test_a_line_that_ends_processes_ends_alone_and_fails(
    tmp_path_factory: pytest.TempPathFactory, killers: set[int], places: int
) -> None:
    """Processes run up to some lines at once, and die with the first killer that begins."""
    with shelves(tmp_path_factory.mktemp("s")) as shelf:
        batch_id, owner, running, num_deaths = begun(shelf, 6, "0"), "0", list[int](), 0
        while True:
            line = batches.next_line(shelf(A), batch_id) if len(running) < places else None
            if line is None and not running:
                break
            if line is None:
                batches.keep_answer(shelf(A), batch_id, running.pop(0), b"ok", failed=False)
            elif line.tries >= limits.MAX_JOB_TRIES:
                assert line.number in killers
                batches.keep_answer(shelf(A), batch_id, line.number, b"bad", failed=True)
            elif line.number in killers:
                num_deaths, running = num_deaths + 1, []
                assert batches.take(shelf(A), batch_id, owner, owner := str(num_deaths)) is not None
            else:
                running.append(line.number)
        found = find(shelf, batch_id)
        assert (found.succeeded, found.failed) == (6 - len(killers), len(killers))
        assert num_deaths <= limits.MAX_JOB_TRIES * len(killers)


def test_a_custom_id_that_comes_again_is_a_problem_in_any_part(shelf: MakeShelf) -> None:
    batch = batches.add_batch(shelf(A), "me", "/v1/completions", add_file(shelf(A), b"x"), b"{}")
    assert batch is not None
    first = batches.add_lines(shelf(A), batch.batch_id, 0, [LinePlace(1, "a"), LinePlace(2, problem="line 2: x")])
    later = batches.add_lines(shelf(A), batch.batch_id, 100, [LinePlace(3, "b"), LinePlace(4, "a")])
    assert first == ["line 2: x"]
    assert later == ["line 4: `custom_id` 'a' is that of an earlier line"]


def test_lines_and_answers_count_in_their_keys_share(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(20_000, 1e9, lambda _: 0.5)) as shelf:
        batch_id = begun(shelf, 10)
        before = shelf(A).num_bytes
        with pytest.raises(NoRoom), shelf(A).attempt():
            batches.add_lines(shelf(A), batch_id, 0, [LinePlace(number, "x" * 9_000) for number in range(20, 22)])
        with pytest.raises(NoRoom), shelf(A).attempt():
            batches.keep_answer(shelf(A), batch_id, 1, b"x" * 9_000, failed=False)
        batches.keep_answer(shelf(A), batch_id, 1, b"x" * 2_000, failed=False)
        while batches.close_lines(shelf(A), batch_id):
            pass
        batches.end(shelf(A), batch_id, "failed", b"[]")
        # What is left is the output, the batch and its input.
        assert shelf(A).num_bytes - before < 2_000 + 1_500 - 10 * 128


def test_batches_are_listed_by_pages(shelf: MakeShelf) -> None:
    ids = [begun(shelf, 1) for _ in range(3)]
    found, has_more = batches.listed(shelf(A), Page(1, ids[2]))
    assert ([batch.batch_id for batch in found], has_more) == ([ids[1]], True)
    assert batches.listed(shelf(B), Page(9)) == ([], False)


def test_a_file_of_an_earlier_version_goes_on_without_its_files_and_batches(tmp_path: Path) -> None:
    path = tmp_path / "store"
    prepare(path)
    db = connect(path)
    db.executescript(
        """DROP TABLE batch_lines; DROP TABLE batches; DROP TABLE files; DROP TABLE file_pieces;
           DROP TABLE dropped_files; ALTER TABLE jobs DROP COLUMN input; PRAGMA user_version = 6;
           CREATE TABLE files(id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE, content BLOB NOT NULL);
           CREATE TABLE batches(id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE);
           CREATE TABLE batch_results(batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE);
           INSERT INTO kept(id, caller, size, used) VALUES ('file-1', '', 100, 0), ('resp_1', '', 10, 0);
           INSERT INTO kept(id, caller, size, used, needs, busy) VALUES ('batch_1', '', 50, 0, 'file-1', 1);
           INSERT INTO files VALUES ('file-1', 'x'); INSERT INTO batches VALUES ('batch_1');
           INSERT INTO batch_results VALUES ('batch_1');"""
    )
    db.close()
    prepare(path)
    with sqlite3.connect(path) as again:
        assert again.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert again.execute("SELECT id FROM kept").fetchall() == [("resp_1",)]
        assert again.execute("SELECT sum(num_bytes) FROM shelves").fetchone() == (10,)
        assert again.execute("SELECT count(*) FROM files, batches").fetchone() == (0,)
