"""References to kept items, and pages of them: the work and the bytes follow what is shown, not what is kept."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend import limits
from moeserve.frontend.dialects import responses as dialect
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.dialects.responses_answer import KeptResponse
from moeserve.frontend.dialects.responses_items import Earlier, Named
from moeserve.frontend.listing import Page
from moeserve.frontend.store import responses
from moeserve.frontend.store.file import VERSION, connect, prepare
from moeserve.frontend.store.store import Shelf
from tests.support.refusals import refused
from tests.support.stores import LARGE, MakeShelf, shelves

FACTS = ModelFacts(("tiny",), 4096, 260, (0,), {}, 20)


def digits(number: int) -> str:
    return f"{number:024x}"


def item_id(number: int, place: int) -> str:
    return f"msg_{digits(number)}{place:02d}"


def keep(shelf: Shelf, number: int, texts: list[str], head: bytes = b"{}") -> None:
    output = [{"type": "message", "id": item_id(number, place), "content": text} for place, text in enumerate(texts)]
    response = KeptResponse(f"resp_{digits(number)}", head, json.dumps(output).encode(), b"[]")
    assert responses.put(shelf, response)


@contextmanager
def counted(db: sqlite3.Connection) -> Iterator[list[int]]:
    """Count the steps of SQLite's machine."""
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    db.set_progress_handler(count, 1)
    try:
        yield steps
    finally:
        db.set_progress_handler(None, 1)


def test_each_named_response_is_read_once_however_many_of_its_ids_are_named(shelf: MakeShelf) -> None:
    keep(shelf(), 1, ["one", "two", "three"])
    named = [item_id(1, place) for place in range(1000)]
    statements: list[str] = []
    shelf().db.set_trace_callback(statements.append)
    found = responses.earlier(shelf(), Named(None, None, named)).items
    shelf().db.set_trace_callback(None)
    assert [json.loads(item)["content"] for item in found.values()] == ["one", "two", "three"]
    assert sum("output" in statement for statement in statements) == 1


