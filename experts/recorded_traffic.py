"""What a captured graph sends to other ranks: counted with every replay, when the host calls no collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Marks(Protocol):
    """See `experts.device_waits.DeviceWaits`."""

    def mark(self) -> None: ...

    def without_marks(self) -> AbstractContextManager[None]: ...


class CountedCollectives(Protocol):
    """See `experts.collectives.Collectives`."""

    num_entered: int
    bytes_to: list[int]

    @property
    def waits(self) -> Marks: ...


class CountedRows(Protocol):
    """See `experts.exchange.Exchange`."""

    rows_to: list[int]


class RecordedTraffic:
    """Of one graph. A replay counts as all of its collectives, and is marked in the device's queue as one."""

    def __init__(self, collectives: CountedCollectives, exchange: CountedRows) -> None:
        self._collectives, self._exchange = collectives, exchange
        self._num_entered = 0
        self._bytes_to: Sequence[int] = ()
        self._rows_to: Sequence[int] = ()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What is called inside is captured: nothing is sent yet, and nothing can be waited for."""
        collectives, exchange = self._collectives, self._exchange
        before = collectives.num_entered, collectives.bytes_to, exchange.rows_to
        zeros = [0] * len(collectives.bytes_to)
        collectives.num_entered, collectives.bytes_to, exchange.rows_to = 0, [*zeros], [*zeros]
        try:
            with collectives.waits.without_marks():
                yield
            self._num_entered, self._bytes_to = collectives.num_entered, collectives.bytes_to
            self._rows_to = exchange.rows_to
        finally:
            collectives.num_entered, collectives.bytes_to, exchange.rows_to = before

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """The graph is launched inside. Raises CollectiveError if one of some replays before does not end in time."""
        collectives, exchange = self._collectives, self._exchange
        collectives.num_entered += self._num_entered
        collectives.bytes_to = [sum(pair) for pair in zip(collectives.bytes_to, self._bytes_to, strict=True)]
        exchange.rows_to = [sum(pair) for pair in zip(exchange.rows_to, self._rows_to, strict=True)]
        yield
        collectives.waits.mark()
