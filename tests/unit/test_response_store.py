"""The store of responses: bounds, order of leaving, conversations, callers kept apart, the file itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import stat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.dialects.responses_answer import KeptResponse
from moeserve.frontend.dialects.responses_items import Named
from moeserve.frontend.errors import ApiError
from moeserve.frontend.listing import Page
from moeserve.frontend.store import responses
from moeserve.frontend.store.file import StoreError, connect, prepare
from moeserve.frontend.store.store import Bounds, Shelf, Store, drop_old
from tests.support.examples import examples
from tests.support.stores import LARGE, MakeShelf, shelves


def name_of(letter: str) -> str:
    """Return an id as responses have them: 24 digits."""
    return f"resp_{letter:0>24}"


def kept(letter: str, previous: str | None = None, size: int = 0, conversation: str | None = None) -> KeptResponse:
    """A response whose input says `letter?`, and whose output is one message `letter` with `size` bytes."""
    output = [{"type": "message", "role": "assistant", "id": f"msg_{letter:0>24}00", "content": letter + "." * size}]
    asked = [{"type": "message", "role": "user", "content": f"{letter}?"}]
    return KeptResponse(
        name_of(letter),
        json.dumps({"id": name_of(letter)}).encode(),
        json.dumps(output).encode(),
        json.dumps(asked).encode(),
        None if previous is None else name_of(previous),
        conversation,
    )


def put(shelf: Shelf, letter: str, previous: str | None = None, size: int = 0) -> bool:
    return responses.put(shelf, kept(letter, previous, size))


def texts(shelf: Shelf, letter: str) -> list[str] | None:
    items = responses.earlier(shelf, Named(name_of(letter), None, [])).conversation()
    return None if items is None else [item["content"] for item in items]


def found(shelf: Shelf, letters: str) -> str:
    return "".join(letter for letter in letters if responses.find(shelf, name_of(letter)) is not None)


def test_a_conversation_is_every_input_and_output_up_to_a_response(shelf: MakeShelf) -> None:
    put(shelf(), "a")
    put(shelf(), "b", "a")
    put(shelf(), "c", "a")
    assert texts(shelf(), "b") == ["a?", "a", "b?", "b"]
    assert texts(shelf(), "c") == ["a?", "a", "c?", "c"]
    assert texts(shelf(), "d") is None


def test_an_item_is_found_by_its_id(shelf: MakeShelf) -> None:
    put(shelf(), "a")
    item_id = f"msg_{'a':0>24}00"
    items = responses.earlier(shelf(), Named(None, None, [item_id, "msg_none", f"msg_{'a':0>24}01"])).items
    assert [json.loads(item)["content"] for item in items.values()] == ["a"]
    assert list(items) == [item_id]


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_a_response_is_read_in_parts_of_bounded_size_by_its_caller_alone(shelf: MakeShelf, size: int) -> None:
    put(shelf(), "a", size=300)
    expected = kept("a", size=300).response
    assert responses.shown_size(shelf(), name_of("a")) == len(expected)
    read, part = b"", b"."
    while len(read) < len(expected):
        part = responses.shown_part(shelf(), name_of("a"), len(read), size)
        assert 0 < len(part) <= max(size, len(b',"output":'))
        read += part
    assert read == expected
    stranger = shelf(b"stranger")
    assert responses.shown_size(stranger, name_of("a")) is None
    assert responses.shown_part(stranger, name_of("a"), 0, size) == b""


def test_the_least_recently_used_response_leaves_first(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(3000, 1e9)) as shelf:
        put(shelf(), "a")
        put(shelf(), "b")
        shelf().touch([name_of("a")])
        put(shelf(), "c")
        assert found(shelf(), "abc") == "ac"


def test_using_a_response_keeps_its_whole_conversation(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(4200, 1e9)) as shelf:
        put(shelf(), "a")
        put(shelf(), "b", "a")
        put(shelf(), "o")
        shelf().touch([name_of("b")])
        put(shelf(), "n")
        assert found(shelf(), "abon") == "abn"


def test_what_a_later_turn_needs_counts_until_that_turn_is_gone(shelf: MakeShelf) -> None:
    put(shelf(), "a", size=5000)
    put(shelf(), "b", "a")
    assert shelf().delete(name_of("a"))
    assert not shelf().delete(name_of("a"))
    assert found(shelf(), "ab") == "b"
    assert shelf().num_bytes > 5000
    assert texts(shelf(), "b") == ["a?", "a" + "." * 5000, "b?", "b"]
    shelf().delete(name_of("b"))
    assert shelf().num_bytes == 0


def test_a_long_conversation_counts_every_turn_once(shelf: MakeShelf) -> None:
    put(shelf(), "r0")
    one = shelf().num_bytes
    for number in range(1, 50):
        put(shelf(), f"r{number}", f"r{number - 1}")
    assert shelf().num_bytes < 51 * one


def test_a_response_whose_conversation_is_too_large_or_gone_is_not_kept(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(5000, 1e9)) as shelf:
        assert put(shelf(), "a")
        assert not put(shelf(), "h", size=5000)
        assert not put(shelf(), "o", "g")
        assert not put(shelf(), "l", "a", size=4500)
        assert found(shelf(), "ahol") == "a"


def test_callers_have_shelves_of_their_own(shelf: MakeShelf) -> None:
    put(shelf(b"one"), "a")
    made = responses.create_conversation(shelf(b"one"), b"{}", [{"id": "msg_x", "role": "user", "content": "x"}])
    assert made is not None
    other = shelf(b"two")
    assert responses.find(other, name_of("a")) is None
    named = Named(name_of("a"), made.conversation_id, ["msg_x", f"msg_{'a':0>24}00"])
    assert responses.earlier(other, named).items == {}
    assert responses.earlier(other, named).turns is None
    assert not other.delete(name_of("a"))
    assert not other.delete(made.conversation_id)
    assert responses.append_items(other, made.conversation_id, []) is None
    assert found(shelf(b"one"), "a") == "a"


@pytest.mark.parametrize("hoarder_first", [True, False])
def test_when_all_keep_too_much_whoever_keeps_most_gives_way(tmp_path: Path, hoarder_first: bool) -> None:
    with shelves(tmp_path, Bounds(20_000, 1e9)) as shelf:
        if not hoarder_first:
            put(shelf(b"modest"), "m")
        for number in range(30):
            put(shelf(b"hoarder"), f"r{number}", size=1000)
        if hoarder_first:
            put(shelf(b"modest"), "m")
        assert shelf(b"modest").num_bytes + shelf(b"hoarder").num_bytes <= 20_000
        assert found(shelf(b"modest"), "m") == "m"
        assert responses.find(shelf(b"hoarder"), name_of("r29")) is not None


def test_what_nobody_has_used_for_too_long_is_dropped(tmp_path: Path) -> None:
    with shelves(tmp_path, Bounds(2**30, 100)) as shelf:
        put(shelf(b"x", now=0), "a")
        put(shelf(b"y", now=50), "b")
        drop_old(shelf(now=120))
        assert (found(shelf(b"x"), "a"), found(shelf(b"y"), "b")) == ("", "b")


def test_a_use_is_noted_once_in_a_while(shelf: MakeShelf) -> None:
    put(shelf(now=1000), "a")
    assert not shelf(now=1050).is_stale(name_of("a"))
    assert shelf(now=1100).is_stale(name_of("a"))
    assert not shelf(now=1100).is_stale("unknown")


def test_the_items_of_a_response_go_into_its_conversation_once(shelf: MakeShelf) -> None:
    made = responses.create_conversation(shelf(), b"{}", [{"role": "user", "content": "before"}])
    assert made is not None
    assert responses.put(shelf(), kept("a", conversation=made.conversation_id))
    again = kept("a", conversation=made.conversation_id)
    second = KeptResponse(name_of("b"), again.head, again.output, b"[]", None, made.conversation_id)
    assert responses.put(shelf(), second)
    listed = responses.items_page(shelf(), made.conversation_id, Page(100, ascending=True))
    assert listed is not None
    items = [json.loads(item) for _, item in listed.rows]
    assert [item["content"] for item in items] == [
        [{"type": "input_text", "text": "before"}],
        [{"type": "input_text", "text": "a?"}],
        [{"type": "output_text", "text": "a", "annotations": []}],
    ]
    assert len({item["id"] for item in items}) == 3


def test_a_response_of_a_conversation_that_is_gone_is_not_kept(shelf: MakeShelf) -> None:
    assert not responses.put(shelf(), kept("a", conversation="conv_gone"))
    assert found(shelf(), "a") == ""


def test_items_come_and_go_and_count(shelf: MakeShelf) -> None:
    made = responses.create_conversation(shelf(), b'{"a":"b"}', [])
    assert made is not None
    empty = shelf().num_bytes
    item = {"id": "msg_1", "role": "user", "content": "x" * 1000}
    assert responses.append_items(shelf(), made.conversation_id, [item]) is not None
    assert responses.append_items(shelf(), made.conversation_id, [item]) is None
    assert shelf().num_bytes > empty + 1000
    assert responses.delete_item(shelf(), made.conversation_id, "msg_1")
    assert not responses.delete_item(shelf(), made.conversation_id, "msg_1")
    assert shelf().num_bytes == empty
    assert shelf().delete(made.conversation_id)
    assert shelf().num_bytes == 0


# Steps of the model below: keep after one of the kept or none, use, delete, by numbers.
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "use", "delete"]), st.integers(0, 7), st.integers(0, 2000)), max_size=40
)


@examples(2)
@given(steps=STEPS, callers=st.lists(st.sampled_from([b"x", b"y"]), min_size=40, max_size=40))
def test_a_conversation_is_whole_or_gone_and_bytes_are_counted(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], callers: list[bytes]
) -> None:
    bounds = Bounds(12_000, 1e9)
    with shelves(tmp_path_factory.mktemp("s"), bounds) as shelf:
        history: dict[str, list[str]] = {}
        for number, ((step, chosen, size), caller) in enumerate(zip(steps, callers, strict=False)):
            mine = [name for name in history if name.startswith(caller.decode())]
            other = mine[chosen % len(mine)] if mine and chosen else None
            if step == "put":
                name = f"{caller.decode()}{number}"
                if put(shelf(caller), name, other, size):
                    past = [] if other is None else history[other]
                    history[name] = [*past, f"{name}?", name + "." * size]
            elif other is not None and step == "use":
                shelf(caller).touch([name_of(other)])
            elif other is not None:
                shelf(caller).delete(name_of(other))
            check_whole(shelf, history, bounds)


def check_whole(shelf: MakeShelf, history: dict[str, list[str]], bounds: Bounds) -> None:
    db = shelf().db
    total = db.execute("SELECT coalesce(sum(size), 0) FROM kept").fetchone()[0]
    assert total == sum(row[0] for row in db.execute("SELECT num_bytes FROM shelves"))
    assert total <= bounds.max_bytes
    unneeded = "SELECT count(*) FROM kept WHERE hidden AND id NOT IN (SELECT needs FROM kept WHERE needs NOT NULL)"
    assert db.execute(unneeded).fetchone() == (0,)
    num_kept, num_responses = (db.execute(f"SELECT count(*) FROM {name}").fetchone() for name in ("kept", "responses"))
    assert num_kept == num_responses
    for name, expected in history.items():
        assert texts(shelf(name[:1].encode()), name) in (expected, None)


def test_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "store"
    old_mask = os.umask(0)
    try:
        prepare(path)
        db = connect(path)
        put(Shelf(db, b"", 1, LARGE), "a")
        modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        db.close()
    finally:
        os.umask(old_mask)
    assert modes == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("content", [b"no database, but long enough to be looked at as one" * 100])
def test_a_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store"
    path.write_bytes(content)
    with pytest.raises(StoreError, match="cannot be used"):
        prepare(path)
    assert path.read_bytes() == content


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    prepare(path)
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="this version"):
        prepare(path)


def test_what_fails_is_undone_and_a_fault_of_the_file_is_a_503(tmp_path: Path) -> None:
    async def run() -> None:
        store = Store(tmp_path / "store", LARGE)
        await store.start()

        def fail(shelf: Shelf) -> None:
            assert put(shelf, "a")
            raise ValueError("later")

        with pytest.raises(ValueError, match="later"):
            await store.write(b"", fail)
        assert await store.read(b"", lambda shelf: found(shelf, "a")) == ""
        with pytest.raises(ApiError) as caught:
            await store.write(b"", lambda shelf: shelf.db.execute("no SQL"))
        assert (caught.value.status, caught.value.code) == (503, "store_unavailable")
        assert await store.write(b"", lambda shelf: put(shelf, "b"))
        await store.stop()

    asyncio.run(run())


def _keep_until_killed(path: str, name: str, pipe: Any) -> None:
    db = connect(Path(path))
    for number in range(10**6):
        shelf = Shelf(db, name.encode(), number, LARGE)
        db.execute("BEGIN IMMEDIATE")
        assert put(shelf, f"{name}{number}", f"{name}{number - 1}" if number else None)
        db.execute("COMMIT")
        pipe.send(number)


def test_what_was_kept_outlives_any_kill_of_two_processes_that_write(tmp_path: Path) -> None:
    path = tmp_path / "store"
    prepare(path)
    spawn = get_context("spawn")
    writers = []
    for name in ("x", "y"):
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_keep_until_killed, args=(str(path), name, sender), daemon=True)
        process.start()
        sender.close()
        writers.append((name, process, receiver))
    last_told = {}
    for place, (name, process, receiver) in enumerate(writers):
        last_told[name] = 0
        while last_told[name] < 20 + 7 * place:
            last_told[name] = receiver.recv()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    db = connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    for name, _, receiver in writers:
        told = last_told[name]
        try:
            while True:
                told = receiver.recv()
        except EOFError:
            pass
        shelf = Shelf(db, name.encode(), 0, LARGE)
        num_kept = sum(responses.find(shelf, name_of(f"{name}{number}")) is not None for number in range(told + 10))
        # At most one was kept that its writer could not tell any more.
        assert num_kept in (told + 1, told + 2)
        assert len(texts(shelf, f"{name}{num_kept - 1}") or ()) == 2 * num_kept
    db.close()
