"""The number of draft tokens that a step should verify: their likely gain over the cost of their rows.

A draft is worth its row only if it is likely to be right. The likelihood is learnt by the draft's source, by the number
of tokens before it that matched, and by request. A guess that no step verifies teaches as much as a verified one, since
the next token is known either way. So nothing is computed only to find out.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

from moeserve.scheduling.draft_sources import FORCED, LAYOUT, Guess

# Guesses are counted by the number of tokens before them that matched: up to 1, 2, ...
_MATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
_NUM_CLASSES = len(_MATCHES) + 1
# By the number of tokens that matched, the class; longer matches are of the last one.
_CLASSES = tuple(bisect_left(_MATCHES, number) for number in range(_MATCHES[-1] + 2))
_CLASS_OF, _LAST = np.array(_CLASSES), len(_CLASSES) - 1
# The expectation before any guess was seen weighs as much as this number of guesses.
_FIRST_WEIGHT = 4.0
# The numbers of latest guesses that count: of the service, and of a request.
_REMEMBERED, _REMEMBERED_OF_REQUEST = 512.0, 24.0
# A request's own guesses weigh as much as the service's once it has made this number.
_WEIGHT_OF_SERVICE = 6.0
# A row is not worth its cost unless its token is at least this likely.
LEAST_LIKELY = 0.05
# Drafts are verified if they are expected to gain this factor; the cost of a step is not known more exactly.
_LEAST_GAIN = 1.03

# [requests, places]: how likely each draft and all before it are right, or 0 where there is no draft; rows fall.
Chances = NDArray[np.float64]
_Floats = NDArray[np.float64]


def _blend(right: _Floats, number: _Floats, expected: _Floats, weight: float) -> _Floats:
    """Return how likely guesses are right. The expectation weighs as much as `weight` guesses."""
    return (right + expected * weight) / (number + weight)


class Rates:
    """How often guesses of each kind were right; older ones fade."""

    __slots__ = ("_remembered", "counts")

    def __init__(self, num_kinds: int, remembered: float) -> None:
        """remembered: the number of guesses that count."""
        self._remembered = remembered
        # By kind, the number of right guesses and the number of guesses.
        self.counts = array("d", bytes(16 * num_kinds))

    def count(self, kind: int, *, is_right: bool) -> None:
        """Learn whether a guess was right."""
        counts, place = self.counts, 2 * kind
        number = counts[place + 1]
        if number <= self._remembered - 1:
            counts[place] += is_right
            counts[place + 1] = number + 1
        else:
            fade = (self._remembered - 1) / number
            counts[place] = counts[place] * fade + is_right
            counts[place + 1] = number * fade + 1


class Acceptance:
    """How likely guesses are right: rates of the whole service, and of each request, by source and match."""

    def __init__(self, first_rates: Mapping[str, float]) -> None:
        """first_rates: by source, the expected share of right guesses before any was seen."""
        self._kinds = {source: number * _NUM_CLASSES for number, source in enumerate(first_rates)}
        # By kind.
        self._first_rates = [rate for rate in first_rates.values() for _ in range(_NUM_CLASSES)]
        self._of_all = Rates(len(self._first_rates), _REMEMBERED)

    def of_request(self) -> Rates:
        """Return the empty rates of a new request."""
        return Rates(len(self._first_rates), _REMEMBERED_OF_REQUEST)

    def count(self, own: Rates, source: str, num_matched: int, num_right: int, num_told: int) -> None:
        """Learn about the first `num_told` tokens of a request's guess: the first `num_right` of them were right.

        own: the rates of the request. num_matched: the number of equal tokens before the guess.
        """
        first, of_all = self._kinds[source], self._of_all
        for number in range(num_told):
            kind, is_right = first + _CLASSES[min(num_matched + number, _LAST)], number < num_right
            own.count(kind, is_right=is_right)
            of_all.count(kind, is_right=is_right)

    def chances(
        self,
        own: Sequence[Rates],
        guesses: Sequence[Guess],
        num_guessed: Sequence[int],
        num_forced: Sequence[int],
        num_drafts: Sequence[int],
    ) -> Chances:
        """Return how likely the drafts of each request are right. Less than LEAST_LIKELY counts as 0.

        own: the rates of the requests. num_drafts: of the request; the first `num_guessed` are of its guess, the next
        `num_forced` are forced by its grammar, and all others are of its layout.
        """
        kinds_of, first_rates, size = self._kinds, np.array(self._first_rates), 2 * len(self._first_rates)
        lengths, guessed = np.array(num_drafts)[:, None], np.array(num_guessed)[:, None]
        places = np.arange(max(num_drafts))
        matched = np.array([guess.num_matched for guess in guesses])[:, None]
        firsts = np.array([kinds_of[guess.source] for guess in guesses])[:, None]
        kinds = firsts + _CLASS_OF[np.minimum(places + matched, _LAST)]
        if (guessed < lengths).any():
            end = guessed + np.array(num_forced)[:, None]
            forced = kinds_of[FORCED] + _CLASS_OF[np.clip(places - guessed, 0, _LAST)]
            laid = kinds_of[LAYOUT] + _CLASS_OF[np.clip(places - end, 0, _LAST)]
            kinds = np.where(places < guessed, kinds, np.where(places < end, forced, laid))
        of_all = np.frombuffer(self._of_all.counts)
        expected = _blend(of_all[::2], of_all[1::2], first_rates, _FIRST_WEIGHT)[kinds]
        counts = np.frombuffer(b"".join([rates.counts for rates in own]))
        right = np.arange(0, size * len(own), size)[:, None] + 2 * kinds
        rates = _blend(counts[right], counts[right + 1], expected, _WEIGHT_OF_SERVICE)
        chances: Chances = np.multiply.accumulate(rates, axis=1)
        chances[(places >= lengths) | (chances < LEAST_LIKELY)] = 0.0
        return chances


def best_lengths(
    chances: Chances,
    num_rows: int,
    most: int,
    seconds: Callable[[int], float],
    lost: NDArray[np.float64] | None = None,
    num_again: int = 0,
) -> list[int]:
    """Return how many drafts of each request a step should verify, to make the most tokens per second.

    num_rows: the rows of the step without drafts; each gives a token, but for `num_again` rows that are computed once
    more. most: the number of drafts in all. seconds: of a step with a number of rows, linear between powers of two, as
    that of a `CostModel`; 0 if that is not known, and then there are no drafts. lost, of the shape of `chances`: the
    rows that a later step is likely to compute once more because of each draft; None for none.
    """
    base_s, is_draft = seconds(num_rows), chances > 0
    drafts = chances[is_draft]
    if base_s <= 0 or not len(drafts) or most <= 0:
        return [0] * len(chances)
    if lost is None:
        drafts = np.sort(drafts)[::-1][:most]
        rows = np.arange(num_rows, num_rows + len(drafts) + 1, dtype=float)
    else:
        more = lost[is_draft]
        likeliest = np.lexsort((more, drafts))[::-1][:most]
        drafts = drafts[likeliest]
        rows = np.cumsum(np.concatenate(([float(num_rows)], 1 + more[likeliest])))
    tokens = np.cumsum(np.concatenate(([float(num_rows - num_again)], drafts)))

    def pace(number: int) -> float:
        exact, gained = float(rows[number]), float(tokens[number])
        whole = int(exact)
        step_s, part = seconds(whole), exact - whole
        return gained / max(step_s + part * (seconds(whole + 1) - step_s) if part else step_s, 1e-9)

    best, highest = 0, _LEAST_GAIN * float(tokens[0]) / base_s
    for first, last in pairwise(_bends(num_rows, len(drafts))):
        # With linear seconds and concave tokens the pace rises up to one place and falls from there on.
        number = first + bisect_left(range(first, last), True, key=lambda n: pace(n + 1) <= pace(n))
        if pace(number) > highest:
            best, highest = number, pace(number)
    return _shares(chances, float(drafts[best - 1]), best) if best else [0] * len(chances)


def _bends(num_rows: int, most: int) -> list[int]:
    """Return 0, `most`, and the numbers of drafts between them at which a step's rows are a power of two."""
    bends = ((1 << exponent) - num_rows for exponent in count(num_rows.bit_length()))
    return [0, *takewhile(lambda drafts: drafts < most, bends), most]


def _shares(chances: Chances, least: float, most: int) -> list[int]:
    """Return how many of each request's drafts are among the `most` likeliest. least: the chance of the last of these.

    Among equal ones the drafts of the first requests count.
    """
    lengths = (chances > least).sum(axis=1)
    equal = (chances == least).sum(axis=1)
    left = most - lengths.sum() - (np.cumsum(equal) - equal)
    shares: list[int] = (lengths + np.clip(left, 0, equal)).tolist()
    return shares


def may_pay(num_rows: int, most: int, seconds: Callable[[int], float]) -> bool:
    """Return whether a step could make more tokens per second with up to `most` drafts, were all of them right.

    num_rows: at least one. seconds: as for `best_lengths`. So the best number of rows is a power of two or the last.
    """
    base_s = seconds(num_rows)
    if base_s <= 0:
        return False
    totals = [num_rows + drafts for drafts in _bends(num_rows, most)[1:]]
    return any(rows / max(seconds(rows), 1e-9) > _LEAST_GAIN * num_rows / base_s for rows in totals)
