"""How long a step takes, learnt from measured steps.

A step computes rows through the model, one per token of a decode or a prompt, and attention of each row to the
positions before it. So its seconds are a curve over the number of rows, plus a slope times the attended positions.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import log2, sqrt

# Knots of the curve: 1, 2, 4, ... rows.
_NUM_KNOTS = 18
_SLOPE = _NUM_KNOTS
# The unit of attended positions: with it context and rows are learnt about equally fast.
_POSITIONS = 131072.0
_RATE = 0.2
# The weight of a parameter grows with the number of steps that it was learnt from, up to this number.
_MOST_WEIGHT = 32.0
# A delayed step (by the machine, a first compilation) counts as at most this many times the expected seconds.
_MOST_TIMES_EXPECTED = 4.0
# The number of observed steps from which on the model is trusted.
_TRUSTED_FROM = 6
# Until a step with prompts was measured, one is assumed to last this many times the expected seconds: requests have
# just come, and the processes that receive them use the same cores.
_UNMEASURED = 2.0
_MOST_STRETCHED = 4.0
# The share of the way to the latest step's ratio, and back to _UNMEASURED with a step without prompts.
_LEARNT_SHARE, _FORGOTTEN_SHARE = 0.5, 0.05


class Stretch:
    """How many times the expected seconds steps with prompts take of late, since other processes use the same cores.

    The cost model follows lasting changes; this class follows a crowd of requests that is gone after a second.
    """

    def __init__(self) -> None:
        self.times = _UNMEASURED

    def observe(self, expected_s: float, seconds: float, *, has_prompts: bool) -> None:
        """Learn from a measured step. expected_s: the cost model's prediction, 0 if it has none."""
        if not has_prompts:
            self.times += _FORGOTTEN_SHARE * (_UNMEASURED - self.times)
        elif expected_s > 0:
            ratio = min(max(1.0, seconds / expected_s), _MOST_STRETCHED)
            self.times += _LEARNT_SHARE * (ratio - self.times)


@dataclass(slots=True)
class StepSize:
    """The rows of a step, and the positions that they attend to in total."""

    rows: int = 0
    attended: float = 0.0

    def plus(self, count: int, start: int) -> tuple[int, float]:
        """Return rows and attended positions with `count` more tokens of one request, from position `start` on."""
        return self.rows + count, self.attended + count * (start + 0.5 * count)


class CostModel:
    """Predicts the seconds of a step; `observe` follows measured ones by normalised least mean squares.

    Between knots the curve is linear. A knot without measurements between two others lies on a power of the rows, and
    outside of them on their square root: weights are read once for all rows, experts more often with more rows. Below
    the least known knot it follows the known ones where these are flatter.
    """

    def __init__(self) -> None:
        self._knots: dict[int, float] = {}  # the known ones
        self._per_positions = 0.0
        self._num_observed = 0
        # By knot, and last for the slope: the number of steps that it was learnt from.
        self._weights = [0.0] * (_NUM_KNOTS + 1)

    def seconds(self, rows: int, attended: float) -> float:
        """Return the expected seconds of a step of `rows` tokens that attend to `attended` positions in total.

        Return 0 before the first observation.
        """
        low, share = _place(rows)
        curve = (1 - share) * self._knot(low) + share * self._knot(low + 1)
        return curve + self._per_positions * attended / _POSITIONS

    def observe(self, rows: int, attended: float, seconds: float) -> None:
        """Learn from a measured step of at least one row."""
        expected = self.seconds(rows, attended)
        if self._num_observed >= _TRUSTED_FROM:
            seconds = min(seconds, _MOST_TIMES_EXPECTED * expected)
        self._num_observed += 1
        low, share = _place(rows)
        nearest = low + (share >= 0.5)
        if nearest not in self._knots:
            apart = sqrt(2.0**nearest / rows)
            self._knots[nearest] = max(0.0, seconds - self._per_positions * attended / _POSITIONS) * apart
            self._weights[nearest] += 1
            return
        inputs = ((low, 1 - share), (low + 1, share), (_SLOPE, attended / _POSITIONS))
        # Parameters that were learnt from few steps take the larger part of an error.
        gains = [value / min(1 + self._weights[index], _MOST_WEIGHT) for index, value in inputs]
        step = _RATE * (seconds - expected) / sum(value * gain for (_, value), gain in zip(inputs, gains, strict=True))
        for (index, value), gain in zip(inputs, gains, strict=True):
            if index != _SLOPE and value > 0:
                self._knots[index] = max(0.0, self._knot(index) + step * gain)
            self._weights[index] += value
        self._per_positions = max(0.0, self._per_positions + step * gains[2])

    def rows_within(self, seconds: float, most: int, step: StepSize, start: int = 0) -> int:
        """Return how many of the next `most` tokens of a prompt fit into a step that takes at most `seconds`.

        step: the rest of the step. start: the position of the first of these tokens.
        """
        if self.seconds(*step.plus(most, start)) <= seconds:
            return most
        return bisect_right(range(1, most + 1), seconds, key=lambda count: self.seconds(*step.plus(count, start)))

    def _knot(self, index: int) -> float:
        if index in self._knots or not self._knots:
            return self._knots.get(index, 0.0)
        known, exponent = sorted(self._knots), 0.5
        place = bisect_right(known, index)  # the number of known knots below
        nearest = known[max(0, place - 1)]
        if 0 < place < len(known):
            exponent = self._exponent(known[place - 1], known[place])
        elif not place and len(known) > 1:
            exponent = min(exponent, self._exponent(known[0], known[1]))
        return float(self._knots[nearest] * 2.0 ** (exponent * (index - nearest)))

    def _exponent(self, low: int, high: int) -> float:
        """Return the power of the rows that the seconds follow from one known knot to another."""
        ratio = self._knots[high] / max(self._knots[low], 1e-9)
        return log2(max(1.0, ratio)) / (high - low)


def _place(rows: int) -> tuple[int, float]:
    """Return the knot at or below `rows`, and the position of `rows` between it and the next knot, 0 to 1."""
    low = min(max(1, rows).bit_length() - 1, _NUM_KNOTS - 2)
    return low, min(1.0, max(1, rows) / 2**low - 1)
