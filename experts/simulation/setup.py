"""Simulations by their parameters: learn and warm up on some requests, measure on others. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from experts.memory.eviction import POLICIES, Affinity, EvictionPolicy, Static
from experts.memory.eviction import POLICY_NAMES as SERVED
from experts.memory.residency_control import ResidencyControl
from experts.prediction.choice import make_predictor, taps_of
from experts.prediction.predictor import Predictor
from experts.prediction.sources import LearntAffinity
from experts.prefetch.planning import PrefetchPlanner, PrefetchRules
from experts.routing.statistics import RoutingStatistics, StatisticsSpec
from experts.routing.traces import RoutingTrace
from experts.simulation.belady import Belady
from experts.simulation.foretold import Foretold, ForetoldPredictor
from experts.simulation.link_model import LinkModel
from experts.simulation.replay import LayerTiming, Simulation, SimulationResult, steps_of

POLICY_NAMES = (*SERVED, "belady")
_REFRESH_STEPS = 128
# Layers that affinity looks back.
_HISTORY = 6


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """residency: share of a layer's experts that its slots hold, at least a token's. predictor: as
    `experts.prediction.choice.make_predictor` takes it, None for demand loads alone. num_streams: requests at a time.
    """

    residency: float
    policy: str
    link: LinkModel
    timing: LayerTiming
    expert_bytes: int
    predictor: str | None = None
    rules: PrefetchRules = field(default_factory=PrefetchRules)
    num_streams: int = 1

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise ValueError(f"there is no policy {self.policy!r}; there are {', '.join(POLICY_NAMES)}")
        if not 0 < self.residency <= 1:
            raise ValueError(f"a residency of {self.residency} is no share between 0 and 1")

    @property
    def beta(self) -> float:
        """Time to load an expert over time to compute a layer: the figure that compares machines."""
        return self.link.load_seconds(self.expert_bytes) / self.timing.total

    def num_slots(self, num_experts: int, top_k: int) -> int:
        return max(round(self.residency * num_experts), top_k)


def link_for(beta: float, expert_bytes: int, timing: LayerTiming, num_chunks: int = 8) -> LinkModel:
    """A link without latency on which an expert takes `beta` times as long as a layer."""
    return LinkModel(expert_bytes / (beta * timing.total), chunk_bytes=max(expert_bytes // num_chunks, 1))


def simulate(
    learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup, foretold: Foretold | None = None
) -> SimulationResult:
    """What the held-out requests took. Slots and predictors are warm from the others, and go on learning.

    Each token is predicted before it is learnt. The policies `static` (from the load of `learning`) and `belady` (from
    the future) are told what no others know.

    foretold: what the setup's predictor says of `learning` and `held_out`, if it was computed before.
    """
    num_layers, _, top_k = learning.ids.shape
    policies = _policies(learning, held_out, setup)
    control = ResidencyControl(
        [setup.num_slots(learning.num_experts, top_k)] * num_layers,
        learning.num_experts,
        setup.expert_bytes,
        policies.__getitem__,
    )
    if setup.predictor is None:
        simulation = Simulation(control, setup.expert_bytes, setup.link, setup.timing)
    else:
        predictor, learnt = _predictor(learning, setup.predictor, setup.rules.max_distance, foretold)
        rated = [policy for policy in policies if isinstance(policy, Affinity)]
        planner = PrefetchPlanner(predictor, control, setup.expert_bytes, setup.rules, rated or None)
        simulation = Simulation(
            control, setup.expert_bytes, setup.link, setup.timing, predictor, planner, learnt, taps_of(setup.predictor)
        )
    simulation.replay(learning, setup.num_streams)
    return simulation.replay(held_out, setup.num_streams)


def _predictor(
    trace: RoutingTrace, choice: str, max_distance: int, foretold: Foretold | None
) -> tuple[Predictor, LearntAffinity | None]:
    """And what it learns from, if it still has to."""
    if foretold is not None:
        if (foretold.choice, foretold.max_distance) != (choice, max_distance):
            raise ValueError(f"{foretold.choice} was foretold, and {choice} is to be simulated")
        return ForetoldPredictor(foretold), None
    spec = StatisticsSpec(len(trace.ids), trace.num_experts, trace.ids.shape[2], max_distance=_HISTORY)
    learnt = LearntAffinity(RoutingStatistics(spec), _REFRESH_STEPS)
    return make_predictor(choice, learnt)[0], learnt


def _policies(learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup) -> list[EvictionPolicy]:
    """One for each layer."""
    make: Callable[[int], EvictionPolicy]
    if setup.policy == "static":
        load = learning.load().tolist()

        def make(layer: int) -> EvictionPolicy:
            return Static(load[layer])
    elif setup.policy == "belady":
        rows = [(part, rows) for part in (learning, held_out) for rows in steps_of(part, setup.num_streams)]

        def make(layer: int) -> EvictionPolicy:
            return Belady([np.unique(part.ids[layer, chosen]).tolist() for part, chosen in rows])
    else:

        def make(layer: int) -> EvictionPolicy:
            return POLICIES[setup.policy](learning.num_experts)

    return [make(layer) for layer in range(len(learning.ids))]
