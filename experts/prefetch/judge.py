"""Whether prefetches pay, by what steps with and without them waited."""

from __future__ import annotations

from experts.memory.expert_memory import ExpertMemory
from experts.prefetch.switch import PrefetchSwitch

# Steps without prefetches, to know what waiting costs then.
_REFERENCE_STEPS = 32


class PrefetchJudge:
    """Measures what steps with prefetches wait less than steps without, and has the switch decide.

    Waiting without prefetches is known per expert that a step needs, from the first steps and from the switch's rests.
    """

    def __init__(self, memory: ExpertMemory, switch: PrefetchSwitch) -> None:
        self._memory = memory
        self._switch = switch
        self._reference_left = _REFERENCE_STEPS
        self._stall_per_expert: float | None = None
        self._on = False
        self._before = (0.0, 0.0, 0)

    def begin_step(self) -> bool:
        """Whether to prefetch in this step."""
        self._on = self._reference_left == 0 and self._switch.on
        self._before = self._memory.costs()
        return self._on

    def end_step(self) -> None:
        stall, prediction, num_experts = (
            after - before for after, before in zip(self._memory.costs(), self._before, strict=True)
        )
        if not self._on:
            self._refer(stall / max(num_experts, 1))
        if self._reference_left > 0:
            self._reference_left -= 1
        else:
            assert self._stall_per_expert is not None
            # In seconds: what the step waited less than it would have without, against the time of predicting.
            self._switch.step_done(gain=self._stall_per_expert * num_experts - stall, cost=prediction)

    def _refer(self, stall_per_expert: float) -> None:
        mean = stall_per_expert if self._stall_per_expert is None else self._stall_per_expert
        self._stall_per_expert = mean + (stall_per_expert - mean) / _REFERENCE_STEPS
