"""How long something lasts, learnt also from cases whose end was not seen.

A client whose answer was whole after 3 s would have waited for at least 3 s; an answer whose client left after 10
tokens would have had at least 10. The share that lasts beyond a value follows from the cases that ended there among the
cases that might have ended there: the product-limit estimate (Kaplan and Meier, "Nonparametric Estimation from
Incomplete Observations", 1958). Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from math import inf, log, pow
from operator import mul

_NUM_BINS = 160
_RESCALED_AT = 1e6  # all counts are scaled down once the weight of a new one exceeds this
# The number of imagined cases that last beyond every value. So one case that ends does not stand for all, and values
# that no case reaches any more are doubted in time.
_DOUBT = 1.0


class Survival:
    """Counts cases by their values, in bins that grow by a constant factor."""

    def __init__(self, shortest: float, growth: float, num_remembered: int) -> None:
        """shortest, growth: of the bins. num_remembered: the number of cases after which a case counts for a third."""
        self._shortest = shortest
        self._growth = growth
        self._forgotten = 1 / num_remembered
        self._seen = [0.0] * _NUM_BINS
        self._ended = [0.0] * _NUM_BINS
        self._weight = 1.0
        self._most = 0
        self.any_ended = False
        self._shares: list[float] | None = None
        self._mean: float | None = None

    def count(self, value: float, *, has_ended: bool) -> None:
        """Learn from a case that was seen until `value`. has_ended: it lasted no longer."""
        place = self._place(value)
        self._seen[place] += self._weight
        if has_ended:
            self._ended[place] += self._weight
            self.any_ended = True
        self._weight /= 1 - self._forgotten
        if self._weight > _RESCALED_AT:
            self._seen = [count / self._weight for count in self._seen]
            self._ended = [count / self._weight for count in self._ended]
            self._weight = 1.0
        self._most = max(self._most, place)
        self._shares = self._mean = None

    def share(self, value: float) -> float:
        """Return the share of cases that last longer than a value."""
        return self._lasting()[self._place(value)]

    def longest(self, share: float) -> float:
        """Return the value up to which more than `share` of the cases last; inf if they last beyond every value."""
        place = bisect_left(self._lasting(), -share, key=lambda lasting: -lasting)
        return inf if place == _NUM_BINS else self._end_of(place - 1)

    def mean(self) -> float:
        """Return the mean duration of a case, cut at the longest that was seen."""
        if self._mean is None:
            # A case counts as the middle of its bin.
            ends = [0.0, *(self._end_of(place - 0.5) for place in range(self._most + 1))]
            lengths = (end - begin for begin, end in pairwise(ends))
            self._mean = sum(map(mul, (1.0, *self._lasting()), lengths))
        return self._mean

    def _lasting(self) -> list[float]:
        """Return the share of cases that last beyond each bin."""
        if self._shares is None:
            at_risk = list(accumulate(reversed(self._seen)))[::-1]
            doubt = _DOUBT * self._weight
            staying = (1 - ended / (risked + doubt) for ended, risked in zip(self._ended, at_risk, strict=True))
            self._shares = list(accumulate(staying, mul))
        return self._shares

    def _place(self, value: float) -> int:
        if value <= self._shortest:
            return 0
        return min(_NUM_BINS - 1, 1 + int(log(value / self._shortest) / log(self._growth)))

    def _end_of(self, place: float) -> float:
        return self._shortest * pow(self._growth, place)
