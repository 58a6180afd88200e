"""Predictors by name, as operators give them: sources joined with `+`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experts.prediction.combined import CombinedSource
from experts.prediction.history_sources import ActivationMatrixSource, SignatureSource
from experts.prediction.predictor import Source, StepPredictor, Tap
from experts.prediction.recall import CountedSteps, RankedSource, RecallSample
from experts.prediction.route_source import RouteSource
from experts.prediction.sources import AffinitySource, GateSource, LearntAffinity, PopularitySource
from experts.routing.statistics import StatisticsSpec

_SOURCES: dict[str, Callable[[LearntAffinity], Source]] = {
    "popularity": PopularitySource,
    "affinity": AffinitySource,
    "routes": RouteSource,
    "signature": SignatureSource,
    "gate-early": lambda learnt: GateSource(Tap.EARLY, learnt.statistics.spec.top_k),
    "gate-late": lambda learnt: GateSource(Tap.LATE, learnt.statistics.spec.top_k),
    "activation-matrix": lambda learnt: ActivationMatrixSource(
        learnt.statistics.spec.num_layers, learnt.statistics.spec.num_experts, learnt.statistics.spec.top_k
    ),
}
SOURCE_NAMES = tuple(_SOURCES)
# Those that remember what a request did before.
_FOLLOW_REQUESTS = frozenset({"signature", "activation-matrix"})
# What several sources together are called where their recall is told.
COMBINED = "combined"


def source_names(choice: str) -> list[str]:
    """The sources of a choice like `gate-early+affinity`. ValueError for an unknown or repeated one."""
    names = choice.split("+")
    for name in names:
        if name not in _SOURCES:
            raise ValueError(f"there is no predictor {name!r}; there are {', '.join(SOURCE_NAMES)}")
    if len(set(names)) != len(names):
        raise ValueError(f"{choice!r} names a predictor twice")
    return names


def taps_of(choice: str) -> frozenset[Tap]:
    """The taps that the predictor of a choice listens to; nobody needs to compute others."""
    return frozenset(tap for tap in Tap if f"gate-{tap.value}" in source_names(choice))


def follows_requests(choice: str) -> bool:
    """Whether what is said of a token, after a layer, depends on the tokens before it, but for what all have learnt."""
    return not _FOLLOW_REQUESTS.isdisjoint(source_names(choice))


def only_gates(choice: str) -> bool:
    """Whether nothing is said before a gate was heard, and nothing but what gates say."""
    return all(name.startswith("gate-") for name in source_names(choice))


def make_source(choice: str, learnt: LearntAffinity) -> CombinedSource:
    """The calibrated source behind the predictor of a choice."""
    return _combined(_sources(choice, learnt), learnt.statistics.spec)


def make_predictor(
    choice: str, learnt: LearntAffinity, recall: RecallSample | None = None
) -> tuple[StepPredictor, dict[str, Source]]:
    """The predictor of a choice, and its sources by name.

    Probabilities are calibrated online, also those of a single source. Statistics are learnt by whoever owns them;
    `learnt.step_done` is the caller's to call. recall: counts what each source and, of several, `COMBINED` ranks first.
    """
    return open_predictor(choice, learnt, recall)[:2]


def open_predictor(
    choice: str, learnt: LearntAffinity, recall: RecallSample | None = None
) -> tuple[StepPredictor, dict[str, Source], CombinedSource]:
    """As `make_predictor`, and what brings its sources together."""
    spec = learnt.statistics.spec
    sources = _sources(choice, learnt)
    if recall is None:
        combined = _combined(sources, spec)
        return StepPredictor(combined, spec.num_experts), sources, combined
    combined = _combined({name: RankedSource(name, source, recall) for name, source in sources.items()}, spec)
    whole: Source = combined if len(sources) == 1 else RankedSource(COMBINED, combined, recall)
    return StepPredictor(CountedSteps(whole, recall), spec.num_experts), sources, combined


def _sources(choice: str, learnt: LearntAffinity) -> dict[str, Source]:
    return {name: _SOURCES[name](learnt) for name in source_names(choice)}


def _combined(sources: Mapping[str, Source], spec: StatisticsSpec) -> CombinedSource:
    return CombinedSource(list(sources.values()), spec.num_layers, spec.max_distance)
