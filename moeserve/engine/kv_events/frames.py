"""Events about cached blocks as vLLM writes them: MessagePack, maps with a `type`, or arrays as before its 0.26."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgpack

from moeserve.engine.kv_events.blocks import BlockRemoved, BlockStored, Event

# Where the blocks are: the first tier, from which a request goes on without a copy, whatever the device.
_FIRST_TIER = "GPU"
# The number in the frame that ends a replay.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


def pack_batch(seconds: float, events: Sequence[Event], rank: int, block_size: int, *, as_maps: bool) -> bytes:
    """Return the payload of a message: `[seconds of the Unix time, events, rank]`."""
    shown = [_as_map(event, block_size) for event in events]
    packed: bytes = msgpack.packb([seconds, shown if as_maps else [list(one.values()) for one in shown], rank])
    return packed


def pack_number(number: int) -> bytes:
    """Return the frame with the number of a batch."""
    return number.to_bytes(8, "big")


def _as_map(event: Event, block_size: int) -> dict[str, Any]:
    match event:
        case BlockStored(hashes, parent, token_ids, salt):
            stored: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": array("i", token_ids).tolist(),
                "block_size": block_size,
                "lora_id": None,
                "medium": _FIRST_TIER,
                "lora_name": None,
            }
            if salt is not None:
                stored["extra_keys"] = [[salt], *[None] * (len(hashes) - 1)]
            return stored
        case BlockRemoved(hashes):
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": _FIRST_TIER}
        case _:
            return {"type": "AllBlocksCleared"}
