"""The rows at home on one rank of several, told of on their way to the experts of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from experts.prediction.rank_predictor import RankShare
from experts.routing_tap import Dispatch, Experts
from kernels.activation import Activation


class HomeListener(Protocol):
    """Hears of the rows at home in each layer."""

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate chose for the rows at home, x [T, H], expert_ids and weights [T, k]; they have not travelled yet."""

    def returned(self, layer: int) -> None:
        """They are back, and what other ranks sent is computed."""


class HomeRows:
    """Tells a listener of the rows that this rank sends to the experts of all ranks, itself included.

    share: what this rank holds and has to do, for those who listen.
    """

    def __init__(self, moe_layers: Sequence[int], share: RankShare) -> None:
        """moe_layers: numbers of the layers with experts, ascending; the listener counts these alone."""
        self._place = {layer: place for place, layer in enumerate(moe_layers)}
        self.share = share
        self.listener: HomeListener | None = None

    def around(self, dispatch_of: Callable[[int], Dispatch[Experts]]) -> Callable[[int], Dispatch[Experts]]:
        """The same dispatches, told of."""
        return lambda layer: self._around_one(self._place[layer], dispatch_of(layer))

    def _around_one(self, place: int, inner: Dispatch[Experts]) -> Dispatch[Experts]:
        def dispatch(
            x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts, activation: Activation
        ) -> Tensor:
            listener = self.listener
            if listener is None:
                return inner(x, expert_ids, weights, experts, activation)
            listener.chose(place, x, expert_ids, weights)
            out = inner(x, expert_ids, weights, experts, activation)
            listener.returned(place)
            return out

        return dispatch
