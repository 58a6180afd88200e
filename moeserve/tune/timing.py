"""Times of kernels on a GPU: medians of graph replays over cold data."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

AnyCall = Callable[[], object]

_MIN_CALLS = 10
# How long a comparison lasts, and how many replays each side has at least and at most.
_SECONDS = 0.2
_MIN_REPLAYS, _MAX_REPLAYS = 4, 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: median over replays, and (largest - smallest) / median. in_graph: whether a graph held
    the calls; else the time of launching them is part of it."""

    microseconds: float
    spread: float
    in_graph: bool = True


def time_calls(*groups: Sequence[AnyCall], seconds: float = _SECONDS) -> list[Timing]:
    """One timing per group of calls, the groups replayed in turn: A B B A A B ...

    A group's calls run one after the other, at least ten, in a graph where it can hold them. Compiles first.
    seconds: about how long to measure.
    """
    replays = [_Replay(calls) for calls in groups]
    # Also what lets the clock rise.
    estimate = sum(replay.elapsed() for replay in replays) / 1e6
    count = min(_MAX_REPLAYS, max(_MIN_REPLAYS, round(seconds / max(estimate, 1e-6))))
    times: list[list[float]] = [[] for _ in replays]
    for turn in range(count):
        order = range(len(replays)) if turn % 2 == 0 else reversed(range(len(replays)))
        for number in order:
            times[number].append(replays[number].elapsed() / replays[number].num_calls)
    return [_timing(own, replay.in_graph) for own, replay in zip(times, replays, strict=True)]


def _timing(times: Sequence[float], in_graph: bool) -> Timing:
    median = statistics.median(times)
    return Timing(median, (max(times) - min(times)) / median, in_graph)


class _Replay:
    """Calls that were run, so that all is compiled, and captured if a graph can hold them."""

    def __init__(self, calls: Sequence[AnyCall]) -> None:
        rounds = -(-_MIN_CALLS // len(calls))
        self.num_calls = rounds * len(calls)

        def run() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
            waits = _waits_for_device(calls)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        captured = None if waits else _captured(run)
        self.in_graph = captured is not None
        self._run = captured or run

    def elapsed(self) -> float:
        """Microseconds of all calls, by events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


def _waits_for_device(calls: Sequence[AnyCall]) -> bool:
    """Whether torch says that one of the calls waits, as no call in a graph may. A capture that fails is to be avoided:
    it leaves torch's random generator and current stream as they were within it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _captured(run: Callable[[], None]) -> Callable[[], None] | None:
    """A graph of the run; None for one that cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads, such as those of a compiler, may do as they like meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    except RuntimeError:
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return None
    return graph.replay
