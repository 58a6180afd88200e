"""Time calls on a GPU over cold data, and compare their results with a reference.

A time is the median of graph replays. The check of a kernel finds elements that it leaves unwritten, writes beside its
output or computes right by chance.
"""

from __future__ import annotations

import math
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

AnyCall = Callable[[], object]

_MIN_CALLS = 10
# How long a comparison lasts, and how many replays each side has at least and at most.
_SECONDS = 0.2
_MIN_REPLAYS, _MAX_REPLAYS = 4, 20
# Several times the L2 cache of today's GPUs.
COLD_BYTES = 512 * 2**20
_MAX_SETS = 256
# Runs once on the current stream and gives the result.
Call = Callable[[], Tensor]
_MARGIN = 2
_CANARY = 77.0
# The relative error (L2) of 16-bit kernels is to be below it.
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call: median over replays, and (largest - smallest) / median. in_graph: whether a graph held the
    calls; otherwise launching them is part of the time."""

    microseconds: float
    spread: float
    in_graph: bool = True


def time_calls(*groups: Sequence[AnyCall], seconds: float = _SECONDS) -> list[Timing]:
    """Return one timing per group of calls, the groups replayed in turn: A B B A A B ...

    A group's calls run one after the other, at least ten, in a graph if it can hold them. Compiles first. seconds:
    about how long to measure.
    """
    replays = [_Replay(calls) for calls in groups]
    # This also lets the clock rise.
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
    """Calls that ran once, so that they are compiled, and were captured if a graph can hold them."""

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
        """Return the microseconds of all calls, by events."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        self._run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3


def _waits_for_device(calls: Sequence[AnyCall]) -> bool:
    """Return whether one of the calls synchronises with the device, as no call in a graph may.

    A failed capture is worth avoiding: it leaves torch's random generator and current stream as they were within it.
    """
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
    """Return the replay of a graph of the run; None if it cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        # Other threads, a compiler's for example, may do as they like meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    except RuntimeError:
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return None
    return graph.replay


def cold_sets(num_bytes: int, at_most: int = _MAX_SETS) -> int:
    """Return how many sets of data of this size keep the cache cold when calls take them in turn, up to `at_most`."""
    return max(1, min(at_most, -(-COLD_BYTES // num_bytes)))


class WrongResultError(Exception):
    """A kernel is wrong in a way that no comparison of numbers shows."""


def run_guarded(run: Callable[[Tensor], object], like: Tensor) -> Tensor:
    """Run twice into outputs of `like`'s shape and dtype, full of NaN and between rows that nobody may write.

    Return the result. Raise WrongResultError if those rows change or the two results differ in a bit, as in a race.
    NaN that is left in the result is left to the comparison.
    """
    results = []
    for _ in range(2):
        rows = like.shape[0]
        whole = torch.full((rows + 2 * _MARGIN, *like.shape[1:]), _CANARY, dtype=like.dtype, device=like.device)
        out = whole[_MARGIN : _MARGIN + rows]
        out.fill_(math.nan)
        run(out)
        if not bool((whole[:_MARGIN] == _CANARY).all() & (whole[_MARGIN + rows :] == _CANARY).all()):
            raise WrongResultError("writes beside its output")
        results.append(out)
    if not torch.equal(results[0].nan_to_num(), results[1].nan_to_num()):
        raise WrongResultError("two runs differ")
    return results[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the relative L2 error; NaN if anything found is NaN."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


@dataclass(frozen=True, slots=True)
class Check:
    """`error` is relative (L2); NaN if something was not written; 1 if bits or tokens differ that must not."""

    name: str
    error: float

    @property
    def passed(self) -> bool:
        return self.error < TOLERANCE


def checked(name: str, error: Callable[[], float]) -> Check:
    """Return the check of an error; if computing it fails, a check that did not pass, with the reason in its name.

    A kernel that does not run leaves the others to be checked.
    """
    try:
        return Check(name, error())
    except WrongResultError as wrong:
        return Check(f"{name} ({wrong})", 1.0)
    except Exception as failure:
        traceback.print_exc(file=sys.stderr)
        return Check(f"{name} ({type(failure).__name__}: {failure})".replace("\n", " ")[:200], math.nan)


def same_bits(found: Tensor, expected: Tensor) -> float:
    """Return 0 if they have the same bits, else 1."""
    return float(not torch.equal(found, expected))
