"""T3: ExFlow's metric in simulation, how near to the optimum it comes, and how long it takes to find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.experts.controls import halves, with_controls
from benchmarks.experts.figures import Figure, Limit, at_least, at_most, within
from benchmarks.experts.measuring import Amount
from benchmarks.experts.placement_optimum import most_staying
from benchmarks.experts.recording import BUILDS, recorded_trace
from experts.placement.affinity_placement import affinity_placement, staying
from experts.placement.figures import HopsFigure, hops_figure
from experts.routing.synthetic import MIXTRAL_LIKE, QWEN3_LIKE, synthetic_trace
from experts.routing.traces import RoutingTrace

_WANTED = {4: 0.25, 8: 0.18}
_NOTHING = within(0.03)
_BASELINE = "round-robin"
_BY_LOAD = "the same algorithm, knowing loads alone"
_OPTIMUM_RANKS = 4
_SKEWED = "loads stay skewed: busy experts of neighbouring layers on one rank"


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    count = amount.of(64, 16)
    for num_ranks, wanted in _WANTED.items():
        progress(f"{num_ranks} ranks")
        found = [of_trace(synthetic_trace(MIXTRAL_LIKE, count, 100, seed), num_ranks, seed) for seed in amount.seeds]
        yield from _figures(f"synthetic 32 x 8, R={num_ranks}", found, at_least(wanted))
    trace = recorded_trace(BUILDS[0], amount, progress)
    for num_ranks in _WANTED:
        found = [of_trace(trace, num_ranks, seed) for seed in amount.seeds]
        yield from _figures(f"{BUILDS[0].name}, R={num_ranks}", found, None)
    progress("optimum")
    yield _beside_the_optimum(amount)
    progress("solver")
    yield _solver_time(amount)


def of_trace(trace: RoutingTrace, num_ranks: int, seed: int) -> dict[str, HopsFigure]:
    """On held-out requests, by control."""
    return {control: hops_figure(*halves(routing, seed), num_ranks) for control, routing in with_controls(trace, seed)}


def _figures(name: str, of_seeds: list[dict[str, HopsFigure]], limit: Limit | None) -> Iterator[Figure]:
    """Shares of hops saved. Shuffling keeps loads skewed; against what loads alone save, its control vanishes too."""
    for control in of_seeds[0]:
        found = [of_seed[control] for of_seed in of_seeds]
        label = f"{name}, {control} control" if control else name
        note = _SKEWED if control == "shuffled" else ""
        saved = tuple(figure.saved for figure in found)
        yield Figure("T3", label, _BASELINE, saved, "%", _NOTHING if control else limit, note=note)
        beyond = tuple(figure.saved_beyond_load for figure in found)
        yield Figure("T3", label, _BY_LOAD, beyond, "%", _NOTHING if control else None)


def _beside_the_optimum(amount: Amount) -> Figure:
    excess = []
    for seed in amount.seeds:
        transitions = synthetic_trace(MIXTRAL_LIKE, amount.of(64, 16), 100, seed).transitions()
        transitions = transitions[: amount.of(len(transitions), 8)]
        most = most_staying(transitions, _OPTIMUM_RANKS)
        found = staying(affinity_placement(transitions, _OPTIMUM_RANKS).first_ranks(), transitions)
        excess.append((most - found) / (transitions.sum() - most))
    name = f"hops more than the optimum, E=8, R={_OPTIMUM_RANKS}"
    return Figure("T3", name, "exact optimum over all layers", tuple(excess), "%", at_most(0.02))


def _solver_time(amount: Amount) -> Figure:
    """Of one core; the machine's speed is in it."""
    spec = QWEN3_LIKE if not amount.quick else replace(QWEN3_LIKE, num_layers=12)
    seconds = []
    for seed in amount.seeds:
        transitions = synthetic_trace(spec, amount.of(32, 4), 100, seed).transitions()
        started = time.perf_counter()
        affinity_placement(transitions, 4)
        seconds.append(time.perf_counter() - started)
    name = f"time to solve {spec.num_layers} x 128, R=4"
    return Figure("T3", name, "", tuple(seconds), "s", None if amount.quick else at_most(60.0))
