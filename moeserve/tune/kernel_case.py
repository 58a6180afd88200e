"""What one row of a kernel benchmark measures: this kernel, its peers, and how much they have to move and compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

# Several times the L2 cache of today's GPUs.
COLD_BYTES = 512 * 2**20
_MAX_SETS = 256

# Runs once on the current stream and gives the result.
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Peers:
    """Calls of other kernels by name, one list as long as a case's own; and why others are not among them."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """calls: the same work on different data, to be run in turn so that the cache stays cold; all peers have as many.
    num_bytes and num_flops: the least that one call moves and computes.
    """

    calls: Sequence[Call]
    peers: Mapping[str, Sequence[Call]]
    num_bytes: int
    num_flops: int
    notes: Mapping[str, str] = field(default_factory=dict)
    # Peers that cannot be measured here, and why.
    absent: Mapping[str, str] = field(default_factory=dict)
    # Runs the kernel and compares some of its rows with the reference: relative, NaN if one was not written.
    relative_error: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case before its tensors are made."""

    name: str
    make: Callable[[], KernelCase]


@dataclass(frozen=True, slots=True)
class Section:
    """Cases whose rows stand in one table."""

    title: str
    cases: Sequence[PlannedCase]


def cold_sets(num_bytes: int, at_most: int = _MAX_SETS) -> int:
    """How many sets of data of this size there have to be, so that no run over one after the other finds its own in the
    cache; at most so many."""
    return max(1, min(at_most, -(-COLD_BYTES // num_bytes)))
