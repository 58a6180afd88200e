"""Kept responses, and conversations that clients make and fill: items in an order, by id, with metadata.

A response holds the items of its own request alone and needs the response before it. So a conversation of responses
counts once, however many turns it has.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.responses_answer import KeptResponse
from moeserve.frontend.dialects.responses_items import Earlier, Named, listed_item, response_of_item
from moeserve.frontend.store.store import OVERHEAD_BYTES, ROW_BYTES, NoRoom, Shelf

_CHAIN = """
WITH RECURSIVE turn(id, needs, age) AS (
  SELECT id, needs, 0 FROM kept WHERE id = ?
  UNION ALL SELECT kept.id, kept.needs, age + 1 FROM kept JOIN turn ON kept.id = turn.needs)
SELECT input, response FROM turn JOIN responses USING (id) ORDER BY age DESC
"""

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


class _Output(msgspec.Struct):
    output: msgspec.Raw


class _Identified(msgspec.Struct):
    id: str | None = None


def put(shelf: Shelf, kept: KeptResponse) -> bool:
    """Keep a response, and add its items to its conversation. Return False, with nothing kept, if the conversation is
    too long, its past is gone, or there is no room."""
    with suppress(NoRoom), shelf.attempt():
        return _put(shelf, kept)
    return False


def _put(shelf: Shelf, kept: KeptResponse) -> bool:
    past_size = 0
    if kept.previous_id is not None:
        if not _is_complete(shelf, kept.previous_id):
            return False
        query = f"SELECT past_size + {OVERHEAD_BYTES} + length(response) + length(input) FROM responses WHERE id = ?"
        (past_size,) = shelf.db.execute(query, (kept.previous_id,)).fetchone()
    size = len(kept.response) + len(kept.input)
    if size + OVERHEAD_BYTES + past_size > min(shelf.bounds.max_bytes, limits.MAX_STORED_CONVERSATION_BYTES):
        return False
    if kept.conversation_id is not None:
        items = [*kept.input_items(), *msgspec.json.decode(output_of(kept.response))]
        if append_new_items(shelf, kept.conversation_id, items) is None:
            return False
    if shelf.has(kept.response_id):
        shelf.grow(kept.response_id, size)  # a job entered it
    else:
        shelf.add(kept.response_id, size, needs=kept.previous_id)
    row = (kept.response_id, kept.response, kept.input, past_size)
    shelf.db.execute("INSERT INTO responses(id, response, input, past_size) VALUES (?, ?, ?, ?)", row)
    return True


def find(shelf: Shelf, response_id: str) -> KeptResponse | None:
    row = shelf.db.execute(
        "SELECT response, input, needs FROM responses JOIN kept USING (id) WHERE id = ? AND caller = ? AND NOT hidden",
        (response_id, shelf.caller),
    ).fetchone()
    return None if row is None else KeptResponse(response_id, row[0], row[1], row[2])


def earlier(shelf: Shelf, named: Named) -> Earlier:
    """Return the parts of conversations that a request names, as far as they are kept."""
    turns = None
    if named.previous_id is not None and _is_complete(shelf, named.previous_id):
        rows = shelf.db.execute(_CHAIN, (named.previous_id,))
        turns = [items for asked, response in rows for items in (asked, bytes(output_of(response)))]
    elif named.conversation_id is not None and shelf.has(named.conversation_id):
        turns = conversation_turns(shelf, named.conversation_id)
    items = {item_id: item for item_id in named.item_ids if (item := _item(shelf, item_id)) is not None}
    return Earlier(turns, items)


def _is_complete(shelf: Shelf, response_id: str) -> bool:
    """Return whether the caller keeps a response with its output; one that runs in the background has none yet."""
    found = shelf.db.execute("SELECT 1 FROM responses WHERE id = ?", (response_id,))
    return shelf.has(response_id) and found.fetchone() is not None


def output_of(response: bytes) -> msgspec.Raw:
    """Return the list of the items of a response, as JSON."""
    return msgspec.json.decode(response, type=_Output).output


def _item(shelf: Shelf, item_id: str) -> bytes | None:
    """Return an item that a response has put out, or that a conversation holds; None for an unknown one."""
    kept = find(shelf, response_of_item(item_id))
    if kept is not None:
        for item in msgspec.json.decode(output_of(kept.response), type=list[msgspec.Raw]):
            if msgspec.json.decode(item, type=_Identified).id == item_id:
                return bytes(item)
    return item_of_any(shelf, item_id)


@dataclass(frozen=True, slots=True)
class Conversation:
    """created: UNIX time in seconds. metadata: JSON of an object."""

    conversation_id: str
    created: int
    metadata: bytes


def create_conversation(shelf: Shelf, metadata: bytes, items: Sequence[dict[str, Any]]) -> Conversation | None:
    """Return a new conversation with these items; None if they are too long. Raise NoRoom."""
    made = Conversation(CONVERSATION_PREFIX + secrets.token_hex(24), int(shelf.now), metadata)
    shelf.add(made.conversation_id, len(metadata))
    row = (made.conversation_id, made.created, metadata)
    shelf.db.execute("INSERT INTO conversations(id, created, metadata) VALUES (?, ?, ?)", row)
    if append_items(shelf, made.conversation_id, items) is None:
        shelf.drop(made.conversation_id)
        return None
    return made


def find_conversation(shelf: Shelf, conversation_id: str) -> Conversation | None:
    if not shelf.has(conversation_id):
        return None
    query = "SELECT created, metadata FROM conversations WHERE id = ?"
    row = shelf.db.execute(query, (conversation_id,)).fetchone()
    return None if row is None else Conversation(conversation_id, *row)


def update_conversation(shelf: Shelf, conversation_id: str, metadata: bytes) -> Conversation | None:
    """Give a conversation other metadata; return it, None for an unknown one. Raise NoRoom."""
    found = find_conversation(shelf, conversation_id)
    if found is None:
        return None
    shelf.grow(conversation_id, len(metadata) - len(found.metadata))
    shelf.db.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (metadata, conversation_id))
    shelf.touch([conversation_id])
    return Conversation(conversation_id, found.created, metadata)


def append_items(shelf: Shelf, conversation_id: str, items: Sequence[dict[str, Any]]) -> list[bytes] | None:
    """Add items, with ids where they have none, at the end; return them as JSON.

    Return None, with nothing added, if the conversation is gone, has one of the ids already, or would be too long.
    Raise NoRoom.
    """
    if not shelf.has(conversation_id):
        return None
    rows = [(conversation_id, item["id"], msgspec.json.encode(item)) for item in map(_identified, items)]
    num_bytes = sum(len(item) + ROW_BYTES for _, _, item in rows)
    known = "SELECT size, (SELECT count(*) FROM items WHERE conversation = kept.id) FROM kept WHERE id = ?"
    size, num_items = shelf.db.execute(known, (conversation_id,)).fetchone()
    too_long = size + num_bytes > min(shelf.bounds.max_bytes, limits.MAX_STORED_CONVERSATION_BYTES)
    names = {item_id for _, item_id, _ in rows}
    if too_long or num_items + len(rows) > limits.MAX_MESSAGES or len(names) < len(rows):
        return None
    if any(_has_item(shelf, conversation_id, name) for name in names):
        return None
    shelf.db.executemany("INSERT INTO items(conversation, id, item) VALUES (?, ?, ?)", rows)
    shelf.grow(conversation_id, num_bytes)
    shelf.touch([conversation_id])
    return [item for _, _, item in rows]


def append_new_items(shelf: Shelf, conversation_id: str, items: Sequence[dict[str, Any]]) -> list[bytes] | None:
    """Add the items that the conversation does not have yet; else as `append_items`."""
    new = [one for one in items if "id" not in one or not _has_item(shelf, conversation_id, one["id"])]
    return append_items(shelf, conversation_id, new)


def _has_item(shelf: Shelf, conversation_id: str, item_id: str) -> bool:
    found = shelf.db.execute("SELECT 1 FROM items WHERE conversation = ? AND id = ?", (conversation_id, item_id))
    return found.fetchone() is not None


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
    shelf.grow(conversation_id, -len(found) - ROW_BYTES)
    return True


def items(shelf: Shelf, conversation_id: str) -> list[tuple[str, bytes]]:
    """Return the ids and the JSON of all items, in their order."""
    query = "SELECT id, item FROM items WHERE conversation = ? ORDER BY number"
    return [(name, bytes(found)) for name, found in shelf.db.execute(query, (conversation_id,))]


def conversation_turns(shelf: Shelf, conversation_id: str) -> list[bytes]:
    """Return the items as JSON lists."""
    return [b"[" + b",".join(found for _, found in items(shelf, conversation_id)) + b"]"]


def _identified(given: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is listed, with an id."""
    kind = given.get("type") or "message"
    return listed_item(given, f"{_ITEM_PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}")
