"""Learns `FittedGates` from what a model computes: what is missing from the plain gates, by ridge regression."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from experts.prediction.predictor import Tap
from experts.prefetch.fitted_gates import FittedGates

_Key = TypeVar("_Key", bound=Hashable)

# Damping per token, in mean squares of a state's elements. Recall hardly depends on it between 0.01 and 1.
_RIDGE = 0.1


class GateFit:
    """Sums what the normal equations need: texts come one after the other and none is kept.

    Takes L (H + 1)² floats per tap, and as many products per token.
    """

    def __init__(self, max_distance: int) -> None:
        self._max_distance = max_distance
        self._num_tokens = 0
        self._squares: dict[tuple[Tap, int], Tensor] = {}
        self._products: dict[tuple[Tap, int, int], Tensor] = {}

    def add(self, states: Mapping[Tap, Sequence[Tensor]], scores: Sequence[Tensor]) -> None:
        """states: by tap and layer [T, H], those of `LATE` of unit norm; the last layer's may be missing.
        scores: [T, E] by layer, what each gate ranked its own input by."""
        self._num_tokens += len(scores[0])
        for tap, of_tap in states.items():
            for layer, state in enumerate(of_tap[: len(scores) - 1]):
                x = torch.cat([state.float(), torch.ones(len(state), 1)], 1)
                _add(self._squares, (tap, layer), x.T @ x)
                for distance in range(1, min(self._max_distance, len(scores) - 1 - layer) + 1):
                    _add(self._products, (tap, layer, distance), x.T @ scores[layer + distance].float())

    def solve(self, plain: Mapping[tuple[Tap, int, int], Tensor]) -> FittedGates:
        """The maps from all that was added, at least a token.

        plain: by tap, layer and distance [E, H + 1], the later gate as it is. A map keeps to it in directions that the
        texts have not shown, which on other texts recalls more than a map that knows nothing of them.
        """
        found: dict[tuple[Tap, int], list[Tensor]] = {}
        for (tap, layer), squares in self._squares.items():
            damping = (_RIDGE * squares.diagonal()[:-1].mean()).repeat(len(squares))
            damping[-1] = 0  # The constant is free.
            factor = torch.linalg.cholesky((squares + damping.diag()).double())
            for distance in range(1, self._max_distance + 1):
                products = self._products.get((tap, layer, distance))
                if products is not None:
                    start = plain[tap, layer, distance].T
                    missing = products.double() - squares.double() @ start.double()
                    solution = start + torch.cholesky_solve(missing, factor)
                    found.setdefault((tap, distance), []).append(solution.T.float())
        return FittedGates({key: torch.stack(maps).numpy() for key, maps in found.items()}, self._num_tokens)


def _add(sums: dict[_Key, Tensor], key: _Key, value: Tensor) -> None:
    if key in sums:
        sums[key] += value
    else:
        sums[key] = value
