"""Prefetching experts while serving: the observers that the settings ask for, and the gates fitted to a model.

Fitted gates lie in the cache, in a file named by the checkpoint's folder and configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from experts.memory.eviction import Affinity
from experts.observer import PlannedStep, StepObserver
from experts.prediction.judge import PrefetchJudge
from experts.prediction.lookahead import GateLookahead
from experts.prediction.planning import PrefetchPlanner, PrefetchRules
from experts.prediction.prefetcher import GateRecall, Prefetcher, PrefetchObserver, RankPrefetcher
from experts.routing.choices import RoutingStatistics, StatisticsSpec
from experts.routing.files import Tap
from experts.routing.gates import FittedGates, GatedBlock, GatePreview, GatesAhead, load_fitted_gates, save_fitted_gates
from experts.routing.predictors import AFFINITY_SPAN, MAX_DISTANCE, AffinityPredictor, LearntAffinity
from moeserve.config import ConfigError, cache_root
from moeserve.engine.experts.resident_model import ResidentModel
from moeserve.engine.experts.settings import statistics_key
from moeserve.model.spec import ModelSpec


class GatedDecoder(Protocol):
    """A decoder that gives access to its gates."""

    @property
    def spec(self) -> ModelSpec: ...

    def gated_blocks(self) -> Sequence[tuple[GatedBlock, Tensor]]:
        """Return the blocks with experts, each with the weight [H] of the norm before it."""


@dataclass(frozen=True, slots=True)
class Prefetching:
    """asks: the observer that requests experts. observers: all observers of prefetching, in order, with `asks`."""

    asks: PrefetchObserver
    observers: Sequence[StepObserver[PlannedStep, object]]


def start_prefetching(
    choice: str,
    experts: ResidentModel[Any],
    decoder: GatedDecoder,
    here: Callable[[int], Collection[int]] | None = None,
    fitted: FittedGates | None = None,
) -> Prefetching | None:
    """Make the observers that load experts ahead on a rank. choice: `--expert-prefetch`.

    here: returns the experts of a layer that this rank among several holds now, None on a single rank. fitted: the
    gates of `moeserve experts fit`, used in place of the model's gates unless the choice is `gate`. Return None where
    nothing can be predicted: without experts, or by gates if only one layer has experts. Raise ConfigError for a choice
    that needs fitted gates if there are none.
    """
    moe, memory = decoder.spec.moe, experts.memory
    if choice == "off" or moe is None:
        return None
    if choice == "fitted" and fitted is None:
        raise ConfigError("--expert-prefetch fitted: no gates are fitted to this model; run moeserve experts fit.")
    asks: PrefetchObserver
    observers: list[StepObserver[PlannedStep, object]] = []
    if choice == "affinity":
        observers.append(asks := _affinity_prefetcher(experts, decoder.spec, here))
    else:
        if len(decoder.gated_blocks()) < 2:
            return None
        has_shared = here is None and moe.shared is not None
        tap = Tap.SHARED if has_shared else Tap.EARLY
        preview = _make_preview(decoder, tap, None if choice == "gate" else fitted)
        judge = PrefetchJudge() if choice == "auto" else None
        observers.append(asks := GateLookahead(memory, experts.control, preview, moe.gate.top_k, judge, here))
        if here is not None:
            observers.append(GateRecall(asks, GatesAhead(preview, len(experts.layers)), memory.recall))
    return Prefetching(asks, observers)


def _make_preview(decoder: GatedDecoder, tap: Tap, fitted: FittedGates | None) -> GatePreview:
    blocks, norms = zip(*decoder.gated_blocks(), strict=True)
    # Behind the shared expert the next layer is foreseen best, and a load begins early enough to save most of the wait.
    max_distance = 1 if tap is Tap.SHARED else MAX_DISTANCE
    return GatePreview(blocks, norms, min(max_distance, len(blocks) - 1), tap, fitted)


def _affinity_prefetcher(
    experts: ResidentModel[Any], model: ModelSpec, here: Callable[[int], Collection[int]] | None
) -> Prefetcher:
    assert model.moe is not None
    spec = StatisticsSpec(len(experts.layers), model.moe.num_experts, model.moe.gate.top_k, max_distance=AFFINITY_SPAN)
    learnt = LearntAffinity(RoutingStatistics(spec))
    predictor = AffinityPredictor(learnt, experts.memory.recall, experts_here=here)
    rated = [policy for policy in experts.policies if isinstance(policy, Affinity)]
    rules = PrefetchRules(max_distance=MAX_DISTANCE)
    planner = PrefetchPlanner(predictor, experts.control, experts.memory.slot_bytes, rules, rated or None)
    return (Prefetcher if here is None else RankPrefetcher)(experts.memory, predictor, planner, learnt)


def fitted_gates_path(directory: Path) -> Path:
    """Return the path for the fitted gates of the checkpoint in `directory`; the file need not exist."""
    return cache_root() / "gates" / f"{directory.resolve().name}-{statistics_key(directory)[:16]}.safetensors"


def find_fitted_gates(directory: Path) -> FittedGates | None:
    """Load the fitted gates of a checkpoint, None without a file. Raise FittedGatesError for an unusable file."""
    path = fitted_gates_path(directory)
    return load_fitted_gates(path, statistics_key(directory)) if path.exists() else None


def keep_fitted_gates(directory: Path, fitted: FittedGates) -> Path:
    """Save the gates where `find_fitted_gates` looks, and return the path."""
    path = fitted_gates_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_fitted_gates(path, fitted, statistics_key(directory))
    return path
