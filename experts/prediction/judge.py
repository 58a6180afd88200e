"""Decide by the duration of steps whether prefetching pays, and keep asking. Torch-free, without a clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, log, sqrt

# Steps with up to this many rows are compared with steps of exactly as many; longer ones by half powers of two.
_EXACT_ROWS = 4
# A step longer than this multiple of its like counts as that long: something else held the machine up.
_LONGEST = 4.0


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """How steps are sampled. All numbers but the shares count steps.

    block: consecutive steps of one probe of the choice that is not in use. settle: of these, and of the steps behind a
    probe, the first ones, which find the experts in memory that the other choice has left, and are not compared.
    period: steps from one probe without prefetching to the next. first_period: steps from one probe of prefetching to
    the next, if the time that such probes have lost is no more than the share `budget` of all time. compared: the
    latest steps of the choice in use that a probe is compared with. memory: probes that the mean gain goes back. least:
    probes before the first decision. gain: the share of a step's time that prefetching has to save, beyond `sure`
    standard errors, to be switched on; where steps wait less than that for experts it is not tried.
    """

    block: int = 4
    settle: int = 2
    period: int = 64
    first_period: int = 20
    budget: float = 0.003
    compared: int = 12
    memory: int = 48
    least: int = 8
    gain: float = 0.01
    sure: float = 2.0


class PrefetchJudge:
    """Switches prefetching on where steps are shorter with it than without, and off where they are not.

    Steps are judged by kind: by the number of their rows, and by whether a core was free. In each kind, some steps in a
    row try the choice that is not in use; they are compared with the steps just before, so that neither a cold start
    nor a growing context counts for or against prefetching.
    """

    def __init__(self, rules: JudgeRules = JudgeRules()) -> None:
        self._rules = rules
        self._kinds: dict[tuple[int, bool], _Kind] = {}
        self._current: _Kind | None = None

    def begin_step(self, num_rows: int, *, has_free_core: bool) -> bool:
        """Return True if this step prefetches."""
        kind = (size_class(num_rows), has_free_core)
        self._current = self._kinds.setdefault(kind, _Kind())
        return self._current.begins(self._rules)

    def end_step(self, seconds: float, waited: float) -> None:
        """Record the duration of the step that began last. A step that failed has no end.

        waited: no less than the seconds in which the step waited for experts.
        """
        assert self._current is not None
        self._current.ends(seconds, waited, self._rules)
        self._current = None

    def gains(self) -> list[tuple[int, bool, float]]:
        """Return for each kind of step its least number of rows, whether a core was free, and the share of a step's
        time that prefetching saves; negative where it costs time."""
        return [
            (least_rows(size), free, 1 - exp(kind.mean))
            for (size, free), kind in sorted(self._kinds.items())
            if kind.num_probes
        ]


def size_class(num_rows: int) -> int:
    """Return the number of the class of steps with about `num_rows` rows."""
    if num_rows <= _EXACT_ROWS:
        return num_rows
    return _EXACT_ROWS + int(2 * log(num_rows / _EXACT_ROWS, 2) + 1e-9)


def least_rows(size: int) -> int:
    if size <= _EXACT_ROWS:
        return size
    return -int(-_EXACT_ROWS * 2 ** ((size - _EXACT_ROWS) / 2) // 1)


@dataclass(slots=True)
class _Kind:
    """mean, variance: of the logarithm of a step's duration with prefetching over that without, from `num_probes`."""

    is_on: bool = False
    mean: float = 0.0
    variance: float = 0.0
    num_probes: int = 0
    # The latest steps of the choice in use: their durations, and how long they waited for experts.
    usual: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    # The steps of the probe that is under way.
    probe: list[float] = field(default_factory=list)
    is_probing: bool = False
    wait: int = 0
    # Steps since the last change of the choice.
    num_settled: int = 0
    # The seconds that probes of prefetching may lose; below 0 as long as earlier ones have lost more.
    allowance: float = 0.0

    def begins(self, rules: JudgeRules) -> bool:
        if not self.is_probing and self.wait <= 0 and len(self.usual) >= rules.compared:
            self.is_probing = self.is_on or self._may_pay(rules)
            if self.is_probing:
                self.num_settled = 0
        return self.is_on is not self.is_probing

    def ends(self, seconds: float, waited: float, rules: JudgeRules) -> None:
        if self.usual:
            seconds = min(seconds, _LONGEST * sum(self.usual) / len(self.usual))
        self.num_settled += 1
        if not self.is_probing:
            self.wait -= 1
            self.allowance = min(self.allowance + rules.budget * seconds, seconds)
            if self.num_settled > rules.settle:
                self.usual.append(seconds)
                self.waits.append(waited)
                del self.usual[: -rules.compared], self.waits[: -rules.compared]
            return
        self.probe.append(seconds)
        if len(self.probe) == rules.block:
            self._count(rules)
            self._decide(rules)

    def _may_pay(self, rules: JudgeRules) -> bool:
        return self.allowance >= 0 and sum(self.waits) >= rules.gain * sum(self.usual)

    def _count(self, rules: JudgeRules) -> None:
        usual, compared = sum(self.usual) / len(self.usual), self.probe[rules.settle :]
        if not self.is_on:
            self.allowance -= sum(self.probe) - len(self.probe) * usual
        ratio = log(sum(compared) / len(compared)) - log(usual)
        self.probe.clear()
        self.is_probing, self.num_settled = False, 0
        self.num_probes += 1
        share = max(1 / self.num_probes, 1 / rules.memory)
        off = (-ratio if self.is_on else ratio) - self.mean
        self.mean += share * off
        self.variance = (1 - share) * (self.variance + share * off * off)

    def _decide(self, rules: JudgeRules) -> None:
        was_on = self.is_on
        if self.num_probes >= rules.least:
            error = sqrt(self.variance / min(self.num_probes, rules.memory))
            self.is_on = self.mean < 0 if was_on else self.mean + rules.sure * error < -rules.gain
        if self.is_on is not was_on:
            self.usual.clear()
            self.waits.clear()
        self.wait = (rules.period if self.is_on else rules.first_period) - rules.block
