"""Experts known ahead: recall on recorded text, and the stall that prefetching saves, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts.figures import Amount, Figure, Progress, at_least, at_most, over_seeds, within
from benchmarks.experts.traces import (
    BOUND,
    BUILDS,
    FITTED,
    PLAIN,
    Build,
    halves,
    perplexity,
    recorded_trace,
    with_controls,
)
from experts.memory.residency import POLICIES
from experts.prediction.prefix_warmth import PrefixWarmth
from experts.routing.files import GateGuesses, RoutingTrace, Tap
from experts.routing.signatures import decode_signature, encode_signature
from experts.simulator import (
    POPULARITY,
    LayerTiming,
    Simulation,
    SimulationResult,
    SimulationSetup,
    control_of,
    link_for,
    loads_ahead,
    recall_figures,
    simulate,
)
from moeserve.engine.experts.simulate import first_requests

_AFFINITY, _EARLY, _LATE = "affinity", "gate-early", "gate-late"
_GATES = (_EARLY, _LATE)
# By the fit of the trace's gates: the predictors, and up to which distance they are judged.
_PREDICTORS = {
    PLAIN: ((POPULARITY, _AFFINITY, *_GATES), 3),
    FITTED: (_GATES, 3),
    BOUND: (_GATES, 1),
}
_RECALL_TARGET, _RATIO_TARGET = at_least(0.80), at_least(1.5)
# A predictor may be a little better than popularity by chance, and not more.
_RECALL_NOTHING = at_most(1.05)
# Tokens, of four or five requests: enough for all targets to be met or missed, and none to stay open.
_HELD_OUT = 500

_BASELINE = "demand loads alone, LFRU"
_BETAS = (0.5, 1.0, 2.0)
_RESIDENCY = 0.5
# Only their ratio counts: beta sets the link.
_TIMING = LayerTiming(attention=0.5e-3, experts=0.5e-3)
_EXPERT_BYTES = 2**20
# Two or three requests to learn from, and as many held out. The hundred simulations of a build so take two minutes.
_TOKENS = 512
_WARM_UP_TOKENS = 256
_SURE = 20.0
_SAVED, _WASTED, _ORACLE = "stall saved", "bytes moved for nothing", "with an oracle for the gate"

_PREFIX_BETA = 1.0
_PREFIX_RESIDENCIES = (0.25, 0.5)
# None: demand loads, so that the signature is all there is.
_PREFIX_PREDICTORS = {"demand loads": None, "the gate": _EARLY}
# Tokens that are computed behind the prefix before the first decode.
_BEHIND = (1, 8)
_FIRST, _EIGHT = "first decode step", "first eight decode steps"


def recall(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Share of a layer's experts that is predicted one to three layers before, on real text."""
    for build in BUILDS:
        traces = {fit: recorded_trace(build, amount, progress, fit) for fit in _PREDICTORS}
        progress(build.name)
        note = f"perplexity {perplexity(build, amount, progress):.2f} on these documents"
        values = over_seeds(amount.seeds, partial(recalls, traces, 2 * amount.of(_HELD_OUT, 80)))
        for name, of_name in values.items():
            yield _recall_figure(build, name, of_name, note)


def _recall_figure(build: Build, name: str, values: tuple[float, ...], note: str) -> Figure:
    is_ratio = "/" in name
    limit = None
    if "control" in name:
        limit = _RECALL_NOTHING
    elif is_ratio:
        limit = _RATIO_TARGET
    elif name.endswith(" d=1") and name.split()[0] in _GATES and BOUND not in name:
        limit = _RECALL_TARGET
    baseline = POPULARITY if is_ratio else f"chance {build.top_k / build.experts:.3f}"
    return Figure(f"{build.name}, {name}", baseline, values, "x" if is_ratio else "", limit, note=note)


