"""A link over which experts arrive one chunk at a time, in simulated time. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from experts.memory.residency_control import ResidencyControl
from experts.memory.transfers import Transfer


@dataclass(frozen=True, slots=True)
class LinkModel:
    """bytes_per_second: bandwidth. latency: seconds before the first byte whenever a transfer begins or goes on.

    chunk_bytes: what is copied before the copier looks whether something more urgent has come.
    """

    bytes_per_second: float
    latency: float = 0.0
    chunk_bytes: int = 2**20

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0 or self.latency < 0 or self.chunk_bytes < 1:
            raise ValueError("a link needs a positive bandwidth and chunk size and no negative latency")

    def load_seconds(self, num_bytes: int) -> float:
        """An undisturbed load."""
        return self.latency + num_bytes / self.bytes_per_second


class SimulatedCopier:
    """Does what the copying thread of the runtime does, by a clock of its own, which only moves forward."""

    __slots__ = ("_chunk_end", "_control", "_expert_bytes", "_link", "_transfer", "_whole_chunk", "now")

    def __init__(self, control: ResidencyControl, link: LinkModel, expert_bytes: int) -> None:
        self._control = control
        self._link = link
        self._whole_chunk = link.chunk_bytes / link.bytes_per_second
        self._expert_bytes = expert_bytes
        self._transfer: Transfer | None = None
        self._chunk_end = 0.0
        self.now = 0.0

    def run_until(self, time: float) -> None:
        """Copies until `time`; a chunk that is not over by then goes on afterwards."""
        while self._start() and self._chunk_end <= time:
            self._end_chunks(time)
        self.now = max(self.now, time)

    def run_until_true(self, condition: Callable[[], bool]) -> None:
        """Copies until something has arrived. RuntimeError if nothing is left to copy before that."""
        while not condition():
            if not self._start():
                raise RuntimeError("the computation waits for an expert that nobody loads")
            self._end_chunks(inf)

    def _start(self) -> bool:
        """Whether something is being copied from now on."""
        if self._transfer is None:
            self._transfer = self._control.next_transfer()
            if self._transfer is not None:
                self._chunk_end = (
                    self.now + self._link.latency + self._chunk_seconds(self._expert_bytes - self._transfer.num_moved)
                )
        return self._transfer is not None

    def _end_chunks(self, time: float) -> None:
        """The chunk that ends by `time`, and those after it that do, as long as they are of the same transfer.

        Whether it has to stop is asked once: until it ends nobody tells the control anything else.
        """
        transfer = self._transfer
        assert transfer is not None
        must_stop = self._control.must_stop(transfer)
        num_left = self._expert_bytes - transfer.num_moved
        num_before = num_left
        now, chunk_end = self.now, self._chunk_end
        while chunk_end <= time:
            now = max(now, chunk_end)
            num_left = max(num_left - self._link.chunk_bytes, 0)
            if must_stop or not num_left:
                break
            chunk_end = now + self._chunk_seconds(num_left)
        self.now, self._chunk_end = now, chunk_end
        self._control.moved(transfer, num_before - num_left)
        if not num_left:
            self._control.finish(transfer)
            self._transfer = None
        elif must_stop:
            self._control.stop(transfer)
            self._transfer = None

    def _chunk_seconds(self, num_left: int) -> float:
        return self._whole_chunk if num_left >= self._link.chunk_bytes else num_left / self._link.bytes_per_second
