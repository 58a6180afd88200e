"""One figure of a benchmark: values over seeds or pairs of runs, what they are compared with, and whether that holds.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import sqrt
from statistics import fmean, stdev
from typing import TypeVar

# Student's t at 97.5 % by degrees of freedom; beyond them the normal distribution is near enough.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
_NORMAL = 1.96
_Name = TypeVar("_Name", bound=Hashable)


class Sense(Enum):
    """How a figure is compared with its limit."""

    AT_LEAST = "≥"
    AT_MOST = "≤"
    WITHIN = "±"  # both -limit and limit are bounds: a control, in which the gain has to vanish


class Verdict(Enum):
    """OPEN: the interval of the mean has the limit in it, or one value leaves it unknown."""

    MET = "met"
    MISSED = "missed"
    OPEN = "open"
    REPORTED = "-"


@dataclass(frozen=True, slots=True)
class Limit:
    sense: Sense
    value: float


@dataclass(frozen=True, slots=True)
class Figure:
    """values: of fixed seeds, or of pairs of runs that took turns. unit: "%" shows shares as percent.

    limit: None for what is reported only. exact: a count, of which one value is enough. note: what has to be known with
    it, as beta or why it was missed.
    """

    target: str
    name: str
    baseline: str
    values: tuple[float, ...]
    unit: str = ""
    limit: Limit | None = None
    exact: bool = False
    note: str = ""

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Of the 95 % interval of the mean; None for a single value."""
        return half_width(self.values)

    @property
    def verdict(self) -> Verdict:
        """By the whole 95 % interval."""
        if self.limit is None:
            return Verdict.REPORTED
        half = self.half_width
        if half is None:
            if not self.exact:
                return Verdict.OPEN
            half = 0.0
        ends = [_holds(self.limit, end) for end in (self.mean - half, self.mean + half)]
        if all(ends):
            return Verdict.MET
        if not any(ends) and not _straddles(self.limit, self.mean, half):
            return Verdict.MISSED
        return Verdict.OPEN


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean, by Student's t; None below two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    t = _T[degrees - 1] if degrees <= len(_T) else _NORMAL
    return t * stdev(values) / sqrt(len(values))


def over_seeds(seeds: Sequence[int], measure: Callable[[int], dict[_Name, float]]) -> dict[_Name, tuple[float, ...]]:
    """The values by name, of all seeds in order."""
    found = [measure(seed) for seed in seeds]
    return {name: tuple(of_seed[name] for of_seed in found) for name in found[0]}


def at_least(value: float) -> Limit:
    return Limit(Sense.AT_LEAST, value)


def at_most(value: float) -> Limit:
    return Limit(Sense.AT_MOST, value)


def within(value: float) -> Limit:
    return Limit(Sense.WITHIN, value)


def _holds(limit: Limit, value: float) -> bool:
    match limit.sense:
        case Sense.AT_LEAST:
            return value >= limit.value
        case Sense.AT_MOST:
            return value <= limit.value
        case Sense.WITHIN:
            return abs(value) <= limit.value


def _straddles(limit: Limit, mean: float, half: float) -> bool:
    """Whether a band lies inside an interval whose ends are outside of it."""
    return limit.sense is Sense.WITHIN and abs(mean) < half
