"""The messages that one turn of the engine handles: a bounded number, in a bounded time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from moeserve.wire import Generate

_TURN_SECONDS = 0.01  # a turn handles no further message after this time, but at least one new request
_MOST_MESSAGES = 1000  # messages that a turn reads
_MOST_GENERATES = 64  # new requests that a turn handles

Received = tuple[bytes, Any]


class Inbox:
    """New requests that were read and wait for a turn, in the order of their arrival.

    Other messages never wait here. So the cheap end of a request is not behind a crowd of new requests; each of these
    may cost a millisecond.
    """

    def __init__(self, receive: Callable[[], Received | None], clock: Callable[[], float] = time.monotonic) -> None:
        """receive: returns the next (sender, message) that has arrived, None without one."""
        self._receive = receive
        self._clock = clock
        self._waiting: OrderedDict[str, Received] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def turn(self) -> Iterator[Received]:
        """Yield the messages of one turn: all others that have arrived first, then new requests.

        The bounds include the time in which the caller handles the messages.
        """
        end = self._clock() + _TURN_SECONDS
        for _ in range(_MOST_MESSAGES):
            if (received := self._receive()) is None:
                break
            message = received[1]
            if isinstance(message, Generate) and message.request_id not in self._waiting:
                self._waiting[message.request_id] = received
            else:
                yield received
            if self._clock() >= end:
                break
        for _ in range(_MOST_GENERATES):
            if not self._waiting:
                return
            yield self._waiting.popitem(last=False)[1]
            if self._clock() >= end:
                return

    def withdraw(self, request_id: str) -> bool:
        """Forget a request that waits. Return False if none with this id does."""
        return self._waiting.pop(request_id, None) is not None