def recalls(traces: Mapping[str, RoutingTrace], max_tokens: int, seed: int) -> dict[str, float]:
    """Return recall on held-out requests by predictor and distance, and affinity over popularity; also in controls.

    traces: of the same routing, by the fit of their gates.
    """
    found = {}
    for fit, trace in traces.items():
        predictors, distance = _PREDICTORS[fit]
        for (predictor, ahead), value in _recalls(trace, max_tokens, seed, predictors, distance).items():
            found[f"{predictor}{f' {fit}' * bool(fit)} d={ahead}"] = value
    found[f"{_AFFINITY} / {POPULARITY} d=1"] = found[f"{_AFFINITY} d=1"] / found[f"{POPULARITY} d=1"]
    for control, routing in with_controls(traces[PLAIN], seed):
        if control:
            of_control = _recalls(routing, max_tokens, seed, (POPULARITY, _AFFINITY, _EARLY), 1)
            best = max(of_control[_AFFINITY, 1], of_control[_EARLY, 1])
            found[f"best / {POPULARITY} d=1, {control} control"] = best / of_control[POPULARITY, 1]
    return found


def _recalls(
    trace: RoutingTrace, max_tokens: int, seed: int, predictors: Sequence[str], distance: int
) -> dict[tuple[str, int], float]:
    learning, held_out = halves(trace, seed)
    figures = recall_figures(learning, first_requests(held_out, max_tokens // 2), predictors, distance)
    return {(figure.predictor, figure.distance): figure.recall for figure in figures}


def stall(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Exposed stall that prefetching saves in the simulator, on routing recorded from real text."""
    for build in BUILDS:
        trace = recorded_trace(build, amount, progress, FITTED)

        def of_seed(seed: int, build: Build = build, trace: RoutingTrace = trace) -> dict[tuple[float, str], float]:
            progress(f"{build.name}, seed {seed}")
            return stall_saved(trace, _BETAS, amount.of(_TOKENS, 120), seed)

        values = over_seeds(amount.seeds, of_seed)
        for beta in _BETAS:
            for (of_beta, name), of_name in values.items():
                if of_beta == beta:
                    yield _stall_figure(f"{build.name}, beta {beta:g}", name, of_name)


def stall_saved(
    trace: RoutingTrace, betas: Sequence[float], max_tokens: int, seed: int
) -> dict[tuple[float, str], float]:
    """Return by (beta, name), on held-out requests: stall saved, also by an oracle; bytes wasted; the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        learning, held_out = (first_requests(half, max_tokens // 2) for half in halves(routing, seed))
        oracle = None if control else (all_knowing(learning), all_knowing(held_out))
        for beta in betas:
            prefetching = _setup(beta)
            on_demand = simulate(learning, held_out, replace(prefetching, predictor=None))
            figure = StallFigure(on_demand, simulate(learning, held_out, prefetching))
            if oracle is None:
                found[beta, f"{control} control"] = figure.stall_saved
                continue
            found[beta, _SAVED] = figure.stall_saved
            found[beta, _WASTED] = figure.prefetching.wasted_share
            found[beta, _ORACLE] = StallFigure(on_demand, simulate(*oracle, prefetching)).stall_saved
    return found


def all_knowing(trace: RoutingTrace) -> RoutingTrace:
    """Return the trace with early gates that guess the very choices of later layers: the most they could say."""
    guesses = []
    for distance in range(1, 4):
        logits = np.full((len(trace.ids) - distance, trace.ids.shape[1], trace.num_experts), -_SURE, np.float16)
        np.put_along_axis(logits, trace.ids[distance:].astype(np.int64), np.float16(_SURE), axis=2)
        guesses.append(GateGuesses(Tap.EARLY, distance, logits))
    return replace(trace, guesses=tuple(guesses))


def _setup(beta: float) -> SimulationSetup:
    """Return the service's plan of prefetches: experts that the early gate expects."""
    link = link_for(beta, _EXPERT_BYTES, _TIMING)
    return SimulationSetup(_RESIDENCY, "lfru", link, _TIMING, _EXPERT_BYTES, _EARLY)


def _stall_figure(case: str, name: str, values: tuple[float, ...]) -> Figure:
    if name == _ORACLE:
        return Figure(f"{case}, {name}", _BASELINE, values, "%")
    limit = {_SAVED: at_least(0.40), _WASTED: at_most(0.25)}.get(name, within(0.06))
    baseline = "all bytes moved" if name == _WASTED else _BASELINE
    note = "simulated, gates fitted to other texts, predictions are free"
    return Figure(f"{case}, {name}", baseline, values, "%", limit, note=note)


def after_prefix(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Stall that the signature of a cached prefix, the experts it used, saves decode steps behind it, simulated."""
    builds = BUILDS[:1] + BUILDS[2:] if amount.quick else BUILDS
    for build in builds:
        trace = recorded_trace(build, amount, progress)
        for residency in _PREFIX_RESIDENCIES:
            for name, predictor in _PREFIX_PREDICTORS.items():
                for num_behind in _BEHIND:
                    case = f"{build.name}, {residency:.0%} resident, {name}, prefix + {num_behind}"
                    progress(case)
                    hits = PrefixHits(amount.of(64, 16), num_behind)
                    link = link_for(_PREFIX_BETA, _EXPERT_BYTES, _TIMING)
                    setup = SimulationSetup(residency, "lfru", link, _TIMING, _EXPERT_BYTES, predictor)
                    saved = partial(saved_by_signature, trace, setup, hits, amount.of(16, 6))
                    for figure, values in over_seeds(amount.seeds, saved).items():
                        yield _prefix_figure(f"{case}, {figure}", name, values)


def saved_by_signature(
    trace: RoutingTrace, setup: SimulationSetup, hits: PrefixHits, max_requests: int, seed: int
) -> dict[str, float]:
    """Return the share of the stall on held-out requests that the signature saves, and that another prefix's saves."""
    learning, held_out = halves(trace, seed)
    held_out = first_requests(held_out, max_requests * int(np.bincount(held_out.requests).max()))
    by_step = {signature: replay_hits(learning, held_out, setup, hits, signature).by_step for signature in Signature}
    # Without more than one token to compute, the first step is a decode step.
    steps = slice(None, -1) if hits.num_behind == 1 else slice(1, None)
    found = {}
    for signature, name in ((Signature.OWN, ""), (Signature.OTHER, ", shuffled control")):
        without, known = by_step[Signature.NONE][steps], by_step[signature][steps]
        found[_FIRST + name] = 1 - float(known[0] / without[0]) if without[0] else 0.0
        found[_EIGHT + name] = 1 - float(known.sum() / without.sum()) if without.any() else 0.0
    return found


def _prefix_figure(name: str, baseline: str, values: tuple[float, ...]) -> Figure:
    limit = at_most(0.06) if "control" in name else None
    note = f"simulated, beta {_PREFIX_BETA:g}, stall saved"
    return Figure(name, f"{baseline} without signature", values, "%", limit, note=note)


class Signature(Enum):
    """The signature that a request is admitted with."""

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
    """Replay held-out requests with cached prefixes one after the other, on slots and predictors warm from `learning`.

    A step of several tokens is taken to last as long as one of a single token: the least time to load ahead in.
    """
    policies = [POLICIES[setup.policy](learning.num_experts) for _ in learning.ids]
    control = control_of(learning, setup, policies)
    warmth = PrefixWarmth(control, learning.num_experts)
    ahead = loads_ahead(learning, setup, control, policies)
    simulation = Simulation(control, setup.expert_bytes, setup.link, setup.timing, ahead, warmth)
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
        first, last = hits.num_prefix + hits.num_behind, hits.num_tokens
        for step, computed in enumerate([rows[hits.num_prefix : first], *rows[first:last, None]]):
            before = simulation.exposed_stall
            simulation.step(held_out, computed)
            by_step[step] += simulation.exposed_stall - before
    return HitStall(len(rows_of), by_step)


def _signature(trace: RoutingTrace, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    """[L, E]: the rates as they come out of the cache."""
    counts = [np.bincount(ids[rows].reshape(-1), minlength=trace.num_experts) for ids in trace.ids]
    rates = np.stack(counts).astype(np.float32) / np.float32(len(rows))
    return decode_signature(encode_signature(rates), *rates.shape)


@dataclass(frozen=True, slots=True)
class StallFigure:
    """Two simulations of the same requests: one with demand loads alone, one with prefetches."""

    on_demand: SimulationResult
    prefetching: SimulationResult

    @property
    def stall_saved(self) -> float:
        """The share of the exposed stall that prefetching, with all it costs, takes away; 0 without stall."""
        stalled = self.on_demand.exposed_stall
        remaining = self.prefetching.exposed_stall + self.prefetching.prediction_seconds
        return 1 - remaining / stalled if stalled else 0.0
