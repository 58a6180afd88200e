"""The room of a cache for waiting requests, by which they know whether to look again."""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """The room in a cache at one time.

    num_changes: how often a lease with blocks of its own has ended, or a part of a prompt was published. num_blocks:
    available blocks, less those that others will need; below 0 if they are too few.
    """

    owner: object
    num_changes: int
    num_blocks: int


def is_still_full(room: Room | None, before: Room | None) -> bool:
    """Return whether a request still finds no room, as it found none `before`.

    While it waits, only published prompts make its cached prefix longer, and for each evicted block of it the request
    lacks one block more. room, before: None if they are not known.
    """
    if room is None or before is None or room.owner is not before.owner:
        return False
    return room.num_changes == before.num_changes and room.num_blocks <= before.num_blocks
