"""A case of the kernel benchmark: our kernel, its peers, the least it moves and computes, and its measured times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from benchmarks.kernels.measure import TOLERANCE, Call, Timing

# The names of kernels of ours that serve nothing begin so: they are timed as peers are, and count as none.
VARIANT = "variant "


@dataclass(frozen=True, slots=True)
class Peers:
    """Calls of other kernels by name, one list as long as a case's own; absent: reasons why a peer is missing."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """calls: the same work on different data, to be run in turn so that the cache stays cold; all peers have as many.
    num_bytes and num_flops: the least that one call moves and computes."""

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


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch compile the function for each shape at its first call; off a GPU it stays uncompiled and is only
    checked."""
    fast = torch.compile(function, dynamic=False)

    def run(*args: Any) -> Any:
        on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in args)
        return (fast if on_gpu else function)(*args)

    return run


class TimeCalls(Protocol):
    """The signature of `time_calls`, which tests replace."""

    def __call__(self, *groups: Sequence[Call]) -> list[Timing]: ...


@dataclass(frozen=True, slots=True)
class PeerTime:
    """ratio: the peer's time over ours, both measured in turn. in_graph: see `Timing`."""

    microseconds: float
    ratio: float
    in_graph: bool = True


@dataclass(frozen=True, slots=True)
class Measurement:
    """error: relative to the reference, None for cases that only the checks compare. peers: by name. absent: why a peer
    failed while it was timed. in_graph: see `Timing`."""

    microseconds: float
    spread: float
    error: float | None
    bytes_per_second: float
    flops_per_second: float
    peers: Mapping[str, PeerTime]
    absent: Mapping[str, str] = field(default_factory=dict)
    in_graph: bool = True

    @property
    def is_right(self) -> bool:
        # NaN, of something that was not written, is below nothing.
        return self.error is None or self.error < TOLERANCE

    @property
    def best_ratio(self) -> float | None:
        """The ratio of the fastest peer."""
        ratios = (peer.ratio for name, peer in self.peers.items() if not name.startswith(VARIANT))
        return min(ratios, default=None)


def measure(case: KernelCase, time_calls: TimeCalls, out_of_time: Callable[[], bool]) -> Measurement:
    """Compare with the reference, then time the kernel and, while there is time, each of its peers in turn with it."""
    error = None if case.relative_error is None else case.relative_error()
    own = time_calls(case.calls)[0]
    peers, absent = {}, {}
    for name, calls in case.peers.items():
        if out_of_time():
            break
        try:
            beside, peer = time_calls(case.calls, calls)
        except Exception as failure:  # Another project's kernel, or a compiler: whatever it says, ours is measured.
            absent[name] = f"fails: {type(failure).__name__}"
        else:
            peers[name] = PeerTime(peer.microseconds, peer.microseconds / beside.microseconds, peer.in_graph)
    seconds = own.microseconds / 1e6
    rates = case.num_bytes / seconds, case.num_flops / seconds
    return Measurement(own.microseconds, own.spread, error, *rates, peers, absent, own.in_graph)
