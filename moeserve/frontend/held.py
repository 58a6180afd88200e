"""Count by key the places of open requests in one HTTP process, and the bytes of their bodies and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, unavailable

_FREE_PLACES = 0.5  # the part of all places that is not set aside for the parts of keys


class OpenRequests:
    """Counts the requests that are answered, or are to be. Refusals are counted in `rejections`.

    Half of the places are for whoever comes. A key has its part of all places even where that half is taken.
    """

    def __init__(self, most: int, part_of: Callable[[bytes], float], rejections: Counter[str]) -> None:
        """most: places. part_of: the part of a key, by its digest."""
        self._most = most
        self._part_of = part_of
        self._rejections = rejections
        self._of_key: Counter[bytes] = Counter()
        self._total = 0

    @contextmanager
    def enter(self, key: bytes) -> Iterator[None]:
        """Have a place for the length of the block. Raise ApiError: 503, and 429 for one key of several."""
        part = self._part_of(key)
        if self._total >= self._most * _FREE_PLACES and self._of_key[key] >= self._most * part:
            raise self._refusal(part)
        self._of_key[key] += 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._of_key[key] -= 1
            if not self._of_key[key]:
                del self._of_key[key]

    def _refusal(self, part: float) -> ApiError:
        if part == 1.0:
            self._rejections["too_many_connections"] += 1
            return unavailable("Too many requests are open", "too_many_connections", close=True)
        self._rejections["key_connections_full"] += 1
        message = "This key has too many requests open at once"
        return ApiError(
            429, message, type="rate_limit_error", code="key_connections_full", retry_after_s=1.0, close=True
        )


class HeldBytes:
    """Counts the bytes of all requests of one process."""

    def __init__(self) -> None:
        self._of_key: Counter[bytes] = Counter()
        self._total = 0

    @contextmanager
    def hold(self, key: bytes) -> Iterator[Hold]:
        """Yield the count of one request of a key, which ends with the block. key: the digest of it."""
        hold = Hold(self, key)
        try:
            yield hold
        finally:
            hold.set(0)

    def may_add(self, key: bytes, num_bytes: int, own: int) -> bool:
        """Return whether a key may hold further bytes. own: bytes of the request that they are for.

        A key that holds nothing else always may.
        """
        of_key = self._of_key[key]
        return of_key == own or (
            of_key + num_bytes <= limits.MAX_HELD_BYTES_PER_KEY and self._total + num_bytes <= limits.MAX_HELD_BYTES
        )

    def add(self, key: bytes, num_bytes: int) -> None:
        """Count bytes, which may be negative."""
        self._total += num_bytes
        self._of_key[key] += num_bytes
        if not self._of_key[key]:
            del self._of_key[key]


class Hold:
    """The bytes of one request."""

    def __init__(self, held: HeldBytes, key: bytes) -> None:
        self._held = held
        self._key = key
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Hold further bytes. Raise as `set`."""
        self.set(self._num_bytes + num_bytes)

    def set(self, num_bytes: int) -> None:
        """Hold this number of bytes from now on. Raise ApiError (503) where the key, or all keys, would hold too
        many."""
        more = num_bytes - self._num_bytes
        if more > 0 and not self._held.may_add(self._key, more, self._num_bytes):
            raise unavailable("Requests that are under way hold too much text already", "too_much_text", 1.0)
        self._held.add(self._key, more)
        self._num_bytes = num_bytes


def hold_of(scope: Scope) -> Hold:
    """Return the count of a request."""
    hold: Hold = scope["state"]["hold"]
    return hold
