"""Responses that are kept for later turns: by caller, bounded in number and bytes, least recently used gone first.

A kept response holds the input of its own request alone and points to the response before it, so that a conversation
counts once however many turns it has. Memory that a later turn still needs counts until that turn is gone too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend import limits

Item = dict[str, Any]

_OVERHEAD_BYTES = 1024  # of the objects around one kept response


@dataclass(slots=True, eq=False)
class KeptResponse:
    """A response and the input of its request, both as JSON.

    `holders` counts later turns and the shelf itself, `past_size` is what the turns before it count.
    """

    response_id: str
    response: bytes
    input: bytes
    item_ids: tuple[str, ...]
    previous: KeptResponse | None
    past_size: int
    holders: int = 1

    @property
    def size(self) -> int:
        """The bytes that the response counts."""
        return _OVERHEAD_BYTES + len(self.response) + len(self.input)

    def input_items(self) -> list[Item]:
        items: list[Item] = msgspec.json.decode(self.input)
        return items

    def output_items(self) -> list[Item]:
        items: list[Item] = msgspec.json.decode(self.response)["output"]
        return items

    def item(self, item_id: str) -> Item | None:
        """Return an item that was put out, None for an unknown one."""
        return next((item for item in self.output_items() if item.get("id") == item_id), None)

    def conversation(self) -> list[Item]:
        """Return all items up to the end of the response, oldest first."""
        turns = reversed(list(_turns(self)))
        return [item for turn in turns for item in (*turn.input_items(), *turn.output_items())]


class _OutputItem(msgspec.Struct):
    id: str


class _Output(msgspec.Struct):
    """The ids of the items of a response."""

    output: list[_OutputItem]


class LentTurn(msgspec.Struct, array_like=True, frozen=True):
    """A kept response for another process. One that is not `found` by its id is there as the past of others alone."""

    response_id: str
    response: bytes
    input: bytes
    previous_id: str | None
    found: bool


class Shelf:
    """The responses of one caller. `make_room` is called after each that was added."""

    def __init__(self, max_count: int, max_bytes: int, make_room: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._make_room = make_room
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._by_item: dict[str, KeptResponse] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, response_id: str) -> KeptResponse | None:
        """Return a response, None for an unknown one. It and the turns before it become the most recently used."""
        kept = self._kept.get(response_id)
        if kept is not None:
            for turn in reversed(list(_turns(kept))):
                if turn.response_id in self._kept:
                    self._kept.move_to_end(turn.response_id)
        return kept

    def find_item(self, item_id: str) -> KeptResponse | None:
        """Return the response that has put out an item, None for an unknown one."""
        return self._by_item.get(item_id)

    def conversation(self, response_id: str) -> list[Item] | None:
        """Return all items up to the end of a response, oldest first; None for an unknown response."""
        kept = self.find(response_id)
        return None if kept is None else kept.conversation()

    def item(self, item_id: str) -> Item | None:
        """Return an item that a kept response has put out, None for an unknown one."""
        kept = self.find_item(item_id)
        return None if kept is None else kept.item(item_id)

    def put(self, response_id: str, response: bytes, input_items: bytes, previous_id: str | None) -> bool:
        """Keep a response and the JSON of its input. Return False, with nothing kept, if its conversation is too long,
        or its past is gone."""
        previous = None if previous_id is None else self._kept.get(previous_id)
        if previous is None and previous_id is not None:
            return False
        item_ids = tuple(item.id for item in msgspec.json.decode(response, type=_Output).output)
        past_size = 0 if previous is None else previous.past_size + previous.size
        kept = KeptResponse(response_id, response, input_items, item_ids, previous, past_size)
        if kept.size + past_size > min(self._max_bytes, limits.MAX_STORED_CONVERSATION_BYTES):
            return False
        if previous is not None:
            previous.holders += 1
        self._kept[response_id] = kept
        self._by_item.update(dict.fromkeys(kept.item_ids, kept))
        self.num_bytes += kept.size
        while len(self._kept) > self._max_count or self.num_bytes > self._max_bytes:
            self.drop_oldest()
        self._make_room()
        return response_id in self._kept

    def knows(self, name: str) -> bool:
        """Return whether a response, or an item of one, has that id."""
        return name in self._kept or name in self._by_item

    def lend(self, names: Sequence[str], max_bytes: int) -> list[LentTurn]:
        """Return the conversations up to the responses that have these ids, or items with them, while there is room.

        Each turn comes once, after the one before it.
        """
        lent: dict[str, LentTurn] = {}
        for name in names:
            kept = self._kept.get(name) or self._by_item.get(name)
            if kept is None or kept.response_id in lent:
                continue
            new = [turn for turn in _turns(kept) if turn.response_id not in lent]
            max_bytes -= sum(turn.size for turn in new)
            if max_bytes < 0:
                break
            self.find(kept.response_id)
            for turn in reversed(new):
                previous_id = None if turn.previous is None else turn.previous.response_id
                found = turn.response_id in self._kept
                lent[turn.response_id] = LentTurn(turn.response_id, turn.response, turn.input, previous_id, found)
        return list(lent.values())

    def adopt(self, turns: Sequence[LentTurn]) -> None:
        """Keep what another process has lent as one's own, as far as it is not known."""
        hidden = []
        for turn in turns:
            if turn.response_id not in self._kept:
                self.put(turn.response_id, turn.response, turn.input, turn.previous_id)
                if not turn.found:
                    hidden.append(turn.response_id)
        for response_id in hidden:
            self.delete(response_id)

    def delete(self, response_id: str) -> bool:
        """Drop a response; return whether there was one. Later turns that have it in their past keep it there."""
        kept = self._kept.pop(response_id, None)
        if kept is None:
            return False
        for item_id in kept.item_ids:
            self._by_item.pop(item_id, None)
        self._let_go(kept)
        return True

    def drop_oldest(self) -> None:
        """Drop the least recently used response. Raises StopIteration if there is none."""
        self.delete(next(iter(self._kept)))

    def _let_go(self, kept: KeptResponse) -> None:
        """Take away one holder; a response without any gives its bytes back, and lets go of the one before it."""
        turn: KeptResponse | None = kept
        while turn is not None:
            turn.holders -= 1
            if turn.holders:
                return
            self.num_bytes -= turn.size
            turn = turn.previous


def _turns(kept: KeptResponse) -> Iterator[KeptResponse]:
    """Yield a response and the ones before it, newest first."""
    turn: KeptResponse | None = kept
    while turn is not None:
        yield turn
        turn = turn.previous


class ResponseStore:
    """The shelves of all callers. Where all of them together hold too much, the fullest shelf gives way.

    `caller` is the digest of a caller's key, empty on a server without keys, whose callers share one shelf.
    """

    def __init__(
        self,
        max_count_per_key: int = limits.MAX_STORED_RESPONSES_PER_KEY,
        max_bytes_per_key: int = limits.MAX_STORED_BYTES_PER_KEY,
        max_bytes: int = limits.MAX_STORED_BYTES,
    ) -> None:
        self._max_count_per_key = max_count_per_key
        self._max_bytes_per_key = max_bytes_per_key
        self._max_bytes = max_bytes
        self._shelves: dict[bytes, Shelf] = {}

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def shelf(self, caller: bytes) -> Shelf:
        """Return the shelf of a caller."""
        shelf = self._shelves.get(caller)
        if shelf is None:
            shelf = Shelf(self._max_count_per_key, self._max_bytes_per_key, self._make_room)
            self._shelves[caller] = shelf
        return shelf

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes:
            max(self._shelves.values(), key=lambda shelf: shelf.num_bytes).drop_oldest()
