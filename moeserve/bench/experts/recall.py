"""T4: how much of what a layer needs is known one to three layers before, on real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from experts.prediction.figures import recall_figures
from experts.routing.traces import RoutingTrace
from moeserve.bench.experts.controls import halves, with_controls
from moeserve.bench.experts.figures import Figure, at_least, at_most, over_seeds
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.recording import BUILDS, recorded_trace
from moeserve.simulation.runs import first_requests

_POPULARITY, _AFFINITY, _GATE, _COMBINED = "popularity", "affinity", "gate-early", "gate-early+affinity"
_PREDICTORS = (_POPULARITY, _AFFINITY, _GATE, _COMBINED)
_RECALL_WANTED, _RATIO_WANTED = at_least(0.80), at_least(1.5)
# A predictor may be a little better than popularity by chance, and not more.
_CONTROL_WANTED = at_most(1.05)


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    builds = BUILDS[:1] + BUILDS[2:] if amount.quick else BUILDS
    for build in builds:
        trace = recorded_trace(build, amount, progress)
        progress(build.name)
        values = over_seeds(amount.seeds, partial(recalls, trace, amount.of(1000, 160)))
        for name, of_name in values.items():
            limit = {f"{_GATE} d=1": _RECALL_WANTED, f"{_AFFINITY} / {_POPULARITY} d=1": _RATIO_WANTED}.get(name)
            is_ratio = "/" in name
            if "control" in name:
                limit = _CONTROL_WANTED
            baseline = _POPULARITY if is_ratio else f"chance {build.top_k / build.experts:.3f}"
            yield Figure("T4", f"{build.name}, {name}", baseline, of_name, "x" if is_ratio else "", limit)


def recalls(trace: RoutingTrace, max_tokens: int, seed: int) -> dict[str, float]:
    """On held-out requests: recall of k by predictor and distance, affinity over popularity; both in the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        learning, held_out = (first_requests(half, max_tokens // 2) for half in halves(routing, seed))
        predictors, distance = ((_POPULARITY, _AFFINITY, _GATE), 1) if control else (_PREDICTORS, 3)
        figures = recall_figures(learning, held_out, predictors, distance)
        recall = {(figure.predictor, figure.distance): figure.recall for figure in figures}
        if control:
            best = max(recall[_AFFINITY, 1], recall[_GATE, 1])
            found[f"best / {_POPULARITY} d=1, {control} control"] = best / recall[_POPULARITY, 1]
        else:
            found |= {f"{predictor} d={ahead}": value for (predictor, ahead), value in recall.items()}
            found[f"{_AFFINITY} / {_POPULARITY} d=1"] = recall[_AFFINITY, 1] / recall[_POPULARITY, 1]
    return found
