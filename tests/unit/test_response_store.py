"""The store of responses: bounds, order of leaving, conversations, callers kept apart."""

import json
from typing import Any

import pytest

from moeserve.frontend.response_store import ResponseStore, Shelf


def put(shelf: Shelf, name: str, previous: str | None = None, size: int = 0) -> bool:
    """Keeps a response `name` whose input says `name?`, and whose output is one message `name` with `size` bytes."""
    output = [{"type": "message", "id": f"msg_{name}", "text": name + "." * size}]
    response, asked = {"id": name, "output": output}, [{"text": f"{name}?"}]
    return shelf.put(name, json.dumps(response).encode(), json.dumps(asked).encode(), previous)


def texts(items: list[dict[str, Any]] | None) -> list[str]:
    assert items is not None
    return [item["text"] for item in items]


def shelf_of(max_count: int = 100, max_bytes: int = 1_000_000) -> Shelf:
    return Shelf(max_count, max_bytes, lambda: None)


def test_a_conversation_is_every_input_and_output_up_to_a_response() -> None:
    shelf = shelf_of()
    put(shelf, "a")
    put(shelf, "b", "a")
    put(shelf, "c", "a")
    assert texts(shelf.conversation("b")) == ["a?", "a", "b?", "b"]
    assert texts(shelf.conversation("c")) == ["a?", "a", "c?", "c"]
    assert shelf.conversation("d") is None
    assert shelf.item("msg_b") == {"type": "message", "id": "msg_b", "text": "b"}
    assert shelf.item("msg_d") is None


def test_the_least_recently_used_response_leaves_first() -> None:
    shelf = shelf_of(max_count=2)
    put(shelf, "a")
    put(shelf, "b")
    shelf.find("a")
    put(shelf, "c")
    assert [name for name in "abc" if shelf.find(name)] == ["a", "c"]
    assert shelf.item("msg_b") is None


def test_using_a_response_keeps_its_whole_conversation() -> None:
    shelf = shelf_of(max_count=3)
    put(shelf, "a")
    put(shelf, "b", "a")
    put(shelf, "other")
    shelf.find("b")
    put(shelf, "new")
    assert [name for name in ("a", "b", "other", "new") if shelf.find(name)] == ["a", "b", "new"]


def test_bytes_are_bounded_and_come_back() -> None:
    shelf = shelf_of(max_bytes=10_000)
    for number in range(50):
        assert put(shelf, f"r{number}", size=1000)
        assert shelf.num_bytes <= 10_000
    assert 2 <= len(shelf) < 10
    for number in range(50):
        shelf.delete(f"r{number}")
    assert (len(shelf), shelf.num_bytes) == (0, 0)


def test_memory_that_a_later_turn_needs_counts_until_that_turn_is_gone() -> None:
    shelf = shelf_of()
    put(shelf, "a", size=5000)
    put(shelf, "b", "a")
    assert shelf.delete("a")
    assert not shelf.delete("a")
    assert shelf.num_bytes > 5000
    assert texts(shelf.conversation("b"))[2:] == ["b?", "b"]
    shelf.delete("b")
    assert shelf.num_bytes == 0


def test_a_long_conversation_counts_every_turn_once() -> None:
    shelf = shelf_of()
    put(shelf, "r0")
    one = shelf.num_bytes
    for number in range(1, 50):
        put(shelf, f"r{number}", f"r{number - 1}")
    assert shelf.num_bytes < 51 * one


def test_a_response_whose_conversation_is_too_large_or_gone_is_not_kept() -> None:
    shelf = shelf_of(max_bytes=5000)
    assert put(shelf, "a")
    assert not put(shelf, "huge", size=5000)
    assert not put(shelf, "orphan", "gone")
    assert not put(shelf, "long", "a", size=3500)
    assert [shelf.find(name) is not None for name in ("a", "huge", "orphan", "long")] == [True] + [False] * 3


def test_callers_have_shelves_of_their_own() -> None:
    store = ResponseStore()
    put(store.shelf(b"one"), "a")
    assert store.shelf(b"two").find("a") is None
    assert store.shelf(b"two").item("msg_a") is None
    assert not store.shelf(b"two").delete("a")
    assert store.shelf(b"one").find("a") is not None


@pytest.mark.parametrize("hoarder_first", [True, False])
def test_when_all_hold_too_much_the_fullest_shelf_gives_way(hoarder_first: bool) -> None:
    store = ResponseStore(max_bytes=20_000)
    hoarder, modest = store.shelf(b"hoarder"), store.shelf(b"modest")
    if not hoarder_first:
        put(modest, "mine")
    for number in range(30):
        put(hoarder, f"r{number}", size=1000)
    if hoarder_first:
        put(modest, "mine")
    assert store.num_bytes <= 20_000
    assert modest.find("mine") is not None
    assert hoarder.find("r29") is not None


def test_turns_are_lent_once_and_only_while_there_is_room() -> None:
    shelf = shelf_of()
    put(shelf, "a")
    put(shelf, "b", "a")
    put(shelf, "c", "a")
    put(shelf, "big", size=5000)
    lent = shelf.lend(["b", "msg_c", "c", "unknown", "a", "big"], 5000)
    assert [(turn.response_id, turn.previous_id) for turn in lent] == [("a", None), ("b", "a"), ("c", "a")]
    other = shelf_of()
    other.adopt(lent)
    assert texts(other.conversation("c")) == ["a?", "a", "c?", "c"]
    assert other.num_bytes == sum(len(turn.response) + len(turn.input) + 1024 for turn in lent)
