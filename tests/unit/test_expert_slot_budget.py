"""Slots of a fast tier over layers: even, bounded by what a layer holds, and enough for a token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.memory.residency import least_slots, share_slots


def test_slots_are_shared_evenly_and_the_first_layers_get_what_is_left() -> None:
    assert share_slots(11, [8, 8, 8], 2) == (4, 4, 3)


def test_a_rank_needs_no_more_slots_than_it_holds_experts() -> None:
    assert least_slots([4, 2], 3) == [3, 2]
    assert share_slots(5, [4, 2], 3) == (3, 2)
    with pytest.raises(ValueError, match="at least 5"):
        share_slots(4, [4, 2], 3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 60))
def test_every_slot_is_given_out_and_none_in_vain(held: list[int], top_k: int, count: int) -> None:
    least = least_slots(held, top_k)
    if count < sum(least):
        return
    slots = share_slots(count, held, top_k)
    if slots is None:
        assert count >= sum(held)
        return
    assert sum(slots) == count < sum(held)
    assert all(low <= given <= most for low, given, most in zip(least, slots, held, strict=True))
    poorest = min((given for given, most in zip(slots, held, strict=True) if given < most), default=0)
    assert all(given <= max(poorest + 1, low) for given, low in zip(slots, least, strict=True))
