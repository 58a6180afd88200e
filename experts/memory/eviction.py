"""Policies of eviction: which resident expert of a layer leaves its slot first. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

# Compared in order; the resident expert of least worth is evicted.
Worth = tuple[float, float]


class EvictionPolicy(Protocol):
    """Decides which resident expert of one layer is evicted first.

    An event is the set of distinct experts that one step needs in one layer, touched at once.
    """

    def touch(self, experts: Sequence[int]) -> None:
        """Record that one event uses these experts, resident or not."""

    def worth(self, expert: int) -> Worth:
        """Return the expert's worth. The resident expert of least worth is evicted, the lowest id among equals."""


class UseHistory:
    """When each expert of a layer was last used and how often, counted in the layer's events from 1 on; 0 is never."""

    __slots__ = ("counts", "last_use", "now")

    def __init__(self, num_experts: int) -> None:
        self.now = 0
        self.last_use = [0] * num_experts
        self.counts = [0] * num_experts

    def add(self, experts: Sequence[int]) -> None:
        self.now += 1
        for expert in experts:
            self.last_use[expert] = self.now
            self.counts[expert] += 1


class ByUse:
    """A policy that goes by the layer's past events alone."""

    __slots__ = ("_uses", "_worth_of")

    def __init__(self, num_experts: int, worth_of: Callable[[UseHistory, int], Worth]) -> None:
        """worth_of(history, expert): the worth of the expert."""
        self._uses = UseHistory(num_experts)
        self._worth_of = worth_of

    def touch(self, experts: Sequence[int]) -> None:
        self._uses.add(experts)

    def worth(self, expert: int) -> Worth:
        return self._worth_of(self._uses, expert)


def lru(num_experts: int) -> ByUse:
    """Least recently used first."""
    return ByUse(num_experts, lambda uses, expert: (uses.last_use[expert], 0.0))


def lfu(num_experts: int) -> ByUse:
    """Least frequently used first, by events since the start; among equals the least recent."""
    return ByUse(num_experts, lambda uses, expert: (uses.counts[expert], uses.last_use[expert]))


def lfru(num_experts: int) -> ByUse:
    """Least frequently and recently used first: the uses, divided by the events since the last use (plus 1)."""

    def worth(uses: UseHistory, expert: int) -> Worth:
        last_use = uses.last_use[expert]
        return uses.counts[expert] / (uses.now - last_use + 1), last_use

    return ByUse(num_experts, worth)


class Static:
    """Lowest score first; the scores are fixed, for example loads measured earlier."""

    def __init__(self, scores: Sequence[float]) -> None:
        self._scores = list(scores)

    def touch(self, experts: Sequence[int]) -> None:
        """Events do not change the scores."""

    def worth(self, expert: int) -> Worth:
        return self._scores[expert], 0.0


class Affinity:
    """Least likely to be used in the layer's next event first, by a predictor's scores; then the least recent."""

    def __init__(self, num_experts: int) -> None:
        self._uses = UseHistory(num_experts)
        self._scores: Sequence[float] = [0.0] * num_experts

    def rate(self, scores: Sequence[float]) -> None:
        """Set the scores of all experts for the next event; they hold until new ones come."""
        self._scores = scores

    def touch(self, experts: Sequence[int]) -> None:
        self._uses.add(experts)

    def worth(self, expert: int) -> Worth:
        return self._scores[expert], self._uses.last_use[expert]


# By name, the policies that need only the number of experts.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": lru, "lfu": lfu, "lfru": lfru, "affinity": Affinity}
POLICY_NAMES = (*POLICIES, "static")


def make_policies(
    name: str, num_layers: int, num_experts: int, load: Sequence[Sequence[float]] | None
) -> list[EvictionPolicy]:
    """Make one policy per layer. load: [L, E], measured earlier; "static" uses it and raises ValueError without it."""
    if name == "static":
        if load is None or len(load) != num_layers:
            raise ValueError(f"static needs the load of {num_layers} layers")
        return [Static(of_layer) for of_layer in load]
    return [POLICIES[name](num_experts) for _ in range(num_layers)]
