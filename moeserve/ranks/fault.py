"""Who made a collective fail, as far as rank 0 can find out."""

from __future__ import annotations

import time

from experts.errors import CollectiveError
from moeserve.ranks.hub import RankHub
from moeserve.ranks.messages import RankBeat, RankError

_SECONDS_FOR_A_BEAT = 0.7


def find_fault(hub: RankHub, error: CollectiveError, num_entered: int, timeout: float) -> RankError:
    """Names who is dead, or else silent, or else behind all others.

    num_entered: how many collectives this rank has entered. timeout: how many seconds it waited.
    """
    try:
        entered = _latest_beats(hub)
    except RankError as found:
        return found
    for rank in hub.others:
        if rank not in entered:
            return RankError(f"{hub.name(rank)} is lost or hung: it gives no sign of life.")
    last = min(entered, key=entered.__getitem__)
    if entered[last] < num_entered:
        return RankError(f"{hub.name(last)} hung: the others waited for it for {timeout:g} s.")
    return RankError(f"The ranks cannot reach each other: {error}.")


def _latest_beats(hub: RankHub) -> dict[int, int]:
    """Of every rank that runs now, how many collectives it has entered. Raises RankError if one has died."""
    while hub.receive(0) is not None:
        continue
    entered: dict[int, int] = {}
    deadline = time.monotonic() + _SECONDS_FOR_A_BEAT
    while (left := deadline - time.monotonic()) > 0:
        message = hub.receive(left)
        if isinstance(message, RankBeat):
            entered[message.rank] = message.num_entered
    return entered
