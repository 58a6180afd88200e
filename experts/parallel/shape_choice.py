"""The choice between shapes of dispatch, step by step, from times that were measured at two sizes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShapeChoice:
    """A step takes `small` while its busiest rank has fewer than `rows` rows, and `large` from there on.

    Every rank knows the rows of all ranks, so all ranks choose alike without a message.
    """

    small: str
    large: str
    rows: int = 0

    @classmethod
    def always(cls, shape: str) -> ShapeChoice:
        return cls(shape, shape)

    @classmethod
    def measured(cls, seconds: Mapping[int, Mapping[str, float]]) -> ShapeChoice:
        """Return the faster shape on each side of the size at which two straight lines cross.

        seconds[rows][shape]: the time of a step with `rows` rows on each rank, for two sizes.
        """
        few, many = sorted(seconds)
        small, large = (min(seconds[rows], key=seconds[rows].__getitem__) for rows in (few, many))
        if small == large:
            return cls.always(small)
        lead = seconds[few][large] - seconds[few][small]
        lag = seconds[many][small] - seconds[many][large]
        return cls(small, large, few + math.ceil((many - few) * lead / (lead + lag)) if lead + lag else many)

    def shape_of(self, num_rows: Sequence[int]) -> str:
        """Return the shape for a step in which rank r has num_rows[r] rows."""
        return self.small if max(num_rows) < self.rows else self.large

    def __str__(self) -> str:
        return self.large if self.small == self.large else f"{self.small}, {self.large} from {self.rows} rows"
