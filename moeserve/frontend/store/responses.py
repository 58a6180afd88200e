"""Kept responses, and conversations that clients make and fill: items in an order, by id, with metadata.

A response holds the items of its own request alone and needs the response before it. So a conversation of responses
counts once, however many turns it has.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.responses_answer import OUTPUT_FOLLOWS, KeptResponse
from moeserve.frontend.dialects.responses_items import (
    Earlier,
    Named,
    check_named_bytes,
    listed_item,
    number_of_item,
    response_of_item,
)
from moeserve.frontend.listing import Listed, Page
from moeserve.frontend.store.store import OVERHEAD_BYTES, ROW_BYTES, NoRoom, Shelf, Store

_CHAIN = """
WITH RECURSIVE turn(id, needs, age) AS (
  SELECT id, needs, 0 FROM kept WHERE id = ?
  UNION ALL SELECT kept.id, kept.needs, age + 1 FROM kept JOIN turn ON kept.id = turn.needs)
SELECT input, output FROM turn JOIN responses USING (id) ORDER BY age DESC
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


class _Identified(msgspec.Struct):
    id: Any = None


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
        query = f"""SELECT past_size + {OVERHEAD_BYTES} + length(head) + length(output) + length(input)
                    FROM responses WHERE id = ?"""
        (past_size,) = shelf.db.execute(query, (kept.previous_id,)).fetchone()
    own_items, is_job = _own_items(shelf, kept)
    size = len(kept.head) + len(kept.output)
    if size + len(own_items) + OVERHEAD_BYTES + past_size > min(
        shelf.bounds.max_bytes, limits.MAX_STORED_CONVERSATION_BYTES
    ):
        return False
    if kept.conversation_id is not None:
        items = [*msgspec.json.decode(own_items), *msgspec.json.decode(kept.output)]
        if append_new_items(shelf, kept.conversation_id, items) is None:
            return False
    if is_job:
        shelf.grow(kept.response_id, size)
    else:
        shelf.add(kept.response_id, size + len(own_items), needs=kept.previous_id)
    _insert(shelf, kept, past_size)
    return True


def put_shown(shelf: Shelf, ended: KeptResponse) -> None:
    """Keep a response in the background that was cancelled, has failed, or was not kept as a whole one: it is shown,
    and no request goes on from it."""
    with suppress(NoRoom), shelf.attempt():
        if shelf.has(ended.response_id) and find(shelf, ended.response_id) is None:
            _insert(shelf, ended, 0)
            shelf.grow(ended.response_id, len(ended.head) + len(ended.output))


def _insert(shelf: Shelf, kept: KeptResponse, past_size: int) -> None:
    """Enter a response. That of a job takes over the items of the request."""
    own_items, _ = _own_items(shelf, kept)
    shelf.db.execute("UPDATE jobs SET input = x'' WHERE id = ?", (kept.response_id,))
    row = (kept.response_id, kept.head, kept.output, own_items, past_size)
    shelf.db.execute("INSERT INTO responses(id, head, output, input, past_size) VALUES (?, ?, ?, ?, ?)", row)


def _own_items(shelf: Shelf, kept: KeptResponse) -> tuple[bytes, bool]:
    """Return the items of a response's request, and whether it is a job, whose items are kept since it came."""
    row = shelf.db.execute("SELECT input FROM jobs WHERE id = ?", (kept.response_id,)).fetchone()
    return (kept.input, False) if row is None else (bytes(row[0]), True)


def find(shelf: Shelf, response_id: str) -> KeptResponse | None:
    """Return a response of the caller's without the items of its request; None for an unknown one."""
    query = "SELECT head, output FROM responses JOIN kept USING (id) WHERE id = ? AND caller = ? AND NOT hidden"
    row = shelf.db.execute(query, (response_id, shelf.caller)).fetchone()
    return None if row is None else KeptResponse(response_id, bytes(row[0]), bytes(row[1]), b"[]")


def shown_size(shelf: Shelf, response_id: str) -> int | None:
    """Return the bytes of a response of the caller's as clients see it; None for an unknown one."""
    query = f"""SELECT length(head) + length(output) + {len(OUTPUT_FOLLOWS)} FROM responses JOIN kept USING (id)
                WHERE id = ? AND caller = ? AND NOT hidden"""
    row = shelf.db.execute(query, (response_id, shelf.caller)).fetchone()
    return None if row is None else int(row[0])


