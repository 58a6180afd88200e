"""Which grammar is compiled next, and which compiled ones are kept. Pure: no threads, no clock, no llguidance."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    job: T
    num_bytes: int


class FairJobs(Generic[T]):
    """Jobs of tenants. The tenant whose jobs have taken least time so far is next, and its jobs go by age.

    The result of a job may stay in memory. All results together take at most `max_bytes`: until some are released, the
    jobs of a tenant that holds any wait. A tenant that holds none gets one beyond the bound, so that no tenant waits
    for another one's requests to end.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lines: dict[str, deque[_Waiting[T]]] = {}
        self._seconds: dict[str, float] = {}
        self._floor = 0.0
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    @property
    def num_held_bytes(self) -> int:
        return self._held.total()

    def put(self, tenant: str, job: T, num_bytes: int = 0) -> None:
        """Add a job. num_bytes: of its result. A tenant without jobs begins level: idleness earns nothing."""
        if tenant not in self._lines:
            self._seconds[tenant] = max(self._seconds.get(tenant, 0.0), self._floor)
        self._lines.setdefault(tenant, deque()).append(_Waiting(job, num_bytes))

    def pop(self) -> T | None:
        """Remove and return the next job, whose result counts as held from now on; None if none may begin."""
        for tenant in sorted(self._lines, key=self._seconds.__getitem__):
            line = self._lines[tenant]
            num_bytes = line[0].num_bytes
            if num_bytes and self._held[tenant] and self.num_held_bytes + num_bytes > self._max_bytes:
                continue
            self._floor = max(self._floor, self._seconds[tenant])
            job = line.popleft().job
            if not line:
                del self._lines[tenant]
            self.hold(tenant, num_bytes)
            return job
        return None

    def remove(self, tenant: str, job: T) -> bool:
        """Remove a job that waits. Return False if it does not."""
        line = self._lines.get(tenant, deque())
        for waiting in line:
            if waiting.job is job:
                line.remove(waiting)
                if not line:
                    del self._lines[tenant]
                return True
        return False

    def charge(self, tenant: str, seconds: float) -> None:
        """Count the time that a tenant's job took."""
        self._seconds[tenant] = self._seconds.get(tenant, self._floor) + seconds

    def hold(self, tenant: str, num_bytes: int) -> None:
        """Count a result that a tenant uses, beyond the bound too: it is in memory already."""
        if num_bytes:
            self._held[tenant] += num_bytes

    def release(self, tenant: str, num_bytes: int) -> None:
        """Count out a result that was held."""
        self._held[tenant] -= num_bytes
        if self._held[tenant] <= 0:
            del self._held[tenant]


@dataclass(eq=False, slots=True)
class Kept(Generic[T]):
    """A compiled grammar. num_held: the bytes that count as held by `tenant` while it has users. num_grown: the bytes
    that its use has added since."""

    text: str
    value: T
    tenant: str
    num_held: int
    num_grown: int = 0
    num_users: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_held + self.num_grown


class KeptGrammars(Generic[T]):
    """Compiled grammars by their text, within `max_bytes`: the one that was least recently used goes first.

    A grammar with users is never dropped, so grammars in use may take more.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of_text: OrderedDict[str, Kept[T]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._of_text)

    def __contains__(self, text: str) -> bool:
        return text in self._of_text

    def use(self, text: str) -> Kept[T] | None:
        """Return a grammar, which has one more user and is the most recently used, or None."""
        kept = self._of_text.get(text)
        if kept is not None:
            self._of_text.move_to_end(text)
            kept.num_users += 1
        return kept

    def put(self, kept: Kept[T]) -> None:
        """Keep a grammar in place of any other of its text."""
        self.discard(kept.text)
        self._of_text[kept.text] = kept
        self.num_bytes += kept.num_bytes
        self._shrink()

    def discard(self, text: str) -> None:
        """Forget a text. Users of its grammar keep it."""
        kept = self._of_text.pop(text, None)
        if kept is not None:
            self.num_bytes -= kept.num_bytes

    def grow(self, kept: Kept[T], num_bytes: int, limit: int) -> None:
        """Count bytes that the use of a grammar has added, at most `limit` altogether."""
        added = min(num_bytes, limit - kept.num_grown)
        kept.num_grown += added
        if self._of_text.get(kept.text) is kept:
            self.num_bytes += added
            self._shrink()

    def release(self, kept: Kept[T]) -> None:
        kept.num_users -= 1
        self._shrink()

    def _shrink(self) -> None:
        if self.num_bytes <= self._max_bytes:
            return
        for text in [text for text, kept in self._of_text.items() if not kept.num_users]:
            self.discard(text)
            if self.num_bytes <= self._max_bytes:
                return
