"""The estimate of how long something lasts, from cases that were seen to their end and others."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from moeserve.scheduling.survival import Survival


def ages(num_remembered: int = 10_000) -> Survival:
    return Survival(0.1, 1.05, num_remembered)


def test_nothing_is_known_to_end_before_a_case_has() -> None:
    empty = ages()
    assert (empty.share(1e9), empty.longest(0.5)) == (1.0, inf)
    empty.count(3.0, has_ended=False)
    assert (empty.share(1e9), empty.longest(0.999)) == (1.0, inf)


def test_the_share_is_that_of_the_distribution_though_half_of_the_cases_were_cut_off() -> None:
    random, found = Random(1), ages()
    for _ in range(5000):
        lasts, seen = random.expovariate(1 / 4), random.expovariate(1 / 4)
        found.count(min(lasts, seen), has_ended=lasts <= seen)
    for age in (0.5, 1.0, 2.0, 4.0, 8.0):
        assert found.share(age) == pytest.approx(2 ** (-age / 4 / 0.6931), abs=0.05)
    assert found.longest(0.5) == pytest.approx(4 * 0.6931, rel=0.1)


def test_the_mean_counts_what_was_cut_off_for_what_it_would_have_been() -> None:
    random, found = Random(2), Survival(1, 1.1, 10_000)
    for _ in range(2000):
        length, seen = random.choice((10, 30)), random.choice((20, 50))
        found.count(min(length, seen), has_ended=length <= seen)
    assert found.mean() == pytest.approx(20, rel=0.1)


def test_one_case_is_not_taken_for_all() -> None:
    found = ages()
    found.count(5.0, has_ended=True)
    assert found.share(6.0) == pytest.approx(0.5, abs=0.01)


def test_what_happens_no_more_is_forgotten() -> None:
    found = ages(num_remembered=100)
    for _ in range(50):
        found.count(5.0, has_ended=True)
    for _ in range(100):
        found.count(3.0, has_ended=False)
    assert found.share(6.0) < 0.1
    for _ in range(100_000):
        found.count(3.0, has_ended=False)
    assert found.share(6.0) > 0.99
    assert found.share(2.9) == 1.0
