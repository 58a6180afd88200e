"""Decide which absent experts of a step the host computes where they lie, and which ones move to the device.

The host and the link work at the same time, so the experts of an event are shared out for both to end early. Experts
that the host computes often move to the device meanwhile, for later steps. Torch-free, without a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experts.memory.residency import Access, ComputeCosts, ResidencyControl, SlotState

# The weight of a new observation in measured seconds.
_LEARNING_RATE = 0.05
# An observation counts as this multiple of what was expected, at most: something else held the machine up.
_LONGEST = 4.0
# Events of a layer after which a use counts half.
_HALF_LIFE = 64
# An expert moves in if the host then saves, while uses count, this multiple of the copy's seconds. Below 1, as
# the link has nothing else to do then.
_WORTH_COPIES = 0.5


class HostCosts:
    """The seconds that the host takes for experts: measured at start for some numbers of rows, then learnt in steps."""

    def __init__(self, call_seconds: float, points: Sequence[tuple[int, float]]) -> None:
        """call_seconds: of any call, beside its experts. points: (rows, seconds) of one expert, more rows each."""
        self._call = call_seconds
        self._rows = [rows for rows, _ in points]
        self._seconds = [seconds for _, seconds in points]

    @property
    def call_seconds(self) -> float:
        return self._call

    def describe(self, copy_seconds: float) -> ComputeCosts:
        return ComputeCosts(copy_seconds, self._call, list(zip(self._rows, self._seconds, strict=True)))

    def seconds(self, num_rows: int) -> float:
        """Return the seconds of one expert with this number of rows, without the seconds of the call."""
        return sum(self._seconds[place] * weight for place, weight in self._weights(num_rows))

    def learn(self, num_rows: Iterable[int], seconds: float) -> None:
        """Record a call that computed experts with these numbers of rows."""
        parts = [0.0] * len(self._rows)
        for rows in num_rows:
            for place, weight in self._weights(rows):
                parts[place] += self._seconds[place] * weight
        expected = self._call + sum(parts)
        change = _LEARNING_RATE * (min(seconds / expected, _LONGEST) - 1)
        # Each number is corrected by its part of the call.
        self._call *= 1 + change * self._call / expected
        self._seconds = [
            of_rows * (1 + change * part / expected) for of_rows, part in zip(self._seconds, parts, strict=True)
        ]

    def _weights(self, num_rows: int) -> list[tuple[int, float]]:
        """Return (place, weight) of the points between which `num_rows` lies; behind the last one seconds grow with
        rows."""
        rows, place = self._rows, bisect_left(self._rows, num_rows)
        if place == len(rows):
            return [(place - 1, num_rows / rows[-1])]
        if place == 0:
            return [(0, 1.0)]
        share = (num_rows - rows[place - 1]) / (rows[place] - rows[place - 1])
        return [(place - 1, 1 - share), (place, share)]


@dataclass(frozen=True, slots=True)
class AbsentExpert:
    """An expert that an event needs and no slot holds. copy_seconds: for what the link has yet to copy of it. use: the
    share of events that use it."""

    expert: int
    copy_seconds: float
    host_seconds: float
    use: float = 0.0


def share_out(absent: Iterable[AbsentExpert], call_seconds: float, link_seconds: float = 0.0) -> frozenset[int]:
    """Return the experts for the host, so that the host and the link have ended as early as possible.

    call_seconds: of the host, if it computes any. link_seconds: until the link is free. The host gets the experts that
    cost it least beside their copies, as many as are best: the optimum, but for the indivisibility of one expert. Of
    equals the one that is used most is copied, and stays.
    """
    experts = sorted(absent, key=lambda each: (each.host_seconds / max(each.copy_seconds, 1e-12), each.use))
    on_link = link_seconds + sum(each.copy_seconds for each in experts)
    best, num_best, on_host = on_link if experts else 0.0, 0, call_seconds
    for count, each in enumerate(experts, start=1):
        on_host += each.host_seconds
        on_link -= each.copy_seconds
        # The link works for other layers if none of these experts is left to it.
        end = max(on_host, on_link if count < len(experts) else 0.0)
        if end < best:
            best, num_best = end, count
    return frozenset(each.expert for each in experts[:num_best])


class UseRates:
    """The share of a layer's events that use each expert, the latest events most."""

    def __init__(self, num_experts: int) -> None:
        self._kept = 0.5 ** (1 / _HALF_LIFE)
        self._now = 0
        self._rates = [0.0] * num_experts
        self._updated = [0] * num_experts

    def add(self, experts: Iterable[int]) -> None:
        """Record an event."""
        self._now += 1
        for expert in experts:
            self._rates[expert] = self.of(expert) + 1 - self._kept
            self._updated[expert] = self._now

    def of(self, expert: int) -> float:
        rate: float = self._rates[expert] * self._kept ** (self._now - self._updated[expert])
        return rate