def shown_part(shelf: Shelf, response_id: str, start: int, size: int) -> bytes:
    """Return bytes of a response as clients see it from `start` on: at most `size`, one at least. Nothing where it was
    dropped."""
    query = """SELECT responses.rowid, length(head) - 1, length(output) FROM responses JOIN kept USING (id)
               WHERE id = ? AND caller = ? AND NOT hidden"""
    row = shelf.db.execute(query, (response_id, shelf.caller)).fetchone()
    if row is None:
        return b""
    number, head_size, output_size = row
    if start < head_size:
        return shelf.part("responses", "head", number, start, min(size, head_size - start))
    start -= head_size + len(OUTPUT_FOLLOWS)
    if start < 0:
        return OUTPUT_FOLLOWS[start:]
    return shelf.part("responses", "output", number, start, size) if start < output_size else b"}"


def input_page(shelf: Shelf, response_id: str, page: Page) -> Listed | None:
    """Return items of a response's request, also of one in the background; None for an unknown response. Raise
    ApiError."""
    query = """SELECT coalesce(responses.input, jobs.input) FROM kept LEFT JOIN responses USING (id)
               LEFT JOIN jobs USING (id) WHERE id = ? AND kept.caller = ? AND NOT hidden"""
    row = shelf.db.execute(query, (response_id, shelf.caller)).fetchone()
    return None if row is None or row[0] is None else page_of_input(response_id, bytes(row[0]), page)


def page_of_input(response_id: str, items: bytes, page: Page) -> Listed:
    """Return items of a JSON list as the page shows them; items without an id get one from their place. Raise
    ApiError."""
    found = msgspec.json.decode(items, type=list[msgspec.Raw])
    after = None
    if page.after is not None:
        ids = [one.id for one in msgspec.json.decode(items, type=list[_Identified])]
        names = [own or _input_id(response_id, place) for place, own in enumerate(ids)]
        if page.after not in names:
            raise page.not_listed()
        after = names.index(page.after)
    places, has_more = page.places(len(found), after)
    shown = [listed_item(msgspec.json.decode(found[place]), _input_id(response_id, place)) for place in places]
    return Listed([(item["id"], msgspec.json.encode(item)) for item in shown], has_more)


def _input_id(response_id: str, place: int) -> str:
    return f"{response_id}_in{place}"


def earlier(shelf: Shelf, named: Named) -> Earlier:
    """Return the parts of conversations that a request names, as far as they are kept. Raise ApiError for single items
    of longer responses together than a conversation may be."""
    turns = None
    if named.previous_id is not None and _is_complete(shelf, named.previous_id):
        turns = [bytes(items) for row in shelf.db.execute(_CHAIN, (named.previous_id,)) for items in row]
    elif named.conversation_id is not None and shelf.has(named.conversation_id):
        turns = conversation_turns(shelf, named.conversation_id)
    return Earlier(turns, _items(shelf, named.item_ids))


async def lend(store: Store, caller: bytes, named: Named) -> Earlier:
    """Return the kept things that a request of a caller's names, and note their use."""
    used = [name for name in (named.previous_id, named.conversation_id) if name is not None]
    found, is_stale = await store.read(caller, lambda shelf: (earlier(shelf, named), any(map(shelf.is_stale, used))))
    if is_stale:
        await store.write(caller, lambda shelf: shelf.touch(used))
    return found


def _is_complete(shelf: Shelf, response_id: str) -> bool:
    """Return whether the caller keeps a whole response; one in the background may have none, or one that is shown
    alone."""
    query = "SELECT 1 FROM responses LEFT JOIN jobs USING (id) WHERE id = ? AND coalesce(is_kept, 1)"
    return shelf.has(response_id) and shelf.db.execute(query, (response_id,)).fetchone() is not None


def _items(shelf: Shelf, item_ids: Sequence[str]) -> dict[str, bytes]:
    """Return the items that responses have put out, or that conversations hold, by their ids, without unknown ones.
    Each response is read once. Raise ApiError."""
    ids_of: defaultdict[str, list[str]] = defaultdict(list)
    for item_id in item_ids:
        ids_of[response_of_item(item_id)].append(item_id)
    found: dict[str, bytes] = {}
    num_bytes = 0
    for response_id, wanted in ids_of.items():
        output = _output_of(shelf, response_id)
        num_bytes += len(output)
        check_named_bytes(num_bytes)
        items = msgspec.json.decode(output, type=list[msgspec.Raw])
        for item_id in wanted:
            number = number_of_item(item_id)
            item = items[number] if number < len(items) else b""
            if item and msgspec.json.decode(item, type=_Identified).id == item_id:
                found[item_id] = bytes(item)
            elif (of_conversation := item_of_any(shelf, item_id)) is not None:
                found[item_id] = of_conversation
                num_bytes += len(of_conversation)
                check_named_bytes(num_bytes)
    return found


