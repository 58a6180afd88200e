"""Sums over the prompts of waiting requests, kept while requests come and go. Pure."""

from __future__ import annotations

from collections import defaultdict

# The number of leaves of the tree. Longer prompts count as one token less than this.
_SIZE = 2**24


class TokenSums:
    """The number of some values, their sum, and the sum of what each has below any bound. No value is negative.

    A Fenwick tree (Fenwick, "A New Data Structure for Cumulative Frequency Tables", 1994) over the values that there
    are: `add` and `bounded` take a few dozen operations however many values there are.
    """

    __slots__ = ("_nodes", "count", "total")

    def __init__(self) -> None:
        self.count = self.total = 0
        # By node, the number and the sum of its values.
        self._nodes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def add(self, value: int, times: int = 1) -> None:
        """Add a value, or take it away with `times` -1."""
        value = min(value, _SIZE - 1)
        self.count += times
        self.total += times * value
        nodes, amount, place = self._nodes, times * value, value + 1
        while place <= _SIZE:
            node = nodes[place]
            node[0] += times
            node[1] += amount
            if not node[0] and times < 0:
                del nodes[place]
            place += place & -place

    def bounded(self, bound: int) -> int:
        """Return the sum of min(value, bound) over all values."""
        count = total = 0
        place = min(bound, _SIZE - 1) + 1
        while place:
            node = self._nodes.get(place)
            if node is not None:
                count += node[0]
                total += node[1]
            place &= place - 1
        return total + (self.count - count) * bound
