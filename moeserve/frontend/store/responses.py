"""Kept responses: each holds the items of its own request alone and needs the response before it.

So a conversation counts once, however many turns it has.
"""

from __future__ import annotations

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.responses_answer import KeptResponse
from moeserve.frontend.dialects.responses_items import Earlier, Named, response_of_item
from moeserve.frontend.store import conversations
from moeserve.frontend.store.store import OVERHEAD_BYTES, Shelf

_CHAIN = """
WITH RECURSIVE turn(id, needs, age) AS (
  SELECT id, needs, 0 FROM kept WHERE id = ?
  UNION ALL SELECT kept.id, kept.needs, age + 1 FROM kept JOIN turn ON kept.id = turn.needs)
SELECT input, response FROM turn JOIN responses USING (id) ORDER BY age DESC
"""


class _Output(msgspec.Struct):
    output: msgspec.Raw


class _Identified(msgspec.Struct):
    id: str | None = None


def put(shelf: Shelf, kept: KeptResponse) -> bool:
    """Keep a response, and add its items to its conversation. Return False, with nothing kept, if the conversation is
    too long, or its past is gone."""
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
        if conversations.append_new(shelf, kept.conversation_id, items) is None:
            return False
    if shelf.has(kept.response_id):
        shelf.grow(kept.response_id, size)  # a job entered it
    else:
        shelf.add(kept.response_id, size, needs=kept.previous_id)
    row = (kept.response_id, kept.response, kept.input, past_size)
    shelf.db.execute("INSERT INTO responses(id, response, input, past_size) VALUES (?, ?, ?, ?)", row)
    shelf.make_room()
    return shelf.has(kept.response_id)


def find(shelf: Shelf, response_id: str) -> KeptResponse | None:
    """Return a response, None for an unknown one."""
    row = shelf.db.execute(
        "SELECT response, input, needs FROM responses JOIN kept USING (id) WHERE id = ? AND caller = ? AND NOT hidden",
        (response_id, shelf.caller),
    ).fetchone()
    return None if row is None else KeptResponse(response_id, row[0], row[1], row[2])


def delete(shelf: Shelf, response_id: str) -> bool:
    """Drop a response; return whether there was one. Later turns that have it in their past keep it there."""
    if not shelf.has(response_id):
        return False
    shelf.drop(response_id)
    return True


def earlier(shelf: Shelf, named: Named) -> Earlier:
    """Return what there is of the parts of conversations that a request names."""
    turns = None
    if named.previous_id is not None and _is_complete(shelf, named.previous_id):
        rows = shelf.db.execute(_CHAIN, (named.previous_id,))
        turns = [items for asked, response in rows for items in (asked, bytes(output_of(response)))]
    elif named.conversation_id is not None and shelf.has(named.conversation_id):
        turns = conversations.turns(shelf, named.conversation_id)
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
    return conversations.item_of_any(shelf, item_id)