class HostShare:
    """Begins the events of a `ResidencyControl` whose experts all lie in the host's memory too."""

    def __init__(
        self,
        control: ResidencyControl,
        num_experts: int,
        costs: HostCosts,
        *,
        waits_for_copies: bool,
        piece_share: float = 1.0,
    ) -> None:
        """waits_for_copies: False if the host computes every absent expert. piece_share: of an expert, that is copied
        before a more urgent copy begins."""
        self.costs = costs
        self._control, self._piece_share = control, piece_share
        self._waits_for_copies = waits_for_copies
        self._rates = [UseRates(num_experts) for _ in control.layers]

    def access(self, layer: int, num_rows: Mapping[int, int], copy_seconds: float) -> Access:
        """Begin an event. The host is to compute the experts `elsewhere`.

        num_rows: by expert. copy_seconds: of a whole expert over the link.
        """
        residency = self._control.layers[layer]
        absent = [expert for expert in num_rows if residency.state_of(expert) is not SlotState.READY]
        elsewhere = self._share_out(layer, absent, num_rows, copy_seconds) if absent else frozenset[int]()
        access = self._control.access(layer, num_rows.keys() - elsewhere, elsewhere)
        self._rates[layer].add(num_rows)
        self._control.move_in(layer, self._worth_a_copy(layer, elsewhere, copy_seconds))
        return access

    def _share_out(
        self, layer: int, absent: Sequence[int], num_rows: Mapping[int, int], copy_seconds: float
    ) -> frozenset[int]:
        if not self._waits_for_copies:
            return frozenset(absent)
        control, costs = self._control, self.costs
        waits = control.num_in_flight > 0 and not any(control.is_in_flight(layer, expert) for expert in absent)
        use = self._rates[layer].of
        return share_out(
            [
                AbsentExpert(
                    expert,
                    copy_seconds * control.share_to_copy(layer, expert),
                    costs.seconds(num_rows[expert]),
                    use(expert),
                )
                for expert in sorted(absent)
            ],
            costs.call_seconds,
            copy_seconds * self._piece_share if waits else 0.0,
        )

    def _worth_a_copy(self, layer: int, elsewhere: frozenset[int], copy_seconds: float) -> list[int]:
        """Return the experts to move in: as many as there are empty slots, else the one that is used most, if it pays.

        What a copy gains is the difference of its use from that of the expert that makes room, in seconds of the host,
        as long as uses count.
        """
        rates, residency = self._rates[layer], self._control.layers[layer]
        outside = [expert for expert in elsewhere if residency.slot_of(expert) is None]
        candidates = sorted(outside, key=lambda expert: (-rates.of(expert), expert))
        if not candidates:
            return []
        if residency.num_empty:
            return candidates[: residency.num_empty]
        least = min(map(rates.of, residency.resident()), default=0.0)
        gained = (rates.of(candidates[0]) - least) * self.costs.seconds(1) * _HALF_LIFE
        return candidates[:1] if gained > _WORTH_COPIES * copy_seconds else []
