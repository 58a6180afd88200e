"""One figure of a measurement: values over seeds or rounds, the limit it is held against, and the verdict.

It holds the numbers of repetitions and the runs that take turns, too. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

# Student's t at 97.5 % by degrees of freedom; beyond them the normal distribution is near enough.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
_NORMAL = 1.96
_Name = TypeVar("_Name", bound=Hashable)
_Arm = TypeVar("_Arm")
_Run = TypeVar("_Run")


class Unavailable(Exception):
    """This machine lacks something that a measurement needs; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Amount:
    """seeds: each figure has a value for each. num_pairs: rounds of timed runs, which take turns.

    quick: little text and few cases, to see that everything works. cache: folder of recorded traces and demo models;
    None: the usual one.
    """

    seeds: tuple[int, ...]
    num_pairs: int
    quick: bool = False
    cache: Path | None = None

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class Sense(Enum):
    """How a figure is compared with its limit."""

    AT_LEAST = "≥"
    AT_MOST = "≤"
    WITHIN = "±"  # both -limit and limit are bounds: a control, in which the gain has to vanish


class Verdict(Enum):
    """OPEN: the limit lies inside the interval of the mean, or one value does not decide."""

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
    """values: one per seed, or one per round of runs that took turns. unit: "%" shows shares as percent.

    limit: None if the figure is only reported. exact: a count, for which one value decides. note: conditions of the
    measurement, such as beta, or why the limit was missed.
    """

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
        """Half the width of the 95 % interval of the mean; None for a single value."""
        return half_width(self.values)

    @property
    def verdict(self) -> Verdict:
        """Judge by the whole 95 % interval."""
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


Progress = Callable[[str], None]
Measure = Callable[[Amount, Progress], Iterator[Figure]]


def half_width(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % interval of the mean by Student's t; None below two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    t = _T[degrees - 1] if degrees <= len(_T) else _NORMAL
    return t * stdev(values) / sqrt(len(values))


def over_seeds(seeds: Sequence[int], measure: Callable[[int], dict[_Name, float]]) -> dict[_Name, tuple[float, ...]]:
    """Return the values by name, one per seed in order."""
    found = [measure(seed) for seed in seeds]
    return {name: tuple(of_seed[name] for of_seed in found) for name in found[0]}


def in_turn(
    arms: Sequence[_Arm], num_rounds: int, run: Callable[[_Arm, int], _Run], *, warm_up: bool = False
) -> list[tuple[_Run, ...]]:
    """Run every arm once per round, with the round's number, and return the rounds, each in the order of the arms.

    The first arm of one round is the last of the next, so that none always begins. warm_up: round -1 comes before and
    is not returned.
    """
    rounds = []
    for number in range(-1 if warm_up else 0, num_rounds):
        order = list(enumerate(arms))
        if number % 2:
            order.reverse()
        of_round = {index: run(arm, number) for index, arm in order}
        if number >= 0:
            rounds.append(tuple(of_round[index] for index in range(len(arms))))
    return rounds


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
    """Return whether the band of a control lies inside an interval whose ends are both outside the band."""
    return limit.sense is Sense.WITHIN and abs(mean) < half
