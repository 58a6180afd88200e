"""T5: exposed stall that prefetching hides, in the simulator, on routing recorded from real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.experts.controls import halves, with_controls
from benchmarks.experts.figures import Figure, at_least, at_most, over_seeds, within
from benchmarks.experts.measuring import Amount
from benchmarks.experts.recording import BUILDS, FITTED, Build, recorded_trace
from experts.prediction.figures import StallFigure
from experts.prediction.predictor import Tap
from experts.prefetch.planning import PrefetchRules
from experts.routing.traces import GateGuesses, RoutingTrace
from experts.simulation.foretold import Foretold
from experts.simulation.replay import LayerTiming, SimulationResult
from experts.simulation.setup import SimulationSetup, link_for, simulate
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
# Two or three requests to learn from, and as many held out. The hundred simulations of a build so take two minutes.
_TOKENS = 512
_SURE = 20.0
_SAVED, _WASTED, _NOTHING = "stall saved", "bytes moved for nothing", within(0.06)


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    for build in BUILDS:
        trace = recorded_trace(build, amount, progress, FITTED)

        def of_seed(seed: int, build: Build = build, trace: RoutingTrace = trace) -> dict[tuple[float, str], float]:
            progress(f"{build.name}, seed {seed}")
            return saved(trace, _BETAS, amount.of(_TOKENS, 120), seed)

        values = over_seeds(amount.seeds, of_seed)
        for beta in _BETAS:
            for (of_beta, name), of_name in values.items():
                if of_beta == beta:
                    yield _figure(f"{build.name}, beta {beta:g}", name, of_name)


def saved(trace: RoutingTrace, betas: Sequence[float], max_tokens: int, seed: int) -> dict[tuple[float, str], float]:
    """By beta, on held-out requests: stall saved, bytes wasted, what an oracle saves by these plans, the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        learning, held_out = (first_requests(half, max_tokens // 2) for half in halves(routing, seed))
        requests = _Requests(learning, held_out)
        oracle = None if control else _Requests(all_knowing(learning), all_knowing(held_out))
        for beta in betas:
            on_demand = requests.on_demand(beta)
            figure = StallFigure(on_demand, requests.prefetching(beta))
            if oracle is None:
                found[beta, f"{control} control"] = figure.stall_saved
                continue
            found[beta, _SAVED] = figure.stall_saved
            found[beta, _WASTED] = figure.prefetching.wasted_share
            found[beta, "with an oracle for the gate"] = StallFigure(on_demand, oracle.prefetching(beta)).stall_saved
    return found


def all_knowing(trace: RoutingTrace) -> RoutingTrace:
    """The same trace with gates that guess what will be chosen: the most that any predictor could have said."""
    guesses = []
    for distance in range(1, 4):
        logits = np.full((len(trace.ids) - distance, trace.ids.shape[1], trace.num_experts), -_SURE, np.float16)
        np.put_along_axis(logits, trace.ids[distance:].astype(np.int64), np.float16(_SURE), axis=2)
        guesses += [GateGuesses(tap, distance, logits) for tap in Tap]
    return replace(trace, guesses=tuple(guesses))


class _Requests:
    """To learn from, and held out; what their gates say is computed once for all links."""

    def __init__(self, learning: RoutingTrace, held_out: RoutingTrace) -> None:
        self._learning = learning
        self._held_out = held_out
        self._foretold: dict[str, Foretold] = {}

    def on_demand(self, beta: float) -> SimulationResult:
        return simulate(self._learning, self._held_out, _setup(beta))

    def prefetching(self, beta: float) -> SimulationResult:
        choice, rules = _FAST if beta <= 1 else _SLOW
        if choice not in self._foretold:
            self._foretold[choice] = Foretold((self._learning, self._held_out), choice, rules.max_distance)
        setup = replace(_setup(beta), predictor=choice, rules=rules)
        return simulate(self._learning, self._held_out, setup, self._foretold[choice])


def _setup(beta: float) -> SimulationSetup:
    link = link_for(beta, _EXPERT_BYTES, _TIMING)
    return SimulationSetup(_RESIDENCY, "lfru", link, _TIMING, _EXPERT_BYTES)


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
