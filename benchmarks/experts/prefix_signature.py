"""T5: what decode steps behind a cached prefix wait less, knowing which experts the prefix used. Simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from benchmarks.experts.controls import halves
from benchmarks.experts.figures import Figure, at_most, over_seeds
from benchmarks.experts.measuring import Amount
from benchmarks.experts.recording import BUILDS, recorded_trace
from experts.routing.traces import RoutingTrace
from experts.simulation.prefix_hits import PrefixHits, Signature, replay_hits
from experts.simulation.replay import LayerTiming
from experts.simulation.setup import SimulationSetup, link_for
from moeserve.simulation.runs import first_requests

_BETA = 1.0
_RESIDENCIES = (0.25, 0.5)
# None: demand loads, so that the signature is all there is.
_PREDICTORS = {"demand loads": None, "the gate": "gate-early"}
# Tokens that are computed behind the prefix before the first decode.
_BEHIND = (1, 8)
# Only their ratio counts: beta sets the link.
_TIMING = LayerTiming(attention=0.5e-3, experts=0.5e-3)
_EXPERT_BYTES = 2**20
_FIRST, _EIGHT = "first decode step", "first eight decode steps"
_NOTHING = at_most(0.06)


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    builds = BUILDS[:1] + BUILDS[2:] if amount.quick else BUILDS
    for build in builds:
        trace = recorded_trace(build, amount, progress)
        for residency in _RESIDENCIES:
            for name, predictor in _PREDICTORS.items():
                for num_behind in _BEHIND:
                    case = f"{build.name}, {residency:.0%} resident, {name}, prefix + {num_behind}"
                    progress(case)
                    hits = PrefixHits(amount.of(64, 16), num_behind)
                    setup = SimulationSetup(
                        residency, "lfru", link_for(_BETA, _EXPERT_BYTES, _TIMING), _TIMING, _EXPERT_BYTES, predictor
                    )
                    values = over_seeds(amount.seeds, partial(saved, trace, setup, hits, amount.of(16, 6)))
                    for figure, of_figure in values.items():
                        yield _figure(f"{case}, {figure}", name, of_figure)


def saved(
    trace: RoutingTrace, setup: SimulationSetup, hits: PrefixHits, max_requests: int, seed: int
) -> dict[str, float]:
    """On held-out requests: the share of the stall that the signature takes away, and what another prefix's does."""
    learning, held_out = halves(trace, seed)
    held_out = first_requests(held_out, max_requests * int(np.bincount(held_out.requests).max()))
    stall = {signature: replay_hits(learning, held_out, setup, hits, signature).by_step for signature in Signature}
    # Without more than one token to compute, the first step is a decode step.
    steps = slice(None, -1) if hits.num_behind == 1 else slice(1, None)
    found = {}
    for signature, name in ((Signature.OWN, ""), (Signature.OTHER, ", shuffled control")):
        without, known = stall[Signature.NONE][steps], stall[signature][steps]
        found[_FIRST + name] = 1 - float(known[0] / without[0]) if without[0] else 0.0
        found[_EIGHT + name] = 1 - float(known.sum() / without.sum()) if without.any() else 0.0
    return found


def _figure(name: str, baseline: str, values: tuple[float, ...]) -> Figure:
    limit = _NOTHING if "control" in name else None
    return Figure(
        "T5", name, f"{baseline} without signature", values, "%", limit, note=f"simulated, beta {_BETA:g}, stall saved"
    )
