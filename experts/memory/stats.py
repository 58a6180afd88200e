"""What an expert memory tells of itself. Pure, and plain enough to travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from experts.memory.residency_control import ResidencyCounters
from experts.prediction.recall import SourceRecall


@dataclass(frozen=True, slots=True)
class ExpertMemoryStats:
    """Since the start: the counters of residency, and what they cost.

    stall_seconds: the computation waited for experts. misses_by_tier: by name of the tier they came from. resident:
    the experts that are ready now, layer by layer. num_in_flight: loads under way now. predictor_seconds: computation
    spent on predictions. recall: of each source that predicts, of a sample of the steps.
    """

    counters: ResidencyCounters
    stall_seconds: float
    predictor_seconds: float
    misses_by_tier: dict[str, int]
    num_in_flight: int
    resident: list[list[int]]
    recall: list[SourceRecall] = field(default_factory=list)
