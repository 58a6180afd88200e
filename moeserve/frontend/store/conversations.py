"""Conversations that clients make and fill: items in an order, by id, with metadata."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.responses_items import listed_item
from moeserve.frontend.store.store import Shelf

CONVERSATION_PREFIX = "conv_"
# The beginning of an item's id, by its type.
_ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """created: UNIX time in seconds. metadata: JSON of an object."""

    conversation_id: str
    created: int
    metadata: bytes


def create(shelf: Shelf, metadata: bytes, items: Sequence[dict[str, Any]]) -> Conversation | None:
    """Return a new conversation with these items; None if there is no room for them."""
    made = Conversation(CONVERSATION_PREFIX + secrets.token_hex(24), int(shelf.now), metadata)
    shelf.add(made.conversation_id, len(metadata))
    row = (made.conversation_id, made.created, metadata)
    shelf.db.execute("INSERT INTO conversations(id, created, metadata) VALUES (?, ?, ?)", row)
    if append(shelf, made.conversation_id, items) is None:
        shelf.drop(made.conversation_id)
        return None
    shelf.make_room()
    return made if shelf.has(made.conversation_id) else None


def find(shelf: Shelf, conversation_id: str) -> Conversation | None:
    if not shelf.has(conversation_id):
        return None
    query = "SELECT created, metadata FROM conversations WHERE id = ?"
    row = shelf.db.execute(query, (conversation_id,)).fetchone()
    return None if row is None else Conversation(conversation_id, *row)


def update(shelf: Shelf, conversation_id: str, metadata: bytes) -> Conversation | None:
    """Give a conversation other metadata; return it, None for an unknown one."""
    found = find(shelf, conversation_id)
    if found is None:
        return None
    shelf.grow(conversation_id, len(metadata) - len(found.metadata))
    shelf.db.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (metadata, conversation_id))
    shelf.touch([conversation_id])
    return Conversation(conversation_id, found.created, metadata)


def delete(shelf: Shelf, conversation_id: str) -> bool:
    """Drop a conversation with its items; return whether there was one. Responses of it stay."""
    if not shelf.has(conversation_id):
        return False
    shelf.drop(conversation_id)
    return True


def append(shelf: Shelf, conversation_id: str, items: Sequence[dict[str, Any]]) -> list[bytes] | None:
    """Add items, with ids where they have none, at the end; return them as JSON.

    Return None, with nothing added, if the conversation is gone, has one of the ids already, or would be too long.
    """
    if not shelf.has(conversation_id):
        return None
    rows = [(conversation_id, item["id"], msgspec.json.encode(item)) for item in map(_identified, items)]
    num_bytes = sum(len(item) for _, _, item in rows)
    known = "SELECT size, (SELECT count(*) FROM items WHERE conversation = kept.id) FROM kept WHERE id = ?"
    size, num_items = shelf.db.execute(known, (conversation_id,)).fetchone()
    too_long = size + num_bytes > min(shelf.bounds.max_bytes, limits.MAX_STORED_CONVERSATION_BYTES)
    names = {item_id for _, item_id, _ in rows}
    if too_long or num_items + len(rows) > limits.MAX_MESSAGES or len(names) < len(rows):
        return None
    if any(item(shelf, conversation_id, name) is not None for name in names):
        return None
    shelf.db.executemany("INSERT INTO items(conversation, id, item) VALUES (?, ?, ?)", rows)
    shelf.grow(conversation_id, num_bytes)
    shelf.touch([conversation_id])
    return [item for _, _, item in rows]


def append_new(shelf: Shelf, conversation_id: str, items: Sequence[dict[str, Any]]) -> list[bytes] | None:
    """Add the items that the conversation does not have yet; else as `append`."""
    new = [one for one in items if "id" not in one or item(shelf, conversation_id, one["id"]) is None]
    return append(shelf, conversation_id, new)


def item(shelf: Shelf, conversation_id: str, item_id: str) -> bytes | None:
    """Return an item of a conversation as JSON, None for an unknown one. The caller must own the conversation."""
    query = "SELECT item FROM items WHERE conversation = ? AND id = ?"
    row = shelf.db.execute(query, (conversation_id, item_id)).fetchone()
    return None if row is None else bytes(row[0])


def item_of_any(shelf: Shelf, item_id: str) -> bytes | None:
    """Return an item of one of the caller's conversations as JSON, None for an unknown one."""
    row = shelf.db.execute(
        """SELECT item FROM items JOIN kept ON kept.id = conversation
           WHERE items.id = ? AND caller = ? AND NOT hidden LIMIT 1""",
        (item_id, shelf.caller),
    ).fetchone()
    return None if row is None else bytes(row[0])


def delete_item(shelf: Shelf, conversation_id: str, item_id: str) -> bool:
    """Take an item out of a conversation; return whether it was there."""
    found = item(shelf, conversation_id, item_id)
    if found is None:
        return False
    shelf.db.execute("DELETE FROM items WHERE conversation = ? AND id = ?", (conversation_id, item_id))
    shelf.grow(conversation_id, -len(found))
    return True


def items(shelf: Shelf, conversation_id: str) -> list[tuple[str, bytes]]:
    """Return the ids and the JSON of all items, in their order."""
    query = "SELECT id, item FROM items WHERE conversation = ? ORDER BY number"
    return [(name, bytes(found)) for name, found in shelf.db.execute(query, (conversation_id,))]


def turns(shelf: Shelf, conversation_id: str) -> list[bytes]:
    """Return the items as JSON lists."""
    return [b"[" + b",".join(found for _, found in items(shelf, conversation_id)) + b"]"]


def _identified(given: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is listed, with an id."""
    kind = given.get("type") or "message"
    return listed_item(given, f"{_ITEM_PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}")
