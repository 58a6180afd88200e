"""T5: exposed stall that prefetching hides, in the simulator, on routing recorded from real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from experts.routing_files import GateGuesses, RoutingTrace, Tap
from experts.simulator import LayerTiming, SimulationSetup, StallFigure, link_for, simulate
from moeserve.bench.experts.controls import halves, with_controls
from moeserve.bench.experts.figures import Figure, at_least, at_most, over_seeds, within
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.recording import BUILDS, FITTED, Build, recorded_trace
from moeserve.experts.simulate import first_requests

# Gates fitted to other texts, asked as `--expert-prefetch fitted` asks them.
_PREDICTOR = "gate-early"
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
        oracle = None if control else (all_knowing(learning), all_knowing(held_out))
        for beta in betas:
            on_demand = simulate(learning, held_out, _setup(beta))
            prefetching = replace(_setup(beta), predictor=_PREDICTOR)
            figure = StallFigure(on_demand, simulate(learning, held_out, prefetching))
            if oracle is None:
                found[beta, f"{control} control"] = figure.stall_saved
                continue
            found[beta, _SAVED] = figure.stall_saved
            found[beta, _WASTED] = figure.prefetching.wasted_share
            foreseen = StallFigure(on_demand, simulate(*oracle, prefetching))
            found[beta, "with an oracle for the gate"] = foreseen.stall_saved
    return found


def all_knowing(trace: RoutingTrace) -> RoutingTrace:
    """The same trace with gates that guess what will be chosen: the most that any predictor could have said."""
    guesses = []
    for distance in range(1, 4):
        logits = np.full((len(trace.ids) - distance, trace.ids.shape[1], trace.num_experts), -_SURE, np.float16)
        np.put_along_axis(logits, trace.ids[distance:].astype(np.int64), np.float16(_SURE), axis=2)
        guesses += [GateGuesses(tap, distance, logits) for tap in Tap]
    return replace(trace, guesses=tuple(guesses))


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
