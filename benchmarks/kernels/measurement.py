"""What a case was measured to take, and its row in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.gpu import Ceilings
from moeserve.tune.check import TOLERANCE
from moeserve.tune.kernel_case import Call, KernelCase
from moeserve.tune.timing import Timing

HEADER = (
    "| case | us | spread | error | GB/s | of copy | TFLOP/s | of product | times the best peer | peers, us | target "
    "| with |",
    "|" + "---|" * 12,
)


class TimeCalls(Protocol):
    """See `kernel_timing.time_calls`."""

    def __call__(self, *groups: Sequence[Call]) -> list[Timing]: ...


@dataclass(frozen=True, slots=True)
class PeerTime:
    """ratio: its time in times of ours, both measured in turn. in_graph: see `Timing`."""

    microseconds: float
    ratio: float
    in_graph: bool = True


@dataclass(frozen=True, slots=True)
class Measurement:
    """error: relative to the reference, None where only the checks compare. peers: by name; absent: the reasons of
    those that failed while they were timed. in_graph: see `Timing`."""

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
        """Of the fastest peer."""
        return min((peer.ratio for peer in self.peers.values()), default=None)


def measure(case: KernelCase, time_calls: TimeCalls, out_of_time: Callable[[], bool]) -> Measurement:
    """Compares, then times the kernel and, while there is time, each of its peers in turn with it."""
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


def row(name: str, case: KernelCase, found: Measurement, ceilings: Ceilings, verdict: str) -> str:
    """In the columns of `HEADER`."""
    best = found.best_ratio
    cells = (
        name,
        f"{found.microseconds:.1f}{_without_graph(found)}",
        f"{found.spread:.0%}",
        "" if found.error is None else f"{found.error:.1e}{'' if found.is_right else ' **WRONG**'}",
        f"{found.bytes_per_second / 1e9:.0f}",
        f"{found.bytes_per_second / ceilings.copy:.0%}",
        f"{found.flops_per_second / 1e12:.1f}",
        f"{found.flops_per_second / ceilings.flops:.0%}",
        "" if best is None else f"{best:.2f}",
        "; ".join(_beside(case, found)),
        verdict,
        "; ".join(f"{key} {value}" for key, value in case.notes.items()),
    )
    return table_row(cells)


def _beside(case: KernelCase, found: Measurement) -> list[str]:
    """The peers' times, fastest first, and why others have none."""
    timed = sorted(found.peers.items(), key=lambda entry: entry[1].microseconds)
    beside = [f"{name} {peer.microseconds:.1f}{_without_graph(peer)}" for name, peer in timed]
    absent = {**case.absent, **found.absent}
    beside += [f"{name}: not measured" for name in case.peers if name not in found.peers and name not in absent]
    return [*beside, *(f"{name}: {reason}" for name, reason in absent.items())]


def _without_graph(found: Measurement | PeerTime) -> str:
    return "" if found.in_graph else " (no graph)"


def remark(name: str, text: str) -> str:
    """The row of a case without figures."""
    return table_row((name, text, *[""] * 10))


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