def test_named_items_of_many_responses_are_found_without_what_else_these_repeat(
    shelf: MakeShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STORED_CONVERSATION_BYTES", 50_000)
    for number in range(20):
        keep(shelf(), number, ["short"], head=b'{"instructions":"%b"}' % (b"." * 40_000))
    found = responses.earlier(shelf(), Named(None, None, [item_id(number, 0) for number in range(20)])).items
    assert len(found) == 20


def test_named_items_of_more_than_a_conversation_are_refused(shelf: MakeShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STORED_CONVERSATION_BYTES", 50_000)
    for number in range(3):
        keep(shelf(), number, ["." * 20_000])
    named = [item_id(number, 0) for number in range(3)]
    assert len(responses.earlier(shelf(), Named(None, None, named[:2])).items) == 2
    with refused("too_many_values", "input") as caught:
        responses.earlier(shelf(), Named(None, None, named))
    assert caught.value.status == 400


def test_one_item_that_is_named_again_and_again_counts_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_STORED_CONVERSATION_BYTES", 50_000)
    item = json.dumps({"type": "message", "role": "user", "content": "." * 20_000}).encode()
    earlier = Earlier(None, {"msg_a": item})

    def read(times: int) -> None:
        references = [{"type": "item_reference", "id": "msg_a"}] * times
        dialect.parse(json.dumps({"model": "tiny", "input": references}).encode(), FACTS, earlier)

    read(2)
    with refused("too_many_values", "input"):
        read(3)


def test_a_body_that_names_more_items_than_a_conversation_may_have_asks_for_none() -> None:
    references = [{"id": f"msg_{number}"} for number in range(limits.MAX_MESSAGES + 1)]
    body = json.dumps({"model": "tiny", "previous_response_id": "resp_1", "input": references}).encode()
    assert dialect.earlier_names(body) is None
    with refused("too_many_values", "input", "4096"):
        dialect.parse(body, FACTS, Earlier())


def test_an_item_of_a_conversation_is_found_at_once_though_others_gave_its_id_to_many(shelf: MakeShelf) -> None:
    item = {"id": "msg_x", "role": "user", "content": "mine"}
    made = responses.create_conversation(shelf(b"me"), b"{}", [item])
    assert made is not None

    def steps() -> int:
        with counted(shelf().db) as count:
            found = responses.earlier(shelf(b"me"), Named(None, None, ["msg_x"])).items
        assert len(found) == 1
        return count[0]

    before = steps()
    for _ in range(50):
        assert responses.create_conversation(shelf(b"other"), b"{}", [item]) is not None
    assert steps() <= 2 * before


def listed(shelf: Shelf, conversation_id: str, page: Page) -> tuple[list[str], bool]:
    found = responses.items_page(shelf, conversation_id, page)
    assert found is not None
    return [name for name, _ in found.rows], found.has_more


@given(
    total=st.integers(0, 7),
    limit=st.integers(1, 8),
    after=st.none() | st.integers(0, 6),
    ascending=st.booleans(),
)
def test_pages_are_parts_of_the_list_in_its_order(
    tmp_path_factory: pytest.TempPathFactory, total: int, limit: int, after: int | None, ascending: bool
) -> None:
    names = [f"msg_{place}" for place in range(total)]
    given = [{"id": name, "role": "user", "content": name} for name in names]
    page = Page(limit, None if after is None else f"msg_{after}", ascending)
    order = names if ascending else names[::-1]
    with shelves(tmp_path_factory.mktemp("s")) as shelf:
        made = responses.create_conversation(shelf(), b"{}", given)
        other = responses.create_conversation(shelf(), b"{}", [{"id": "msg_6", "role": "user", "content": ""}])
        assert made is not None
        assert other is not None

        def of_input() -> tuple[list[str], bool]:
            found = responses.page_of_input("resp_1", json.dumps(given).encode(), page)
            return [name for name, _ in found.rows], found.has_more

        if page.after is not None and page.after not in names:
            for find in (lambda: listed(shelf(), made.conversation_id, page), of_input):
                with refused("invalid_value", "after"):
                    find()
            return
        rest = order[order.index(page.after) + 1 :] if page.after is not None else order
        expected = (rest[:limit], len(rest) > limit)
        assert listed(shelf(), made.conversation_id, page) == expected
        assert of_input() == expected


def test_a_page_reads_its_own_items_however_long_the_conversation_is(shelf: MakeShelf) -> None:
    made = responses.create_conversation(shelf(), b"{}", [])
    assert made is not None
    for _ in range(20):
        responses.append_items(shelf(), made.conversation_id, [{"role": "user", "content": "."}] * 100)
    with counted(shelf().db) as all_steps:
        names, _ = listed(shelf(), made.conversation_id, Page(2000))
    with counted(shelf().db) as steps:
        assert len(listed(shelf(), made.conversation_id, Page(10, names[1000]))[0]) == 10
    assert steps[0] < all_steps[0] / 20


def test_input_items_without_ids_are_named_by_their_places() -> None:
    given: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {"id": 5, "role": "user", "content": "b"}]
    found = responses.page_of_input("resp_1", json.dumps(given).encode(), Page(1, "resp_1_in0", ascending=True))
    assert [json.loads(item)["content"][0]["text"] for _, item in found.rows] == ["b"]


OLD_SCHEMA = """
CREATE TABLE shelves(caller BLOB PRIMARY KEY, num_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE kept(id TEXT PRIMARY KEY, caller BLOB NOT NULL, size INTEGER NOT NULL, used REAL NOT NULL, needs TEXT,
  hidden INTEGER NOT NULL DEFAULT 0, busy INTEGER NOT NULL DEFAULT 0);
CREATE TABLE responses(id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE, response BLOB NOT NULL,
  input BLOB NOT NULL, past_size INTEGER NOT NULL);
CREATE TABLE conversations(id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE, created INTEGER NOT NULL,
  metadata BLOB NOT NULL);
CREATE TABLE items(number INTEGER PRIMARY KEY AUTOINCREMENT,
  conversation TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE, id TEXT NOT NULL, item BLOB NOT NULL,
  UNIQUE (conversation, id));
CREATE INDEX items_by_id ON items(id);
CREATE TABLE jobs(id TEXT PRIMARY KEY REFERENCES kept ON DELETE CASCADE, caller BLOB NOT NULL, record BLOB NOT NULL,
  owner TEXT NOT NULL, tries INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL DEFAULT 'open', ended_at REAL,
  failure BLOB, is_kept INTEGER NOT NULL DEFAULT 0);
PRAGMA user_version = 3;
"""


def test_responses_and_items_of_an_older_file_are_found(tmp_path: Path) -> None:
    path = tmp_path / "store"
    response = {
        "id": f"resp_{digits(1)}",
        "output": [{"id": item_id(1, 0), "n": 12345678901234567890}],
        "user": "\u00e9",
    }
    with sqlite3.connect(path) as old:
        old.executescript(OLD_SCHEMA)
        for name in (response["id"], "conv_1"):
            old.execute("INSERT INTO kept(id, caller, size, used) VALUES (?, x'61', 1, 1)", (name,))
        row = (response["id"], json.dumps(response, ensure_ascii=False).encode())
        old.execute("INSERT INTO responses VALUES (?, ?, x'5b5d', 0)", row)
        old.execute("INSERT INTO conversations VALUES ('conv_1', 1, x'7b7d')")
        old.execute("INSERT INTO items(conversation, id, item) VALUES ('conv_1', 'msg_1', x'7b7d')")
    old.close()
    for _ in range(2):
        prepare(path)
    db = connect(path)
    shelf = Shelf(db, b"a", 1, LARGE)
    kept = responses.find(shelf, str(response["id"]))
    assert kept is not None
    assert json.loads(kept.response) == response
    named = [item_id(1, 0), "msg_1"]
    assert [*responses.earlier(shelf, Named(None, None, named)).items] == named
    assert db.execute("SELECT count(*) FROM batches").fetchone() == (0,)
    assert db.execute("PRAGMA user_version").fetchone() == (VERSION,)
    db.close()
