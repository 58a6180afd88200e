"""Prefetching experts while serving: who predicts, and what a plan tells about the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from experts.expert_memory import ExpertMemory
from experts.gates import (
    FittedGates,
    GatedBlock,
    GatePreview,
    GatesAhead,
    load_fitted_gates,
    save_fitted_gates,
)
from experts.lookahead import GateLookahead, PrefetchJudge
from experts.observer import StepObserver
from experts.predictor import Predictor, Tap
from experts.predictors import LearntAffinity, SignatureSource, open_predictor, taps_of
from experts.prefetch_planning import PrefetchPlanner, PrefetchRules, PrefetchSwitch
from experts.prefetcher import HomeRecall, LayerListener, Prefetcher, PrefixListener, RankPrefetcher
from experts.prefix_warmth import PrefixWarmth
from experts.rank_predictor import RankPredictor, RankShare
from experts.residency import Affinity, EvictionPolicy, ResidencyControl
from experts.routing import RoutingStatistics, StatisticsSpec
from experts.signatures import RequestProfiles
from moeserve.config import ConfigError, cache_root
from moeserve.experts.settings import statistics_key
from moeserve.model.spec import DecoderSpec
from moeserve.plan import StepPlan, StepResult

_MAX_DISTANCE = 3
# Layers that affinity looks back.
_HISTORY = 6
# A request that no plan has named for so many steps is over, or waits so long that it is a new one.
_FORGOTTEN_AFTER = 64


class ResidentLayers(Protocol):
    """The experts of a model of which only some are in the fast tier, on a CPU or on a GPU."""

    @property
    def memory(self) -> ExpertMemory: ...

    @property
    def control(self) -> ResidencyControl: ...

    @property
    def policies(self) -> Sequence[EvictionPolicy]: ...

    @property
    def layers(self) -> Mapping[int, object]: ...


class GatedDecoder(Protocol):
    """A decoder whose gates can be asked."""

    spec: DecoderSpec

    def gated_blocks(self) -> Sequence[tuple[GatedBlock, Tensor]]:
        """The blocks with experts, and the weight [H] of the norm in front of each."""


def start_prefetching(
    choice: str,
    experts: ResidentLayers,
    decoder: GatedDecoder,
    share: RankShare | None = None,
    fitted: FittedGates | None = None,
) -> PrefixListener | None:
    """Who loads ahead, to be told what the layers compute. choice: `--expert-prefetch`.

    share: of a rank of several, what it holds and has to do. fitted: what `moeserve experts fit` found, which takes
    the place of the gates unless the choice is `gate`. Returns None where nothing can be predicted: without experts,
    and by gates where one layer has them, for none comes after it. Raises ConfigError for a choice that needs fitted
    gates where there are none.
    """
    if choice == "off" or decoder.spec.moe is None:
        return None
    if choice == "fitted" and fitted is None:
        raise ConfigError("--expert-prefetch fitted: no gates are fitted to this model; run moeserve experts fit.")
    listener: LayerListener
    profiles: RequestProfiles | None = None
    if choice in ("auto", "gate", "fitted"):
        if len(decoder.spec.moe_layers) == 1:
            return None
        preview = _preview(decoder, Tap.EARLY, None if choice == "gate" else fitted)
        judge = PrefetchJudge(experts.memory, PrefetchSwitch()) if choice == "auto" else None
        listener = _believing_gates(experts, preview, decoder.spec.moe.gate.top_k, judge, share)
    else:
        num_layers = len(experts.layers)
        gates = {tap: GatesAhead(_preview(decoder, tap, fitted), num_layers) for tap in taps_of(choice)}
        listener, profiles = _learning(choice, experts, decoder.spec, gates, share)
    here = None if share is None else share.experts_here
    return PrefixListener(
        listener, experts.memory, PrefixWarmth(experts.control, decoder.spec.moe.num_experts, here), profiles
    )


def _preview(decoder: GatedDecoder, tap: Tap, fitted: FittedGates | None) -> GatePreview:
    blocks, norms = zip(*decoder.gated_blocks(), strict=True)
    return GatePreview(blocks, norms, min(_MAX_DISTANCE, len(blocks) - 1), tap, fitted)


def _believing_gates(
    experts: ResidentLayers,
    preview: GatePreview,
    top_k: int,
    judge: PrefetchJudge | None,
    share: RankShare | None,
) -> LayerListener:
    memory, control = experts.memory, experts.control
    if share is None:
        return GateLookahead(memory, control, preview, top_k, judge)
    lookahead = GateLookahead(memory, control, preview, top_k, judge, share.experts_here)
    return HomeRecall(lookahead, GatesAhead(preview, len(experts.layers)), memory.recall)


def _learning(
    choice: str,
    experts: ResidentLayers,
    model: DecoderSpec,
    gates: Mapping[Tap, GatesAhead],
    share: RankShare | None,
) -> tuple[LayerListener, RequestProfiles | None]:
    """And the profiles that its predictor goes by, if it does."""
    assert model.moe is not None
    spec = StatisticsSpec(len(experts.layers), model.moe.num_experts, model.moe.gate.top_k, max_distance=_HISTORY)
    learnt = LearntAffinity(RoutingStatistics(spec))
    predictor, sources, combined = open_predictor(choice, learnt, experts.memory.recall)
    signature = sources.get("signature")
    profiles = signature.profiles if isinstance(signature, SignatureSource) else None
    if share is None:
        return _prefetcher(experts, predictor, learnt, gates), profiles
    of_rank = RankPredictor(predictor, combined, learnt, share)
    prefetcher = _prefetcher(experts, of_rank, learnt, gates)
    return RankPrefetcher(experts.memory, prefetcher, of_rank, gates.get(Tap.EARLY)), profiles


def _prefetcher(
    experts: ResidentLayers, predictor: Predictor, learnt: LearntAffinity, gates: Mapping[Tap, GatesAhead]
) -> Prefetcher:
    rated = [policy for policy in experts.policies if isinstance(policy, Affinity)]
    rules = PrefetchRules(max_distance=_MAX_DISTANCE)
    planner = PrefetchPlanner(predictor, experts.control, experts.memory.slot_bytes, rules, rated or None)
    return Prefetcher(experts.memory, predictor, planner, learnt, gates)


class PrefetchSteps(StepObserver[StepPlan, StepResult]):
    """Tells a prefetcher where steps begin and end, whose tokens they compute, behind which prefix.

    On a GPU gates are heard while a step is launched, for the host waits for them.
    """

    def __init__(self, prefetcher: PrefixListener) -> None:
        self._prefetcher = prefetcher
        self._number_of: dict[str, int] = {}
        self._last_step: dict[str, int] = {}
        self._num_seen = 0
        self._num_steps = 0

    def begin(self, plan: StepPlan) -> None:
        self._num_steps += 1
        numbers = [self._number(chunk.request_id) for chunk in plan.chunks]
        for chunk, number in zip(plan.chunks, numbers, strict=True):
            if chunk.annotation is not None:
                self._prefetcher.recall(number, chunk.annotation, chunk.start)
        counts = np.array([len(chunk.token_ids) for chunk in plan.chunks], np.int64)
        token_ids = np.concatenate(
            [np.asarray(chunk.token_ids, np.int64) for chunk in plan.chunks] or [np.empty(0, int)]
        )
        self._prefetcher.begin_step(token_ids, np.repeat(np.asarray(numbers, np.int64), counts))

    def launched(self) -> None:
        self._prefetcher.end_step(self._forget())

    def _number(self, request_id: str) -> int:
        self._last_step[request_id] = self._num_steps
        if request_id not in self._number_of:
            self._number_of[request_id] = self._num_seen
            self._num_seen += 1
        return self._number_of[request_id]

    def _forget(self) -> list[int]:
        """Numbers of requests that are over."""
        if self._num_steps % _FORGOTTEN_AFTER:
            return []
        gone = [name for name, step in self._last_step.items() if self._num_steps - step >= _FORGOTTEN_AFTER]
        for name in gone:
            del self._last_step[name]
        return [self._number_of.pop(name) for name in gone]


# Where the gates fitted to a model are kept: in the cache, by the checkpoint's folder and configuration.


def fitted_gates_path(directory: Path) -> Path:
    """Of the checkpoint in `directory`, whether there is a file or not."""
    return cache_root() / "gates" / f"{directory.resolve().name}-{statistics_key(directory)[:16]}.safetensors"


def find_fitted_gates(directory: Path) -> FittedGates | None:
    """Those of the checkpoint in `directory`. Raises FittedGatesError for a file that cannot be used."""
    path = fitted_gates_path(directory)
    return load_fitted_gates(path, statistics_key(directory)) if path.exists() else None


def keep_fitted_gates(directory: Path, fitted: FittedGates) -> Path:
    """Has `find_fitted_gates` find them from now on; returns the file."""
    path = fitted_gates_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_fitted_gates(path, fitted, statistics_key(directory))
    return path
