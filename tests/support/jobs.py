"""Work in slices, done at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def finish(job: Generator[object, None, T]) -> T:
    """Return what a generator returns."""
    while True:
        try:
            next(job)
        except StopIteration as end:
            result: T = end.value
            return result
