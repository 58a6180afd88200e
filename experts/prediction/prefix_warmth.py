"""Ask for the experts that a request with a cached prefix will choose first, by the prefix's signature. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.memory.residency import Priority, ResidencyControl
from experts.prediction.planning import PrefetchSwitch, SwitchRules

Float = NDArray[np.float32]

_SWITCH_RULES = SwitchRules(memory=32, trial=16, first_pause=32, longest_pause=1024)


@dataclass(frozen=True, slots=True)
class WarmthRules:
    """When a missing expert is worth a copy.

    min_probability: that the layer's next event needs the expert. margin: by how much it must be likelier than the
    expert it evicts. least_used: warming pauses if a smaller share of the experts asked for is used.
    """

    min_probability: float = 0.4
    margin: float = 0.2
    least_used: float = 0.4


class PrefixWarmth:
    """Asks for experts from a request's first step to its first decode, with the lowest priority (`SPECULATIVE`).

    In that time the link may be idle: no other predictor looks at layers far ahead, or at the next step for layers that
    are computed. This class asks for a layer's next event once the layer's experts are computed, which it sees when the
    next layer begins; until then the slots are in use. Callers hold the lock that guards the control. It forgets a
    request with its first decode.
    """

    __slots__ = (
        "_asked",
        "_before",
        "_control",
        "_experts_here",
        "_num_asked",
        "_num_rows",
        "_num_used",
        "_on",
        "_rates",
        "_rules",
        "_switch",
        "num_experts",
    )

    def __init__(
        self,
        control: ResidencyControl,
        num_experts: int,
        experts_here: Callable[[int], Collection[int]] | None = None,
        rules: WarmthRules = WarmthRules(),
        switch: SwitchRules = _SWITCH_RULES,
    ) -> None:
        """experts_here: returns the experts of a layer that this rank holds; None if it holds all. switch: rules for
        pausing, in steps that have such requests."""
        self._control = control
        self.num_experts = num_experts
        self._experts_here = experts_here
        self._rules = rules
        self._switch = PrefetchSwitch(switch)
        self._rates: dict[Hashable, Float] = {}
        self._num_rows: Mapping[Hashable, int] = {}
        self._on = False
        self._before: int | None = None
        self._asked: dict[int, frozenset[int]] = {}
        self._num_asked = self._num_used = 0

    @property
    def num_layers(self) -> int:
        return len(self._control.layers)

    @property
    def is_idle(self) -> bool:
        """True if the coming step needs no calls."""
        return not (self._rates or self._asked or self._num_asked)

    def remember(self, request: Hashable, rates: Float) -> None:
        """Add a request that begins. rates: [L, E], the share of its prefix's tokens that chose each expert."""
        self._rates[request] = rates

    def begin_step(self, requests: Sequence[Hashable], *, may_ask: bool) -> None:
        """Ask for every layer's event in this step. requests: one per row. may_ask: whether prefetching is on."""
        self._num_rows = Counter(request for request in requests if request in self._rates)
        self._on = may_ask and self._switch.on and bool(self._num_rows)
        self._before = None
        if self._on:
            for layer in range(self.num_layers):
                self._ask(layer, self._num_rows)

    def observed(self, layer: int, experts: Collection[int]) -> None:
        """Note that a layer's event has begun with these experts, and ask again for the layer before."""
        if asked := self._asked.pop(layer, None):
            self._num_asked += len(asked)
            self._num_used += len(asked.intersection(experts))
        self._ask_again(layer)

    def end_step(self, ended: Iterable[Hashable]) -> None:
        """Ask for the last layer's next event, forget requests that decode or have ended, and judge what was used."""
        self._ask_again(None)
        decoding = [request for request, count in self._num_rows.items() if count == 1]
        for request in (*decoding, *ended):
            self._rates.pop(request, None)
        if self._num_asked or (self._num_rows and not self._switch.on):
            # Both in experts: the used ones, and as many as must be used.
            self._switch.step_done(gain=self._num_used, cost=self._rules.least_used * self._num_asked)
        self._num_asked = self._num_used = 0

    def _ask_again(self, layer: int | None) -> None:
        """Ask for the next event of the layer before `layer`, in which each request will have one row."""
        before, self._before = self._before, layer
        if self._on and before is not None:
            self._ask(before, dict.fromkeys(self._num_rows, 1))

    def _ask(self, layer: int, num_rows: Mapping[Hashable, int]) -> None:
        """Ask for a layer's next event, unless a predictor has asked: it knows more than a prefix."""
        if self._control.is_predicted(layer):
            return
        missed: Float = np.ones(self.num_experts, np.float32)
        for request, count in num_rows.items():
            missed *= (1 - self._rates[request][layer]) ** count
        expected = 1 - missed
        residency = self._control.layers[layer]
        ready = residency.resident()
        needed = self._rules.min_probability
        if len(ready) == residency.num_slots:
            needed = max(needed, float(expected[ready].min()) + self._rules.margin)
        here = None if self._experts_here is None else self._experts_here(layer)
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
        self._asked[layer] = frozenset(wanted)
