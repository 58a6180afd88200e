"""T2: ranks other than its home that a token is sent to, with experts placed by co-activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean

from benchmarks.experts.controls import halves, with_controls
from benchmarks.experts.figures import Figure, at_least, within
from benchmarks.experts.measuring import Amount
from benchmarks.experts.placement_optimum import fewest_touched
from benchmarks.experts.recording import BUILDS, recorded_trace
from experts.placement.figures import RemoteRanksFigure, remote_ranks_figure, remote_ranks_of
from experts.routing.synthetic import MIXTRAL_LIKE, SPARSE, SyntheticSpec, synthetic_trace
from experts.routing.traces import RoutingTrace

_NUM_RANKS = 4
_BASELINE = "better of contiguous and round-robin"
_WANTED = at_least(0.15)
# Of what a placement fitted to chance may show on other requests.
_NOTHING = within(0.03)
_SPECS: dict[str, SyntheticSpec] = {"24 x 64 experts, k=4": SPARSE, "32 x 8, k=2": MIXTRAL_LIKE}
# Half of them, at 100 tokens each, are about as many as the statistics of a service remember.
_NUM_REQUESTS = 80
_SERVED = "homes in turn"
_AS_BUSY = "ranks as busy as in the plain placement"
_BY_TOPIC = "homes by topic, known when placing"
_HINDSIGHT = "fitted to the requests measured, as busy"
_OPTIMUM = "optimum for the requests measured, loads left aside"
# Not by topic: a service does not know when it places experts where requests will live.
_TARGETED = (_SERVED, _AS_BUSY)
_FEW_EXPERTS = 8


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    for name, spec in _SPECS.items():
        progress(name)
        found = [of_trace(synthetic_trace(spec, _NUM_REQUESTS, 100, seed), seed) for seed in amount.seeds]
        yield from _figures(f"synthetic {name}", found, is_target=True)
    for build in BUILDS:
        if build.experts % _NUM_RANKS == 0:
            trace = recorded_trace(build, amount, progress)
            yield from _figures(build.name, [of_trace(trace, seed) for seed in amount.seeds], is_target=False)


def of_trace(trace: RoutingTrace, seed: int) -> dict[str, RemoteRanksFigure]:
    """On held-out requests: what a service does, what it could do, and what is left of it in the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        figure = partial(remote_ranks_figure, *halves(routing, seed), _NUM_RANKS)
        found[f"{control} control" if control else _SERVED] = figure()
        if control != "uniform":
            found[f"{control} control, as busy" if control else _AS_BUSY] = figure(max_load=None)
        if not control and len(set(routing.families.tolist())) < len(set(routing.requests.tolist())):
            found[_BY_TOPIC] = figure(by_family=True)
    held_out = halves(trace, seed)[1]
    found[_HINDSIGHT] = remote_ranks_figure(held_out, held_out, _NUM_RANKS, max_load=None)
    if trace.num_experts <= _FEW_EXPERTS:
        best = fewest_touched(held_out.ids, trace.num_experts, _NUM_RANKS)
        found[_OPTIMUM] = remote_ranks_of(best, held_out)
    return found


def _figures(name: str, of_seeds: list[dict[str, RemoteRanksFigure]], *, is_target: bool) -> Iterator[Figure]:
    for variant in of_seeds[0]:
        found = [of_seed[variant] for of_seed in of_seeds]
        limit = _WANTED if is_target and variant in _TARGETED else None
        if "control" in variant:
            limit = _NOTHING
        before = fmean(figure.plain_balance for figure in found)
        after = fmean(figure.learnt_balance for figure in found)
        yield Figure(
            "T2",
            f"{name}, {variant}",
            _BASELINE,
            tuple(figure.saved for figure in found),
            "%",
            limit,
            note=f"balance of ranks {after:.2f}, was {before:.2f}",
        )
