"""The layers of a model over the ranks of a pipeline: each rank holds a stage, layers that follow each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers from `first` up to, but not including, `end` of a model with `num_layers` layers."""

    first: int
    end: int
    num_layers: int

    @property
    def is_first(self) -> bool:
        """True if the stage begins with the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """True if the last norm, the output projection and sampling belong to the stage."""
        return self.end == self.num_layers


def stages_of(counts: Sequence[int]) -> list[Stage]:
    """Return the stages of ranks that hold `counts` layers each."""
    ends = list(accumulate(counts))
    return [Stage(end - count, end, ends[-1]) for count, end in zip(counts, ends, strict=True)]


def split_layers(sizes: Sequence[int], num_ranks: int, joined: Collection[int] = ()) -> tuple[int, ...]:
    """Return how many layers each rank holds so that the largest stage is as small as possible.

    sizes: by layer. joined: the layers that stay with the one before; there are at least `num_ranks` others. Of equally
    good splits the one with fewer layers on later ranks is returned.
    """
    num_layers, sums = len(sizes), [0, *accumulate(sizes)]
    # least[end]: the size of the largest of the stages so far, which hold the layers before `end`.
    least = [0 if end == 0 else inf for end in range(num_layers + 1)]
    firsts: list[list[int]] = []
    for rank in range(num_ranks):
        following, chosen = [inf] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(rank + 1, num_layers - (num_ranks - 1 - rank) + 1):
            for first in (layer for layer in range(rank, end) if layer not in joined):
                largest = max(least[first], sums[end] - sums[first])
                if largest <= following[end]:
                    following[end], chosen[end] = largest, first
        least = following
        firsts.append(chosen)
    counts, end = list[int](), num_layers
    for chosen in reversed(firsts):
        counts.append(end - chosen[end])
        end = chosen[end]
    return tuple(reversed(counts))
