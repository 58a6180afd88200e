"""Work in slices, done at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def finish(job: Generator[object, None, T]) -> T:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(job)
        except StopIteration as end:
            result: T = end.value
            return result
