"""T4: how much of what a layer needs is known one to three layers before, on real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from experts.routing_files import RoutingTrace
from experts.simulator import POPULARITY, recall_figures
from moeserve.bench.experts.controls import halves, with_controls
from moeserve.bench.experts.figures import Figure, at_least, at_most, over_seeds
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.recording import BOUND, BUILDS, FITTED, PLAIN, Build, perplexity, recorded_trace
from moeserve.experts.simulate import first_requests

_POPULARITY, _AFFINITY, _EARLY, _LATE = POPULARITY, "affinity", "gate-early", "gate-late"
_GATES = (_EARLY, _LATE)
# By the fit of the gates in the trace, "" for those of the model: who predicts, and how far ahead.
_PREDICTORS = {
    PLAIN: ((_POPULARITY, _AFFINITY, *_GATES), 3),
    FITTED: (_GATES, 3),
    BOUND: (_GATES, 1),
}
_RECALL_WANTED, _RATIO_WANTED = at_least(0.80), at_least(1.5)
# Tokens, of four or five requests: enough for all targets to be met or missed, and none to stay open.
_HELD_OUT = 500
# A predictor may be a little better than popularity by chance, and not more.
_CONTROL_WANTED = at_most(1.05)


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    for build in BUILDS:
        traces = {fit: recorded_trace(build, amount, progress, fit) for fit in _PREDICTORS}
        progress(build.name)
        note = f"perplexity {perplexity(build, amount, progress):.2f} on these documents"
        values = over_seeds(amount.seeds, partial(recalls, traces, 2 * amount.of(_HELD_OUT, 80)))
        for name, of_name in values.items():
            yield _figure(build, name, of_name, note)


def _figure(build: Build, name: str, values: tuple[float, ...], note: str) -> Figure:
    is_ratio = "/" in name
    limit = None
    if "control" in name:
        limit = _CONTROL_WANTED
    elif is_ratio:
        limit = _RATIO_WANTED
    elif name.endswith(" d=1") and name.split()[0] in _GATES and BOUND not in name:
        limit = _RECALL_WANTED
    baseline = _POPULARITY if is_ratio else f"chance {build.top_k / build.experts:.3f}"
    return Figure("T4", f"{build.name}, {name}", baseline, values, "x" if is_ratio else "", limit, note=note)


def recalls(traces: Mapping[str, RoutingTrace], max_tokens: int, seed: int) -> dict[str, float]:
    """On held-out requests: recall of k by predictor and distance, affinity over popularity; both in the controls.

    traces: of the same routing, by the fit of their gates.
    """
    found = {}
    for fit, trace in traces.items():
        predictors, distance = _PREDICTORS[fit]
        for (predictor, ahead), value in _recalls(trace, max_tokens, seed, predictors, distance).items():
            found[f"{predictor}{f' {fit}' * bool(fit)} d={ahead}"] = value
    found[f"{_AFFINITY} / {_POPULARITY} d=1"] = found[f"{_AFFINITY} d=1"] / found[f"{_POPULARITY} d=1"]
    for control, routing in with_controls(traces[PLAIN], seed):
        if control:
            recall = _recalls(routing, max_tokens, seed, (_POPULARITY, _AFFINITY, _EARLY), 1)
            best = max(recall[_AFFINITY, 1], recall[_EARLY, 1])
            found[f"best / {_POPULARITY} d=1, {control} control"] = best / recall[_POPULARITY, 1]
    return found


def _recalls(
    trace: RoutingTrace, max_tokens: int, seed: int, predictors: Sequence[str], distance: int
) -> dict[tuple[str, int], float]:
    learning, held_out = halves(trace, seed)
    figures = recall_figures(learning, first_requests(held_out, max_tokens // 2), predictors, distance)
    return {(figure.predictor, figure.distance): figure.recall for figure in figures}
