"""What one row of a kernel benchmark measures: this kernel, its peers, and how much they have to move and compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

# Runs once on the current stream and gives the result.
Call = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Peers:
    """Calls of other kernels by name, one list as long as a case's own; and why others are not among them."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """family: cases of one are averaged together. calls: the same work on different data, to be run in turn so that
    the cache stays cold; all peers have as many. num_bytes and num_flops: the least that one call moves and computes.
    """

    family: str
    name: str
    calls: Sequence[Call]
    peers: Mapping[str, Sequence[Call]]
    num_bytes: int
    num_flops: int
    notes: Mapping[str, str] = field(default_factory=dict)
    # Peers that cannot be measured here, and why.
    absent: Mapping[str, str] = field(default_factory=dict)