def _output_of(shelf: Shelf, response_id: str) -> bytes:
    if not _is_complete(shelf, response_id):
        return b"[]"
    (output,) = shelf.db.execute("SELECT output FROM responses WHERE id = ?", (response_id,)).fetchone()
    return bytes(output)


@dataclass(frozen=True, slots=True)
class Conversation:
    """created: UNIX time in seconds. metadata: JSON of an object."""

    conversation_id: str
    created: int
    metadata: bytes


def create_conversation(shelf: Shelf, metadata: bytes, items: Sequence[dict[str, Any]]) -> Conversation | None:
    """Return a new conversation with these items; None if they are too long. Raise NoRoom."""
    made = Conversation(CONVERSATION_PREFIX + secrets.token_hex(24), shelf.date, metadata)
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
    rows = [(conversation_id, item["id"], msgspec.json.encode(item), shelf.caller) for item in map(_identified, items)]
    num_bytes = sum(len(item) + ROW_BYTES for _, _, item, _ in rows)
    known = "SELECT size, (SELECT count(*) FROM items WHERE conversation = kept.id) FROM kept WHERE id = ?"
    size, num_items = shelf.db.execute(known, (conversation_id,)).fetchone()
    too_long = size + num_bytes > min(shelf.bounds.max_bytes, limits.MAX_STORED_CONVERSATION_BYTES)
    names = {item_id for _, item_id, _, _ in rows}
    if too_long or num_items + len(rows) > limits.MAX_MESSAGES or len(names) < len(rows):
        return None
    if any(_has_item(shelf, conversation_id, name) for name in names):
        return None
    shelf.db.executemany("INSERT INTO items(conversation, id, item, caller) VALUES (?, ?, ?, ?)", rows)
    shelf.grow(conversation_id, num_bytes)
    shelf.touch([conversation_id])
    return [item for _, _, item, _ in rows]


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
    query = "SELECT item FROM items WHERE caller = ? AND id = ? LIMIT 1"
    row = shelf.db.execute(query, (shelf.caller, item_id)).fetchone()
    return None if row is None else bytes(row[0])


def delete_item(shelf: Shelf, conversation_id: str, item_id: str) -> bool:
    """Take an item out of a conversation; return whether it was there."""
    found = item(shelf, conversation_id, item_id)
    if found is None:
        return False
    shelf.db.execute("DELETE FROM items WHERE conversation = ? AND id = ?", (conversation_id, item_id))
    shelf.grow(conversation_id, -len(found) - ROW_BYTES)
    return True


def items_page(shelf: Shelf, conversation_id: str, page: Page) -> Listed | None:
    """Return items of a conversation; None for an unknown conversation. Raise ApiError."""
    if not shelf.has(conversation_id):
        return None
    after = None
    if page.after is not None:
        query = "SELECT number FROM items WHERE conversation = ? AND id = ?"
        row = shelf.db.execute(query, (conversation_id, page.after)).fetchone()
        if row is None:
            raise page.not_listed()
        after = int(row[0])
    clause, bounds = page.clause("number", after)
    found = shelf.db.execute(f"SELECT id, item FROM items WHERE conversation = ? {clause}", (conversation_id, *bounds))
    rows = [(name, bytes(item)) for name, item in found]
    return Listed(rows[: page.limit], has_more=len(rows) > page.limit)


def conversation_turns(shelf: Shelf, conversation_id: str) -> list[bytes]:
    """Return the items as JSON lists."""
    query = "SELECT item FROM items WHERE conversation = ? ORDER BY number"
    found = shelf.db.execute(query, (conversation_id,))
    return [b"[" + b",".join(bytes(item) for (item,) in found) + b"]"]


def _identified(given: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is listed, with an id."""
    kind = given.get("type") or "message"
    return listed_item(given, f"{_ITEM_PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}")
