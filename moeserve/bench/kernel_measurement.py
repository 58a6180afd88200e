"""What a case was measured to take, and its row in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moeserve.bench.kernel_case import Call, KernelCase
from moeserve.bench.kernel_timing import Ceilings, Timing

HEADER = (
    "| case | us | spread | error | GB/s | of copy | TFLOP/s | of product | times the best peer | peers, us | target "
    "| with |",
    "|" + "---|" * 12,
)
# The relative error (L2) of 16-bit kernels is to be below it.
TOLERANCE = 1e-2
TimeCalls = Callable[[Sequence[Call]], Timing]


@dataclass(frozen=True, slots=True)
class Measurement:
    """error: relative to the reference, None where only the checks compare. peers: microseconds by name."""

    microseconds: float
    spread: float
    error: float | None
    bytes_per_second: float
    flops_per_second: float
    peers: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        # NaN, of something that was not written, is below nothing.
        return self.error is None or self.error < TOLERANCE


def measure(case: KernelCase, time_calls: TimeCalls, out_of_time: Callable[[], bool]) -> Measurement:
    """Compares, then times the kernel and, while there is time, its peers."""
    error = None if case.relative_error is None else case.relative_error()
    own = time_calls(case.calls)
    peers = {}
    for name, calls in case.peers.items():
        if not out_of_time():
            peers[name] = time_calls(calls).microseconds
    seconds = own.microseconds / 1e6
    return Measurement(own.microseconds, own.spread, error, case.num_bytes / seconds, case.num_flops / seconds, peers)


def row(name: str, case: KernelCase, found: Measurement, ceilings: Ceilings, verdict: str) -> str:
    """In the columns of `HEADER`."""
    beside = [f"{peer} {time:.1f}" for peer, time in sorted(found.peers.items(), key=lambda entry: entry[1])]
    beside += [f"{peer}: not measured" for peer in case.peers if peer not in found.peers]
    beside += [f"{peer}: {reason}" for peer, reason in case.absent.items()]
    cells = (
        name,
        f"{found.microseconds:.1f}",
        f"{found.spread:.0%}",
        "" if found.error is None else f"{found.error:.1e}{'' if found.is_right else ' **WRONG**'}",
        f"{found.bytes_per_second / 1e9:.0f}",
        f"{found.bytes_per_second / ceilings.copy:.0%}",
        f"{found.flops_per_second / 1e12:.1f}",
        f"{found.flops_per_second / ceilings.flops:.0%}",
        f"{min(found.peers.values()) / found.microseconds:.2f}" if found.peers else "",
        "; ".join(beside),
        verdict,
        "; ".join(f"{key} {value}" for key, value in case.notes.items()),
    )
    return table_row(cells)


def remark(name: str, text: str) -> str:
    """The row of a case without figures."""
    return table_row((name, text, *[""] * 10))


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
