"""The number of draft tokens that a step should verify: their likely gain over the cost of their rows.

A draft is worth its row only if it is likely to be right. The likelihood is learnt by the draft's source, by the number
of tokens before it that matched, and by request. A guess that no step verifies teaches as much as a verified one, since
the next token is known either way. So nothing is computed only to find out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heapify, heapreplace
from itertools import count, takewhile

# Guesses are counted by the number of tokens before them that matched: up to 1, 2, ...
_MATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
# The expected share of right guesses before any was seen, and the number of guesses that this expectation counts as.
_FIRST_RATE = 0.5
_FIRST_WEIGHT = 4.0
# The numbers of latest guesses that count, of the service and of a request.
_REMEMBERED, _REMEMBERED_OF_REQUEST = 512.0, 24.0
# A request's own guesses weigh as much as the service's once it has made this number.
_WEIGHT_OF_SERVICE = 6.0
# A row is not worth its cost unless its token is at least this likely.
LEAST_LIKELY = 0.05
# Drafts are verified if they are expected to gain this factor; the cost of a step is not known more exactly.
_LEAST_GAIN = 1.03


class Rates:
    """How often guesses were right, by their source and the number of tokens that matched before them."""

    __slots__ = ("_counts", "_remembered")

    def __init__(self, remembered: float = _REMEMBERED) -> None:
        """remembered: the number of guesses that count; older ones fade."""
        self._remembered = remembered
        self._counts: dict[tuple[str, int], tuple[float, float]] = {}

    def count(self, source: str, num_matched: int, *, is_right: bool) -> None:
        """Learn whether a guess was right."""
        key = source, _match_class(num_matched)
        right, number = self._counts.get(key, (0.0, 0.0))
        fade = min(1.0, (self._remembered - 1) / max(1.0, number))
        self._counts[key] = right * fade + is_right, number * fade + 1

    def rate(
        self, source: str, num_matched: int, expected: float = _FIRST_RATE, weight: float = _FIRST_WEIGHT
    ) -> float:
        """Return how likely a guess is right. It is `expected` to be, which weighs as much as `weight` guesses."""
        right, number = self._counts.get((source, _match_class(num_matched)), (0.0, 0.0))
        return (right + expected * weight) / (number + weight)


class Acceptance:
    """How likely guesses are right: rates of the whole service, and of each request."""

    def __init__(self) -> None:
        self._of_all = Rates()

    def of_request(self) -> Rates:
        """Return the empty rates of a new request."""
        return Rates(_REMEMBERED_OF_REQUEST)

    def count(self, own: Rates, source: str, num_matched: int, *, is_right: bool) -> None:
        """Learn whether a guess of a request was right. own: the rates of the request."""
        own.count(source, num_matched, is_right=is_right)
        self._of_all.count(source, num_matched, is_right=is_right)

    def chances(self, own: Rates, source: str, num_matched: int, num_tokens: int, chance: float = 1.0) -> list[float]:
        """Return, for each of `num_tokens` guesses in a row, how likely it and all before it are right.

        chance: that of the guess before the first one. The list ends where it is less than LEAST_LIKELY.
        """
        chances, rate, last = list[float](), 1.0, -1
        for number in range(num_matched, num_matched + num_tokens):
            # Guesses of one class have one rate.
            if last != (last := _match_class(number)):
                rate = own.rate(source, number, self._of_all.rate(source, number), _WEIGHT_OF_SERVICE)
            chance *= rate
            if chance < LEAST_LIKELY:
                break
            chances.append(chance)
        return chances


def best_lengths(
    chances: Sequence[Sequence[float]],
    num_rows: int,
    most: int,
    seconds: Callable[[int], float],
) -> list[int]:
    """Return how many drafts of each request a step should verify, to make the most tokens per second.

    chances[i]: how likely the drafts of request i are right, falling. num_rows: the rows of the step without drafts;
    each gives a token. most: the number of drafts in all. seconds: of a step with a number of rows; 0 if that is not
    known, and then there are no drafts.
    """
    lengths, best = [0] * len(chances), [0] * len(chances)
    base_s = seconds(num_rows)
    queue = [(-own[0], index) for index, own in enumerate(chances) if own]
    if base_s <= 0 or not queue:
        return lengths
    heapify(queue)
    tokens, highest = float(num_rows), _LEAST_GAIN * num_rows / base_s
    for rows in range(num_rows + 1, num_rows + most + 1):
        chance, index = queue[0]
        if chance == 0:
            break
        tokens -= chance
        lengths[index] += 1
        pace = tokens / max(seconds(rows), 1e-9)
        if pace > highest:
            best, highest = lengths.copy(), pace
        own = chances[index]
        heapreplace(queue, (-own[lengths[index]] if lengths[index] < len(own) else 0.0, index))
    return best


def may_pay(num_rows: int, most: int, seconds: Callable[[int], float]) -> bool:
    """Return whether a step could make more tokens per second with up to `most` drafts, were all of them right.

    num_rows: at least one. seconds: as for `best_lengths`. Between powers of two it is linear, as that of a
    `CostModel`, so the best number of rows is one of them or the last one.
    """
    base_s, last = seconds(num_rows), num_rows + most
    if base_s <= 0:
        return False
    powers = takewhile(lambda rows: rows < last, (1 << exponent for exponent in count(num_rows.bit_length())))
    return any(rows / max(seconds(rows), 1e-9) > _LEAST_GAIN * num_rows / base_s for rows in (*powers, last))


def _match_class(num_matched: int) -> int:
    return bisect_left(_MATCHES, num_matched)
