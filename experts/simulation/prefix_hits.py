"""Requests whose prefix is cached, replayed with and without what is known of its experts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from experts.memory.eviction import POLICIES
from experts.memory.residency_control import ResidencyControl
from experts.prediction.choice import make_predictor, taps_of
from experts.prediction.history_sources import SignatureSource
from experts.prediction.sources import LearntAffinity
from experts.prefetch.planning import PrefetchPlanner
from experts.prefetch.prefix_warmth import PrefixWarmth
from experts.routing.request_profiles import RequestProfiles
from experts.routing.signatures import decode_signature, encode_signature
from experts.routing.statistics import RoutingStatistics, StatisticsSpec
from experts.routing.traces import RoutingTrace
from experts.simulation.replay import Simulation
from experts.simulation.setup import SimulationSetup

_WARM_UP_TOKENS = 256


class Signature(Enum):
    """Which one a request is admitted with."""

    NONE = "none"
    OWN = "own"
    OTHER = "that of another request's prefix"


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Each request finds `num_prefix` tokens cached, computes `num_behind` in its first step and decodes `num_decodes`.

    Requests that are shorter are left out.
    """

    num_prefix: int
    num_behind: int
    num_decodes: int = 8

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_behind + self.num_decodes


@dataclass(frozen=True, slots=True)
class HitStall:
    """Seconds waited for experts, by step from the first on, summed over requests."""

    num_requests: int
    by_step: NDArray[np.float64]


def replay_hits(
    learning: RoutingTrace, held_out: RoutingTrace, setup: SimulationSetup, hits: PrefixHits, signature: Signature
) -> HitStall:
    """The held-out requests one after the other, on slots and predictors that `learning` has warmed.

    A step of several tokens is taken to last as long as one of a single token: the least time to load ahead in.
    """
    simulation, warmth, profiles = _simulation(learning, setup)
    for row in range(min(_WARM_UP_TOKENS, len(learning.requests))):
        simulation.step(learning, np.array([row]))
    rows_of = [np.flatnonzero(held_out.requests == request) for request in np.unique(held_out.requests)]
    rows_of = [rows for rows in rows_of if len(rows) >= hits.num_tokens]
    signatures = [_signature(held_out, rows[: hits.num_prefix]) for rows in rows_of]
    if signature is Signature.OTHER:
        signatures = signatures[1:] + signatures[:1]
    by_step = np.zeros(1 + hits.num_decodes)
    for rows, rates in zip(rows_of, signatures, strict=True):
        request = int(held_out.requests[rows[0]])
        if signature is not Signature.NONE:
            warmth.remember(request, rates)
            if profiles is not None:
                profiles.seed(request, rates, hits.num_prefix)
        first, last = hits.num_prefix + hits.num_behind, hits.num_tokens
        for step, computed in enumerate([rows[hits.num_prefix : first], *rows[first:last, None]]):
            before = simulation.exposed_stall
            simulation.step(held_out, computed)
            by_step[step] += simulation.exposed_stall - before
        simulation.end([request])
    return HitStall(len(rows_of), by_step)


def _simulation(
    learning: RoutingTrace, setup: SimulationSetup
) -> tuple[Simulation, PrefixWarmth, RequestProfiles | None]:
    """And the profiles that its predictor goes by, if it does."""
    num_layers, _, top_k = learning.ids.shape
    num_experts = learning.num_experts
    control = ResidencyControl(
        [setup.num_slots(num_experts, top_k)] * num_layers,
        num_experts,
        setup.expert_bytes,
        lambda _: POLICIES[setup.policy](num_experts),
    )
    warmth = PrefixWarmth(control, num_experts)
    if setup.predictor is None:
        return Simulation(control, setup.expert_bytes, setup.link, setup.timing, warmth=warmth), warmth, None
    learnt = LearntAffinity(RoutingStatistics(StatisticsSpec(num_layers, num_experts, top_k)))
    predictor, sources = make_predictor(setup.predictor, learnt)
    planner = PrefetchPlanner(predictor, control, setup.expert_bytes, setup.rules)
    taps = taps_of(setup.predictor)
    simulation = Simulation(
        control, setup.expert_bytes, setup.link, setup.timing, predictor, planner, learnt, taps, warmth
    )
    source = sources.get("signature")
    return simulation, warmth, source.profiles if isinstance(source, SignatureSource) else None


def _signature(trace: RoutingTrace, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """As it comes out of the cache: [L, E]."""
    counts = [np.bincount(ids[rows].reshape(-1), minlength=trace.num_experts) for ids in trace.ids]
    rates = np.stack(counts).astype(np.float32) / np.float32(len(rows))
    return decode_signature(encode_signature(rates), *rates.shape)
