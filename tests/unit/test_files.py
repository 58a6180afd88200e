"""Files in the store: pieces that are written and read one after another, shown when they are whole, and swept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend import limits
from moeserve.frontend.listing import Page
from moeserve.frontend.store import files
from moeserve.frontend.store.files import PIECE_BYTES
from moeserve.frontend.store.store import Bounds, Shelf, drop_old
from tests.support.refusals import refused
from tests.support.stores import MakeShelf, add_file, shelves

A, B = b"a", b"b"


def pieces_of(shelf: Shelf, file_id: str) -> list[bytes]:
    found, place = list[bytes](), 0
    while (read := files.next_pieces(shelf, file_id, place)) is not None and read[0]:
        found.append(read[0])
        place = read[1]
    return found


def num_pieces(shelf: Shelf) -> int:
    return int(shelf.db.execute("SELECT count(*) FROM file_pieces").fetchone()[0])


@given(size=st.sampled_from([0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES]), data=st.data())
def test_a_file_is_read_as_it_was_written_from_any_byte_on(
    tmp_path_factory: pytest.TempPathFactory, size: int, data: st.DataObject
) -> None:
    content = bytes(number % 251 for number in range(size))
    with shelves(tmp_path_factory.mktemp("s")) as shelf:
        file_id = add_file(shelf(A), content)
        pieces = pieces_of(shelf(A), file_id)
        assert b"".join(pieces) == content
        assert max(map(len, pieces), default=0) <= 2 * PIECE_BYTES
        start, length = data.draw(st.integers(0, size + 1)), data.draw(st.integers(1, size + 1))
        assert files.read(shelf(A), file_id, start, length) == content[start : start + length]


def test_pieces_are_in_the_order_of_their_places_and_no_read_is_much_larger_than_one(shelf: MakeShelf) -> None:
    file_id = files.new_id()
    files.begin(shelf(A), file_id, "out", "batch_output", busy=True)
    for place, content in ((3 << 16, b"c" * PIECE_BYTES * 3), (1 << 16, b"a"), (2 << 16, b"b" * 100)):
        assert files.append(shelf(A), file_id, place, content)
    files.finish(shelf(A), file_id)
    pieces = pieces_of(shelf(A), file_id)
    assert b"".join(pieces) == b"a" + b"b" * 100 + b"c" * PIECE_BYTES * 3
    assert max(map(len, pieces)) < 2 * PIECE_BYTES


def test_a_file_is_shown_when_it_is_whole_to_its_caller_alone(shelf: MakeShelf) -> None:
    file_id = files.new_id()
    files.begin_upload(shelf(A), file_id, "in")
    files.append(shelf(A), file_id, 0, b"content")
    every = Page(10)
    assert files.find(shelf(A), file_id) is None
    assert files.listed(shelf(A), every) == ([], False)
    assert files.next_pieces(shelf(A), file_id, 0) is None
    files.finish(shelf(A), file_id)
    found = files.find(shelf(A), file_id)
    assert found is not None
    assert (found.name, found.num_bytes) == ("in", 7)
    assert files.listed(shelf(A), every, "batch") == ([found], False)
    assert files.listed(shelf(A), every, "batch_output") == files.listed(shelf(B), every) == ([], False)
    assert files.find(shelf(B), file_id) is files.next_pieces(shelf(B), file_id, 0) is None


def test_files_are_listed_by_pages(shelf: MakeShelf) -> None:
    ids = [add_file(shelf(caller), b"x") for caller in (A, B, A, A)]
    mine = [ids[0], *ids[2:]]

    def page(limit: int, after: str | None = None, *, ascending: bool) -> tuple[list[str], bool]:
        found, has_more = files.listed(shelf(A), Page(limit, after, ascending))
        return [file.file_id for file in found], has_more

    assert page(5, ascending=True) == (mine, False)
    assert page(2, ascending=False) == (mine[:0:-1], True)
    assert page(5, mine[0], ascending=True) == (mine[1:], False)
    assert page(5, mine[1], ascending=False) == (mine[:1], False)
    with refused("invalid_value", "after"):
        page(5, ids[1], ascending=True)


def test_a_caller_has_so_many_files(shelf: MakeShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FILES_PER_KEY", 1)
    file_id = add_file(shelf(A), b"x")
    assert not files.begin_upload(shelf(A), files.new_id(), "in")
    assert files.begin_upload(shelf(B), files.new_id(), "in")
    shelf(A).delete(file_id)
    assert files.begin_upload(shelf(A), files.new_id(), "in")


def test_an_upload_that_is_not_whole_soon_is_dropped(shelf: MakeShelf) -> None:
    unfinished, whole, now = files.new_id(), add_file(shelf(A, 10**9), b"x"), 10**9
    files.begin_upload(shelf(A, now), unfinished, "in")
    assert files.append(shelf(A, now), unfinished, 0, b"x")
    drop_old(shelf(now=now + 3599))
    assert files.append(shelf(A, now), unfinished, 1, b"x")
    drop_old(shelf(now=now + 3601))
    assert not files.append(shelf(A, now), unfinished, 2, b"late")
    assert files.finish(shelf(A), unfinished) is None
    assert files.find(shelf(A), whole) is not None


def test_an_upload_may_exceed_its_keys_share_and_makes_room_while_it_arrives(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(50_000, 1e9, lambda _: 0.5)) as shelf:
        early = add_file(shelf(A), b"x" * 10_000)
        arriving = files.new_id()
        files.begin_upload(shelf(A), arriving, "in")
        for place in range(4):
            assert files.append(shelf(A), arriving, place, b"x" * 10_000)
        assert files.find(shelf(A), early) is None
        add_file(shelf(B), b"x" * 20_000)
        assert not files.append(shelf(A), arriving, 4, b"x" * 10_000)


def test_pieces_of_dropped_files_are_deleted_some_at_a_time(shelf: MakeShelf) -> None:
    dropped, left = add_file(shelf(A), b"x" * PIECE_BYTES * 100), add_file(shelf(A), b"y" * PIECE_BYTES * 3)
    shelf(A).delete(dropped)
    assert num_pieces(shelf()) == 103
    counts = []
    while files.has_dropped(shelf()):
        files.sweep(shelf())
        counts.append(num_pieces(shelf()))
    assert counts == [39, 3]
    assert b"".join(pieces_of(shelf(A), left)) == b"y" * PIECE_BYTES * 3
