"""What prefixes need beside KV blocks: a prefix serves up to the last boundary that meets every need."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from radix_cache import PrefixCache
from radix_cache.borders import Borders
from radix_cache.misses import MissReason
from radix_cache.needs import Need
from radix_cache.nodes import Node
from radix_cache.tree import RadixTree
from radix_cache.window_blocks import Windows


class Met(Need):
    """Is met at some boundaries, and counts how often it is asked."""

    lacking = MissReason.NO_STATE

    def __init__(self, *boundaries: int) -> None:
        self._boundaries = boundaries
        self.num_asked = 0

    def last(self, node: Node | None, depth: int, limit: int, path: Sequence[int]) -> int:
        self.num_asked += 1
        return max((one for one in self._boundaries if one <= limit), default=0)


@pytest.mark.parametrize(
    ("needs", "limit", "expected"),
    [
        ([Met(1, 4, 9)], 8, 4),
        ([Met(2, 5, 7), Met(1, 5, 6)], 9, 5),
        ([Met(1, 5, 6), Met(2, 5, 7)], 9, 5),
        ([Met(3), Met(4)], 9, 0),
        ([Met(2, 8), Met(1, 2, 7), Met(2, 3)], 9, 2),
    ],
)
def test_a_prefix_serves_up_to_the_last_boundary_that_meets_every_need(
    needs: list[Met], limit: int, expected: int
) -> None:
    assert Borders(RadixTree(4), needs).last(None, limit, limit, []) == expected


def test_a_single_need_is_asked_once() -> None:
    need = Met(1, 4)
    assert Borders(RadixTree(4), [need]).last(None, 8, 8, []) == 4
    assert need.num_asked == 1


def test_a_cache_whose_prefixes_need_nothing_has_room_that_is_told_and_windows_without_an_end() -> None:
    plain = PrefixCache(8, 4)
    lease = plain.match(array("i", [1, 2, 3]))
    assert type(plain.windows) is Windows
    assert plain.counts.room(0) is not None
    assert (plain.windows.table(lease, 0), plain.windows.num_missing(lease, 5)) == (None, 0)
    for needing in (PrefixCache(8, 4, snapshot_rows=range(2)), PrefixCache(8, 4, num_window_blocks=5, window=5)):
        assert needing.counts.room(0) is None
