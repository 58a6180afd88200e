"""The bytes that an HTTP process holds for requests: a share of each key, and a bound for all."""

from __future__ import annotations

import pytest

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError
from moeserve.frontend.held import HeldBytes


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
