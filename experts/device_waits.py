"""Waiting for a GPU as long as ranks may be apart and no longer: what the device waits for may never come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from experts.errors import CollectiveError

# A rank that is missing must be noticed before the device's queue of about a thousand launches is full, which would
# block the host for good; a mark stands for up to twenty.
_MARKS_AHEAD = 32
_POLL_SECONDS = 20e-6


class DeviceWaits:
    """All of it does nothing for a CPU, whose collectives are over when they return.

    seconds: how long a wait may take, which may change.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.seconds = seconds
        self._on_gpu = self._marking = device.type == "cuda"
        self._marks: deque[torch.cuda.Event] = deque()

    def mark(self) -> None:
        """Marks a place in the device's queue, and waits for the place of some marks before. Raises CollectiveError."""
        if not self._marking:
            return
        event = torch.cuda.Event()
        event.record()
        self._marks.append(event)
        if len(self._marks) > _MARKS_AHEAD:
            self.wait_for(self._marks.popleft())

    @contextmanager
    def without_marks(self) -> Iterator[None]:
        """While a graph is captured: what is queued then does not run, so no mark behind it is ever reached."""
        before, self._marking = self._marking, False
        try:
            yield
        finally:
            self._marking = before

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Raises CollectiveError if the device does not get there in time."""
        deadline = time.monotonic() + self.seconds
        while not event.query():
            if time.monotonic() > deadline:
                raise CollectiveError(f"the GPU waited for other ranks for {self.seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def wait_for_device(self) -> None:
        """Until everything queued is done. Raises CollectiveError."""
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
            self.wait_for(event)
