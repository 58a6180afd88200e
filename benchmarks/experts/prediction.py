"""Experts known ahead: recall on recorded text, and the stall that prefetching saves, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.experts.figures import Amount, Figure, Progress, at_least, at_most, over_seeds, within
from benchmarks.experts.lab_traces import GateGuesses, LabTrace
from benchmarks.experts.simulator import (
    POPULARITY,
    LayerTiming,
    SimulationResult,
    SimulationSetup,
    link_for,
    recall_figures,
    simulate,
)
from benchmarks.experts.traces import (
    BOUND,
    BUILDS,
    FITTED,
    PLAIN,
    Build,
    drawn_requests,
    halves,
    perplexity,
    recorded_trace,
    with_controls,
)
from experts.routing.files import Tap

_AFFINITY, _EARLY, _SHARED = "affinity", "gate-early", "gate-shared"
_GATES = (_EARLY, _SHARED)
# By the fit of the trace's gates: the predictors, and up to which distance they are judged.
_PREDICTORS = {PLAIN: ((POPULARITY, _AFFINITY, *_GATES), 3), FITTED: (_GATES, 3), BOUND: (_GATES, 1)}
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
_SURE = 20.0
_SAVED, _WASTED, _ORACLE = "stall saved", "bytes moved for nothing", "with an oracle for the gate"


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


def recalls(traces: Mapping[str, LabTrace], max_tokens: int, seed: int) -> dict[str, float]:
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
    trace: LabTrace, max_tokens: int, seed: int, predictors: Sequence[str], distance: int
) -> dict[tuple[str, int], float]:
    learning, held_out = halves(trace, seed)
    figures = recall_figures(learning, drawn_requests(held_out, max_tokens // 2, seed), predictors, distance)
    return {(figure.predictor, figure.distance): figure.recall for figure in figures}


def stall(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Exposed stall that prefetching saves in the simulator, on routing recorded from real text."""
    for build in BUILDS:
        trace = recorded_trace(build, amount, progress, FITTED)

        def of_seed(seed: int, build: Build = build, trace: LabTrace = trace) -> dict[tuple[float, str], float]:
            progress(f"{build.name}, seed {seed}")
            return stall_saved(trace, _BETAS, amount.of(_TOKENS, 120), seed)

        values = over_seeds(amount.seeds, of_seed)
        for beta in _BETAS:
            for (of_beta, name), of_name in values.items():
                if of_beta == beta:
                    yield _stall_figure(f"{build.name}, beta {beta:g}", name, of_name)


def stall_saved(trace: LabTrace, betas: Sequence[float], max_tokens: int, seed: int) -> dict[tuple[float, str], float]:
    """Return by (beta, name), on held-out requests: stall saved, also by an oracle; bytes wasted; the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        learning, held_out = (drawn_requests(half, max_tokens // 2, seed) for half in halves(routing, seed))
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


def all_knowing(trace: LabTrace) -> LabTrace:
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
