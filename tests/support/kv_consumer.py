"""A router's side of the events about cached blocks: it applies batches and knows what a replica holds."""

from __future__ import annotations

from typing import Any

import msgpack


class EventConsumer:
    """Applies events as routers do, and refuses what they would drop.

    blocks: by hash, the tokens of the whole prefix and its salt. next: the number of the next batch.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self.parents: dict[int, int | None] = {}
        self.next: int | None = None

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch. A number that was applied before is passed over."""
        if self.next is not None and number < self.next:
            return
        assert self.next is None or number == self.next, f"batch {number} came where {self.next} was due"
        self.next = number + 1
        _, events, _ = msgpack.unpackb(payload)
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                for name in event["block_hashes"]:
                    assert name not in self.parents.values(), "a block went before the block behind it"
                    del self.blocks[name], self.parents[name]
            case "AllBlocksCleared":
                self.blocks.clear()
                self.parents.clear()

    def _store(self, event: dict[str, Any]) -> None:
        hashes, size, parent = event["block_hashes"], event["block_size"], event["parent_block_hash"]
        assert hashes
        assert len(event["token_ids"]) == len(hashes) * size
        assert all(0 <= name < 2**64 for name in hashes)
        extra = event.get("extra_keys")
        if extra is not None:
            assert parent is None
            assert len(extra) == len(hashes)
            assert not any(extra[1:])
        salt, tokens = (extra[0][0] if extra else None, ()) if parent is None else self.blocks[parent]
        for place, name in enumerate(hashes):
            tokens += tuple(event["token_ids"][place * size : (place + 1) * size])
            assert name not in self.blocks, "a block was told twice"
            self.blocks[name], self.parents[name] = (salt, tokens), parent
            parent = name

    @property
    def prefixes(self) -> set[tuple[str | None, tuple[int, ...]]]:
        """The salts and tokens of all prefixes that end with a block."""
        return set(self.blocks.values())
