"""Exact assignment against enumeration and scipy."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experts.placement.search import balanced_assignment
from tests.support.examples import examples


@cache
def balanced(num_items, num_ranks):
    """Ranks of the items in every assignment that gives all ranks as many."""
    even = [rank for rank in range(num_ranks) for _ in range(num_items // num_ranks)]
    return np.array(sorted(set(itertools.permutations(even))))


@given(st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4), (5, 5)]), st.integers(0, 10**6), st.booleans())
@examples(0.6)
def test_the_assignment_is_the_best_of_all(sizes, seed, whole_numbers):
    num_items, num_ranks = sizes
    random = np.random.default_rng(seed)
    gain = random.integers(0, 4, sizes).astype(float) if whole_numbers else random.normal(size=sizes)
    even = np.arange(num_items) % num_ranks
    most = gain[np.arange(num_items), balanced(num_items, num_ranks)].sum(axis=1).max()
    found = balanced_assignment(gain, random.permutation(even))
    assert (np.bincount(found, minlength=num_ranks) == num_items // num_ranks).all()
    assert gain[np.arange(num_items), found].sum() == pytest.approx(most)


@pytest.mark.parametrize(("num_items", "num_ranks"), [(64, 4), (128, 8), (256, 64)])
def test_a_large_assignment_is_as_good_as_that_of_scipy(num_items, num_ranks):
    optimize = pytest.importorskip("scipy.optimize")
    gain = np.random.default_rng(num_items).normal(size=(num_items, num_ranks))
    columns = np.repeat(np.arange(num_ranks), num_items // num_ranks)
    rows, chosen = optimize.linear_sum_assignment(gain[:, columns], maximize=True)
    found = balanced_assignment(gain, np.arange(num_items) % num_ranks)
    assert gain[np.arange(num_items), found].sum() == pytest.approx(gain[rows, columns[chosen]].sum())
