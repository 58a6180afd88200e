"""What requests hold of an HTTP process: bytes and places, a share of each key's, and a bound for all."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError
from moeserve.frontend.held import HeldBytes, OpenRequests


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HELD_BYTES_PER_KEY", 100)
    monkeypatch.setattr(limits, "MAX_HELD_BYTES", 150)


def test_bytes_are_bounded_by_key_and_in_all() -> None:
    held = HeldBytes()
    with held.hold(b"a") as first, held.hold(b"a") as second, held.hold(b"b") as other, held.hold(b"b") as late:
        first.grow(60)
        with pytest.raises(ApiError) as refused:
            second.grow(50)
        assert (refused.value.status, refused.value.code) == (503, "too_much_text")
        second.grow(40)
        other.grow(50)
        with pytest.raises(ApiError):
            late.grow(1)


def test_a_key_always_has_one_request_of_any_size() -> None:
    held = HeldBytes()
    with held.hold(b"a") as first, held.hold(b"b") as other:
        first.grow(90)
        first.grow(500)
        other.grow(500)
        with held.hold(b"a") as second, pytest.raises(ApiError):
            second.grow(1)


def test_bytes_are_given_back_when_fewer_are_needed_and_at_the_end() -> None:
    held = HeldBytes()
    with held.hold(b"a") as first, held.hold(b"a") as second:
        first.grow(80)
        first.set(20)
        second.grow(80)
        with pytest.raises(ApiError):
            first.set(30)
    with held.hold(b"a") as first, held.hold(b"a") as second:
        first.grow(1)
        second.grow(99)


def test_a_key_that_opens_all_it_may_leaves_other_keys_their_part() -> None:
    rejections: Counter[str] = Counter()
    places = OpenRequests(16, {b"a": 0.25, b"b": 0.75}.__getitem__, rejections)
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(places.enter(b"a"))
        with pytest.raises(ApiError) as refused:
            stack.enter_context(places.enter(b"a"))
        assert (refused.value.status, refused.value.code) == (429, "key_connections_full")
        for _ in range(12):
            stack.enter_context(places.enter(b"b"))
        with pytest.raises(ApiError):
            stack.enter_context(places.enter(b"b"))
    assert rejections == {"key_connections_full": 2}
    with places.enter(b"a"):
        pass


def test_without_keys_all_places_are_everybodys() -> None:
    rejections: Counter[str] = Counter()
    places = OpenRequests(16, lambda _: 1.0, rejections)
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(places.enter(b""))
        with pytest.raises(ApiError) as refused:
            stack.enter_context(places.enter(b""))
    assert (refused.value.status, refused.value.code) == (503, "too_many_connections")
    assert rejections == {"too_many_connections": 1}
