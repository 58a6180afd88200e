"""Which job a text process does next: a pure decision, fair by key."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from moeserve.frontend import limits

_T = TypeVar("_T")

_DEAR_SECONDS = 0.05  # processor time of a job beyond this is its key's debt
_MOST_DEBT_S = 0.1  # a key with more debt than this is slow
_FORGIVEN = 0.25  # seconds of debt that a key loses each second
_MAX_IDLE_FLOWS = 1024  # flows without jobs that are remembered


class QueueFull(Exception):
    """Too many bytes of the key, or of all keys, wait."""


@dataclass(slots=True)
class _Debt:
    seconds: float = 0.0
    at: float = 0.0

    def left(self, now: float) -> float:
        return max(0.0, self.seconds - _FORGIVEN * (now - self.at))


@dataclass(slots=True)
class _Flow(Generic[_T]):
    """The jobs of one key that are alike in size, in the order in which they came."""

    key: Hashable
    is_big: bool
    used: float  # seconds of processor time; the flow with the least is next
    jobs: deque[tuple[_T, int]] = field(default_factory=deque)
    num_running: int = 0


class TextQueue(Generic[_T]):
    """Jobs that wait for one of `num_places` processes.

    Small and big jobs of a key are flows of their own. The next job is that of the flow with the fewest running jobs,
    of several that which has used the least processor time. Big jobs, and all jobs of a key whose jobs have lately
    taken long, get one process less than there are: the last one is for jobs that end soon, of any key.
    """

    def __init__(self, num_places: int) -> None:
        self.num_waiting = 0
        self._num_places = num_places
        self._num_running = 0
        self._num_slow = 0  # running jobs that may take long
        self._num_bytes = 0
        self._bytes_of_key: dict[Hashable, int] = {}
        self._flows: dict[tuple[Hashable, bool], _Flow[_T]] = {}
        self._debts: dict[Hashable, _Debt] = {}
        self._least_used = 0.0  # by the flow that was served last

    def add(self, key: Hashable, num_bytes: int, job: _T) -> None:
        """Let a job wait. Raises QueueFull; a job is always taken where none of its key waits."""
        waits = self._bytes_of_key.get(key, 0)
        if waits and waits + num_bytes > limits.MAX_WAITING_BYTES_PER_KEY:
            raise QueueFull
        if waits and self._num_bytes + num_bytes > limits.MAX_WAITING_BYTES:
            raise QueueFull
        name = (key, num_bytes >= limits.BIG_BODY_BYTES)
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(key, name[1], self._least_used)
        if not flow.jobs and not flow.num_running:
            flow.used = max(flow.used, self._least_used)
        flow.jobs.append((job, num_bytes))
        self._count(key, num_bytes)
        self.num_waiting += 1

    def drop(self, key: Hashable, num_bytes: int, job: _T) -> bool:
        """Remove a job that waits; return whether it did."""
        flow = self._flows.get((key, num_bytes >= limits.BIG_BODY_BYTES))
        if flow is None or (job, num_bytes) not in flow.jobs:
            return False
        flow.jobs.remove((job, num_bytes))
        self._count(key, -num_bytes)
        self.num_waiting -= 1
        return True

    def next(self, now: float) -> Running[_T] | None:
        """Return the job that begins now, None if none may. now: seconds on a clock."""
        if self._num_running == self._num_places:
            return None
        may_be_slow = self._num_slow < max(1, self._num_places - 1)
        ready = [flow for flow in self._flows.values() if flow.jobs and (may_be_slow or not self._is_slow(flow, now))]
        if not ready:
            return None
        flow = min(ready, key=lambda flow: (flow.num_running, flow.used))
        job, num_bytes = flow.jobs.popleft()
        self._count(flow.key, -num_bytes)
        self.num_waiting -= 1
        self._least_used = max(self._least_used, flow.used)
        flow.num_running += 1
        self._num_running += 1
        is_slow = self._is_slow(flow, now)
        self._num_slow += is_slow
        return Running(job, flow, is_slow)

    def finish(self, running: Running[_T], cpu_s: float, now: float) -> None:
        """End a job. cpu_s: the processor time that it took."""
        flow = running.flow
        flow.used += cpu_s
        flow.num_running -= 1
        self._num_running -= 1
        self._num_slow -= running.is_slow
        debt = self._debts.get(flow.key, _Debt())
        owed = debt.left(now) + max(0.0, cpu_s - _DEAR_SECONDS)
        if owed:
            self._debts[flow.key] = _Debt(owed, now)
        else:
            self._debts.pop(flow.key, None)
        if len(self._flows) > _MAX_IDLE_FLOWS:
            self._forget_idle(now)

    def _is_slow(self, flow: _Flow[_T], now: float) -> bool:
        debt = self._debts.get(flow.key)
        return flow.is_big or (debt is not None and debt.left(now) > _MOST_DEBT_S)

    def _count(self, key: Hashable, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes_of_key[key] = self._bytes_of_key.get(key, 0) + num_bytes
        if not self._bytes_of_key[key]:
            del self._bytes_of_key[key]

    def _forget_idle(self, now: float) -> None:
        self._flows = {name: flow for name, flow in self._flows.items() if flow.jobs or flow.num_running}
        self._debts = {key: debt for key, debt in self._debts.items() if debt.left(now)}


@dataclass(frozen=True, slots=True)
class Running(Generic[_T]):
    """A job that runs. is_slow: it counts among the jobs that may take long."""

    job: _T
    flow: _Flow[_T]
    is_slow: bool
