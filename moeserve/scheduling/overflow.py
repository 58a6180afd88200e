"""The fate of a preempted request's KV: it stays in memory, comes back from the lower tier, or is computed again.

To a disk blocks are written soon after they are computed, before memory is short. So swapping out costs only the blocks
that are not written yet, and swapping in costs reading the blocks that were evicted meanwhile. Computing again delays
every request that runs. Threads read beside the steps, so reading delays the victim, and others only as far as its
blocks lie idle meanwhile. The decision is pure: its costs are measured elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_UNSURE = 1.1  # a reading may wait for other ones: its expected time must be shorter than computing's by this factor


class Overflow(StrEnum):
    """The setting: what to do with the KV of preempted requests that has to leave memory."""

    AUTO = "auto"  # the cheaper one, for each request by its own costs
    RECOMPUTE = "recompute"
    SWAP = "swap"


class Fate(StrEnum):
    """The predicted way of one victim's KV."""

    KEEP = "keep"  # nothing of it leaves memory: other blocks would be evicted before
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Victim:
    """A request that is preempted.

    num_blocks: whole blocks that it has computed; `num_unwritten` of them are not stored. num_before: cached blocks
    of others that would be evicted before its own.
    """

    num_blocks: int
    num_unwritten: int
    num_before: int


@dataclass(frozen=True, slots=True)
class OverflowCosts:
    """Measured costs in seconds: of computing a victim's blocks once more, of reading and of writing one block.

    compute_s is 0, and the others None, while they are not known. num_running: other requests. num_blocks: of all
    memory.
    """

    compute_s: float
    read_s: float | None
    write_s: float | None
    num_running: int
    num_blocks: int

    def is_read_sooner(self, num_blocks: int, more_s: float) -> bool:
        """Return whether all requests together lose less time if the blocks are read than if they are computed.

        more_s: seconds of work before the reading. True while costs are not known: then they are measured.
        """
        if self.read_s is None or not self.compute_s:
            return True
        idle_share = num_blocks / self.num_blocks
        lost_s = num_blocks * self.read_s * (1 + idle_share * self.num_running) + more_s
        return _UNSURE * lost_s <= self.compute_s * (1 + self.num_running)


def fate_of(victim: Victim, costs: OverflowCosts, policy: Overflow) -> Fate:
    """Return the fate of a victim's KV. Costs that are not known are measured by swapping."""
    if victim.num_blocks <= victim.num_before:
        return Fate.KEEP
    if policy is not Overflow.AUTO:
        return Fate.SWAP if policy is Overflow.SWAP else Fate.RECOMPUTE
    write_s = victim.num_unwritten * (costs.write_s or 0.0)
    return Fate.SWAP if costs.is_read_sooner(victim.num_blocks, write_s) else Fate.RECOMPUTE
