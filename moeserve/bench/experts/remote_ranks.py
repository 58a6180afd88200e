"""T2: ranks other than its home that a token is sent to, with experts placed by co-activation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from experts.placement.figures import remote_ranks_figure
from experts.routing.synthetic import MIXTRAL_LIKE, SPARSE, SyntheticSpec, synthetic_trace
from experts.routing.traces import RoutingTrace
from moeserve.bench.experts.controls import halves, with_controls
from moeserve.bench.experts.figures import Figure, Limit, at_least, over_seeds, within
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.recording import BUILDS, recorded_trace

_NUM_RANKS = 4
_BASELINE = "better of contiguous and round-robin"
_LIMIT = at_least(0.15)
# Of what a placement fitted to chance may show on other requests.
_NOTHING = within(0.03)
_SPECS: dict[str, tuple[SyntheticSpec, int]] = {"24 x 64 experts, k=4": (SPARSE, 24), "32 x 8, k=2": (MIXTRAL_LIKE, 64)}


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    for name, (spec, num_requests) in _SPECS.items():
        progress(name)
        of_seed = partial(_of_synthetic, spec, amount.of(num_requests, 10))
        yield from _figures(f"synthetic {name}", over_seeds(amount.seeds, of_seed), _LIMIT)
    for build in BUILDS:
        if build.experts % _NUM_RANKS == 0:
            trace = recorded_trace(build, amount, progress)
            yield from _figures(build.name, over_seeds(amount.seeds, partial(saved, trace)), None)


def saved(trace: RoutingTrace, seed: int) -> dict[str, float]:
    """Share saved on held-out requests: homes in turn, homes by family, and what is left in the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        learning, held_out = halves(routing, seed)
        found[control or "homes in turn"] = remote_ranks_figure(learning, held_out, _NUM_RANKS).saved
        if not control and len(set(routing.families.tolist())) < len(set(routing.requests.tolist())):
            by_family = remote_ranks_figure(learning, held_out, _NUM_RANKS, by_family=True)
            found["homes by topic"] = by_family.saved
    return found


def _of_synthetic(spec: SyntheticSpec, num_requests: int, seed: int) -> dict[str, float]:
    return saved(synthetic_trace(spec, num_requests, 100, seed), seed)


def _figures(name: str, values: dict[str, tuple[float, ...]], limit: Limit | None) -> Iterator[Figure]:
    for variant, of_variant in values.items():
        is_control = variant in ("uniform", "shuffled")
        label = f"{variant} control" if is_control else variant
        yield Figure("T2", f"{name}, {label}", _BASELINE, of_variant, "%", _NOTHING if is_control else limit)
