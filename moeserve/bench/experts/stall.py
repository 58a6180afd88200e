"""T5: exposed stall that prefetching hides, in the simulator, on routing recorded from real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from experts.prediction.figures import StallFigure, stall_figure
from experts.prediction.predictor import Tap
from experts.prefetch.planning import PrefetchRules
from experts.routing.traces import GateGuesses, RoutingTrace
from experts.simulation.replay import LayerTiming
from experts.simulation.setup import SimulationSetup, link_for
from moeserve.bench.experts.controls import halves, with_controls
from moeserve.bench.experts.figures import Figure, at_least, at_most, over_seeds, within
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.recording import BUILDS, FITTED, recorded_trace
from moeserve.simulation.runs import first_requests

# Gates fitted to other texts. Where a load takes no longer than a layer, a late look is in time, and little that is not
# sure need be asked for before it; on a slower link it would only take back what was begun.
_FAST = "gate-early+gate-late", PrefetchRules(min_probability=0.55, margin=0.35, keep_probability=0.15)
_SLOW = "gate-early", PrefetchRules()
_BASELINE = "demand loads alone, LFRU"
_BETAS = (0.5, 1.0, 2.0)
_RESIDENCY = 0.5
# Only their ratio counts: beta sets the link.
_TIMING = LayerTiming(attention=0.5e-3, experts=0.5e-3)
_EXPERT_BYTES = 2**20
_SURE = 20.0
_SAVED, _WASTED, _NOTHING = "stall saved", "bytes moved for nothing", within(0.06)


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    for build in BUILDS:
        trace = recorded_trace(build, amount, progress, FITTED)
        for beta in _BETAS:
            progress(f"{build.name}, beta {beta:g}")
            values = over_seeds(amount.seeds, partial(saved, trace, beta, amount.of(1000, 120)))
            for name, of_name in values.items():
                yield _figure(f"{build.name}, beta {beta:g}", name, of_name)


def saved(trace: RoutingTrace, beta: float, max_tokens: int, seed: int) -> dict[str, float]:
    """On held-out requests: stall saved, wasted bytes, what an oracle saves by the same plans, and the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        learning, held_out = (first_requests(half, max_tokens // 2) for half in halves(routing, seed))
        figure = _simulated(learning, held_out, beta)
        if control:
            found[f"{control} control"] = figure.stall_saved
        else:
            found[_SAVED] = figure.stall_saved
            found[_WASTED] = figure.prefetching.wasted_share
            found["with an oracle for the gate"] = _simulated(
                all_knowing(learning), all_knowing(held_out), beta
            ).stall_saved
    return found


def all_knowing(trace: RoutingTrace) -> RoutingTrace:
    """The same trace with gates that guess what will be chosen: the most that any predictor could have said."""
    guesses = []
    for distance in range(1, 4):
        logits = np.full((len(trace.ids) - distance, trace.ids.shape[1], trace.num_experts), -_SURE, np.float16)
        np.put_along_axis(logits, trace.ids[distance:].astype(np.int64), np.float16(_SURE), axis=2)
        guesses += [GateGuesses(tap, distance, logits) for tap in Tap]
    return replace(trace, guesses=tuple(guesses))


def _simulated(learning: RoutingTrace, held_out: RoutingTrace, beta: float) -> StallFigure:
    link = link_for(beta, _EXPERT_BYTES, _TIMING)
    predictor, rules = _FAST if beta <= 1 else _SLOW
    setup = SimulationSetup(_RESIDENCY, "lfru", link, _TIMING, _EXPERT_BYTES, predictor=predictor, rules=rules)
    return stall_figure(learning, held_out, setup)


def _figure(case: str, name: str, values: tuple[float, ...]) -> Figure:
    match name:
        case "stall saved":
            limit = at_least(0.40)
        case "bytes moved for nothing":
            limit = at_most(0.25)
        case _ if "control" in name:
            limit = _NOTHING
        case _:
            return Figure("T5", f"{case}, {name}", _BASELINE, values, "%")
    baseline = "all bytes moved" if name == _WASTED else _BASELINE
    return Figure(
        "T5",
        f"{case}, {name}",
        baseline,
        values,
        "%",
        limit,
        note="simulated, gates fitted to other texts, predictions are free",
    )
