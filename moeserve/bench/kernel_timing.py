"""Times of kernels on a GPU: medians of graph replays over cold data, and the ceilings they are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moeserve.bench.kernel_case import Call

_MIN_CALLS = 10
_REPLAYS = 20
_CEILING_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: median over replays, and (largest - smallest) / median."""

    microseconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second of a copy (read and written) and of a sum (read), and bf16 FLOP/s of a large product."""

    copy: float
    read: float
    flops: float


def time_calls(calls: Sequence[Call]) -> Timing:
    """Runs the calls in turn, at least ten, in a graph where it can hold them. Compiles first."""
    rounds = -(-_MIN_CALLS // len(calls))

    def run() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    replay = _captured(run) or run
    replay()
    times = [_elapsed(replay) / (rounds * len(calls)) for _ in range(_REPLAYS)]
    median = statistics.median(times)
    return Timing(median, (max(times) - min(times)) / median)


def measure_ceilings(device: torch.device) -> Ceilings:
    source = torch.randn(_CEILING_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * _CEILING_BYTES / _seconds(lambda: target.copy_(source))
    read = _CEILING_BYTES / _seconds(lambda: source.sum())
    a, b = (torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2))
    return Ceilings(copy, read, 2 * 8192**3 / _seconds(lambda: a @ b))


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    return time_calls([call]).microseconds / 1e6


def _captured(run: Callable[[], None]) -> Callable[[], None] | None:
    """A graph of the run; None for one that waits for the device, as some peers do."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def _elapsed(run: Callable[[], None]) -> float:
    """Microseconds, by events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


class Deadline:
    """A time limit for a whole run, from its making on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._end = clock() + seconds

    def passed(self) -> bool:
        return self._clock() >= self._end
