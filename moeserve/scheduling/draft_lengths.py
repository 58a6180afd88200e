"""The number of draft tokens that a step should verify: their likely gain over the cost of their rows.

A draft is worth its row only if it is likely to be right. The likelihood is learnt by the draft's source, by the number
of tokens before it that matched, and by request. A guess that no step verifies teaches as much as a verified one, since
the next token is known either way. So nothing is computed only to find out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, count, pairwise, repeat, takewhile
from operator import mul, neg
from sys import maxsize

# Guesses are counted by the number of tokens before them that matched: up to 1, 2, ...
_MATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
# By class, the first greater number of tokens that belongs to the next class.
_ENDS = (*(number + 1 for number in _MATCHES), maxsize)
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

    def rate(self, kind: tuple[str, int], expected: float, weight: float = _FIRST_WEIGHT) -> float:
        """Return how likely a guess of a source and class is right.

        It is `expected` to be, which weighs as much as `weight` guesses.
        """
        right, number = self._counts.get(kind, (0.0, 0.0))
        return (right + expected * weight) / (number + weight)


class Acceptance:
    """How likely guesses are right: rates of the whole service, and of each request."""

    def __init__(self, first_rates: Mapping[str, float] | None = None) -> None:
        """first_rates: the expected share of right guesses of a source before any was seen, where it is known."""
        self._of_all = Rates()
        self._first_rates = first_rates or {}

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
        chances, number, end = list[float](), num_matched, num_matched + num_tokens
        first_rate = self._first_rates.get(source, _FIRST_RATE)
        while number < end and chance >= LEAST_LIKELY:
            # Guesses of one class have one rate.
            place = _match_class(number)
            stop, kind = min(end, _ENDS[place]), (source, place)
            rate = own.rate(kind, self._of_all.rate(kind, first_rate), _WEIGHT_OF_SERVICE)
            chances += accumulate(repeat(rate, stop - number - 1), mul, initial=chance * rate)
            number, chance = stop, chances[-1]
        return chances[: bisect_right(chances, -LEAST_LIKELY, key=neg)]


def best_lengths(
    chances: Sequence[Sequence[float]],
    num_rows: int,
    most: int,
    seconds: Callable[[int], float],
    lost: Sequence[Sequence[float]] | None = None,
    num_again: int = 0,
) -> list[int]:
    """Return how many drafts of each request a step should verify, to make the most tokens per second.

    chances[i]: how likely the drafts of request i are right, falling. num_rows: the rows of the step without drafts;
    each gives a token, but for `num_again` rows that are computed once more. most: the number of drafts in all.
    seconds: of a step with a number of rows, linear between powers of two, as that of a `CostModel`; 0 if that is not
    known, and then there are no drafts. lost[i]: the rows that a later step is likely to compute once more because of
    each draft of request i; None for none.
    """
    base_s = seconds(num_rows)
    drafts = list(chain.from_iterable(chances))
    if base_s <= 0 or not drafts or most <= 0:
        return [0] * len(chances)
    if lost is None:
        drafts = sorted(drafts, reverse=True)[:most]
        rows = list(map(float, range(num_rows, num_rows + len(drafts) + 1)))
    else:
        pairs = sorted(zip(drafts, chain.from_iterable(lost), strict=True), reverse=True)[:most]
        drafts = [chance for chance, _ in pairs]
        rows = list(accumulate((1 + more for _, more in pairs), initial=float(num_rows)))
    tokens = list(accumulate(drafts, initial=float(num_rows - num_again)))

    def pace(number: int) -> float:
        whole = int(rows[number])
        step_s, part = seconds(whole), rows[number] - whole
        return tokens[number] / max(step_s + part * (seconds(whole + 1) - step_s) if part else step_s, 1e-9)

    best, highest = 0, _LEAST_GAIN * tokens[0] / base_s
    for first, last in pairwise(_bends(num_rows, len(drafts))):
        # With linear seconds and concave tokens the pace rises up to one place and falls from there on.
        number = first + bisect_left(range(first, last), True, key=lambda n: pace(n + 1) <= pace(n))
        if pace(number) > highest:
            best, highest = number, pace(number)
    return _shares(chances, drafts[best - 1], best) if best else [0] * len(chances)


def _bends(num_rows: int, most: int) -> list[int]:
    """Return 0, `most`, and the numbers of drafts between them at which a step's rows are a power of two."""
    bends = ((1 << exponent) - num_rows for exponent in count(num_rows.bit_length()))
    return [0, *takewhile(lambda drafts: drafts < most, bends), most]


def _shares(chances: Sequence[Sequence[float]], least: float, most: int) -> list[int]:
    """Return how many of each request's drafts are among the `most` likeliest. least: the chance of the last of these.

    Among equal ones the drafts of the first requests count.
    """
    lengths = [bisect_left(own, -least, key=neg) for own in chances]
    most -= sum(lengths)
    for index, own in enumerate(chances):
        equal = min(most, bisect_right(own, -least, key=neg) - lengths[index])
        lengths[index] += equal
        most -= equal
    return lengths


def may_pay(num_rows: int, most: int, seconds: Callable[[int], float]) -> bool:
    """Return whether a step could make more tokens per second with up to `most` drafts, were all of them right.

    num_rows: at least one. seconds: as for `best_lengths`. So the best number of rows is a power of two or the last.
    """
    base_s = seconds(num_rows)
    if base_s <= 0:
        return False
    totals = [num_rows + drafts for drafts in _bends(num_rows, most)[1:]]
    return any(rows / max(seconds(rows), 1e-9) > _LEAST_GAIN * num_rows / base_s for rows in totals)


def _match_class(num_matched: int) -> int:
    return bisect_left(_MATCHES, num_matched)
