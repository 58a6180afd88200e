"""Which experts a request that found its prefix cached will want first, as the signature of that prefix says. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.memory.residency_control import ResidencyControl
from experts.memory.transfers import Priority

Float = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WarmthRules:
    """What is worth a copy. min_probability: of an absent expert. margin: by how much it must be likelier than one that
    is there."""

    min_probability: float = 0.4
    margin: float = 0.2


class PrefixWarmth:
    """Asks in the speculative class, which everything else overtakes, from a request's first step to its first decode.

    In that time the link is often idle: the layers of its first step are far apart, or nobody else knows yet what they
    will want. Bounded by the requests that begin: `forget` those that decode.
    """

    __slots__ = ("_control", "_rates", "_rules", "num_asked", "num_experts")

    def __init__(self, control: ResidencyControl, num_experts: int, rules: WarmthRules = WarmthRules()) -> None:
        self._control = control
        self.num_experts = num_experts
        self._rules = rules
        self._rates: dict[int, Float] = {}
        self.num_asked = 0

    @property
    def num_layers(self) -> int:
        return len(self._control.layers)

    def remember(self, request: int, rates: Float) -> None:
        """rates: [L, E], the share of the prefix's tokens that chose each expert."""
        self._rates[request] = rates

    def forget(self, requests: Collection[int]) -> None:
        for request in requests:
            self._rates.pop(request, None)

    def known(self, requests: Sequence[int]) -> dict[int, int]:
        """Those of a step's rows whose prefix is remembered, with their number of rows."""
        if not self._rates:
            return {}
        return Counter(request for request in requests if request in self._rates)

    def ask(self, layer: int, num_rows: dict[int, int], here: Collection[int] | None = None) -> None:
        """Asks for absent experts of the layer's next event, to which known requests bring so many rows.

        here: the experts of the layer that this rank holds, None for all. Whoever guards the control holds its lock.
        """
        spared = np.zeros(0, np.float32)
        for request, count in num_rows.items():
            missed = (1 - self._rates[request][layer]) ** count
            spared = missed if not len(spared) else spared * missed
        expected = 1 - spared
        residency = self._control.layers[layer]
        ready = residency.resident()
        needed = self._rules.min_probability
        if len(ready) == residency.num_slots:
            needed = max(needed, float(expected[ready].min()) + self._rules.margin)
        wanted = [
            expert
            for expert in np.flatnonzero(expected >= needed).tolist()
            if residency.slot_of(expert) is None and (here is None or expert in here)
        ]
        if not wanted:
            return
        least = float(expected[wanted].min()) - self._rules.margin
        kept = [expert for expert in (*ready, *residency.loading()) if expected[expert] > least]
        named = sorted(wanted + kept, key=lambda expert: -float(expected[expert]))
        self._control.predict(layer, named, Priority.SPECULATIVE)
        self.num_asked += len(wanted)
