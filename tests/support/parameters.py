"""Parameters that are tried in part every time, and all of them in the long suite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """All values, or tuples of values; those behind the first `count` are for the long suite."""
    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*value, marks=_marks(place >= count)) for place, value in enumerate(several)]


def pairs(*values: Sequence[Any]) -> list[Any]:
    """All combinations of three or more lists of at least two values. Those whose places add up to an odd number are
    for the long suite; every two values of different lists meet in the others."""
    parameters = []
    for places in product(*(range(len(of_one)) for of_one in values)):
        chosen = (of_one[place] for of_one, place in zip(values, places, strict=True))
        parameters.append(pytest.param(*chosen, marks=_marks(sum(places) % 2 == 1)))
    return parameters


def _marks(is_long: bool) -> list[Any]:
    return [pytest.mark.long] if is_long else []
